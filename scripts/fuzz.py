"""Kill real runs on a tiny model hundreds of times, resume them, and check each kill
independently.

python scripts/fuzz.py [--kills 300] [--seed 0] [--dir DIR]

Runs use max_staleness 0 and 3, one and two engines, and colocation. At 0 groups are
trained as they end, and the result must be bit-identical to a run that was never killed
and trained the same parts at the end of each batch. At 3 no prompt may be lost or
trained twice, and the bound must hold. The directory of a run that breaks a promise is
kept.
"""

from __future__ import annotations

import argparse
import itertools
import shutil
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "kit"))

from crash_fuzz import Crashes, differences, fuzz_config, never_killed

KINDS = (
    (0, 1, "auto"),
    (3, 2, "auto"),
    (0, 2, "trainer"),
    (3, 1, "auto"),
    (0, 2, "auto"),
)
"""max_staleness, number of engines, placement of rollouts."""
PARTS = {"micro_batch_tokens": 32}
"""Small enough that a batch has several parts."""


def main() -> None:
    """Kill, resume and check until there are enough kills."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=300)
    parser.add_argument("--kills-a-run", type=int, default=12)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dir", type=Path, default=None)
    options = parser.parse_args()
    folder = options.dir or Path(tempfile.mkdtemp(prefix="asyncrl-fuzz-"))
    folder.mkdir(parents=True, exist_ok=True)
    whole = folder / "whole"
    if not (whole / "final").is_dir():
        shutil.rmtree(whole, ignore_errors=True)
        never_killed(fuzz_config(folder, trainer={**PARTS, "stream": "off"}), whole)
    kills: Counter[str] = Counter()
    started_s = time.monotonic()
    kinds = zip(itertools.count(options.seed), itertools.cycle(KINDS), strict=False)
    while kills.total() < options.kills:
        seed, (max_staleness, num_engines, rollout) = next(kinds)
        place = folder / f"seed_{seed}"
        place.mkdir()
        config = fuzz_config(
            place,
            buffer={"max_staleness": max_staleness},
            rollout={"num_engines": num_engines},
            placement={"rollout": rollout},
            trainer=PARTS,
        )
        name = f"seed {seed}: max_staleness {max_staleness}, {num_engines} engines, rollouts on {rollout}"
        try:
            kills += Crashes(
                config, place / "run", seed=seed, num_kills=options.kills_a_run
            ).live()
            found = differences(whole, place / "run") if max_staleness == 0 else []
            assert found == [], found
        except AssertionError as broken:
            sys.exit(
                f"{name}: a promise is broken after {kills.total()} kills: {broken}\nsee {place}"
            )
        shutil.rmtree(place)
        elapsed_s = time.monotonic() - started_s
        print(
            f"{name}: ok. {kills.total()} kills in {elapsed_s:.0f} s: {dict(kills)}",
            flush=True,
        )


if __name__ == "__main__":
    main()
