"""Families with windows or states: prompts of siblings, later turns and interrupted
texts are exact.

tests/test_models_table.py compares the logprobs of all models of the zoo.
"""

from __future__ import annotations

import io
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_in_process import make_request, make_spec, running_engine, stage_file
from engine_replies import ask
from model_zoo import make_config, random_model
from transformers import AutoModelForCausalLM

from asyncrl.base.errors import find_fatal
from asyncrl.messages.engine_api import CommitRequest
from asyncrl.messages.sampling import SamplingRequest
from asyncrl.messages.tokens import SegmentPart
from asyncrl.weights.tensor_files import weights_of
from asyncrl_servers.embedded.embedded_engine import build_engine

WINDOWS = "mistral gemma2 gemma3_text gemma3n_text gemma4_text gpt_oss olmo3 cohere2 exaone4 llama4_text"
STATES = "qwen3_next qwen3_5_text nemotron_h falcon_h1 lfm2 lfm2_moe granitemoehybrid olmo_hybrid kimi_linear"
STATES += " mamba2 mamba bamba jamba zamba2"
REFUSED = {
    "minimax": "has no attribute 'get_linear_cache'",
    "recurrent_gemma": "its state is not in transformers' cache",
    "rwkv": "its state is not in transformers' cache",
    "xlstm": "its state is not in transformers' cache",
    "falcon": "its state is not in transformers' cache",
    "inkling_text": "position_bias",
    "deepseek_v4": "its attention reads",
}
"""A part of each reason. RecurrentGemma, RWKV and xLSTM keep states in modules or
arguments, MiniMax in its own cache; Falcon computes attention without transformers'
interface.
"""
MOST_NATS = 1e-4
LENGTHS = (1, 7, 12, 13, 30, 45)
"""Prompts on both sides of the zoo's windows, 12, and chunks, 16."""


def save(name: str, folder: Path, seed: int = 0) -> Any:
    config = make_config(name)
    config.get_text_config().eos_token_id = None
    random_model(config, seed).save_pretrained(folder)
    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()


def prompt_of(length: int) -> tuple[int, ...]:
    return tuple((7 * at * at + 3 * length) % 90 + 3 for at in range(length))


@torch.no_grad()
def check(
    model: Any,
    request: SamplingRequest,
    answer: SegmentPart,
    start: int = 0,
    end: int = 99,
) -> None:
    """Compare tokens [start, end) of an answer with one plain forward pass."""
    assert len(answer.token_ids) == request.max_tokens
    num_prompt = len(request.prompt_ids)
    ids_1T = torch.tensor([[*request.prompt_ids, *answer.token_ids]])
    logprobs_TV = (
        model(input_ids=ids_1T, use_cache=False).logits[0].float().log_softmax(dim=-1)
    )
    expected_T = logprobs_TV[num_prompt - 1 : -1].gather(
        1, ids_1T[0, num_prompt:, None]
    )[:, 0]
    differences_T = expected_T - torch.tensor(answer.logprobs)
    assert float(differences_T[start:end].abs().max()) < MOST_NATS


OTHERS = "granite gemma qwen3_moe"
QUICK = {
    *OTHERS.split(),
    "gpt_oss",
    "gemma3_text",
    "qwen3_5_text",
    "falcon_h1",
    "mamba",
}
"""One family of each kind of window and state, and the families of OTHERS."""


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in QUICK else pytest.mark.slow)
        for name in f"{WINDOWS} {STATES} {OTHERS}".split()
    ],
)
def test_family_is_exact_at_any_batch_composition(name: str, tmp_path: Path) -> None:
    model = save(name, tmp_path)
    with running_engine(tmp_path, slots=3, num_kept=2, max_length=128) as engine:
        requests = [
            make_request(
                f"{length}-{seed}", prompt_of(length), max_tokens=9 + seed, seed=seed
            )
            for length in LENGTHS
            for seed in range(2)
        ]
        futures = zip(requests, ask(engine, requests), strict=True)
        answers = {request.request_id: future.result(60) for request, future in futures}
        for request in requests:
            check(model, request, answers[request.request_id])
        for turn in range(2):
            text = (
                *request.prompt_ids,
                *answers[request.request_id].token_ids,
                5,
                6,
                7,
            )
            request = make_request(f"turn {turn}", text, max_tokens=12, seed=turn)
            answers |= {request.request_id: ask(engine, [request])[0].result(60)}
            check(model, request, answers[request.request_id])


@pytest.mark.parametrize(
    "name", ["gemma2", "qwen3_5_text", "falcon_h1", "lfm2", "mamba"]
)
def test_interrupted_texts_are_exact_under_new_weights(
    name: str, tmp_path: Path
) -> None:
    models = [save(name, tmp_path / str(seed), seed) for seed in range(2)]
    engine = build_engine(make_spec(tmp_path / "0", slots=2, max_length=128))
    requests = [
        make_request(str(length), prompt_of(length), max_tokens=25)
        for length in (10, 30, 40)
    ]

    futures = ask(engine, requests)
    for _ in range(9):
        engine.iterate()
    staged = stage_file(dict(weights_of(models[1])), 1, tmp_path)
    engine.weights.prepare(staged)
    engine.commit(CommitRequest(version=1, digest=staged.digest, interrupt="keep"))
    while not all(future.done() for future in futures):
        engine.iterate()
    for request, future in zip(requests, futures, strict=True):
        answer = future.result()
        assert answer.sampled.spans[-1].version == 1
        for span in answer.sampled.spans:
            check(models[span.version], request, answer, span.start, span.end)


@pytest.mark.parametrize("name", REFUSED)
def test_other_family_is_refused_and_vllm_named(name: str, tmp_path: Path) -> None:
    save(name, tmp_path)
    with redirect_stderr(io.StringIO()) as said, pytest.raises(SystemExit):
        build_engine(make_spec(tmp_path))
    refusal = find_fatal(said.getvalue())
    assert refusal is not None
    assert REFUSED[name] in refusal.error
    assert refusal.way_out == "set rollout.engine=vllm."
