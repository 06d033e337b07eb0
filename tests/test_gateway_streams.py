"""Streams on all dialects: heads, pings, growing tool calls, and errors behind the head."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import pytest
from gateway_cases import HI, ScriptedEngine, Talk, World, gateway_world, in_loop, talking

from asyncrl.base.errors import EngineError

SESSIONS = "asyncrl.agents.endpoint.sessions"
SCHEMA: dict[str, Any] = {"type": "object", "properties": {"a": {}}}
CHAT_TOOLS: list[Any] = [{"type": "function", "function": {"name": "add", "parameters": SCHEMA}}]
TOOLS = {
    "chat/completions": CHAT_TOOLS,
    "responses": [{"type": "function", "name": "add", "parameters": SCHEMA}],
    "messages": [{"name": "add", "input_schema": SCHEMA}],
}
BODIES: dict[str, dict[str, Any]] = {
    "chat/completions": {"messages": HI},
    "completions": {"prompt": "Hi"},
    "responses": {"input": "Hi"},
    "messages": {"messages": HI},
}
dialects = pytest.mark.parametrize("path", BODIES)
callers = pytest.mark.parametrize("path", TOOLS)


async def events_of(world: World, path: str, **more: Any) -> AsyncIterator[dict[str, Any]]:
    """Yield the data of a stream's events as they arrive."""
    body = BODIES[path] | more | {"stream": True}
    async with world.http.post(f"{world.url}/v1/{path}", json=body, headers=world.headers) as response:
        assert (response.status, response.content_type) == (200, "text/event-stream")
        async for line in response.content:
            if line.startswith(b"data: {"):
                yield json.loads(line[6:])


def content_of(event: dict[str, Any]) -> Any:
    """Return what an event adds to an answer: a text, or {number of the call: arguments}."""
    match event:
        case {"choices": [{"text": text}]} | {"choices": [{"delta": {"content": text}}]}:
            return text
        case {"choices": [{"delta": {"tool_calls": calls}}]}:
            (call,) = calls  # never two in one chunk
            return {call["index"]: call["function"]["arguments"]}
        case {"type": "response.output_text.delta", "delta": text}:
            return text
        case {"type": "response.function_call_arguments.delta", "output_index": index, "delta": text}:
            return {index: text}
        case {"type": "content_block_delta", "delta": {"type": "text_delta", "text": text}}:
            return text
        case {"type": "content_block_delta", "index": index, "delta": {"partial_json": text}}:
            return {index: text}
    return ""


@dialects
@pytest.mark.parametrize("held_by", ["a queue", "a weight push"])
@in_loop
async def test_streams_begin_at_once_and_ping(
    monkeypatch: pytest.MonkeyPatch, path: str, held_by: str
) -> None:
    monkeypatch.setattr(f"{SESSIONS}.PING_S", 0.01)
    gate = asyncio.Event()
    async with gateway_world(ScriptedEngine(gate=gate)) as world, AsyncExitStack() as held:
        if held_by == "a queue":
            gate.set()
            for _ in range(16):
                await held.enter_async_context(world.session.slots)
        events, num_quiet = [], 0
        async for event in events_of(world, path):
            events.append(event)
            num_quiet = 0 if content_of(event) else num_quiet + 1
            if num_quiet == 5:  # the call is held until the client has seen pings
                gate.set()
                await held.aclose()
        assert "".join(map(content_of, events)) == "Hello there."
        ids = {
            event.get("id") or event.get("response", event.get("message", {})).get("id") for event in events
        }
        assert len(ids - {None}) == 1, "pings belong to the answer"


@in_loop
async def test_official_clients_accept_pings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{SESSIONS}.PING_S", 0.0)
    async with talking("One. Two.") as talk:
        async with talk.gpt.chat.completions.stream(model="m", messages=HI) as stream:
            assert (await stream.get_final_completion()).choices[0].message.content == "One. Two."
        assert (await talk.respond(streamed=True)).output_text == "One. Two."
        assert (await talk.message(streamed=True)).content[0].text == "One. Two."


CALLS = [{"a": 1, "b": [2, "ü"]}, {}]
CALL_TEXTS = [
    f'<tool_call>\n{{"name": "add", "arguments": {json.dumps(each)}}}\n</tool_call>' for each in CALLS
]


@callers
@in_loop
async def test_arguments_arrive_while_they_are_sampled(path: str) -> None:
    gate = asyncio.Event()
    text = "<tool_call>\n" + json.dumps({"name": "add", "arguments": {"a": "x" * 200}}) + "\n</tool_call>"
    async with gateway_world(ScriptedEngine(lambda _: text, gate=gate)) as world:
        arguments = ""
        async for event in events_of(world, path, tools=TOOLS[path]):
            if content := content_of(event):
                (piece,) = content.values()
                arguments += piece
            if "xxx" in arguments:  # otherwise the answer stops in its middle forever
                gate.set()
        assert json.loads(arguments) == {"a": "x" * 200}


async def continued(talk: Talk, path: str) -> list[str]:
    """Stream an answer by the vendor's client and send results; return the order of its blocks."""
    if path == "messages":
        answer = await talk.message(streamed=True, tools=TOOLS[path])
        uses = [block for block in answer.content if block.type == "tool_use"]
        assert [block.input for block in uses] == CALLS
        results = [{"type": "tool_result", "tool_use_id": block.id, "content": "3"} for block in uses]
        said: list[Any] = [
            {"role": "assistant", "content": answer.content},
            {"role": "user", "content": results},
        ]
        await talk.message([*HI, *said], tools=TOOLS[path])
        return [block.type for block in answer.content]
    answer = await talk.respond(streamed=True, tools=TOOLS[path])
    made = [item for item in answer.output if item.type == "function_call"]
    assert [json.loads(item.arguments) for item in made] == CALLS
    outputs = [{"type": "function_call_output", "call_id": item.call_id, "output": "3"} for item in made]
    items: Any = [item.to_dict() for item in answer.output]
    if path == "references":
        items = [{"type": "item_reference", "id": item["id"]} for item in items]
    await talk.respond([*HI, *items, *outputs], tools=TOOLS["responses"])
    return [item.type for item in answer.output]


@pytest.mark.parametrize("path", ["messages", "responses", "references"])
@in_loop
async def test_blocks_keep_the_order_of_the_answer(path: str) -> None:
    says = f"<think>\nHm.\n</think>\n\nFirst.\n{CALL_TEXTS[0]}\n{CALL_TEXTS[1]}\nThen.", "Three."
    TOOLS["references"] = TOOLS["responses"]
    async with talking(*says) as talk:
        kinds = await continued(talk, path)
        names = {"tool_use": "call", "function_call": "call", "message": "text"}
        names |= {"reasoning": "thought", "thinking": "thought"}
        assert [names.get(kind, kind) for kind in kinds] == ["thought", "text", "call", "call", "text"]
        assert talk.is_one_branch_of(*says)


class LostEngine(ScriptedEngine):
    async def generate(self, request: Any, **more: Any) -> Any:
        await super().generate(request, **more)
        raise EngineError("engine-0", "it died")


@dialects
@in_loop
async def test_lost_engine_is_an_error_event_then_503(path: str) -> None:
    async with gateway_world(LostEngine()) as world:
        *_, last = [event async for event in events_of(world, path)]
        assert "it died" in last["error"]["message"]
        world.session.end_nowait("its task was cancelled")
        for key in (world.session.key, "unknown"):
            url = f"{world.url}/s/{key}/v1/{path}"
            async with world.http.post(url, json=BODIES[path]) as response:
                assert (response.status, response.headers["x-should-retry"]) == (503, "false")
                assert "it died" in (await response.json())["error"]["message"]


@dialects
@in_loop
async def test_fault_in_a_stream_is_an_error_event(path: str, caplog: pytest.LogCaptureFixture) -> None:
    engine = LostEngine()
    engine.generate = lambda *_, **__: asyncio.sleep(0, 1)  # type: ignore[method-assign]
    async with gateway_world(engine) as world:
        *_, last = [event async for event in events_of(world, path)]
        assert "Internal error" in last["error"]["message"]
        assert world.gateway.stats().refused == {500: 1}
        assert "AttributeError" in caplog.text
