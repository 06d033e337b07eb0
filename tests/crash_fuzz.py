"""Kills a real run again and again at seeded moments, resumes it until it is done, and has the checker look
after every kill.
"""

from __future__ import annotations

import contextlib
import random
import shutil
import subprocess
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil
import yaml
from job_runs import CONFIG, all_gone, children_of, read_lines, run, start
from resume_checker import Evidence, Promise, changes, effective, read_evidence, violations
from safetensors.numpy import load_file

CHILDREN = {"trainer": "asyncrl.trainer.rank_process", "engine": "asyncrl_servers.embedded"}
"""What is started again by the run itself, and what its command line holds."""
VICTIMS = {"tree": 0.45, "controller": 0.15, "trainer": 0.2, "engine": 0.2}
"""Who is killed how often. `controller`: it alone, and its children, which end by themselves, may say a last
word.
"""
PATIENCE_S = 240.0
FREE_METRICS = (
    "perf/",
    "time_s",
    "buffer/",
    "rollout/",
    "engine/",
    "publish/",
    "sample/interrupted",
    "policy/logprob_gap_mean/",
    "policy/logprob_gap_max/",
)
"""Metrics that say how a run went, not what it computed (which engine sampled what, too): they may differ
after a kill.
"""


def fuzz_config(folder: Path, **sections: Mapping[str, Any]) -> Path:
    """A run that crosses an epoch, makes many checkpoints, and starts what was killed at once."""
    merged = {key: dict(value) if isinstance(value, dict) else value for key, value in CONFIG.items()}
    merged["task"]["size"] = 50
    merged["trainer"]["num_steps"] = 40
    merged["checkpoint"], merged["journal"] = {"every": 3}, {"keep": "all"}
    merged["supervision"] = {"max_restarts": 1000, "backoff_s": 0.01}
    for name, values in sections.items():
        merged[name] = {**merged.get(name, {}), **values}
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(merged))
    return path


def promise_of(config: Path) -> Promise:
    """What the checker has to know of it."""
    read = yaml.safe_load(config.read_text())
    return Promise(
        seed=read["seed"],
        num_prompts=read["task"]["size"],
        num_groups=read["trainer"]["num_groups"],
        group_size=read["rollout"]["group_size"],
        max_staleness=read["buffer"]["max_staleness"],
    )


class Crashes:
    """One run directory, the kills that it gets, and what was looked at in between."""

    def __init__(self, config: Path, run_dir: Path, *, seed: int, num_kills: int) -> None:
        self.config, self.run_dir, self.promise = config, run_dir, promise_of(config)
        self.num_steps = yaml.safe_load(config.read_text())["trainer"]["num_steps"]
        self.random = random.Random(seed)
        steps = sorted(self.random.choices(range(self.num_steps - 2), k=num_kills))
        self.plan = list(
            zip(steps, self.random.choices(list(VICTIMS), VICTIMS.values(), k=num_kills), strict=True)
        )
        self.kills: Counter[str] = Counter()
        self.num_starts = 0
        self._evidence: Evidence | None = None

    def live(self) -> Counter[str]:
        """Start, kill and start again until the run is done; the kills by victim. AssertionError for any
        violation.
        """
        while self._one_life():
            pass
        self._look(is_done=True)
        return self.kills

    def _one_life(self) -> bool:
        """Whether it was killed, and so has to be started again."""
        process = start(self.config, self.run_dir)
        self.num_starts += 1
        try:
            while self.plan:
                step, victim = self.plan[0]
                if not self._reaches(process, step):
                    return self._has_ended(process)
                time.sleep(self.random.random() * self.random.choice((0.05, 0.3, 1.0)))
                self.plan.pop(0)
                if process.poll() is not None:
                    return self._has_ended(process)
                if victim in CHILDREN:
                    self._kill_child(process, victim)
                    continue
                self._kill_tree(process, with_children=victim == "tree")
                self.kills[victim] += 1
                self._look()
                return True
            return self._has_ended(process)
        finally:
            if process.poll() is None:
                process.kill()

    def _reaches(self, process: subprocess.Popen[str], step: int) -> bool:
        """Sleep until so many steps are recorded; False if the run ends before."""
        deadline = time.monotonic() + PATIENCE_S
        while len(read_lines(self.run_dir / "metrics.jsonl")) < step:
            if process.poll() is not None:
                return False
            assert time.monotonic() < deadline, f"no step {step} within {PATIENCE_S} s"
            time.sleep(0.02)
        return True

    def _has_ended(self, process: subprocess.Popen[str]) -> bool:
        stdout, stderr = process.communicate(timeout=PATIENCE_S)
        if (
            process.returncode == 2
            and "is done; there is nothing to go on with" in stderr
            and self.num_starts > 1
        ):
            # the last kill came when all was said, and nothing but the end of the process was still to come
            return False
        if (
            process.returncode == 1
            and "was killed by SIGKILL" in stderr
            and "ready after" not in stdout
            and "goes on from" not in stdout
        ):
            self._look()
            # a process that is lost while the run starts up ends the run by name: nobody watches over it yet
            return True
        what = f"start {self.num_starts} after {dict(self.kills)} ended with {process.returncode}"
        assert process.returncode == 0, f"{what}: {stderr}\n{stdout}"
        return False

    def _kill_tree(self, process: subprocess.Popen[str], *, with_children: bool) -> None:
        """In any order, as fast as they can be named."""
        with contextlib.suppress(psutil.NoSuchProcess):
            family = psutil.Process(process.pid)
            victims = [family, *(family.children(recursive=True) if with_children else ())]
            self.random.shuffle(victims)
            for victim in victims:
                with contextlib.suppress(psutil.NoSuchProcess):
                    victim.kill()
            assert all_gone(victims)
        process.communicate(timeout=20)

    def _kill_child(self, process: subprocess.Popen[str], victim: str) -> None:
        with contextlib.suppress(psutil.NoSuchProcess):  # the run just ends
            deadline = time.monotonic() + PATIENCE_S
            while not (found := children_of(process, CHILDREN[victim])):  # it is down, or not started yet
                if process.poll() is not None:
                    return
                assert time.monotonic() < deadline, f"no {victim} within {PATIENCE_S} s"
                time.sleep(0.02)
            self.random.choice(found).kill()
            self.kills[victim] += 1

    def _look(self, *, is_done: bool = False) -> None:
        """Have the checker judge, alone and against the look before. A run killed before its journal was made
        has nothing to show.
        """
        if not (self.run_dir / "journal.sqlite").exists():
            return
        evidence = read_evidence(self.run_dir)
        found = violations(evidence, self.promise, num_steps=self.num_steps if is_done else None)
        if self._evidence is not None:
            found += changes(self._evidence, evidence)
        assert found == [], f"after {dict(self.kills)}: {found}"
        self._evidence = evidence


def never_killed(config: Path, run_dir: Path) -> Path:
    """The run directory of the same config, run in one go, and looked at too."""
    answer = run(config, run_dir, timeout_s=PATIENCE_S)
    assert answer.returncode == 0, answer.stderr
    evidence = read_evidence(run_dir)
    assert violations(evidence, promise_of(config), num_steps=len(evidence.batches)) == []
    return run_dir


def differences(one: Path, other: Path) -> list[str]:
    """Where two runs differ in what they computed: each step's tokens, rewards and loss, its metrics, the
    final weights.
    """
    found = []
    records = [effective(read_lines(folder / "trained.jsonl")).lines for folder in (one, other)]
    if records[0].keys() != records[1].keys():
        found.append(f"steps: {sorted(records[0])} and {sorted(records[1])}")
    for version in records[0].keys() & records[1].keys():
        found += [
            f"step {version}: {key}"
            for key, value in records[0][version].items()
            if value != records[1][version][key]
        ]
    metrics = [
        {line["step"]: line for line in read_lines(folder / "metrics.jsonl")} for folder in (one, other)
    ]
    if metrics[0].keys() != metrics[1].keys():
        found.append(f"metrics: {sorted(metrics[0])} and {sorted(metrics[1])}")
    for step in metrics[0].keys() & metrics[1].keys():
        names = [name for name in metrics[0][step] if not name.startswith(FREE_METRICS)]
        found += [
            f"step {step}: {name}" for name in names if metrics[0][step][name] != metrics[1][step].get(name)
        ]
    weights, others = (load_file(folder / "final" / "model.safetensors") for folder in (one, other))
    assert weights.keys() == others.keys()
    return found + [
        f"weights: {name}" for name in weights if weights[name].tobytes() != others[name].tobytes()
    ]


def clear(run_dir: Path) -> None:
    """Remove a run that told all it had to tell."""
    shutil.rmtree(run_dir, ignore_errors=True)
