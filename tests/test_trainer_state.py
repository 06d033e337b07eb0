"""A loaded trainer continues as if it had never stopped; a foreign state is refused."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from trainer_cases import MakeStep, full_disk, train_versions, weights_digest

from asyncrl.base.http import Refused
from asyncrl.trainer.ranks.rank_process import _words
from asyncrl.trainer.ranks.ranks import BrokenStepError, loss_behind
from asyncrl.trainer.trainer_client import LOST_STATUS

LORA = {"rank": 4, "alpha": 8.0}


@pytest.mark.parametrize(
    "values",
    [
        {"trainer": {"lora": LORA}, "dtype": "bfloat16"},
        {
            "trainer": {"schedule": "cosine", "num_steps": 5, "mini_batches": 2},
            "algorithm": {"kl_coefficient": 0.1},
        },
        {"trainer": {"deterministic": True}},
        {"trainer": {"optimizer": "muon", "mini_batches": 2}},
    ],
    ids=["lora", "schedule and reference", "deterministic", "muon"],
)
def test_loaded_trainer_continues_to_the_same_bits(
    make_step: MakeStep, tmp_path: Path, values: Any
) -> None:
    whole = make_step(**values)
    train_versions(whole, 0, 3)
    torch.manual_seed(123)
    whole.begin_save_state(tmp_path / "state").result()
    drawn = torch.rand(4)
    train_versions(whole, 3, 5)
    step = make_step(**values)
    step.load_state(tmp_path / "state")
    assert step.policy_version == 3
    assert torch.equal(torch.rand(4), drawn), "the random generator continues"
    train_versions(step, 3, 5)
    assert weights_digest(step) == weights_digest(whole)
    exports = [one.begin_export(tmp_path / "weights")().digest for one in (step, whole)]
    assert exports[0] == exports[1], (
        "the weights that the model computes with are those of the masters"
    )
    assert (
        step.trained.optimizer.param_groups[0]["lr"]
        == whole.trained.optimizer.param_groups[0]["lr"]
    )


@pytest.mark.parametrize("is_saved_with_lora", [True, False])
def test_state_of_other_weights_is_refused_and_changes_nothing(
    make_step: MakeStep, tmp_path: Path, is_saved_with_lora: bool
) -> None:
    adapters, whole = make_step(trainer={"lora": LORA}), make_step()
    saved, loaded = (adapters, whole) if is_saved_with_lora else (whole, adapters)
    train_versions(saved, 0, 1)
    saved.begin_save_state(tmp_path / "state").result()
    before = weights_digest(loaded)
    with pytest.raises(Refused) as refused:
        loaded.load_state(tmp_path / "state")
    assert refused.value.status == 422
    assert "another model" in str(refused.value)
    assert (loaded.policy_version, weights_digest(loaded)) == (0, before)


def test_operator_without_deterministic_kernel_names_the_setting(
    make_step: MakeStep,
) -> None:
    make_step(trainer={"deterministic": True})
    with pytest.raises(RuntimeError) as caught:
        torch.zeros(3).put_(torch.tensor([0]), torch.ones(1))
    words = _words(caught.value)
    assert "put_ does not have a deterministic implementation" in words.error
    assert words.way_out.startswith("set trainer.deterministic=false")


def test_state_is_copied_beside_the_forward_pass(
    make_step: MakeStep, tmp_path: Path
) -> None:
    step, forward_ran, changes = make_step(), threading.Event(), list[bool]()
    train_versions(step, 0, 1)
    at_save = weights_digest(step)
    copy = step._state._copy

    def copy_late(*arguments: Any) -> dict[str, torch.Tensor]:
        assert forward_ran.wait(60), "the copy held up the forward pass"
        return copy(*arguments)

    def change_now(*_: object) -> None:
        assert step._state.copying is not None
        changes.append(step._state.copying.done())

    step.policy.register_forward_hook(lambda *_: forward_ran.set())
    step._state._copy = copy_late  # type: ignore[method-assign]
    step.trained.optimizer.register_step_pre_hook(change_now)
    pending = step.begin_save_state(tmp_path / "state")
    train_versions(step, 1, 2)
    pending.result()
    loaded = make_step()
    loaded.load_state(tmp_path / "state")
    assert (changes, weights_digest(loaded)) == ([True], at_save)
    train_versions(loaded, 1, 2)
    assert weights_digest(loaded) == weights_digest(step) != at_save


def test_load_waits_for_the_state_that_is_being_written(
    make_step: MakeStep, tmp_path: Path
) -> None:
    step, has_loaded = make_step(), threading.Event()
    train_versions(step, 0, 1)
    step.begin_save_state(tmp_path / "first").result()
    write, write_back = step._state._write, step.masters.write_back
    was_written = list[bool]()

    def write_late(*arguments: Any) -> None:
        # A load that does not wait has ended by then.
        has_loaded.wait(1.0)
        write(*arguments)

    def note_load() -> None:
        was_written.append(pending.done())
        has_loaded.set()
        write_back()

    step._state._write = write_late  # type: ignore[method-assign]
    step.masters.write_back = note_load  # type: ignore[method-assign]
    pending = step.begin_save_state(tmp_path / "second")
    step.load_state(tmp_path / "first")
    assert was_written == [True], (
        "two threads would use one process group, and mistake each other's messages"
    )
    pending.result()
    make_step().load_state(tmp_path / "second")


# torch's file, on Python 3.13
@pytest.mark.filterwarnings("ignore:Exception ignored in.*NoCloseWriter")
def test_failed_save_is_an_error_and_the_next_succeeds(
    make_step: MakeStep, tmp_path: Path
) -> None:
    step, folder = make_step(), tmp_path / "state"
    train_versions(step, 0, 1)
    with (
        full_disk(limit=50_000),
        pytest.raises(Refused, match=r"cannot write or read .*half: OSError"),
    ):
        step.begin_save_state(tmp_path / "half").result()
    step.begin_save_state(folder).result()
    make_step().load_state(folder)
    (folder / "__0_0.distcp").write_bytes(b"")
    # Its optimizer has lost its state, so this trainer must not go on.
    with pytest.raises(BrokenStepError, match=f"cannot write or read {folder}") as half:
        step.load_state(folder)
    lost = loss_behind(half.value, step.spec)
    assert lost is not None
    assert lost.status == LOST_STATUS
    (folder / ".metadata").write_bytes(b"")
    with pytest.raises(Refused, match=f"cannot write or read {folder}.*EOFError"):
        step.load_state(folder)
    step._state._copy = Mock(side_effect=ValueError("odd"))  # type: ignore[method-assign]
    with pytest.raises(Refused, match="cannot copy the state .*ValueError: odd"):
        step.begin_save_state(tmp_path / "odd").result()


def test_full_disk_delays_the_record_and_checkpoints_and_not_the_step(
    make_step: MakeStep, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    step = make_step()
    record = step.spec.record_path
    train_versions(step, 0, 1)
    written = record.read_bytes()
    whole = make_step()
    train_versions(whole, 0, 3)
    expected = weights_digest(whole)
    record.write_bytes(written)  # both have this file
    with full_disk(limit=len(written) + 100):
        train_versions(step, 1, 3)
        assert record.read_bytes() == written, "no part of a line is left"
        with pytest.raises(Refused, match="lacks trained steps: File too large"):
            step.begin_save_state(tmp_path / "state")
        with pytest.raises(Refused, match="lacks trained steps: File too large"):
            step.save(tmp_path / "final")
    assert not (tmp_path / "state").exists()
    assert "lacks step 2 for now" in caplog.text
    step.begin_save_state(tmp_path / "state").result()
    lines = [json.loads(line) for line in record.read_text().splitlines()]
    assert [line["version"] for line in lines] == [0, 1, 2]
    assert (step.policy_version, weights_digest(step)) == (3, expected)
