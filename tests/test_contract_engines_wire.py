"""Our own engine servers on the wire: the secret, their specs and their end."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from pathlib import Path

import pytest
from contract_servers import LONG, OURS, server_of, spec_of
from engine_contract import until
from engine_processes import SECRET, engine_process

from asyncrl.base.errors import EngineLost
from asyncrl.base.http import Caller, CallLost, CallRefused
from asyncrl.engines.engine import EngineServer
from asyncrl.messages import codec
from asyncrl.messages.engine_api import EngineHealth

# one process imports the modules that they fork
pytestmark = pytest.mark.xdist_group("forks")


@pytest.mark.parametrize("kind", OURS)
def test_server_needs_the_secret_and_ends_with_its_parent(
    kind: str, tmp_path: Path
) -> None:
    with engine_process(kind, spec_of(kind, tmp_path), tmp_path) as child:
        server = server_of(kind, child, tmp_path)

        async def story() -> None:
            async with aclosing(Caller("stranger", child.url, "a guess")) as stranger:
                with pytest.raises(CallRefused, match="answered 401"):
                    await stranger.get("/health", EngineHealth, timeout_s=60)
                with pytest.raises(CallLost, match="401"):
                    await stranger.connect("/link")
            async with aclosing(Caller(kind, child.url, SECRET)) as caller:
                async with aclosing(Caller("breaks", child.url, SECRET)) as breaks:
                    socket = await breaks.connect("/link")
                    asked = [
                        codec.Asked(n, server.request(max_tokens=LONG), n > 5)
                        for n in range(9)
                    ]
                    await socket.send(codec.submit_frame(asked))
                    await until(
                        EngineServer(caller),
                        lambda now: (now.num_running, now.num_queued) == (4, 5),
                    )
                await until(
                    EngineServer(caller),
                    lambda now: now.num_running + now.num_queued == 0,
                )
                await socket.close()
                engine = EngineServer(caller)
                task = asyncio.create_task(
                    engine.generate_segment(server.request(max_tokens=LONG))
                )
                await until(engine, lambda now: now.num_running == 1)
                assert child.process.stdin is not None
                child.process.stdin.close()
                with pytest.raises(EngineLost):
                    await task

        asyncio.run(story())
        assert child.process.wait(timeout=60) == 3
