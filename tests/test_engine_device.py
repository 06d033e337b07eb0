"""CUDA graphs of the embedded engine, recorded and replayed on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine_in_process import (
    drawn,
    make_qwen3,
    make_request,
    make_spec,
    stage_file,
    weights_of,
)
from engine_replies import ask
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from asyncrl.messages.engine_api import CommitRequest
from asyncrl.messages.tokens import SegmentPart
from asyncrl_servers.embedded.embedded_engine import Engine, build_engine
from asyncrl_servers.embedded.runner import MOST_GRAPHS, DecodeGraphs


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_qwen3(tmp_path_factory.mktemp("device") / "model", num_hidden_layers=2)


@pytest.fixture(scope="module")
def other_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_qwen3(
        tmp_path_factory.mktemp("device") / "other", seed=1, num_hidden_layers=2
    )


class Recorded(DecodeGraphs):
    """Replay each kernel on a CPU, with the same memory and outputs."""

    num_captured = num_replayed = 0

    def capture(self, function: Callable[[], None]) -> Callable[[], None]:
        calls = list[tuple[Any, Any, Any, Any]]()

        class Recorder(TorchDispatchMode):
            def __torch_dispatch__(
                self, func: Any, types: Any, args: Any = (), kwargs: Any = None
            ) -> Any:
                made = func(*args, **kwargs or {})
                calls.append(
                    (func, *tree_map(at_this_address, (args, kwargs or {})), made)
                )
                return made

        def at_this_address(one: Any) -> Any:
            return one.detach() if isinstance(one, torch.nn.Parameter) else one

        with Recorder():
            function()
        self.num_captured += 1

        def replay() -> None:
            self.num_replayed += 1
            for func, args, kwargs, made in calls:
                for old, new in zip(
                    tree_leaves(made), tree_leaves(func(*args, **kwargs)), strict=True
                ):
                    if old.data_ptr() != new.data_ptr():
                        old.copy_(new)

        return replay


def answers(
    engine: Engine, halfway: Callable[[], None] = lambda: None
) -> list[SegmentPart]:
    """Of requests that come and go: more than there are slots, short and long ones,
    some of one prompt.
    """
    ends, futures = [40, 9, 25, 60, 33, 12, 50, 21, 44, 30, 18, 27, 36, 55], []
    for seed, end in enumerate(ends):
        prompt = tuple(2 + at % 48 for at in range(3 if seed % 3 else 90))
        futures += ask(
            engine,
            [make_request(f"r{seed}", prompt_ids=prompt, seed=seed, max_tokens=end)],
        )
    for iteration in range(2000):
        if all(future.done() for future in futures):
            return [future.result(timeout=0) for future in futures]
        if iteration == 20:
            halfway()
        engine.iterate()
    raise AssertionError("the requests have not ended in 2000 steps")


def check_same(found: list[SegmentPart], expected: list[SegmentPart]) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.token_ids == theirs.token_ids
        np.testing.assert_allclose(drawn(ours)[1], drawn(theirs)[1], atol=1e-4)


def publish_halfway(
    engine: Engine, other: Path | dict[str, Tensor], tmp_path: Path
) -> Callable[[], None]:
    staged = engine.weights.prepare(stage_file(other, 1, tmp_path))
    commit = CommitRequest(version=1, digest=staged.digest, interrupt="keep")
    return lambda: engine.commit(commit) and None


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
