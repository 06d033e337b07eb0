"""Check a server with the official clients of OpenAI and Anthropic.

    python tests/gateway_conformance.py http://127.0.0.1:8700 KEY

The server may be a gateway (`asyncrl serve gateway` prints address and key), vLLM, or a proxy. Each line of
the table is one check. `not ok`: clients would go wrong. `not offered`: the server refuses with a clear
error, or has no such endpoint. The exit status is 0 if nothing is not ok and something is ok. The checks make
about 40 calls, with prompts of up to 1,600 characters and answers of up to 128 tokens; what the model answers
does not matter.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import sys
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import anthropic
import httpx
import openai

HI: list[Any] = [{"role": "user", "content": "Say hello."}]
SCHEMA: Any = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER: Any = {"name": "weather", "description": "The weather of a city.", "parameters": SCHEMA}
TOOLS: list[Any] = [{"type": "function", "function": WEATHER}]
ASKED: list[Any] = [{"role": "user", "content": "How is the weather in Rome? Call the tool."}]
FUNCTION: Any = {"name": "weather", "arguments": '{"city": "Rome"}'}
FEW = 16
PATHS = ("chat/completions", "completions", "responses", "messages")


@dataclass
class Server:
    gpt: openai.AsyncOpenAI
    claude: anthropic.AsyncAnthropic
    http: httpx.AsyncClient
    """With the key and the address ending in /v1/."""
    model: str

    async def chat(self, messages: Any = HI, **more: Any) -> Any:
        shape = {"model": self.model, "max_tokens": FEW, **more}
        return await self.gpt.chat.completions.create(messages=messages, **shape)

    async def respond(self, items: Any = "Say hello.", **more: Any) -> Any:
        shape = {"model": self.model, "max_output_tokens": FEW, **more}
        return await self.gpt.responses.create(input=items, **shape)

    async def message(self, messages: Any = HI, **more: Any) -> Any:
        shape = {"model": self.model, "max_tokens": FEW, **more}
        return await self.claude.messages.create(messages=messages, **shape)


CHECKS: dict[str, Callable[[Server], Awaitable[None]]] = {}
Check = Callable[[Server], Awaitable[None]]


def check(name: str) -> Callable[[Check], Check]:
    return lambda function: CHECKS.setdefault(name, function)


def error_of(response: httpx.Response) -> str:
    return str(response.json()["error"]["message"])


@check("models: list and one")
async def _models(server: Server) -> None:
    models = await server.gpt.models.list()
    assert (await server.gpt.models.retrieve(models.data[0].id)).object == "model"


@check("errors: a wrong key is a 401 without the key")
async def _wrong_key(server: Server) -> None:
    wrong = {"Authorization": "Bearer wrong-key", "x-api-key": "wrong-key"}
    response = await server.http.post(PATHS[0], json={"messages": HI}, headers=wrong)
    assert response.status_code == 401, f"it answers {response.status_code}"
    assert "wrong-key" not in error_of(response)


@check("errors: bad input is a 4xx with a message")
async def _bad_input(server: Server) -> None:
    wizard = [{"role": "wizard", "content": "x"}]
    junk: list[Any] = [b"{", b"\xff\xfe", b"[" * 50_000, [], {}, {"messages": 7, "input": 7, "prompt": {}}]
    junk += [{"messages": each, "input": each, "prompt": [each]} for each in ([], [7], wizard)]
    junk += [{"messages": HI, "input": "x", "prompt": "x", "stream": "maybe"}]
    for path in (*PATHS, "no/such/route"):
        for body in junk:
            content = body if isinstance(body, bytes) else json.dumps(body).encode()
            response = await server.http.post(path, content=content)
            assert 400 <= response.status_code < 500, f"{path} answers {response.status_code} to {body!r:.80}"
            assert error_of(response) or response.status_code == 404


@check("chat: answers with usage")
async def _chat(server: Server) -> None:
    answer = await server.chat(max_tokens=3)
    (choice,) = answer.choices
    assert (answer.object, choice.message.role) == ("chat.completion", "assistant")
    assert choice.finish_reason in ("stop", "length"), f"finish_reason is {choice.finish_reason}"
    usage = answer.usage
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens, "usage is not the sum"
    assert 0 < usage.completion_tokens <= 3, "max_tokens=3 is exceeded"


@check("chat: continues a conversation")
async def _conversation(server: Server) -> None:
    message = (await server.chat()).choices[0].message.model_dump()
    parts = [{"type": "text", "text": "Be "}, {"type": "text", "text": "short."}]
    await server.chat([{"role": "system", "content": parts}, *HI, message, *HI])


@check("chat: streams")
async def _stream(server: Server) -> None:
    shape: Any = {"stream": True, "stream_options": {"include_usage": True}}
    chunks = [chunk async for chunk in await server.chat(**shape)]
    choices = [choice for chunk in chunks for choice in chunk.choices]
    assert choices[0].delta.role == "assistant"
    assert len([choice for choice in choices if choice.finish_reason]) == 1
    assert any(choice.delta.content for choice in choices), "no content comes"
    assert chunks[-1].usage is not None, "include_usage gives no usage"
    body = {"model": server.model, "messages": HI, "max_tokens": FEW, "stream": True}
    response = await server.http.post(PATHS[0], json=body)
    assert response.text.rstrip().endswith("[DONE]"), "a stream does not end with [DONE]"


@check("chat: stop texts are hidden")
async def _stop(server: Server) -> None:
    stops = ["e", "a", "o", "."]
    content = (await server.chat(stop=stops)).choices[0].message.content or ""
    content = re.sub(r"<\|\w+\|>", "", content)  # stop texts match no names of special tokens
    assert not any(stop in content for stop in stops), f"the answer contains a stop text: {content!r:.80}"


@check("chat: equal seeds give equal answers")
async def _seed(server: Server) -> None:
    answers = [(await server.chat(seed=5)).choices[0].message.content for _ in range(2)]
    assert answers[0] == answers[1]


@check("chat: n")
async def _n(server: Server) -> None:
    indices = [choice.index for choice in (await server.chat(n=2)).choices]
    assert indices == [0, 1], f"n=2 gives the choices {indices}"


@check("chat: logprobs")
async def _logprobs(server: Server) -> None:
    content = (await server.chat(logprobs=True, top_logprobs=2)).choices[0].logprobs.content
    assert content
    assert all(token.logprob <= 0 and len(token.top_logprobs) in (2, 3) for token in content)


@check("chat: tools and their results")
async def _tools(server: Server) -> None:
    await server.chat(ASKED, tools=TOOLS, max_tokens=128)
    calls = [{"id": f"call_{each}", "type": "function", "function": FUNCTION} for each in "ab"]
    results = [{"role": "tool", "tool_call_id": call["id"], "content": "Sunny."} for call in calls]
    answer = {"role": "assistant", "content": None, "tool_calls": calls}
    await server.chat([*ASKED, answer, *results], tools=TOOLS)


@check("chat: tool_choice required")
async def _required(server: Server) -> None:
    (choice,) = (await server.chat(ASKED, tools=TOOLS, tool_choice="required", max_tokens=128)).choices
    if choice.finish_reason != "length":
        assert choice.message.tool_calls, "the answer has no call"
        assert isinstance(json.loads(choice.message.tool_calls[0].function.arguments), dict)


@check("chat: response_format json_schema")
async def _schema(server: Server) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "place", "schema": SCHEMA, "strict": True}}
    (choice,) = (await server.chat(response_format=form, max_tokens=128)).choices
    assert choice.finish_reason == "length" or "city" in json.loads(choice.message.content)


@check("completions: answers and streams")
async def _completions(server: Server) -> None:
    shape: Any = {"model": server.model, "prompt": "Once upon a time", "max_tokens": FEW}
    assert isinstance((await server.gpt.completions.create(**shape)).choices[0].text, str)
    chunks = [chunk async for chunk in await server.gpt.completions.create(**shape, stream=True)]
    assert any(choice.text for chunk in chunks for choice in chunk.choices), "no text comes"


@check("responses: answers with usage")
async def _responses(server: Server) -> None:
    answer = await server.respond(instructions="Be short.")
    assert answer.status in ("completed", "incomplete")
    assert answer.output, "the output has no items"
    usage = answer.usage
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens, "usage is not the sum"


@check("responses: streams numbered events")
async def _responses_stream(server: Server) -> None:
    events = [event async for event in await server.respond(stream=True)]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events]
    assert kinds[0] == "response.created"
    assert kinds[-1] in ("response.completed", "response.incomplete")
    for kind in ("output_item", "content_part"):
        assert kinds.count(f"response.{kind}.added") == kinds.count(f"response.{kind}.done") > 0
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert text == events[-1].response.output_text, "the deltas are not the text of the response"


@check("responses: previous_response_id")
async def _previous(server: Server) -> None:
    first = await server.respond()
    await server.respond("And again.", previous_response_id=first.id)
    body = {"model": server.model, "input": "x", "previous_response_id": "resp_unknown"}
    assert (await server.http.post(PATHS[2], json=body)).status_code in (400, 404)


@check("responses: tools and their results")
async def _responses_tools(server: Server) -> None:
    tools: Any = [{"type": "function", **WEATHER}]
    await server.respond(ASKED, tools=tools, max_output_tokens=128)
    call = {"type": "function_call", "call_id": "call_1", **FUNCTION}
    result = {"type": "function_call_output", "call_id": "call_1", "output": "Sunny."}
    await server.respond([*ASKED, call, result], tools=tools)


@check("messages: answers with usage")
async def _messages(server: Server) -> None:
    answer = await server.message(system=[{"type": "text", "text": "Be short."}])
    assert (answer.type, answer.role) == ("message", "assistant")
    assert answer.content[0].type
    assert answer.stop_reason in ("end_turn", "max_tokens"), f"stop_reason is {answer.stop_reason}"
    assert answer.usage.input_tokens > 0 < answer.usage.output_tokens
    counted = await server.claude.messages.count_tokens(model=server.model, messages=HI)
    assert counted.input_tokens == (await server.message()).usage.input_tokens


@check("messages: streams its blocks")
async def _messages_stream(server: Server) -> None:
    kinds = [event.type async for event in await server.message(stream=True) if event.type != "ping"]
    assert kinds[0] == "message_start"
    assert kinds[-2:] == ["message_delta", "message_stop"]
    assert kinds.count("content_block_start") == kinds.count("content_block_stop") > 0


@check("messages: stop_sequences")
async def _stop_sequences(server: Server) -> None:
    stops = ["e", "a", "o", "."]
    answer = await server.message(stop_sequences=stops, max_tokens=64)
    assert answer.stop_reason in ("max_tokens", "end_turn") or answer.stop_sequence in stops


@check("messages: tools and their results")
async def _messages_tools(server: Server) -> None:
    tools: Any = [{"name": "weather", "description": "The weather.", "input_schema": SCHEMA}]
    await server.message(ASKED, tools=tools, max_tokens=128)
    city = {"city": "Rome"}
    uses = [{"type": "tool_use", "id": f"t{each}", "name": "weather", "input": city} for each in "ab"]
    results = [{"type": "tool_result", "tool_use_id": use["id"], "content": "Sunny."} for use in uses]
    turns = [{"role": "assistant", "content": uses}, {"role": "user", "content": results}]
    await server.message([*ASKED, *turns], tools=tools)


@check("messages: errors in Anthropic's form")
async def _messages_error(server: Server) -> None:
    headers = {"anthropic-version": "2023-06-01"}
    body = {"model": server.model, "max_tokens": FEW, "messages": "x"}
    response = await server.http.post(PATHS[3], json=body, headers=headers)
    assert response.status_code in (400, 404), f"it answers {response.status_code}"
    assert response.status_code == 404 or response.json()["error"]["type"] == "invalid_request_error"


# ---- running them

Result = tuple[str, str, str]
"""(check, ok | not ok | not offered, why)."""


async def check_server(url: str, key: str, *, model: str = "", timeout_s: float = 120.0) -> list[Result]:
    """Run every check, in order. Raises openai.APIError if the server is not there or refuses the key."""
    url = url.rstrip("/").removesuffix("/v1")
    shape: Any = {"api_key": key, "max_retries": 0, "timeout": timeout_s}
    headers = {"Authorization": f"Bearer {key}", "x-api-key": key, "Content-Type": "application/json"}
    async with (
        openai.AsyncOpenAI(base_url=f"{url}/v1", **shape) as gpt,
        anthropic.AsyncAnthropic(base_url=url, **shape) as claude,
        httpx.AsyncClient(base_url=f"{url}/v1/", headers=headers, timeout=timeout_s) as http,
    ):
        server = Server(gpt, claude, http, model or (await gpt.models.list()).data[0].id)
        return [(name, *await _result(function, server)) for name, function in CHECKS.items()]


async def _result(function: Check, server: Server) -> tuple[str, str]:
    try:
        await function(server)
    except (openai.APIStatusError, anthropic.APIStatusError) as error:
        is_refused = error.status_code in (400, 404, 405, 422, 501)
        return "not offered" if is_refused else "not ok", f"{error!s:.160}"
    except Exception as error:  # the answer has another shape, or none came
        return "not ok", f"{type(error).__name__}: {error!s:.160}"
    return "ok", ""


def table(results: Sequence[Result]) -> str:
    width = max(len(name) for name, _, _ in results)
    lines = [f"{name:<{width}}  {how}{': ' if why else ''}{why}" for name, how, why in results]
    counts = {how: sum(each == how for _, each, _ in results) for how in ("ok", "not ok", "not offered")}
    return "\n".join([*lines, "", ", ".join(f"{count} {how}" for how, count in counts.items())])


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("url", help="address of the server, with or without /v1")
    parser.add_argument("key", help="API key")
    parser.add_argument("--model", default="", help="model of the calls (default: the first of /v1/models)")
    parser.add_argument("--timeout", type=float, default=120.0, metavar="S", help="limit of a call")
    given = parser.parse_args(arguments)
    checking = check_server(given.url, given.key, model=given.model, timeout_s=given.timeout)
    try:
        results = asyncio.run(checking)
    except openai.APIError as error:
        print(f"nothing was checked: {error}", file=sys.stderr)
        return 1
    print(table(results))
    outcomes = {how for _, how, _ in results}
    return 0 if "ok" in outcomes and "not ok" not in outcomes else 1


if __name__ == "__main__":
    sys.exit(main())
