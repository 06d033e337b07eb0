"""Run every pair of values of the settings that change behaviour, in tiny runs that are
interrupted and killed, and judge each run by scripts/pairs_oracle.py.

python scripts/pairs.py --list
python scripts/pairs.py --rows all --out pairs.jsonl --report docs/results/pairs.md
python scripts/pairs.py --rows 3,17
python scripts/pairs.py --rows drawn:COMMIT

scripts/pairs.yaml has the settings. The rows are a covering array: each pair of values
is in a row, except pairs that the config refuses. A row that --out has for this version
is not run again, so hours of rows can be run in pieces.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import hashlib
import itertools
import json
import random
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tests"), str(ROOT)]

import forked_processes
from crash_fuzz import kill_tree
from held_task import RUN_DIR, hold, release
from job_runs import RUN, ended, environment, read_lines, roomy, wait_until
from pairs_oracle import differences, faults_of

import asyncrl
from asyncrl.base.errors import ConfigError
from asyncrl.config import ScratchConfig
from asyncrl.config.load import config_from, load_config
from asyncrl.job.check import check_lines
from asyncrl.job.roles import extra_servers
from asyncrl.launch.launchers import opened
from asyncrl.launch.machine import Node
from asyncrl.launch.plan import resolve_auto
from asyncrl.trainer.random_init import ScratchSpec, make_scratch_model
from examples.thumbs import rate

TABLE = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())
FACTORS: dict[str, dict[str, Any]] = TABLE["factors"]
DEFAULTS = {name: next(iter(values)) for name, values in FACTORS.items()}
DEMONSTRATIONS = ROOT / "examples/sft_then_rl/letters.jsonl"
NUM_DRAWN = 8
KILLED_AFTER = 2
"""Steps on record when the run is killed; its rewards wait there until then."""
LIMIT_S = 240.0
Row = Mapping[str, str]
Pair = frozenset[tuple[str, str]]


class CollisionError(ValueError):
    """Two values of a row set one key."""


def merged(below: dict[str, Any], over: Mapping[str, Any], at: str = "") -> dict[str, Any]:
    """Put a part of a config over another. Architectures replace each other."""
    found = dict(below)
    for key, value in over.items():
        is_section = isinstance(value, dict) and key != "architecture"
        if is_section and isinstance(found.get(key), dict):
            found[key] = merged(found[key], value, f"{at}{key}.")
        else:
            found[key] = value
    return found


def leaves(part: Mapping[str, Any], at: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in part.items():
        if isinstance(value, dict) and key != "architecture":
            yield from leaves(value, f"{at}{key}.")
        else:
            yield f"{at}{key}", value


def config_of(row: Row, **places: object) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the config of a row, and its part `script`. Raises CollisionError if two
    values set one key differently.
    """
    given = dict[str, Any]()
    parts = [FACTORS[name][value] for name, value in row.items()]
    for key, value in itertools.chain.from_iterable(map(leaves, parts)):
        if given.setdefault(key, value) != value:
            raise CollisionError(f"two values set {key}: {given[key]} and {value}")
    config = functools.reduce(merged, parts, TABLE["base"])
    text = json.dumps(config)
    for name, place in places.items():
        text = text.replace(f'"{{{name}}}"', str(place)).replace(f"{{{name}}}", str(place))
    config = json.loads(text)
    script = config.pop("script", {})
    if "second_task" in script:
        tasks = [config["task"], script["second_task"]]
        names = ("first", "second")
        config["task"] = [
            {**task, "name": name} for task, name in zip(tasks, names, strict=True)
        ]
    return config, script


@functools.cache
def machine() -> Sequence[Node]:
    with opened("local") as launcher:
        return launcher.nodes


@functools.cache
def refusal(pairs: Pair) -> str:
    """Return why the config refuses these values, with defaults for all others, or ''."""
    try:
        config, _ = config_of(dict(sorted(pairs)), folder="/", port=8700)
        loaded = config_from(config, [])
        resolve_auto(loaded, machine(), extra_servers(loaded))
    except (ConfigError, CollisionError) as refused:
        return str(refused)
    return ""


def all_pairs() -> Iterator[Pair]:
    for one, other in itertools.combinations(FACTORS, 2):
        for values in itertools.product(FACTORS[one], FACTORS[other]):
            yield frozenset(zip((one, other), values, strict=True))


def pairs_of(row: Row) -> set[Pair]:
    return set(map(frozenset, itertools.combinations(row.items(), 2)))


def rows() -> list[dict[str, str]]:
    """Return rows with each pair of values that is not refused. A row begins with a
    missing pair, and takes of each further factor the accepted value that adds most.
    """
    wanted = [pair for pair in all_pairs() if not refusal(pair)]
    missing = set(wanted)
    found = []
    # allpairspy gives a row up when its choices lead to a refusal, and was left with
    # 62 of 1,200 pairs to add one by one.
    while missing:
        row = dict(next(pair for pair in wanted if pair in missing))

        def num_new(value: str, name: str, row: Row = row) -> int:
            return len(pairs_of({**row, name: value}) & missing)

        for name in sorted(FACTORS, key=lambda name: -len(FACTORS[name])):
            values = [value for value in FACTORS[name] if not refusal(frozenset({**row, name: value}.items()))]
            if name not in row:
                row[name] = max(values, key=functools.partial(num_new, name=name))
        missing -= pairs_of(row)
        found.append({name: row[name] for name in FACTORS})
    return found


# ---- a row


@dataclass(frozen=True)
class Lives:
    """A row's run: a first life that is killed, and a second one to the end."""

    folder: Path
    config: Path
    resume: Sequence[str]

    def whole(self, name: str) -> Path:
        """Run in one go. Raises AssertionError if the run fails, as killed() does."""
        run_dir = self.folder / name
        self._live(run_dir)
        return run_dir

    def killed(self, name: str) -> Path:
        run_dir = self.folder / name
        hold(run_dir, KILLED_AFTER)
        process = self._start(run_dir)

        def is_halfway() -> bool:
            steps = read_lines(run_dir / "metrics.jsonl")
            checkpoints = list((run_dir / "checkpoints").glob("step_*"))
            return len(steps) >= KILLED_AFTER and bool(checkpoints)

        with self._paying(run_dir, KILLED_AFTER):
            wait_until(is_halfway, process, LIMIT_S)
            kill_tree(process)
        release(run_dir)
        self._live(run_dir, *self.resume)
        return run_dir

    def _live(self, run_dir: Path, *arguments: str) -> None:
        with self._paying(run_dir, sys.maxsize):
            life = ended(self._start(run_dir, *arguments), LIMIT_S)
        assert life.returncode == 0, f"exit code {life.returncode}: {life.stderr[-800:]}"

    def _start(self, run_dir: Path, *arguments: str) -> subprocess.Popen[str]:
        return start_command("run", str(self.config), *arguments, "--run-dir", str(run_dir))

    @contextlib.contextmanager
    def _paying(self, run_dir: Path, num_steps: int) -> Iterator[None]:
        """Post late rewards, if the row has them, until the run has this number of steps."""
        answers = self.folder / "thumbs.sqlite"
        is_over = threading.Event()

        def pay() -> None:
            while not is_over.wait(0.1):
                if answers.exists() and len(read_lines(run_dir / "metrics.jsonl")) < num_steps:
                    rate(str(answers), lambda question, text: len(text) % 2 == 0)

        threading.Thread(target=pay, daemon=True).start()
        yield
        is_over.set()


def start_command(*arguments: str) -> subprocess.Popen[str]:
    """Start a command of asyncrl as a fork; held_task may hold the run of its last
    argument.
    """
    pipe = subprocess.PIPE
    env = environment(**{RUN_DIR: arguments[-1]})
    command = [*RUN[:-1], *arguments]
    return roomy(forked_processes.popen(command, env, stdout=pipe, stderr=pipe, text=True))


def play(row: Row, folder: Path) -> list[str]:
    """Run a row, and return its faults. Raises ConfigError if `check` refuses it."""
    config, script = config_of(row, folder=folder, port=free_port())
    scratch = ScratchConfig(**TABLE["base"]["model"]["scratch"])
    make_scratch_model(ScratchSpec(out=folder / "teacher", seed=3, scratch=scratch))
    if "sft" in script:
        supervised = {key: config[key] for key in ("seed", "model", "observe")}
        supervised["data"] = {"files": [str(DEMONSTRATIONS)]}
        supervised["trainer"] = {"num_groups": 8, "num_steps": 3, "learning_rate": 0.003}
        path = written(folder / "sft.yaml", supervised)
        life = ended(start_command("sft", str(path), "--run-dir", str(folder / "sft")), LIMIT_S)
        assert life.returncode == 0, life.stderr[-800:]
        config["model"] = {"path": str(folder / "sft/final"), "dtype": config["model"]["dtype"]}
    path = written(folder / "run.yaml", config)
    for _ in check_lines(load_config(path), machine()):
        pass
    lives = Lives(folder, path, script.get("resume", ()))
    run_dir = lives.killed("killed")
    faults = faults_of(run_dir, TABLE["expected_warnings"])
    if repeats(row):
        faults += differences(lives.whole("whole"), run_dir)
    return faults


def repeats(row: Row) -> bool:
    """Say whether a killed run of these settings must end with the same bytes.

    Without a deterministic engine tokens depend on their neighbours, and so they do on a
    CPU with experts or in vLLM.
    """
    is_exact = row["deterministic"] == "true" or row["model"] != "moe_replay"
    is_exact = is_exact and row["deterministic"] != "false" and row["engine"] == "embedded"
    return row["max_staleness"] == "0" and is_exact and row["resume"] != "learning_rate"


def written(path: Path, config: Mapping[str, Any]) -> Path:
    path.write_text(yaml.safe_dump(config))
    return path


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
        return port


# ---- many rows


def name_of(row: Row) -> str:
    return hashlib.sha256(json.dumps(row, sort_keys=True).encode()).hexdigest()[:8]


def shown(row: Row) -> str:
    """Return the values of a row that are not the defaults."""
    chosen = [f"{name}={value}" for name, value in row.items() if value != DEFAULTS[name]]
    return ", ".join(chosen) or "defaults"


def judged(row: Row, folder: Path) -> dict[str, Any]:
    """Run a row and return its line of the results; the folder of a passed row goes."""
    started_s = time.monotonic()
    faults = list[str]()
    is_missing = row["engine"] == "vllm" and not (ROOT / ".venv-vllm").exists()
    if not is_missing:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        try:
            faults = play(row, folder)
        except ConfigError as refused:
            faults = [f"check refuses what the array did not expect: {refused}"]
        except (AssertionError, subprocess.TimeoutExpired) as failed:
            faults = [f"{type(failed).__name__}: {failed}"]
    outcome = "failed" if faults else "passed"
    if outcome == "passed" and not is_missing:
        shutil.rmtree(folder)
    return {
        "row": name_of(row),
        "version": asyncrl.__version__,
        "outcome": "skipped: no .venv-vllm" if is_missing else outcome,
        "seconds": round(time.monotonic() - started_s, 1),
        "faults": faults,
        "settings": shown(row),
    }


def chosen_rows(choice: str, table: Sequence[Row]) -> list[Row]:
    if choice == "all":
        return list(table)
    if choice.startswith("drawn:"):
        return random.Random(choice).sample(table, NUM_DRAWN)
    return [table[int(number)] for number in choice.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", default="all")
    parser.add_argument("--out", type=Path, default=Path("pairs.jsonl"))
    parser.add_argument("--report", type=Path, help="also write all results as Markdown")
    parser.add_argument("--list", action="store_true", help="print the rows")
    options = parser.parse_args()
    table = rows()
    if options.list:
        for number, row in enumerate(table):
            print(number, name_of(row), shown(row))
        return
    is_done = {line["row"] for line in read_lines(options.out) if line["outcome"] == "passed"}
    todo = [row for row in chosen_rows(options.rows, table) if name_of(row) not in is_done]
    folder = options.out.resolve().with_suffix(".rows")
    started_s = time.monotonic()
    for number, row in enumerate(todo, 1):
        line = judged(row, folder / name_of(row))
        with options.out.open("a") as file:
            file.write(json.dumps(line) + "\n")
        left_s = (time.monotonic() - started_s) / number * (len(todo) - number)
        print(f"{number}/{len(todo)} {line['outcome']} in {line['seconds']} s, {left_s:.0f} s left: {line['settings']}", flush=True)
        for fault in line["faults"]:
            print(f"    {fault}", flush=True)


if __name__ == "__main__":
    main()
