"""All dialects of the gateway: refusals, ignored parameters, errors, logprobs."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import anthropic
import openai
import pytest
from gateway_cases import HI, RULES, ScriptedEngine, gateway_world, in_loop, talking
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from asyncrl.agents.endpoint import anthropic_dialect, openai_dialects
from asyncrl.agents.endpoint.dialects import Dialect, KeptAnswers, anthropic_error
from asyncrl.agents.endpoint.requests import ApiError, CallRequest, ChatRequest, RequestReader
from asyncrl.base.errors import EngineError, RequestRefused
from asyncrl.messages.records import Outcome

CHAT, TEXT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"
BASES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": HI},
    TEXT: {"prompt": "x"},
    RESPONSES: {"input": "x"},
    MESSAGES: {"messages": HI},
}


def said(*messages: Any) -> dict[str, Any]:
    return {"messages": list(messages)}


def calling(arguments: str) -> dict[str, Any]:
    function = {"name": "f", "arguments": arguments}
    call = {"id": "c", "type": "function", "function": function}
    return said(*HI, {"role": "assistant", "tool_calls": [call]})


def user(**block: Any) -> dict[str, Any]:
    return said({"role": "user", "content": [block]})


def assistant(**block: Any) -> dict[str, Any]:
    return said(*HI, {"role": "assistant", "content": [block]}, *HI)


def item(**fields: Any) -> dict[str, Any]:
    return {"input": [fields]}


def schema_of(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}


REFUSED: list[tuple[str, Any, str]] = [
    *((path, {**base, "guided_json": 1}, "guided_json=1 is refused") for path, base in BASES.items()),
    *((path, [1], "JSON object") for path in BASES),
    *((path, {}, "") for path in BASES),
    *((path, {**base, "frequency_penalty": 1}, "frequency_penalty=1 is") for path, base in BASES.items()),
    (CHAT, said(*HI) | {"temperature": "hot"}, "temperature"),
    (CHAT, b"\xff\xfe", "not JSON"),
    (CHAT, b'{"messages": [{"role": "user", "content": "Hi"}], "temperature": 1e999}', "temperature"),
    (CHAT, b"[" * 100_000, "recursion"),
    (CHAT, b'{"messages": [{"role": "user", "content": "\\ud800"}]}', "not JSON"),
    (CHAT, b'{"messages": [], "seed": ' + b"9" * 4000 + b"}", "seed"),
    (CHAT, said(*HI) | {"n": 2}, "n=2 is refused"),
    (CHAT, said(*HI * 2001), "2001 messages of a token"),
    (CHAT, user(type="image_url", image_url={"url": "x"}), "text parts"),
    (CHAT, said({"role": "wizard", "content": "x"}), "wizard"),
    (CHAT, said(*HI, {"role": "assistant", "audio": {"id": "a"}}), "reads text"),
    (CHAT, calling('{"a": "\\ud800"}'), "arguments"),
    (CHAT, said(*HI) | {"tools": [{"type": "web_search"}]}, "tools"),
    (CHAT, said(*HI) | {"chat_template_kwargs": {"x": [1]}}, "a list of 1 entries"),
    (CHAT, said(*HI) | {"response_format": {"type": "xml"}}, "response_format"),
    (CHAT, said(*HI) | {"response_format": schema_of({"$ref": "#/nowhere"})}, "response_format"),
    (TEXT, {"prompt": "x", "logprobs": 1}, "logprobs"),
    (TEXT, {"prompt": [1, 2, 258]}, "ids 0 to 257"),
    (RESPONSES, item(type="computer_call"), "computer_call"),
    (RESPONSES, {"input": "x", "background": True}, "background"),
    (MESSAGES, said({"role": "wizard", "content": "x"}), "messages[0]"),
    (MESSAGES, user(type="image", source={}), "messages[0].content[0]: a block of type 'image'"),
    (MESSAGES, assistant(type="tool_use", id="c", name="f", input=[1]), "tool_use"),
    (MESSAGES, said(*HI, {"role": "assistant", "content": "The"}), "cannot continue it"),
    (MESSAGES, said(*HI) | {"tools": [{"type": "web_search_2025", "name": "web"}]}, "web_search_2025"),
    (MESSAGES, said(*HI) | {"mcp_servers": [{}]}, "mcp_servers"),
]


@in_loop
async def test_gateway_refuses_invalid_bodies_in_all_dialects() -> None:
    async with gateway_world() as world:
        for path, body, message in REFUSED:
            status, answer = await world.post(body, path=path)
            assert (status, answer["error"]["type"]) == (400, "invalid_request_error"), (body, answer)
            assert message in answer["error"]["message"][:600], (body, answer)
            assert (answer.get("type") == "error") == (path == MESSAGES)
        assert world.engine.requests == []
        assert world.gateway.stats().refused == {400: len(REFUSED)}
        assert (await world.ask())[0] == 200


def texts(*words: str) -> st.SearchStrategy[str]:
    return st.sampled_from(words)


KEYS = texts(*"type role content text name input id thinking arguments call_id output function".split())
VALUES = texts("message", "user", "assistant", "text", "tool_use", "tool_result", "function_call", "x")
FIELDS = "messages input prompt system instructions tools tool_choice thinking reasoning text n stop"
DIALECTS = (
    openai_dialects.CHAT,
    openai_dialects.TEXT,
    openai_dialects.RESPONSES,
    anthropic_dialect.MESSAGES,
)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | VALUES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner),
    max_leaves=10,
)


@pytest.mark.parametrize("dialect", DIALECTS, ids=lambda each: each.name)
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.dictionaries(texts(*FIELDS.split()), json_values), st.lists(json_values, max_size=2))
def test_any_json_is_a_call_or_an_api_error(dialect: Dialect, body: dict[str, Any], items: list[Any]) -> None:
    turns = [{"role": "user", "content": items}, {"role": "assistant", "content": items}]
    for more in ({}, {"messages": items}, {"input": items}, {"messages": turns}, {"input": turns}):
        try:
            outcome: CallRequest | ApiError = dialect.read(
                RequestReader(RULES), json.loads(json.dumps({**body, **more})), KeptAnswers(9)
            )[0]
        except ApiError as error:
            outcome = error
        if isinstance(outcome, ApiError):
            assert outcome.status in (400, 404)
            assert anthropic_error(outcome)["error"]["message"]


def read(messages: list[Any], **more: Any) -> ChatRequest:
    return RequestReader(RULES).chat({"messages": messages, **more})


LITELLM: Any = {
    "provider_specific_fields": {"refusal": None},
    "audio": None,
    "function_call": None,
}
PART = {"type": "text", "text": "Hi", "cache_control": {"type": "ephemeral"}}
MINE = {"role": "assistant", "content": "yes"}


@pytest.mark.parametrize(
    ("sent", "read_as"),
    [
        ({**MINE, **LITELLM}, MINE),
        ({"role": "user", "content": [PART], "cache_control": {}}, {"role": "user", "content": "Hi"}),
        ({**MINE, "reasoning": "hm"}, {**MINE, "reasoning_content": "hm"}),
        ({**MINE, "reasoning": {"effort": 1}, "reasoning_content": ""}, MINE),
    ],
)
def test_templates_get_only_the_keys_they_may_read(sent: Any, read_as: Any) -> None:
    assert read([sent]).messages == [read_as]


@in_loop
async def test_sampling_overrides_follow_the_config() -> None:
    off: dict[str, Any] = {"frequency_penalty": 0, "logit_bias": {}, "max_completion_tokens": 10**30}
    off |= {"response_format": {"type": "text"}, "modalities": ["text"], "top_p": None, "stop": None}
    async with gateway_world() as world:
        assert (await world.ask(user="me", store=True, temperature=0.3, **off))[0] == 200
        (request,) = world.engine.requests
        assert (request.temperature, request.top_p, request.max_tokens) == (1.0, 1.0, 400)
    cases: list[dict[str, Any]] = [{"temperature": 0.0, "top_p": 0.5}, {"top_p": 0.5}, {"top_p": 0}]
    async with gateway_world(on_sampling_override="honour") as world:
        for asked in (*cases, {"temperature": 0.001}, {}):
            assert (await world.ask(**asked))[0] == 200
        sampled = [(each.temperature, each.top_p) for each in world.engine.requests]
        assert sampled == [(0, 1), (1, 0.5), (0, 1), (0, 1), (1, 1)]
        rollout = world.session.rollout(0, Outcome(1.0), 1.0)
        assert sum(branch.num_sampled for branch in rollout) == 13, "only the last call is trained"


@in_loop
async def test_errors_are_the_exceptions_of_each_client() -> None:
    async with talking() as talk:
        with pytest.raises(openai.BadRequestError, match="logit_bias") as bad:
            await talk.chat(logit_bias={"5": 1})
        assert (bad.value.param, bad.value.type) == ("logit_bias", "invalid_request_error")
        with pytest.raises(anthropic.BadRequestError, match="top_k"):
            await talk.message(extra_body={"top_k": 5})
        with pytest.raises(openai.AuthenticationError, match="session key"):
            await talk.gpt.with_options(api_key="wrong").models.list()
        with pytest.raises(anthropic.AuthenticationError):
            await talk.claude.with_options(api_key="wrong").models.list()
        for error, raised, message in (
            (RequestRefused("engine-0 refused it", why="too long"), openai.BadRequestError, "too long"),
            (EngineError("engine-0", "nonsense"), openai.InternalServerError, "The run is ending"),
        ):
            talk.world.engine.error = error
            with pytest.raises(raised, match=message):
                await talk.chat()
        assert [each.room for each in talk.world.broken] == ["engine-0"]


@in_loop
async def test_session_that_ends_during_a_stream_sends_an_error_event() -> None:
    async with talking(engine=ScriptedEngine(gate=asyncio.Event())) as talk:
        streams: list[Any] = [await ask(stream=True) for ask in (talk.chat, talk.respond, talk.message)]
        for stream in streams:
            await anext(aiter(stream))
        talk.world.session.end_nowait("the harness is done")
        for stream in streams:
            with pytest.raises((openai.APIError, anthropic.APIStatusError), match="the harness is done"):
                _ = [event async for event in stream]
        assert len(talk.world.engine.cancelled) == 3


@in_loop
async def test_docs_show_every_parameter_without_a_key() -> None:
    async with gateway_world() as world:
        for path, text in (("docs", "openapi.json"), ("openapi.json", "parallel_tool_calls")):
            async with world.http.get(f"{world.url}/{path}") as response:
                assert (response.status, text in await response.text()) == (200, True)
