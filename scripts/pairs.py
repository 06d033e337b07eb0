"""Run each pair of values of the settings that change behaviour, in tiny runs that are
interrupted and killed (or stopped), and judge each run by tests/kit/pairs_oracle.py.

python scripts/pairs.py --rows all|3,17|drawn:COMMIT [--out FILE] [--list]

scripts/pairs.yaml has the settings. Each pair of values is in a row, except pairs that
the config refuses. FILE gets a line of JSON per row. A row that has passed there is not
run again, so hours of rows can be run in pieces.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import json
import random
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
import yaml

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "kit"))

import forked_processes
import pairs_oracle
from crash_fuzz import differences, effective, kill_tree
from held_task import RUN_DIR, hold, release
from job_runs import RUN, ended, environment, read_lines, roomy, wait_until

import asyncrl
from asyncrl.base.errors import ConfigError
from asyncrl.config import RunConfig
from asyncrl.config.load import checked
from asyncrl.config.model_config import ScratchConfig
from asyncrl.job.roles import extra_servers
from asyncrl.launch.launchers import opened
from asyncrl.launch.machine import Node
from asyncrl.launch.plan import plan_run
from asyncrl.trainer.model.random_init import ScratchSpec, make_scratch_model
from examples.thumbs import rate

ROOT = Path(__file__).resolve().parent.parent
TABLE = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())
FACTORS: dict[str, dict[str, Any]] = TABLE["factors"]
DEMONSTRATIONS = ROOT / "examples/sft_then_rl/letters.jsonl"
LOSS_ROUNDING = 1e-6
NUM_DRAWN = 4
LIMIT_S = 300.0
NUM_INTERRUPTED = 3
"""Not one: a rollout that was interrupted may be dropped as overdue."""
Row = Mapping[str, str]
Pair = frozenset[tuple[str, str]]


def merged(below: Any, over: Any) -> Any:
    """Put a part of a config over another. A list has a section for each task."""
    if isinstance(below, dict) and isinstance(over, list):
        return [merged(below, each) for each in over]
    if isinstance(below, list) and isinstance(over, dict):
        return [merged(each, over) for each in below]
    if isinstance(below, dict) and isinstance(over, dict):
        above = {key: merged(below.get(key), value) for key, value in over.items()}
        return below | above
    return over


def config_of(row: Row) -> dict[str, Any]:
    parts = [FACTORS[name][value] for name, value in row.items()]
    config: dict[str, Any] = functools.reduce(merged, parts, TABLE["base"])
    return {"then": {}} | config


@functools.cache
def nodes() -> Sequence[Node]:
    with opened("local") as launcher:
        return launcher.nodes


@functools.cache
def refusal(pairs: Pair) -> str:
    """Return why the config refuses these values, with defaults for all others, or ''."""
    config = config_of(dict(sorted(pairs)))
    del config["then"]
    try:
        loaded = checked(RunConfig, config)
        plan_run(loaded, nodes(), extra_servers(loaded))
    except ConfigError as refused:
        return str(refused)
    return ""


def pairs_of(row: Row) -> set[Pair]:
    return set(map(frozenset, itertools.combinations(row.items(), 2)))


def all_pairs() -> list[Pair]:
    columns = [[(name, value) for value in FACTORS[name]] for name in FACTORS]
    two = itertools.combinations(columns, 2)
    return [frozenset(pair) for each in two for pair in itertools.product(*each)]


def rows() -> list[Row]:
    """Return rows with each pair of values that is not refused. A row begins with a
    missing pair, and takes of each further factor the accepted value that adds most.
    """
    wanted = [pair for pair in all_pairs() if not refusal(pair)]
    missing = set(wanted)
    found = list[Row]()
    # allpairspy gives a row up when its choices lead to a refusal. It left 62 pairs;
    # each needed another row.
    while missing:
        row = dict(next(pair for pair in wanted if pair in missing))
        for name in sorted(FACTORS, key=lambda name: -len(FACTORS[name])):
            choices = [{name: value} | row for value in FACTORS[name]]
            accepted = [one for one in choices if not refusal(frozenset(one.items()))]
            row = max(accepted, key=lambda one: len(pairs_of(one) & missing))
        missing -= pairs_of(row)
        found.append({name: row[name] for name in FACTORS})
    return found


# ---- a row


def start(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    pipe = subprocess.PIPE
    env = environment(**{RUN_DIR: str(folder / "killed")})
    command = [*RUN[:-1], *arguments]
    streams = {"stdout": pipe, "stderr": pipe, "text": True}
    return roomy(forked_processes.popen(command, env, cwd=folder, **streams))


def finish(folder: Path, *arguments: str) -> None:
    life = ended(start(folder, *arguments), LIMIT_S)
    assert life.returncode == 0, f"exit code {life.returncode}: {life.stderr[-800:]}"


def play(row: Row, folder: Path) -> None:
    """Run a row, kill or stop it halfway, resume and judge it. Raises AssertionError."""
    config = config_of(row)
    then = config.pop("then")
    scratch = ScratchConfig(**TABLE["base"]["model"]["scratch"])
    make_scratch_model(ScratchSpec(out=folder / "teacher", seed=3, scratch=scratch))
    if "sft" in then:
        shared = {key: config[key] for key in ("seed", "model", "observe")}
        (folder / "sft.yaml").write_text(yaml.safe_dump(then["sft"] | shared))
        shutil.copy(DEMONSTRATIONS, folder / "demonstrations.jsonl")
        finish(folder, "sft", "sft.yaml", "--run-dir", "sft")
        path = str(folder / "sft/final")
        config["model"] = {"path": path, "dtype": config["model"]["dtype"]}
    (folder / "run.yaml").write_text(yaml.safe_dump(config))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        arguments = ("run.yaml", f"gateway.port={free.getsockname()[1]}")
    finish(folder, "check", *arguments)
    run_dir = folder / "killed"
    threading.Thread(target=pay, args=(folder / "thumbs.sqlite",), daemon=True).start()
    if row["max_staleness"] != "0" and row["interrupt"] != "wait":
        threading.Thread(target=slow_down, args=(run_dir,), daemon=True).start()
    # Rewards of the task wait after two steps, so that the kill is not too late.
    hold(run_dir, 2)
    process = start(folder, "run", *arguments, "--run-dir", "killed")
    checkpoints = run_dir / "checkpoints"
    wait_until(lambda: any(checkpoints.glob("step_*")), process, LIMIT_S)
    if row["resume"] == "learning_rate":
        # Other training begins at a checkpoint, which a stop makes.
        process.send_signal(signal.SIGINT)
        assert ended(process, LIMIT_S).returncode == 130
    else:
        kill_tree(process)
    release(run_dir)
    finish(folder, "run", *arguments, *then.get("resume", ()), "--run-dir", "killed")
    run = pairs_oracle.read_run(run_dir)
    for check in pairs_oracle.CHECKS:
        check(run)
    if repeats(row):
        finish(folder, "run", *arguments, "--run-dir", "whole")
        if row["resume"] == "limits":
            check_but_for_rounding(folder / "whole", run_dir)
            return
        differing = differences(folder / "whole", run_dir)
        assert not differing, f"not as without the kill: {differing}"


def check_but_for_rounding(one: Path, other: Path) -> None:
    """Compare each step's tokens, rewards and loss. Other limits make other micro-batches
    and parts, whose sums round differently: the loss may differ by LOSS_ROUNDING.
    """
    runs = [
        effective(read_lines(folder / "trained.jsonl")).lines for folder in (one, other)
    ]
    assert runs[0].keys() == runs[1].keys(), "not the steps without the kill"
    for step, whole in runs[0].items():
        killed = runs[1][step]
        gap = abs(whole["loss"] - killed["loss"])
        assert whole["trajectories"] == killed["trajectories"], f"step {step}: rollouts"
        assert gap <= LOSS_ROUNDING, f"step {step}: losses differ by {gap}"


def pay(answers: Path) -> None:
    """Post rewards for the answers of examples.thumbs, while the row has its folder."""
    while answers.parent.exists():
        time.sleep(0.2)
        if answers.exists():
            rate(str(answers), lambda question, text: len(text) % 2 == 0)


def slow_down(run_dir: Path) -> None:
    """Stop the engine again and again, until pushes have interrupted some rollouts. A
    fast engine may be done before each push.
    """
    num_interrupted = 0
    while run_dir.parent.exists() and num_interrupted < NUM_INTERRUPTED:
        time.sleep(0.05)
        if state_of(run_dir) == "running":
            stopped = engine_processes(run_dir)
            send(signal.SIGSTOP, stopped)
            time.sleep(0.5)
            send(signal.SIGCONT, stopped)
        lines = read_lines(run_dir / "metrics.jsonl")
        num_interrupted = max(
            (line["rollout/interrupted"] for line in lines), default=0
        )


def state_of(run_dir: Path) -> str:
    try:
        return str(json.loads((run_dir / "status.json").read_text())["state"])
    except FileNotFoundError:
        return "none"


def send(number: signal.Signals, processes: Sequence[psutil.Process]) -> None:
    for process in processes:
        # The script may have killed it.
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(number)


def engine_processes(run_dir: Path) -> Sequence[psutil.Process]:
    """Return the processes of the rollout engine, vLLM's children among them."""
    spec = f"{run_dir}/specs/engine-0.json"
    found = list[psutil.Process]()
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if spec in process.cmdline():
                found += [process, *process.children(recursive=True)]
    return found


def repeats(row: Row) -> bool:
    """Say whether a killed run of these settings must end with the same bytes. Tokens
    depend on their neighbours in vLLM, with experts, and with layers that have states.
    After a resume with other limits, numbers may differ by rounding. In bfloat16 this
    rounding is large enough to sample another token.
    """
    is_exact = row["model"] == "dense" and row["engine"] == "embedded"
    is_same = row["resume"] != "learning_rate" and row["deterministic"] != "false"
    is_close = row["resume"] != "limits" or row["dtype"] == "float32"
    return row["max_staleness"] == "0" and is_exact and is_same and is_close


# ---- many rows


def result_of(row: Row, folder: Path) -> dict[str, Any]:
    """Run a row, and return its line of the results. The folder of a passed row goes."""
    started_s = time.monotonic()
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    fault = ""
    try:
        play(row, folder)
    except Exception as failed:  # the next rows run all the same
        fault = f"{type(failed).__name__}: {failed}"
    else:
        shutil.rmtree(folder)
    return {
        "outcome": "failed" if fault else "passed",
        "seconds": round(time.monotonic() - started_s),
        "version": asyncrl.__version__,
        "settings": row,
        "fault": fault,
    }


def chosen_rows(choice: str) -> Sequence[Row]:
    table = rows()
    if choice.startswith("drawn:"):
        # A start of vLLM takes a minute.
        quick = [row for row in table if row["engine"] == "embedded"]
        return random.Random(choice).sample(quick, NUM_DRAWN)
    numbers = range(len(table)) if choice == "all" else map(int, choice.split(","))
    return [table[number] for number in numbers]


def run_rows(chosen: Sequence[Row], out: Path) -> bool:
    """Run rows that have not passed, and write their results. Return whether all pass."""
    results = read_lines(out)
    passed = [line["settings"] for line in results if line["outcome"] == "passed"]
    left = [row for row in chosen if row not in passed]
    started_s = time.monotonic()
    for number, row in enumerate(left, 1):
        name = f"row_{zlib.crc32(str(row).encode())}"
        result = result_of(row, out.resolve().parent / f"{out.stem}_rows" / name)
        with out.open("a") as file:
            file.write(json.dumps(result) + "\n")
        left_s = (time.monotonic() - started_s) / number * (len(left) - number)
        print(name, *result.values(), f"{left_s:.0f} s left", flush=True)
        passed += [row] if result["outcome"] == "passed" else []
    return all(row in passed for row in chosen)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    rows_help = "all, numbers like 3,17, or drawn:COMMIT for rows of that commit"
    out_help = "rows that passed in this file are not run again"
    out = ROOT / "docs/results/pairs.jsonl"
    parser.add_argument("--rows", default="all", help=rows_help)
    parser.add_argument("--out", type=Path, default=out, help=out_help)
    parser.add_argument("--list", action="store_true", help="print the rows, run none")
    options = parser.parse_args()
    chosen = chosen_rows(options.rows)
    if options.list:
        for number, row in enumerate(chosen):
            print(number, *map("=".join, row.items()))
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))
    try:
        all_pass = run_rows(chosen, options.out)
    finally:
        for process in psutil.Process().children(recursive=True):
            process.kill()
    if not all_pass:
        sys.exit("not all of these rows have passed")


if __name__ == "__main__":
    main()
