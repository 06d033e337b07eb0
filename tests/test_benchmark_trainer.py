"""The benchmark of the optimizer step: its batch, its clock, and that both sides take the same step."""

from dataclasses import replace
from pathlib import Path

import pytest
import trainer
import trainer_case
from trainer_case import Case


def make_case(folder: Path, lengths: list[int]) -> Case:
    model = trainer_case.make_tiny(folder / "model")
    (folder / "batch").write_bytes(trainer_case.make_batch(str(model), lengths)[0])
    return Case(
        model_path=str(model),
        batch_path=str(folder / "batch"),
        dtype="float32",
        device="cpu",
        threads=trainer.THREADS,
        checkpointing=False,
        seconds=0.0,
        warm_up=0,
        micro_batch=4,
    )


def test_sides_that_take_different_steps_end_the_benchmark():
    side = trainer.Side(cpu_s=1.0, wall_s=1.0, peak_bytes=1, loss=0.5, grad_norm=1.0)
    trainer.check_agreement(side, side, "float32")
    for other in (
        replace(side, loss=0.5002),
        replace(side, grad_norm=1.002),
        replace(side, loss=float("nan")),
    ):
        with pytest.raises(SystemExit, match="do not compute the same"):
            trainer.check_agreement(other, side, "float32")


@pytest.mark.slow
def test_both_sides_take_the_same_step_of_unequal_completions(tmp_path):
    pytest.importorskip("trl")
    case = make_case(tmp_path, [3, 40, 7, 19, 1, 25, 11, 60, 2, 5, 33, 9, 14, 70, 6, 8])
    ours, trl = (trainer.summary([trainer.run_child(side, case, tmp_path)]) for side in ("ours", "trl"))
    trainer.check_agreement(ours, trl, "float32")
    assert abs(trl.loss) > 1e-3
