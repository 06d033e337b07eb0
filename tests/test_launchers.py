"""Launchers: this machine, and Ray on two hosts of a network, keep one contract."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import launcher_contract
import network_hosts
import psutil
import pytest
from job_runs import all_gone
from launcher_contract import LIMIT_S, OTHER, SECRET, STORIES, Stage
from ray_cluster import FRUGAL, ray_cluster

from asyncrl.base.errors import ConfigError
from asyncrl.launch.launchers import LocalLauncher, opened
from asyncrl.launch.machine import Machine
from asyncrl.launch.nodes import Needs, Node, NodeHas, Order, misfit
from asyncrl.launch.on_ray import ray_launcher
from asyncrl.launch.on_ray.ray_host import Host, RefusedStart, Started, other_versions, start_guard
from asyncrl.launch.on_ray.ray_launcher import RayLauncher

RUN_S = 600.0
pytestmark = pytest.mark.timeout(900)  # all stories, on a machine that is slow


@pytest.mark.parametrize("story", STORIES)
def test_this_machine_keeps_the_contract(story: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    monkeypatch.setenv("RAY_AUTH_TOKEN", "t0ken")
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
            are_gone = all_gone(orphans) and (folder / "orphan.cleared").exists()
        for host in hosts:
            host.kill()  # whoever still clears up would take files away from under the reading below
        played = json.loads(output.splitlines()[-1])
        played["orphans have cleared up and are gone"] = are_gone
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
        "what_a_node_does_not_see_is_refused",
        "a_node_without_the_engines_package_or_with_another_version_is_refused",
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
    assert played["orphans have cleared up and are gone"]


@pytest.mark.slow
def test_ray_writes_no_secret_of_ours_to_a_disk(played: dict[str, Any]) -> None:
    assert played["leaks"] == []


# ---- refusals, before anything starts


@pytest.mark.extras
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
    assert "'asyncrl[ray]'" in caught.value.way_out


def test_a_node_with_other_versions_is_refused_by_name() -> None:
    own = {"asyncrl": "0.1.0", "python": "3.11.7", "torch": "2.11.0"}
    assert other_versions("node-1", dict(own), own) is None
    refused = str(other_versions("node-1", {"asyncrl": "0.1.0", "python": "3.11.7"}, own))
    assert "node-1 has asyncrl 0.1.0, python 3.11.7, the controller's has asyncrl 0.1.0, python" in refused


@pytest.mark.parametrize(
    ("command", "is_frozen", "wait_s", "returncode"),
    [("read _; exit 7", False, 600, 7), ("sleep 600", False, 0, -9), ("read _; exit 7", True, 0, -9)],
    ids=["it ends by itself", "it does not end", "it is frozen"],
)
def test_what_outlives_its_actor_is_ended(
    command: str, is_frozen: bool, wait_s: int, returncode: int, tmp_path: Path
) -> None:
    folder = tmp_path / "host"
    folder.mkdir()
    guard = start_guard(folder, wait_s=wait_s)
    child = subprocess.Popen(["/bin/sh", "-c", command], stdin=subprocess.PIPE, start_new_session=True)
    assert guard.stdin is not None
    assert child.stdin is not None
    for groups in ("", f"{child.pid}"):
        guard.stdin.write(f"{groups}\n".encode())
    if is_frozen:
        child.send_signal(signal.SIGSTOP)
    assert (child.poll(), guard.poll()) == (None, None), "while its actor is there"
    for pipe in (child.stdin, guard.stdin):
        pipe.close()
    assert child.wait(LIMIT_S) == returncode
    assert guard.wait(LIMIT_S) == 0
    assert not folder.exists()


def test_the_end_of_a_start_that_is_given_up_may_come_before_it(tmp_path: Path) -> None:
    """Ray calls the methods of an actor that awaits in any order."""
    order = Order("given-up", "launched_child", json.dumps({"do": "crash", "clears": ""}), tmp_path, SECRET)

    async def play() -> None:
        host = Host("127.0.0.1", [])
        try:
            assert await host.end("given-up-0") == ""
            await host.forget("given-up-0")
            answer = await host.start("given-up-0", order)
            assert isinstance(answer, RefusedStart), "nobody would end it"
            other = await host.start("given-up-1", order)
            assert isinstance(other, Started)
        finally:
            for key in ("given-up-0", "given-up-1"):
                await host.end(key)
            await host.leave()
            with host._guard as guard:
                guard.kill()

    asyncio.run(play())


def test_a_node_of_another_run_may_have_other_engines_but_one_of_this_has_their_version() -> None:
    versions = {"asyncrl": "0.1.0", "python": "3.11.7", "torch": "2.11.0"}
    seen = {name: NodeHas([], {"vllm": version}) for name, version in (("a", "0.32.0"), ("b", "0.33.1"))}
    assert misfit("own", NodeHas([], {}), versions) is None, "it has no engine"
    assert misfit("a", seen["a"], versions) is misfit("again", seen["a"], versions) is None
    assert other_versions("own", dict(list(versions.items())[:3]), versions) is None
    refused = misfit("b", seen["b"], versions)
    assert refused is not None
    said = (
        "the node b has vllm 0.33.1, the first node with engines has vllm 0.32.0; all engines of a run are of"
    )
    assert said in str(refused)
    assert "install vllm 0.32.0 there, name a Python that has it (rollout.vllm_python" in refused.way_out
    assert "b has vllm of no known version, the" in str(misfit("b", NodeHas([], {"vllm": ""}), versions))


def test_a_node_that_cannot_run_asyncrl_is_passed_over_and_the_controllers_own_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answers: list[Node | ConfigError] = [
        Node("own", "10.0.0.2", Machine((), 8, 2**34, has_bfloat16=False), "1"),
        ConfigError("the node other has no torch"),
    ]
    ray = SimpleNamespace(
        get_runtime_context=lambda: SimpleNamespace(get_node_id=lambda: "1"),
        nodes=lambda: [
            {
                "NodeID": f"{at}",
                "Alive": at < 2,
                "NodeName": name,
                "NodeManagerAddress": name,
                "Resources": {},
            }
            for at, name in enumerate(("other", "own", "dead"))
        ],
    )
    monkeypatch.setattr(ray_launcher, "ask_each", lambda ray, found, own, files: answers[: len(found)])
    launcher, said = RayLauncher(""), list[str]()
    launcher.say = said.append
    for _ in range(2):
        launcher._look(ray)
        assert [node.name for node in launcher.nodes] == ["own"]
    told = "the node other is passed over, nothing of the run can be there: the node other has no torch."
    assert said == [told], "once"
    answers.reverse()
    with pytest.raises(ConfigError, match="the node other has no torch"):
        launcher._look(ray)


def test_a_node_that_comes_back_is_checked_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    first = Node("other", "10.0.0.2", Machine((), 8, 2**34, has_bfloat16=False), "1")
    asked = list[tuple[str, str]]()
    answers: list[Node | ConfigError] = [replace(first, id="2"), ConfigError("it has no vllm now")]

    def ask(ray: object, found: Any, own: object, needs: Needs) -> list[Node | ConfigError]:
        asked.append((found[0]["NodeID"], *needs.files))
        return [answers.pop(0)]

    def look_again(*node_ids: str) -> None:
        found = [
            {"NodeID": one, "NodeName": "other", "NodeManagerAddress": "10.0.0.2", "Alive": True}
            for one in node_ids
        ]
        launcher._look_again(SimpleNamespace(nodes=lambda: found), 0)

    monkeypatch.setattr(ray_launcher, "ask_each", ask)
    launcher = RayLauncher("")
    launcher.nodes = (first,)
    launcher._needs = {0: Needs({"/model": ""})}
    look_again("1")
    assert asked == [], "it was never away"
    look_again("2")
    assert launcher.nodes[0].id == "2"
    with pytest.raises(ConnectionError, match="it has no vllm now"):
        look_again("3")
    assert asked == [("2", "/model"), ("3", "/model")]
    with pytest.raises(ConnectionError, match=r"no node at 10\.0\.0\.2"):
        look_again()
