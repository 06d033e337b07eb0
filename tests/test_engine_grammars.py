"""Structured output of the embedded engine fits its grammar through every interruption."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_cases import (
    COMPACT,
    PERSON,
    SMALL,
    check_allowed,
    iterate_until,
    segments_of,
)
from engine_in_process import drawn, make_qwen3, make_request, make_spec
from engine_replies import ask, top_logprobs
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from llguidance import LLParserLimits
from text_tokenizers import byte_level, save
from transformers import AutoModelForCausalLM

from asyncrl.base.http import Refused
from asyncrl.messages import token_grammars
from asyncrl.messages.sampling import SamplingRequest
from asyncrl.rollouts.tokenizer import HFChatTokenizer
from asyncrl_servers.embedded.embedded_engine import Engine, build_engine

VOCAB = 440
"""Some more than the tokenizer knows, as models have them."""
LONG = 250


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_qwen3(
        tmp_path_factory.mktemp("model"), vocab_size=VOCAB, eos_token_id=1, **SMALL
    )
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


def asking(schema: dict[str, Any], seed: int = 7, **fields: Any) -> SamplingRequest:
    given = {"seed": seed, "max_tokens": LONG, "grammar": grammar_of(schema), **fields}
    return make_request(f"r{seed}", **given)


TEXT = {"type": "string", "maxLength": 6}
ITEMS = {"type": "array", "items": {"enum": ["a", 'b"', "\\\\é"]}, "maxItems": 2}
SCHEMAS = [
    PERSON,
    TEXT,
    ITEMS,
    {"type": "integer", "minimum": -50, "maximum": 150},
    {"anyOf": [{"type": "null"}, {"type": "boolean"}, ITEMS]},
    {
        "type": "object",
        "properties": {"a": TEXT, "b": ITEMS},
        "additionalProperties": False,
    },
]


@pytest.mark.slow
@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.sampled_from(SCHEMAS), min_size=1, max_size=4),
    st.integers(0, 10**6),
    st.integers(0, 60),
)
def test_answers_stay_valid_and_equal_over_interruptions(
    engine: Engine,
    tokenizer: HFChatTokenizer,
    schemas: list[dict[str, Any]],
    seed: int,
    cut: int,
) -> None:
    asked = [asking(schema, seed + index) for index, schema in enumerate(schemas)]
    free = make_request("free", seed=seed, max_tokens=30)
    (alone,) = segments_of(engine, free)
    *found, beside = segments_of(engine, *asked, free)
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
        rest = replace(
            request, prompt_ids=begun, num_resumed=num, max_tokens=LONG - num
        )
        (resumed,) = segments_of(engine, rest)
        assert (answer.token_ids[num:], answer.logprobs[num:]) == drawn(resumed)


def test_logprobs_are_of_the_model_over_allowed_tokens(
    engine: Engine, folder: Path, tokenizer: HFChatTokenizer
) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for temperature in (1.0, 0.7):
        request = asking(PERSON, 3, temperature=temperature, top_logprobs=20)
        (answer,) = segments_of(engine, request)
        with torch.inference_mode():
            logits_TV = (
                model(torch.tensor([[*request.prompt_ids, *answer.token_ids]]))
                .logits[0]
                .float()
            )
        check_allowed(
            request, answer, logits_TV / temperature, tokenizer._tokenizer, VOCAB
        )
        assert min(len(top) for top in top_logprobs(answer)) == 1, (
            "some tokens were the only ones allowed"
        )


def test_bad_grammar_is_refused_and_others_go_on(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(Refused) as refusal:
        ask(engine, [make_request(grammar="start: %json {")])
    assert refusal.value.status == 400
    free = make_request("free", max_tokens=40)
    (alone,) = segments_of(engine, free)
    few = LLParserLimits(max_lexer_states=30, verbose_errors=False)
    monkeypatch.setattr(token_grammars, "grammar_limits", lambda: few)
    many = {"enum": [f"{a}{b}{a}{b}{a}" for a in "abcdefgh" for b in "stuvwxyz"]}
    begun, beside = ask(engine, [asking(many), free])
    iterate_until(engine, begun, beside)
    monkeypatch.undo()
    assert drawn(beside.result()) == drawn(alone)
    with pytest.raises(
        Refused, match="request r7 has a grammar that cannot be followed"
    ):
        begun.result()
