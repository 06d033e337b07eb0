"""Anthropic's own client against /v1/messages: conversations, tools, thoughts, streams, errors."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import anthropic
import pytest
from gateway_cases import HI, RULES, ByteTokenizer, ScriptedEngine, World, gateway_world, in_loop, num_forked
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from asyncrl.agents.endpoint.answers import ApiError
from asyncrl.agents.endpoint.engine_route import LONG_BODY
from asyncrl.agents.endpoint.forms.anthropic import MessagesForm
from asyncrl.agents.endpoint.forms.anthropic_written import anthropic_error
from asyncrl.agents.endpoint.forms.responses_written import KeptResponses
from asyncrl.agents.endpoint.reasoning import signature_of
from asyncrl.agents.endpoint.requests import CallRequest, RequestReader
from asyncrl.messages.records import Outcome

ADD: dict[str, Any] = {"name": "add", "description": "Adds.", "input_schema": {"type": "object"}}
CACHED = {"cache_control": {"type": "ephemeral"}}


def use(name: str, arguments: dict[str, Any]) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


class Claude:
    """The client of one session. `ask` streams or not."""

    def __init__(self, world: World, client: anthropic.AsyncAnthropic) -> None:
        self.world, self.client = world, client

    async def ask(self, messages: Any = HI, *, streamed: bool = False, **more: Any) -> Any:
        given = {"model": "m", "max_tokens": 200, "messages": messages, **more}
        if not streamed:
            return await self.client.messages.create(**given)
        async with self.client.messages.stream(**given) as stream:
            return await stream.get_final_message()

    async def events(self, **more: Any) -> list[Any]:
        stream = await self.client.messages.create(
            model="m", max_tokens=200, messages=HI, stream=True, **more
        )
        return [event async for event in stream]

    def prompts(self) -> list[str]:
        """Text of each prompt that reached the engine."""
        engine = self.world.engine
        return [
            engine.tokenizer.decode(each.prompt_ids.tolist(), skip_special_tokens=False)
            for each in engine.requests
        ]


@asynccontextmanager
async def claude(
    *answers: str, by: Callable[[Any], str] | None = None, **config: Any
) -> AsyncIterator[Claude]:
    told = iter(answers)
    async with gateway_world(ScriptedEngine(by or (lambda _: next(told))), **config) as world:
        key = world.session.key
        async with anthropic.AsyncAnthropic(base_url=world.url, api_key=key, max_retries=0) as client:
            yield Claude(world, client)


@pytest.mark.parametrize("streamed", [False, True])
@in_loop
async def test_a_coding_agents_loop_is_one_branch_and_every_answer_is_trained_once(streamed: bool) -> None:
    """As Claude Code does it: the system in parts, one of which is another in each call, many tools,
    thoughts, several results in one message, tokens counted first.
    """
    both = f"{use('read', {'path': 'a'})}\n{use('read', {'path': 'ü'})}"
    answers = [
        f"<think>\nTwo files.\n</think>\n\nI look at both.\n{both}",
        f"<think>\nNow add.\n</think>\n\n{use('add', {'a': 1, 'b': [2, 'x']})}",
        "<think>\nDone.\n</think>\n\nIt is three.",
    ]
    tools = [{**ADD, "name": f"tool_{number}"} for number in range(20)]
    tools += [{**ADD, "name": "read", **CACHED}, ADD]
    async with claude(*answers) as talk:
        messages: list[Any] = [{"role": "user", "content": [{"type": "text", "text": "1+2?", **CACHED}]}]
        found = []
        for number in range(3):
            system: Any = [{"type": "text", "text": f"x-anthropic-billing-header: cch={number};"}]
            system += [{"type": "text", "text": "You are an agent.", **CACHED}]
            shape: Any = {
                "system": system,
                "tools": tools,
                "thinking": {"type": "enabled", "budget_tokens": 1024},
            }
            counted = await talk.client.messages.count_tokens(model="m", messages=messages, **shape)
            answer = await talk.ask(messages, streamed=streamed, metadata={"user_id": "u"}, **shape)
            assert answer.usage.input_tokens == counted.input_tokens
            found.append([block.type for block in answer.content])
            messages.append({"role": "assistant", "content": answer.content})
            uses = [block for block in answer.content if block.type == "tool_use"]
            results: list[Any] = [
                {"type": "tool_result", "tool_use_id": each.id, "content": [{"type": "text", "text": "3"}]}
                for each in uses
            ]
            if uses:
                assert answer.stop_reason == "tool_use"
                results[-1] |= {"is_error": True, "content": "no such file", **CACHED}
                messages.append({"role": "user", "content": [*results, {"type": "text", "text": "go on"}]})
        assert found == [
            ["thinking", "text", "tool_use", "tool_use"],
            ["thinking", "tool_use"],
            ["thinking", "text"],
        ]
        assert answer.content[1].text == "It is three."
        assert (answer.content[0].thinking, answer.stop_reason) == ("Done.", "end_turn")
        assert len({each["tool_use_id"] for each in messages[2]["content"][:-1]}) == 2
        _, last, _ = talk.prompts()
        assert "<|start|>tool\n3<|end|><|start|>tool\nError: no such file<|end|><|start|>user\ngo on" in last
        assert "billing" not in last
        (trajectory,) = talk.world.session.rollout(0, Outcome(), 1.0)
        assert trajectory.loss_mask.sum() == sum(len(each.encode()) + 1 for each in answers)
        calls = talk.world.gateway.stats().calls
        assert (calls, num_forked(talk.world)) == (3, 0), "what is counted is no call"


@in_loop
async def test_a_stream_has_its_events_in_order_and_nothing_of_a_mark() -> None:
    text = f"<think>\nHm, <3.\n</think>\n\nOh <t see.\n{use('add', {'a': 1})}"
    async with claude(text, text) as talk:
        events = await talk.events(tools=[ADD])
        kinds = [event.type for event in events]
        assert (kinds[0], kinds[-2:]) == ("message_start", ["message_delta", "message_stop"])
        blocks = [event for event in events if event.type == "content_block_start"]
        assert [(each.index, each.content_block.type) for each in blocks] == [
            (0, "thinking"),
            (1, "text"),
            (2, "tool_use"),
        ]
        told = {"thinking_delta": "", "text_delta": "", "signature_delta": "", "input_json_delta": ""}
        num_text = 0
        for event in events:
            if event.type == "content_block_delta":
                kind = event.delta.type
                name = {"input_json_delta": "partial_json"}.get(kind, kind.removesuffix("_delta"))
                told[kind] += getattr(event.delta, name)
                num_text += kind == "text_delta"
        assert told["thinking_delta"] == "Hm, <3."
        assert told["text_delta"] == "Oh <t see."
        assert num_text > 1, "it came in pieces"
        assert told["signature_delta"] == signature_of("Hm, <3.")
        assert json.loads(told["input_json_delta"]) == {"a": 1}
        whole = await talk.ask(tools=[ADD])
        assert [block.type for block in whole.content] == ["thinking", "text", "tool_use"]
        assert events[-2].usage.output_tokens == whole.usage.output_tokens == len(text.encode()) + 1


@pytest.mark.parametrize("streamed", [False, True])
@in_loop
async def test_why_an_answer_ended_is_said_and_which_stop_sequence_it_was(streamed: bool) -> None:
    async with claude(by=lambda _: "one two three") as talk:
        answer = await talk.ask(streamed=streamed, stop_sequences=["five", " three"])
        assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", " three")
        assert answer.content[0].text == "one two"
        answer = await talk.ask(streamed=streamed, max_tokens=5)
        assert (answer.stop_reason, answer.stop_sequence) == ("max_tokens", None)
        answer = await talk.ask([{"role": "user", "content": "Hi "}], streamed=streamed)
        assert (answer.stop_reason, answer.stop_sequence) == ("end_turn", None)
        assert answer.id == "msg-2"


@in_loop
async def test_keys_come_by_either_header_and_errors_are_the_clients_own_exceptions() -> None:
    async with claude(by=lambda _: "Yes.") as talk:
        by_token = anthropic.AsyncAnthropic(
            base_url=talk.world.url, auth_token=talk.world.session.key, max_retries=0
        )
        async with by_token:
            assert (await by_token.messages.create(model="m", max_tokens=9, messages=HI)).role == "assistant"
            assert (await by_token.models.list()).data[0].id == "policy"
        with pytest.raises(anthropic.BadRequestError, match="top_k") as bad:
            await talk.ask(extra_body={"top_k": 5})
        body: Any = bad.value.body
        assert (body["type"], body["error"]["type"]) == ("error", "invalid_request_error")
        for key, raised, kind in (
            ("wrong", anthropic.AuthenticationError, "authentication_error"),
            (None, anthropic.NotFoundError, "not_found_error"),
        ):
            client = talk.client.with_options(**({"api_key": key} if key else {}))
            with pytest.raises(raised) as told:
                await (
                    client.messages.create(model="m", max_tokens=9, messages=HI)
                    if key
                    else client.models.retrieve("x")
                )
            body = told.value.body
            assert body["error"]["type"] == kind
        async with talk.world.http.put(
            talk.world.url + "/v1/messages", headers=talk.world.headers
        ) as response:
            assert (response.status, (await response.json())["type"]) == (405, "error")


@in_loop
async def test_the_beta_client_is_served_and_what_it_asks_of_its_own_server_is_left_out() -> None:
    async with claude(by=lambda _: "Yes.") as talk:
        edits: Any = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}
        shape: Any = {"model": "m", "messages": HI, "betas": ["interleaved-thinking-2025-05-14"]}
        answer = await talk.client.beta.messages.create(max_tokens=9, context_management=edits, **shape)
        counted = await talk.client.beta.messages.count_tokens(**shape)
        assert counted.input_tokens == answer.usage.input_tokens


@in_loop
async def test_a_long_body_is_translated_beside_the_loop_and_a_short_one_on_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    translated, threads = MessagesForm.translated, list[str]()

    def noting(form: MessagesForm, *given: Any) -> Any:
        threads.append(threading.current_thread().name)
        return translated(form, *given)

    monkeypatch.setattr(MessagesForm, "translated", noting)
    async with gateway_world(max_prompt_tokens=50_000, max_length=60_000) as world:
        for text in ("x", "x" * LONG_BODY):
            body = {"messages": [{"role": "user", "content": text}]}
            assert (await world.post(body, path="/v1/messages"))[0] == 200
    assert threads[0] == threading.main_thread().name != threads[1]


@in_loop
async def test_a_forced_call_is_a_tool_use_and_its_beginning_is_counted() -> None:
    async with claude(by=lambda _: ' {"a": 1}}\n</tool_call>') as talk:
        choice: Any = {"tools": [ADD], "tool_choice": {"type": "tool", "name": "add"}}
        counted = await talk.client.messages.count_tokens(model="m", messages=HI, **choice)
        answer = await talk.ask(**choice)
        assert [(block.type, block.input) for block in answer.content] == [("tool_use", {"a": 1})]
        assert answer.usage.input_tokens == counted.input_tokens


class Switching(ByteTokenizer):
    """Its template may be told not to think."""

    template = "{% if enable_thinking is false %}"

    def render(self, messages: Any, *, settings: Any = None, **more: Any) -> str:
        is_off = (settings or {}).get("enable_thinking") is False
        return super().render(messages, **more) + ("<think>\n\n</think>\n\n" if is_off else "")


@in_loop
async def test_thinking_is_turned_off_where_the_template_can_and_one_call_is_all_if_there_may_be_one() -> (
    None
):
    switching = ScriptedEngine(lambda _: "Yes.", tokenizer=Switching())
    for engine, is_off in ((switching, True), (ScriptedEngine(lambda _: "Yes."), False)):
        async with gateway_world(engine) as world:
            body = {"messages": HI, "thinking": {"type": "disabled"}}
            status, answer = await world.post(body, path="/v1/messages")
            assert (status, answer["content"]) == (200, [{"type": "text", "text": "Yes."}])
            prompt = engine.tokenizer.decode(engine.requests[0].prompt_ids.tolist())
            assert prompt.endswith("</think>\n\n") == is_off
    async with claude(by=lambda _: use("add", {"a": 1}) + use("add", {"a": 2})) as talk:
        choice: Any = {"type": "auto", "disable_parallel_tool_use": True}
        answer = await talk.ask(tools=[ADD], tool_choice=choice)
        assert [block.input for block in answer.content] == [{"a": 1}]
        assert (answer.stop_reason, answer.stop_sequence) == ("tool_use", None)


@in_loop
async def test_the_bounds_of_a_chat_are_those_of_a_message_and_a_key_comes_before_the_body() -> None:
    async with gateway_world(max_body_bytes=2**11, max_calls=1) as world:
        path = "/v1/messages"
        body = {"messages": [{"role": "user", "content": "x" * 2**12}]}
        status, answer = await world.post(body, path=path)
        assert (status, answer["error"]["type"]) == (413, "request_too_large")
        status, answer = await world.post(b"{", path=path, headers={"Authorization": "Bearer wrong"})
        assert (status, answer["error"]["type"]) == (401, "authentication_error")
        counts = [await world.post({"messages": HI}, path=f"{path}/count_tokens") for _ in range(11)]
        assert [status for status, _ in counts] == [200] * 10 + [429]
        assert (await world.post({"messages": HI}, path=path))[0] == 200
        status, answer = await world.post({"messages": HI}, path=path)
        assert (status, answer["error"]["type"]) == (429, "rate_limit_error")


@in_loop
async def test_a_session_that_ends_in_the_middle_of_a_stream_ends_it_with_an_error_event() -> None:
    async with gateway_world(ScriptedEngine(gate=asyncio.Event())) as world:
        client = anthropic.AsyncAnthropic(base_url=world.url, api_key=world.session.key, max_retries=0)
        async with client:
            stream = await client.messages.create(model="m", max_tokens=200, messages=HI, stream=True)
            await anext(aiter(stream))
            world.session.end_nowait("the harness is done")
            with pytest.raises(anthropic.APIStatusError, match="the harness is done"):
                _ = [event async for event in stream]


def block(**fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [fields]}]}


def answered(**fields: Any) -> dict[str, Any]:
    return {"messages": [*HI, {"role": "assistant", "content": [fields]}, *HI]}


REFUSED: dict[str, tuple[Any, str]] = {
    "no object": ([1], "JSON object"),
    "no messages": ({}, "messages"),
    "an unknown role": ({"messages": [{"role": "wizard", "content": "x"}]}, "wizard"),
    "an image": (block(type="image", source={}), "messages[0].content: a block is 'image'"),
    "a result without its call": (block(type="tool_result", content="x"), "tool_use_id"),
    "an image in a result": (
        block(type="tool_result", tool_use_id="c", content=[{"type": "image"}]),
        "image",
    ),
    "a call of the user's": (block(type="tool_use", id="c", name="f", input={}), "tool_use"),
    "input that is no object": (answered(type="tool_use", id="c", name="f", input=[1]), "input"),
    "a thought that was changed": (
        answered(type="thinking", thinking="x", signature=signature_of("y")),
        "messages[1].content[0]: Invalid `signature`",
    ),
    "a hidden thought": (answered(type="redacted_thinking", data="x"), "redacted_thinking"),
    "an answer that is begun": (
        {"messages": [*HI, {"role": "assistant", "content": "The"}]},
        "cannot be begun",
    ),
    "a server tool": (
        {"messages": HI, "tools": [{"type": "web_search_20250305", "name": "web_search"}]},
        "web_search",
    ),
    "a tool without schema": ({"messages": HI, "tools": [{"name": "f"}]}, "input_schema"),
    "servers of tools": ({"messages": HI, "mcp_servers": [{}]}, "mcp_servers"),
    "several answers": ({"messages": HI, "n": 2}, "n=2 is refused"),
    "an unknown parameter": ({"messages": HI, "guided_json": {}}, "guided_json"),
    "a choice without name": (
        {"messages": HI, "tools": [ADD], "tool_choice": {"type": "tool"}},
        "tool_choice.name",
    ),
    "a budget of words": ({"messages": HI, "max_tokens": "many"}, "max_tokens"),
}


@in_loop
async def test_what_is_wrong_is_a_400_that_says_what_and_nothing_of_it_reaches_the_engine() -> None:
    async with gateway_world() as world:
        for name, (body, message) in REFUSED.items():
            for path in ("/v1/messages", "/v1/messages/count_tokens"):
                status, answer = await world.post(body, path=path)
                assert (status, answer["type"], answer["error"]["type"]) == (
                    400,
                    "error",
                    "invalid_request_error",
                ), name
                assert message in answer["error"]["message"], name
        assert world.engine.requests == []
        assert world.session.num_refused == 2 * len(REFUSED)


def told(can_turn_off: bool = True, **more: Any) -> dict[str, Any]:
    """A call as a chat."""
    body = json.dumps({"messages": HI, **more}).encode()
    chat: dict[str, Any] = json.loads(
        MessagesForm(can_turn_off=can_turn_off).translated(body, KeptResponses(9)).body
    )
    return chat


def test_what_a_chat_can_say_is_translated() -> None:
    assert told(thinking={"type": "disabled"})["chat_template_kwargs"] == {"enable_thinking": False}
    assert "chat_template_kwargs" not in told(can_turn_off=False, thinking={"type": "disabled"})
    schema = {"type": "object"}
    for given_as in (
        {"output_config": {"effort": "low", "format": {"type": "json_schema", "schema": schema}}},
    ):
        assert told(**given_as)["response_format"]["json_schema"]["schema"] == schema
    answer = {
        "role": "assistant",
        "content": [{"type": "tool_use", "id": "c", "name": "f", "input": {"b": 1, "a": 2}}],
    }
    talks = [HI, [*HI, answer, *HI]]
    short, long = (json.dumps(told(messages=each)["messages"]) for each in talks)
    assert long.startswith(short[:-1]), "what was read once is not read again"
    choice = {"type": "any", "disable_parallel_tool_use": True}
    chat = told(tools=[{**ADD, "strict": True}], tool_choice=choice)
    assert (chat["tool_choice"], chat["parallel_tool_calls"]) == ("required", False)
    function = {"name": "add", "description": "Adds.", "parameters": {"type": "object"}, "strict": True}
    assert chat["tools"] == [{"type": "function", "function": function}]


KEYS = st.sampled_from(["type", "role", "content", "text", "name", "input", "id", "thinking", "tool_use_id"])


@pytest.mark.parametrize("streamed", [False, True])
@in_loop
async def test_a_thread_continues_from_a_message_with_what_is_new(streamed: bool) -> None:
    says = [f"<think>\nA sum.\n</think>\n\n{use('add', {'a': 1})}", "Three."]
    async with claude(*says) as talk:
        made = {"extra_body": {"thread": {"type": "create"}}, "system": "Be brief.", "tools": [ADD]}
        first = await talk.ask(streamed=streamed, **made)
        result = [{"type": "tool_result", "tool_use_id": first.content[-1].id, "content": "3"}]
        more: dict[str, Any] = {"messages": [{"role": "user", "content": result}], "streamed": streamed}
        thread = {"type": "continue", "previous_message_id": first.id}
        second = await talk.ask(**more, extra_body={"thread": thread})
        assert second.content[-1].text == "Three."
        assert talk.prompts()[1].startswith(talk.prompts()[0] + says[0])
        (branch,) = talk.world.session.rollout(0, Outcome(), 1.0)
        assert branch.loss_mask.sum() == sum(len(each.encode()) + 1 for each in says)
        with pytest.raises(anthropic.BadRequestError, match="the thread was created with"):
            await talk.ask(**more, system="Be long.", extra_body={"thread": thread})
        for name in ("msg-7", "x"):
            with pytest.raises(anthropic.NotFoundError, match="not kept") as told:
                await talk.ask(extra_body={"thread": thread | {"previous_message_id": name}})
            body: Any = told.value.body
            assert body["error"]["details"] == {"error_code": "thread_not_found"}, "the SDK starts a new one"


KINDS = st.sampled_from(["user", "assistant", "text", "tool_use", "tool_result", "thinking", "x"])
FIELDS = "messages system tools tool_choice thinking stop_sequences max_tokens output_config stream betas x"
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | KINDS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner),
    max_leaves=10,
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.dictionaries(st.sampled_from(FIELDS.split()), json_values), st.lists(json_values, max_size=2))
def test_any_json_is_a_chat_or_an_error_of_ours(body: dict[str, Any], content: list[Any]) -> None:
    form, reader = MessagesForm(can_turn_off=True), RequestReader(RULES)
    for given_body in (body, {**body, "messages": [{"role": "user", "content": content}]}):
        try:
            translated = form.translated(json.dumps(given_body).encode(), KeptResponses(9))
            outcome: CallRequest | ApiError = form.read(reader, translated.body)
        except ApiError as error:
            outcome = error
        if isinstance(outcome, ApiError):
            assert outcome.status == 400
            assert json.loads(anthropic_error(outcome))["error"]["message"]
