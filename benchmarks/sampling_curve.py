"""Curves of the quickstart with top_p 0.8: over the supports, with the wrong ratio, and
with the whole vocabulary instead.

    python benchmarks/sampling_curve.py [--seeds 3] [--work DIR]

The wrong ratio is of a copy of asyncrl whose trainer ignores the supports: its logprobs
are over the whole vocabulary, the engine's over the likeliest tokens. asyncrl itself
cannot do this. Writes benchmarks/results/sampling_curve.json and
docs/results/sampling_curve.png. --work keeps finished runs, so an ended benchmark
continues.
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
from pathlib import Path

from common import ASYNCRL, HERE, machine_line
from end_to_end_runs import Curve, Measured, Work, keep_curves

CONFIG = HERE.parent / "configs" / "quickstart.yaml"
SIDES = {
    "supports": "top_p 0.8, over the supports",
    "wrong": "top_p 0.8, wrong ratio",
    "whole": "top_p 1",
}
CUT = "rollout.top_p=0.8"
LEVELS = (0.8, 0.9)


def without_supports(folder: Path) -> Path:
    """Make a copy of the package whose trainer ignores supports."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(HERE.parent / "asyncrl", folder / "asyncrl")
    rank = folder / "asyncrl" / "trainer" / "rank.py"
    text = rank.read_text(encoding="utf-8")
    call = "find_supports(arrays, has_loss)"
    assert text.count(call) == 1, "the copy must differ in one place"
    rank.write_text(text.replace(call, "None"), encoding="utf-8")
    return folder


def measure(num_seeds: int, work: Path) -> dict[str, Measured]:
    curves: dict[str, dict[int, Curve]] = {side: {} for side in SIDES}
    paths = [str(without_supports(work / "changed")), os.environ.get("PYTHONPATH", "")]
    # Without PYTHONSAFEPATH, -m would find the package of the working folder first.
    changed = ["env", "PYTHONSAFEPATH=1", f"PYTHONPATH={os.pathsep.join(paths)}"]
    for seed in range(num_seeds):
        for side, found in curves.items():
            command = [*ASYNCRL, str(CONFIG), f"seed={seed}"]
            if side != "whole":
                command.append(CUT)
            if side == "wrong":
                command = [*changed, *command]
            found[seed] = Work(work).measure(f"{side}-{seed}", command)
    return {side: Measured("", found) for side, found in curves.items()}


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
        found = measure(arguments.seeds, work)
    print(machine_line())
    levels = "".join(f"{f'seconds to {level}':>16}" for level in LEVELS)
    print(f"{'':<30}{'final':>7}{levels}")
    for side, measured in found.items():
        reached = "".join(
            f"{measured.median(lambda curve, level=level: curve.reach_s(level)):>16.1f}"
            for level in LEVELS
        )
        print(f"{SIDES[side]:<30}{measured.final_reward:>7.3f}{reached}")
    keep_curves("sampling_curve", found, SIDES)


if __name__ == "__main__":
    main()
