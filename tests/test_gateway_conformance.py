"""The conformance command: a gateway passes, a server that gets things wrong fails, and says what."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
from aiohttp import web
from conformance_checks import CHECKS
from gateway_cases import ScriptedEngine, gateway_world, in_loop
from gateway_conformance import check_server, is_fine, main, table

from asyncrl.messages.records import Completion, SamplingRequest


class Obedient(ScriptedEngine):
    """Does as it is told: calls the tool that its answer was begun with, writes JSON where a grammar asks for
    it, and tells the likeliest tokens.
    """

    def __init__(self) -> None:
        super().__init__(self._answer)

    def _answer(self, request: SamplingRequest) -> str:
        if self.tokenizer.decode(request.prompt_ids.tolist()).endswith('{"name": "'):
            return 'weather", "arguments": {"city": "Rome"}}\n</tool_call>'
        return '{"city": "Rome"}' if request.grammar else "Hello there."

    async def generate(self, request: SamplingRequest, **more: Any) -> Completion:
        completion = await super().generate(request, **more)
        tops = tuple((token, -1.0 - token) for token in range(request.top_logprobs))
        return replace(completion, top_logprobs=(tops,) * len(completion.token_ids) if tops else ())


@in_loop
async def test_a_gateway_does_everything() -> None:
    async with gateway_world(Obedient()) as world:
        results = await check_server(world.url + "/v1", world.session.key)
        assert is_fine(results), table(results)
        assert [name for name, how, _ in results if how == "ok"] == list(CHECKS)
        assert world.session.num_calls < 40, "as --help says"


@asynccontextmanager
async def broken_server() -> AsyncIterator[str]:
    """Chats alone, of any key; it never stops, streams without an end, and falls over bad input."""

    async def chat(request: web.Request) -> web.StreamResponse:
        body = await request.json()  # raises for what is no JSON: 500
        message = {"role": "assistant", "content": "Hello there."}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        usage = {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 9}
        head = {"id": "x", "object": "chat.completion", "created": 0, "model": "m"}
        if body.get("stream"):
            chunk = {**head, "choices": [{"index": 0, "delta": message, "finish_reason": None}]}
            text = f"data: {json.dumps(chunk)}\n\n"
            return web.Response(text=text, content_type="text/event-stream")
        return web.json_response({**head, "choices": [choice], "usage": usage})

    app = web.Application()
    app.router.add_post("/v1/chat/completions", chat)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


@in_loop
async def test_a_server_that_gets_things_wrong_is_told_what_and_what_it_lacks_is_not_offered() -> None:
    async with broken_server() as url:
        results = {name: (how, why) for name, how, why in await check_server(url, "any")}
    wrong = {name: why for name, (how, why) in results.items() if how == "not ok"}
    for name, why in (
        ("errors: a wrong key is a 401", "answers 200"),
        ("errors: bad input is a 4xx that says what", "500"),
        ("chat: answers, with usage", "not the sum"),
        ("chat: streams", "[DONE]"),
        ("chat: max_tokens", "max_tokens"),
        ("chat: stop texts are not shown", "stop text"),
        ("chat: n", "0 and 1"),
        ("chat: tool_choice required", "no call"),
    ):
        assert why in wrong[name], results
    assert results["chat: one seed, one answer"] == ("ok", "")
    for name in ("responses: answers, with usage", "messages: streams its blocks", "models: list and one"):
        assert results[name][0] == "not offered"


def test_the_command_prints_a_table_and_its_status_says_whether_all_is_well(
    capsys: pytest.CaptureFixture[str],
) -> None:
    async def ask() -> tuple[int, int]:
        async with broken_server() as bad, gateway_world(Obedient()) as world:
            good = await asyncio.to_thread(main, [world.url, world.session.key, "--model", "m"])
            return good, await asyncio.to_thread(main, [bad, "k", "--timeout", "20"])

    assert asyncio.run(ask()) == (0, 1)
    out = capsys.readouterr().out
    assert re.search(r"^chat: streams +ok$", out, re.M)
    assert re.search(r"^chat: streams +not ok: a stream does not end with \[DONE\]$", out, re.M)

    async def ask_in_vain() -> list[int]:
        async with (
            gateway_world(Obedient()) as world,
            gateway_world(Obedient(), max_prompt_tokens=8) as short,
        ):
            doomed = [
                ("http://127.0.0.1:1", "k"),
                ("7", "k"),
                (world.url, "k"),
                (short.url, short.session.key),
            ]
            return [await asyncio.to_thread(main, list(each)) for each in doomed]

    assert asyncio.run(ask_in_vain()) == [1] * 4
    said = capsys.readouterr().err.splitlines()
    for line, why in zip(
        said, ("no server at", "is no address", "not take this key", "no room"), strict=True
    ):
        assert re.match(f"nothing was checked: .*{why}", line), line
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert ended.value.code == 0
    assert "not offered   it refuses" in capsys.readouterr().out
