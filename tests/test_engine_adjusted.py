"""Logit bias and penalties of the embedded engine, as transformers' processors say;
changes of weights amid such calls are in test_engine_resumed.py.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from engine_cases import SMALL, segments_of
from engine_in_process import make_qwen3, make_request, make_spec
from engine_replies import ask
from logit_oracle import ADJUSTED, adjusted_logits
from transformers import Qwen3ForCausalLM

from asyncrl.base.http import Refused
from asyncrl.engines.pool import SegmentJoin
from asyncrl.messages.sampling import ADJUSTMENTS, SamplingRequest
from asyncrl.messages.tokens import SUPPORT, Tokens
from asyncrl_servers.embedded.embedded_engine import Engine, build_engine

VOCAB = 60
PROMPT = (7, 8, 7, 9)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return make_qwen3(
        tmp_path_factory.mktemp("adjusted") / "model", vocab_size=VOCAB, **SMALL
    )


@pytest.fixture
def engine(folder: Any) -> Engine:
    return build_engine(make_spec(folder))


@pytest.fixture(scope="module")
def model(folder: Any) -> Qwen3ForCausalLM:
    return Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32)


@torch.no_grad()
def check(
    model: Qwen3ForCausalLM, tokens: Tokens, num_prompt: int, request: SamplingRequest
) -> None:
    """`tokens`: prompt and answer."""
    ids = tokens.ids.tolist()
    logits_TV = model(torch.tensor([ids])).logits[0]
    supports = tokens.column(SUPPORT).lists()
    temperature = request.temperature or 1.0
    given = {name: getattr(request, name) for name in ADJUSTMENTS}
    for at in range(num_prompt, len(ids)):
        logits_V = adjusted_logits(logits_TV[at - 1], ids[:at], num_prompt, **given)
        kept = supports[at] or [*range(VOCAB)]
        assert bool(supports[at]) == request.is_cut
        if request.is_cut:
            # top_k of the adjusted logits.
            assert set(kept) == set(logits_V.topk(request.top_k).indices.tolist())
        if request.temperature == 0.0:
            assert ids[at] == int(logits_V.argmax())
        logprobs = (logits_V[kept] / temperature).log_softmax(-1)
        expected = float(logprobs[kept.index(ids[at])])
        assert tokens.behaviour_logprobs[at] == pytest.approx(expected, abs=1e-5)


CUTS = [{}, {"temperature": 0.6}, {"top_k": 5}, {"temperature": 0.0}]


def requests_of(**fields: Any) -> list[SamplingRequest]:
    return [
        make_request(f"{number} {place}", PROMPT, **(given | cut | fields))
        for number, given in enumerate(ADJUSTED)
        for place, cut in enumerate(CUTS)
    ]


def test_tokens_are_drawn_from_the_adjusted_logits(
    engine: Engine, model: Qwen3ForCausalLM
) -> None:
    """More calls than slots, and calls without an adjustment beside them."""
    plain = [
        make_request(f"plain {place}", PROMPT, **cut) for place, cut in enumerate(CUTS)
    ]
    requests = [*requests_of(), *plain]
    together = segments_of(engine, *requests)
    for request, answer in zip(requests, together, strict=True):
        join = SegmentJoin(request)
        join.add(answer)
        check(model, join.completion().tokens, len(PROMPT), request)
        (alone,) = segments_of(engine, request)
        assert alone.token_ids == answer.token_ids
        assert alone.logprobs == answer.logprobs


def test_penalties_count_over_the_segments_of_a_call(
    engine: Engine, model: Qwen3ForCausalLM
) -> None:
    for request in requests_of(max_tokens=16):
        (whole,) = segments_of(engine, request)
        join = SegmentJoin(request)
        (begun,) = segments_of(engine, replace(request, max_tokens=7))
        join.add(begun._replace(finish_reason="abort"))
        (rest,) = segments_of(engine, join.next_request())
        join.add(rest)
        completion = join.completion()
        assert completion.token_ids == (*whole.token_ids,)
        check(model, completion.tokens, len(PROMPT), request)


@pytest.mark.parametrize("token_id", [-1, VOCAB])
def test_bias_of_an_unknown_token_is_refused(engine: Engine, token_id: int) -> None:
    request = make_request(prompt_ids=PROMPT, logit_bias={token_id: 1.0})
    with pytest.raises(Refused, match=f"logit_bias has token id {token_id}"):
        ask(engine, [request])
    assert np.isfinite(
        segments_of(engine, replace(request, logit_bias={}))[0].logprobs
    ).all()
