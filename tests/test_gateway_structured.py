"""Structured output through the gateway and a real engine, and its logprobs in the
trainer.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from engine_cases import COMPACT, PERSON, SMALL
from engine_in_process import make_qwen3, running_engine
from engine_replies import Reply
from gateway_cases import HI, RULES, gateway_world, in_loop
from jsonschema import Draft202012Validator
from text_tokenizers import byte_level, save
from trainer_cases import make_spec as make_trainer_spec

from asyncrl.agents.endpoint.grammars import grammar_of, prefill_of
from asyncrl.agents.endpoint.requests import ApiError, RequestReader
from asyncrl.agents.endpoint.tool_formats import find_tool_format
from asyncrl.engines.pool import SegmentJoin
from asyncrl.messages.records import Batch, Completion, Group, GroupId, Outcome, Prompt
from asyncrl.messages.sampling import SamplingRequest
from asyncrl.messages.token_grammars import GrammarError, TokenGrammars
from asyncrl.messages.trainer_api import pack_batch, unpack_batch
from asyncrl.rollouts.tokenizer import HFChatTokenizer
from asyncrl.trainer.ranks.rank import TrainerRank
from asyncrl.trainer.trainer_client import pack_groups

FIRM = PERSON | COMPACT
X = {"type": "integer", "minimum": 0, "maximum": 99}
ADD = {
    "type": "object",
    "properties": {"x": X},
    "required": ["x"],
    "additionalProperties": False,
}
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {"name": "add", "parameters": ADD, "strict": True},
    },
    {"type": "function", "function": {"name": "say", "parameters": {"type": "object"}}},
]
NAMED = {"type": "function", "function": {"name": "add"}}


def schema_format(schema: Any) -> dict[str, Any]:
    return {
        "type": "json_schema",
        "json_schema": {"name": "answer", "schema": schema, "strict": True},
    }


class InProcess:
    """An engine of this process, in place of a pool of servers."""

    def __init__(self, folder: Path, engine: Any) -> None:
        self.tokenizer, self.engine = HFChatTokenizer(folder), engine

    async def generate(self, request: SamplingRequest, **_: Any) -> Completion:
        reply = Reply(self.engine, replace(request, after=None))
        self.engine.submit([reply.run])
        join = SegmentJoin(request)
        join.add(await asyncio.wrap_future(reply), 0)
        return join.completion()


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[InProcess]:
    folder = make_qwen3(
        tmp_path_factory.mktemp("model"), vocab_size=440, eos_token_id=1, **SMALL
    )
    save(byte_level(), folder)
    with running_engine(folder, max_length=600, slots=8) as running:
        yield InProcess(folder, running)


def accepted(tokenizer: HFChatTokenizer, grammar: str, text: str) -> bool:
    """Return whether this is a whole answer. Raises if it cannot even begin an answer."""
    matcher = TokenGrammars(tokenizer._tokenizer, 440).begin(
        grammar, tokenizer.encode(text)
    )
    return bool(matcher.allowed()[1])


CALL_ADD = '{"name": "add", "arguments": {"x": 1}}'
CALL_SAY = '{"name": "say", "arguments": {"to": [1]}}'
WRONG = '{"name": "add", "arguments": {"x": "1"}}'
A, S, W = (f"<tool_call>\n{call}\n</tool_call>" for call in (CALL_ADD, CALL_SAY, WRONG))
SCHEMA = {"response_format": schema_format(ADD)}
REQUIRED: dict[str, Any] = {"tools": TOOLS, "tool_choice": "required"}


def allowed(mode: str) -> dict[str, Any]:
    choice = {"mode": mode, "tools": [{"type": "function", "name": "add"}]}
    return {"tools": TOOLS, "tool_choice": {"type": "allowed_tools", **choice}}


CASES: list[tuple[str, dict[str, Any], str, list[str], list[str]]] = [
    ("plain", {}, "", ['{"x": 1}', '{ "x" : 1 }'], ['{"x": "1"}', "I say", "<think>"]),
    (
        "opened",
        {},
        "<think>\n",
        ['so </think>\n\n{"x": 1}', '</think>{"x":1}'],
        ['so </think>{"y'],
    ),
    ("closed", {}, "<think>\n\n</think>\n\n", ['{"x": 1}'], ["<think>"]),
    ("tools", {"tools": TOOLS}, "", ['{"x": 1}', A], ["I", '{"x": "', W, f"{A} and"]),
    ("required", REQUIRED, "", [A, S], ["{", W, "I", f"{A}\n{A}"]),
    *(
        ("named", asked, "", [A], [S, W, "{", f"{A}\n{A}"])
        for asked in ({"tools": TOOLS, "tool_choice": NAMED}, allowed("required"))
    ),
    ("allowed", allowed("auto"), "", ['{"x": 1}', A], ["I", S, W]),
]


@pytest.mark.parametrize("marks", ["text", "special"])
@pytest.mark.parametrize(
    ("name", "asked", "prompt", "good", "bad"), CASES, ids=[case[0] for case in CASES]
)
def test_grammar_accepts_exactly_the_requested_answers(
    tmp_path: Path,
    marks: str,
    name: str,
    asked: dict[str, Any],
    prompt: str,
    good: list[str],
    bad: list[str],
) -> None:
    markers = (
        ("<tool_call>", "</tool_call>", "<think>", "</think>")
        if marks == "special"
        else ()
    )
    tokenizer = byte_level()
    tokenizer.add_special_tokens(list(markers))
    texts = save(tokenizer, tmp_path)
    body = {
        "messages": HI,
        **({} if name in ("required", "named") else SCHEMA),
        **asked,
    }
    read, tool_format = RequestReader(RULES).chat(body), find_tool_format("hermes", "")
    prefill = prefill_of(read, tool_format, texts)
    may_begin = marks == "special" or read.tool_choice.mode != "required"
    assert (prefill == "") == may_begin, "it may think first"
    grammar = grammar_of(read, tool_format, texts, prefill=prefill, prompt=prompt)
    assert grammar is not None
    thought = "<think>I could {</think>\n"
    may_think = marks == "special" and name not in ("opened", "closed")
    for text in [*good, *([thought + text for text in good] if may_think else [])]:
        assert accepted(texts, grammar, text.removeprefix(prefill)), text
    for text in bad:
        if not (may_think and text == "<think>"):
            with pytest.raises(GrammarError):
                accepted(texts, grammar, text.removeprefix(prefill))


def test_pattern_that_matches_a_named_property_is_refused(engine: InProcess) -> None:
    schema = {
        "type": "object",
        "properties": {"a": {}},
        "patternProperties": {"^a$": {}},
    }
    read = RequestReader(RULES).chat(
        {"messages": HI, "response_format": schema_format({"items": schema})}
    )
    with pytest.raises(ApiError, match="patternProperties '.a.' matches a name"):
        grammar_of(
            read,
            find_tool_format("hermes", ""),
            engine.tokenizer,
            prefill="",
            prompt="",
        )


def test_response_format_with_tools_needs_a_grammar(engine: InProcess) -> None:
    body = {"messages": HI, "tools": TOOLS, **SCHEMA}
    read = RequestReader(RULES).chat(body)
    with pytest.raises(
        ApiError, match="response_format with tools is refused: tool format none"
    ):
        grammar_of(
            read, find_tool_format("none", ""), engine.tokenizer, prefill="", prompt=""
        )


@pytest.mark.parametrize(
    "asked",
    [{"response_format": schema_format(FIRM)}, {"tools": TOOLS, "tool_choice": NAMED}],
)
@in_loop
async def test_trainer_finds_the_logprobs_of_a_constrained_rollout(
    engine: InProcess, tmp_path: Path, asked: dict[str, Any]
) -> None:
    """Several turns, one without a grammar."""
    sizes = {
        "max_tokens": 250,
        "max_prompt_tokens": 300,
        "max_length": 600,
        "vocab_size": 440,
    }
    async with gateway_world(engine, **sizes) as world:
        messages = list(HI)
        for more in (asked, {"max_tokens": 9}, asked):
            status, answer = await world.post({"messages": messages, **more})
            assert status == 200, answer
            message = answer["choices"][0]["message"]
            for call in message.get("tool_calls", ()):
                Draft202012Validator(ADD).validate(
                    json.loads(call["function"]["arguments"])
                )
            # this template has no place for calls
            said = [] if message.get("tool_calls") else [message]
            messages += [*said, {"role": "user", "content": "More"}]
        rollout = world.session.rollout(0, Outcome(1.0), 1.0)
    constrained = sum(
        span.end - span.start for one in rollout for span in one.tokens.calls
    )
    assert 0 < constrained == sum(one.num_sampled for one in rollout) - 9
    batch = Batch(0, (Group(GroupId(0), Prompt("p", ()), rollout),), 0)
    spec = make_trainer_spec(
        Path(engine.tokenizer.model_path), tmp_path, measures_gap=True
    )
    found = TrainerRank(spec).train(*unpack_batch(pack_batch(*pack_groups(batch))))
    assert found["policy/logprob_gap_mean"] < 1e-5
    assert found["tokens/trained"] == constrained + 9
