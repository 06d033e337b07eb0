"""The files of examples/launch do in order what a cluster needs, with stand-ins for Slurm, SkyPilot, Ray and
asyncrl that write down how they are called; the manifest is one that KubeRay takes.

Ray's own parsers read each of its command lines, asyncrl's own each of its own.
"""

from __future__ import annotations

import contextlib
import copy
import os
import runpy
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jsonschema
import pytest
import yaml
from test_docs import parse

from asyncrl.config import RunConfig, load_config

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
    """A folder with the stand-ins and a copy of the launch files; what was called, in order."""

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
        """In a process group of its own, which the end of the test ends."""
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

    def order(self, *calls: list[str]) -> list[int]:
        return [self.calls.index(call) for call in calls]


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    made = Cluster(tmp_path)
    yield made
    made.end()


def sky_run(cluster: Cluster, rank: int) -> subprocess.Popen[bytes]:
    task = yaml.safe_load((LAUNCH / "skypilot.yaml").read_text())
    ips = "\n".join(f"10.0.0.{number}" for number in range(7, 11))
    env = {"SKYPILOT_NODE_IPS": ips, "SKYPILOT_NODE_RANK": str(rank), "SKYPILOT_NUM_NODES": "4"}
    return cluster.start("bash", "-c", task["run"], SKYPILOT_NUM_GPUS_PER_NODE="8", **task["envs"], **env)


def test_slurm_starts_the_head_then_the_others_then_the_run_and_ends_all(cluster: Cluster) -> None:
    code, said = cluster.run("bash", LAUNCH / "slurm.sbatch", "trainer.num_steps=3")
    assert code == 3, said
    (head,), (others,) = (
        cluster.called("ray", "start", "--head"),
        cluster.called("ray", "start", "--address=10.0.0.7:6379"),
    )
    assert {"--node-ip-address=10.0.0.7", "--port=6379", "--num-gpus=8", "--num-cpus=96", "--block"} <= {
        *head
    }
    assert {"--num-gpus=8", "--num-cpus=96", "--block"} <= {*others}
    on_head, on_others = cluster.called("srun")
    assert {"--nodes=1", "--ntasks=1", "--nodelist=node1", "--cpus-per-task=96"} <= {*on_head[: -len(head)]}
    assert {"--nodes=3", "--ntasks=3", "--exclude=node1", "--cpus-per-task=96"} <= {
        *on_others[: -len(others)]
    }
    (waits,) = cluster.called("python")
    assert waits == ["python", "examples/launch/wait_for_nodes.py", "10.0.0.7:6379", "4"]
    (run,) = cluster.called("asyncrl", "run")
    assert "launcher=ray:10.0.0.7:6379" in run
    assert run[-3:] == ["--run-dir", "/shared/runs/asyncrl", "trainer.num_steps=3"]
    order = cluster.order(on_head, head, others, run)
    assert order == sorted(order)
    assert cluster.calls.count(["ray", "ended"]) == 2
    assert cluster.called("scontrol") == [["scontrol", "show", "hostnames", "node[1-4]"]]


@pytest.mark.parametrize(("number", "is_queued_again"), [(signal.SIGUSR1, True), (signal.SIGTERM, False)])
def test_slurm_interrupts_the_run_and_queues_the_job_again_if_its_time_was_over(
    cluster: Cluster, number: signal.Signals, is_queued_again: bool
) -> None:
    process = cluster.start("bash", LAUNCH / "slurm.sbatch", CODE="")
    while not cluster.called("asyncrl", "run"):
        assert process.poll() is None
    process.send_signal(number)
    assert process.wait(timeout=60) == 143
    assert cluster.calls.count(["asyncrl", "interrupted"]) == 1
    assert cluster.called("scontrol", "requeue") == [["scontrol", "requeue", "42"]] * is_queued_again
    assert cluster.calls.count(["ray", "ended"]) == 2


def test_slurm_says_so_if_the_head_does_not_come(cluster: Cluster) -> None:
    (cluster.folder / ".venv/bin/ray").write_text("#!/bin/bash\nexit 1\n")
    (cluster.folder / ".venv/bin/sleep").write_text("#!/bin/bash\n")
    code, said = cluster.run("bash", LAUNCH / "slurm.sbatch")
    assert (code, "no head of Ray at 10.0.0.7:6379 after 300 s" in said) == (1, True), said
    assert cluster.called("asyncrl") == []


def test_skypilot_starts_the_head_on_the_first_node_and_the_run_beside_it(cluster: Cluster) -> None:
    sky_run(cluster, 1)
    assert sky_run(cluster, 0).wait(timeout=60) == 3, (cluster.folder / "output").read_text()
    (head,), (joins,) = (
        cluster.called("ray", "start", "--head"),
        cluster.called("ray", "start", "--address=10.0.0.7:6379"),
    )
    (waits,), (run,) = cluster.called("python"), cluster.called("asyncrl", "run")
    assert {"--node-ip-address=10.0.0.7", "--port=6379", "--num-gpus=8", "--block"} <= {*head}
    assert waits == ["python", "examples/launch/wait_for_nodes.py", "10.0.0.7:6379", "4"]
    assert "launcher=ray:10.0.0.7:6379" in run
    order = cluster.order(head, joins, run)
    assert order == sorted(order)


def test_the_task_of_skypilot_has_the_keys_that_it_knows_and_as_many_devices_as_the_run_takes() -> None:
    task = yaml.safe_load((LAUNCH / "skypilot.yaml").read_text())
    assert {*task} == {"name", "num_nodes", "resources", "workdir", "volumes", "envs", "setup", "run"}
    assert {*task["resources"]} == {"accelerators", "cpus", "memory"}
    assert (task["num_nodes"], task["resources"]["accelerators"].split(":")[1]) == (4, "8")
    subprocess.run(["bash", "-n"], input=task["setup"], text=True, check=True)
    assert all(isinstance(value, str) for value in task["envs"].values())


# ---- Ray


def submitted(cluster: Cluster) -> list[str]:
    code, said = cluster.run("bash", LAUNCH / "ray_job.sh", "http://head:8265")
    assert code == 0, said
    (call,) = cluster.called("ray", "job", "submit")
    return call


@pytest.mark.extras
def test_ray_takes_the_command_lines_that_start_it_and_submit_a_run(cluster: Cluster) -> None:
    from ray.dashboard.modules.job.cli import submit
    from ray.runtime_env import RuntimeEnv
    from ray.scripts.scripts import start

    sky_run(cluster, 1)
    sky_run(cluster, 0).wait(timeout=60)
    starts = cluster.called("ray", "start")
    cluster.end()
    cluster.run("bash", LAUNCH / "slurm.sbatch")
    starts += cluster.called("ray", "start")
    assert len(starts) == 4
    for call in starts:
        start.make_context("start", call[2:])
    job = submit.make_context("submit", submitted(cluster)[3:]).params
    assert (job["address"], job["entrypoint_num_cpus"], job["no_wait"]) == ("http://head:8265", 0, True)
    assert job["entrypoint"][:2] == ("asyncrl", "run")
    runtime_env = yaml.safe_load((ROOT / job["runtime_env"]).read_text())
    assert RuntimeEnv(**runtime_env | {"working_dir": "s3://bucket/folder.zip"})["excludes"]


@pytest.mark.parametrize("num_missing", [0, 1])
def test_a_run_waits_for_the_nodes_of_its_cluster(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], num_missing: int
) -> None:
    nodes = [{"NodeName": f"10.0.0.{number}", "Alive": number < 3} for number in (1, 2, 3)]
    ray = SimpleNamespace(init=lambda **settings: None, nodes=lambda: nodes)
    monkeypatch.setitem(sys.modules, "ray", ray)
    main: Callable[..., str | None] = runpy.run_path(str(LAUNCH / "wait_for_nodes.py"))["main"]
    missing = main("10.0.0.1:6379", 2 + num_missing, 0.0)
    words = "Ray at 10.0.0.1:6379 has 2 of 3 nodes after 0 s: 10.0.0.1, 10.0.0.2" if num_missing else None
    assert missing == words
    assert ("has 2 nodes: 10.0.0.1, 10.0.0.2" in capsys.readouterr().out) == (not num_missing)


# ---- KubeRay


def _object(required: str = "", **properties: Any) -> dict[str, Any]:
    """Nothing but these: `kubectl apply` refuses a field that is not known."""
    return {
        "type": "object",
        "properties": properties,
        "required": required.split(),
        "additionalProperties": False,
    }


def _list(items: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": items, "minItems": 1}


TEXT, NUMBER, COUNT, YES = (
    {"type": "string"},
    {"type": "number"},
    {"type": "integer", "minimum": 0},
    {"type": "boolean"},
)
TEXTS = {"type": "object", "additionalProperties": TEXT}
AMOUNTS = {
    "type": "object",
    "additionalProperties": {"type": "string", "pattern": r"^\d+(\.\d+)?(m|[KMGT]i?)?$"},
}
POD = _object(
    "spec",
    metadata=_object(labels=TEXTS, annotations=TEXTS),
    spec=_object(
        "containers",
        containers=_list(
            _object(
                "name image",
                name=TEXT,
                image=TEXT,
                env=_list(_object("name", name=TEXT, value=TEXT)),
                ports=_list(
                    _object("containerPort", containerPort=COUNT, name={"type": "string", "maxLength": 15})
                ),
                resources=_object(limits=AMOUNTS, requests=AMOUNTS),
                volumeMounts=_list(_object("mountPath name", mountPath=TEXT, name=TEXT, readOnly=YES)),
            )
        ),
        nodeSelector=TEXTS,
        volumes=_list(
            _object(
                "name",
                name=TEXT,
                persistentVolumeClaim=_object("claimName", claimName=TEXT, readOnly=YES),
                emptyDir=_object(medium={"enum": ["", "Memory"]}, sizeLimit=TEXT),
            )
        ),
    ),
)
RAY_JOB = _object(
    "apiVersion kind metadata spec",
    apiVersion={"const": "ray.io/v1"},
    kind={"const": "RayJob"},
    metadata=_object(
        "name", name={"type": "string", "pattern": "^[a-z0-9]([-a-z0-9]*[a-z0-9])?$", "maxLength": 47}
    ),
    spec=_object(
        "entrypoint rayClusterSpec",
        activeDeadlineSeconds=COUNT,
        backoffLimit=COUNT,
        entrypoint=TEXT,
        entrypointNumCpus=NUMBER,
        entrypointNumGpus=NUMBER,
        metadata=TEXTS,
        runtimeEnvYAML=TEXT,
        shutdownAfterJobFinishes=YES,
        submissionMode={"enum": ["K8sJobMode", "HTTPMode", "InteractiveMode"]},
        suspend=YES,
        ttlSecondsAfterFinished=COUNT,
        rayClusterSpec=_object(
            "headGroupSpec",
            rayVersion=TEXT,
            enableInTreeAutoscaling=YES,
            headGroupSpec=_object(
                "rayStartParams template", serviceType=TEXT, rayStartParams=TEXTS, template=POD
            ),
            workerGroupSpecs=_list(
                _object(
                    "groupName minReplicas maxReplicas rayStartParams template",
                    groupName=TEXT,
                    replicas=COUNT,
                    minReplicas=COUNT,
                    maxReplicas=COUNT,
                    numOfHosts=COUNT,
                    rayStartParams=TEXTS,
                    template=POD,
                )
            ),
        ),
    ),
)
"""Of KubeRay's custom resource ray.io/v1 RayJob (ray-operator/apis/ray/v1 of v1.3) and of the pods in it: the
names and types of the fields that the manifest may have, and which must be there.
"""


def manifest() -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load((LAUNCH / "kuberay.yaml").read_text())
    return loaded


def test_the_manifest_is_a_ray_job_of_kuberay() -> None:
    ray_job = manifest()
    jsonschema.validate(ray_job, RAY_JOB)
    spec = ray_job["spec"]["rayClusterSpec"]
    groups = [spec["headGroupSpec"], *spec["workerGroupSpecs"]]
    for group in groups:
        pod = group["template"]["spec"]
        (container,) = pod["containers"]
        mounted = [mount["name"] for mount in container["volumeMounts"]]
        assert mounted == [volume["name"] for volume in pod["volumes"]]
        assert container["resources"]["limits"] == container["resources"]["requests"]
        assert spec["rayVersion"] in (LAUNCH / "kuberay.yaml").read_text().split("rayproject/ray:")[1][:10]
    assert {group["template"]["spec"]["containers"][0]["image"] for group in groups} == {
        "registry.example.org/asyncrl:latest"
    }
    assert {*yaml.safe_load(ray_job["spec"]["runtimeEnvYAML"])} == {"env_vars"}


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("spec.entryPoint", "asyncrl run"),
        ("spec.rayClusterSpec.headGroupSpec.rayStartParams.num-gpus", 0),
        ("spec.rayClusterSpec.workerGroupSpecs.0.replica", 4),
        ("spec.rayClusterSpec.workerGroupSpecs.0.template.spec.volumes.1.emptyDir.size", "1Gi"),
    ],
)
def test_a_manifest_that_kuberay_would_refuse_is_found(path: str, value: object) -> None:
    wrong: Any = copy.deepcopy(manifest())
    *folders, name = path.split(".")
    place = wrong
    for folder in folders:
        place = place[int(folder) if folder.isdigit() else folder]
    place[name] = value
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(wrong, RAY_JOB)


# ---- asyncrl


def config_of(command: list[str]) -> RunConfig:
    found = parse(command[1:])
    assert found["run_dir"].is_relative_to("/shared")
    return load_config(ROOT / found["config"], found["overrides"])


def test_every_file_starts_a_run_that_asyncrl_takes_on_the_nodes_that_the_file_asks_for(
    cluster: Cluster,
) -> None:
    cluster.run("bash", LAUNCH / "slurm.sbatch")
    (by_slurm,) = cluster.called("asyncrl", "run")
    job = submitted(cluster)
    by_job = job[job.index("--") + 1 :]
    by_kuberay = shlex.split(manifest()["spec"]["entrypoint"])
    cluster.end()
    sky_run(cluster, 1)
    sky_run(cluster, 0).wait(timeout=60)
    (by_sky,) = cluster.called("asyncrl", "run")
    launchers = []
    for command in (by_slurm, by_job, by_kuberay, by_sky):
        config = config_of(command)
        launchers.append(config.launcher)  # type: ignore[attr-defined]
        sides = (config.placement.trainer, config.placement.rollout)
        nodes = [(side.nodes, side.gpus) for side in sides]  # type: ignore[union-attr]
        assert nodes == [(2, 8), (2, 8)]
        assert (config.trainer.world_size, config.rollout.num_engines) == (16, 16)
    assert launchers == ["ray:10.0.0.7:6379", "ray", "ray", "ray:10.0.0.7:6379"]
    (group,) = manifest()["spec"]["rayClusterSpec"]["workerGroupSpecs"]
    gpus = group["template"]["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"]
    assert (group["replicas"], gpus) == (4, "8")
