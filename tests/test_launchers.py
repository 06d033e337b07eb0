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

from asyncrl.errors import ConfigError, RoomError
from asyncrl.placement.launchers import LocalLauncher, opened
from asyncrl.placement.machine import Machine
from asyncrl.placement.nodes import Needs, Node, NodeHas, Order, misfit
from asyncrl.placement.on_ray import ray_groups, ray_launcher
from asyncrl.placement.on_ray.ray_host import Host, RefusedStart, Started, other_versions, start_guard
from asyncrl.placement.on_ray.ray_launcher import RayLauncher

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
        "without_an_autoscaler_no_node_is_waited_for",
        "what_a_node_does_not_see_is_refused",
        "a_node_without_the_engines_package_or_with_another_version_is_refused",
        "what_others_hold_is_waited_for_and_named",
        "each_sees_its_devices_alone",
        "an_elastic_node_is_given_back_and_comes_again",
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
    guard = start_guard(folder, wait_s)
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


def test_a_node_that_comes_back_is_looked_at_before_anything_starts_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first = Node("other", "10.0.0.2", Machine((), 8, 2**34, has_bfloat16=False), "1")
    asked = list[tuple[str, str]]()
    answers: list[Node | ConfigError] = [replace(first, id="2"), ConfigError("it has no vllm now")]

    def ask(ray: object, found: Any, own: object, needs: Needs) -> list[Node | ConfigError]:
        asked.append((found[0]["NodeID"], *needs.files))
        return [answers.pop(0)]

    def is_there(node_id: str) -> bool:
        found = {"NodeID": node_id, "NodeName": "other", "NodeManagerAddress": "10.0.0.2"}
        return launcher._is_there(None, 0, [found])

    monkeypatch.setattr(ray_launcher, "ask_each", ask)
    launcher, said = RayLauncher(""), list[str]()
    launcher.say, launcher.nodes, launcher._needs = said.append, (first,), {0: Needs({"/model": ""})}
    assert is_there("1")
    assert asked == [], "it was never away"
    assert is_there("2")
    assert launcher.nodes[0].id == "2"
    assert not is_there("3")
    assert not is_there("3")
    assert asked == [("2", "/model"), ("3", "/model")], "and each time once"
    assert said == ["the node other is passed over, nothing of the run can be there: it has no vllm now."]
    assert not launcher._is_there(None, 0, [])


class Cloud:
    """Stands for Ray, its autoscaler and the clock: which nodes there are from which second to which."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **lives: tuple[int, float]) -> None:
        self.lives, self.at_s, self.asked = lives, 0, list[list[str]]()
        monkeypatch.setattr("ray.util.placement_group", self.group)
        monkeypatch.setattr("ray.util.remove_placement_group", lambda _: None)
        monkeypatch.setattr("ray.util.placement_group_table", lambda one: {"bundles_to_node_id": [one.on[0]]})
        monkeypatch.setattr(ray_groups, "time", SimpleNamespace(monotonic=lambda: self.at_s))
        monkeypatch.setattr(ray_launcher, "ask_each", self.ask_each)
        machine = Machine((), 8, 2**34, has_bfloat16=False)
        self.launcher, self.said = RayLauncher(""), list[str]()
        self.launcher.say = self.said.append
        self.launcher.nodes = tuple(Node(name, name, machine, name) for name in ("own", "lost"))
        self.launcher._resources = [{}, {}]
        self.launcher._places = {0: ("own's", 0), 1: ("lost's", 0)}

    def names(self) -> list[str]:
        return [name for name, (start, end) in self.lives.items() if start <= self.at_s < end]

    def nodes(self) -> list[dict[str, Any]]:
        keys = ("NodeID", "NodeName", "NodeManagerAddress")
        return [
            {**dict.fromkeys(keys, name), "Alive": True, "Resources": {f"node:{name}": 1.0}}
            for name in self.names()
        ]

    def group(self, bundles: list[dict[str, float]], strategy: str) -> Any:
        pins = [name.removeprefix("node:") for bundle in bundles for name in bundle if "node:" in name]
        self.asked.append(pins)
        group, num = SimpleNamespace(on=list[str]()), len(bundles) - len(pins)

        def wait(wait_s: float) -> bool:
            self.at_s += 1
            free = [name for name in self.names() if name not in pins]
            if set(pins) <= {*self.names()} and len(free) >= num:
                group.on = free[:num]
            return bool(group.on)

        group.wait = wait
        return group

    def ask_each(self, ray: Any, nodes: list[dict[str, Any]], *_: Any) -> list[Any]:
        (name,) = [node["NodeID"] for node in nodes]
        unfit = ConfigError("it sees nothing", way_out="mount it.")
        return [unfit if name == "unfit" else Node(name, name, self.launcher.nodes[0].machine, name)]


@pytest.mark.extras
def test_a_node_that_is_passed_over_and_then_ended_is_not_gone_around_any_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else the next one, on which nothing can be as long as it is, would be ended, too, and so for ever."""
    cloud = Cloud(monkeypatch, own=(0, 999), unfit=(0, 5), late=(7, 10))
    cloud.launcher._replace(cloud, 1, {"CPU": 1.0}, cloud.nodes())
    assert cloud.asked == [["own"], ["own", "unfit"], ["own"]]
    assert cloud.launcher.nodes[1].name == "late"
    assert cloud.said[0] == "lost is gone; Ray is asked for a node with 1 CPU"
    assert cloud.said[-1] == "late (late) takes the place of lost"
    cloud = Cloud(monkeypatch, own=(0, 999))
    with pytest.raises(ConnectionError, match="no node at lost any more, and none to take its place"):
        cloud.launcher._replace(cloud, 1, {"CPU": 1.0}, cloud.nodes())


@pytest.mark.extras
def test_where_a_node_ends_while_others_are_waited_for_what_lacks_is_looked_for_anew(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cloud = Cloud(monkeypatch, own=(0, 999), idle=(0, 4), new=(3, 999))
    parts = [["cpu"], ["cpu"]]
    cloud.launcher._wait_for(cloud, parts, 9.0)
    assert cloud.said == [
        "waiting for 2 nodes of Ray's autoscaler (1 CPU, 1 CPU), 9 s at most (supervision.node_wait_s)",
        "the node new (new) has come",
        "a node that was there is gone: looking anew at what the run lacks",
    ]
    assert (cloud.at_s, cloud.launcher._asked) == (4, {})
    with pytest.raises(RoomError, match="of 2 nodes more that the run needs .* 0 have come within 9 s"):
        cloud.launcher._wait_for(cloud, parts, 9.0)
    assert (cloud.at_s, cloud.launcher._asked) == (4 + 10, {})


def test_a_node_that_ray_has_found_for_two_places_takes_one() -> None:
    machine = Machine((), 8, 2**34, has_bfloat16=False)
    own, *comes = (Node(f"n{at}", f"10.0.0.{at}", machine, f"{at}") for at in range(3))
    wanted: Any = {number: SimpleNamespace(group=f"group {number}") for number in (1, 2)}
    launcher = RayLauncher("")
    launcher.nodes = (own, Node("to-come-1", "", machine), Node("to-come-2", "", machine))
    launcher._resources = [{}, {}, {}]
    launcher._places, launcher._asked = {0: ("own", 0)}, dict(wanted)
    assert not launcher._takes(1, own, {})
    assert launcher._takes(2, comes[0], {"CPU": 8.0})
    assert not launcher._takes(1, comes[0], {"CPU": 8.0})
    assert launcher._asked == {1: wanted[1]}, "it is asked for again"
    assert launcher._takes(1, comes[1], {})
    assert [node.name for node in launcher.nodes] == ["n0", "n2", "n1"]
    assert launcher._places == {0: ("own", 0), 1: ("group 1", 0), 2: ("group 2", 0)}


@pytest.mark.parametrize(
    ("types", "is_there"),
    [({"node_4de1ef"}, False), ({"head"}, True), ({"head", "worker"}, True), (set(), False)],
)
def test_an_autoscaler_is_known_by_the_types_of_nodes_that_rays_monitor_tells(
    types: set[str], is_there: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_groups, "_node_types", lambda ray: types)
    monkeypatch.setattr(ray_groups, "TRY_S", 1e-3)
    monkeypatch.setattr(ray_groups, "REPORT_S", 1e-2)
    assert ray_groups.has_autoscaler(None) == is_there
