"""A gateway for the tests of harnesses and workers: real lease routes, and a chat endpoint that answers
without any model.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest
from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from asyncrl.agents import Harness
from asyncrl.agents.command import MARK_ENV
from asyncrl.agents.endpoint.listener import AppServer
from asyncrl.agents.endpoint.requests import ApiError
from asyncrl.agents.endpoint.work_queue import RolloutQueue
from asyncrl.agents.sandbox import TRIAL
from asyncrl.agents.worker import Worker
from asyncrl.base.http import Caller, Refused
from asyncrl.messages.records import Outcome, Prompt, Work

WORKER_KEY = "worker-key"


@dataclass
class TestGateway:
    __test__ = False
    queue: RolloutQueue
    url: str
    app: FastAPI
    calls: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    """(bearer token, body) of each chat call."""

    def worker(self, name: str = "w", key: str = WORKER_KEY) -> Caller:
        return Caller(name, self.url, key)

    async def run(self, number: int = 0, **changes: Any) -> Outcome:
        return await self.queue.run(make_work(number, **changes), started=lambda: None)


def make_work(
    number: int, *, answer: Any = "42", info: dict[str, Any] | None = None, timeout_s: float | None = None
) -> Work:
    prompt = Prompt(f"p{number}", ({"role": "user", "content": f"What is {number}?"},), answer, info or {})
    return Work(f"g{number}/r0", prompt, 0, 0, f"key-{number}", timeout_s)


@asynccontextmanager
async def open_gateway(
    *, lease_timeout_s: float = 60.0, port: int = 0, give_answer: bool = True, **more: Any
) -> AsyncIterator[TestGateway]:
    more |= {"lease_timeout_s": lease_timeout_s, "give_answer": give_answer, "model": "policy"}
    queue = RolloutQueue(worker_key=WORKER_KEY, task_seed=lambda work: 1000 + work.sample_index, **more)

    async def refused(request: Request, error: Any) -> Response:  # as the gateway's own handler
        is_workers = isinstance(error, Refused)
        body = error.body.model_dump_json() if is_workers else error.body()
        return Response(body, error.status, media_type="application/json")

    app = FastAPI()
    app.add_exception_handler(ApiError, refused)
    app.add_exception_handler(Refused, refused)
    gateway = TestGateway(queue, "", app)

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> JSONResponse:
        key = request.headers["Authorization"].removeprefix("Bearer ")
        body = await request.json()
        gateway.calls.append((key, body))
        message = {"role": "assistant", "content": f"answer {len(gateway.calls)}"}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        number = f"chatcmpl-{len(gateway.calls) - 1}"
        head = {"id": number, "object": "chat.completion", "created": 0, "model": "policy"}
        return JSONResponse(head | {"choices": [choice]})

    app.router.routes += queue.routes()
    listener, listening = (
        AppServer(app, max_connections=1024, idle_s=30.0),
        socket.create_server(("127.0.0.1", port)),
    )
    await listener.listen(listening)
    gateway.url = f"http://127.0.0.1:{listening.getsockname()[1]}"
    try:
        yield gateway
    finally:
        await queue.aclose()
        await listener.aclose()


async def settled(condition: Callable[[], bool]) -> None:
    """Let the loop turn until `condition` holds; pytest's own limit ends a test that waits in vain."""
    while not condition():  # noqa: ASYNC110  a test asks many things, few of which have an event
        await asyncio.sleep(0.005)


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
    """Skip the test where it does not work; fail it with ASYNCRL_REQUIRE_SANDBOX=1."""
    try:
        subprocess.run(TRIAL, capture_output=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        if os.environ.get("ASYNCRL_REQUIRE_SANDBOX") == "1":
            raise
        pytest.skip(f"{error}: apt-get install bubblewrap")


@asynccontextmanager
async def working(
    gateway: TestGateway, harness: Harness, *, slots: int = 2, key: str = WORKER_KEY
) -> AsyncIterator[Worker]:
    caller = gateway.worker(key=key)
    worker = Worker(harness, caller, name="w", slots=slots)
    running = asyncio.ensure_future(worker.run())
    try:
        yield worker
    finally:
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running
        await caller.aclose()
