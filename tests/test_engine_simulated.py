"""The simulated engine's latency model, on the virtual clock."""

from __future__ import annotations

import asyncio
import statistics
from pathlib import Path
from typing import Any

from asyncrl.messages.engine_calls import CommitRequest, GenerateRequest, PrepareRequest
from asyncrl.testing.virtual_time import run_virtual
from asyncrl_servers.simulated.latency_engine import SimulatedEngine
from asyncrl_servers.simulated.simulated_state import SimulatedSpec
from asyncrl_servers.weight_state import Staged

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
    request = PrepareRequest(version=version, path="", digest="digest", num_tensors=0, num_bytes=0)
    engine.weights.staged = Staged(request)
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
            finish_time(engine, make_request("a", 100)), finish_time(engine, make_request("b", 50))
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


def test_lengths_are_lognormal_with_the_mean_of_the_spec() -> None:
    spec = SimulatedSpec(**{**BASE, "mean_tokens": 64.0, "sigma": 1.0})
    lengths = [spec.completion_length(seed) for seed in range(20_000)]
    assert abs(statistics.mean(lengths) - 64) < 3
    assert abs(statistics.median(lengths) - 64 / 2.718281828**0.5) < 1.5


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

    code = (
        "import asyncrl_servers.simulated.__main__, sys; assert 'torch' not in sys.modules and "
        "'transformers' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, cwd=Path(__file__).parent)
