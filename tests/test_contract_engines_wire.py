"""What our own engine servers say on the wire: statuses, the secret, specs, and their end. Behind an
EngineClient none of it shows.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from engine_contract import generate
from engine_kinds import LONG, OURS, Server, caller_of, server_of, spec_of
from engine_processes import SECRET, engine_process

from asyncrl.http import Caller, CallLost, CallRefused
from asyncrl.messages.base import ErrorBody, find_fatal
from asyncrl.messages.engine_calls import (
    AbortRequest,
    AbortResponse,
    EngineHealth,
)
from asyncrl.testing.fake_engine import FakeEngineServer
from asyncrl.testing.virtual_time import run_virtual

pytest_plugins = ["engine_under_test"]
of_ours = pytest.mark.parametrize("server", OURS, indirect=True)


def run(server: Server, story: Callable[[Caller], Awaitable[None]]) -> None:
    """Tell the story to a Caller of the server."""

    async def within() -> None:
        caller = caller_of(server)
        async with asyncio.timeout(120):
            try:
                await story(caller)
            finally:
                await abort_all(caller)
                await caller.aclose()

    (run_virtual if server.runner is None else server.runner.run)(within())


async def abort_all(caller: Caller) -> None:
    await caller.post("/abort", AbortRequest(), AbortResponse, timeout_s=60)


async def one_runs(caller: Caller) -> int:
    """Wait for a request that runs; returns the version that serves."""
    while (now := await caller.get("/health", EngineHealth, timeout_s=60)).num_running == 0:
        if isinstance(caller, FakeEngineServer):
            await asyncio.sleep(caller.decode_s / 2)
    return now.policy_version


async def refusal(status: int, call: Awaitable[object]) -> ErrorBody:
    with pytest.raises(CallRefused) as refused:
        await call
    assert refused.value.status == status
    return refused.value.body


@of_ours
def test_without_the_secret_nothing_is_answered(server: Server) -> None:
    async def story(_: Caller) -> None:
        stranger = Caller("stranger", server.child.url, "a guess")
        try:
            await refusal(401, generate(stranger, server.request()))
        finally:
            await stranger.aclose()

    run(server, story)


@pytest.mark.parametrize("kind", OURS)
def test_the_server_ends_when_its_parent_is_gone_whatever_runs(kind: str, tmp_path: Path) -> None:
    with engine_process(kind, spec_of(kind, tmp_path), tmp_path) as child:
        server = server_of(kind, child, tmp_path)

        async def story() -> None:
            caller = Caller(kind, child.url, SECRET)
            try:
                task = asyncio.create_task(generate(caller, server.request(max_tokens=LONG)))
                await one_runs(caller)
                assert child.process.stdin is not None
                child.process.stdin.close()
                with pytest.raises(CallLost):
                    await task
            finally:
                await caller.aclose()

        asyncio.run(story())
        assert child.process.wait(timeout=60) == 3


@pytest.mark.parametrize("kind", OURS)
def test_an_unknown_key_in_the_spec_ends_the_server_with_its_name(kind: str, tmp_path: Path) -> None:
    with engine_process(kind, spec_of(kind, tmp_path, sluts=3), tmp_path) as child:
        assert child.process.wait(timeout=60) == 1
        fatal = find_fatal(child.read_log())
        assert fatal is not None
        assert "sluts" in fatal.error
        assert json.loads((tmp_path / "spec.json").read_text())["sluts"] == 3
