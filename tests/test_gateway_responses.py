"""The official openai client against /v1/responses: tools, thoughts, streams, kept responses."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import openai
import pytest
from gateway_cases import ScriptedEngine, Talk, in_loop, num_forked, talking

from asyncrl.messages.records import Outcome

ADD: dict[str, Any] = {"type": "function", "name": "add", "parameters": {"type": "object"}, "strict": False}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": "ü"}}\n</tool_call>'
THINKS = f"<think>\nTwo sums.\n</think>\n\nLet me add.\n{CALL}\n{CALL}"


async def events(talk: Talk, given: Any = "Hi", **more: Any) -> list[Any]:
    return [event async for event in await talk.respond(given, stream=True, **more)]


def outputs(response: Any) -> list[dict[str, Any]]:
    return [
        {"type": "function_call_output", "call_id": item.call_id, "output": "3"}
        for item in response.output
        if item.type == "function_call"
    ]


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("by", ["id", "items", "sealed items"])
@in_loop
async def test_tool_loop_is_one_branch(by: str, streamed: bool) -> None:
    last = "<think>\nDone.\n</think>\n\nThree."
    shape: dict[str, Any] = {"instructions": "Be short.", "tools": [ADD]}
    if by == "sealed items":
        shape |= {"include": ["reasoning.encrypted_content"], "store": False}
    async with talking(THINKS, last) as talk:
        asked: list[Any] = [{"role": "user", "content": [{"type": "input_text", "text": "1+2?"}]}]
        first = await talk.respond(asked, streamed=streamed, **shape)
        kinds = ["reasoning", "message", "function_call", "function_call"]
        assert [item.type for item in first.output] == kinds
        assert (first.status, first.output_text) == ("completed", "Let me add.")
        assert first.output[0].content[0].text == "Two sums."
        assert json.loads(first.output[2].arguments) == {"a": 1, "b": "ü"}
        if by == "id":
            shape["previous_response_id"] = first.id
            second = await talk.respond(outputs(first), streamed=streamed, **shape)
        else:
            items = [item.model_dump(exclude_none=True) for item in first.output]
            if by == "sealed items":
                del items[0]["content"]
            second = await talk.respond([*asked, *items, *outputs(first)], streamed=streamed, **shape)
        assert second.output_text == "Three."
        assert talk.is_one_branch_of(THINKS, last)
        assert second.usage.output_tokens == len(last.encode()) + 1
        assert second.usage.output_tokens_details.reasoning_tokens == len(b"<think>\nDone.\n</think>")


@in_loop
async def test_response_repeats_the_request_and_can_be_continued() -> None:
    async with talking() as talk:
        asked: dict[str, Any] = {"metadata": {"a": "b"}, "instructions": "x", "tools": [ADD]}
        response = await talk.respond(**asked, tool_choice="none", max_output_tokens=5)
        assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")
        assert (response.metadata, response.instructions, response.tool_choice) == ({"a": "b"}, "x", "none")
        found = await events(talk, "More", previous_response_id=response.id, max_output_tokens=5)
        assert found[-1].type == "response.incomplete"
        unstored = await talk.respond("Hm", store=False)
        for name in (unstored.id, "resp-77"):
            with pytest.raises(openai.NotFoundError, match="not kept") as missing:
                await talk.respond(previous_response_id=name)
            assert missing.value.code == "previous_response_not_found"
            assert missing.value.param == "previous_response_id"
        other = talk.gpt.with_options(api_key=talk.world.open().key)
        with pytest.raises(openai.NotFoundError):
            await other.responses.create(model="m", input="x", previous_response_id=response.id)


@in_loop
async def test_responses_branch_and_return_requested_logprobs() -> None:
    async with talking(engine=ScriptedEngine(lambda request: f"answer {request.seed % 1000}")) as talk:
        first = await talk.respond("Begin")
        await asyncio.gather(*(talk.respond(f"{each}", previous_response_id=first.id) for each in range(3)))
        assert len(talk.world.session.rollout(0, Outcome(), 1.0)) == 3
        assert num_forked(talk.world) == 0
        told = await talk.respond("Say", include=["message.output_text.logprobs"])
        (part,) = told.output[0].content
        assert len(part.logprobs) == told.usage.output_tokens


CODEX_TOOLS: list[Any] = [
    ADD,
    {"type": "namespace", "name": "multi_agent_v1", "description": "Agents.", "tools": [ADD]},
    {"type": "web_search", "external_web_access": False},
]
"""Tools of Codex 0.169."""
OF_AGENTS = "multi_agent_v1__add"


@in_loop
async def test_codex_namespaces_are_called_and_hosted_tools_omitted() -> None:
    says = CALL.replace("add", OF_AGENTS)
    async with talking(CALL, says, "Done.") as talk:
        first = await talk.respond(tools=CODEX_TOOLS)
        item = first.output[0].model_dump(exclude_none=True)
        assert (item["name"], "namespace" in item) == ("add", False)
        assert first.tools[2].type == "web_search", "a response repeats what was asked"
        history = [{"role": "user", "content": "Hi"}, item, *outputs(first)]
        found = await events(talk, history, tools=CODEX_TOOLS)
        item = found[-1].response.output[0].model_dump(exclude_none=True)
        assert (item["name"], item["namespace"]) == ("add", "multi_agent_v1")
        (done,) = [event for event in found if event.type == "response.function_call_arguments.done"]
        assert done.name == "add"
        history += [item, *outputs(found[-1].response)]
        assert (await talk.respond(history, tools=CODEX_TOOLS)).output_text == "Done."
        prompt = talk.world.engine.tokenizer.decode(talk.world.engine.requests[0].prompt_ids)
        assert str(["add", OF_AGENTS]) in prompt
        assert talk.is_one_branch_of(CALL, says, "Done.")


@in_loop
async def test_item_references_resolve_to_kept_items() -> None:
    last = "<think>\nDone.\n</think>\n\nThree."
    async with talking(THINKS, last) as talk:
        first = await talk.respond(tools=[ADD])
        references: list[Any] = [{"type": "item_reference", "id": item.id} for item in first.output]
        history = [{"role": "user", "content": "Hi"}, *references, *outputs(first)]
        assert (await talk.respond(history, tools=[ADD])).output_text == "Three."
        assert talk.is_one_branch_of(THINKS, last)
        for name in ("rs_resp-7", "fc_resp-0_2", "fc_resp-0_x", "x_resp-0", "x"):
            with pytest.raises(openai.NotFoundError) as told:
                await talk.respond([{"type": "item_reference", "id": name}])
            assert told.value.param == "input[0]"
