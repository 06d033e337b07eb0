"""How near `asyncrl simulate RUN_DIR` comes to real runs: it is given the directory of one run of a workload,
and tells the steps a second and the mean age of runs with other settings, which are made, too.

    python benchmarks/simulate.py [--seconds 420] [--runs FOLDER] [--write]

Workloads, each a real `asyncrl run` of its own, embedded engine, without the first fifth of its steps:

    quickstart  configs/quickstart.yaml with a learning rate of 1e-7: how long answers are depends on what was
                learnt, and other settings learn another thing
    learning    the same as it is shipped; lengths fall to a fifth, and each run's in its own way
    tools       the workload of async_vs_sync.py: rewards that wait for tools with a long tail

`from` marks the run whose directory is read: `told` is from that one. `own`: the error of what each run's own
directory tells of it, which is that of the model alone: a run that was made while the machine was busier, or
that has learnt other lengths, is as it was. `load`: processes that wanted a core in the last minute of the
run, some three of them its own: what else a machine does, and beside which run, a forecast cannot know.
`--runs`: where runs are kept; one that is there already is not made again.

Last line: `ratio: X` = the farthest that a speed or a mean age of quickstart and tools was off, told over
measured or the other way round.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from async_vs_sync import CONFIG
from report import options, reported

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
        [(16, "mask", 0.3), (4, "mask", 0.4), (4, "drop", 0.4), (8, "mask", 0.3), (0, "wait", 2.7)],
    ),
}
"""Settings of all its runs; (max_staleness, on_overdue, about so many seconds a step)."""
NUM_SEEDS = 3
BASE = {"quickstart": (4, "mask"), "learning": (4, "mask"), "tools": (16, "mask")}
"""Whose directory is read."""


@dataclass(frozen=True)
class Told:
    """One run: what it was, and what was told of it."""

    workload: str
    name: str
    is_base: bool
    speed: float
    told_speed: float
    own_speed: float
    age: float
    told_age: float
    own_age: float
    load: float

    @property
    def ratio(self) -> float:
        """Of what the one directory told, the farther of both."""
        return max(_off(self.told_speed, self.speed), _off(self.told_age, self.age))

    @property
    def own_ratio(self) -> float:
        """Of what its own directory told."""
        return max(_off(self.own_speed, self.speed), _off(self.own_age, self.age))

    def line(self) -> str:
        """Of the table."""
        speeds = f"{_error(self.told_speed, self.speed)} {_error(self.own_speed, self.speed)}"
        ages = f"{_error(self.told_age, self.age)} {_error(self.own_age, self.age)}"
        return (
            f"{self.workload:<11} {self.name:<9} {'from' if self.is_base else '':<4} {self.speed:7.3f} "
            f"{self.told_speed:7.3f} {speeds} "
            f"{self.age:5.2f} {self.told_age:5.2f} {ages} {self.load:5.1f}"
        )


def _off(told: float, real: float) -> float:
    """1: told as it was; a mean age of 0 is no figure."""
    return max(told / real, real / told) if real else 1.0


def _error(told: float, real: float) -> str:
    return f"{told / real - 1:+7.1%}" if real else f"{'':>7}"


def tell(run_dir: Path, settings: tuple[str, ...]) -> tuple[float, float]:
    """Steps a second and mean age that a run directory tells of a run with these settings."""
    case = make_case(run_dir, settings, Given())
    told = [case.play(case.present, seed=seed) for seed in range(NUM_SEEDS)]
    return fmean(one.batches_per_s for one in told), fmean(one.age_mean for one in told)


def run_one(config: Path, settings: tuple[str, ...], run_dir: Path) -> None:
    """Make one run, with the load at its end."""
    command = [sys.executable, "-m", "asyncrl.cli", "run", str(config), *settings, *QUIET]
    environment = os.environ | {"PYTHONPATH": f"{HERE}:{HERE.parent}"}
    subprocess.run([*command, "--run-dir", str(run_dir)], check=True, env=environment, timeout=1200)
    (run_dir / "load").write_text(f"{os.getloadavg()[0]}")


def run_workload(name: str, seconds: float, folder: Path) -> Iterator[Told]:
    """All its runs, each for about so many seconds, and what the one directory tells of them."""
    fixed, rows = WORKLOADS[name]
    config = folder / "tools.yaml" if name == "tools" else QUICKSTART
    run_dirs = {(bound, overdue): folder / f"{name}-{bound}-{overdue}" for bound, overdue, _ in rows}
    for bound, overdue, about_s in rows:
        values = (f"buffer.max_staleness={bound}", f"buffer.on_overdue={overdue}")
        if not (run_dirs[bound, overdue] / "load").exists():
            num_steps = f"trainer.num_steps={max(20, int(seconds / about_s))}"
            run_one(config, (*values, *fixed, num_steps), run_dirs[bound, overdue])
    for (bound, overdue), run_dir in run_dirs.items():
        real = make_case(run_dir, [], Given()).measured
        assert real is not None, "a run directory has measured"
        values = (f"buffer.max_staleness={bound}", f"buffer.on_overdue={overdue}")
        told_speed, told_age = tell(run_dirs[BASE[name]], values)
        own_speed, own_age = tell(run_dir, ())
        yield Told(
            workload=name,
            name=f"{bound}, {overdue}",
            is_base=(bound, overdue) == BASE[name],
            speed=real.steps_per_s,
            told_speed=told_speed,
            own_speed=own_speed,
            age=real.age_mean,
            told_age=told_age,
            own_age=own_age,
            load=float((run_dir / "load").read_text()),
        )


def main() -> None:
    """Run all and print the table."""
    parser = options(__doc__, seconds=420.0)
    parser.add_argument("--runs", type=Path, help="where runs are kept (default: nowhere)")
    arguments = parser.parse_args()
    with reported("simulate", is_kept=arguments.write), tempfile.TemporaryDirectory() as folder:
        run_all(arguments.seconds, arguments.runs or Path(folder))


def run_all(seconds: float, folder: Path) -> None:
    """The table, line by line."""
    folder.mkdir(exist_ok=True)
    (folder / "tools.yaml").write_text(CONFIG)
    num_runs = sum(len(rows) for _, rows in WORKLOADS.values())
    print("steps a second and mean age in versions, measured and told")
    both = f"{'told':>7} {'error':>7} {'own':>7}"
    titles = f"{'steps/s':>7} {both} {'age':>5} {'told':>5} {'error':>7} {'own':>7} {'load':>5}"
    print(f"{'workload':<11} {'setting':<9} {'':<4} {titles}")
    worst = worst_own = 1.0
    for name in WORKLOADS:
        for told in run_workload(name, seconds / num_runs, folder):
            print(told.line(), flush=True)
            worst = max(worst, 1.0 if name == "learning" else told.ratio)
            worst_own = max(worst_own, told.own_ratio)
    print(f"from its own directory no run was told farther off than {worst_own:.2f} times")
    print(f"ratio: {worst:.2f}")


if __name__ == "__main__":
    main()
