"""Each file of examples/launch starts a valid run. Stand-ins of Slurm, Ray and asyncrl record their calls."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
from pathlib import Path
from typing import Any

import yaml
from test_docs import parse

from asyncrl.config import load_config

ROOT = Path(__file__).parent.parent
LAUNCH = ROOT / "examples/launch"
RECORD = """#!/bin/bash
said() { local line; printf -v line '%q ' "$@"; echo "$line" >> "$CALLS"; } # in one write: some call at once
called() { said "$(basename "$0")" "$@"; }
until_said() { for _ in $(seq 400); do grep -q -e "$1" "$CALLS" && return; /bin/sleep 0.05; done; exit 9; }
"""
STAND_INS = {
    "srun": 'called "$@"; while [[ $1 == --* ]]; do shift; done; exec "$@"',
    "scontrol": 'called "$@"; [ "$1" = requeue ] || printf "%s\\n" node{1..4}',
    "hostname": "echo 10.0.0.7 fe80::7",
    "sleep": "exec /bin/sleep 0.05",
    "ray": """trap 'said ray ended; exit 0' TERM
        [ "$1" != health-check ] || { grep -q -e '^ray start --head' "$CALLS"; exit; }
        called "$@"
        while [ "$1" = start ]; do /bin/sleep 0.05; done""",
    "python": """called "$@"; until_said '^ray start --address'""",
    "asyncrl": """trap 'said asyncrl interrupted; exit 143' TERM
        called "$@"
        [ -n "$CODE" ] && exit "$CODE"
        while :; do /bin/sleep 0.05; done""",
}


class Cluster:
    """A folder with stand-ins for programs, and a record of their calls."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.calls_path = folder, folder / "calls"
        self.started: list[subprocess.Popen[bytes]] = []
        self.calls_path.touch()
        programs = folder / ".venv/bin"
        programs.mkdir(parents=True)
        (folder / "examples").symlink_to(ROOT / "examples")
        for name, script in STAND_INS.items():
            (programs / name).write_text(f"{RECORD}{script}\n")
            (programs / name).chmod(0o755)
        (folder / ".venv-run").symlink_to(".venv")
        path = f"{programs}:{os.environ['PATH']}"
        slurm = {"SLURM_SUBMIT_DIR": str(folder), "SLURM_JOB_NODELIST": "node[1-4]", "SLURM_JOB_ID": "42"}
        slurm |= {"SLURM_JOB_NAME": "asyncrl", "SLURM_CPUS_PER_TASK": "96", "SLURM_GPUS_ON_NODE": "8"}
        self.env = {"PATH": path, "CALLS": str(self.calls_path), "CODE": "3", **slurm}

    @property
    def calls(self) -> list[list[str]]:
        return [shlex.split(line) for line in self.calls_path.read_text().splitlines()]

    def called(self, *words: str) -> list[list[str]]:
        """The calls that begin with these words."""
        return [call for call in self.calls if call[: len(words)] == [*words]]

    def start(self, *command: str | Path, **env: str) -> subprocess.Popen[bytes]:
        """Start the command in a new process group."""
        with (self.folder / "output").open("ab") as output:
            settings: dict[str, Any] = {"cwd": self.folder, "env": self.env | env, "start_new_session": True}
            self.started.append(subprocess.Popen(command, stdout=output, stderr=output, **settings))
        return self.started[-1]

    def run(self, *command: str | Path, **env: str) -> tuple[int, str]:
        code = self.start(*command, **env).wait(timeout=60)
        return code, (self.folder / "output").read_text()

    def end(self) -> None:
        """All processes, and the record of the calls."""
        for process in self.started:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        self.started.clear()
        self.calls_path.write_text("")


def sky_run(cluster: Cluster, rank: int) -> subprocess.Popen[bytes]:
    task = yaml.safe_load((LAUNCH / "skypilot.yaml").read_text())
    ips = "\n".join(f"10.0.0.{number}" for number in range(7, 11))
    env = {"SKYPILOT_NODE_IPS": ips, "SKYPILOT_NODE_RANK": str(rank), "SKYPILOT_NUM_NODES": "4"}
    return cluster.start("bash", "-c", task["run"], SKYPILOT_NUM_GPUS_PER_NODE="8", **task["envs"], **env)


def test_every_launch_file_starts_a_valid_run(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path)
    try:
        cluster.run("bash", LAUNCH / "slurm.sbatch")
        (by_slurm,) = cluster.called("asyncrl", "run")
        cluster.run("bash", LAUNCH / "ray_job.sh", "http://head:8265")
        (job,) = cluster.called("ray", "job", "submit")
        cluster.end()
        sky_run(cluster, 1)
        sky_run(cluster, 0).wait(timeout=60)
        (by_sky,) = cluster.called("asyncrl", "run")
    finally:
        cluster.end()
    kuberay = yaml.safe_load((LAUNCH / "kuberay.yaml").read_text())["spec"]
    by_kuberay = shlex.split(kuberay["entrypoint"])
    launchers = []
    for command in (by_slurm, job[job.index("--") + 1 :], by_kuberay, by_sky):
        found = parse(command[1:])
        assert found["run_dir"].is_relative_to("/shared")
        config = load_config(ROOT / found["config"], found["overrides"])
        launchers.append(config.launcher)
        sides = (config.placement.trainer, config.placement.rollout)
        nodes = [(side.nodes, side.gpus) for side in sides]  # type: ignore[union-attr]
        assert nodes == [(2, 8), (2, 8)]
        assert (config.trainer.world_size, config.rollout.num_engines) == (16, 16)
    assert launchers == ["ray:10.0.0.7:6379", "ray", "ray", "ray:10.0.0.7:6379"]
    (group,) = kuberay["rayClusterSpec"]["workerGroupSpecs"]
    gpus = group["template"]["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"]
    assert (group["replicas"], gpus) == (4, "8")
