"""The official openai client against /v1/responses: whole and streamed, tools, thoughts, and calls that go on
from a response by its id.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import openai
import pytest
from gateway_cases import HI, RULES, ScriptedEngine, World, gateway_world, in_loop, num_forked
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from asyncrl.agents.endpoint.answers import ApiError
from asyncrl.agents.endpoint.forms.responses import ResponsesForm
from asyncrl.agents.endpoint.forms.responses_written import MAX_BODIES, KeptResponses
from asyncrl.agents.endpoint.requests import CallRequest, RequestReader
from asyncrl.messages.records import Outcome

ADD: dict[str, Any] = {"type": "function", "name": "add", "parameters": {"type": "object"}, "strict": False}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": "ü"}}\n</tool_call>'
THINKS = f"<think>\nTwo sums.\n</think>\n\nLet me add.\n{CALL}\n{CALL}"


class Responses:
    """The client of one session. `ask` streams or not."""

    def __init__(self, world: World, client: openai.AsyncOpenAI) -> None:
        self.world, self.client = world, client

    async def ask(self, given: Any = "Hi", *, streamed: bool = False, **more: Any) -> Any:
        if not streamed:
            return await self.client.responses.create(model="m", input=given, **more)
        async with self.client.responses.stream(model="m", input=given, **more) as stream:
            return await stream.get_final_response()

    async def events(self, given: Any = "Hi", **more: Any) -> list[Any]:
        stream = await self.client.responses.create(model="m", input=given, stream=True, **more)
        return [event async for event in stream]

    def is_one_branch_of(self, *answers: str) -> bool:
        (trajectory,) = self.world.session.rollout(0, Outcome(), 1.0)
        num_sampled = sum(len(each.encode()) + 1 for each in answers)
        return num_forked(self.world) == 0 and trajectory.loss_mask.sum() == num_sampled


@asynccontextmanager
async def responding(
    *answers: str, by: Callable[[Any], str] | None = None, **config: Any
) -> AsyncIterator[Responses]:
    told = iter(answers)
    async with gateway_world(ScriptedEngine(by or (lambda _: next(told))), **config) as world:
        key = world.session.key
        async with openai.AsyncOpenAI(base_url=world.url + "/v1", api_key=key, max_retries=0) as client:
            yield Responses(world, client)


def outputs(response: Any) -> list[dict[str, Any]]:
    return [
        {"type": "function_call_output", "call_id": item.call_id, "output": "3"}
        for item in response.output
        if item.type == "function_call"
    ]


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("by", ["id", "items", "sealed items"])
@in_loop
async def test_a_tool_loop_is_one_branch_whichever_way_the_history_comes(by: str, streamed: bool) -> None:
    last = "<think>\nDone.\n</think>\n\nThree."
    shape: dict[str, Any] = {"instructions": "Be short.", "tools": [ADD]}
    if by == "sealed items":
        shape |= {"include": ["reasoning.encrypted_content"], "store": False}
    async with responding(THINKS, last) as talk:
        asked: list[Any] = [{"role": "user", "content": [{"type": "input_text", "text": "1+2?"}]}]
        first = await talk.ask(asked, streamed=streamed, **shape)
        kinds = ["reasoning", "message", "function_call", "function_call"]
        assert [item.type for item in first.output] == kinds
        assert (first.status, first.output_text) == ("completed", "Let me add.")
        assert first.output[0].content[0].text == "Two sums."
        assert json.loads(first.output[2].arguments) == {"a": 1, "b": "ü"}
        if by == "id":
            shape["previous_response_id"] = first.id
            second = await talk.ask(outputs(first), streamed=streamed, **shape)
        else:
            items = [item.model_dump(exclude_none=True) for item in first.output]
            if by == "sealed items":
                del items[0]["content"]
            second = await talk.ask([*asked, *items, *outputs(first)], streamed=streamed, **shape)
        assert second.output_text == "Three."
        assert talk.is_one_branch_of(THINKS, last)
        assert second.usage.output_tokens == len(last.encode()) + 1
        assert second.usage.output_tokens_details.reasoning_tokens == len(b"<think>\nDone.\n</think>")


@in_loop
async def test_a_stream_has_every_event_of_each_item_in_order_and_numbered() -> None:
    async with responding(by=lambda _: THINKS) as talk:
        events = await talk.events(tools=[ADD])
        assert [event.sequence_number for event in events] == list(range(len(events)))
        kinds = [event.type.removeprefix("response.") for event in events]
        once = [kind for kind, before in zip(kinds, [None, *kinds], strict=False) if kind != before]

        def part(text: str) -> list[str]:
            return ["content_part.added", f"{text}.delta", f"{text}.done", "content_part.done"]

        def item(*inner: str) -> list[str]:
            return ["output_item.added", *inner, "output_item.done"]

        call = item("function_call_arguments.delta", "function_call_arguments.done")
        assert once == [
            "created",
            "in_progress",
            *item(*part("reasoning_text")),
            *item(*part("output_text")),
            *call,
            *call,
            "completed",
        ]
        assert kinds.count("output_text.delta") > 1, "it came in pieces"
        for kind, whole in (("reasoning_text", "Two sums."), ("output_text", "Let me add.")):
            deltas = [event.delta for event in events if event.type == f"response.{kind}.delta"]
            (done,) = [event.text for event in events if event.type == f"response.{kind}.done"]
            assert "".join(deltas) == done == whole
        done = [event.item for event in events if event.type == "response.output_item.done"]
        assert done == events[-1].response.output
        assert [event.output_index for event in events if event.type == "response.output_item.done"] == [
            0,
            1,
            2,
            3,
        ]
        for event in events:
            if getattr(event, "item_id", None):
                assert event.item_id == done[event.output_index].id


@in_loop
async def test_a_response_says_what_was_asked_and_is_kept_unless_it_shall_not() -> None:
    async with responding(by=lambda _: "Hello there.") as talk:
        asked: dict[str, Any] = {
            "metadata": {"a": "b"},
            "instructions": "x",
            "tools": [ADD],
            "tool_choice": "none",
        }
        response = await talk.ask(**asked, max_output_tokens=5)
        assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")
        assert (response.metadata, response.instructions, response.tool_choice) == ({"a": "b"}, "x", "none")
        assert (await talk.client.responses.retrieve(response.id)) == response
        events = await talk.events("More", previous_response_id=response.id, max_output_tokens=5)
        assert events[-1].type == "response.incomplete"
        assert (await talk.client.responses.retrieve(events[-1].response.id)) == events[-1].response
        forgotten = await talk.ask("Hm", store=False)
        for name in (forgotten.id, "resp-77"):
            with pytest.raises(openai.NotFoundError, match="not kept") as told:
                await talk.ask(previous_response_id=name)
            assert (told.value.code, told.value.param) == (
                "previous_response_not_found",
                "previous_response_id",
            )
            with pytest.raises(openai.NotFoundError, match="not kept"):
                await talk.client.responses.retrieve(name)
        for _ in range(MAX_BODIES):
            await talk.ask("Again", previous_response_id=response.id)
        with pytest.raises(openai.NotFoundError, match="not among the newest"):
            await talk.client.responses.retrieve(response.id)
        other = talk.client.with_options(api_key=talk.world.open().key)
        with pytest.raises(openai.NotFoundError):
            await other.responses.create(model="m", input="x", previous_response_id=response.id)


@in_loop
async def test_responses_may_branch_from_one_and_logprobs_come_if_asked_for() -> None:
    async with responding(by=lambda request: f"answer {request.seed % 1000}") as talk:
        first = await talk.ask("Begin")
        await asyncio.gather(*(talk.ask(f"Way {each}", previous_response_id=first.id) for each in range(3)))
        assert len(talk.world.session.rollout(0, Outcome(), 1.0)) == 3
        assert num_forked(talk.world) == 0
        told = await talk.ask("Say", include=["message.output_text.logprobs"])
        (part,) = told.output[0].content
        assert len(part.logprobs) == told.usage.output_tokens


@in_loop
async def test_a_format_is_a_grammar_of_the_engine() -> None:
    wanted = {"format": {"type": "json_schema", "name": "n", "schema": {"type": "object"}, "strict": True}}
    async with responding(by=lambda _: '{"a": 1}') as talk:
        response = await talk.ask(text=wanted)
        assert (json.loads(response.output_text), response.text.format.name) == ({"a": 1}, "n")
        body = {
            "messages": HI,
            "output_config": {"format": {"type": "json_schema", "schema": {"type": "object"}}},
        }
        assert (await talk.world.post(body, path="/v1/messages"))[0] == 200
        first, second = (request.grammar for request in talk.world.engine.requests)
        assert first == second is not None


@in_loop
async def test_a_retry_is_the_same_response_and_an_end_in_mid_stream_is_an_error() -> None:
    async with responding(by=lambda _: "Hello.") as talk:
        key = {"Idempotency-Key": "k"}
        first = await talk.ask(extra_headers=key)
        assert (await talk.ask(extra_headers=key)) == first
        assert len(talk.world.engine.requests) == 1
    async with gateway_world(ScriptedEngine(gate=asyncio.Event())) as world:
        client = openai.AsyncOpenAI(base_url=world.url + "/v1", api_key=world.session.key, max_retries=0)
        async with client:
            stream = await client.responses.create(model="m", input="Hi", stream=True)
            await anext(aiter(stream))
            world.session.end_nowait("the harness is done")
            with pytest.raises(openai.APIError, match="the harness is done"):
                _ = [event async for event in stream]


CODEX_TOOLS: list[Any] = [
    ADD,
    {"type": "namespace", "name": "multi_agent_v1", "description": "Agents.", "tools": [ADD]},
    {"type": "web_search", "external_web_access": False},
]
"""As Codex 0.169 sends them."""
OF_AGENTS = "multi_agent_v1__add"


@in_loop
async def test_functions_of_a_namespace_are_called_by_both_names_and_hosted_tools_are_left_out() -> None:
    says = CALL.replace("add", OF_AGENTS)
    async with responding(CALL, says, "Done.") as talk:
        first = await talk.ask(tools=CODEX_TOOLS)
        item = first.output[0].model_dump(exclude_none=True)
        assert (item["name"], "namespace" in item) == ("add", False)
        assert first.tools[2].type == "web_search", "a response repeats what was asked"
        history = [{"role": "user", "content": "Hi"}, item, *outputs(first)]
        events = await talk.events(history, tools=CODEX_TOOLS)
        item = events[-1].response.output[0].model_dump(exclude_none=True)
        assert (item["name"], item["namespace"]) == ("add", "multi_agent_v1")
        (done,) = [event for event in events if event.type == "response.function_call_arguments.done"]
        assert done.name == "add"
        history += [item, *outputs(events[-1].response)]
        assert (await talk.ask(history, tools=CODEX_TOOLS)).output_text == "Done."
        prompt = talk.world.engine.tokenizer.decode(talk.world.engine.requests[0].prompt_ids)
        assert str(["add", OF_AGENTS]) in prompt
        assert talk.is_one_branch_of(CALL, says, "Done.")


@in_loop
async def test_references_to_items_are_the_items() -> None:
    last = "<think>\nDone.\n</think>\n\nThree."
    async with responding(THINKS, last) as talk:
        first = await talk.ask(tools=[ADD])
        references: list[Any] = [{"type": "item_reference", "id": item.id} for item in first.output]
        history = [{"role": "user", "content": "Hi"}, *references, *outputs(first)]
        assert (await talk.ask(history, tools=[ADD])).output_text == "Three."
        assert talk.is_one_branch_of(THINKS, last)
        for name in ("rs_resp-7", "fc_resp-0_2", "fc_resp-0_x", "x_resp-0", "x"):
            with pytest.raises(openai.NotFoundError) as told:
                await talk.ask([{"type": "item_reference", "id": name}])
            assert told.value.param == "input[0]"


REFUSED: dict[str, tuple[Any, str]] = {
    "no object": ([1], "JSON object"),
    "no input": ({}, "input"),
    "an item of no kind": ({"input": [{"x": 1}]}, "input[0]: an item is None"),
    "an item of another tool": ({"input": [{"type": "computer_call"}]}, "computer_call"),
    "an image": ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input_image"),
    "an unknown role": ({"input": [{"role": "wizard", "content": "x"}]}, "role"),
    "arguments that are no object": (
        {"input": [{"type": "function_call", "call_id": "c", "name": "f", "arguments": "[1]"}]},
        "arguments",
    ),
    "an output without call": ({"input": [{"type": "function_call_output", "output": "x"}]}, "call_id"),
    "a thought sealed elsewhere": (
        {"input": [{"type": "reasoning", "summary": [], "encrypted_content": "gAAA"}]},
        "input[0].encrypted_content",
    ),
    "a tool of another kind": ({"input": "x", "tools": [{"type": "custom", "name": "f"}]}, "custom"),
    "such a tool in a namespace": (
        {"input": "x", "tools": [{"type": "namespace", "name": "n", "tools": [{"type": "custom"}]}]},
        "custom",
    ),
    "a choice of tools": ({"input": "x", "tool_choice": {"type": "allowed_tools"}}, "tool_choice"),
    "in the background": ({"input": "x", "background": True}, "background"),
    "a conversation": ({"input": "x", "conversation": "c"}, "conversation"),
    "several answers": ({"input": "x", "n": 2}, "n=2 is refused"),
    "an unknown parameter": ({"input": "x", "guided_json": {}}, "guided_json=an object of 0 entries is ref"),
    "a penalty": ({"input": "x", "frequency_penalty": 1}, "frequency_penalty"),
    "far too many logprobs": ({"input": "x", "top_logprobs": 99}, "top_logprobs"),
}


@in_loop
async def test_what_is_wrong_is_a_400_that_says_what_and_nothing_of_it_reaches_the_engine() -> None:
    async with gateway_world() as world:
        for name, (body, message) in REFUSED.items():
            status, answer = await world.post(body, path="/v1/responses")
            assert (status, answer["error"]["type"]) == (400, "invalid_request_error"), name
            assert message in answer["error"]["message"], name
        assert world.engine.requests == []
        assert world.gateway.stats().refused == {400: len(REFUSED)}


def told(**more: Any) -> dict[str, Any]:
    """A call as a chat."""
    body = json.dumps({"input": "Hi", **more}).encode()
    chat: dict[str, Any] = json.loads(ResponsesForm().translated(body, {}).body)
    return chat


def test_what_a_chat_can_say_is_translated_and_a_longer_input_begins_with_the_same_bytes() -> None:
    schema = {"type": "json_schema", "name": "n", "schema": {"type": "object"}, "strict": True}
    wanted = told(text={"format": schema})["response_format"]
    assert wanted == {
        "type": "json_schema",
        "json_schema": {key: schema[key] for key in ("name", "schema", "strict")},
    }
    assert told(text={"format": {"type": "json_object"}})["response_format"] == {"type": "json_object"}
    chat = told(tool_choice={"type": "function", "name": "add"}, parallel_tool_calls=False, tools=[ADD])
    assert chat["tool_choice"] == {"type": "function", "function": {"name": "add"}}
    assert chat["parallel_tool_calls"] is False
    assert told(reasoning={"effort": "low"})["reasoning_effort"] == "low"
    items: list[Any] = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    short, long = (
        ResponsesForm()
        .translated(json.dumps({"input": each, "instructions": "x"}).encode(), KeptResponses(9))
        .body
        for each in (items[:1], items)
    )
    assert long.startswith(short[: short.index(b"]")])


KEYS = st.sampled_from(
    ["type", "role", "content", "text", "name", "arguments", "call_id", "output", "summary"]
)
KINDS = st.sampled_from(
    ["message", "user", "reasoning", "function_call", "function_call_output", "input_text"]
)
FIELDS = "input instructions tools tool_choice text reasoning include store stream max_output_tokens x"
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | KINDS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner),
    max_leaves=10,
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.dictionaries(st.sampled_from(FIELDS.split()), json_values), st.lists(json_values, max_size=3))
def test_any_json_is_a_chat_or_an_error_of_ours(body: dict[str, Any], items: list[Any]) -> None:
    form, reader = ResponsesForm(), RequestReader(RULES)
    for given_body in (
        body,
        {**body, "input": items},
        {**body, "input": [{"role": "user", "content": items}]},
    ):
        try:
            translated = form.translated(json.dumps(given_body).encode(), KeptResponses(9))
            outcome: CallRequest | ApiError = form.read(reader, translated.body)
        except ApiError as error:
            outcome = error
        if isinstance(outcome, ApiError):
            assert outcome.status in (400, 404)
            assert json.loads(outcome.body())
