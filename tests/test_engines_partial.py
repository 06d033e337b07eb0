"""Requests that a killed run had begun: gone on with, they become what they would have been."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from engine_in_process import make_qwen3, running_engine
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.engines.own_server import EngineServer
from asyncrl.engines.pool import EnginePool, SegmentJoin
from asyncrl.messages.engine_calls import GenerateChunk, GenerateRequest, GenerateResponse, Span
from asyncrl.messages.records import Completion, PartialCompletion, SamplingRequest, VersionSpan
from asyncrl.testing.fake_engine import FakeEngineServer
from asyncrl.testing.virtual_time import run_virtual
from asyncrl_servers.embedded.decode_loop import Engine

DECODE_S = 0.01
PARTIAL = PartialCompletion((11, 12, 13), (-1.0, -2.0, -3.0), (VersionSpan(0, 2, 4), VersionSpan(2, 3, 5)), 2)


def make_request(
    *, max_tokens: int = 20, seed: int = 1, prompt_ids: tuple[int, ...] = (1, 2, 3)
) -> SamplingRequest:
    return SamplingRequest("g0/r0/t0/a0", prompt_ids, max_tokens, temperature=1.0, seed=seed)


def segment(reason: str, *tokens: int, version: int = 5) -> GenerateResponse:
    spans = [Span(start=0, end=len(tokens), version=version)] if tokens else []
    return GenerateResponse(
        request_id="g0/r0/t0/a0",
        token_ids=list(tokens),
        logprobs=[-0.5] * len(tokens),
        version_spans=spans,
        finish_reason=reason,
    )


# ---- the join


@pytest.mark.parametrize("max_tokens", [3, 2])
def test_a_partial_that_has_used_the_budget_or_more_of_a_larger_one_needs_no_server(max_tokens: int) -> None:
    join = SegmentJoin(make_request(max_tokens=max_tokens), PARTIAL)
    assert join.is_finished
    assert join.completion().finish_reason == "length"
    assert join.completion().token_ids == PARTIAL.token_ids

    async def story() -> None:
        pool = EnginePool([EngineServer(fake := FakeEngineServer())], slots=4)
        assert await pool.generate(make_request(max_tokens=max_tokens), partial=PARTIAL) == join.completion()
        assert fake.requests == []

    run_virtual(story())


def test_all_there_is_is_told_after_each_interruption_and_not_at_the_end() -> None:
    told: list[PartialCompletion] = []
    join = SegmentJoin(make_request(max_tokens=10), PARTIAL, told.append)
    join.add(segment("abort", 14))
    join.add(segment("abort"))
    join.add(segment("abort", 15, 16, version=6))
    join.add(segment("stop", 17))
    assert [partial.token_ids for partial in told] == [(11, 12, 13, 14), (11, 12, 13, 14, 15, 16)], (
        "an empty segment tells nothing new"
    )
    assert told[1].version_spans == (VersionSpan(0, 2, 4), VersionSpan(2, 4, 5), VersionSpan(4, 6, 6))
    assert [partial.num_interruptions for partial in told] == [4, 6]


def test_an_interruption_right_at_the_end_of_the_budget_is_the_end() -> None:
    told: list[PartialCompletion] = []
    join = SegmentJoin(make_request(max_tokens=4), PARTIAL, told.append)
    join.add(segment("abort", 14))
    assert (join.is_finished, told) == (True, [])


@given(
    max_tokens=st.integers(1, 30),
    seed=st.integers(0, 2**62),
    cuts=st.lists(st.integers(0, 30), max_size=5),
    end_fraction=st.sampled_from([0.0, 0.1]),
)
def test_killed_at_any_tokens_and_gone_on_with_the_request_is_the_uninterrupted_one(
    max_tokens: int, seed: int, cuts: list[int], end_fraction: float
) -> None:
    request = make_request(max_tokens=max_tokens, seed=seed)

    async def story() -> None:
        server = FakeEngineServer(end_fraction=end_fraction, decode_s=DECODE_S)
        whole = await EnginePool([EngineServer(server)], slots=4).generate(request)
        partial: PartialCompletion | None = None
        for cut in sorted(set(cuts)):
            if cut < len(whole.token_ids):
                spans = (VersionSpan(0, cut, 0, engine=0),) if cut else ()
                partial = PartialCompletion(whole.token_ids[:cut], whole.behaviour_logprobs[:cut], spans, 0)
            other = FakeEngineServer(end_fraction=end_fraction, decode_s=DECODE_S)
            resumed = await EnginePool([EngineServer(other)], slots=4).generate(request, partial=partial)
            assert resumed.token_ids == whole.token_ids
            assert resumed.behaviour_logprobs == whole.behaviour_logprobs
            assert resumed.version_spans == whole.version_spans
            assert resumed.finish_reason == whole.finish_reason
            assert other.tokens_generated == len(whole.token_ids) - (
                0 if partial is None else len(partial.token_ids)
            )

    run_virtual(story())


def test_the_journal_is_told_by_a_pool_whenever_a_publish_or_a_death_interrupts() -> None:
    async def story() -> None:
        fakes = [FakeEngineServer(f"engine-{index}", decode_s=DECODE_S) for index in range(2)]
        told: list[PartialCompletion] = []
        pool = EnginePool(
            [EngineServer(fake) for fake in fakes], slots=4, on_lost=lambda lost: pool.down_nowait(lost.room)
        )
        running = asyncio.create_task(pool.generate(make_request(), on_segment=told.append))
        await asyncio.sleep(5.5 * DECODE_S)
        await pool.servers[0].abort(None)
        await asyncio.sleep(3 * DECODE_S)
        fakes[0].die()
        whole = await running
        assert [partial.token_ids for partial in told] == [whole.token_ids[:5]], (
            "what a dead server had sampled is lost"
        )

    run_virtual(story())


# ---- the real engine


class InProcess:
    """An EngineClient over an engine of this process."""

    name, policy_version, num_commits = "engine-0", 0, 0

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    async def generate_segment(
        self, request: GenerateRequest, *, on_chunk: Callable[[GenerateChunk], None] | None = None
    ) -> GenerateResponse:
        assert on_chunk is None
        return await asyncio.wrap_future(self._engine.submit(request))

    async def abort(self, request_ids: list[str] | None, *, timeout_s: float | None = 10.0) -> list[str]:
        raise AssertionError("nobody aborts here")


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    folder: Path = make_qwen3(tmp_path_factory.mktemp("qwen3") / "model", num_hidden_layers=2)
    with running_engine(folder, slots=4, max_length=128) as running:
        yield running


def generate(
    engine: Engine, request: SamplingRequest, partial: PartialCompletion | None = None
) -> Completion:
    return asyncio.run(EnginePool([InProcess(engine)], slots=4).generate(request, partial=partial))


@pytest.mark.parametrize("cut", [1, 7, 16, 17, 29])
def test_the_embedded_engine_goes_on_with_the_very_tokens_and_logprobs(engine: Engine, cut: int) -> None:
    request = make_request(max_tokens=30, seed=1234, prompt_ids=tuple(range(1, 20)))
    whole = generate(engine, request)
    assert len(whole.token_ids) == 30
    partial = PartialCompletion(
        whole.token_ids[:cut], whole.behaviour_logprobs[:cut], (VersionSpan(0, cut, 0, engine=0),), 0
    )
    resumed = generate(engine, request, partial)
    assert resumed.token_ids == whole.token_ids
    assert resumed.behaviour_logprobs == whole.behaviour_logprobs, "bit for bit: the engine is deterministic"
    assert (resumed.version_spans, resumed.num_interruptions) == (whole.version_spans, 1)
