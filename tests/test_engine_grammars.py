"""Structured output in the embedded engine: what is sampled fits its grammar, with the logprobs of what was
allowed, whatever stands beside it and however often it is interrupted.
"""

from __future__ import annotations

import asyncio
import json
from contextlib import AsyncExitStack, ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_in_process import drawn, make_qwen3, make_request, make_spec, stage_file
from engine_processes import SECRET, EngineProcess, engine_process
from engine_replies import ask
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from test_engine_resumed import SMALL, turn_until
from text_tokenizers import byte_level, save
from transformers import AutoModelForCausalLM

from asyncrl.engines.engine import EngineServer
from asyncrl.engines.pool import EnginePool
from asyncrl.http import Caller
from asyncrl.messages import token_grammars
from asyncrl.messages.base import Interrupt
from asyncrl.messages.calls import CommitRequest, ExportResponse, GenerateRequest, GenerateResponse
from asyncrl.messages.records import SamplingRequest
from asyncrl.messages.token_grammars import GrammarError, TokenGrammars, check_grammar
from asyncrl.rollouts.tokenizer import HFChatTokenizer
from asyncrl.serving import Refused
from asyncrl_servers.embedded.build_engine import build_engine
from asyncrl_servers.embedded.decode_loop import Engine

VOCAB = 440
"""Some more than the tokenizer knows, as models have them."""
LONG = 250
COMPACT = {"x-guidance": {"whitespace_flexible": False}}
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer", "maximum": 120}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_qwen3(tmp_path_factory.mktemp("model"), vocab_size=VOCAB, eos_token_id=1, **SMALL)
    save(byte_level(), folder)
    return folder


@pytest.fixture(scope="module")
def engine(folder: Path) -> Engine:
    return build_engine(make_spec(folder, slots=8, max_length=LONG + 50))


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> HFChatTokenizer:
    return HFChatTokenizer(folder)


def grammar_of(schema: dict[str, Any]) -> str:
    return "start: %json " + json.dumps(schema | COMPACT)


def asking(schema: dict[str, Any], seed: int = 7, **fields: Any) -> GenerateRequest:
    given = {"seed": seed, "max_tokens": LONG, "grammar": grammar_of(schema), **fields}
    return make_request(f"r{seed}", **given)


def answers(engine: Engine, *requests: GenerateRequest) -> list[GenerateResponse]:
    replies = ask(engine, requests)
    turn_until(engine, *replies)
    return [reply.result() for reply in replies]


LEAVES = st.one_of(
    st.just({"type": "boolean"}),
    st.just({"type": "null"}),
    st.tuples(st.integers(-50, 50), st.integers(0, 200)).map(
        lambda pair: {"type": "integer", "minimum": pair[0], "maximum": sum(pair)}
    ),
    st.integers(0, 6).map(lambda most: {"type": "string", "maxLength": most}),
    st.lists(st.text('ab"\\é', max_size=4), min_size=1, max_size=4, unique=True).map(lambda of: {"enum": of}),
)


def _objects(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    def made(fields: dict[str, Any], num_required: int) -> dict[str, Any]:
        required = sorted(fields)[:num_required]
        kind = {"type": "object", "properties": fields, "required": required}
        return kind | {"additionalProperties": False}

    return st.builds(made, st.dictionaries(st.sampled_from("abcd"), inner, max_size=3), st.integers(0, 3))


SCHEMAS = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        _objects(inner),
        st.builds(
            lambda items, most: {"type": "array", "items": items, "maxItems": most}, inner, st.integers(0, 2)
        ),
        st.lists(inner, min_size=1, max_size=3).map(lambda of: {"anyOf": of}),
    ),
    max_leaves=6,
)


@settings(max_examples=60, deadline=None)
@given(st.lists(SCHEMAS, min_size=1, max_size=4), st.integers(0, 10**6), st.integers(0, 60))
def test_an_answer_is_valid_and_the_same_however_it_was_interrupted_and_what_stands_beside_it(
    engine: Engine, tokenizer: HFChatTokenizer, schemas: list[dict[str, Any]], seed: int, cut: int
) -> None:
    asked = [asking(schema, seed + index) for index, schema in enumerate(schemas)]
    free = make_request("free", seed=seed, max_tokens=30)
    (alone,) = answers(engine, free)
    *found, beside = answers(engine, *asked, free)
    assert drawn(alone) == drawn(beside)
    for schema, request, answer in zip(schemas, asked, found, strict=True):
        text = tokenizer.decode(answer.token_ids)
        if answer.finish_reason == "stop":
            assert answer.token_ids[-1] == 1
            Draft202012Validator(schema).validate(json.loads(text))
        else:
            assert len(answer.token_ids) == LONG, "a choice of very long texts"
        num = min(cut, len(answer.token_ids) - 1)
        begun = [*request.prompt_ids, *answer.token_ids[:num]]
        rest = replace(request, prompt_ids=begun, num_resumed=num, max_tokens=LONG - num)
        (resumed,) = answers(engine, rest)
        assert (answer.token_ids[num:], answer.logprobs[num:]) == drawn(resumed)


def test_an_update_in_mid_answer_loses_and_doubles_nothing_of_the_grammar(
    engine: Engine, folder: Path, tmp_path: Path
) -> None:
    """The same weights are published again and again: each time, what ran is interrupted and goes on."""
    request, fresh = asking(PERSON, top_logprobs=3), build_engine(make_spec(folder, max_length=LONG + 50))
    (whole,) = answers(engine, request)
    (reply,) = ask(fresh, [request], ends=False)
    for version in (1, 2, 3):
        fresh.turn()
        fresh.turn()
        digest = fresh.weights.prepare(stage_file(folder, version, tmp_path)).digest
        committed = fresh.commit(CommitRequest(version=version, digest=digest))
        turn_until(fresh, committed)
        reply.resume()
    turn_until(fresh, reply)
    answer = reply.result()
    assert drawn(answer) == drawn(whole)
    assert answer.top_logprobs == whole.top_logprobs
    assert len(answer.version_spans) == 4


def test_the_logprobs_are_those_of_the_model_over_what_was_allowed(
    engine: Engine, folder: Path, tokenizer: HFChatTokenizer
) -> None:
    """And so are the likeliest tokens, of which none is one that was not allowed."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for temperature in (1.0, 0.7):
        request = asking(PERSON, 3, temperature=temperature, top_logprobs=20)
        (answer,) = answers(engine, request)
        ids = [*request.prompt_ids, *answer.token_ids]
        with torch.inference_mode():
            logits_TV = model(torch.tensor([ids])).logits[0].float() / temperature
        matcher = TokenGrammars(tokenizer._tokenizer, VOCAB).begin(request.grammar or "")
        gaps = []
        for at, (token, logprob) in enumerate(zip(answer.token_ids, answer.logprobs, strict=True)):
            allowed = torch.from_numpy(matcher.allowed())
            matcher.take(token)
            logits_V = logits_TV[len(request.prompt_ids) + at - 1].masked_fill(~allowed, -torch.inf)
            logprobs_V = logits_V.log_softmax(-1)
            gaps.append(abs(logprobs_V[token].item() - logprob))
            num = min(20, int(allowed.sum()))
            values, top_ids = logprobs_V.topk(num)
            assert [token for token, _ in answer.top_logprobs[at]] == top_ids.tolist()
            gaps += [
                abs(one - two) for one, (_, two) in zip(values.tolist(), answer.top_logprobs[at], strict=True)
            ]
        assert max(gaps) < 1e-4
        assert min(len(top) for top in answer.top_logprobs) == 1, "some tokens were the only ones allowed"


def test_what_cannot_be_followed_is_refused_and_what_stands_beside_it_goes_on(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A grammar may reach its limits long after it began."""
    for fields in ({"top_logprobs": 21}, {"top_logprobs": -1}, {"grammar": "start: %json {"}):
        with pytest.raises(Refused) as refusal:
            ask(engine, [make_request(**fields)])
        assert refusal.value.status == 400
    free = make_request("free", max_tokens=40)
    (alone,) = answers(engine, free)
    monkeypatch.setitem(token_grammars._LIMITS, "max_lexer_states", 30)
    token_grammars._limits.cache_clear()
    many = {"enum": [f"{a}{b}{a}{b}{a}" for a in "abcdefgh" for b in "stuvwxyz"]}
    begun, beside = ask(engine, [asking(many), free])
    turn_until(engine, begun, beside)
    monkeypatch.undo()
    token_grammars._limits.cache_clear()
    assert drawn(beside.result()) == drawn(alone)
    with pytest.raises(Refused, match="request r7 has a grammar that cannot be followed"):
        begun.result()


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    return schema


def doubling(depth: int) -> dict[str, Any]:
    defs: dict[str, Any] = {str(depth): {"type": "integer"}}
    for number in range(depth):
        both = {"$ref": f"#/$defs/{number + 1}"}
        defs[str(number)] = {"allOf": [{"anyOf": [both, both]}, {"anyOf": [both, both]}]}
    return {"$defs": defs, "$ref": "#/$defs/0"}


BOMBS: dict[str, tuple[dict[str, Any], str]] = {
    "deep": (nested(100), "recursion limit"),
    "large": ({"enum": [f"value {number}" for number in range(30_000)]}, "bytes"),
    "doubling": (doubling(30), "."),
    "branches": ({"type": "object", "properties": {f"p{number}": {} for number in range(3000)}}, "items"),
    "repeated": ({"type": "string", "pattern": "^(((a{0,999}b?){0,999}c?){0,999}d?){0,999}$"}, "ok"),
    "alternatives": ({"type": "string", "pattern": "^(a|b|ab|ba|aa|bb)*x(.{0,500}y){30}$"}, "ok"),
    "remote": ({"$ref": "http://example.com/schema.json"}, "not present"),
    "nothing": ({"$ref": "#"}, "NoExtension"),
    "itself": (
        {"type": "object", "properties": {"next": {"$ref": "#"}}, "additionalProperties": False},
        "ok",
    ),
    "endless": ({"type": "string", "minLength": 10**6}, "ok"),
    "not a schema": ({"type": "nonsense"}, "nonsense"),
}


@pytest.mark.parametrize("name", BOMBS)
def test_a_schema_bomb_is_refused_with_the_reason_or_costs_no_more_than_its_tokens(
    engine: Engine, name: str
) -> None:
    """In time (this test would be killed) and in memory."""
    schema, reason = BOMBS[name]
    if reason == "ok":
        (answer,) = answers(engine, asking(schema, max_tokens=60))
        assert answer.finish_reason in ("stop", "length")
        return
    with pytest.raises(Refused, match=reason):
        answers(engine, asking(schema))


def test_a_missing_llguidance_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "llguidance", None)
    with pytest.raises(GrammarError, match="pip install 'llguidance"):
        check_grammar('start: "a"')


DIGITS = {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 999}}
DIGITS |= {"minItems": 500, "maxItems": 500}
"""Some 2,200 tokens: time for a story to interrupt them."""


@pytest.mark.slow
def test_an_answer_outlives_its_server_and_new_weights_and_goes_on_by_its_grammar(
    folder: Path, tokenizer: HFChatTokenizer, tmp_path: Path
) -> None:
    """Two servers, over HTTP. The weights are published anew, in both ways, and the server that samples is
    killed; the other one begins in the middle of the answer.
    """
    spec = make_spec(folder, slots=2, max_length=3600).model_dump()
    request = SamplingRequest("r", (1, 2, 3), 3500, 1.0, seed=7, grammar=grammar_of(DIGITS), top_logprobs=2)

    async def story(children: list[EngineProcess]) -> None:
        async with AsyncExitStack() as stack:
            callers = [Caller(f"engine-{at}", one.url, SECRET) for at, one in enumerate(children)]
            for caller in callers:
                stack.push_async_callback(caller.aclose)
            servers = [EngineServer(caller) for caller in callers]
            pool = EnginePool(servers, slots=2, on_lost=lambda lost: pool.down_nowait(lost.room))
            whole = await pool.generate(request)
            told: list[int] = []

            async def goes_on() -> None:
                num_told = len(told)
                while len(told) < num_told + 50:
                    assert not running.done(), "it ended before the story could interrupt it"
                    await asyncio.sleep(0.001)

            async def publish(version: int, interrupt: Interrupt) -> None:
                for server in servers:
                    if server.name not in pool.down:
                        manifest = ExportResponse(
                            **stage_file(folder, version, tmp_path).model_dump(exclude_defaults=True)
                        )
                        digest = await server.prepare(manifest)
                        await server.commit(version, digest, interrupt)
                await goes_on()

            running = asyncio.create_task(pool.generate(request, on_tokens=told.extend))
            await goes_on()
            await publish(1, "abort")
            healths = [await server.health(timeout_s=60) for server in servers]
            children[[health.num_running for health in healths].index(1)].process.kill()
            await goes_on()
            assert len(pool.down) == 1
            await publish(2, "keep")
            completion = await running
        Draft202012Validator(DIGITS).validate(json.loads(tokenizer.decode(completion.token_ids)))
        assert tuple(told) == completion.token_ids == whole.token_ids
        assert completion.behaviour_logprobs == whole.behaviour_logprobs
        assert completion.top_logprobs == whole.top_logprobs
        spans = [(span.version, span.engine) for span in completion.version_spans]
        assert [version for version, _ in spans] == [0, 1, 1, 2]
        assert len({engine for _, engine in spans}) == 2

    with ExitStack() as stack:
        children = [
            stack.enter_context(engine_process("embedded", {**spec, "name": name}, tmp_path / name))
            for name in ("engine-0", "engine-1")
        ]
        asyncio.run(story(children))
