"""The simulated engine's latency model, on the virtual clock."""

from __future__ import annotations

import asyncio
import statistics
from pathlib import Path
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.messages.engine_calls import CommitRequest, GenerateRequest, GenerateResponse
from asyncrl.testing.virtual_time import run_virtual
from asyncrl_servers.simulated.latency_engine import SimulatedEngine
from asyncrl_servers.simulated.simulated_state import SimulatedSpec

BASE: dict[str, Any] = {
    "name": "engine-0",
    "slots": 4,
    "max_length": 1000,
    "vocab_size": 50,
    "decode_step_s": 0.01,
    "per_row_s": 0.0,
    "prefill_s_per_token": 0.0,
    "swap_s": 0.5,
    "mean_tokens": 1e9,
    "sigma": 0.0,
}


def make_engine(**overrides: Any) -> SimulatedEngine:
    return SimulatedEngine(SimulatedSpec(**{**BASE, **overrides}))


def make_request(request_id: str, max_tokens: int, **fields: Any) -> GenerateRequest:
    return GenerateRequest(
        **{"request_id": request_id, "prompt_ids": [1, 2, 3], "max_tokens": max_tokens, **fields}
    )


async def finish_time(engine: SimulatedEngine, request: GenerateRequest) -> float:
    await engine.submit(request)
    return asyncio.get_running_loop().time()


def stage(engine: SimulatedEngine, version: int) -> CommitRequest:
    engine._staged = (version, "digest")
    return CommitRequest(version=version, digest="digest")


def test_requests_that_run_together_take_as_long_as_the_longest_and_the_slots_bound_them() -> None:
    async def story() -> None:
        engine = make_engine()
        lengths = [100, 50, 50, 50, 50]
        times = await asyncio.gather(
            *(finish_time(engine, make_request(str(i), length)) for i, length in enumerate(lengths))
        )
        assert [round(time, 6) for time in times] == [1.0, 0.5, 0.5, 0.5, 1.0]

    run_virtual(story())


def test_each_running_request_makes_the_step_longer() -> None:
    async def story() -> None:
        engine = make_engine(per_row_s=0.01)
        first, second = await asyncio.gather(
            finish_time(engine, make_request("a", 100)),
            finish_time(engine, make_request("b", 50)),
        )
        assert round(second, 6) == round(50 * 0.03, 6)
        assert round(first, 6) == round(50 * 0.03 + 50 * 0.02, 6)

    run_virtual(story())


def test_prefill_stops_what_is_being_decoded() -> None:
    async def story() -> None:
        engine = make_engine(prefill_s_per_token=0.1)
        assert round(await finish_time(engine, make_request("a", 10, prompt_ids=[1] * 20)), 6) == 2.1

    run_virtual(story())


def test_a_commit_takes_its_time_out_of_decoding_and_marks_the_tokens_after_it() -> None:
    async def story() -> None:
        engine = make_engine()
        answer = engine.submit(make_request("a", 100))
        await asyncio.sleep(0.205)
        swapped = await engine.commit(stage(engine, 1).model_copy(update={"interrupt": "keep"}))
        assert (swapped.pause_s, swapped.num_interrupted) == (0.5, 1)
        assert round(asyncio.get_running_loop().time(), 6) == 0.705
        spans = [(span.start, span.end, span.version) for span in (await answer).version_spans]
        assert spans == [(0, 20, 0), (20, 100, 1)]
        assert round(asyncio.get_running_loop().time(), 6) == 1.5

    run_virtual(story())


def test_wait_lets_what_runs_come_to_its_end_and_holds_back_what_is_queued() -> None:
    async def story() -> None:
        engine = make_engine(slots=1)
        running = engine.submit(make_request("a", 100))
        queued = engine.submit(make_request("b", 10))
        await asyncio.sleep(0.1)
        swapped = engine.commit(stage(engine, 1).model_copy(update={"interrupt": "wait"}))
        assert [span.version for span in (await running).version_spans] == [0]
        assert not swapped.done()
        assert [span.version for span in (await queued).version_spans] == [1]
        assert round(asyncio.get_running_loop().time(), 6) == round(1.0 + 0.5 + 0.1, 6)

    run_virtual(story())


def test_lengths_are_lognormal_with_the_mean_of_the_spec() -> None:
    engine = make_engine(mean_tokens=64.0, sigma=1.0)
    lengths = [engine._completion_length(seed) for seed in range(20_000)]
    assert abs(statistics.mean(lengths) - 64) < 3
    assert abs(statistics.median(lengths) - 64 / 2.718281828**0.5) < 1.5


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_an_interrupted_request_ends_with_the_tokens_of_the_uninterrupted_one(data: st.DataObject) -> None:
    seeds = data.draw(st.lists(st.integers(0, 2**62), min_size=1, max_size=8, unique=True))
    pauses = data.draw(st.lists(st.floats(0.001, 0.4), min_size=1, max_size=6))

    async def whole(seed: int) -> GenerateResponse:
        return await make_engine(mean_tokens=30.0, sigma=1.0).submit(make_request("a", 100, seed=seed))

    async def in_segments(engine: SimulatedEngine, seed: int) -> tuple[list[int], str]:
        tokens: list[int] = []
        for _ in range(50):
            fields = {"prompt_ids": [1, 2, 3, *tokens], "num_resumed": len(tokens), "seed": seed}
            answer = await engine.submit(make_request(str(seed), 100 - len(tokens), **fields))
            tokens += answer.token_ids
            assert [i for span in answer.version_spans for i in range(span.start, span.end)] == list(
                range(len(answer.token_ids))
            )
            if answer.finish_reason != "abort":
                return tokens, answer.finish_reason
        raise AssertionError("50 segments, at most 6 commits")

    async def story() -> None:
        engine = make_engine(slots=3, mean_tokens=30.0, sigma=1.0, per_row_s=0.003, swap_s=0.01)
        async with asyncio.TaskGroup() as tasks:
            joined = [tasks.create_task(in_segments(engine, seed)) for seed in seeds]
            for version, pause in enumerate(pauses, start=1):
                await asyncio.sleep(pause)
                await engine.commit(stage(engine, version))
        for seed, task in zip(seeds, joined, strict=True):
            expected = await whole(seed)
            assert task.result() == (expected.token_ids, expected.finish_reason)

    run_virtual(story())


def test_many_thousand_requests_cost_no_work_for_each_token() -> None:
    async def story() -> None:
        engine = make_engine(slots=5_000, mean_tokens=500.0, sigma=0.0)
        answers = await asyncio.gather(
            *(engine.submit(make_request(str(index), 900, seed=index)) for index in range(5_000))
        )
        assert {len(answer.token_ids) for answer in answers} == {500}
        assert round(asyncio.get_running_loop().time(), 6) == 5.0

    run_virtual(story())


def test_the_simulated_server_needs_no_torch() -> None:
    import subprocess
    import sys

    code = "import asyncrl_servers.simulated.__main__, sys; assert 'torch' not in sys.modules and 'transformers' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, cwd=Path(__file__).parent)
