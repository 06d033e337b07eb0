"""CUDA graphs of the embedded engine, recorded and replayed on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from engine_cases import Recorded, answers, check_same, publish_halfway
from engine_in_process import (
    drawn,
    make_qwen3,
    make_spec,
    weights_of,
)

from asyncrl_servers.embedded.embedded_engine import build_engine
from asyncrl_servers.embedded.runner import MOST_GRAPHS, DecodeGraphs


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_qwen3(tmp_path_factory.mktemp("device") / "model", num_hidden_layers=2)


@pytest.fixture(scope="module")
def other_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_qwen3(
        tmp_path_factory.mktemp("device") / "other", seed=1, num_hidden_layers=2
    )


@pytest.mark.parametrize("keeps_place", [True, False], ids=["in place", "moved"])
def test_replayed_steps_draw_the_same_across_a_publish(
    folder: Path, other_folder: Path, tmp_path: Path, keeps_place: bool
) -> None:
    spec = make_spec(folder, slots=10, num_kept=10, deterministic=False)
    plain = build_engine(spec)
    expected = answers(plain, publish_halfway(plain, other_folder, tmp_path))
    assert len({tuple(one.token_ids) for one in expected}) == len(expected)
    engine = build_engine(spec)
    assert engine.runner.plain is not None
    recorded = engine.runner.graphs = Recorded(
        engine.runner, engine.runner.plain, spec.slots
    )
    engine.weights.keeps_place = keeps_place
    addresses = [one.data_ptr() for one in engine.runner.loaded.model.parameters()]
    check_same(
        answers(engine, publish_halfway(engine, other_folder, tmp_path)), expected
    )
    is_there = addresses == [
        one.data_ptr() for one in engine.runner.loaded.model.parameters()
    ]
    assert is_there == keeps_place
    assert recorded.num_replayed > 2 * recorded.num_captured > 4
    again = recorded.num_captured
    check_same(answers(engine), answers(plain))
    assert recorded.num_captured - again <= MOST_GRAPHS


class Refusing(DecodeGraphs):
    def capture(self, function: Callable[[], None]) -> Callable[[], None]:
        raise RuntimeError("operation not permitted when stream is capturing")


def test_graphs_that_cannot_be_captured_are_given_up(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    spec = make_spec(folder, slots=10, deterministic=False)
    engine = build_engine(spec)
    assert engine.runner.plain is not None
    engine.runner.graphs = Refusing(engine.runner, engine.runner.plain, spec.slots)
    check_same(answers(engine), answers(build_engine(spec)))
    assert caplog.text.count("cannot be captured: operation not") == 1


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_graphs_on_a_device_give_the_computed_bits(
    folder: Path, other_folder: Path, tmp_path: Path, dtype: str
) -> None:
    spec = make_spec(folder, slots=10, device="cuda", dtype=dtype, deterministic=False)
    other = {
        name: one.to(getattr(torch, dtype))
        for name, one in weights_of(other_folder).items()
    }
    found = []
    for is_replayed in (True, False):
        engine = build_engine(spec)
        assert engine.runner.graphs is not None
        if not is_replayed:
            engine.runner.graphs._replay_of = lambda layout, logits: None  # type: ignore[method-assign]
        found.append(
            [
                drawn(one)
                for one in answers(engine, publish_halfway(engine, other, tmp_path))
            ]
        )
    assert found[0] == found[1]
