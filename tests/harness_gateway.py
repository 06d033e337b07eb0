"""A gateway for the tests of harnesses and workers: real lease routes, and a chat endpoint that answers
without any model.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from asyncrl.agents.endpoint.answers import ApiError
from asyncrl.agents.endpoint.work_routes import RolloutQueue
from asyncrl.http import Caller
from asyncrl.messages.records import Outcome, Prompt, Work

WORKER_KEY = "worker-key"
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass
class TestGateway:
    __test__ = False
    queue: RolloutQueue
    url: str
    app: web.Application
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

    @web.middleware
    async def in_form(request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            return await handler(request)
        except ApiError as error:  # as the gateway's own middleware
            return error.response()

    app = web.Application(middlewares=[in_form])
    gateway = TestGateway(queue, "", app)

    async def chat(request: web.Request) -> web.Response:
        key = request.headers["Authorization"].removeprefix("Bearer ")
        body = await request.json()
        gateway.calls.append((key, body))
        message = {"role": "assistant", "content": f"answer {len(gateway.calls)}"}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        number = f"chatcmpl-{len(gateway.calls) - 1}"
        head = {"id": number, "object": "chat.completion", "created": 0, "model": "policy"}
        return web.json_response(head | {"choices": [choice]})

    app.add_routes([*queue.routes(), web.post("/v1/chat/completions", chat)])
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", port, reuse_address=True)
    await site.start()
    gateway.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield gateway
    finally:
        await queue.aclose()
        await runner.cleanup()


async def settled(condition: Callable[[], bool]) -> None:
    """Let the loop turn until `condition` holds; pytest's own limit ends a test that waits in vain."""
    while not condition():  # noqa: ASYNC110  a test asks many things, few of which have an event
        await asyncio.sleep(0.005)
