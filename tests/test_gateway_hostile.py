"""Clients that send invalid, oversized, slow or too many requests."""

from __future__ import annotations

import asyncio
import gzip
import json
import threading
from collections.abc import AsyncIterator
from typing import Any

import pytest
from gateway_cases import (
    ByteTokenizer,
    ScriptedEngine,
    gateway_world,
    in_loop,
    until,
)
from gateway_wires import GATEWAY, all_of, head, raw

from asyncrl.agents.endpoint.gateway import MAX_HEAD
from asyncrl.agents.endpoint.session import LONG_TEXT
from asyncrl.agents.work_queue import RolloutQueue
from asyncrl.messages.records import Outcome


@in_loop
async def test_far_too_long_prompts_are_not_tokenized(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with gateway_world() as world:
        with monkeypatch.context() as patched:
            patched.delattr(ByteTokenizer, "encode")
            for path, body in (
                (
                    "/v1/chat/completions",
                    {"messages": [{"role": "user", "content": "hello " * 50_000}]},
                ),
                ("/v1/completions", {"prompt": "x" * 200_000}),
            ):
                status, answer = await world.post(body, path=path)
                assert (status, answer["error"]["code"]) == (
                    400,
                    "context_length_exceeded",
                )
        status, answer = await world.ask("x" * 2001)
        assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")
        assert "rollout.max_prompt_tokens=2000" in answer["error"]["message"]


@in_loop
async def test_wrong_requests_get_errors_without_the_key(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def chunks() -> AsyncIterator[bytes]:
        for _ in range(4):
            yield b" " * 2**10

    monkeypatch.setattr(f"{GATEWAY}.MAX_BODY_BYTES", 2**11)
    async with gateway_world() as world:
        chat = "/v1/chat/completions"
        key = world.headers
        no_key = {"Authorization": "Bearer "}
        basic = {"Authorization": f"Basic {world.session.key}"}
        for method, path, headers, data, status, code in (
            ("GET", chat, key, None, 405, None),
            ("POST", f"/s/{world.session.key}/v2/x", {}, b"", 404, None),
            ("POST", chat, no_key, b"{}", 401, "invalid_api_key"),
            ("POST", chat, basic, b"{}", 401, "invalid_api_key"),
            ("POST", chat, key, b" " * 2**12, 413, "context_length_exceeded"),
            ("POST", chat, key, chunks(), 413, "context_length_exceeded"),
            ("POST", "/v1/messages/count_tokens", key, b" " * 2**12, 413, None),
            (
                "POST",
                f"/s/{world.session.key}/v1/messages",
                {},
                b" " * 2**12,
                413,
                None,
            ),
        ):
            async with world.http.request(
                method, world.url + path, headers=headers, data=data
            ) as response:
                assert (
                    response.status,
                    (await response.json())["error"].get("code"),
                ) == (status, code)
                assert world.session.key not in await response.text()


@in_loop
async def test_malformed_and_slow_requests_are_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(f"{GATEWAY}.READ_TIMEOUT_S", 1.5)
    async with gateway_world() as world:
        key = world.session.key
        answer = await all_of(*await raw(world, head(key + "\0", 2) + b"{}"))
        assert (b" 400 Bad Request" in answer[:30], key.encode() in answer) == (
            True,
            False,
        )
        silent = [
            await raw(world, data)
            for data in (b"", b"POST /v1/chat/comp", head(key, 10)[:-2])
        ]
        assert [await all_of(*each) for each in silent] == [b"", b"", b""]
        answer = await all_of(*await raw(world, head(key, 500) + b'{"messages":'))
        assert answer.startswith(b"HTTP/1.1 408")


@in_loop
async def test_endless_head_is_refused() -> None:
    async with gateway_world() as world:
        line = f"X-More: {'x' * 1000}\r\n".encode()
        head_without_end = b"POST /v1/chat/completions HTTP/1.1\r\n" + line * (
            MAX_HEAD // len(line) + 1
        )
        assert b"head is too long" in await all_of(*await raw(world, head_without_end))


@in_loop
async def test_every_route_checks_the_key_before_the_body() -> None:
    queue = RolloutQueue(
        worker_key="k", model="m", lease_timeout_s=60.0, task_seed=lambda work: 0
    )
    async with gateway_world(extra_routes=queue.routes()) as world:
        paths = [route.path for route in queue.routes()] + [
            "/v1/chat/completions",
            "/v1/completions",
        ]
        for path in [*paths, "/s/{key}/v1/chat/completions"]:
            # and not a byte of the body
            data = head("wrong", 10, path.replace("{key}", "wrong"))
            reader, writer = await raw(world, data)
            assert (await reader.readline()).startswith(b"HTTP/1.1 401"), path
            writer.close()
    await queue.aclose()


class WaitingTokenizer(ByteTokenizer):
    """Rendering and encoding of long inputs block until the test allows them."""

    def __init__(self) -> None:
        self.has_begun = threading.Event()
        self.may_end = threading.Event()

    def _wait(self, is_long: bool) -> None:
        if is_long:
            self.has_begun.set()
            assert self.may_end.wait(60), "the loop stands still"

    def render(self, messages: Any, **options: Any) -> str:
        self._wait(len(messages) > 100)
        return super().render(messages, **options)

    def encode(self, text: str, **place: Any) -> tuple[int, ...]:
        self._wait(len(text) >= LONG_TEXT)
        return super().encode(text, **place)


LONG = [{"role": "user", "content": "x" * LONG_TEXT}]


@pytest.mark.parametrize(
    "messages", [[{"role": "user", "content": ""}] * 600, LONG], ids=["many", "long"]
)
@in_loop
async def test_long_chats_are_rendered_and_tokenized_in_a_thread(
    messages: list[Any],
) -> None:
    tokenizer = WaitingTokenizer()
    async with gateway_world(
        tokenizer=tokenizer, max_prompt_tokens=50_000, max_length=60_000
    ) as world:
        asking = asyncio.ensure_future(world.post({"messages": messages}))
        await until(tokenizer.has_begun.is_set)
        assert (await world.ask_other())[0] == 200
        tokenizer.may_end.set()
        assert (await asking)[0] == 200


@in_loop
async def test_connections_above_the_limit_get_503(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gate = asyncio.Event()
    monkeypatch.setattr(f"{GATEWAY}.READ_TIMEOUT_S", 1.5)
    monkeypatch.setattr(f"{GATEWAY}.MAX_CONNECTIONS", 2)
    async with gateway_world(ScriptedEngine(gate=gate)) as world:
        busy = [
            asyncio.ensure_future(world.ask(f"call {number}")) for number in range(2)
        ]
        await until(lambda: len(world.engine.requests) == 2)
        assert (await all_of(*await raw(world, b""))).startswith(b"HTTP/1.1 503")
        gate.set()
        assert [status for status, _ in await asyncio.gather(*busy)] == [200, 200]
        # idle ones are closed
        await until(lambda: not world.gateway.listener.connections)
        answer = await all_of(*await raw(world, b"no http\r\n\r\n"))
        assert (answer[:12], b'"type":"invalid_request_error"' in answer) == (
            b"HTTP/1.1 400",
            True,
        )


@in_loop
async def test_internal_error_is_a_500_without_the_key(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with gateway_world(ScriptedEngine(error=ZeroDivisionError("a bug"))) as world:
        status, answer = await world.ask()
        assert (status, answer["error"]["type"]) == (500, "server_error")
        world.engine.error = None
        assert (await world.ask())[0] == 200
        (branch,) = world.session.rollout(0, Outcome(), 0.0)
        assert branch.num_sampled == 13
        assert "ZeroDivisionError" in caplog.text
        assert world.session.key not in caplog.text


@in_loop
async def test_screenshots_become_notes_and_too_many_an_overflow() -> None:
    image = {"type": "image_url", "image_url": {"url": "A" * (6 * 2**20)}}
    async with gateway_world() as world:
        for num_images, status, code in (
            (1, 200, None),
            (6, 413, "context_length_exceeded"),
        ):
            result = {"role": "tool", "content": [image] * num_images}
            body = json.dumps({"messages": [result]}).encode()
            headers = {"Content-Encoding": "gzip"}
            answer = await world.post(gzip.compress(body, 1), headers=headers)
            assert answer[0] == status, answer
            assert answer[1].get("error", {}).get("code") == code
        assert world.session.overflow is not None
