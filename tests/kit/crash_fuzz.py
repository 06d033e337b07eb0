"""Kills a real run again and again at random moments, resumes it until it is done, and
has the checker look after every kill.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import sqlite3
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
import torch
import yaml
from held_task import hold, release
from job_runs import (
    children_of,
    read_lines,
    run,
    start,
    wait_until,
    write_config,
)
from process_ends import all_gone
from resume_checker import (
    Evidence,
    Promise,
    changes,
    effective,
    read_evidence,
    violations,
)
from safetensors.torch import load_file

CHILDREN = {
    "trainer": "asyncrl.trainer.ranks.rank_process",
    "engine": "asyncrl_servers.embedded",
}
"""Processes that the run itself restarts, and a part of their command lines."""
VICTIMS = {"tree": 0.45, "controller": 0.15, "trainer": 0.2, "engine": 0.2}
"""Victim -> its share of the kills. `controller`: only the controller; its children end
by themselves.
"""
PATIENCE_S = 240.0
FREE_METRICS = tuple(
    "perf/ time_s buffer/ rollout/ engine/ weight_sync/ publish/ trainer/restarts "
    "sample/interrupted teacher/tokens teacher/wait_s judge/ reward/texts reward/tokens "
    "policy/logprob_gap_mean/ policy/logprob_gap_max/ "
    "eval/ evaluation/ gateway/ harness/".split()
)
"""Metrics about the course of a run, not its results: they may differ after a kill. A
teacher, for example, scores a rollout again whose group was not yet stored.
"""


def fuzz_config(folder: Path, **sections: Mapping[str, Any]) -> Path:
    """A run that crosses an epoch, makes many checkpoints, and restarts killed
    processes at once.
    """
    given = {
        "task": {
            "python": "held_task:HeldLetters",
            "size": 50,
            "reward_timeout_s": 600,
        },
        "trainer": {"num_steps": 40},
        "checkpoint": {"every": 3},
        "journal": {"keep": "all"},
        "supervision": {"max_restarts": 1000, "backoff_s": 0.01},
    }
    for name, values in sections.items():
        given[name] = {**given.get(name, {}), **values}
    return write_config(folder, **given)


def new_seed() -> int:
    """Return a new seed, in CI always the same; ASYNCRL_TEST_SEED repeats a printed
    one.
    """
    drawn = 0 if "CI" in os.environ else random.randrange(10**6)
    seed = int(os.environ.get("ASYNCRL_TEST_SEED") or drawn)
    print(f"ASYNCRL_TEST_SEED={seed}")
    return seed


def promise_of(config: Path) -> Promise:
    """Facts about the run that the checker needs."""
    read = yaml.safe_load(config.read_text())
    return Promise(
        seed=read["seed"],
        num_prompts=read["task"]["size"],
        num_groups=read["trainer"]["num_groups"],
        max_staleness=read["buffer"]["max_staleness"],
    )


class Crashes:
    """One run directory, its kills, and the looks in between.

    `victims`: who is killed, in random order; drawn by VICTIMS if not given. "stop" is
    no kill: SIGTERM, and SIGINT at once after it.
    """

    def __init__(
        self,
        config: Path,
        run_dir: Path,
        *,
        seed: int,
        num_kills: int = 0,
        victims: Sequence[str] = (),
    ) -> None:
        self.config, self.run_dir, self.promise = config, run_dir, promise_of(config)
        self.num_steps = yaml.safe_load(config.read_text())["trainer"]["num_steps"]
        self.random = random.Random(seed)
        drawn = self.random.sample(victims, len(victims))
        drawn = drawn or self.random.choices(
            list(VICTIMS), VICTIMS.values(), k=num_kills
        )
        self.held_after = self.num_steps - 3 - self.promise.max_staleness
        steps = sorted(self.random.choices(range(self.held_after), k=len(drawn)))
        self.plan = list(zip(steps, drawn, strict=True))
        self.kills, self.num_starts = Counter[str](), 0
        self._evidence: Evidence | None = None

    def live(self) -> Counter[str]:
        """Start, kill and start again until the run is done; the kills by victim.
        AssertionError for any violation.
        """
        # The run does not end before its last kill; most kills come long before it has
        # to wait.
        hold(self.run_dir, self.held_after)
        while self._one_life():
            pass
        self._look(is_done=True)
        return self.kills

    def _one_life(self) -> bool:
        """Return whether it was killed and has to be restarted."""
        process = start(self.config, self.run_dir)
        self.num_starts += 1
        try:
            while self.plan:
                step, victim = self.plan[0]
                if not self._reaches(process, step):
                    return self._has_ended(process)
                time.sleep(self.random.random() * self.random.choice((0.05, 0.3, 1.0)))
                self.plan.pop(0)
                if not self.plan:
                    release(self.run_dir)
                if process.poll() is not None:
                    return self._has_ended(process)
                if victim in CHILDREN:
                    self._kill_child(process, victim)
                    continue
                if victim == "stop":
                    self._stop(process)
                else:
                    kill_tree(process, self.random, with_children=victim == "tree")
                self.kills[victim] += 1
                self._look()
                return True
            return self._has_ended(process)
        finally:
            if process.poll() is None:
                process.kill()

    def _reaches(self, process: subprocess.Popen[str], step: int) -> bool:
        """Sleep until this number of steps is recorded; return False if the run ends
        before.
        """
        path = self.run_dir / "metrics.jsonl"
        wait_until(
            lambda: process.poll() is not None or len(read_lines(path)) >= step,
            process,
            PATIENCE_S,
        )
        return process.poll() is None

    def _has_ended(self, process: subprocess.Popen[str]) -> bool:
        stdout, stderr = process.communicate(timeout=PATIENCE_S)
        is_up = "ready after" in stdout or "resuming from" in stdout
        if process.returncode == 1 and "was killed by SIGKILL" in stderr and not is_up:
            # a process that is lost while the run starts up ends the run by name:
            # nothing supervises it yet
            self._look()
            return True
        what = f"start {self.num_starts} after {dict(self.kills)} ended with {process.returncode}"
        assert process.returncode == 0, f"{what}: {stderr}\n{stdout}"
        return False

    def _kill_child(self, process: subprocess.Popen[str], victim: str) -> None:
        name = CHILDREN[victim]
        with contextlib.suppress(psutil.NoSuchProcess):  # the run just ends
            wait_until(
                lambda: process.poll() is not None or children_of(process, name),
                process,
                PATIENCE_S,
            )
            # the death of the eval engine costs evaluations, and nothing else
            found = children_of(process, name)
            if rest := [
                child
                for child in found
                if "engine-eval" not in " ".join(child.cmdline())
            ]:
                self.random.choice(rest).kill()
                self.kills[victim] += 1

    def _stop(self, process: subprocess.Popen[str]) -> None:
        process.send_signal(signal.SIGTERM)
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=PATIENCE_S)
        # done, or by the signal that is delivered last; by itself while the process
        # could not handle it yet
        assert process.returncode in (0, 130, 143, -signal.SIGTERM), stderr

    def _look(self, *, is_done: bool = False) -> None:
        """Have the checker judge the files by themselves and against the previous look.
        A run killed before its journal was made has nothing to show.
        """
        if not (self.run_dir / "journal.sqlite").exists():
            return
        evidence = read_evidence(self.run_dir)
        found = violations(
            evidence, self.promise, num_steps=self.num_steps if is_done else None
        )
        if self._evidence is not None:
            found += changes(self._evidence, evidence)
        assert found == [], f"after {dict(self.kills)}: {found}"
        self._evidence = evidence


def kill_tree(
    process: subprocess.Popen[str],
    chance: random.Random | None = None,
    *,
    with_children: bool = True,
) -> None:
    """SIGKILL to the controller, and to its children in any order; afterwards none of
    them exists.
    """
    with contextlib.suppress(psutil.NoSuchProcess):
        controller = psutil.Process(process.pid)
        family = [controller, *controller.children(recursive=True)]
        (chance or random).shuffle(family)
        for victim in family if with_children else [controller]:
            with contextlib.suppress(psutil.NoSuchProcess):
                victim.kill()
        assert all_gone(family, timeout_s=PATIENCE_S)
    process.communicate(timeout=PATIENCE_S)


def killed_on_the_way(
    begin: Callable[[], subprocess.Popen[str]],
    is_there: Callable[[], Any],
    run_dir: Path,
) -> None:
    """Kill a run with its children once it has started. If it was done before the kill,
    because this process got no core, begin another run in its place.
    """
    for _ in range(5):
        process = begin()
        wait_until(is_there, process, PATIENCE_S)
        kill_tree(process)
        summary = run_dir / "summary.json"
        if not summary.exists() or json.loads(summary.read_text())["state"] != "done":
            return
        shutil.rmtree(run_dir)
    raise AssertionError("it was done before it could be killed, each time")


def never_killed(config: Path, run_dir: Path) -> Path:
    """The run directory of the same config, run in one go, and looked at too."""
    answer = run(config, run_dir, timeout_s=PATIENCE_S)
    assert answer.returncode == 0, answer.stderr
    (run_dir.parent / "said.txt").write_text(answer.stdout)
    evidence = read_evidence(run_dir)
    assert (
        violations(evidence, promise_of(config), num_steps=len(evidence.batches)) == []
    )
    return run_dir


def samples_in(run_dir: Path) -> list[dict[str, Any]]:
    """Return the samples of trained batches in file order, without the fields that a
    kill may change: the journal keeps no answers.
    """
    lines = [
        line
        for line in read_lines(run_dir / "samples.jsonl")
        if line["kind"] != "failed"
    ]
    may_differ = ("num_interruptions", "answer")
    return [
        {name: value for name, value in line.items() if name not in may_differ}
        for line in lines
    ]


def metrics_of(run_dir: Path, *, without_lost: bool) -> dict[int, dict[str, Any]]:
    """Return the metrics of each step.

    A run that is stopped while an answer is scored samples the answer again, and the
    journal counts the first one as lost. With `without_lost`, these tokens are
    subtracted.
    """
    metrics = {line["step"]: line for line in read_lines(run_dir / "metrics.jsonl")}
    if not without_lost:
        return metrics
    query = (
        "SELECT version + 1, sum(lost_tokens) FROM batch_groups JOIN groups USING (group_id)"
        " GROUP BY version ORDER BY version"
    )
    with contextlib.closing(sqlite3.connect(run_dir / "journal.sqlite")) as connection:
        lost = dict(connection.execute(query))
    for step, line in metrics.items():
        line["tokens/generated"] -= sum(
            num_lost for at, num_lost in lost.items() if at <= step
        )
    return metrics


def differences(one: Path, other: Path, *, of_metrics: bool = True) -> list[str]:
    """Return the differences between the results of two runs: each step's tokens,
    rewards and loss, its metrics and samples, the final weights.
    """
    found = []
    samples = [samples_in(folder) for folder in (one, other)]
    if of_metrics and samples[0] != samples[1]:
        found.append("samples")
    trained = [
        effective(read_lines(folder / "trained.jsonl")).lines for folder in (one, other)
    ]
    metrics = [metrics_of(folder, without_lost=of_metrics) for folder in (one, other)]
    for name, (left, right) in {"trained": trained, "metrics": metrics}.items():
        if left.keys() != right.keys():
            found.append(f"{name}: steps {sorted(left)} and {sorted(right)}")
        found += [
            f"step {step}: {key}"
            for step in sorted(left.keys() & right.keys())
            for key in left[step]
            if (of_metrics or name == "trained") and not key.startswith(FREE_METRICS)
            if left[step][key] != right[step].get(key)
        ]
    weights, others = (
        load_file(folder / "final" / "model.safetensors") for folder in (one, other)
    )
    assert weights.keys() == others.keys()
    unequal = (
        name
        for name in weights
        if not torch.equal(
            weights[name].view(torch.uint8), others[name].view(torch.uint8)
        )
    )
    return found + [f"weights: {name}" for name in unequal]
