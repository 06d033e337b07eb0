"""The gateway without a run: its schema, page, health, and connections of odd clients."""

from __future__ import annotations

import asyncio
import re
import socket
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from gateway_cases import (
    HI,
    ScriptedEngine,
    gateway_world,
    in_loop,
    make_gateway,
    until,
)
from gateway_wires import DIALECTS, GATEWAY, all_of, head, raw
from jsonschema import Draft202012Validator
from openapi_spec_validator import validate

from asyncrl.agents.endpoint.gateway import AppServer
from asyncrl.agents.endpoint.openapi import schema
from asyncrl.agents.work_queue import RolloutQueue
from asyncrl.base.errors import ComponentError

PARTS = [{"type": "text", "text": "Hi"}]
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
CALLED = [
    *HI,
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": PARTS},
]
EXAMPLES: dict[str, Any] = {
    "/v1/chat/completions": {
        "messages": CALLED,
        "tool_choice": "auto",
        "stop": ["x"],
        "max_tokens": 9,
    },
    "/v1/completions": {"prompt": "Hi"},
    "/v1/responses": {"input": "Hi", "instructions": "Be brief."},
    "/v1/messages": {"messages": HI, "max_tokens": 9},
    "/v1/messages/count_tokens": {"messages": HI},
    "/v1/models": None,
    "/v1/models/{model}": None,
    "/health": None,
    "/v1/outcome": {"reward": 1.0},
}


def served(routes: Sequence[Any]) -> Iterator[tuple[str, str]]:
    """Yield (path, method) of each route. A call's route answers other methods itself."""
    for route in routes:
        yield from served(getattr(route, "routes", None) or [])
        for method in getattr(route, "methods", None) or ["POST"]:
            yield route.path.replace(":path", ""), method.lower()


@in_loop
async def test_schema_describes_every_route_and_field() -> None:
    queue = RolloutQueue(
        worker_key="k", model="m", lease_timeout_s=60.0, task_seed=lambda work: 0
    )
    gateway = make_gateway(ScriptedEngine(), [], extra_routes=queue.routes())
    described = schema()
    validate(described)
    operations = {
        (path, method) for path, each in described["paths"].items() for method in each
    }
    routes = set(served(gateway.app.routes))
    assert operations == {
        each for each in routes if each[0].startswith(("/v1/", "/health"))
    }
    assert {
        (f"/s/{{key}}{path}", method)
        for path, method in operations
        if path != "/health"
    } <= routes
    assert described["paths"].keys() == EXAMPLES.keys()
    for dialect in DIALECTS:
        fields = described["components"]["schemas"][dialect.body.__name__]["properties"]
        assert fields.keys() == dialect.body.model_fields.keys()


def resolver(place: dict[str, Any]) -> Draft202012Validator:
    return Draft202012Validator(place | {"components": schema()["components"]})


@in_loop
async def test_requests_and_answers_have_the_described_form() -> None:
    queue = RolloutQueue(
        worker_key="k", model="m", lease_timeout_s=60.0, task_seed=lambda work: 0
    )
    async with gateway_world(extra_routes=queue.routes()) as world:
        queue.on_outcome(world.session.key, lambda outcome: None)
        for path, example in EXAMPLES.items():
            ((method, operation),) = schema()["paths"][path].items()
            if example is not None:
                resolver(
                    operation["requestBody"]["content"]["application/json"]["schema"]
                ).validate(example)
            for key, status in ((world.session.key, 200), ("wrong", 401)):
                url = world.url + path.replace("{model}", "policy")
                headers = {"x-api-key": key}
                async with world.http.request(
                    method, url, headers=headers, json=example
                ) as response:
                    assert response.status == (200 if path == "/health" else status), (
                        await response.text()
                    )
                    said: Any = operation["responses"][str(response.status)]
                    if "$ref" in said:
                        said = schema()["components"]["responses"][
                            said["$ref"].rsplit("/", 1)[1]
                        ]
                    resolver(said["content"]["application/json"]["schema"]).validate(
                        await response.json()
                    )
    await queue.aclose()


@in_loop
async def test_page_of_the_routes_needs_no_other_server() -> None:
    async with gateway_world() as world:
        async with world.http.get(f"{world.url}/docs") as response:
            page = await response.text()
        assert "//" not in re.sub(r"<!--.*?-->", "", page)
        for place in re.findall(r'(?:href|src)="([^"]*)"', page):
            async with world.http.get(f"{world.url}/{place}") as response:
                assert response.status == 200, place


@in_loop
async def test_models_have_the_lengths_of_the_run() -> None:
    async with (
        gateway_world() as world,
        world.http.get(f"{world.url}/v1/models/", headers=world.headers) as response,
    ):
        (model,) = (await response.json())["data"]
    lengths = [model[f"max_{name}"] for name in ("model_len", "input_tokens", "tokens")]
    assert lengths == [2400, 2000, 400]


@in_loop
async def test_health_states_why_the_run_is_ending() -> None:
    async with gateway_world(
        ScriptedEngine(error=ComponentError("engine-0", "it is gone"))
    ) as world:
        for status, said in ((200, "ok"), (503, "it is gone")):
            async with world.http.get(f"{world.url}/health") as response:
                assert (response.status, said in (await response.json())["status"]) == (
                    status,
                    True,
                )
            await world.ask()


@in_loop
async def test_new_connections_replace_those_that_wait_longest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(f"{GATEWAY}.MAX_CONNECTIONS", 3)
    monkeypatch.setattr(f"{GATEWAY}.READ_TIMEOUT_S", 1e6)  # none is closed for its age
    gate = asyncio.Event()
    async with gateway_world(ScriptedEngine(gate=gate)) as world:
        busy = asyncio.ensure_future(world.ask())
        await until(lambda: len(world.engine.requests) == 1)
        ask = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
        idle = await raw(world, ask)
        assert (await idle[0].readline()).startswith(b"HTTP/1.1 200")
        silent = await raw(world, b"POST /v1/")
        await until(lambda: len(world.gateway.listener.connections) == 3)
        newer = await raw(world, ask)
        assert await all_of(*silent) == b""
        assert (await newer[0].readline()).startswith(b"HTTP/1.1 200")
        newest = await raw(world, b"POST /v1/")
        assert b'{"status":"ok"}' in await all_of(*idle)
        for _, writer in (newer, newest):
            writer.close()
        gate.set()
        assert (await busy)[0] == 200


@pytest.mark.parametrize("key", ["right", "wrong"])
@in_loop
async def test_clients_that_close_get_the_answer_to_large_bodies(key: str) -> None:
    async with gateway_world() as world:
        key = world.session.key if key == "right" else key
        data = head(key, 2**25 + 1).replace(
            b"Host", b"Connection: close\r\nHost", 1
        ) + b" " * (2**25 + 1)
        answer = await all_of(*await raw(world, data))
        assert answer.startswith(
            b"HTTP/1.1 413" if key == world.session.key else b"HTTP/1.1 401"
        )
        assert b'"error":' in answer


@in_loop
async def test_clients_that_leave_a_stream_are_not_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200})
        scope["connection"].transport.abort()  # as a write does that fails

    server, listening = (
        AppServer(app, max_connections=9, idle_s=9.0),
        socket.create_server(("127.0.0.1", 0)),
    )
    await server.listen(listening)
    reader, writer = await asyncio.open_connection(*listening.getsockname())
    writer.write(head("key", 0))
    await all_of(reader, writer)
    await until(lambda: not server.connections)
    await server.aclose()
    assert caplog.text == ""
