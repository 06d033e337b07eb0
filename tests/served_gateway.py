"""Checks of a served gateway with a random model: conformance, structured output, sampling parameters."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import openai
from gateway_conformance import CHECKS, check_server, table
from jsonschema import Draft202012Validator

PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer", "maximum": 120}},
    "required": ["name", "age"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}
"""Its answers are short."""
TOOL: Any = {"type": "function", "function": {"name": "add", "parameters": PERSON, "strict": True}}
NAMED: Any = {"type": "function", "function": {"name": "add"}}
FORMAT: Any = {
    "type": "json_schema",
    "json_schema": {"name": "person", "schema": PERSON, "strict": True},
}


def check_gateway(url: str, key: str) -> None:
    """Check a gateway with on_sampling_override=honour; `url` without /v1."""
    results = asyncio.run(check_server(url, key))
    assert [(name, how) for name, how, _ in results] == [(name, "ok") for name in CHECKS], table(results)
    with openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0) as client:
        _check_forms(client)
        _check_sampling(client)


def _ask(client: openai.OpenAI, **more: Any) -> Any:
    messages: Any = [{"role": "user", "content": "hi"}]
    (choice,) = client.chat.completions.create(model="m", messages=messages, **more).choices
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
    narrow = [_ask(client, top_p=0.001, seed=seed, **asked) for seed in range(2)]
    assert [each.message.content for each in narrow] == [greedy[0].message.content] * 2, "one token is left"
