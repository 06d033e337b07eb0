"""The benchmark of the optimizer step: its batch, its clock, and that both sides take the same step."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import trainer
import trainer_case
from trainer_case import Case, Pieces, Row


def make_case(folder: Path, rows: Callable[[Pieces], list[Row]], micro_batch: int) -> Case:
    model = trainer_case.make_tiny(folder / "model")
    (folder / "batch").write_bytes(trainer_case.make_batch(str(model), rows))
    return Case(
        model_path=str(model),
        batch_path=str(folder / "batch"),
        dtype="float32",
        device="cpu",
        threads=trainer.THREADS,
        seconds=0.0,
        warm_up=0,
        micro_batch=micro_batch,
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
@pytest.mark.long
def test_both_sides_take_the_same_step_of_unequal_completions(tmp_path):
    pytest.importorskip("trl")
    lengths = [3, 40, 7, 19, 1, 25, 11, 60, 2, 5, 33, 9, 14, 70, 6, 8]
    case = make_case(tmp_path, partial(trainer_case.completions, lengths=lengths), 4)
    ours, trl = (trainer.summary([trainer.run_child(side, case, tmp_path)]) for side in ("ours", "trl"))
    trainer.check_agreement(ours, trl, "float32")
    assert abs(trl.loss) > 1e-3


@pytest.mark.slow
def test_branches_give_the_same_step_as_each_branch_alone(tmp_path):
    rows = partial(trainer_case.agents, num_turns=4, num_groups=2, group_size=3)
    case = make_case(tmp_path, rows, 1024)
    sides = (case, replace(case, is_untangled=True))
    ours, untangled = (trainer.summary([trainer.run_child("ours", one, tmp_path)]) for one in sides)
    trainer.check_agreement(ours, untangled, "float32")
    assert abs(ours.loss) > 1e-3
