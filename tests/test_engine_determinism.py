"""Deterministic mode: a request's bits depend on prompt, seed and weights only."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from engine_contract import same_part
from engine_in_process import answered, make_qwen3, make_request, running_engine
from engine_replies import ask

from asyncrl.messages.sampling import SamplingRequest
from asyncrl.messages.tokens import SegmentPart
from asyncrl_servers.embedded.embedded_engine import Engine

ODD = {"vocab_size": 53, "hidden_size": 60, "intermediate_size": 101}
SIZES: dict[str, dict[str, Any]] = {
    "plain": {},
    "vocabulary of 2048": {"vocab_size": 2048, "num_hidden_layers": 2},
    "odd sizes": {
        **ODD,
        "num_attention_heads": 3,
        "num_key_value_heads": 3,
        "head_dim": 20,
    },
    "8 queries a key": {
        "num_attention_heads": 8,
        "num_key_value_heads": 1,
        "head_dim": 16,
    },
}


def varied_requests(vocab_size: int, count: int, seed: int) -> list[SamplingRequest]:
    """Requests of all lengths and settings; some share a prompt, one is long enough for
    several blocks of attention.
    """
    rng = random.Random(seed)
    prompts = [
        [rng.randrange(vocab_size) for _ in range(length)]
        for length in (1, 2, 5, 16, 31, 64, 150)
    ]
    return [
        SamplingRequest(
            request_id=f"r{index}",
            prompt_ids=prompts[index % len(prompts)],
            max_tokens=rng.choice([1, 2, 7, 30, 90]),
            temperature=rng.choice([0.0, 0.7, 1.0, 1.0, 1.3]),
            top_p=rng.choice([1.0, 1.0, 0.8]),
            seed=rng.getrandbits(62),
        )
        for index in range(count)
    ]


def answers_of(
    engine: Engine, requests: list[SamplingRequest]
) -> dict[str, SegmentPart]:
    answers = [one.result(timeout=60) for one in ask(engine, requests)]
    return {
        request.request_id: answer
        for request, answer in zip(requests, answers, strict=True)
    }


SLOW = {"plain", "odd sizes", "8 queries a key"}


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(name, marks=pytest.mark.slow if name in SLOW else ())
        for name in SIZES
    ],
    ids=lambda name: name.replace(" ", "-"),
)
def sized_model(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, int]:
    sizes = SIZES[request.param]
    return make_qwen3(tmp_path_factory.mktemp("sized") / "model", **sizes), sizes.get(
        "vocab_size", 50
    )


def test_request_has_the_same_bits_in_any_company(
    sized_model: tuple[Path, int],
) -> None:
    folder, vocab_size = sized_model
    requests = varied_requests(vocab_size, 21, seed=1)
    with running_engine(folder, slots=1) as engine:
        alone = answers_of(engine, requests)
    for slots in (3, 17, 40):
        with running_engine(folder, slots=slots) as engine:
            shuffled = random.Random(slots).sample(requests, len(requests))
            mixed = []
            for request in shuffled:
                mixed += [
                    request,
                    replace(request, request_id=f"other {request.request_id}", seed=1),
                ]
            answers = answers_of(engine, mixed)
            assert all(
                same_part(answers[request_id], one) for request_id, one in alone.items()
            )


def test_long_prompt_gives_the_bits_of_decoding_it(tmp_path: Path) -> None:
    folder = make_qwen3(tmp_path / "model", num_hidden_layers=2)
    prompt = tuple(index * 7 % 50 for index in range(1200))
    with running_engine(folder, slots=3, max_length=1300) as engine:
        short = [
            make_request(f"short {index}", prompt_ids=prompt[: 100 + index])
            for index in range(2)
        ]
        beside = answers_of(
            engine, [*short, make_request("long", prompt_ids=prompt, max_tokens=40)]
        )["long"]
        first = answered(engine, prompt_ids=prompt, max_tokens=15)
        rest = answered(
            engine,
            prompt_ids=(*prompt, *first.token_ids),
            max_tokens=25,
            num_resumed=15,
        )
    assert first.token_ids + rest.token_ids == beside.token_ids
    assert first.logprobs + rest.logprobs == beside.logprobs
