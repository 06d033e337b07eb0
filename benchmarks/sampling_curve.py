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

import os
import shutil
from functools import partial
from pathlib import Path

from common import ASYNCRL, HERE
from end_to_end_runs import Curve, Work, compare_sides

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


def run(side: str, seed: int, work: Path) -> Curve:
    command = [*ASYNCRL, str(CONFIG), f"seed={seed}"]
    if side != "whole":
        command.append(CUT)
    if side == "wrong":
        paths = [
            str(without_supports(work / "changed")),
            os.environ.get("PYTHONPATH", ""),
        ]
        # Without PYTHONSAFEPATH, -m would find the package of the working folder first.
        changed = ["env", "PYTHONSAFEPATH=1", f"PYTHONPATH={os.pathsep.join(paths)}"]
        command = [*changed, *command]
    return Work(work).measure(f"{side}-{seed}", command)


if __name__ == "__main__":
    seconds = {
        f"seconds to {level}": (".1f", partial(Curve.reach_s, level=level))
        for level in LEVELS
    }
    compare_sides("sampling_curve", __doc__, SIDES, run, seconds)
