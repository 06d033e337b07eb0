"""Chunks on the client's side, on the virtual clock: whatever dies or interrupts, each token is told once and
stays.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.engines.own_server import EngineServer
from asyncrl.engines.pool import EnginePool, SegmentJoin
from asyncrl.errors import EngineError, EngineLost
from asyncrl.messages.engine_calls import GenerateChunk, GenerateRequest, GenerateResponse, Span
from asyncrl.messages.records import Completion, PartialCompletion, SamplingRequest, VersionSpan
from asyncrl.messages.trainer_calls import ExportResponse
from asyncrl.testing.fake_engine import FakeEngineServer
from asyncrl.testing.virtual_time import run_virtual

DECODE_S = 0.01


def make_request(name: str = "r0", *, max_tokens: int = 20, seed: int = 1) -> SamplingRequest:
    return SamplingRequest(name, (ord("p"), ord("q")), max_tokens, temperature=1.0, seed=seed)


def rest(reason: str, *tokens: int, version: int = 0) -> GenerateResponse:
    spans = [Span(start=0, end=len(tokens), version=version)] if tokens else []
    return GenerateResponse(
        request_id="r0",
        token_ids=list(tokens),
        logprobs=[-float(token) for token in tokens],
        version_spans=spans,
        finish_reason=reason,
    )


def chunk(*tokens: int, version: int = 0) -> GenerateChunk:
    return GenerateChunk(
        token_ids=list(tokens), logprobs=[-float(token) for token in tokens], version=version
    )


async def publish(server: EngineServer, version: int) -> None:
    await server.prepare(
        ExportResponse(version=version, path="fake/w0", digest="w0", num_tensors=1, num_bytes=1)
    )
    await server.commit(version, "w0", "abort")


# ---- the join


@given(
    versions=st.lists(st.integers(0, 3), min_size=1, max_size=40).map(sorted),
    cuts=st.lists(st.tuples(st.integers(1, 39), st.sampled_from(["chunk", "abort", "cut"])), max_size=12),
    budget_left=st.integers(0, 2),
)
def test_any_cuts_of_a_completion_join_to_it(
    versions: list[int], cuts: list[tuple[int, str]], budget_left: int
) -> None:
    tokens, told = list(range(len(versions))), []
    join = SegmentJoin(make_request(max_tokens=len(tokens) + budget_left), None, told.append)

    def pieces(start: int, end: int) -> list[GenerateChunk]:
        return [chunk(token, version=versions[token]) for token in tokens[start:end]]

    at, num_interruptions = 0, 0
    for where, kind in sorted(cuts):
        if not at <= where < len(tokens):
            continue
        request = join.next_request()
        assert request.prompt_ids == [*join.request.prompt_ids, *tokens[: len(join.token_ids)]]
        assert (request.num_resumed, request.max_tokens) == (len(join.token_ids), join.num_left)
        for piece in pieces(at, where):
            join.add_chunk(piece)
        if kind == "abort":
            join.add(rest("abort"))
            num_interruptions += 1
        elif kind == "cut":
            num_interruptions += len(join.token_ids) > join._num_told
            join.cut()
        at = where
        assert not join.is_finished
    for piece in pieces(at, len(tokens) - 1):
        join.add_chunk(piece)
    join.add(rest("stop", tokens[-1], version=versions[-1]))
    whole = join.completion()
    assert whole.token_ids == tuple(tokens)
    assert whole.behaviour_logprobs == tuple(-float(token) for token in tokens)
    assert [span.version for span in whole.version_spans for _ in range(span.start, span.end)] == versions
    assert len(whole.version_spans) == len(set(versions))
    assert whole.num_interruptions == num_interruptions
    assert [partial.token_ids for partial in told] == sorted(
        {tuple(tokens[: len(partial.token_ids)]) for partial in told}, key=len
    )


# ---- the pool


@given(
    seed=st.integers(0, 2**63 - 1),
    max_tokens=st.integers(1, 40),
    end_fraction=st.sampled_from([0.0, 0.1]),
    chunk_tokens=st.integers(1, 5),
    events=st.lists(
        st.tuples(st.integers(1, 45), st.integers(0, 1), st.sampled_from(["die", "abort", "publish", "up"])),
        max_size=8,
    ),
)
def test_random_deaths_publishes_and_aborts_leave_what_was_told_as_the_uninterrupted_completion(
    seed: int, max_tokens: int, end_fraction: float, chunk_tokens: int, events: list[tuple[int, int, str]]
) -> None:
    request = make_request(max_tokens=max_tokens, seed=seed)

    async def story() -> None:
        fakes = [
            FakeEngineServer(f"engine-{index}", decode_s=DECODE_S, end_fraction=end_fraction)
            for index in range(2)
        ]
        for fake in fakes:
            fake.chunk_tokens = chunk_tokens
        servers = [EngineServer(fake) for fake in fakes]
        pool = EnginePool(servers, slots=4, on_lost=lambda lost: pool.down_nowait(lost.room))
        told: list[int] = []
        segments: list[PartialCompletion] = []
        version = 0

        async def bring_up(index: int) -> None:
            if fakes[index].has_ended.is_set():
                fakes[index].restart()
                servers[index].cut_nowait()
                servers[index].renew_nowait()
                if version:
                    await publish(servers[index], version)
                pool.up_nowait(fakes[index].name)

        async with asyncio.TaskGroup() as tasks:
            joined = tasks.create_task(
                pool.generate(request, on_segment=segments.append, on_tokens=told.extend), name="request"
            )
            for after_steps, index, kind in sorted(events):
                await asyncio.sleep(
                    max(0.0, after_steps * DECODE_S - 0.005 - asyncio.get_running_loop().time())
                )
                is_up = not fakes[index].has_ended.is_set()
                if kind == "die":
                    fakes[index].die()
                    pool.down_nowait(fakes[index].name)
                elif kind == "abort" and is_up:
                    await servers[index].abort(None)
                elif kind == "up":
                    await bring_up(index)
                elif kind == "publish":
                    version += 1
                    for server, fake in zip(servers, fakes, strict=True):
                        if not fake.has_ended.is_set():
                            await publish(server, version)
            for index in range(2):
                await bring_up(index)
        completion = joined.result()
        alone = FakeEngineServer(decode_s=DECODE_S, end_fraction=end_fraction)
        expected = await EnginePool([EngineServer(alone)], slots=4).generate(request)
        assert told == list(completion.token_ids) == list(expected.token_ids)
        assert completion.behaviour_logprobs == expected.behaviour_logprobs
        assert completion.finish_reason == expected.finish_reason
        covered = [at for span in completion.version_spans for at in range(span.start, span.end)]
        assert covered == list(range(len(told)))
        assert all(
            partial.token_ids == completion.token_ids[: len(partial.token_ids)] for partial in segments
        )
        assert pool.stats().tokens == len(told)
        assert pool.stats().inflight == 0
        if chunk_tokens == 1:  # with chunks of one token, a death loses nothing that was sampled
            assert sum(fake.tokens_generated for fake in fakes) <= len(told) + sum(
                kind == "die" for _, _, kind in events
            )

    run_virtual(story())


def test_who_does_not_listen_gets_one_answer_and_no_stream() -> None:
    async def story() -> None:
        fake = FakeEngineServer(decode_s=DECODE_S)
        pool = EnginePool([EngineServer(fake)], slots=4)
        plain = await pool.generate(make_request())
        told: list[int] = []
        streamed = await pool.generate(make_request(), on_tokens=told.extend)
        assert plain == streamed
        assert [request.stream for request in fake.requests] == [False, True]
        partial = PartialCompletion(
            plain.token_ids[:5], plain.behaviour_logprobs[:5], (VersionSpan(0, 5, 0),), 0
        )
        again: list[int] = []
        assert (
            await pool.generate(make_request(), partial=partial, on_tokens=again.extend)
        ).token_ids == plain.token_ids
        assert again == told, "the tokens of an earlier process are told too"

    run_virtual(story())


def test_what_on_tokens_raises_ends_the_request_and_frees_its_slot() -> None:
    async def story() -> None:
        fake = FakeEngineServer(decode_s=DECODE_S)
        pool = EnginePool([EngineServer(fake)], slots=1)

        def broken(_: object) -> None:
            raise LookupError("the client's own fault")

        with pytest.raises(LookupError):
            await pool.generate(make_request(), on_tokens=broken)
        assert (fake.num_running, pool.stats().inflight) == (0, 0)

    run_virtual(story())


# ---- what cannot be


async def segment_of(fake: FakeEngineServer, *, confirmed: int = 0) -> Completion | GenerateResponse:
    request = GenerateRequest(request_id="r0", prompt_ids=[1, 2], max_tokens=6)
    return await EngineServer(fake, policy_version=confirmed).generate_segment(
        request, on_chunk=lambda _: None
    )


BAD_CHUNKS: dict[str, tuple[dict[str, Any], str]] = {
    "a logprob is missing": ({"logprobs": []}, "0 logprobs for 1 tokens"),
    "a logprob is above 0": ({"logprobs": [0.5]}, "logprob 0.5 at position 0"),
    "a logprob is no number": ({"logprobs": [float("nan")]}, "logprob nan"),
    "a token id is negative": ({"token_ids": [-1]}, "token id -1"),
    "the version was never offered": ({"version": 7}, "under version 7"),
    "it uses the whole budget": (
        {"token_ids": [97] * 6, "logprobs": [-1.0] * 6},
        "chunks of 6 tokens where 6 were asked for",
    ),
}


@pytest.mark.parametrize("case", BAD_CHUNKS)
def test_a_chunk_that_cannot_be_is_an_engine_error_that_says_why(case: str) -> None:
    changes, message = BAD_CHUNKS[case]

    async def story() -> None:
        fake = FakeEngineServer(decode_s=DECODE_S)
        fake.mangle_chunk = lambda chunk: chunk.model_construct(**{**chunk.model_dump(), **changes})
        with pytest.raises(EngineError, match=f"engine-0: answered request r0 with .*{message}") as caught:
            await segment_of(fake)
        assert not isinstance(caught.value, EngineLost)
        assert fake.num_running == 0

    run_virtual(story())


def test_a_chunk_older_than_what_the_server_had_confirmed_is_an_engine_error() -> None:
    async def story() -> None:
        with pytest.raises(EngineError, match=r"tokens \[0, 1\) under version 0; it had confirmed version 3"):
            await segment_of(FakeEngineServer(decode_s=DECODE_S), confirmed=3)

    run_virtual(story())


BAD_ENDS: dict[str, tuple[dict[str, Any], str]] = {
    "the whole is longer than its budget": (
        {"token_ids": [97] * 2, "logprobs": [-1.0] * 2},
        "7 tokens where 6 were asked for",
    ),
    "length comes too early": (
        {"token_ids": [], "logprobs": [], "version_spans": []},
        "finish_reason length after 5 of 6 tokens",
    ),
    "it stops without a token": (
        {"token_ids": [], "logprobs": [], "version_spans": [], "finish_reason": "stop"},
        "finish_reason stop without a token",
    ),
    "it is another one's": ({"request_id": "other"}, "the answer to other"),
    "its spans leave a token out": ({"version_spans": []}, "spans none over 1 tokens"),
}


@pytest.mark.parametrize("case", BAD_ENDS)
def test_chunks_and_last_line_together_must_be_an_answer_that_can_be(case: str) -> None:
    changes, message = BAD_ENDS[case]

    async def story() -> None:
        fake = FakeEngineServer(decode_s=DECODE_S)
        fake.mangle = lambda answer: answer.model_copy(update=changes)
        with pytest.raises(EngineError, match=message):
            await segment_of(fake)

    run_virtual(story())
