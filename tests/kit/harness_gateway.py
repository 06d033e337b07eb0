"""A gateway with a scripted engine and the routes of workers, for the tests of
harnesses.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
from gateway_cases import ScriptedEngine, gateway_world

from asyncrl.agents import Harness
from asyncrl.agents.command import MARK_ENV
from asyncrl.agents.endpoint.gateway import Gateway
from asyncrl.agents.work_queue import RolloutQueue
from asyncrl.agents.worker import Worker, WorkerSettings
from asyncrl.base.http import Caller
from asyncrl.config import GeneratorConfig
from asyncrl.messages.records import Outcome, Prompt, Work

WORKER_KEY = "worker-key"


@dataclass
class TestGateway:
    __test__ = False
    queue: RolloutQueue
    url: str
    host: Gateway
    engine: ScriptedEngine
    """Says `answer N` to the Nth call."""

    def worker(self, name: str = "w", key: str = WORKER_KEY) -> Caller:
        return Caller(name, self.url, key)

    async def run(self, number: int = 0, **changes: Any) -> Outcome:
        return await self.queue.run(make_work(number, **changes), started=lambda: None)


def make_work(
    number: int,
    *,
    answer: Any = "42",
    info: dict[str, Any] | None = None,
    timeout_s: float | None = None,
) -> Work:
    prompt = Prompt(
        f"p{number}",
        ({"role": "user", "content": f"What is {number}?"},),
        answer,
        info or {},
    )
    return Work(f"g{number}/r0", prompt, 0, 0, f"key-{number}", timeout_s)


@asynccontextmanager
async def open_gateway(
    *,
    lease_timeout_s: float = 60.0,
    port: int | None = None,
    give_answer: bool = True,
    outcomes: Any = "returned",
    num_harnesses: int = 1,
    **more: Any,
) -> AsyncIterator[TestGateway]:
    """`limits`: of the gateway."""
    limits = more.pop("limits", {})
    more |= {
        "lease_timeout_s": lease_timeout_s,
        "harnesses": [
            GeneratorConfig(remote=True, give_answer=give_answer, outcomes=outcomes)
        ]
        * num_harnesses,
        "model": "policy",
    }
    queue = RolloutQueue(
        worker_key=WORKER_KEY, task_seed=lambda work: 1000 + work.sample_index, **more
    )
    engine = ScriptedEngine()
    engine.answer = lambda _: f"answer {len(engine.requests)}"
    async with gateway_world(
        engine, extra_routes=queue.routes(), port=port, **limits
    ) as world:
        for number in range(4):
            about: Any = {
                "prompt_id": "p",
                "sample_index": 0,
                "attempt": 0,
                "user_key": f"key-{number}",
            }
            world.gateway.open_nowait("g0/r0", route_key=f"key-{number}", **about)
        try:
            yield TestGateway(queue, world.url, world.gateway, engine)
        finally:
            await queue.aclose()


def processes_of(token: str) -> list[int]:
    """Return running processes with this mark of a CommandHarness in their environment."""
    mark = f"{MARK_ENV}={token}".encode()
    pids = list[int]()
    for process in psutil.process_iter():
        with contextlib.suppress(OSError, psutil.Error):
            is_running = process.status() != psutil.STATUS_ZOMBIE
            if is_running and mark in Path(f"/proc/{process.pid}/environ").read_bytes():
                pids.append(process.pid)
    return pids


def need_bubblewrap() -> None:
    """Skip the test if bubblewrap does not work; fail it with
    ASYNCRL_REQUIRE_SANDBOX=1.
    """
    try:
        command = [
            "bwrap",
            "--unshare-all",
            "--ro-bind",
            "/",
            "/",
            "--proc",
            "/proc",
            "true",
        ]
        subprocess.run(command, capture_output=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        if os.environ.get("ASYNCRL_REQUIRE_SANDBOX") == "1":
            raise
        pytest.skip(f"{error}: apt-get install bubblewrap")


@asynccontextmanager
async def working(
    gateway: TestGateway, *harnesses: Harness, slots: int = 2, key: str = WORKER_KEY
) -> AsyncIterator[Worker]:
    caller = gateway.worker(key=key)
    worker = Worker(harnesses, caller, WorkerSettings(name="w", slots=slots))
    running = asyncio.ensure_future(worker.run())
    try:
        yield worker
    finally:
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running
        await caller.aclose()
