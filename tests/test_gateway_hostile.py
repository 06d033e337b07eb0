"""Clients that send what they should not, too much of it, too slowly, or too late: each gets its clear error,
and the rest go on.
"""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import threading
from typing import Any

import pytest
from gateway_cases import RULES, ByteTokenizer, ScriptedEngine, World, gateway_world, in_loop, until
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from asyncrl.agents.endpoint.endpoint_routes import Crowd
from asyncrl.agents.endpoint.engine_route import (
    LONG_TEXT,
    FarTooLong,
    encode_bounded,
    fewest_message_tokens,
)
from asyncrl.agents.endpoint.refusals import ApiError
from asyncrl.agents.endpoint.requests import LONG_BODY, CallRequest, RequestReader
from asyncrl.agents.endpoint.work_routes import RolloutQueue
from asyncrl.errors import RolloutFailure
from asyncrl.messages.records import Outcome

HI: list[Any] = [{"role": "user", "content": "Hi"}]


def nested(depth: int, inner: str = "1") -> str:
    return '{"a":' * depth + inner + "}" * depth


def with_messages(*messages: Any) -> bytes:
    return json.dumps({"messages": messages}).encode()


def with_fields(**fields: Any) -> bytes:
    return json.dumps({"messages": HI, **fields}).encode()


def tool_call(arguments: str) -> Any:
    return {
        "role": "assistant",
        "tool_calls": [{"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}],
    }


CYCLE = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"$ref": "#"}}}

REFUSED: dict[str, tuple[bytes, str]] = {
    "no JSON": (b'{"messages": [', "not JSON"),
    "no text": (b"\xff\xfe", "not JSON"),
    "no object": (b"[1]", "JSON object"),
    "NaN": (b'{"messages": [], "temperature": NaN}', "not JSON"),
    "infinity": (with_fields()[:-1] + b', "temperature": 1e999}', "temperature"),
    "nested for ever": (b"[" * 100_000, "recursion"),
    "a lone surrogate in a message": (b'{"messages": [{"role": "user", "content": "\\ud800"}]}', "not JSON"),
    "a lone surrogate as bytes": (b'{"messages": [{"role": "user", "content": "\xed\xa0\x80"}]}', "not JSON"),
    "no messages": (with_messages(), "messages"),
    "an unknown role": (with_messages({"role": "wizard", "content": "x"}), "wizard"),
    "a user message without content": (with_messages({"role": "user"}), "content"),
    "a tool message without tool_call_id": (
        with_messages(*HI, {"role": "tool", "content": "x"}),
        "tool_call_id",
    ),
    "an empty assistant message": (
        with_messages(*HI, {"role": "assistant"}),
        "neither content nor tool_calls",
    ),
    "an image": (
        with_messages({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}),
        "text parts",
    ),
    "an unknown key in a message": (with_messages({"role": "user", "content": "x", "cache": 1}), "cache"),
    "arguments that are no JSON": (with_messages(*HI, tool_call("{")), "arguments"),
    "arguments nested for ever": (with_messages(*HI, tool_call(nested(100_000))), "arguments"),
    "arguments with a lone surrogate": (with_messages(*HI, tool_call('{"a": "\\ud800"}')), "arguments"),
    "a tool that is no function": (with_fields(tools=[{"type": "web_search"}]), "tools"),
    "a tool without a name": (with_fields(tools=[{"type": "function", "function": {}}]), "name"),
    "a choice of a tool that is not there": (
        with_fields(tool_choice={"type": "function", "function": {"name": "g"}}),
        "tool_choice",
    ),
    "top_k of 2**64": (with_fields(top_k=2**64), "top_k"),
    "n of 17": (with_fields(n=17), "n: "),
    "n of true": (with_fields(n=True), "n: "),
    "n of 10**4000": (with_fields()[:-1] + b', "n": ' + b"9" * 4000 + b"}", "an integer of"),
    "max_tokens of 0": (with_fields(max_tokens=0), "max_tokens"),
    "max_tokens of 1.5": (with_fields(max_tokens=1.5), "max_tokens"),
    "a seed that is too large": (with_fields(seed=2**63), "seed"),
    "a negative temperature": (with_fields(temperature=-1), "temperature"),
    "a schema that refers to itself": (with_fields(response_format=CYCLE), "response_format"),
    "a penalty": (with_fields(frequency_penalty=0.5), "frequency_penalty"),
    "top_logprobs": (with_fields(logprobs=True, top_logprobs=3), "top_logprobs"),
    "one tool call at most": (with_fields(parallel_tool_calls=False), "parallel_tool_calls"),
    "an unknown parameter": (with_fields(guided_json={}), "guided_json"),
    "stream_options without stream": (with_fields(stream_options={"include_usage": True}), "stream_options"),
    "more messages than tokens": (with_messages(*HI * 2001), "2001 messages"),
}


@in_loop
async def test_what_is_wrong_is_a_400_that_says_what_and_nothing_of_it_reaches_the_engine() -> None:
    async with gateway_world() as world:
        for name, (body, message) in REFUSED.items():
            status, answer = await world.post(body)
            assert status == 400, f"{name}: {answer}"
            error = answer["error"]
            assert set(error) == {"message", "type", "param", "code"}
            assert error["type"] == "invalid_request_error"
            with pytest.raises(AssertionError, match=message):
                raise AssertionError(error["message"])
            assert len(error["message"]) < 600, name
        assert world.engine.requests == []
        assert world.gateway.stats().refused == {400: len(REFUSED)}
        assert (await world.ask())[0] == 200


@in_loop
async def test_what_means_off_or_changes_nothing_is_taken_and_what_is_ignored_is_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with gateway_world() as world:
        schema = {"type": "object", "properties": {"child": {"$ref": "#"}}}
        status, answer = await world.ask(
            user="me",
            metadata={"a": "b"},
            store=True,
            frequency_penalty=0,
            presence_penalty=0.0,
            logit_bias={},
            top_k=-1,
            response_format={"type": "text"},
            parallel_tool_calls=True,
            modalities=["text"],
            temperature=0.3,
            top_p=None,
            seed=None,
            max_completion_tokens=10**30,
            stop=None,
            tools=[{"type": "function", "function": {"name": "f", "parameters": schema}}],
        )
        assert (status, answer["choices"][0]["finish_reason"]) == (200, "stop")
        (request,) = world.engine.requests
        assert (request.temperature, request.top_p, request.max_tokens) == (1.0, 1.0, 400)
        assert (await world.ask(temperature=0.4, user="me"))[0] == 200
        told = [
            record.getMessage()
            for record in caplog.records
            if record.name.startswith("asyncrl.agents.endpoint")
        ]
        assert sorted(" ".join(line.split()[:4]) for line in told) == [
            "gateway: a call asks",
            "gateway: calls give `metadata`,",
            "gateway: calls give `store`,",
            "gateway: calls give `user`,",
        ]
    async with gateway_world(on_sampling_override="refuse") as world:
        status, answer = await world.ask(temperature=0.3)
        assert (status, answer["error"]["param"]) == (400, "temperature")
        assert (await world.ask(temperature=1))[0] == 200


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["type", "role", "content", "function", "name", "text"]), inner)
    ),
    max_leaves=8,
)
parameters = st.dictionaries(
    st.sampled_from(
        "messages tools tool_choice n stop seed max_tokens temperature stream stream_options logprobs "
        "response_format x".split()
    ),
    json_values,
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(parameters, json_values)
def test_any_json_is_a_checked_shape_or_an_error_of_ours(body: dict[str, Any], message: Any) -> None:
    reader = RequestReader(RULES)
    for given_body in (body, {**body, "messages": [message]}, {"messages": HI, "prompt": message, **body}):
        for read in (reader.chat, reader.text):
            try:
                outcome: CallRequest | ApiError = read(json.dumps(given_body).encode())
            except ApiError as error:
                outcome = error
            assert isinstance(outcome, CallRequest) or (outcome.status == 400 and json.loads(outcome.body()))


class CountingTokenizer(ByteTokenizer):
    num_encoded = 0

    def encode(self, text: str) -> tuple[int, ...]:
        self.num_encoded += len(text)
        return super().encode(text)


def test_an_assistant_message_of_tool_calls_alone_has_content_for_the_template() -> None:
    """SmolLM2's template and others take no message without; OpenAI's client sends null."""
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    for fields in ({}, {"content": None}):
        messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "tool_calls": [call]} | fields]
        shape = RequestReader(RULES).chat(json.dumps({"messages": messages}).encode())
        assert shape.messages is not None
        assert shape.messages[1]["content"] == ""


@in_loop
async def test_a_prompt_of_a_million_tokens_is_refused_before_it_is_tokenised() -> None:
    engine = ScriptedEngine()
    engine.tokenizer = tokenizer = CountingTokenizer()
    async with gateway_world(engine) as world:
        for body in ({"messages": [{"role": "user", "content": "hello " * 150_000}]},):
            status, answer = await world.post(body)
            assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")
        status, answer = await world.post({"prompt": "x" * 20_000}, path="/v1/completions")
        assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")
        assert tokenizer.num_encoded <= 6 * 2**14, "no more than what shows that they are too long"
        tokenizer.num_encoded = 0
        said = {"role": "assistant", "content": "x" * 17_000}
        status, answer = await world.post(
            {"messages": [{"role": "user", "content": "Hi"}, said, {"role": "user", "content": "Hi"}]}
        )
        assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")
        assert tokenizer.num_encoded <= 2**14, "no more than what shows that it is too long"
        status, answer = await world.ask("x" * 2001)
        assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")
        assert "2000 tokens (rollout.max_prompt_tokens)" in answer["error"]["message"]
        status, answer = await world.post({"prompt": [1, 2, 258]}, path="/v1/completions")
        assert (status, answer["error"]["param"]) == (400, "prompt")


def test_a_text_that_is_far_too_long_is_found_by_its_first_tokens_and_one_that_fits_never_is() -> None:
    tokenizer = CountingTokenizer()
    with pytest.raises(FarTooLong):
        encode_bounded("x" * 900_000, tokenizer, 20_000)
    assert tokenizer.num_encoded < 60_000

    class Spaces(ByteTokenizer):
        def encode(self, text: str) -> tuple[int, ...]:
            return super().encode(" " * (len(text) // 100))

    assert len(encode_bounded("x" * 900_000, Spaces(), 9_000)) == 9_000
    with pytest.raises(FarTooLong):
        encode_bounded("x" * 900_000, Spaces(), 2_000)


async def curl_call(world: World, body: bytes, *more: str) -> tuple[int, Any]:
    command = ["curl", "-sS", "--max-time", "20", "-w", "\n%{http_code}", "--data-binary", "@-"]
    command += ["-H", f"Authorization: Bearer {world.session.key}", "-H", "Content-Type: application/json"]
    command += [*more, f"{world.url}/v1/chat/completions"]
    done = await asyncio.to_thread(subprocess.run, command, input=body, capture_output=True, check=False)
    text, _, status = done.stdout.decode().rpartition("\n")
    return int(status), json.loads(text)


@in_loop
async def test_curl_gets_answers_and_a_body_that_is_too_large_gets_413() -> None:
    async with gateway_world(max_body_bytes=2**21) as world:
        status, answer = await curl_call(world, with_messages(*HI))
        assert (status, answer["choices"][0]["message"]["content"]) == (200, "Hello there.")
        large = with_messages({"role": "user", "content": "x" * 2**20})
        status, answer = await curl_call(world, large)
        assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")
        status, answer = await curl_call(world, large + large + large)
        assert (status, answer["error"]["code"]) == (413, "request_too_large")
        status, answer = await curl_call(world, large + large + large, "-H", "Transfer-Encoding: chunked")
        assert (status, answer["error"]["code"]) == (413, "request_too_large")
        status, answer = await curl_call(world, large, "-H", "Content-Encoding: gzip")
        assert status == 415


@in_loop
async def test_an_unknown_address_a_wrong_method_and_a_missing_key_are_told_without_the_key() -> None:
    async with gateway_world() as world:
        async with world.http.get(world.url + "/v1/chat/completions", headers=world.headers) as response:
            assert (response.status, response.headers["Allow"]) == (405, "POST")
        async with world.http.post(f"{world.url}/s/{world.session.key}/v2/x", json={}) as response:
            answer = await response.json()
            assert response.status == 404
            assert world.session.key not in answer["error"]["message"]
        for headers in (
            {},
            {"Authorization": "Bearer "},
            {"Authorization": f"Basic {world.session.key}"},
        ):
            async with world.http.post(
                world.url + "/v1/chat/completions", json={}, headers=headers
            ) as response:
                assert (response.status, (await response.json())["error"]["code"]) == (
                    401,
                    "invalid_api_key",
                )
        async with world.http.get(world.url + "/v1/models/other", headers=world.headers) as response:
            assert (response.status, (await response.json())["error"]["code"]) == (404, "model_not_found")


async def raw(
    world: World, data: bytes, *, receive_bytes: int | None = None
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, _, port = world.url.removeprefix("http://").partition(":")
    client = socket.socket()
    if receive_bytes is not None:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
    client.setblocking(False)
    await asyncio.get_running_loop().sock_connect(client, (host, int(port)))
    reader, writer = await asyncio.open_connection(sock=client, limit=receive_bytes or 2**16)
    writer.write(data)
    return reader, writer


def head(world: World, length: int) -> bytes:
    lines = [
        "POST /v1/chat/completions HTTP/1.1",
        "Host: x",
        f"Authorization: Bearer {world.session.key}",
        f"Content-Length: {length}",
    ]
    return "\r\n".join([*lines, "", ""]).encode()


async def all_of(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
    """Everything until the gateway closes the connection."""
    try:
        return await reader.read()
    except ConnectionError:
        return b""
    finally:
        writer.close()


@in_loop
async def test_a_client_that_is_slow_with_its_request_is_closed() -> None:
    async with gateway_world(read_timeout_s=0.3) as world:
        silent = [await raw(world, data) for data in (b"", b"POST /v1/chat/comp", head(world, 10)[:-2])]
        assert [await all_of(*each) for each in silent] == [b"", b"", b""]
        answer = await all_of(*await raw(world, head(world, 500) + b'{"messages":'))
        assert answer.startswith(b"HTTP/1.1 408")
        assert b"request_timeout" in answer
        assert (await world.ask())[0] == 200


@in_loop
async def test_what_is_no_http_is_a_400() -> None:
    async with gateway_world(read_timeout_s=5) as world:
        chunked = head(world, 0).replace(b"Content-Length: 0", b"Transfer-Encoding: chunked")
        for data in (
            b"\x16\x03\x01 hello\r\n\r\n",
            head(world, 1)[:-2] + b"X: " + b"y" * 20_000 + b"\r\n\r\n",
            chunked + b"zzz\r\n{}\r\n",
        ):
            answer = await all_of(*await raw(world, data))
            assert answer.split(b" ")[1] == b"400", answer
        surrogate = b"POST /v1/\xff\xfe HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
        assert (await all_of(*await raw(world, surrogate))).split(b" ")[1] in (b"404", b"400")


@in_loop
async def test_connections_above_the_limit_are_told_and_closed_if_all_others_are_busy() -> None:
    gate = asyncio.Event()
    async with gateway_world(ScriptedEngine(gate=gate), max_connections=2) as world:
        busy = [asyncio.ensure_future(world.ask(f"call {number}")) for number in range(2)]
        await until(lambda: len(world.engine.requests) == 2)
        reader, writer = await raw(world, b"")
        assert (await all_of(reader, writer)).startswith(b"HTTP/1.1 503")
        gate.set()
        assert [status for status, _ in await asyncio.gather(*busy)] == [200, 200]
        assert (await world.ask())[0] == 200


@in_loop
async def test_idle_strangers_keep_nobody_out_however_many_they_are() -> None:
    async with gateway_world(max_connections=3) as world:
        assert (await world.ask())[0] == 200, "a client with a key, whose connection stays"
        strangers = [await raw(world, b"POST /v1/chat/comp") for _ in range(8)]
        for each in strangers[:-2]:
            assert await all_of(*each) == b"", "the oldest of them make room for the newest"
        assert world.gateway.stats().connections == 3
        reader, writer = await raw(world, head(world, 2) + b"{}")
        assert (await reader.readline()).startswith(b"HTTP/1.1 400"), "another client with a key"
        assert (await world.ask())[0] == 200
        writer.close()
        for _, each in strangers[-2:]:
            each.close()


class Line:
    """A connection, as the Crowd sees it."""

    def __init__(self, *, is_idle: bool = True) -> None:
        self._is_idle, self.is_closed, self.num_looks = is_idle, False, 0

    @property
    def is_idle(self) -> bool:
        self.num_looks += 1
        return self._is_idle

    def force_close(self) -> None:
        self.is_closed = True


def test_whoever_holds_most_connections_loses_the_oldest_idle_one_and_a_worker_none() -> None:
    def enter(holder: str = "address far", **line: bool) -> Line:
        new: Any = Line(**line)
        assert crowd.enter_nowait(new, "address far")
        crowd.known(new, holder)
        return new  # type: ignore[no-any-return]

    crowd = Crowd(max_connections=6)
    workers = [enter("a worker") for _ in range(2)]
    greedy = [enter("key greedy", is_idle=number > 0) for number in range(3)]
    other = enter("key other")
    enter()
    assert [each.is_closed for each in greedy] == [False, True, False], "its oldest is busy"
    enter()
    assert [each.is_closed for each in greedy] == [False, True, True], "it still held most"
    for _ in range(20):
        enter()
    assert not any(each.is_closed for each in (*workers, greedy[0], other)), (
        "one that floods pushes out its own"
    )
    assert len(crowd._holders) == 6
    crowd = Crowd(max_connections=2)
    held: list[Any] = [enter("key a", is_idle=False), enter("a worker")]
    refused: Any = Line()
    assert not crowd.enter_nowait(refused, "address far"), "all are busy"
    crowd.leave(held[0])
    crowd.leave(held[0])
    crowd.known(held[0], "key late")
    assert list(crowd._holders.values()) == ["a worker"]


@in_loop
async def test_every_route_asks_for_the_key_before_it_reads_a_body() -> None:
    queue = RolloutQueue(worker_key="k", model="m", lease_timeout_s=60.0, task_seed=lambda work: 0)
    async with gateway_world(extra_routes=queue.routes()) as world:
        paths = [route.path for route in queue.routes()] + ["/v1/chat/completions", "/v1/completions"]
        paths += ["/s/{key}/v1/chat/completions", "/s/{key}/v1/completions"]
        assert len(paths) == 9
        for path in paths:
            lines = [
                f"POST {path.replace('{key}', 'wrong')} HTTP/1.1",
                "Host: x",
                "Content-Length: 10",
                "",
                "",
            ]
            reader, writer = await raw(world, "\r\n".join(lines).encode())  # and not a byte of the body
            assert (await reader.readline()).startswith(b"HTTP/1.1 401"), path
            writer.write(b" " * 10)  # or the gateway lingers, to drop it
            await writer.drain()
            writer.close()
        await until(lambda: not world.gateway.stats().connections)
    await queue.aclose()


@in_loop
async def test_choices_count_as_the_requests_that_they_are() -> None:
    gate = asyncio.Event()
    async with gateway_world(ScriptedEngine(gate=gate), max_concurrent_calls=4) as world:
        status, answer = await world.ask(n=5)
        assert (status, answer["error"]["param"]) == (400, "n"), "it never could be"
        assert "gateway.max_concurrent_calls=4" in answer["error"]["message"]
        first = asyncio.ensure_future(world.ask("first", n=3))
        await world.engine.started.wait()
        status, answer = await world.ask("second", n=2)
        assert (
            status,
            "3 answers of this rollout are being sampled and 2 more" in answer["error"]["message"],
        ) == (429, True)
        third = asyncio.ensure_future(world.ask("third"))
        await until(lambda: len(world.engine.requests) == 4)
        gate.set()
        assert [(await each)[0] for each in (first, third)] == [200, 200]
        gate.clear()

        async def stream(number: int) -> int:
            body = with_fields(n=2, stream=True, user=str(number))
            async with world.http.post(
                world.url + "/v1/chat/completions", headers=world.headers, data=body
            ) as response:
                await response.read()
                return response.status

        flood = [asyncio.ensure_future(stream(number)) for number in range(4)]
        await until(lambda: world.gateway.stats().refused.get(429, 0) == 3)
        gate.set()
        assert sorted(await asyncio.gather(*flood)) == [200, 200, 429, 429]
        assert len(world.engine.requests) == 8
        assert world.session.num_sampling == 0


@in_loop
async def test_too_many_small_messages_are_refused_by_their_number_before_one_is_looked_at() -> None:
    async with gateway_world(message_tokens=5) as world:
        status, answer = await world.post({"messages": [7] * 401})
        assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")
        assert "401 messages are more than the 2000 tokens" in answer["error"]["message"]
        status, answer = await world.post({"messages": [7] * 400})
        assert "messages[0]" in answer["error"]["message"]


def test_a_message_is_as_many_tokens_as_the_template_writes_for_the_smallest() -> None:
    assert fewest_message_tokens(ByteTokenizer()) == len("<user\n>"), (
        "two special tokens, four letters, a line's end"
    )

    class Drops(ByteTokenizer):
        def render(self, messages: Any, **options: Any) -> str:
            if messages[0]["role"] == "system":
                raise ValueError("no system messages here")
            return super().render([message for message in messages if message["content"]], **options)

    assert fewest_message_tokens(Drops()) == 1


class WaitingTokenizer(ByteTokenizer):
    """Rendering a long chat takes as long as the test likes."""

    def __init__(self) -> None:
        self.has_begun, self.may_end = threading.Event(), threading.Event()
        self.threads: list[str] = []

    def render(self, messages: Any, **options: Any) -> str:
        if len(messages) > 100:
            self.threads.append(threading.current_thread().name)
            self.has_begun.set()
            assert self.may_end.wait(60)
        return super().render(messages, **options)


@in_loop
async def test_a_long_chat_is_read_and_rendered_beside_the_loop() -> None:
    tokenizer = WaitingTokenizer()
    async with gateway_world(
        ScriptedEngine(), tokenizer=tokenizer, max_prompt_tokens=50_000, max_length=60_000
    ) as world:
        chat = [{"role": "user", "content": "x"}] * 1000
        assert len(with_messages(*chat)) > LONG_BODY
        long = asyncio.ensure_future(world.post(with_messages(*chat)))
        await until(tokenizer.has_begun.is_set)
        other = world.open()
        assert (await world.post({"messages": HI}, headers={"Authorization": f"Bearer {other.key}"}))[
            0
        ] == 200
        tokenizer.may_end.set()
        assert (await long)[0] == 200
        assert [name.rstrip("_0123456789") for name in tokenizer.threads] == ["long calls"]


@pytest.mark.parametrize("streamed", [True, False])
@in_loop
async def test_a_client_that_does_not_read_its_answer_is_closed_and_the_answer_is_still_to_be_had(
    streamed: bool,
) -> None:
    text = "word " * 8000
    engine = ScriptedEngine(lambda _: text)
    async with gateway_world(engine, read_timeout_s=0.3, max_tokens=50_000, max_length=90_000) as world:
        listening: Any = world.gateway._socket
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        body = with_fields(stream=streamed, logprobs=not streamed)
        _, writer = await raw(world, head(world, len(body)) + body, receive_bytes=2048)
        await until(lambda: bool(engine.requests) and not world.gateway.stats().connections)
        writer.close()
        if streamed:
            assert world.session.capture.num_completions == 0
            async with world.http.post(
                world.url + "/v1/chat/completions", data=body, headers=world.headers
            ) as response:
                assert (await response.text()).count("word ") == 8000
        assert len(engine.requests) == 1


@in_loop
async def test_a_harness_that_floods_gets_429_and_another_session_is_served() -> None:
    gate = asyncio.Event()
    async with gateway_world(ScriptedEngine(gate=gate), max_concurrent_calls=4, max_calls=6) as world:
        flood = [asyncio.ensure_future(world.ask(f"call {number}")) for number in range(40)]
        await until(lambda: world.gateway.stats().refused.get(429, 0) == 36)
        gate.set()
        statuses = [status for status, _ in await asyncio.gather(*flood)]
        assert (statuses.count(200), statuses.count(429)) == (4, 36)
        assert [(await world.ask(f"late {number}"))[0] for number in range(3)] == [200, 200, 429]
        async with world.http.post(
            world.url + "/v1/chat/completions", json={"messages": HI}, headers=world.headers
        ) as response:
            assert (response.status, response.headers["x-should-retry"]) == (429, "false")
            assert (await response.json())["error"]["code"] == "rate_limit_exceeded"
        other = world.open()
        assert (await world.post({"messages": HI}, headers={"Authorization": f"Bearer {other.key}"}))[
            0
        ] == 200


@in_loop
async def test_a_flood_that_does_not_stop_at_its_refusals_fails_the_rollout_at_once() -> None:
    async with gateway_world(max_calls=2) as world:

        async def run() -> None:
            async with world.session.while_open():
                await asyncio.Event().wait()

        running = asyncio.ensure_future(run())
        refused = [await world.post(b"no JSON") for _ in range(21)]
        assert {status for status, _ in refused} == {400}
        status, answer = await world.ask()
        assert (status, answer["error"]["code"]) == (410, "session_ended")
        assert "21 of its calls were refused" in answer["error"]["message"]
        with pytest.raises(
            RolloutFailure, match=r"21 of its calls.*gateway.max_calls=2(.|\n)*Way out: "
        ) as caught:
            await running
        with pytest.raises(RolloutFailure) as again:
            world.session.rollout(0, Outcome(1.0), 1.0)
        assert again.value is caught.value


class SlowTokenizer(ByteTokenizer):
    """Its long texts take until the loop has done something else."""

    def __init__(self) -> None:
        self.has_begun, self.loop_went_on = threading.Event(), threading.Event()
        self.num_long = 0

    def encode(self, text: str) -> tuple[int, ...]:
        if len(text) >= LONG_TEXT:
            self.num_long += 1
            self.has_begun.set()
            assert self.loop_went_on.wait(30.0), "the loop stands still"
        return super().encode(text)


@in_loop
async def test_a_long_text_is_tokenised_beside_the_loop_and_its_retry_waits_for_it() -> None:
    tokenizer = SlowTokenizer()
    limits = {"max_prompt_tokens": 2 * LONG_TEXT, "max_length": 4 * LONG_TEXT}
    async with gateway_world(ScriptedEngine(), tokenizer=tokenizer, **limits) as world:
        body = {"messages": [{"role": "user", "content": "x" * LONG_TEXT}]}
        twins = [asyncio.ensure_future(world.post(body, headers={"Idempotency-Key": "k"})) for _ in range(2)]
        await until(tokenizer.has_begun.is_set)
        other = world.open()
        assert (await world.post({"messages": HI}, headers={"Authorization": f"Bearer {other.key}"}))[
            0
        ] == 200
        tokenizer.loop_went_on.set()
        assert [(status, answer["id"]) for status, answer in await asyncio.gather(*twins)] == [
            (200, "chatcmpl-0")
        ] * 2
        assert (tokenizer.num_long, world.session.num_calls, world.session.num_sampling) == (1, 1, 0)


@in_loop
async def test_a_rollout_whose_branches_grow_too_large_fails_with_the_numbers() -> None:
    async with gateway_world(ScriptedEngine(lambda _: "x" * 9), max_rollout_tokens=100) as world:
        assert (await world.ask("a"))[0] == 200
        first = world.session.capture.num_branch_tokens
        assert 0 < first <= 50
        assert (await world.ask("b"))[0] == 200
        assert world.session.capture.num_branch_tokens == 2 * first
        assert world.session.ended is None
        assert (await world.ask("c", n=4))[0] == 200, "it was sampled: the harness may have it"
        assert (await world.ask("d"))[0] == 410
        with pytest.raises(
            RolloutFailure, match=rf"have {6 * first} tokens after 3 calls.*max_rollout_tokens=100"
        ):
            world.session.rollout(0, Outcome(1.0), 1.0)


@in_loop
async def test_a_call_after_the_end_and_one_in_hand_at_the_end_get_410_with_the_reason() -> None:
    async with gateway_world(ScriptedEngine(gate=asyncio.Event())) as world:
        in_hand = asyncio.ensure_future(world.ask())
        await world.engine.started.wait()
        world.session.end_nowait("rollout.timeout_s=5 is over")
        world.session.end_nowait("something else")
        for status, answer in (await in_hand, await world.ask()):
            assert (status, answer["error"]["code"]) == (410, "session_ended")
            assert "rollout.timeout_s=5" in answer["error"]["message"]
        assert world.engine.cancelled == ["g0/r0/a0/c0"]
        stats = world.gateway.stats()
        assert (stats.sessions, stats.in_flight) == (0, 0)


@in_loop
async def test_a_mistake_of_ours_costs_one_session(caplog: pytest.LogCaptureFixture) -> None:
    engine = ScriptedEngine()
    async with gateway_world(engine) as world:
        engine.error = ZeroDivisionError("a bug")
        status, answer = await world.ask()
        assert (status, answer["error"]["type"]) == (500, "server_error")
        engine.error = None
        assert (await world.ask())[0] == 410
        other = world.open()
        assert (await world.post({"messages": HI}, headers={"Authorization": f"Bearer {other.key}"}))[
            0
        ] == 200
        assert "ZeroDivisionError" in caplog.text
        assert world.session.key not in caplog.text
