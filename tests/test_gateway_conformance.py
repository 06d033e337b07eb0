"""The conformance command: a gateway passes, and a broken server fails with reasons."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
from aiohttp import web
from gateway_cases import ScriptedEngine, gateway_world, in_loop
from gateway_conformance import CHECKS, check_server, main, table

from asyncrl.messages.records import Completion, SamplingRequest


class Obedient(ScriptedEngine):
    """Calls the forced tool, writes JSON for a grammar, and returns the likeliest tokens."""

    def __init__(self) -> None:
        super().__init__(self._answer)

    def _answer(self, request: SamplingRequest) -> str:
        if self.tokenizer.decode(list(request.prompt_ids)).endswith('{"name": "'):
            return 'weather", "arguments": {"city": "Rome"}}\n</tool_call>'
        return '{"city": "Rome"}' if request.grammar else "Hello there."

    async def generate(self, request: SamplingRequest, **more: Any) -> Completion:
        completion = await super().generate(request, **more)
        tops = tuple((token, -1.0 - token) for token in range(request.top_logprobs))
        return replace(completion, top_logprobs=(tops,) * len(completion.token_ids) if tops else ())


@in_loop
async def test_gateway_passes_every_check() -> None:
    async with gateway_world(Obedient()) as world:
        results = await check_server(world.url + "/v1", world.session.key)
        assert [name for name, how, _ in results if how == "ok"] == list(CHECKS), table(results)
        assert world.session.num_calls < 40


@asynccontextmanager
async def broken_server() -> AsyncIterator[str]:
    """A server with only chats, for any key. It never stops, and fails on bad input."""

    async def models(request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "m"}]})

    async def chat(request: web.Request) -> web.StreamResponse:
        body = await request.json()
        message = {"role": "assistant", "content": "Hello there."}
        usage = {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 9}
        head = {"id": "x", "object": "chat.completion", "created": 0, "model": "m"}
        if body.get("stream"):
            chunk = {**head, "choices": [{"index": 0, "delta": message, "finish_reason": "stop"}]}
            text = f"data: {json.dumps(chunk | {'usage': usage})}\n\n"
            return web.Response(text=text, content_type="text/event-stream")
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        return web.json_response({**head, "choices": [choice], "usage": usage})

    app = web.Application()
    app.router.add_get("/v1/models", models)
    app.router.add_post("/v1/chat/completions", chat)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


@in_loop
async def test_broken_server_fails_with_reasons(capsys: pytest.CaptureFixture[str]) -> None:
    async with broken_server() as url, gateway_world(Obedient()) as world:
        statuses = [
            await asyncio.to_thread(main, each)
            for each in ([url, "any"], [world.url, world.session.key], [world.url, "wrong"])
        ]
    assert statuses == [1, 0, 1]
    output = capsys.readouterr()
    lines = output.out.replace("AssertionError: ", "").splitlines()
    rows = {name: how.strip() for name, _, how in (line.partition("  ") for line in lines[: len(CHECKS)])}
    for name, how in (
        ("errors: a wrong key is a 401 without the key", "not ok: it answers 200"),
        ("chat: answers with usage", "not ok: usage is not the sum"),
        ("chat: streams", "not ok: a stream does not end with [DONE]"),
        ("chat: n", "not ok: n=2 gives the choices [0]"),
        ("chat: equal seeds give equal answers", "ok"),
    ):
        assert rows[name].startswith(how), rows
    assert "nothing was checked: Error code: 401" in output.err
