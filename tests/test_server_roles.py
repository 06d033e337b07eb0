"""A server that a run continues without."""

from __future__ import annotations

import asyncio

import job_runs
from fake_engine import FakeEngineServer
from fake_server import FakeProcess
from rollout_cases import virtual

from asyncrl.base.errors import ComponentError
from asyncrl.config import RunConfig
from asyncrl.engines.kinds import engine_role
from asyncrl.engines.role_client import RoleClient
from asyncrl.job.servers import RoleServer


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
