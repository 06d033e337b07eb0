"""Streams on all dialects: heads, pings, growing tool calls, and errors behind the
head.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from typing import Any

import pytest
from gateway_cases import (
    HI,
    ScriptedEngine,
    World,
    gateway_world,
    in_loop,
    num_calls,
    talking,
)
from gateway_wires import BASES

from asyncrl.agents.endpoint.sessions import OPEN_SHARE
from asyncrl.base.errors import EngineError
from asyncrl.messages.records import Outcome

SESSIONS = "asyncrl.agents.endpoint.sessions"
SCHEMA: dict[str, Any] = {"type": "object", "properties": {"a": {}}}
BODIES: dict[str, dict[str, Any]] = {
    "completions": {"prompt": "Hi"},
    "chat/completions": {
        "messages": HI,
        "tools": [
            {"type": "function", "function": {"name": "add", "parameters": SCHEMA}}
        ],
    },
    "responses": {
        "input": "Hi",
        "tools": [{"type": "function", "name": "add", "parameters": SCHEMA}],
    },
    "messages": {"messages": HI, "tools": [{"name": "add", "input_schema": SCHEMA}]},
}
dialects = pytest.mark.parametrize("path", BODIES)


async def events_of(world: World, path: str) -> AsyncIterator[bytes]:
    """Yield the data of a stream's events as they arrive."""
    body = BODIES[path] | {"stream": True}
    async with world.http.post(
        f"{world.url}/v1/{path}", json=body, headers=world.headers
    ) as response:
        assert (response.status, response.content_type) == (200, "text/event-stream")
        async for line in response.content:
            if line.startswith(b"data: {"):
                yield line[6:]


@dialects
@in_loop
async def test_held_streams_begin_and_ping(
    monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    monkeypatch.setattr("asyncrl.agents.endpoint.calls.PING_S", 0.01)
    gate = asyncio.Event()
    async with gateway_world(ScriptedEngine(gate=gate)) as world:
        world.session.slots = asyncio.Semaphore(0)
        events = []
        async for event in events_of(world, path):
            events.append(event)
            if len(events) == 10:
                assert not world.engine.requests, "the call waits in a queue"
                world.session.slots.release()
            if len(events) == 30:  # more than the half answer before a weight push
                gate.set()
        heads = [
            event.get("response") or event.get("message") or event
            for event in map(json.loads, events)
        ]
        assert len({head["id"] for head in heads if "id" in head}) == 1, (
            "pings belong to the answer"
        )


@dialects
@in_loop
async def test_streams_behind_many_waiting_ones_begin_at_once(
    monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    monkeypatch.setattr(f"{SESSIONS}.MAX_CONCURRENT_CALLS", 1)
    gate = asyncio.Event()
    async with gateway_world(ScriptedEngine(gate=gate)) as world:
        streams = [events_of(world, path) for _ in range(3 * OPEN_SHARE)]
        for stream in streams:
            await anext(stream)  # without its head, it would wait for the gate forever
        gate.set()
        for stream in streams:
            assert [event async for event in stream]
        assert world.session.num_completions == len(streams)


@in_loop
async def test_official_clients_accept_pings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asyncrl.agents.endpoint.calls.PING_S", 0.0)
    async with talking("One. Two.") as talk:
        async with talk.gpt.chat.completions.stream(model="m", messages=HI) as stream:
            assert (await stream.get_final_completion()).choices[
                0
            ].message.content == "One. Two."
        assert (await talk.respond(streamed=True)).output_text == "One. Two."
        assert (await talk.message(streamed=True)).content[0].text == "One. Two."


@pytest.mark.parametrize("path", [*BODIES][1:])
@in_loop
async def test_arguments_arrive_while_they_are_sampled(path: str) -> None:
    gate = asyncio.Event()
    made = [{"name": "add", "arguments": {"a": letter * 99}} for letter in "xy"]
    text = "\n".join(f"<tool_call>\n{json.dumps(each)}\n</tool_call>" for each in made)
    async with gateway_world(ScriptedEngine(lambda _: text, gate=gate)) as world:
        async for event in events_of(world, path):
            if b"xx" in event:  # otherwise the answer stops in its middle forever
                gate.set()
            is_whole = b"completed" in event
            assert is_whole or event.count(b'"arguments":') <= 1, "a delta has one call"
        assert gate.is_set()


@pytest.mark.parametrize("path", [*BODIES][1:])
@pytest.mark.parametrize("arguments", ['{"a": "cut', '{"a": wrong}}\n</tool_call>', ""])
@in_loop
async def test_stream_with_a_broken_call_continues(path: str, arguments: str) -> None:
    text = f'<tool_call>\n{{"name": "add", "arguments": {arguments}'
    async with gateway_world(ScriptedEngine(lambda _: text)) as world:
        events = b"".join([event async for event in events_of(world, path)])
        (call_id,) = set(re.findall(rb'"([A-Z0-9]{9})"', events))
        function = {"name": "add", "arguments": arguments.partition("\n")[0]}
        answer = {
            "role": "assistant",
            "tool_calls": [{"id": call_id.decode(), "function": function}],
        }
        body = BODIES["chat/completions"]
        status, _ = await world.post(body | {"messages": [*HI, answer, *HI]})
        assert (status, num_calls(world, "edited")) == (200, 0)
        (branch,) = world.session.rollout(0, Outcome(), 1.0)
        assert branch.num_sampled == 2 * len(text) + 2


@pytest.mark.parametrize(
    "error", [EngineError("engine-0", "it died"), ZeroDivisionError()]
)
@dialects
@in_loop
async def test_error_behind_the_head_is_an_event(path: str, error: Exception) -> None:
    class Lost(ScriptedEngine):
        async def generate(self, request: Any, **more: Any) -> Any:
            await super().generate(request, **more)
            raise error

    async with gateway_world(Lost()) as world:
        *_, last = [json.loads(event) async for event in events_of(world, path)]
        if not isinstance(error, EngineError):
            assert "Internal error" in last["error"]["message"]
            return
        world.session.end_nowait("its task was cancelled")
        async with world.http.post(
            f"{world.url}/s/{world.session.key}/v1/{path}", json={}
        ) as response:
            assert (response.status, response.headers["x-should-retry"]) == (
                503,
                "false",
            )
            for told in (last, await response.json()):
                assert "it died" in told["error"]["message"]


@pytest.mark.parametrize("path", BASES)
@in_loop
async def test_no_event_has_a_line_end_inside(path: str) -> None:
    text = "\x85\u2028\u2029\r"
    async with gateway_world(ScriptedEngine(lambda _: text)) as world:
        for stream in (False, True):
            async with world.http.post(
                world.url + path,
                headers=world.headers,
                json=BASES[path] | {"stream": stream},
            ) as response:
                raw = (await response.read()).decode()
            lines = raw.splitlines()
            assert all(line.startswith(("data: ", "event: ", "")) for line in lines)
            assert lines == raw.removesuffix("\n").split("\n")
            assert all(part in raw for part in (r"\u2028", r"\u2029", r"\u0085"))
