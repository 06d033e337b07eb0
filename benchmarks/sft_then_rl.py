"""Reward of RL after supervised fine-tuning, and of RL alone, from the same random
weights: the curves of docs/sft-then-rl.md.

    python benchmarks/sft_then_rl.py [--seeds 3] [--work DIR]

Each seed: `asyncrl sft` on 200 examples in 75 steps, then `asyncrl run` from its final/,
and the same run from the model that the SFT began with. Writes
benchmarks/results/sft_then_rl.json and docs/results/sft_then_rl.png. --work keeps
finished runs, so an ended benchmark continues.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

from common import ASYNCRL, HERE, child_environ, machine_line
from end_to_end_runs import Curve, Measured, Work, keep_curves

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


def measure(num_seeds: int, work: Path) -> dict[str, Measured]:
    curves: dict[str, dict[int, Curve]] = {side: {} for side in SIDES}
    for seed in range(num_seeds):
        tuned = work / f"sft-{seed}"
        fine_tune(seed, tuned)
        for side, found in curves.items():
            config = str(HERE.parent / EXAMPLE / "rl.yaml")
            changes = [f"seed={seed}", f"model.path={tuned / side}"]
            found[seed] = Work(work).measure(
                f"{side}-{seed}", [*ASYNCRL, config, *changes]
            )
    return {side: Measured("", found) for side, found in curves.items()}


def steps_to(curve: Curve, level: float) -> float:
    """Return the first step whose moving mean reaches the level; infinite without."""
    reach_s = curve.reach_s(level)
    steps = (step for step, at_s in enumerate(curve.times_s, 1) if at_s >= reach_s)
    return next(steps, float("inf"))


def main() -> None:
    """Run, print, draw."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=3, help="(%(default)s)")
    parser.add_argument("--work", type=Path, help="folder of finished runs")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        work = arguments.work or Path(temporary)
        work.mkdir(parents=True, exist_ok=True)
        found = measure(arguments.seeds, work)
    print(machine_line())
    levels = "".join(f"{f'steps to {level}':>14}" for level in LEVELS)
    print(f"{'':<14}{'first 10':>9}{'final':>7}{levels}")
    for side, measured in found.items():
        first = measured.median(lambda curve: sum(curve.rewards[:10]) / 10)
        reached = "".join(
            f"{measured.median(lambda curve, level=level: steps_to(curve, level)):>14.0f}"
            for level in LEVELS
        )
        print(f"{SIDES[side]:<14}{first:>9.3f}{measured.final_reward:>7.3f}{reached}")
    keep_curves("sft_then_rl", found, SIDES)


if __name__ == "__main__":
    main()
