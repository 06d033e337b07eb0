"""A trainer that is loaded goes on as if it had never stopped; what is not whole, or of another model, is
refused.
"""

from __future__ import annotations

import hashlib
import os
import pickle
import resource
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from state_ranks import Run, rank_main, same, train
from tiny_model import make_tiny_model
from torch import multiprocessing
from trainer_cases import make_spec

from asyncrl import files as durable
from asyncrl.checkpoints.folder import Checkpoints
from asyncrl.checkpoints.manifest import check_manifest
from asyncrl.config import CheckpointConfig
from asyncrl.http import Refused
from asyncrl.trainer.state import Progress, read_manifest
from asyncrl.trainer.step import TrainStep

LORA = {"rank": 4, "alpha": 8.0}
MakeStep = Callable[..., TrainStep]


@pytest.fixture
def make_step(tiny_model_dir: Path, tmp_path: Path) -> MakeStep:
    def make(model_dir: Path = tiny_model_dir, **values: Any) -> TrainStep:
        return TrainStep(make_spec(model_dir, tmp_path, **values))

    return make


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"dtype": "bfloat16"},
        {"trainer": {"lora": LORA}},
        {
            "trainer": {"schedule": "cosine", "num_steps": 5, "mini_batches": 2},
            "algorithm": {"kl_coefficient": 0.1},
        },
    ],
    ids=["float32", "bfloat16", "lora", "schedule and reference"],
)
def test_three_steps_and_a_load_and_two_are_the_same_bits_as_five_steps(
    make_step: MakeStep, tmp_path: Path, values: dict[str, Any]
) -> None:
    whole = make_step(**values)
    train(whole, 0, 3)
    torch.manual_seed(123)
    whole.begin_save_state(tmp_path / "state").wait()
    drawn, learning_rate = torch.rand(4), whole._optimizer.param_groups[0]["lr"]
    train(whole, 3, 5)
    step = make_step(**values)
    step.load_state(tmp_path / "state")
    assert (step.policy_version, step.num_optimizer_steps) == (3, 3 * whole.spec.steps_per_batch)
    assert torch.equal(torch.rand(4), drawn), "the random generator goes on where it was"
    assert step._optimizer.param_groups[0]["lr"] == learning_rate
    train(step, 3, 5)
    assert step.weights_digest() == whole.weights_digest()
    exports = [
        one.export(tmp_path / f"{number}.safetensors").digest for number, one in enumerate([step, whole])
    ]
    assert exports[0] == exports[1], "the weights that the model computes with are those of the masters"
    assert step._optimizer.param_groups[0]["lr"] == whole._optimizer.param_groups[0]["lr"]


@pytest.mark.parametrize(("before", "now"), [(4, 1), (1, 4)])
def test_the_schedule_goes_on_at_the_batch_where_it_was_if_epochs_were_changed(
    make_step: MakeStep, tmp_path: Path, before: int, now: int
) -> None:
    linear = {"schedule": "linear", "num_steps": 4}
    step = make_step(trainer={**linear, "epochs": before})
    train(step, 0, 2)
    step.begin_save_state(tmp_path / "state").wait()
    changed = make_step(trainer={**linear, "epochs": now})
    changed.load_state(tmp_path / "state")
    peak = changed.spec.trainer.learning_rate
    train(changed, 2, 3)
    assert changed._optimizer.param_groups[0]["lr"] == pytest.approx(peak * (0.5 - (now - 1) / (4 * now)))


def test_a_state_from_before_the_first_step_takes_back_what_came_after(
    make_step: MakeStep, tmp_path: Path
) -> None:
    step = make_step()
    before = step.weights_digest()
    step.num_skipped_in_a_row = 2
    step.begin_save_state(tmp_path / "state").wait()
    train(step, 0, 1)
    step.load_state(tmp_path / "state")
    assert (step.policy_version, step.num_optimizer_steps, step.num_skipped_in_a_row) == (0, 0, 2)
    assert step.weights_digest() == before
    assert not any(step._optimizer.state.get(master) for master in step._masters.named.values())


def test_training_beside_the_writing_does_not_reach_what_is_written(
    make_step: MakeStep, tmp_path: Path
) -> None:
    step, may_write = make_step(), threading.Event()
    train(step, 0, 2)
    at_save = step.weights_digest()
    step._state._writer.submit(may_write.wait)
    pending = step.begin_save_state(tmp_path / "state")
    train(step, 2, 4)
    assert not pending.written.done()
    assert not (tmp_path / "state").exists()
    may_write.set()
    pending.wait()
    buffers = {name: buffer.data_ptr() for name, buffer in step._state._host.items()}
    loaded = make_step()
    loaded.load_state(tmp_path / "state")
    assert (loaded.policy_version, loaded.weights_digest()) == (2, at_save)

    step.begin_save_state(tmp_path / "other").wait()
    assert buffers == {name: buffer.data_ptr() for name, buffer in step._state._host.items()}, (
        "host memory is taken once"
    )
    loaded.load_state(tmp_path / "other")
    assert (loaded.policy_version, loaded.weights_digest()) == (4, step.weights_digest())


def test_a_save_that_fails_leaves_nothing_and_the_next_one_succeeds(
    make_step: MakeStep, tmp_path: Path
) -> None:
    step = make_step()
    train(step, 0, 1)
    with pytest.raises(Refused, match="there already"):
        step.begin_save_state(step.spec.record_path).wait()
    before = sorted(tmp_path.iterdir())
    with pytest.raises(Refused, match="cannot write the trainer's state"):
        step.begin_save_state(step.spec.record_path / "state").wait()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, hard))  # as a disk that is full half way through
    try:
        pending = step.begin_save_state(tmp_path / "state")
        with pytest.raises(Refused, match=r"cannot write or read .*state"):
            pending.wait()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert sorted(tmp_path.iterdir()) == before
    (tmp_path / ".state.unfinished").mkdir()  # as a process leaves it that was killed
    (tmp_path / ".state.unfinished" / "__7_0.distcp").write_bytes(b"old")
    step.begin_save_state(tmp_path / "state").wait()
    make_step().load_state(tmp_path / "state")
    assert sorted(tmp_path.iterdir()) == sorted([*before, tmp_path / "state"])


def test_every_byte_of_a_checkpoint_is_hashed_once_when_it_is_made_and_once_when_it_is_taken(
    make_step: MakeStep, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hashed: list[int] = []

    class Counting:
        def __init__(self) -> None:
            self._hash = hashlib.sha256()

        def update(self, data: bytes) -> None:
            hashed.append(len(data))
            self._hash.update(data)

        def hexdigest(self) -> str:
            return self._hash.hexdigest()

    def bytes_since() -> int:
        num_bytes = sum(hashed)
        hashed.clear()
        return num_bytes

    monkeypatch.setattr(durable, "new_hash", Counting)
    step, checkpoints = make_step(), Checkpoints(tmp_path, CheckpointConfig())
    train(step, 0, 1)
    pending = checkpoints.begin()
    step.begin_save_state(pending.trainer_dir).wait()
    folder = checkpoints.finish(pending, 1, {"feed": {}})
    files = [path for path in folder.rglob("*") if path.is_file() and path.name != "manifest.json"]
    num_bytes = sum(path.stat().st_size for path in files)
    assert num_bytes > 10_000
    assert bytes_since() == num_bytes
    assert {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files} == {
        Path(name).name: entry.sha256 for name, entry in check_manifest(folder).files.items()
    }
    assert bytes_since() == num_bytes

    whole, told = checkpoints.newest_whole()
    assert whole is not None, told
    loaded = make_step()
    loaded.load_state(whole.trainer_dir)
    assert bytes_since() == num_bytes, "by the one that takes it alone"
    assert loaded.weights_digest() == step.weights_digest()


def test_an_index_that_would_run_something_is_refused(make_step: MakeStep, tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> tuple[Any, ...]:
            return os.mkdir, (str(tmp_path / "was here"),)

    step = make_step()
    step.begin_save_state(tmp_path / "state").wait()
    (tmp_path / "state" / ".metadata").write_bytes(pickle.dumps(Evil()))
    with pytest.raises(Refused, match="mkdir, which no index does"):
        step.load_state(tmp_path / "state")
    assert not (tmp_path / "was here").exists()


def test_the_state_of_another_model_is_refused_with_the_reason(make_step: MakeStep, tmp_path: Path) -> None:
    step = make_step()
    step.begin_save_state(tmp_path / "all").wait()
    adapted = make_step(trainer={"lora": LORA})
    adapted.begin_save_state(tmp_path / "adapters").wait()
    assert set(read_manifest(tmp_path / "adapters").shapes) == set(adapted._masters.named)
    assert all("lora" in name for name in adapted._masters.named)
    wider = make_step(make_tiny_model(tmp_path / "wider", intermediate_size=96))
    with pytest.raises(
        Refused, match=r"another model: 6 weights differ.*\[32, 64\] there and \[32, 96\] here"
    ):
        wider.load_state(tmp_path / "all")
    with pytest.raises(Refused, match=r"1 weights differ, e.g. lm_head.weight is missing there"):
        make_step(make_tiny_model(tmp_path / "untied", tie_word_embeddings=False)).load_state(
            tmp_path / "all"
        )
    with pytest.raises(Refused, match=r"holds adapters \(rank 4, .*\), and this run trains all weights"):
        step.load_state(tmp_path / "adapters")
    with pytest.raises(Refused, match="holds all weights, and this run trains adapters"):
        adapted.load_state(tmp_path / "all")
    with pytest.raises(Refused, match=r"alpha 8.0, .* trains adapters \(rank 4, alpha 16.0"):
        make_step(trainer={"lora": {**LORA, "alpha": 16.0}}).load_state(tmp_path / "adapters")


@pytest.mark.slow
def test_two_ranks_save_shards_that_one_and_two_load_and_two_load_what_one_saved(
    make_step: MakeStep, tiny_model_dir: Path, tmp_path: Path
) -> None:
    runs: dict[str, dict[str, Any]] = {
        "all": {"trainer": {}},
        "lora": {"trainer": {"lora": LORA}, "dtype": "bfloat16"},
    }
    steps = {name: make_step(**values) for name, values in runs.items()}
    for name, step in steps.items():
        (tmp_path / name).mkdir()
        train(step, 0, 1)
        step.begin_save_state(tmp_path / name / "one").wait()
        (tmp_path / name / "one.digest").write_text(step.weights_digest())
    one = Run(5)
    one.train(4)
    one.state.begin_save(
        Progress(policy_version=4, num_optimizer_steps=8, num_skipped_in_a_row=1), tmp_path / "one"
    ).wait()
    torch.save(one.values(), tmp_path / "one.pt")

    (tmp_path / "staging").mkdir()
    for values in runs.values():
        values["trainer"]["world_size"] = 2
    specs = {
        name: make_spec(tiny_model_dir, tmp_path, **values).model_dump_json() for name, values in runs.items()
    }
    context = multiprocessing.start_processes(
        rank_main, (specs, tmp_path), nprocs=2, join=False, start_method="spawn"
    )
    assert context is not None
    while not context.join():
        pass

    saved = torch.load(tmp_path / "two.pt")
    assert one.state.load(tmp_path / "two") == Progress(policy_version=3, num_optimizer_steps=3)
    assert same(one.values(), saved), "what two processes saved, one has now"
    assert not same(one.values(), torch.load(tmp_path / "one.pt"))
    for name, step in steps.items():
        step.load_state(tmp_path / name / "two")
        assert (step.policy_version, step.weights_digest()) == (
            2,
            (tmp_path / name / "two.digest").read_text(),
        )
        train(step, 2, 3)
