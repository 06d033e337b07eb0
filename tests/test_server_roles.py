"""A server that a run continues without."""

from __future__ import annotations

import asyncio

from fake_engine import FakeEngineServer
from fake_server import FakeProcess
from rollout_cases import virtual

from asyncrl.base.errors import ComponentError
from asyncrl.engines.role_client import RoleClient
from asyncrl.job.roles import EVAL_ENGINE, ROLES
from asyncrl.job.servers import RoleServer


@virtual
async def test_run_continues_without_a_dispensable_server() -> None:
    fake = FakeEngineServer("extra-0")
    gone = list[ComponentError]()
    lost = RoleServer(
        ROLES[EVAL_ENGINE], FakeProcess(fake), RoleClient(fake), on_gone=gone.append
    )
    asyncio.get_running_loop().call_later(10.0, fake.die)
    await lost.watch(5.0)
    assert [error.component for error in gone] == ["extra-0"]
    assert lost.state == "gone"
