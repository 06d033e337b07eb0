"""The simulated engine's latency model, on the virtual clock."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from engine_in_process import make_request
from engine_replies import ask
from rollout_cases import virtual

from asyncrl_servers.simulated import SimulatedEngine, SimulatedSpec

BASE: dict[str, Any] = {"name": "engine-0", "slots": 4, "max_length": 1000, "vocab_size": 50}
BASE |= {"decode_step_s": 0.01, "per_row_s": 0.0}
BASE |= {"mean_tokens": 1e9, "sigma": 0.0}


def make_engine(**overrides: Any) -> SimulatedEngine:
    return SimulatedEngine(SimulatedSpec(**{**BASE, **overrides}))


@pytest.mark.parametrize(
    ("spec", "requests", "times"),
    [
        ({}, [(100, 3), (50, 3), (50, 3), (50, 3), (50, 3)], [1.0, 0.5, 0.5, 0.5, 1.0]),
        ({"per_row_s": 0.01}, [(100, 3), (50, 3)], [50 * 0.03 + 50 * 0.02, 50 * 0.03]),
    ],
    ids=["slots bound them", "each makes the step longer"],
)
@virtual
async def test_requests_take_the_time_of_their_steps(
    spec: dict[str, float], requests: list[tuple[int, int]], times: list[float]
) -> None:
    engine = make_engine(**spec)

    async def end_s(index: int, max_tokens: int, prompt_length: int) -> float:
        (answer,) = ask(engine, [make_request(str(index), (1,) * prompt_length, max_tokens=max_tokens)])
        await asyncio.wrap_future(answer)
        return asyncio.get_running_loop().time()

    found = await asyncio.gather(*(end_s(index, *one) for index, one in enumerate(requests)))
    assert found == pytest.approx(times)


def test_the_simulated_server_needs_no_torch() -> None:
    code = "import asyncrl_servers.simulated, sys; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, cwd=Path(__file__).parent)
