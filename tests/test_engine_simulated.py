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

SPEC: dict[str, Any] = {"name": "engine-0", "slots": 4, "max_length": 1000, "vocab_size": 50}
SPEC |= {"decode_step_s": 0.01, "mean_tokens": 1e9, "sigma": 0.0}


@virtual
async def test_requests_take_the_time_of_their_steps() -> None:
    engine = SimulatedEngine(SimulatedSpec(**SPEC))

    async def end_s(max_tokens: int) -> float:
        await asyncio.wrap_future(ask(engine, [make_request(max_tokens=max_tokens)])[0])
        return asyncio.get_running_loop().time()

    found = await asyncio.gather(*map(end_s, (100, 50, 50, 50, 50)))
    assert found == pytest.approx([1.0, 0.5, 0.5, 0.5, 1.0]), "the last one waits for a slot"


def test_the_simulated_server_needs_no_torch() -> None:
    code = "import asyncrl_servers.simulated, sys; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, cwd=Path(__file__).parent)
