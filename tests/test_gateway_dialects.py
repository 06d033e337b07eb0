"""All dialects of the gateway: refusals, ignored parameters, errors, logprobs."""

from __future__ import annotations

import asyncio
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import openai
import pytest
from gateway_cases import (
    HI,
    RULES,
    ScriptedEngine,
    gateway_world,
    in_loop,
    num_calls,
    talking,
)
from gateway_wires import BASES, CHAT, DIALECTS, MESSAGES, RESPONSES, TEXT
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from asyncrl.agents.endpoint import anthropic_dialect, openai_dialects
from asyncrl.agents.endpoint.calls import ChatsByAnswer
from asyncrl.agents.endpoint.dialects import Dialect, anthropic_error
from asyncrl.agents.endpoint.requests import (
    ApiError,
    CallRequest,
    ChatRequest,
    RequestReader,
    too_long,
)
from asyncrl.base.errors import EngineError, RequestRefused
from asyncrl.base.extensions import load_place
from asyncrl.messages.records import Outcome
from asyncrl.messages.sampling import CUTS


def said(*messages: Any) -> dict[str, Any]:
    return {"messages": list(messages)}


def user(**block: Any) -> dict[str, Any]:
    return said({"role": "user", "content": [block]})


def assistant(**block: Any) -> dict[str, Any]:
    return said(*HI, {"role": "assistant", "content": [block]}, *HI)


def item(**fields: Any) -> dict[str, Any]:
    return {"input": [fields]}


def schema_of(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}


def allowed(mode: str, *names: str) -> dict[str, Any]:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    allowed_tools = {"mode": mode, "tools": tools}
    return {"type": "allowed_tools", "allowed_tools": allowed_tools}


CALLABLE = {"tools": [{"type": "function", "function": {"name": "f"}}]}
REFUSED: list[tuple[str, Any, str]] = [
    *(
        (path, {**base, "guided": 0}, "guided=0 is refused: there is no such")
        for path, base in BASES.items()
    ),
    *((path, [1], "JSON object") for path in BASES),
    *((path, {}, "") for path in BASES),
    *(
        (path, {**base, **wrong}, next(iter(wrong)))
        for path, base in BASES.items()
        for wrong in (
            {"top_p": 1.5},
            {"logit_bias": {"-1": 1}},
            {"logit_bias": {str(number): 1 for number in range(1025)}},
            {"logit_bias": {str(RULES.vocab_size): 1}},
            {"frequency_penalty": -2.1},
            {"repetition_penalty": 101},
        )
    ),
    (CHAT, b"[" * 100_000, "recursion"),
    (CHAT, b'{"messages": [{"role": "user", "content": "\\ud800"}]}', "not JSON"),
    (CHAT, b'{"messages": [], "seed": ' + b"9" * 4000 + b"}", "seed"),
    (CHAT, said(*HI * 2001), "2001 messages of a token"),
    (
        CHAT,
        user(type="image_url", image_url={"url": "x"}),
        "'image_url' is not supported",
    ),
    (CHAT, said(*HI, {"role": "assistant", "audio": {"id": "a"}}), "reads text"),
    (CHAT, said(*HI) | {"chat_template_kwargs": {"x": [1]}}, "a list of 1 entries"),
    (
        MESSAGES,
        said(*HI) | {"output_config": {"format": {"type": "json_schema"}}},
        "schema",
    ),
    *(
        (CHAT, said(*HI, {"role": "assistant", key: True}), "begins each answer")
        for key in ("prefix", "partial")
    ),
    (
        CHAT,
        said(*HI) | {"response_format": schema_of({"$ref": "#/nowhere"})},
        "response_format",
    ),
    (
        CHAT,
        said(*HI) | {"response_format": schema_of({"patternProperties": 5})},
        "response_format is refused",
    ),
    (CHAT, said(*HI) | {"top_logprobs": 1}, "needs logprobs=true"),
    (CHAT, said(*HI) | {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    (CHAT, said(*HI) | {"stop": ["x"] * 17}, "stop"),
    (
        TEXT,
        {"prompt": "x", "logprobs": 0},
        "logprobs=0 is refused: use /v1/chat/completions",
    ),
    (CHAT, said(*HI) | {"n": 2}, "n=2 is refused: only n=1 is possible here"),
    (CHAT, said(*HI) | {"enable_thinking": False}, "send it in `chat_template_kwargs`"),
    (TEXT, {"prompt": ["x", "y"]}, "one prompt a call"),
    (TEXT, {"prompt": [1, 2, 258]}, "ids 0 to 257"),
    *(
        (RESPONSES, item(type=kind, call_id="c", output="x"), "as such a pair")
        for kind in ("computer_call", "local_shell_call_output", "compaction")
    ),
    (RESPONSES, item(type="custom_tool_call", call_id="c", name="f"), "custom_tool"),
    *(
        (
            MESSAGES,
            assistant(
                type=kind, id="c", tool_use_id="c", name="f", input={}, content=[]
            ),
            "send calls and results of a server's tools as tool_use",
        )
        for kind in ("server_tool_use", "web_search_tool_result")
    ),
    *(
        (CHAT, said(*HI) | {"tool_choice": choice} | CALLABLE, "tool_choice")
        for choice in (
            allowed("auto", "g"),
            allowed("none", "f"),
            {"type": "allowed_tools", "mode": "auto", "tools": ["f"]},
            {"type": "allowed_tools", "allowed_tools": [1]},
            {"type": "allowed_tools", "allowed_tools": {"allowed_tools": {}}},
        )
    ),
    (RESPONSES, {"input": "x" * 2000}, "your input resulted in 2018 tokens"),
    (
        RESPONSES,
        {"input": "x", "text": {"format": {"type": "json_schema", "name": "a"}}},
        "text.format.json_schema",
    ),
    (
        MESSAGES,
        said(*HI) | {"output_config": {"effort": 1}},
        "output_config.effort: Input should be a valid string",
    ),
    *(
        (
            RESPONSES,
            {"input": [{"type": "reasoning"}, {"role": "assistant", "content": odd}]},
            "content: Input should be a valid string",
        )
        for odd in (5, {"type": "output_text", "text": "x"})
    ),
    (
        RESPONSES,
        {
            "input": "x",
            "tools": [
                {"type": "namespace", "name": "a", "tools": [{"type": "function"}]}
            ],
        },
        "name: Input should be a valid string",
    ),
    (
        MESSAGES,
        user(type="image", source={}),
        "messages[0].content[0]: a part of type 'image'",
    ),
    (MESSAGES, assistant(type="tool_use", id="c", name="f"), "tool_use"),
    (
        MESSAGES,
        said(*HI, {"role": "assistant", "content": "The"}),
        "cannot continue it",
    ),
    (
        MESSAGES,
        said(*HI) | {"tools": [{"type": "web_search_2025", "name": "web"}]},
        "web_search_2025",
    ),
    (
        CHAT,
        said(*HI) | {"min_tokens": 5},
        "min_tokens=5 is refused: only min_tokens=0 is possible here",
    ),
]


@in_loop
async def test_message_without_a_text_is_part_of_the_answer_before_it() -> None:
    thought = {
        "type": "reasoning",
        "content": [{"type": "reasoning_text", "text": "Hm."}],
    }
    items = [*HI, thought, {"role": "assistant", "content": None}, *HI]
    async with gateway_world() as world:
        status, answer = await world.post({"input": items}, path=RESPONSES)
        assert status == 200, answer
        (request,) = world.engine.requests
        prompt = world.engine.tokenizer.decode(request.prompt_ids.tolist())
        assert prompt.count("assistant\n") == 2, prompt


@in_loop
async def test_call_of_a_custom_tool_is_a_call_with_its_text() -> None:
    call = {"call_id": "c", "name": "edit", "namespace": "files"}
    result = {"call_id": "c", "output": "Done."}
    custom = [
        {"type": "custom_tool_call", "input": 'say "hi"', **call},
        {"type": "custom_tool_call_output", **result},
    ]
    function = [
        {"type": "function_call", "arguments": '{"input": "say \\"hi\\""}', **call},
        {"type": "function_call_output", **result},
    ]
    async with gateway_world() as world:
        for items in (custom, function):
            body = {"input": [*HI, *items]}
            assert (await world.post(body, path=RESPONSES))[0] == 200
        first, second = (each.prompt_ids.tolist() for each in world.engine.requests)
        assert first == second
        assert "files__edit" in world.engine.tokenizer.decode(first)


@in_loop
async def test_allowed_tools_leave_all_tools_in_the_prompt() -> None:
    tools = [{"type": "function", "function": {"name": name}} for name in "fg"]
    async with gateway_world() as world:
        for choice in ("auto", allowed("auto", "f"), allowed("required", "f")):
            body = said(*HI) | {"tools": tools, "tool_choice": choice}
            status, answer = await world.post(body, path=CHAT)
            assert status == 200, answer
        free, *others = (each.prompt_ids.tolist() for each in world.engine.requests)
        assert all(ids[: len(free)] == free for ids in others)


@in_loop
async def test_gateway_refuses_invalid_bodies_in_all_dialects() -> None:
    async with gateway_world() as world:
        for path, body, message in REFUSED:
            status, answer = await world.post(body, path=path)
            assert (status, answer["error"]["type"]) == (
                400,
                "invalid_request_error",
            ), (body, answer)
            assert message in answer["error"]["message"][:600], (body, answer)
            assert (answer.get("type") == "error") == (path == MESSAGES)
            param = answer["error"].get("param") or ""
            known = openai_dialects.ResponsesRequest.model_fields.keys() | {
                "guided",
                "",
            }
            assert path != RESPONSES or re.split(r"\W", param)[0] in known
        assert world.engine.requests == []
        assert num_calls(world, "refused") == len(REFUSED)
        assert (await world.ask())[0] == 200


def texts(*words: str) -> st.SearchStrategy[str]:
    return st.sampled_from(words)


KEYS = texts(
    *"type role content text name input id thinking arguments call_id output function".split()
)
VALUES = texts(
    "message",
    "user",
    "assistant",
    "text",
    "tool_use",
    "tool_result",
    "function_call",
    "x",
)
FIELDS = (
    "messages input prompt system instructions tools tool_choice thinking reasoning text n stop "
    "logit_bias"
)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | VALUES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner),
    max_leaves=10,
)


UNREAD = """
    min_tokens length_penalty typical_p watermarking allowed_token_ids thinking_token_budget vllm_xargs
    repetition_detection logits_processors logprob_token_ids prompt_logprobs return_token_ids prompt_embeds
    chat_template documents truncate_prompt_tokens structured_outputs guided_json guided_regex enable_thinking
    kv_transfer_params mm_processor_kwargs fallbacks suffix top_logprobs response_format stop"""
"""Parameters of vLLM 0.32 and others that some dialect does not read."""
PARAMETERS = [
    "openai.types.chat.completion_create_params:CompletionCreateParamsStreaming",
    "openai.types.completion_create_params:CompletionCreateParamsStreaming",
    "openai.types.responses.response_create_params:ResponseCreateParamsStreaming",
    "anthropic.types.beta.message_create_params:MessageCreateParamsStreaming",
]
PAGE = Path(__file__).parents[1] / "docs" / "gateway.md"


@pytest.mark.parametrize(
    ("dialect", "params"), [*zip(DIALECTS, PARAMETERS, strict=True)]
)
def test_known_parameters_are_read_refused_or_documented(
    dialect: Dialect, params: str
) -> None:
    reader = RequestReader(replace(RULES, on_sampling_override="honour"))
    page = PAGE.read_text().partition("Ignored, and logged once:")[2]
    ignored, accepted = (
        block.partition("```")[0].split() for block in page.split("```text")[1:3]
    )
    neutral = dict(each.split("=") for each in accepted)
    names = {*UNREAD.split(), *ignored, *neutral, *load_place(params).__annotations__}
    for name in names - dialect.body.model_fields.keys():
        for odd in (
            "null",
            neutral.get(name, "null"),
            "false",
            "true",
            "0",
            "1",
            "2",
            '""',
            '"x"',
            "[]",
            '["text"]',
            "{}",
            '{"x": 1}',
        ):
            body = BASES[f"/v1/{dialect.path}"] | {name: json.loads(odd)}
            off = json.loads(neutral.get(name, "null"))
            if name in ignored or body[name] in (None, off):
                dialect.read(reader, body, ChatsByAnswer(9))
                continue
            with pytest.raises(ApiError, match="is refused") as refusal:
                dialect.read(reader, body, ChatsByAnswer(9))
            assert refusal.value.error["param"] == name


@pytest.mark.parametrize("dialect", DIALECTS, ids=lambda each: each.name)
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.dictionaries(texts(*FIELDS.split()), json_values),
    st.lists(json_values, max_size=2),
)
def test_any_json_is_a_call_or_an_api_error(
    dialect: Dialect, body: dict[str, Any], items: list[Any]
) -> None:
    turns = [
        {"role": "user", "content": items},
        {"role": "assistant", "content": items},
    ]
    for more in (
        {},
        {"messages": items},
        {"input": items},
        {"messages": turns},
        {"input": turns},
    ):
        try:
            outcome: CallRequest | ApiError = dialect.read(
                RequestReader(RULES),
                json.loads(json.dumps({**body, **more})),
                ChatsByAnswer(9),
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
CALLS: list[Any] = [
    {"function": {"name": "f"}},
    {"id": None, "function": {"name": "f"}},
    {"id": "own", "function": {"name": "f"}},
]


def test_calls_without_ids_get_some() -> None:
    (called,) = read([{"role": "assistant", "tool_calls": CALLS}]).messages
    ids = [each["id"] for each in called["tool_calls"]]
    assert ids == ["call00000", "call00001", "own"]


PARTS: list[Any] = [
    "a",
    {"type": "refusal", "refusal": "No."},
    {"type": "redacted_thinking", "data": "xx"},
    {"type": "tool_reference", "tool_name": "f"},
    {
        "type": "document",
        "title": "T",
        "context": "C",
        "source": {"type": "text", "media_type": "text/plain", "data": "d"},
    },
    {
        "type": "search_result",
        "source": "http://x",
        "title": "S",
        "content": [{"type": "text", "text": "r"}],
    },
]
TEXT_OF_PARTS = "a\nNo.\nf\nT\nC\nd\nS\nr"


def calling(**arguments: Any) -> dict[str, Any]:
    call = {"id": "c", "function": {"name": "get weather!" * 20, **arguments}}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


PART = {"type": "text", "text": "Hi", "cache_control": {"type": "ephemeral"}}
MINE = {"role": "assistant", "content": "yes"}
said_yes = [{"type": "text", "text": "yes"}]


@pytest.mark.parametrize(
    ("sent", "read_as"),
    [
        ({**MINE, **LITELLM}, MINE),
        (
            {"role": "user", "content": [PART], "cache_control": {}},
            {"role": "user", "content": "Hi"},
        ),
        ({**MINE, "reasoning": "hm"}, {**MINE, "reasoning_content": "hm"}),
        *(
            (
                {**MINE, "content": [{"type": kind, kind: "hm"}, *said_yes]},
                {**MINE, "reasoning_content": "hm", "unjoined_content": "yes"},
            )
            for kind in ("thinking", "reasoning")
        ),
        ({**MINE, "reasoning": {"effort": 1}, "reasoning_content": ""}, MINE),
        *(
            ({"role": role, "content": PARTS}, {"role": role, "content": TEXT_OF_PARTS})
            for role in ("system", "tool")
        ),
        ({"role": "tool", "content": None}, {"role": "tool", "content": ""}),
        *(
            (calling(arguments=odd), calling(arguments={}))
            for odd in ("", None, '{"a": 1', "[]", "42", '{"a": "\\ud800"}', [1])
        ),
        (calling(), calling()),
        ({**MINE, "prefix": False}, MINE),
    ],
)
def test_templates_get_only_the_keys_they_may_read(sent: Any, read_as: Any) -> None:
    assert read([sent]).messages == [read_as]


@in_loop
async def test_sampling_overrides_follow_the_config() -> None:
    off: dict[str, Any] = {
        "frequency_penalty": 0,
        "logit_bias": {},
        "max_completion_tokens": 10**30,
    }
    off |= {
        "response_format": {"type": "text"},
        "modalities": ["text"],
        "top_p": None,
        "stop": None,
        "tools": [{"type": "function", "function": {"name": "f", "parameters": None}}],
    }
    async with gateway_world() as world:
        assert (await world.ask(user="me", store=True, temperature=0.3, **off))[
            0
        ] == 200
        (request,) = world.engine.requests
        assert (request.temperature, request.top_p, request.max_tokens) == (
            1.0,
            1.0,
            400,
        )
        asked = {"top_p": 0.3, "top_k": 5, "min_p": 0.2}
        assert (await world.ask(**asked))[0] == 200
        assert not world.engine.requests[-1].is_cut
        penalties = {
            "frequency_penalty": 0.3,
            "presence_penalty": 1,
            "repetition_penalty": 2,
        }
        assert (await world.ask(**penalties))[0] == 200
        assert world.engine.requests[-1].adjustment is None
        # A client could not read answers without its bias.
        status, answer = await world.ask(logit_bias={"5": 1})
        assert status == 400
        assert "gateway.on_sampling_override: honour" in answer["error"]["message"]
    cases: list[dict[str, Any]] = [
        {"temperature": 0.0, "top_p": 0.5},
        {"top_p": 0.5},
        {"top_k": 7, "min_p": 0.1},
        {"temperature": 0.001},
        {"top_k": -1},
        {"logit_bias": {"5": -1, "7": 2.5}},
        {"repetition_penalty": 1.5, "frequency_penalty": -2, "presence_penalty": 0.5},
    ]
    # The scripted answers have 13 tokens each.
    for replayed, num_trained in ((frozenset(), 1), (CUTS, 3)):
        world_of = gateway_world(on_sampling_override="honour", replayed=replayed)
        async with world_of as world:
            for asked in cases:
                assert (await world.ask(**asked))[0] == 200
            sampled = [
                (each.temperature, each.top_p, each.top_k, each.min_p)
                for each in world.engine.requests
            ]
            assert sampled == [
                (0, 1, 0, 0),
                (1, 0.5, 0, 0),
                (1, 1, 7, 0.1),
                (0, 1, 0, 0),
                *[(1, 1, 0, 0)] * 3,
            ]
            biased, penalised = world.engine.requests[-2:]
            assert biased.logit_bias == {5: -1.0, 7: 2.5}
            assert penalised.parameters == RULES.sampling.parameters | cases[-1]
            rollout = world.session.rollout(0, Outcome(1.0), 1.0)
            num_sampled = sum(branch.num_sampled for branch in rollout)
            assert num_sampled == 13 * num_trained
            assert world.gateway.gauges()["gateway/untrained"] == 7 - num_trained


MANY = {f"key {number}": "x" for number in range(2000)}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        *((path, base | MANY) for path, base in BASES.items()),
        (CHAT, BASES[CHAT] | {"logit_bias": MANY}),
        (CHAT, BASES[CHAT] | {"chat_template_kwargs": dict.fromkeys(MANY, [])}),
        (CHAT, BASES[CHAT] | {"response_format": {"type": "json_object"} | MANY}),
        (CHAT, said({"role": "user", "content": [MANY]})),
        (RESPONSES, {"input": [MANY]}),
        (MESSAGES, user(**MANY)),
        (MESSAGES, BASES[MESSAGES] | {"tools": [MANY]}),
    ],
)
def test_many_unknown_keys_cost_one_error_and_no_log(
    path: str, body: Any, caplog: pytest.LogCaptureFixture
) -> None:
    (dialect,) = (each for each in DIALECTS if path == f"/v1/{each.path}")
    with pytest.raises(ApiError) as refusal:
        dialect.read(RequestReader(RULES), body, ChatsByAnswer(9))
    assert len(str(refusal.value)) < 300
    invalid = refusal.value.__context__
    assert not isinstance(invalid, ValidationError) or invalid.error_count() < 5
    assert not caplog.records


@in_loop
async def test_200_tools_with_names_of_mcp_servers_are_offered_and_called() -> None:
    names = [f"a/b:{number}" for number in range(200)]
    call = f'<tool_call>{{"name": "{names[-1]}", "arguments": {{}}}}</tool_call>'
    async with talking(call, max_prompt_tokens=2**15, max_length=2**16) as talk:
        tools = [{"name": name, "input_schema": {"type": "object"}} for name in names]
        (block,) = (await talk.message(tools=tools)).content
        functions = [{"type": "function", "name": name} for name in names]
        (item,) = (await talk.respond(tools=functions)).output
        tools = [{"type": "function", "function": {"name": name}} for name in names]
        (chosen,) = (await talk.chat(tools=tools)).choices[0].message.tool_calls
        assert {block.name, item.name, chosen.function.name} == {names[-1]}
        assert all(text.count("a/b:") == 200 for text in talk.prompts())


@in_loop
async def test_errors_are_the_exceptions_of_each_client() -> None:
    import anthropic

    async with talking() as talk:
        with pytest.raises(openai.BadRequestError, match="logit_bias") as bad:
            await talk.chat(logit_bias={"5": 1})
        assert (bad.value.param, bad.value.type) == (
            "logit_bias",
            "invalid_request_error",
        )
        with pytest.raises(anthropic.BadRequestError, match="mcp_servers"):
            await talk.message(extra_body={"mcp_servers": [{}]})
        with pytest.raises(openai.AuthenticationError, match="session key"):
            await talk.gpt.with_options(api_key="wrong").models.list()
        with pytest.raises(anthropic.AuthenticationError):
            await talk.claude.with_options(api_key="wrong").models.list()
        for error, raised, message in (
            (
                RequestRefused("engine-0 refused it", why="too long"),
                openai.BadRequestError,
                "too long",
            ),
            (
                EngineError("engine-0", "nonsense"),
                openai.InternalServerError,
                "The run is ending",
            ),
        ):
            talk.world.engine.error = error
            with pytest.raises(raised, match=message):
                await talk.chat()
        assert [each.component for each in talk.world.broken] == ["engine-0"]


@in_loop
async def test_session_that_ends_during_a_stream_sends_an_error_event() -> None:
    import anthropic

    async with talking(engine=ScriptedEngine(gate=asyncio.Event())) as talk:
        streams: list[Any] = [
            await ask(stream=True) for ask in (talk.chat, talk.respond, talk.message)
        ]
        for stream in streams:
            await anext(aiter(stream))
        talk.world.session.end_nowait("the harness is done")
        for stream in streams:
            with pytest.raises(
                (openai.APIError, anthropic.APIStatusError), match="the harness is done"
            ):
                _ = [event async for event in stream]
        assert len(talk.world.engine.cancelled) == 3


def test_anthropic_turns_become_chat_messages() -> None:
    thought = {"type": "thinking", "thinking": "hm", "signature": ""}
    named = [{"type": "tool_reference", "tool_name": name} for name in "gfh"]
    result = {
        "type": "tool_result",
        "tool_use_id": "c",
        "content": [{"type": "image"}, *named],
    }
    turns: list[Any] = [
        {"role": "system", "content": ["A", "B"]},
        {"role": "system", "content": [], "output_config": {"effort": "low"}},
        {"role": "assistant", "content": [thought, {"type": "redacted_thinking"}]},
        {"role": "user", "content": [result]},
    ]
    tools: list[Any] = [
        {"name": "find"},
        *({"name": name, "defer_loading": True} for name in "fg"),
    ]
    reader = RequestReader(RULES)
    asked: Any = anthropic_dialect.MESSAGES.read(
        reader, said(*turns) | {"tools": tools}, ChatsByAnswer(9)
    )[0]
    found = [f'<function>{{"name": "{name}"}}</function>' for name in "gf"]
    lines = (
        "[image: this model reads text only]",
        "<functions>",
        *found,
        "</functions>",
        "h",
    )
    assert [each["content"] for each in asked.messages] == ["AB", "", "\n".join(lines)]
    assert asked.messages[1]["reasoning_content"] == "hm"
    assert [tool["function"]["name"] for tool in asked.shown_tools] == ["find"]
    assert reader.num_with_notes == 1
    chat = read([{"role": "tool", "content": result["content"]}], tools=asked.tools)
    assert chat.messages[0]["content"] == "\n".join(lines), "a chat shows them, too"


@in_loop
async def test_answers_continue_through_javascript_and_in_parts() -> None:
    sampled = '{"a": 1.0, "b": [9007199254740993, -0.0, 1e21]}'
    says = (
        f'One. Two.<tool_call>\n{{"name": "add", "arguments": {sampled}}}\n</tool_call>'
    )
    tools = [{"type": "function", "function": {"name": "add"}}]
    async with talking(says, "Done.") as talk:
        answer = (
            (await talk.chat(tools=tools))
            .choices[0]
            .message.model_dump(exclude_none=True)
        )
        answer["tool_calls"][0]["function"]["arguments"] = (
            '{"a":1,"b":[9007199254740992,0,1e+21]}'
        )
        answer["content"] = [
            {"type": "text", "text": "One. "},
            {"type": "text", "text": "Two."},
        ]
        await talk.chat([*HI, answer, {"role": "tool", "content": "3"}], tools=tools)
        assert talk.is_one_branch_of(says, "Done.")


def test_errors_have_the_words_and_types_of_the_vendors() -> None:
    error = too_long("2001 tokens", 2000, "messages")
    most = "This model's maximum context length is 2000 tokens."
    assert str(error).startswith(
        f"{most} However, your messages resulted in 2001 tokens."
    )
    assert (
        anthropic_error(error)["error"]["message"]
        == "prompt is too long: 2001 tokens > 2000 maximum"
    )
    for each in "401 authentication, 403 permission, 408 timeout, 410 invalid_request, 502 api".split(
        ", "
    ):
        status, kind = each.split()
        assert (
            anthropic_error(ApiError(int(status), "x"))["error"]["type"]
            == f"{kind}_error"
        )
