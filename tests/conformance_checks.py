"""The conformance checks, by name: each calls a server and raises if it is not as clients expect."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from conformance_client import CheckedServer, Json, NotOfferedError, expect, said_by

Check = Callable[[CheckedServer], Awaitable[None]]
CHECKS: dict[str, Check] = {}

CHAT, TEXT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"
HI: list[Json] = [{"role": "user", "content": "Say hello."}]
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"name": "weather", "description": "The weather of a city.", "parameters": SCHEMA}
FUNCTION = {"type": "function", "function": WEATHER}
ASKED: list[Json] = [{"role": "user", "content": "How is the weather in Rome? Call the tool."}]
CALLED: dict[str, Json] = {
    "id": "call_1",
    "type": "function",
    "function": {"name": "weather", "arguments": '{"city": "Rome"}'},
}
FEW = 16


def check(name: str) -> Callable[[Check], Check]:
    def add(function: Check) -> Check:
        CHECKS[name] = function
        return function

    return add


async def chat(
    server: CheckedServer, messages: Json = None, *, is_optional: bool = False, **more: Any
) -> Json:
    body = {"model": server.model, "messages": messages or HI, "max_tokens": FEW, **more}
    answer = await server.ok(CHAT, body, is_optional=is_optional)
    expect(answer["choices"], "an answer has no choices")
    return answer


def is_sum(usage: Mapping[str, int], *parts: str) -> bool:
    return all(usage[part] > 0 for part in parts) and usage["total_tokens"] == sum(map(usage.get, parts))  # type: ignore[arg-type]


# ---- /v1/models and errors


@check("models: list and one")
async def _models(server: CheckedServer) -> None:
    status, listed = await server.call("GET", "/v1/models")
    if status in (404, 405):
        raise NotOfferedError(said_by(listed))
    expect(listed["object"] == "list" and listed["data"], "there is no list of models")
    status, one = await server.call("GET", f"/v1/models/{listed['data'][0]['id']}")
    expect(status == 200 and one["object"] == "model", f"the first of them answers {status}")


@check("errors: a wrong key is a 401")
async def _wrong_key(server: CheckedServer) -> None:
    for path in (CHAT, MESSAGES):
        body = {"model": server.model, "messages": HI, "max_tokens": FEW}
        status, answer = await server.call("POST", path, body, key="wrong-key", is_anthropic=path == MESSAGES)
        if status in (404, 405) and path == MESSAGES:
            return
        expect(status == 401, f"{path} answers {status}")
        expect("wrong-key" not in said_by(answer), "the error shows the key")


@check("errors: an unknown address is a 404")
async def _unknown_address(server: CheckedServer) -> None:
    status, answer = await server.call("POST", "/v1/no/such/route", {})
    expect(status == 404, f"it answers {status}")
    said_by(answer)


JUNK: list[tuple[str, Json]] = [
    ("no JSON", b"{"),
    ("no Unicode", b"\xff\xfe"),
    ("deep JSON", b"[" * 50_000),
    ("a list", []),
    ("nothing", {}),
    ("messages that are a number", {"messages": 7, "input": 7, "prompt": {}}),
    ("a message that is a number", {"messages": [7], "input": [7], "prompt": [[7.5]]}),
    ("no messages", {"messages": [], "input": [], "prompt": []}),
    ("an unknown role", {"messages": [{"role": "wizard", "content": "x"}], "input": [{"role": "wizard"}]}),
    (
        "max_tokens of -1",
        {"messages": HI, "input": "x", "prompt": "x", "max_tokens": -1, "max_output_tokens": -1},
    ),
    ("a stream of words", {"messages": HI, "input": "x", "prompt": "x", "stream": "maybe"}),
]


@check("errors: bad input is a 4xx that says what")
async def _bad_input(server: CheckedServer) -> None:
    for path in (CHAT, TEXT, RESPONSES, MESSAGES):
        for what, body in JUNK:
            is_object = isinstance(body, dict)
            whole = {"model": server.model, "max_tokens": FEW, **body} if is_object else body
            if path == RESPONSES and is_object:
                whole.pop("max_tokens")
            status, answer = await server.call("POST", path, whole, is_anthropic=path == MESSAGES)
            if status in (404, 405):
                break
            expect(400 <= status < 500, f"{path} answers {status} to {what}")
            said_by(answer)


# ---- /v1/chat/completions


@check("chat: answers, with usage")
async def _chat(server: CheckedServer) -> None:
    answer = await chat(server)
    (choice,) = answer["choices"]
    expect(answer["object"] == "chat.completion" and answer["id"], "it is no chat.completion with an id")
    expect(choice["message"]["role"] == "assistant", "the message is not the assistant's")
    expect(choice["finish_reason"] in ("stop", "length"), f"finish_reason is {choice['finish_reason']}")
    expect(is_sum(answer["usage"], "prompt_tokens", "completion_tokens"), "usage is not the sum of its parts")


@check("chat: a conversation goes on, as clients send answers back")
async def _conversation(server: CheckedServer) -> None:
    message = (await chat(server))["choices"][0]["message"]
    sent = {"role": "assistant", "content": "", "refusal": None, "annotations": [], **message}
    await chat(server, [*HI, sent | {"audio": None}, {"role": "user", "content": "And again."}])


@check("chat: text parts and a system message")
async def _parts(server: CheckedServer) -> None:
    parts = [{"type": "text", "text": "Say "}, {"type": "text", "text": "hello."}]
    await chat(server, [{"role": "system", "content": "Be short."}, {"role": "user", "content": parts}])


@check("chat: streams")
async def _stream(server: CheckedServer) -> None:
    body = {
        "model": server.model,
        "messages": HI,
        "max_tokens": FEW,
        "stream_options": {"include_usage": True},
    }
    *events, (_, last) = await server.events(CHAT, body)
    expect(last == "[DONE]", "a stream does not end with [DONE]")
    chunks = [data for _, data in events]
    expect(len({chunk["id"] for chunk in chunks}) == 1, "the chunks have several ids")
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    expect(choices[0]["delta"].get("role") == "assistant", "the first chunk does not say who speaks")
    reasons = [choice["finish_reason"] for choice in choices if choice.get("finish_reason")]
    expect(len(reasons) == 1, f"finish_reason comes {len(reasons)} times")
    expect(any(choice["delta"].get("content") for choice in choices), "no content comes")
    usage = chunks[-1].get("usage")
    expect(usage and not chunks[-1]["choices"], "include_usage: the last chunk has no usage")
    expect(is_sum(usage, "prompt_tokens", "completion_tokens"), "usage is not the sum of its parts")


@check("chat: max_tokens")
async def _max_tokens(server: CheckedServer) -> None:
    answer = await chat(server, max_tokens=3)
    expect(answer["usage"]["completion_tokens"] <= 3, "more tokens than max_tokens are sampled")


@check("chat: stop texts are not shown")
async def _stop(server: CheckedServer) -> None:
    stops = ["e", "a", "o", "."]
    content = (await chat(server, stop=stops))["choices"][0]["message"]["content"] or ""
    expect(not any(stop in content for stop in stops), f"the answer holds a stop text: {content!r:.80}")


@check("chat: one seed, one answer")
async def _seed(server: CheckedServer) -> None:
    found = [(await chat(server, is_optional=True, seed=5))["choices"][0]["message"]["content"] for _ in "ab"]
    expect(found[0] == found[1], "two answers to one seed differ")


@check("chat: n")
async def _n(server: CheckedServer) -> None:
    answer = await chat(server, n=2, is_optional=True)
    expect([choice["index"] for choice in answer["choices"]] == [0, 1], "n=2 does not give choices 0 and 1")


@check("chat: logprobs")
async def _logprobs(server: CheckedServer) -> None:
    answer = await chat(server, logprobs=True, is_optional=True)
    content = answer["choices"][0]["logprobs"]["content"]
    expect(
        content and all(each["logprob"] <= 0 for each in content), "there are no logprobs, or positive ones"
    )


@check("chat: top_logprobs")
async def _top_logprobs(server: CheckedServer) -> None:
    answer = await chat(server, logprobs=True, top_logprobs=2, is_optional=True)
    tops = [len(each["top_logprobs"]) for each in answer["choices"][0]["logprobs"]["content"]]
    expect(tops and set(tops) <= {2, 3}, f"top_logprobs=2 gives {tops[:3]}")


@check("chat: tools, and their results in the history")
async def _tools(server: CheckedServer) -> None:
    answer = await chat(server, ASKED, tools=[FUNCTION], max_tokens=128, is_optional=True)
    for call in answer["choices"][0]["message"].get("tool_calls") or ():
        expect(call["id"] and isinstance(call["function"]["arguments"], str), "a call has no id or arguments")
    calls = [CALLED, {**CALLED, "id": "call_2"}]
    twice = {"role": "assistant", "content": None, "tool_calls": calls}
    results = [{"role": "tool", "tool_call_id": call["id"], "content": "Sunny."} for call in calls]
    await chat(server, [*ASKED, twice, *results], tools=[FUNCTION])


@check("chat: tool_choice required")
async def _required(server: CheckedServer) -> None:
    answer = await chat(
        server, ASKED, tools=[FUNCTION], tool_choice="required", max_tokens=128, is_optional=True
    )
    (choice,) = answer["choices"]
    calls = choice["message"].get("tool_calls")
    if choice["finish_reason"] != "length":
        expect(calls, "the answer has no call")
        expect(isinstance(json.loads(calls[0]["function"]["arguments"]), dict), "its arguments are no object")


@check("chat: response_format json_schema")
async def _schema(server: CheckedServer) -> None:
    wanted = {"type": "json_schema", "json_schema": {"name": "place", "schema": SCHEMA, "strict": True}}
    answer = await chat(server, response_format=wanted, max_tokens=128, is_optional=True)
    (choice,) = answer["choices"]
    if choice["finish_reason"] != "length":
        expect("city" in json.loads(choice["message"]["content"]), "the answer does not fit its schema")


# ---- /v1/completions


@check("completions: answers and streams")
async def _completions(server: CheckedServer) -> None:
    body = {"model": server.model, "prompt": "Once upon a time", "max_tokens": FEW}
    answer = await server.ok(TEXT, body)
    expect(answer["object"] == "text_completion", "it is no text_completion")
    expect(isinstance(answer["choices"][0]["text"], str), "a choice has no text")
    events = await server.events(TEXT, body)
    expect(events[-1][1] == "[DONE]", "a stream does not end with [DONE]")
    expect(any(data["choices"][0]["text"] for _, data in events[:-1] if data["choices"]), "no text comes")


# ---- /v1/responses


async def respond(
    server: CheckedServer, given: Json = "Say hello.", *, is_optional: bool = False, **more: Any
) -> Json:
    body = {"model": server.model, "input": given, "max_output_tokens": FEW, **more}
    return await server.ok(RESPONSES, body, is_optional=is_optional)


@check("responses: answers, with usage")
async def _responses(server: CheckedServer) -> None:
    answer = await respond(server, instructions="Be short.")
    expect(answer["object"] == "response" and answer["id"], "it is no response with an id")
    expect(answer["status"] in ("completed", "incomplete"), f"status is {answer['status']}")
    expect(answer["output"], "the output has no items")
    expect(is_sum(answer["usage"], "input_tokens", "output_tokens"), "usage is not the sum of its parts")


@check("responses: streams every event, numbered")
async def _responses_stream(server: CheckedServer) -> None:
    body = {"model": server.model, "input": "Say hello.", "max_output_tokens": FEW}
    events = [data for _, data in await server.events(RESPONSES, body) if data != "[DONE]"]
    numbers = [event["sequence_number"] for event in events]
    expect(numbers == sorted(set(numbers)), "the sequence numbers do not grow")
    kinds = [event["type"] for event in events]
    expect(kinds[0] == "response.created", f"the first event is {kinds[0]}")
    expect(kinds[-1] in ("response.completed", "response.incomplete"), f"the last event is {kinds[-1]}")
    for kind in ("output_item", "content_part"):
        begun, ended = (kinds.count(f"response.{kind}.{end}") for end in ("added", "done"))
        expect(begun == ended > 0, f"{begun} {kind}.added, {ended} {kind}.done")
    told = "".join(event["delta"] for event in events if event["type"] == "response.output_text.delta")
    items = [item for item in events[-1]["response"]["output"] if item["type"] == "message"]
    whole = "".join(part["text"] for item in items for part in item["content"])
    expect(told == whole, "the deltas are not the text of the response")


@check("responses: previous_response_id")
async def _previous(server: CheckedServer) -> None:
    first = await respond(server, is_optional=True)
    await respond(server, "And again.", previous_response_id=first["id"], is_optional=True)
    body = {"model": server.model, "input": "x", "previous_response_id": "resp_that_is_not_there"}
    status, answer = await server.call("POST", RESPONSES, body)
    expect(status in (400, 404), f"an unknown response answers {status}")
    said_by(answer)


@check("responses: function tools, and their results as items")
async def _responses_tools(server: CheckedServer) -> None:
    tools = [{"type": "function", **WEATHER}]
    await respond(server, ASKED, tools=tools, max_output_tokens=128, is_optional=True)
    function = CALLED["function"]
    call = {"type": "function_call", "call_id": "call_1", **function}
    result = {"type": "function_call_output", "call_id": "call_1", "output": "Sunny."}
    await respond(server, [*ASKED, call, result], tools=tools, is_optional=True)


# ---- /v1/messages


async def message(
    server: CheckedServer, messages: Json = None, *, is_optional: bool = False, **more: Any
) -> Json:
    body = {"model": server.model, "messages": messages or HI, "max_tokens": FEW, **more}
    return await server.ok(MESSAGES, body, is_optional=is_optional)


@check("messages: answers, with usage")
async def _messages(server: CheckedServer) -> None:
    answer = await message(server, system=[{"type": "text", "text": "Be short."}])
    expect(
        (answer["type"], answer["role"]) == ("message", "assistant"), "it is no message of the assistant's"
    )
    expect(answer["content"] and answer["content"][0]["type"], "the content has no blocks")
    expect(answer["stop_reason"] in ("end_turn", "max_tokens"), f"stop_reason is {answer['stop_reason']}")
    expect(answer["usage"]["input_tokens"] > 0 < answer["usage"]["output_tokens"], "usage has no tokens")


@check("messages: streams its blocks")
async def _messages_stream(server: CheckedServer) -> None:
    events = await server.events(MESSAGES, {"model": server.model, "messages": HI, "max_tokens": FEW})
    expect(all(name == data["type"] for name, data in events), "an event is not named by its type")
    kinds = [name for name, _ in events if name != "ping"]
    expect(kinds[0] == "message_start", f"the first event is {kinds[0]}")
    expect(kinds[-2:] == ["message_delta", "message_stop"], f"the last events are {kinds[-2:]}")
    expect(
        kinds.count("content_block_start") == kinds.count("content_block_stop") > 0, "a block does not end"
    )


@check("messages: stop_sequences say which")
async def _stop_sequences(server: CheckedServer) -> None:
    answer = await message(server, stop_sequences=["e", "a", "o", "."], max_tokens=64)
    if answer["stop_reason"] != "max_tokens":
        how = (answer["stop_reason"], answer["stop_sequence"])
        expect(how[0] == "end_turn" or how[1] in ("e", "a", "o", "."), f"the answer ended by {how}")


@check("messages: tools, and their results as blocks")
async def _messages_tools(server: CheckedServer) -> None:
    tools = [{"name": "weather", "description": "The weather.", "input_schema": SCHEMA}]
    answer = await message(server, ASKED, tools=tools, max_tokens=128, is_optional=True)
    for block in answer["content"]:
        if block["type"] == "tool_use":
            expect(block["id"] and isinstance(block["input"], dict), "a tool_use has no id or input")
    uses = [
        {"type": "tool_use", "id": f"t{each}", "name": "weather", "input": {"city": "Rome"}} for each in "ab"
    ]
    results = [{"type": "tool_result", "tool_use_id": each["id"], "content": "Sunny."} for each in uses]
    talk = [*ASKED, {"role": "assistant", "content": uses}, {"role": "user", "content": results}]
    await message(server, talk, tools=tools)


@check("messages: count_tokens is what a call costs")
async def _count(server: CheckedServer) -> None:
    body = {"model": server.model, "messages": HI}
    counted = await server.ok(f"{MESSAGES}/count_tokens", body, is_optional=True)
    answer = await message(server)
    both = counted["input_tokens"], answer["usage"]["input_tokens"]
    expect(both[0] == both[1], f"{both[0]} tokens are counted, {both[1]} are used")


@check("messages: errors in Anthropic's form")
async def _messages_error(server: CheckedServer) -> None:
    body = {"model": server.model, "max_tokens": FEW, "messages": "x"}
    status, answer = await server.call("POST", MESSAGES, body, is_anthropic=True)
    if status in (404, 405):
        raise NotOfferedError(said_by(answer))
    expect(status == 400, f"it answers {status}")
    expect(
        (answer["type"], answer["error"]["type"]) == ("error", "invalid_request_error"), "it has another form"
    )
