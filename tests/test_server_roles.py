"""A role of servers that no product code knows, in a real run."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import job_runs
import psutil
import pytest
from fake_engine import FakeEngineServer
from fake_server import FakeProcess
from pydantic import BaseModel
from rollout_cases import virtual

import asyncrl
from asyncrl.base.errors import ComponentError
from asyncrl.base.extensions import Extension, extensions
from asyncrl.config import RunConfig
from asyncrl.engines.kinds import Role, ServerMaker, engine_role
from asyncrl.engines.role_client import RoleClient
from asyncrl.job.check.config_check import check_lines
from asyncrl.job.roles import extra_servers
from asyncrl.job.servers import RoleServer
from asyncrl.launch.machine import single_node
from asyncrl.messages.records import Rollout
from asyncrl.observe.show import render_status


class Question(BaseModel):
    num_branches: int


class Count(BaseModel):
    num_calls: int


class CountingClient(RoleClient):
    async def annotate(self, rollout: Rollout, task: str) -> Rollout:
        await self.call("/count", Question(num_branches=len(rollout)), Count)
        return rollout


@virtual
async def test_run_continues_without_a_dispensable_server() -> None:
    fake = FakeEngineServer("extra-0")
    gone = list[ComponentError]()
    role = engine_role(RunConfig.model_validate(job_runs.CONFIG))
    lost = RoleServer(role, FakeProcess(fake), RoleClient(fake), on_gone=gone.append)
    asyncio.get_running_loop().call_later(10.0, fake.die)
    await lost.watch(5.0)
    assert [error.component for error in gone] == ["extra-0"]
    assert lost.state == "gone"


def counter(_: RunConfig) -> Iterator[Role]:
    """The roles of an extension."""
    yield Role(
        name="counter",
        maker=ServerMaker(
            "counting_server",
            lambda order: {"pids": str(order.run_dir.parent / "pids")},
            lambda order, caller: CountingClient(
                caller, places=2, on_lost=order.on_lost
            ),
        ),
        key="counter",
    )


def extend(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {**extensions(), "zz": Extension(about="", roles=f"{__name__}:counter")}
    monkeypatch.setattr("asyncrl.base.extensions.extensions", lambda: found)


def test_new_extension_moves_no_other_role(monkeypatch: pytest.MonkeyPatch) -> None:
    config = RunConfig.model_validate(job_runs.CONFIG)
    before = [*extra_servers(config)]
    extend(monkeypatch)
    assert [*extra_servers(config)] == [*before, "counter"]


@pytest.mark.slow
def test_a_new_role_is_one_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pids = tmp_path / "pids"
    extend(monkeypatch)
    monkeypatch.setenv("PYTHONPATH", job_runs.environment()["PYTHONPATH"])
    config: dict[str, Any] = job_runs.CONFIG | {
        "trainer": job_runs.CONFIG["trainer"] | {"num_steps": 2},
        "supervision": {"backoff_s": 0.1},
    }
    run_dir = tmp_path / "run"
    seen = list[str]()

    record = asyncrl.run(
        config,
        ["observe.console=none"],
        run_dir=run_dir,
        on_step=lambda step, metrics: seen.append(
            render_status(run_dir, is_verbose=True)
        ),
    )

    assert record.state == "done"
    assert [
        line
        for line in check_lines(RunConfig.model_validate(config), single_node())
        if "counter" in line
    ]
    assert len(seen) == 2
    assert all(re.search(r"servers +counter (up|restarting)", text) for text in seen), (
        seen
    )
    assert [what for what, _ in job_runs.events(run_dir) if "counter" in what] == [
        "counter lost",
        "counter up",
    ]
    trace = json.loads((run_dir / "trace.json").read_text())["traceEvents"]
    assert any("counter" in str(event.get("args")) for event in trace), "the restart"
    started = [int(pid) for pid in pids.read_text().split()]
    assert len(started) == 2
    assert not any(map(psutil.pid_exists, started)), "both have ended"
