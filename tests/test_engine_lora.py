"""Adapters in the embedded engine equal merged weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from costly_cases import slow
from engine_cases import Q_PROJ, adapters, lora_request, merged
from engine_in_process import (
    answered,
    drawn,
    make_qwen3,
    publish,
    running_engine,
    stage_file,
)

from asyncrl.base.http import Refused
from asyncrl_servers.embedded.embedded_engine import Engine


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_qwen3(tmp_path_factory.mktemp("model") / "qwen3")


def sampled(engine: Engine) -> tuple[list[int], list[float]]:
    return drawn(answered(engine, max_tokens=40))


@pytest.mark.parametrize(
    ("dtype", "keeps_place"),
    [
        ("float32", False),
        slow("bfloat16", False),
        ("float32", True),
    ],
)
def test_adapters_give_what_merged_weights_give_bit_by_bit(
    folder: Path, tmp_path: Path, dtype: str, keeps_place: bool
) -> None:
    # The second file leaves a layer of the first out, and brings another one: nothing
    # of the first may stay.
    files = [
        adapters(folder),
        adapters(folder, (Q_PROJ, "model.layers.0.mlp.up_proj"), seed=1, rank=2),
    ]
    answers = []
    for kind in ("lora", "weights"):
        with running_engine(folder, dtype=dtype) as engine:
            engine.weights.keeps_place = keeps_place
            found = [sampled(engine)]
            for version, tensors in enumerate(files, start=1):
                full = merged(folder, tensors, getattr(torch, dtype))
                request = lora_request(tensors, version, tmp_path)
                publish(
                    engine,
                    request if kind == "lora" else stage_file(full, version, tmp_path),
                )
                found.append(sampled(engine))
            answers.append(found)
    assert answers[0] == answers[1]
    tokens = [tuple(token_ids) for token_ids, _ in answers[0]]
    assert len(set(tokens)) == 3


def test_adapters_are_refused_without_the_base_of_the_start(
    folder: Path, tmp_path: Path
) -> None:
    with running_engine(folder) as engine:
        publish(engine, lora_request(adapters(folder), 1, tmp_path))
        publish(engine, stage_file(folder, 2, tmp_path))
        with pytest.raises(Refused, match="initial weights are no longer here"):
            engine.weights.prepare(lora_request(adapters(folder), 3, tmp_path))
        assert engine.weights._base is None, (
            "the first weights are not kept for nothing"
        )
