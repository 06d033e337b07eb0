"""Reward of RL after supervised fine-tuning, and of RL alone, from the same random
weights: the curves of docs/sft-then-rl.md.

    python benchmarks/sft_then_rl.py [--seeds 3] [--work DIR]

Each seed: `asyncrl sft` on 200 examples in 75 steps, then `asyncrl run` from its final/,
and the same run from the model that the SFT began with. Writes
benchmarks/results/sft_then_rl.json and docs/results/sft_then_rl.png. --work keeps
finished runs, so an ended benchmark continues.
"""

from __future__ import annotations

import subprocess
import sys
from functools import partial
from pathlib import Path

from common import ASYNCRL, HERE, child_environ
from end_to_end_runs import Curve, Work, compare_sides

EXAMPLE = "examples/sft_then_rl"
SIDES = {"final": "RL after SFT", "model": "RL alone"}
"""Folders of the SFT's run directory."""
LEVELS = (0.8, 0.9)
TIMEOUT_S = 600.0


def fine_tune(seed: int, folder: Path) -> None:
    """Make the run directory of the SFT, unless it is whole."""
    if (folder / "final").is_dir():
        return
    program = [sys.executable, "-m", "asyncrl.cli", "sft", f"{EXAMPLE}/sft.yaml"]
    subprocess.run(
        [*program, "--run-dir", str(folder), f"seed={seed}"],
        cwd=HERE.parent,
        env=child_environ(),
        stdout=subprocess.DEVNULL,
        timeout=TIMEOUT_S,
        check=True,
    )


def run(side: str, seed: int, work: Path) -> Curve:
    tuned = work / f"sft-{seed}"
    fine_tune(seed, tuned)
    config = str(HERE.parent / EXAMPLE / "rl.yaml")
    changes = [f"seed={seed}", f"model.path={tuned / side}"]
    return Work(work).measure(f"{side}-{seed}", [*ASYNCRL, config, *changes])


def steps_to(curve: Curve, level: float) -> float:
    """Return the first step whose moving mean reaches the level; infinite without."""
    reach_s = curve.reach_s(level)
    steps = (step for step, at_s in enumerate(curve.times_s, 1) if at_s >= reach_s)
    return next(steps, float("inf"))


if __name__ == "__main__":
    first = {"first 10": (".3f", lambda curve: sum(curve.rewards[:10]) / 10)}
    steps = {
        f"steps to {level}": (".0f", partial(steps_to, level=level)) for level in LEVELS
    }
    compare_sides("sft_then_rl", __doc__, SIDES, run, first | steps)
