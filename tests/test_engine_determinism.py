"""Deterministic mode: a request's bits depend on prompt, seed and weights only."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from engine_in_process import (
    QWEN3,
    answered,
    drawn,
    make_qwen3,
    make_request,
    make_spec,
    running_engine,
)
from engine_replies import ask

from asyncrl.messages.engine_api import GenerateRequest, GenerateResponse
from asyncrl_servers.embedded.build_engine import build_engine
from asyncrl_servers.embedded.decode_loop import Engine

ODD = {"vocab_size": 53, "hidden_size": 60, "intermediate_size": 101}
SIZES: dict[str, dict[str, Any]] = {
    "plain": {},
    "vocabulary of 2048": {"vocab_size": 2048, "num_hidden_layers": 2},
    "odd sizes": {**ODD, "num_attention_heads": 3, "num_key_value_heads": 3, "head_dim": 20},
    "8 queries a key": {"num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 16},
}


def varied_requests(vocab_size: int, count: int, seed: int) -> list[GenerateRequest]:
    """Requests of all lengths and settings; some share a prompt, one is long enough for several blocks of
    attention.
    """
    rng = random.Random(seed)
    prompts = [[rng.randrange(vocab_size) for _ in range(length)] for length in (1, 2, 5, 16, 31, 64, 150)]
    return [
        GenerateRequest(
            request_id=f"r{index}",
            prompt_ids=prompts[index % len(prompts)],
            max_tokens=rng.choice([1, 2, 7, 30, 90]),
            temperature=rng.choice([0.0, 0.7, 1.0, 1.0, 1.3]),
            top_p=rng.choice([1.0, 1.0, 0.8]),
            seed=rng.getrandbits(62),
        )
        for index in range(count)
    ]


def answers_of(engine: Engine, requests: list[GenerateRequest]) -> dict[str, GenerateResponse]:
    answers = [one.result(timeout=60) for one in ask(engine, requests)]
    return {answer.request_id: answer for answer in answers}


@pytest.fixture(scope="module", params=SIZES, ids=lambda name: name.replace(" ", "-"))
def sized_model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int]:
    sizes = SIZES[request.param]
    return make_qwen3(tmp_path_factory.mktemp("sized") / "model", **sizes), sizes.get("vocab_size", 50)


def test_request_has_the_same_bits_in_any_company(sized_model: tuple[Path, int]) -> None:
    folder, vocab_size = sized_model
    requests = varied_requests(vocab_size, 21, seed=1)
    with running_engine(folder, slots=1) as engine:
        alone = answers_of(engine, requests)
    for slots in (3, 17, 40):
        with running_engine(folder, slots=slots) as engine:
            shuffled = random.Random(slots).sample(requests, len(requests))
            mixed = []
            for request in shuffled:
                mixed += [request, replace(request, request_id=f"other {request.request_id}", seed=1)]
            answers = answers_of(engine, mixed)
            assert {request_id: answers[request_id] for request_id in alone} == alone


def test_aborted_request_resumes_with_the_same_bits(sized_model: tuple[Path, int]) -> None:
    folder, vocab_size = sized_model
    requests = [replace(one, max_tokens=90, top_p=1.0) for one in varied_requests(vocab_size, 6, seed=2)]
    with running_engine(folder, slots=6) as engine:
        whole = answers_of(engine, requests)
    with running_engine(folder, slots=3) as engine:
        num_aborts = 0
        for request in requests:
            token_ids: list[int] = []
            logprobs: list[float] = []
            while len(token_ids) < request.max_tokens:
                rest: dict[str, Any] = {"prompt_ids": [*request.prompt_ids, *token_ids]}
                rest |= {"num_resumed": len(token_ids), "max_tokens": request.max_tokens - len(token_ids)}
                (future,) = ask(engine, [replace(request, **rest)])
                if num_aborts % 4 < 3:
                    future.abort()
                num_aborts += 1
                token_ids += future.result(timeout=60).token_ids
                logprobs += future.result(timeout=60).logprobs
            assert (token_ids, logprobs) == drawn(whole[request.request_id])
        assert num_aborts > len(requests)


def test_long_prompt_gives_the_bits_of_decoding_it(tmp_path: Path) -> None:
    folder = make_qwen3(tmp_path / "model", num_hidden_layers=2)
    prompt = tuple(index * 7 % 50 for index in range(1200))
    with running_engine(folder, slots=3, max_length=1300) as engine:
        short = [make_request(f"short {index}", prompt_ids=prompt[: 100 + index]) for index in range(2)]
        beside = answers_of(engine, [*short, make_request("long", prompt_ids=prompt, max_tokens=40)])["long"]
        first = answered(engine, prompt_ids=prompt, max_tokens=15)
        rest = answered(engine, prompt_ids=(*prompt, *first.token_ids), max_tokens=25, num_resumed=15)
    assert first.token_ids + rest.token_ids == beside.token_ids
    assert first.logprobs + rest.logprobs == beside.logprobs


def grown(rng: random.Random, vocab_size: int, count: int) -> list[list[int]]:
    """Make prompts that mostly begin like an earlier one."""
    prompts = [[rng.randrange(vocab_size) for _ in range(400)]]
    for _ in range(count - 1):
        before = rng.choice(prompts)
        cut = rng.choice([1, 7, 33, 300, len(before), len(before), len(before)])
        tail = [rng.randrange(vocab_size) for _ in range(rng.choice([0, 1, 40, 270]))]
        prompts.append([*before[:cut], *tail])
    return prompts


@pytest.mark.parametrize("seed", range(2))
def test_shared_prompt_starts_give_the_bits_of_each_alone(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    folder = make_qwen3(tmp_path / "model", num_hidden_layers=2)
    prompts = grown(rng, QWEN3["vocab_size"], 16)
    requests = [
        GenerateRequest(f"r{index}", prompt, rng.choice([1, 2, 30]), seed=index)
        for index, prompt in enumerate(prompts)
    ]
    engine = build_engine(make_spec(folder, slots=12, max_length=1200))
    first = ask(engine, requests[:10])
    for _ in range(3):
        engine.turn()
    futures = [*first, *ask(engine, requests[10:])]
    while not all(future.done() for future in futures):
        engine.turn()
    assert engine.health().tokens_prefilled < sum(map(len, prompts)), "starts were shared"
    alone = build_engine(make_spec(folder, slots=1, max_length=1200))
    for request, future in zip(requests, futures, strict=True):
        (expected,) = ask(alone, [request])
        while not expected.done():
            alone.turn()
        assert drawn(future.result(timeout=0)) == drawn(expected.result(timeout=0)), request.request_id
