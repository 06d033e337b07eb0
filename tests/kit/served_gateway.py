"""Checks of a served gateway with a random model: dialects, structured output, sampling
parameters.
"""

from __future__ import annotations

import json
from typing import Any

import anthropic
import openai
from jsonschema import Draft202012Validator

PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "maximum": 120},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}
"""A gateway with short answers."""
TOOL: Any = {
    "type": "function",
    "function": {"name": "add", "parameters": PERSON, "strict": True},
}
NAMED: Any = {"type": "function", "function": {"name": "add"}}
FORMAT: Any = {
    "type": "json_schema",
    "json_schema": {"name": "person", "schema": PERSON, "strict": True},
}


def check_gateway(url: str, key: str) -> None:
    """Check a gateway with on_sampling_override=honour; `url` without /v1."""
    given: Any = {"api_key": key, "max_retries": 0}
    with (
        openai.OpenAI(base_url=f"{url}/v1", **given) as gpt,
        anthropic.Anthropic(base_url=url, **given) as claude,
    ):
        _check_dialects(gpt, claude)
        _check_forms(gpt)
        _check_sampling(gpt)


def _check_dialects(gpt: openai.OpenAI, claude: anthropic.Anthropic) -> None:
    chat: Any = {
        "model": "m",
        "messages": [{"role": "user", "content": "hello"}],
        "max_tokens": 16,
    }
    options: Any = {"include_usage": True}
    chunks = list(
        gpt.chat.completions.create(**chat, stream=True, stream_options=options)
    )
    whole = gpt.chat.completions.create(**chat, seed=5)
    assert whole.choices == gpt.chat.completions.create(**chat, seed=5).choices
    assert 0 < chunks[-1].usage.completion_tokens <= 16
    answer = gpt.completions.create(model="m", prompt="hello", max_tokens=4)
    assert 0 < answer.usage.completion_tokens <= 4
    asked: Any = {"model": "m", "input": "hello", "max_output_tokens": 16}
    first = gpt.responses.create(**asked)
    *_, last = gpt.responses.create(**asked, previous_response_id=first.id, stream=True)
    assert last.response.usage.input_tokens > first.usage.input_tokens
    with claude.messages.stream(**chat) as stream:
        message = stream.get_final_message()
    counted = claude.messages.count_tokens(model="m", messages=chat["messages"])
    assert message.usage.input_tokens == counted.input_tokens


def _ask(client: openai.OpenAI, **more: Any) -> Any:
    messages: Any = [{"role": "user", "content": "hi"}]
    (choice,) = client.chat.completions.create(
        model="m", messages=messages, **more
    ).choices
    return choice


def _check_forms(client: openai.OpenAI) -> None:
    validate = Draft202012Validator(PERSON).validate
    choice = _ask(client, response_format=FORMAT, seed=1)
    assert choice.finish_reason == "stop"
    validate(json.loads(choice.message.content))
    choice = _ask(client, tools=[TOOL], tool_choice=NAMED, seed=1)
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
    (call,) = choice.message.tool_calls
    validate(json.loads(call.function.arguments))


def _check_sampling(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"max_tokens": 8, "logprobs": True, "top_logprobs": 5}
    found = _ask(client, **asked).logprobs.content
    assert {len(entry.top_logprobs) for entry in found} == {5}
    for entry in found:
        logprobs = [top.logprob for top in entry.top_logprobs]
        assert logprobs == sorted(logprobs, reverse=True)
        assert entry.logprob <= logprobs[0]
    greedy = [_ask(client, temperature=0, seed=seed, **asked) for seed in range(2)]
    assert greedy[0].message.content == greedy[1].message.content
    for entry in greedy[0].logprobs.content:
        assert entry.logprob == entry.top_logprobs[0].logprob
    assert (
        _ask(client, top_p=0.001, **asked).message.content == greedy[0].message.content
    ), "one is left"
