"""The official clients of OpenAI and Anthropic: tools, thoughts, streams, kept
responses.
"""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import openai
import pytest
from gateway_cases import (
    HI,
    ByteTokenizer,
    ScriptedEngine,
    gateway_world,
    in_loop,
    num_calls,
    talking,
)
from text_tokenizers import BOS, byte_level, save

from asyncrl.messages.records import Outcome

SCHEMA: dict[str, Any] = {"type": "object", "properties": {"a": {}}}
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {"name": "add", "strict": True, "parameters": SCHEMA},
    }
]
NAMED: Any = {"type": "function", "function": {"name": "add"}}
RESPONSES_ADD: dict[str, Any] = {
    "type": "function",
    "name": "add",
    "parameters": SCHEMA,
    "strict": False,
}
ANTHROPIC_ADD: dict[str, Any] = {
    "name": "add",
    "description": "Adds.",
    "input_schema": {"type": "object"},
}
DONE = "<think>\nDone.\n</think>\n\nThree."
streams = pytest.mark.parametrize("streamed", [False, True])


def call(name: str = "add", **arguments: Any) -> str:
    text = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    return f"<tool_call>\n{text}\n</tool_call>"


CALL = call(a=1, b=[2, "ü"])
THINKS = f"<think>\nTwo sums.\n</think>\n\nLet me add.\n{CALL}\n{CALL}\nSo."


# ---- chats and completions


@in_loop
async def test_stream_is_whole_across_a_push_and_stops() -> None:
    async with talking("Grüße 🙂🙂 an alle <stop> nie gezeigt") as talk:
        usage = {"include_usage": True}
        chunks = [
            one
            async for one in await talk.chat(
                stream=True, stop=["<stop>"], stream_options=usage
            )
        ]
        pieces = [chunk.choices[0].delta.content or "" for chunk in chunks[:-1]]
        assert "".join(pieces) == "Grüße 🙂🙂 an alle "
        assert sum(map(bool, pieces)) > 5, "it came in pieces"
        assert chunks[-2].choices[0].finish_reason == "stop"
        assert (chunks[-2].usage, chunks[-1].choices) == (None, [])
        assert chunks[-1].usage.completion_tokens == len(
            "Grüße 🙂🙂 an alle <stop>".encode()
        )
        assert talk.world.session.rollout(0, Outcome(), 1.0)[0].num_interruptions == 1


@streams
@in_loop
async def test_tool_result_continues_the_recorded_ids(streamed: bool) -> None:
    says = f"Let me see.\n{CALL}", "It is three."
    async with talking(*says) as talk:
        if streamed:
            async with talk.gpt.chat.completions.stream(
                model="m", messages=HI, tools=TOOLS
            ) as stream:
                answer: Any = await stream.get_final_completion()
        else:
            answer = await talk.chat(tools=TOOLS)
        message = answer.choices[0].message
        assert (answer.choices[0].finish_reason, message.content) == (
            "tool_calls",
            "Let me see.",
        )
        (made,) = message.tool_calls
        assert (made.function.name, json.loads(made.function.arguments)) == (
            "add",
            {"a": 1, "b": [2, "ü"]},
        )
        result = {"role": "tool", "tool_call_id": made.id, "content": "3"}
        last = await talk.chat([*HI, message, result], tools=TOOLS)
        assert last.choices[0].message.content == "It is three."
        assert talk.is_one_branch_of(*says)


@in_loop
async def test_tool_choice_forces_or_forbids_tools() -> None:
    rest = ' {"a": 1}}\n</tool_call>'
    async with talking(rest) as talk:
        answer = await talk.chat(tools=TOOLS, tool_choice=NAMED)
        assert answer.choices[0].message.tool_calls[0].function.arguments == '{"a": 1}'
        answer = await talk.chat(tools=TOOLS, tool_choice="none")
        assert answer.choices[0].message.content == rest
        forced, forbidden = talk.prompts()
        assert forced.endswith('"arguments":')
        assert forbidden.startswith("<|start|>tools\n['add']"), (
            "the prompt does not depend on the choice"
        )
        message = await talk.message(
            tools=[ANTHROPIC_ADD], tool_choice={"type": "tool", "name": "add"}
        )
        assert [(block.type, block.input) for block in message.content] == [
            ("tool_use", {"a": 1})
        ]
    async with talking(tool_format="none") as talk:
        with pytest.raises(openai.BadRequestError, match="tool_format"):
            await talk.chat(tools=TOOLS)


@in_loop
async def test_completions_continue_recorded_ids() -> None:
    async with talking() as talk:
        completions, engine = talk.gpt.completions, talk.world.engine
        answer = await completions.create(model="m", prompt="Once")
        assert answer.choices[0].text == "Hello there."
        ids = [*engine.tokenizer.encode("OnceHello there."), 257, 65]
        await completions.create(model="m", prompt=[ids])
        assert list(engine.requests[1].prompt_ids) == ids
        stream = await completions.create(model="m", prompt=["x"], stream=True)
        assert (
            "".join([chunk.choices[0].text async for chunk in stream]) == "Hello there."
        )
        assert num_calls(talk.world, "extended") == 1


@in_loop
async def test_only_a_text_gets_a_bos(tmp_path: Path) -> None:
    tokenizer = save(byte_level(), tmp_path)
    bos, *ids = tokenizer.encode(BOS + "the fox")
    engine = ScriptedEngine(tokenizer=tokenizer, end=min(tokenizer.end_ids))
    async with gateway_world(engine, vocab_size=tokenizer.vocab_size) as world:
        for prompt in ("the fox", ids):
            await world.post({"prompt": prompt}, path="/v1/completions")
        await world.ask("the fox")
    text, own, chat = (each.prompt_ids.tolist() for each in engine.requests)
    assert (text, own, chat.count(bos)) == ([bos, *ids], ids, 1)


@in_loop
async def test_one_call_at_a_time_gives_the_first_call() -> None:
    async with talking(f"{call(a=1)}\n{call(a=2)}") as talk:
        message = (
            (await talk.chat(tools=TOOLS, parallel_tool_calls=False)).choices[0].message
        )
        (made,) = message.tool_calls
        result = {"role": "tool", "tool_call_id": made.id, "content": "7"}
        await talk.chat([*HI, message, result], tools=TOOLS)
        assert talk.prompts()[1].partition("assistant\n")[2].startswith(call(a=1))
        choice: Any = {"type": "auto", "disable_parallel_tool_use": True}
        answer = await talk.message(tools=[ANTHROPIC_ADD], tool_choice=choice)
        assert [block.input for block in answer.content] == [{"a": 1}]
        both = await talk.chat(tools=TOOLS, parallel_tool_calls=True)
        assert len(both.choices[0].message.tool_calls) == 2


# ---- messages


@streams
@in_loop
async def test_coding_agent_loop_is_one_branch_trained_once(streamed: bool) -> None:
    """Calls like Claude Code's: a changing system part, thoughts, several results in a
    message, and tokens counted first.
    """
    cached = {"cache_control": {"type": "ephemeral"}}
    both = f"{call('read', path='a')}\n{call('read', path='ü')}"
    answers = [
        f"<think>\nTwo files.\n</think>\n\nI look at both.\n{both}",
        f"<think>\nNow add.</think>{CALL}",
        DONE,
    ]
    async with talking(*answers) as talk:
        messages: list[Any] = [
            {"role": "user", "content": [{"type": "text", "text": "1+2?", **cached}]}
        ]
        for number in range(3):
            system: Any = [
                {"type": "text", "text": f"x-anthropic-billing-header: cch={number};"}
            ]
            system += [{"type": "text", "text": "You are an agent.", **cached}]
            shape: Any = {
                "system": system,
                "tools": [{**ANTHROPIC_ADD, "name": "read", **cached}, ANTHROPIC_ADD],
                "thinking": {"type": "enabled", "budget_tokens": 1024},
            }
            counted = await talk.claude.messages.count_tokens(
                model="m", messages=messages, **shape
            )
            answer = await talk.message(
                messages, streamed=streamed, metadata={"user_id": "u"}, **shape
            )
            assert answer.usage.input_tokens == counted.input_tokens
            messages.append({"role": "assistant", "content": answer.content})
            results: list[Any] = [
                {
                    "type": "tool_result",
                    "tool_use_id": block.id,
                    "content": [{"type": "text", "text": "3"}],
                }
                for block in answer.content
                if block.type == "tool_use"
            ]
            if results:
                results[-1] |= {"is_error": True, "content": "no such file", **cached}
                messages.append(
                    {
                        "role": "user",
                        "content": [*results, {"type": "text", "text": "go on"}],
                    }
                )
        thought, text = answer.content
        assert (thought.thinking, text.text, answer.stop_reason) == (
            "Done.",
            "Three.",
            "end_turn",
        )
        prompt = talk.prompts()[1]
        assert (
            "tool\n3<|end|><|start|>tool\nError: no such file<|end|><|start|>user\ngo on"
            in prompt
        )
        assert "billing" not in prompt
        assert talk.is_one_branch_of(*answers)
        assert num_calls(talk.world, "calls") == 3, "counting is not a call"


@streams
@in_loop
async def test_stop_reason_names_the_stop_sequence(streamed: bool) -> None:
    async with talking("one two three") as talk:
        for shape, reason, sequence in (
            ({"stop_sequences": ["five", " three"]}, "stop_sequence", " three"),
            ({"max_tokens": 5}, "max_tokens", None),
            ({}, "end_turn", None),
        ):
            answer = await talk.message(streamed=streamed, **shape)
            assert (answer.stop_reason, answer.stop_sequence) == (reason, sequence)


class Switching(ByteTokenizer):
    """A model whose template reads enable_thinking."""

    template = "{% if enable_thinking is false %}"

    def render(self, messages: Any, *, settings: Any = None, **more: Any) -> str:
        is_off = (settings or {}).get("enable_thinking") is False
        return super().render(messages, **more) + (
            "<think>\n\n</think>\n\n" if is_off else ""
        )


@in_loop
async def test_thinking_can_be_turned_off() -> None:
    async with talking(
        engine=ScriptedEngine(lambda _: "Yes.", tokenizer=Switching())
    ) as talk:
        assert (await talk.message(thinking={"type": "disabled"})).content[
            0
        ].text == "Yes."
        await talk.chat(extra_body={"chat_template_kwargs": {"enable_thinking": False}})
        await talk.chat()
        assert [prompt.endswith("</think>\n\n") for prompt in talk.prompts()] == [
            True,
            True,
            False,
        ]


@streams
@in_loop
async def test_thread_continues_from_a_kept_message(streamed: bool) -> None:
    import anthropic

    says = f"<think>\nA sum.\n</think>\n\n{CALL}", "Three."
    async with talking(*says) as talk:
        made: Any = {
            "extra_body": {"thread": {"type": "create"}},
            "system": "Be brief.",
        }
        first = await talk.message(streamed=streamed, tools=[ANTHROPIC_ADD], **made)
        result = [
            {"type": "tool_result", "tool_use_id": first.content[-1].id, "content": "3"}
        ]
        more: dict[str, Any] = {
            "messages": [{"role": "user", "content": result}],
            "streamed": streamed,
        }
        thread = {"type": "continue", "previous_message_id": first.id}
        second = await talk.message(**more, extra_body={"thread": thread})
        assert second.content[-1].text == "Three."
        assert talk.prompts()[1].startswith(talk.prompts()[0] + says[0])
        assert talk.is_one_branch_of(*says)
        with pytest.raises(
            anthropic.BadRequestError, match="previous_message_id: Field required"
        ):
            await talk.message(extra_body={"thread": {"type": "continue"}})
        unkept = await talk.message()
        for name in ("msg-77", unkept.id):
            with pytest.raises(anthropic.NotFoundError, match="not kept") as missing:
                await talk.message(
                    extra_body={"thread": thread | {"previous_message_id": name}}
                )
            body: Any = missing.value.body
            assert body["error"]["details"] == {"error_code": "thread_not_found"}, (
                "the SDK starts a new one"
            )


# ---- responses


def outputs(response: Any) -> list[dict[str, Any]]:
    return [
        {"type": "function_call_output", "call_id": item.call_id, "output": "3"}
        for item in response.output
        if item.type == "function_call"
    ]


@streams
@pytest.mark.parametrize("by", ["id", "items", "sealed items", "references"])
@in_loop
async def test_tool_loop_is_one_branch(by: str, streamed: bool) -> None:
    hosted = {"type": "web_search", "external_web_access": False}  # of Codex 0.169
    space = {
        "type": "namespace",
        "name": "math",
        "description": "Sums.",
        "tools": [RESPONSES_ADD],
    }
    shape: dict[str, Any] = {"instructions": "Be short.", "tools": [space, hosted]}
    thinks = THINKS.replace('"add"', '"math__add"')
    if by == "sealed items":
        shape |= {"include": ["reasoning.encrypted_content"], "store": False}
    async with talking(thinks, DONE) as talk:
        asked: list[Any] = [
            {"role": "user", "content": [{"type": "input_text", "text": "1+2?"}]}
        ]
        first = await talk.respond(asked, streamed=streamed, **shape)
        kinds = [
            "reasoning",
            "message",
            "function_call",
            "function_call",
            *["message"] * streamed,
        ]
        assert [item.type for item in first.output] == kinds
        assert (first.status, "".join(first.output_text.split())) == (
            "completed",
            "Letmeadd.So.",
        )
        assert first.output[0].content[0].text == "Two sums."
        called = first.output[2]
        assert (called.namespace, called.name) == ("math", "add")
        assert json.loads(called.arguments) == {"a": 1, "b": [2, "ü"]}
        items = [item.model_dump(exclude_none=True) for item in first.output]
        if by == "id":
            shape["previous_response_id"] = first.id
            asked = items = []
        elif by == "references":
            items = [{"type": "item_reference", "id": item.id} for item in first.output]
        elif by == "sealed items":
            del items[0]["content"]
        second = await talk.respond(
            [*asked, *items, *outputs(first)], streamed=streamed, **shape
        )
        assert second.output_text == "Three."
        assert talk.is_one_branch_of(thinks, DONE)
        assert second.usage.output_tokens == len(DONE.encode()) + 1
        assert (
            0
            < second.usage.output_tokens_details.reasoning_tokens
            < second.usage.output_tokens
        )


@in_loop
async def test_response_repeats_the_request_and_can_be_continued() -> None:
    async with talking() as talk:
        asked: dict[str, Any] = {
            "metadata": {"a": "b"},
            "instructions": "x",
            "tools": [RESPONSES_ADD],
        }
        response = await talk.respond(**asked, tool_choice="none", max_output_tokens=5)
        assert (response.status, response.incomplete_details.reason) == (
            "incomplete",
            "max_output_tokens",
        )
        assert (response.metadata, response.instructions, response.tool_choice) == (
            {"a": "b"},
            "x",
            "none",
        )
        stream = await talk.respond(
            "A", previous_response_id=response.id, max_output_tokens=5, stream=True
        )
        assert [event async for event in stream][-1].type == "response.incomplete"
        unstored = await talk.respond("Hm", store=False)
        other = talk.gpt.with_options(api_key=talk.world.open().key)
        for client, name in (
            (talk.gpt, unstored.id),
            (talk.gpt, "resp-77"),
            (other, response.id),
        ):
            with pytest.raises(openai.NotFoundError, match="not kept") as missing:
                await client.responses.create(
                    model="m", input="x", previous_response_id=name
                )
            assert missing.value.code == "previous_response_not_found"
        for name in ("rs_resp-7", "fc_resp-0_2", "x_resp-0", "x"):
            with pytest.raises(openai.NotFoundError) as missing:
                await talk.respond([{"type": "item_reference", "id": name}])
            assert missing.value.param == "input[0]"


@in_loop
async def test_responses_branch_and_return_requested_logprobs() -> None:
    async with talking(
        engine=ScriptedEngine(lambda request: f"answer {request.seed % 1000}")
    ) as talk:
        first = await talk.respond("Begin")
        await asyncio.gather(
            *(
                talk.respond(f"{each}", previous_response_id=first.id)
                for each in range(3)
            )
        )
        assert len(talk.world.session.rollout(0, Outcome(), 1.0)) == 3
        assert num_calls(talk.world, "edited") == 0
        told = await talk.respond("Say", include=["message.output_text.logprobs"])
        (part,) = told.output[0].content
        assert len(part.logprobs) == told.usage.output_tokens


@in_loop
async def test_ids_of_kimi_fit_anthropics_pattern_and_come_back() -> None:
    head = "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0"
    says = f"{head}<|tool_call_argument_begin|>{{}}<|tool_call_end|>"
    tools: Any = [{"name": "f", "input_schema": {"type": "object"}}]
    async with talking(says, "Done.", tool_format="kimi") as talk:
        answer = await talk.message(tools=tools)
        (block,) = answer.content
        assert re.fullmatch("[a-zA-Z0-9_-]{1,64}", block.id)
        call = block.model_dump(include={"type", "id", "name", "input"})
        result = {"type": "tool_result", "tool_use_id": block.id, "content": "r"}
        history = [
            *HI,
            {"role": "assistant", "content": [call]},
            {"role": "user", "content": [result]},
        ]
        await talk.message(history, tools=tools)
        assert talk.is_one_branch_of(says, "Done.")
