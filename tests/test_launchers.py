"""Launchers: this machine, and Ray on two hosts of a network, keep one contract."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import launcher_contract
import network_hosts
import psutil
import pytest
from job_runs import all_gone
from launcher_contract import FAULTS, OTHER, SECRET, STORIES, Stage
from ray_cluster import FRUGAL, ray_cluster

from asyncrl.base.errors import ConfigError
from asyncrl.launch import fork_server
from asyncrl.launch.launchers import LocalLauncher, NodeReport, NodeRequirements, inspect_node, opened, unmet

RUN_S = 600.0
pytestmark = pytest.mark.timeout(900)  # all stories, on a machine that is slow


@pytest.fixture(scope="module")
def forking() -> Iterator[fork_server.ForkServer]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(__file__).parent))
        with contextlib.closing(fork_server.ForkServer(["launched_child"])) as server:
            yield server


@pytest.mark.parametrize("is_forked", [False, True], ids=["started", "forked"])
@pytest.mark.parametrize("story", STORIES)
def test_local_launcher_keeps_the_contract(
    story: str,
    is_forked: bool,
    forking: fork_server.ForkServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    monkeypatch.setenv("RAY_AUTH_TOKEN", "t0ken")
    monkeypatch.setattr(fork_server, "current", forking if is_forked else None)
    launcher = LocalLauncher()
    launcher.open()
    (node,) = launcher.nodes
    asyncio.run(STORIES[story](Stage(launcher, node, 0, tmp_path)))  # type: ignore[arg-type]


def test_local_child_ends_with_a_killed_controller(tmp_path: Path) -> None:
    paths = os.pathsep.join(filter(None, [str(Path(__file__).parent), os.environ.get("PYTHONPATH")]))
    command = [sys.executable, launcher_contract.__file__, "local", str(tmp_path), "killed"]
    env = os.environ | {"PYTHONPATH": paths}
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) as killed:
        orphan, _ = map(psutil.Process, json.loads(killed.stdout.readline()))
        killed.kill()
    assert all_gone([orphan])
    assert (tmp_path / "orphan.cleared").exists()


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """The outcomes of all stories and faults, on two hosts with Ray."""
    if reason := network_hosts.reason_for_none():
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("ray")
    with network_hosts.network(2) as hosts:
        options = {0: ["--num-cpus=2"], 1: ["--num-cpus=3", "--num-gpus=2"]}
        with ray_cluster(hosts, options) as address:
            command = [sys.executable, launcher_contract.__file__, f"ray:{address}", str(folder)]
            process = hosts[0].start(command, env=FRUGAL, stdout=subprocess.PIPE, text=True)
            output, _ = process.communicate(timeout=RUN_S)
            command.append("killed")
            with hosts[0].start(command, env=FRUGAL, stdout=subprocess.PIPE, text=True) as killed:
                orphans = [psutil.Process(pid) for pid in json.loads(killed.stdout.readlines(1)[-1])]
                killed.kill()
            are_gone = all_gone(orphans) and (folder / "orphan.cleared").exists()
        for host in hosts:
            host.kill()  # it would remove files that are read below
        played = json.loads(output.splitlines()[-1])
        told = played["told"]
        told["orphans of a killed controller"] = "" if are_gone else "still there"
        assert played["nodes"] == [host.address for host in hosts]
        logs = [path for host in hosts for path in (host.folder / "tmp").rglob("*") if path.is_file()]
        assert logs, "Ray writes logs"
        texts = [path.read_bytes() for path in logs]
        for secret in (SECRET, OTHER):
            told[f"leak of {secret}"] = "leaked" * any(secret.encode() in text for text in texts)
        yield told


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "own host",
        *STORIES,
        *(fault.__name__ for fault in FAULTS),
        "closing",
        "orphans of a killed controller",
        f"leak of {SECRET}",
        f"leak of {OTHER}",
    ],
)
def test_ray_keeps_the_contract_and_names_what_is_lost(name: str, played: dict[str, str]) -> None:
    assert not (why := played[name]), why


@pytest.mark.extras
def test_missing_ray_or_cluster_is_a_config_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with (
        pytest.raises(ConfigError, match="no Ray cluster at 127.0.0.1:1: ") as caught,
        opened("ray:127.0.0.1:1"),
    ):
        pass
    assert "`ray start --head`" in caught.value.way_out
    monkeypatch.setenv("RAY_ADDRESS", "ray://127.0.0.1:10001")
    with pytest.raises(ConfigError, match="no Ray cluster at ray://127.0.0.1:10001: "), opened("ray"):
        pass


def test_missing_ray_package_is_a_config_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "asyncrl.launch.ray_launcher", None)
    with pytest.raises(ConfigError, match="the package `ray` is not installed") as caught, opened("ray"):
        pass
    assert "'asyncrl[ray]'" in caught.value.way_out


def test_missing_or_different_files_are_unmet(tmp_path: Path) -> None:
    path = tmp_path / "run.id"
    path.write_bytes(b"t0ken \xff")
    there = {str(path): "t0ken", __file__: ""}
    assert inspect_node(NodeRequirements(there)).unseen == []
    lacking = {str(path): "other", str(tmp_path / "nothing"): "", str(tmp_path): ""}
    report = inspect_node(NodeRequirements({**there, **lacking}))
    assert report.unseen == list(lacking)
    assert "does not see" in str(unmet("n1", report, {}))


def test_nodes_of_a_run_have_the_same_versions() -> None:
    versions = {"asyncrl": "0.1.0", "torch": "2.11.0"}
    assert unmet("own", NodeReport([], dict(versions)), versions) is None, "it has no engine"
    reports = [NodeReport([], {"asyncrl": "0.1.0", "vllm": version}) for version in ("0.32.0", "0.33.1", "")]
    assert unmet("a", reports[0], versions) is None
    assert "the node b has vllm 0.33.1, another node has 0.32.0" in str(unmet("b", reports[1], versions))
    assert "the node c has vllm without a version" in str(unmet("c", reports[2], versions))
