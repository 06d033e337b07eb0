"""How near `asyncrl simulate RUN_DIR` comes to real runs: it is given the directory of one run of a workload,
and tells the steps a second and the mean age of runs with other settings, which are made, too.

    python benchmarks/simulate.py [--seconds 420] [--rounds 1] [--write]

Workloads, each a real `asyncrl run` of its own, embedded engine, without the first fifth of its steps:

    quickstart  configs/quickstart.yaml with a learning rate of 1e-7: how long answers are depends on what was
                learnt, and other settings learn another thing
    learning    the same as it is shipped; lengths fall to a fifth, and each run's in its own way
    tools       the workload of async_vs_sync.py: rewards that wait for tools with a long tail

`from` marks the run whose directory is read; what is told of it is what it would have been if it were played
again. With several rounds a line is the round whose speed was told with the median error. `load`: other
processes that wanted a core at the end of the run (its own included), which a forecast cannot know.

Last line: `ratio: X` = the farthest that a speed or a mean age of quickstart and tools was off, told over
measured or the other way round.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median_low

from async_vs_sync import CONFIG
from report import options, reported

from asyncrl.observe.forecast.forecast import NUM_SEEDS
from asyncrl.observe.forecast.forecast_case import Given, make_case

HERE = Path(__file__).parent
QUICKSTART = HERE.parent / "configs" / "quickstart.yaml"
STILL = ("trainer.learning_rate=1e-7",)
QUIET = ("observe.console=none", "observe.trackers=[]")

WORKLOADS: dict[str, tuple[tuple[str, ...], list[tuple[int, str, float]]]] = {
    "quickstart": (STILL, [(0, "mask", 0.3), (4, "mask", 0.2), (1, "mask", 0.2), (8, "mask", 0.2)]),
    "learning": ((), [(4, "mask", 0.08), (8, "mask", 0.08)]),
    "tools": (
        (),
        [(4, "drop", 0.4), (4, "mask", 0.4), (8, "mask", 0.3), (16, "mask", 0.3), (0, "wait", 2.7)],
    ),
}
"""Settings of all its runs; (max_staleness, on_overdue, about so many seconds a step)."""
BASE = {"quickstart": (4, "mask"), "learning": (4, "mask"), "tools": (8, "mask")}
"""Whose directory is read."""


@dataclass(frozen=True)
class Told:
    """One run: what it was, and what was told of it."""

    workload: str
    name: str
    is_base: bool
    speed: float
    told_speed: float
    age: float
    told_age: float
    load: float

    @property
    def error(self) -> float:
        """Of the speed, as a share."""
        return self.told_speed / self.speed - 1

    @property
    def ratio(self) -> float:
        """The farther of both; a mean age of 0 is told or not."""
        pairs = [(self.speed, self.told_speed)]
        pairs += [(self.age, self.told_age)] if self.age else []
        return max(max(one / other, other / one) for one, other in pairs)

    def line(self) -> str:
        """Of the table."""
        error_of_age = f"{self.told_age / self.age - 1:+7.1%}" if self.age else f"{'':>7}"
        return (
            f"{self.workload:<11} {self.name:<9} {'from' if self.is_base else '':<4} {self.speed:8.3f} "
            f"{self.told_speed:8.3f} {self.error:+7.1%} {self.age:6.2f} {self.told_age:6.2f} {error_of_age} "
            f"{self.load:5.1f}"
        )


def run_one(config: Path, settings: tuple[str, ...], run_dir: Path) -> float:
    """One run; returns the load at its end."""
    command = [sys.executable, "-m", "asyncrl.cli", "run", str(config), *settings, *QUIET]
    environment = os.environ | {"PYTHONPATH": f"{HERE}:{HERE.parent}"}
    subprocess.run([*command, "--run-dir", str(run_dir)], check=True, env=environment, timeout=1200)
    return os.getloadavg()[0]


def run_workload(name: str, seconds: float, folder: Path) -> list[Told]:
    """All its runs, each for about so many seconds, and what the one directory tells of them."""
    fixed, rows = WORKLOADS[name]
    config = folder / "tools.yaml" if name == "tools" else QUICKSTART
    loads = {}
    for bound, on_overdue, about_s in rows:
        num_steps = max(20, int(seconds / about_s))
        settings = (f"buffer.max_staleness={bound}", f"buffer.on_overdue={on_overdue}")
        settings += (*fixed, f"trainer.num_steps={num_steps}")
        loads[bound, on_overdue] = run_one(config, settings, folder / f"{name}-{bound}-{on_overdue}")
    found = []
    for setting, load in loads.items():
        bound, on_overdue = setting
        real = make_case(folder / f"{name}-{bound}-{on_overdue}", [], Given()).measured
        base_bound, base_overdue = BASE[name]
        values = [f"buffer.max_staleness={bound}", f"buffer.on_overdue={on_overdue}"]
        case = make_case(folder / f"{name}-{base_bound}-{base_overdue}", values, Given())
        told = [case.play(case.present, seed=seed) for seed in range(NUM_SEEDS)]
        assert real is not None, "a run directory has measured"
        found.append(
            Told(
                workload=name,
                name=f"{bound}, {on_overdue}",
                is_base=setting == BASE[name],
                speed=real.steps_per_s,
                told_speed=fmean(one.batches_per_s for one in told),
                age=real.age_mean,
                told_age=fmean(one.age_mean for one in told),
                load=load,
            )
        )
    return found


def main() -> None:
    """Run all and print the table."""
    parser = options(__doc__, seconds=420.0)
    parser.add_argument("--rounds", type=int, default=1, help="times that all runs are made (default: 1)")
    arguments = parser.parse_args()
    with reported("simulate", is_kept=arguments.write):
        run_all(arguments.seconds, arguments.rounds)


def run_all(seconds: float, num_rounds: int) -> None:
    """The table, line by line."""
    num_runs = sum(len(rows) for _, rows in WORKLOADS.values()) * num_rounds
    print(f"{num_rounds} rounds; steps/s and mean age in versions, measured and told")
    titles = f"{'steps/s':>8} {'told':>8} {'error':>7} {'age':>6} {'told':>6} {'error':>7} {'load':>5}"
    print(f"{'workload':<11} {'setting':<9} {'':<4} {titles}")
    worst = 1.0
    for name in WORKLOADS:
        rounds = []
        for _ in range(num_rounds):
            with tempfile.TemporaryDirectory() as folder:
                (Path(folder) / "tools.yaml").write_text(CONFIG)
                rounds.append(run_workload(name, seconds / num_runs, Path(folder)))
        for told in zip(*rounds, strict=True):
            middle = median_low(sorted(one.error for one in told))
            shown = next(one for one in told if one.error == middle)
            print(shown.line(), flush=True)
            if name != "learning":
                worst = max(worst, shown.ratio)
    print(f"ratio: {worst:.2f}")


if __name__ == "__main__":
    main()
