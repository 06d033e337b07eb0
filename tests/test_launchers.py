"""Launchers: this machine, and Ray on two hosts of a network, keep one contract."""

from __future__ import annotations

import asyncio
import json
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
from launcher_contract import OTHER, SECRET, STORIES, Stage
from ray_cluster import FRUGAL, ray_cluster

from asyncrl.errors import ConfigError
from asyncrl.placement.launchers import LocalLauncher, opened
from asyncrl.placement.on_ray.ray_launcher import refuse_other_versions

RUN_S = 280.0


@pytest.mark.parametrize("story", STORIES)
def test_this_machine_keeps_the_contract(story: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    launcher = LocalLauncher()
    launcher.open()
    (node,) = launcher.nodes
    asyncio.run(STORIES[story](Stage(launcher, node, 0, tmp_path)))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """What came of every story, and of the faults, on two hosts with Ray."""
    if reason := network_hosts.reason_for_none():
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("ray")
    with network_hosts.network(2) as hosts:
        options = {0: ["--num-cpus=2"], 1: ["--num-cpus=3", "--num-gpus=2"]}
        with ray_cluster(hosts, options) as address:
            command = [sys.executable, launcher_contract.__file__, address, str(folder)]
            process = hosts[0].start(command, env=FRUGAL, stdout=subprocess.PIPE, text=True)
            output, _ = process.communicate(timeout=RUN_S)
            command.append("killed")
            with hosts[0].start(command, env=FRUGAL, stdout=subprocess.PIPE, text=True) as killed:
                orphans = [psutil.Process(pid) for pid in json.loads(killed.stdout.readline())]
                killed.kill()
            are_gone = all_gone(orphans)
        played = json.loads(output.splitlines()[-1])
        played["orphans are gone"] = are_gone
        assert played["nodes"] == [host.address for host in hosts]
        logs = [path for host in hosts for path in (host.folder / "tmp").rglob("*") if path.is_file()]
        texts = [path.read_bytes() for path in logs]
        assert texts, "Ray writes logs"
        played["leaks"] = [
            secret for secret in (SECRET, OTHER) if any(secret.encode() in text for text in texts)
        ]
        yield played


@pytest.mark.slow
@pytest.mark.parametrize("number", [0, 1], ids=["the controller's host", "the other host"])
@pytest.mark.parametrize("story", STORIES)
def test_ray_keeps_the_contract(story: str, number: int, played: dict[str, Any]) -> None:
    assert not (why := played["told"][f"{story}/{number}"]), why


@pytest.mark.slow
@pytest.mark.parametrize(
    "fault",
    [
        "more_than_there_is_is_refused",
        "what_others_hold_is_waited_for_and_named",
        "each_sees_its_devices_alone",
        "an_actor_is_lost",
        "a_node_is_lost",
        "closing took",
    ],
)
def test_on_ray_what_lacks_or_is_lost_is_named_and_nothing_hangs(fault: str, played: dict[str, Any]) -> None:
    assert not (why := played["told"][fault]), why


@pytest.mark.slow
def test_on_ray_nothing_outlives_a_controller_that_is_killed(played: dict[str, Any]) -> None:
    assert played["orphans are gone"]


@pytest.mark.slow
def test_ray_writes_no_secret_of_ours_to_a_disk(played: dict[str, Any]) -> None:
    assert played["leaks"] == []


# ---- refusals, before anything starts


def test_without_the_package_or_a_cluster_the_way_there_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
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
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match="there is no package `ray`") as caught, opened("ray"):
        pass
    assert ".[ray]" in caught.value.way_out


def test_a_node_with_other_versions_is_refused_by_name() -> None:
    own = {"asyncrl": "0.1.0", "python": "3.11.7", "torch": "2.11.0"}
    refuse_other_versions("node-1", dict(own), own)
    with pytest.raises(ConfigError, match="node-1 has asyncrl 0.1.0, python 3.11.7, the controller's has"):
        refuse_other_versions("node-1", {"asyncrl": "0.1.0", "python": "3.11.7"}, own)
