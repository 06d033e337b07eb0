"""Servers on a device of the trainer: they leave it in the trainer's time slice, and come back
with the same bits.
"""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import job_runs
import pytest
from engine_processes import SECRET, EngineProcess, engine_process
from held_task import held_slice
from made_runs import write_colocated
from scoring_cases import PAIRS, make_decoder, spec_of
from tiny_model import make_tiny_model

from asyncrl.base.http import Caller
from asyncrl.config import ModelConfig
from asyncrl.engines.role_client import RoleClient
from asyncrl.extensions.scoring.reward_client import RewardModelClient
from asyncrl.extensions.scoring.reward_model_config import RewardModelConfig
from asyncrl.extensions.scoring.teacher import Teacher
from asyncrl.extensions.scoring.teacher_config import TeacherConfig
from asyncrl.launch.model_sizes import model_shape
from asyncrl.messages.engine_api import ScoreRequest, ScoreResponse

# one process imports the modules that they fork
pytestmark = [
    pytest.mark.extension("scoring"),
    pytest.mark.xdist_group("forks"),
]
SIZES = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 3}


def resident_bytes(server: EngineProcess) -> int:
    status = Path(f"/proc/{server.process.pid}/status").read_text(encoding="ascii")
    (line,) = (line for line in status.splitlines() if line.startswith("VmRSS:"))
    return int(line.split()[1]) * 1024


def reward_client(caller: Caller) -> RewardModelClient:
    return RewardModelClient(caller, RewardModelConfig(path="m"))


async def rewards(client: Any) -> list[float]:
    return [await client.score(*pair) for pair in PAIRS]


def teacher_client(caller: Caller) -> Teacher:
    return Teacher(caller, TeacherConfig(path="m"))


async def logprobs(client: Any) -> list[float]:
    request = ScoreRequest(token_ids=[*range(3, 50)], start=1)
    return (await client.call("/score", request, ScoreResponse)).logprobs


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["reward", "teacher"])
def test_memory_of_a_server_leaves_and_comes_back(kind: str, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    make: Callable[[Caller], RoleClient]
    ask: Callable[[Any], Awaitable[list[float]]]
    if kind == "reward":
        make_decoder(folder, None, **SIZES)
        module, make, ask = "scoring.reward_model", reward_client, rewards
        spec = spec_of(folder, aside_dir=str(tmp_path))
    else:
        make_tiny_model(folder, **SIZES)
        module, make, ask = "embedded", teacher_client, logprobs
        spec = {
            "name": "teacher",
            "model_path": str(folder),
            "slots": 1,
            "score_slots": 1,
            "max_length": 64,
            "device": "cpu",
            "aside_dir": str(tmp_path),
        }

    async def story(server: EngineProcess) -> None:
        caller = Caller(kind, server.url, SECRET)
        client = make(caller)
        before = await ask(client)
        # A call leaves pages in the allocator until the next sleep, so no call comes
        # between the two measurements.
        await client.sleep()
        await client.wake()
        here = resident_bytes(server)
        moved = await client.sleep()
        away = resident_bytes(server)
        assert (await client.health()).asleep
        assert here - away == pytest.approx(planned, rel=0.1)
        assert moved.num_bytes == pytest.approx(planned, rel=0.1)
        assert (await client.sleep()).num_bytes == 0
        waiting = asyncio.ensure_future(ask(client))
        await client.wake()
        back = resident_bytes(server)
        await client.wake()
        assert await waiting == before
        assert await ask(client) == before
        await caller.aclose()
        assert back - away == pytest.approx(planned, rel=0.1)

    planned = 4 * model_shape(ModelConfig(path=str(folder))).num_parameters
    with engine_process(module, spec, tmp_path / "server") as server:
        asyncio.run(story(server))


# ---- runs


def state_of(run_dir: Path, kind: str) -> tuple[str, str]:
    """Return the state of a server and of the lease."""
    try:
        status = json.loads((run_dir / "status.json").read_text())
        return status["servers"][kind], status["lease"]["state"]
    except (FileNotFoundError, KeyError, TypeError):
        return "", ""


def kill_in_both_slices(
    process: subprocess.Popen[str], run_dir: Path, kind: str
) -> None:
    """Kill a server while it sleeps in the trainer's time slice, and once at its work."""

    def lost(num: int) -> bool:
        names = [what for what, _ in job_runs.events(run_dir)]
        return names.count(f"{kind} lost") == num

    job_runs.wait_until(
        lambda: state_of(run_dir, kind) == ("asleep", "training"), process
    )
    (server,) = job_runs.children_of(process, kind)
    server.kill()
    job_runs.wait_until(
        lambda: f"slice, to start {kind}" in (run_dir / "status.json").read_text(),
        process,
    )
    job_runs.wait_until(lambda: lost(1), process)
    assert not job_runs.children_of(process, kind), (
        "it waits for the engines' time slice"
    )
    held_slice(run_dir).unlink()
    job_runs.wait_for_steps(run_dir, 2, process)
    (server,) = job_runs.children_of(process, kind)
    # Frozen, it lets its time slice end no more.
    server.send_signal(signal.SIGSTOP)
    job_runs.wait_until(
        lambda: state_of(run_dir, kind) == ("up", "generating") or lost(2), process
    )
    server.kill()
    job_runs.wait_until(lambda: lost(2), process)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["teacher", "reward"])
def test_colocated_run_trains_the_same_despite_kills(kind: str, tmp_path: Path) -> None:
    quiet, run_dir = tmp_path / "quiet" / "run", tmp_path / "colocated" / "run"
    stays = write_colocated(tmp_path / "quiet", kind, "cpu")
    ended = job_runs.run(stays, quiet)
    assert ended.returncode == 0, ended.stderr
    path = write_colocated(tmp_path / "colocated", kind)
    held_slice(run_dir).touch()
    process = job_runs.start(path, run_dir)
    kill_in_both_slices(process, run_dir, kind)
    ended = job_runs.ended(process, 240)
    assert ended.returncode == 0, ended.stderr
    names = ("reward/mean", "policy/kl_teacher", "policy/loss")
    curves = [
        [
            [step.get(name, 0.0) for name in names]
            for step in job_runs.read_lines(folder / "metrics.jsonl")
        ]
        for folder in (quiet, run_dir)
    ]
    assert len(curves[0]) == 6
    weights = [
        (folder / "final" / "model.safetensors").read_bytes()
        for folder in (quiet, run_dir)
    ]
    if kind == "teacher":
        assert curves[0] == curves[1]
        assert weights[0] == weights[1]
    else:
        # A score depends in its last bits on the texts that are read along.
        assert curves[1] == [pytest.approx(step, abs=1e-5) for step in curves[0]]
    spans = set[tuple[str, str]]()
    trace = json.loads((run_dir / "trace.json").read_text())["traceEvents"]
    for event in trace:
        spans.add((event.get("cat", ""), event["name"]))
    assert {(kind, "sleep"), (kind, "wake"), (kind, "score")} <= spans
    assert {("engine-0", "generate"), ("trainer", "to engines")} <= spans
    slices = [event for event in trace if event["name"] == "score"]
    assert len(slices) <= 2 * 7, "one span for each time slice"
