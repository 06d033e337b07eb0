"""Crash fuzz: kills real runs on a tiny model hundreds of times, resumes them, and has an independent checker
look after each kill.

python scripts/fuzz.py [--kills 300] [--seed 0] [--dir DIR]

One after the other: runs at max_staleness 0 and 3, with one and two engines, and with trainer and engine in
turns on one device. At 0 the end must be bit-identical to a run never killed; at 3 no prompt may be lost or
trained twice, and the bound must hold. Ends with the count of kills, or with the first violation; the
directory of the run that broke a promise stays.
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

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from crash_fuzz import Crashes, differences, fuzz_config, never_killed

TURNS = {"rollout": "trainer"}
KINDS: tuple[tuple[int, int, dict[str, str]], ...] = (
    (0, 1, {}),
    (3, 2, {}),
    (0, 2, TURNS),
    (3, 1, {}),
    (0, 2, {}),
)
"""(max_staleness, number of engines, placement)"""


def main() -> None:
    """Kill, resume, check, until there are enough kills."""
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
        never_killed(fuzz_config(folder), whole)
    kills: Counter[str] = Counter()
    num_runs, started_s = 0, time.monotonic()
    for seed, (max_staleness, num_engines, placement) in zip(
        itertools.count(options.seed), itertools.cycle(KINDS), strict=False
    ):
        if kills.total() >= options.kills:
            break
        place = folder / f"seed_{seed}"
        place.mkdir()
        config = fuzz_config(
            place,
            buffer={"max_staleness": max_staleness},
            rollout={"num_engines": num_engines},
            placement=placement,
        )
        turns = ", in turns" if placement else ""
        name = f"seed {seed}, max_staleness {max_staleness}, {num_engines} engines{turns}"
        try:
            kills += Crashes(config, place / "run", seed=seed, num_kills=options.kills_a_run).live()
            found = differences(whole, place / "run") if max_staleness == 0 else []
            assert found == [], found
        except AssertionError as broken:
            sys.exit(
                f"{name}: a promise is broken after {kills.total()} kills that broke none: {broken}\nthe run "
                f"lies in {place}"
            )
        shutil.rmtree(place)
        num_runs += 1
        print(
            f"{name}: whole. {kills.total()} kills so far in {time.monotonic() - started_s:.0f} s: "
            f"{dict(kills)}",
            flush=True,
        )
    print(
        f"{kills.total()} kills in {num_runs} runs, {dict(kills)}: no prompt lost, none trained twice, the "
        f"order and the bound kept."
    )


if __name__ == "__main__":
    main()
