"""Clients that send what they should not, too much of it, too slowly, or too late: each gets its clear error,
and the rest go on.
"""

from __future__ import annotations

import asyncio
import gzip
import json
import threading
from collections.abc import AsyncIterator
from typing import Any

import pytest
from gateway_cases import HI, RULES, ByteTokenizer, ScriptedEngine, World, gateway_world, in_loop, until
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from asyncrl.agents.endpoint.answers import ApiError
from asyncrl.agents.endpoint.engine_route import LONG_BODY, LONG_TEXT
from asyncrl.agents.endpoint.requests import CallRequest, RequestReader
from asyncrl.agents.endpoint.work_routes import RolloutQueue
from asyncrl.base.errors import RolloutFailure
from asyncrl.messages.records import Outcome


def with_messages(*messages: Any) -> bytes:
    return json.dumps({"messages": messages}).encode()


def with_fields(**fields: Any) -> bytes:
    return json.dumps({"messages": HI, **fields}).encode()


def tool_call(arguments: str) -> Any:
    function = {"name": "f", "arguments": arguments}
    return {"role": "assistant", "tool_calls": [{"id": "c", "type": "function", "function": function}]}


IMAGE = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}
REFUSED: dict[str, tuple[bytes, str]] = {
    "no text": (b"\xff\xfe", "not JSON"),
    "infinity": (with_fields()[:-1] + b', "temperature": 1e999}', "temperature"),
    "nested for ever": (b"[" * 100_000, "recursion"),
    "a lone surrogate": (b'{"messages": [{"role": "user", "content": "\\ud800"}]}', "not JSON"),
    "more messages than tokens": (with_messages(*[7] * 2001), "2001 messages are more"),
    "an image": (with_messages(IMAGE), "text parts"),
    "an unknown role": (with_messages({"role": "wizard", "content": "x"}), "wizard"),
    "a tool that is no function": (with_fields(tools=[{"type": "web_search"}]), "tools"),
    "audio": (with_messages(*HI, {"role": "assistant", "audio": {"id": "a"}}), "reads text"),
    "a function call": (
        with_messages(*HI, {"role": "assistant", "function_call": {"name": "f"}}),
        "tool_calls",
    ),
    "calls of a user": (with_messages({"role": "user", "content": "x", "tool_calls": [1]}), "assistant"),
    "a setting that is fixed": (
        with_fields(chat_template_kwargs={"messages": 1}),
        "'messages' cannot be set",
    ),
    "a setting that is no value": (with_fields(chat_template_kwargs={"x": [1]}), "a list of 1 entries"),
    "settings without end": (with_fields(chat_template_kwargs={"x": "y" * 5000}), "4096 is the most"),
    "an effort that is no word": (with_fields(reasoning_effort="<|end|>"), "reasoning_effort"),
    "arguments that are no object": (with_messages(*HI, tool_call("[1]")), "arguments"),
    "arguments with a surrogate": (with_messages(*HI, tool_call('{"a": "\\ud800"}')), "arguments"),
    "a choice that is not there": (with_fields(tool_choice="required"), "tool_choice"),
    "n of 10**4000": (with_fields()[:-1] + b', "n": ' + b"9" * 4000 + b"}", "an integer of"),
    "a seed that is too large": (with_fields(seed=2**63), "seed"),
    "an unknown parameter": (with_fields(guided_json={}), "guided_json"),
}


@in_loop
async def test_what_is_wrong_is_a_400_that_says_what_and_nothing_of_it_reaches_the_engine() -> None:
    async with gateway_world() as world:
        for name, (body, message) in REFUSED.items():
            status, answer = await world.post(body)
            assert (status, answer["error"]["type"]) == (400, "invalid_request_error"), name
            assert message in answer["error"]["message"][:600], name
        assert world.engine.requests == []
        assert world.gateway.stats().refused == {400: len(REFUSED)}
        assert (await world.ask())[0] == 200


@in_loop
async def test_what_means_off_or_changes_nothing_is_taken_and_what_is_ignored_is_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    off: dict[str, Any] = {"frequency_penalty": 0, "logit_bias": {}, "max_completion_tokens": 10**30}
    off |= {"response_format": {"type": "text"}, "modalities": ["text"], "top_p": None, "stop": None}
    async with gateway_world() as world:
        for temperature in (0.3, 0.4):
            assert (await world.ask(user="me", store=True, temperature=temperature, **off))[0] == 200
        for request in world.engine.requests:
            assert (request.temperature, request.top_p, request.max_tokens) == (1.0, 1.0, 400)
        told = [record.getMessage() for record in caplog.records if "endpoint" in record.name]
        assert sorted(line.split()[3] for line in told) == ["`store`,", "`user`,", "asks"]
    settings = ({"temperature": 0.0, "top_p": 0.5}, {"top_p": 0.5}, {"top_p": 0}, {"temperature": 0.001}, {})
    async with gateway_world(on_sampling_override="honour") as world:
        for asked in settings:
            assert (await world.ask(**asked))[0] == 200
        found = [(each.temperature, each.top_p) for each in world.engine.requests]
        assert found == [(0, 1), (1, 0.5), (0, 1), (0, 1), (1, 1)]
        rollout = world.session.rollout(0, Outcome(1.0), 1.0)
        assert sum(branch.num_sampled for branch in rollout) == 13, "of the last call alone"
    async with gateway_world(on_sampling_override="refuse") as world:
        status, answer = await world.ask(temperature=0.3)
        assert (status, answer["error"]["param"]) == (400, "temperature")
        assert (await world.ask(temperature=1))[0] == 200


KEYS = st.sampled_from(["type", "role", "content", "function", "name", "text"])
PARAMETERS = "messages tools tool_choice n stop seed max_tokens temperature stream stream_options logprobs x"
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner),
    max_leaves=8,
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.dictionaries(st.sampled_from(PARAMETERS.split()), json_values), json_values)
def test_any_json_is_a_checked_shape_or_an_error_of_ours(body: dict[str, Any], message: Any) -> None:
    reader = RequestReader(RULES)
    for given_body in (body, {**body, "messages": [message]}, {"messages": HI, "prompt": message, **body}):
        for read in (reader.chat, reader.text):
            try:
                outcome: CallRequest | ApiError = read(json.dumps(given_body).encode())
            except ApiError as error:
                outcome = error
            assert isinstance(outcome, CallRequest) or (outcome.status == 400 and json.loads(outcome.body()))


@in_loop
async def test_a_prompt_that_is_too_long_is_refused_and_one_far_too_long_is_not_tokenised(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with gateway_world() as world:
        with monkeypatch.context() as patched:
            patched.delattr(ByteTokenizer, "encode")
            for path, body in (
                ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hello " * 50_000}]}),
                ("/v1/completions", {"prompt": "x" * 200_000}),
            ):
                status, answer = await world.post(body, path=path)
                assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")
        status, answer = await world.ask("x" * 2001)
        assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")
        assert "rollout.max_prompt_tokens=2000" in answer["error"]["message"]
        status, answer = await world.post({"prompt": [1, 2, 258]}, path="/v1/completions")
        assert (status, answer["error"]["param"]) == (400, "prompt")


@in_loop
async def test_a_wrong_address_method_key_or_size_is_told_without_the_key() -> None:
    async def chunks() -> AsyncIterator[bytes]:
        for _ in range(4):
            yield b" " * 2**10

    async with gateway_world(max_body_bytes=2**11) as world:
        chat, key, no_key = "/v1/chat/completions", world.headers, {"Authorization": "Bearer "}
        basic = {"Authorization": f"Basic {world.session.key}"}
        for method, path, headers, data, status, code in (
            ("GET", chat, key, None, 405, "method_not_allowed"),
            ("POST", f"/s/{world.session.key}/v2/x", {}, b"", 404, "unknown_url"),
            ("GET", "/v1/models/other", key, None, 404, "model_not_found"),
            ("POST", chat, no_key, b"{}", 401, "invalid_api_key"),
            ("POST", chat, basic, b"{}", 401, "invalid_api_key"),
            ("POST", chat, key, b" " * 2**12, 413, "request_too_large"),
            ("POST", chat, key, chunks(), 413, "request_too_large"),
        ):
            async with world.http.request(method, world.url + path, headers=headers, data=data) as response:
                assert (response.status, (await response.json())["error"]["code"]) == (status, code)
                assert world.session.key not in await response.text()


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("chat/completions", {"messages": HI}),
        ("completions", {"prompt": "x"}),
        ("responses", {"input": "x"}),
        ("messages", {"messages": HI}),
    ],
)
@in_loop
async def test_an_unknown_parameter_is_refused_in_the_same_sentence_everywhere(path: str, body: Any) -> None:
    async with gateway_world() as world:
        status, answer = await world.post({**body, "guided_json": 1}, path=f"/v1/{path}")
        said = "guided_json=1 is refused: there is no such parameter here."
        assert (status, answer["error"]["message"]) == (400, said)


@in_loop
async def test_a_place_in_a_body_has_each_of_its_parts_once() -> None:
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": 1}}
    async with gateway_world() as world:
        _, answer = await world.ask(response_format=form)
        assert answer["error"]["param"] == "response_format.json_schema.schema"
        _, answer = await world.post(with_messages(*HI, {"role": "user", "content": 7}))
        assert answer["error"]["param"] == "messages[1].content"


@in_loop
async def test_the_docs_show_every_parameter_without_a_key() -> None:
    async with gateway_world() as world:
        for path, said in (("docs", "openapi.json"), ("openapi.json", "parallel_tool_calls")):
            async with world.http.get(f"{world.url}/{path}") as response:
                assert (response.status, said in await response.text()) == (200, True)


@in_loop
async def test_a_body_that_is_compressed_is_refused_by_name() -> None:
    async with gateway_world() as world:
        body = gzip.compress(with_fields())
        status, answer = await world.post(body, headers={"Content-Encoding": "gzip"})
        assert (status, answer["error"]["message"][:40]) == (400, "Content-Encoding: 'gzip' is not read. Se")


@in_loop
async def test_a_head_that_is_no_http_gets_an_error_object_without_its_key() -> None:
    async with gateway_world() as world:
        key = world.session.key
        answer = await all_of(*await raw(world, head(key + "\0", 2) + b"{}"))
        assert b" 400 Bad Request" in answer[:30]
        assert key.encode() not in answer
        said = json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["message"]
        assert said == "The head of this request is malformed or too long."


async def raw(world: World, data: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, _, port = world.url.removeprefix("http://").partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(data)
    return reader, writer


def head(key: str, length: int, path: str = "/v1/chat/completions") -> bytes:
    lines = [f"POST {path} HTTP/1.1", "Host: x", f"Authorization: Bearer {key}", f"Content-Length: {length}"]
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
        key = world.session.key
        silent = [await raw(world, data) for data in (b"", b"POST /v1/chat/comp", head(key, 10)[:-2])]
        assert [await all_of(*each) for each in silent] == [b"", b"", b""]
        answer = await all_of(*await raw(world, head(key, 500) + b'{"messages":'))
        assert answer.startswith(b"HTTP/1.1 408")


@in_loop
async def test_one_connection_too_many_takes_the_place_of_an_idle_one_or_is_refused_if_all_are_busy() -> None:
    gate = asyncio.Event()
    async with gateway_world(ScriptedEngine(gate=gate), max_connections=2) as world:
        idle = await raw(world, b"POST /v1/chat/comp")
        busy = [asyncio.ensure_future(world.ask(f"call {number}")) for number in range(2)]
        await until(lambda: len(world.engine.requests) == 2)
        assert await all_of(*idle) == b"", "it made room"
        assert (await all_of(*await raw(world, b""))).startswith(b"HTTP/1.1 503")
        gate.set()
        assert [status for status, _ in await asyncio.gather(*busy)] == [200, 200]
        strangers = [await raw(world, b"POST /v1/chat/comp") for _ in range(8)]
        for each in strangers[:-2]:
            assert await all_of(*each) == b"", "the oldest of them make room for the newest"
        assert (await world.ask())[0] == 200
        for _, writer in strangers[-2:]:
            writer.close()


@in_loop
async def test_every_route_asks_for_the_key_before_it_reads_a_body() -> None:
    queue = RolloutQueue(worker_key="k", model="m", lease_timeout_s=60.0, task_seed=lambda work: 0)
    async with gateway_world(extra_routes=queue.routes()) as world:
        paths = [route.path for route in queue.routes()] + ["/v1/chat/completions", "/v1/completions"]
        for path in [*paths, "/s/{key}/v1/chat/completions"]:
            data = head("wrong", 10, path.replace("{key}", "wrong"))  # and not a byte of the body
            reader, writer = await raw(world, data)
            assert (await reader.readline()).startswith(b"HTTP/1.1 401"), path
            writer.close()
    await queue.aclose()


class CountingEngine(ScriptedEngine):
    """Knows how many answers it sampled at once."""

    num_now = num_most = 0

    async def generate(self, request: Any, **more: Any) -> Any:
        self.num_now += 1
        self.num_most = max(self.num_most, self.num_now)
        try:
            return await super().generate(request, **more)
        finally:
            self.num_now -= 1


@in_loop
async def test_a_harness_that_floods_waits_by_its_choices_until_its_calls_are_used_up() -> None:
    gate = asyncio.Event()
    engine = CountingEngine(gate=gate)
    async with gateway_world(engine, max_concurrent_calls=4, max_calls=6) as world:
        status, answer = await world.ask(n=5)
        assert (status, answer["error"]["param"]) == (400, "n"), "it never could be"
        first = asyncio.ensure_future(world.ask("first", n=3))
        await world.engine.started.wait()
        flood = [asyncio.ensure_future(world.ask(f"call {number}", n=2)) for number in range(40)]
        await until(lambda: world.gateway.stats().refused.get(429, 0) == 35)
        gate.set()
        assert (await first)[0] == 200
        statuses = [status for status, _ in await asyncio.gather(*flood)]
        assert (statuses.count(200), statuses.count(429)) == (5, 35)
        assert engine.num_most == 4
        url = world.url + "/v1/chat/completions"
        async with world.http.post(url, json={"messages": HI}, headers=world.headers) as response:
            assert (response.status, response.headers["x-should-retry"]) == (429, "false")
        assert (await world.ask_other())[0] == 200


class WaitingTokenizer(ByteTokenizer):
    """Rendering or encoding what is long takes as long as the test likes."""

    def __init__(self) -> None:
        self.has_begun, self.may_end, self.num_long = threading.Event(), threading.Event(), 0

    def _wait(self, is_long: bool) -> None:
        if is_long:
            self.num_long += 1
            self.has_begun.set()
            assert self.may_end.wait(60), "the loop stands still"

    def render(self, messages: Any, **options: Any) -> str:
        self._wait(len(messages) > 100)
        return super().render(messages, **options)

    def encode(self, text: str) -> tuple[int, ...]:
        self._wait(len(text) >= LONG_TEXT)
        return super().encode(text)


LONG = [{"role": "user", "content": "x" * LONG_TEXT}]


@pytest.mark.parametrize("messages", [[{"role": "user", "content": ""}] * 600, LONG], ids=["many", "long"])
@in_loop
async def test_a_long_chat_is_rendered_and_tokenised_beside_the_loop_and_its_retry_waits_for_it(
    messages: list[Any],
) -> None:
    tokenizer = WaitingTokenizer()
    assert len(with_messages(*messages)) > LONG_BODY
    async with gateway_world(tokenizer=tokenizer, max_prompt_tokens=50_000, max_length=60_000) as world:
        body, key = {"messages": messages}, {"Idempotency-Key": "k"}
        twins = [asyncio.ensure_future(world.post(body, headers=key)) for _ in range(2)]
        await until(tokenizer.has_begun.is_set)
        assert (await world.ask_other())[0] == 200
        tokenizer.may_end.set()
        answers = await asyncio.gather(*twins)
        assert [(status, answer["id"]) for status, answer in answers] == [(200, "chatcmpl-0")] * 2
        assert (tokenizer.num_long, world.session.num_calls) == (1, 1)


@in_loop
async def test_a_flood_that_does_not_stop_at_its_refusals_fails_the_rollout_at_once() -> None:
    async with gateway_world(max_calls=2) as world:
        refused = [await world.post(b"no JSON") for _ in range(21)]
        assert {status for status, _ in refused} == {400}
        assert (await world.ask())[0] == 410
        with pytest.raises(RolloutFailure, match=r"21 of its calls.*10 times gateway.max_calls=2"):
            async with world.session.while_open():
                pass


LIMITS: dict[str, tuple[dict[str, int], int]] = {
    "context": ({"max_prompt_tokens": 60}, 400),
    "calls": ({"max_calls": 2}, 429),
    "tokens": ({"max_rollout_tokens": 60}, 429),
}


@pytest.mark.parametrize("limit", LIMITS)
@in_loop
async def test_a_rollout_that_meets_a_limit_keeps_what_was_sampled_and_says_that_it_was_cut(
    limit: str,
) -> None:
    config, expected = LIMITS[limit]
    async with gateway_world(**config) as world:
        assert (await world.ask("aside"))[0] == 200
        messages = [*HI]
        for _ in range(9):
            status, answer = await world.post({"messages": messages})
            if status != 200:
                break
            assert world.session.overflow is None
            messages += [answer["choices"][0]["message"], *HI]
        assert status == expected
        assert answer["error"]["message"] == world.session.overflow
        aside, talk = sorted(
            world.session.rollout(0, Outcome(), 0.0), key=lambda branch: len(branch.token_ids)
        )
        assert (aside.is_truncated, talk.is_truncated) == (limit != "context", True)
        assert talk.num_sampled


@in_loop
async def test_a_harness_that_shortens_its_conversation_and_goes_on_has_met_no_limit_in_the_end() -> None:
    async with gateway_world(max_prompt_tokens=40) as world:
        assert (await world.ask("Hi"))[0] == 200
        assert (await world.ask("Hi" * 40))[0] == 400
        assert world.session.overflow is not None
        assert (await world.ask("Ho"))[0] == 200
        assert world.session.overflow is None
        assert not any(branch.is_truncated for branch in world.session.rollout(0, Outcome(), 0.0))


@in_loop
async def test_a_mistake_of_ours_costs_one_session(caplog: pytest.LogCaptureFixture) -> None:
    async with gateway_world(ScriptedEngine(error=ZeroDivisionError("a bug"))) as world:
        status, answer = await world.ask()
        assert (status, answer["error"]["type"]) == (500, "server_error")
        world.engine.error = None
        assert (await world.ask())[0] == 410
        assert (await world.ask_other())[0] == 200
        with pytest.raises(RolloutFailure, match="the gateway made a mistake"):
            world.session.rollout(0, Outcome(), 0.0)
        assert "ZeroDivisionError" in caplog.text
        assert world.session.key not in caplog.text
