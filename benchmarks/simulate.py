"""How near `asyncrl simulate RUN_DIR` comes to real runs: it is given the directory of one run of a workload,
and tells the steps a second and the mean age of runs with other settings, which are made, too.

    python benchmarks/simulate.py [--seconds 720] [--runs FOLDER] [--write]

Workloads, each a real `asyncrl run` of its own, embedded engine, without the first fifth of its steps:

    quickstart  configs/quickstart.yaml with a learning rate of 1e-7: how long answers are depends on what was
                learnt, and other settings learn another thing
    learning    the same as it is shipped; lengths fall to a fifth, and each run's in its own way: one is made
                twice, and what look_ahead=auto finds differs between these two
    tools       the workload of async_vs_sync.py: rewards that wait for tools with a long tail

`own`: the error of what each run's own directory tells of it. `told` is from the one directory marked `from`,
whatever the setting. Sides that share two cores slow each other down, and a run tells what it has seen: at
max_staleness 0 each side is alone, at 4 never. `ahead`: the mean look_ahead, and, `told`, that of a run's
own directory: ages follow what auto found. `load`: processes that wanted a core in the last minute of the
run, some three of them its own. `--runs`: where runs are kept; one that is there already is not made again.

Last lines: the farthest that a speed or a mean age was off, told over measured or the other way round, from
the one directory, and then, as `ratio: X`, from a run's own; both of quickstart and tools.
"""

from __future__ import annotations

import json
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


@dataclass(frozen=True)
class Setting:
    """Of one run; `share`: of the time that the runs of all workloads take, `about_s` of it a step."""

    max_staleness: int
    on_overdue: str
    look_ahead: str
    about_s: float
    share: float = 1.0
    number: int = 0
    """Of a run that is made once more."""

    @property
    def name(self) -> str:
        return f"{self.max_staleness}-{self.on_overdue}-{self.look_ahead}" + "-again" * self.number

    @property
    def values(self) -> tuple[str, ...]:
        """As overrides."""
        names = ("max_staleness", "on_overdue", "look_ahead")
        return tuple(f"buffer.{name}={getattr(self, name)}" for name in names)


WORKLOADS: dict[str, tuple[tuple[str, ...], list[Setting]]] = {
    "quickstart": (
        STILL,
        [
            Setting(4, "mask", "2", 0.19),
            Setting(0, "mask", "auto", 0.26),
            Setting(1, "mask", "auto", 0.19),
            Setting(8, "mask", "6", 0.19),
        ],
    ),
    "learning": (
        (),
        [
            Setting(4, "mask", "auto", 0.1),
            Setting(4, "mask", "auto", 0.1, number=1),
            Setting(8, "mask", "auto", 0.1),
        ],
    ),
    "tools": (
        (),
        [
            Setting(16, "mask", "auto", 0.3),
            Setting(8, "mask", "auto", 0.3),
            Setting(4, "mask", "auto", 0.4),
            Setting(4, "drop", "auto", 0.4),
            Setting(0, "wait", "auto", 2.8, share=2.5),
        ],
    ),
}
"""Settings of all its runs, and those of each. The directory of the first one is read."""
NUM_SEEDS = 3


@dataclass(frozen=True)
class Told:
    """One run: what it was, and what was told of it."""

    workload: str
    setting: Setting
    is_base: bool
    speed: float
    told_speed: float
    own_speed: float
    age: float
    told_age: float
    own_age: float
    ahead: float
    own_ahead: float
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
            f"{self.workload:<11} {self.setting.name:<17} {'from' if self.is_base else '':<4} "
            f"{self.speed:7.3f} "
            f"{self.told_speed:7.3f} {speeds} "
            f"{self.age:5.2f} {self.told_age:5.2f} {ages} "
            f"{self.ahead:5.2f} {self.own_ahead:5.2f} {self.load:5.1f}"
        )


def _off(told: float, real: float) -> float:
    """1: told as it was; a mean age of 0 is no figure."""
    return max(told / real, real / told) if real else 1.0


def _error(told: float, real: float) -> str:
    return f"{told / real - 1:+7.1%}" if real else f"{'':>7}"


def tell(run_dir: Path, settings: tuple[str, ...]) -> tuple[float, float, float]:
    """Steps a second, mean age, mean look-ahead that a run directory tells of a run with these settings."""
    case = make_case(run_dir, settings, Given())
    told = [case.play(case.present, seed=seed) for seed in range(NUM_SEEDS)]
    ahead = fmean(one.look_ahead_mean for one in told)
    return fmean(one.batches_per_s for one in told), fmean(one.age_mean for one in told), ahead


def look_ahead_of(run_dir: Path) -> float:
    """Mean of a run, without its first fifth."""
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    return fmean(json.loads(line)["buffer/look_ahead"] for line in lines[len(lines) // 5 :])


def run_one(config: Path, settings: tuple[str, ...], run_dir: Path) -> None:
    """Make one run, with the load at its end."""
    command = [sys.executable, "-m", "asyncrl.cli", "run", str(config), *settings, *QUIET]
    environment = os.environ | {"PYTHONPATH": f"{HERE}:{HERE.parent}"}
    subprocess.run([*command, "--run-dir", str(run_dir)], check=True, env=environment, timeout=1200)
    (run_dir / "load").write_text(f"{os.getloadavg()[0]}")


def run_workload(name: str, seconds: float, folder: Path) -> Iterator[Told]:
    """All its runs, each for about so many seconds, as its share says, and what is told of them."""
    fixed, settings = WORKLOADS[name]
    config = folder / "tools.yaml" if name == "tools" else QUICKSTART
    run_dirs = {setting: folder / f"{name}-{setting.name}" for setting in settings}
    for setting, run_dir in run_dirs.items():
        if not (run_dir / "load").exists():
            num_steps = f"trainer.num_steps={max(20, int(seconds * setting.share / setting.about_s))}"
            run_one(config, (*setting.values, *fixed, num_steps), run_dir)
    for setting, run_dir in run_dirs.items():
        real = make_case(run_dir, [], Given()).measured
        assert real is not None, "a run directory has measured"
        told_speed, told_age, _ = tell(run_dirs[settings[0]], setting.values)
        own_speed, own_age, own_ahead = tell(run_dir, ())
        yield Told(
            workload=name,
            setting=setting,
            is_base=setting == settings[0],
            speed=real.steps_per_s,
            told_speed=told_speed,
            own_speed=own_speed,
            age=real.age_mean,
            told_age=told_age,
            own_age=own_age,
            ahead=look_ahead_of(run_dir),
            own_ahead=own_ahead,
            load=float((run_dir / "load").read_text()),
        )


def main() -> None:
    """Run all and print the table."""
    parser = options(__doc__, seconds=720.0)
    parser.add_argument("--runs", type=Path, help="where runs are kept (default: nowhere)")
    arguments = parser.parse_args()
    with reported("simulate", is_kept=arguments.write), tempfile.TemporaryDirectory() as folder:
        run_all(arguments.seconds, arguments.runs or Path(folder))


def run_all(seconds: float, folder: Path) -> None:
    """The table, line by line."""
    folder.mkdir(exist_ok=True)
    (folder / "tools.yaml").write_text(CONFIG)
    shares = sum(setting.share for _, settings in WORKLOADS.values() for setting in settings)
    print("steps a second and mean age in versions, measured and told")
    both = f"{'told':>7} {'error':>7} {'own':>7}"
    ages = f"{'age':>5} {'told':>5} {'error':>7} {'own':>7} {'ahead':>5} {'told':>5}"
    titles = f"{'steps/s':>7} {both} {ages} {'load':>5}"
    print(f"{'workload':<11} {'setting':<17} {'':<4} {titles}")
    worst = worst_own = 1.0
    for name in WORKLOADS:
        for told in run_workload(name, seconds / shares, folder):
            print(told.line(), flush=True)
            if name != "learning":
                worst, worst_own = max(worst, told.ratio), max(worst_own, told.own_ratio)
    print(f"from the one directory no run was told farther off than {worst:.2f} times")
    print(f"ratio: {worst_own:.2f}")


if __name__ == "__main__":
    main()
