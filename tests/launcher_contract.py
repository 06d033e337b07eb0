"""What every launcher keeps, as stories: each is run on each node of each launcher (test_launchers.py).

As a program this is the controller of a two-host run: it plays the stories and the faults, and prints what
came of each, as JSON.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest
from job_runs import all_gone

from asyncrl.base.errors import ConfigError, RoomError
from asyncrl.launch.fit import PACKAGES
from asyncrl.launch.launchers import opened
from asyncrl.launch.nodes import Launcher, Needs, Node, Order, Process
from asyncrl.launch.on_ray import ray_launcher
from asyncrl.launch.on_ray.ray_host import ask_each

SECRET, OTHER = "the s3cret of its server", "an0ther s3cret"
LIMIT_S = 60.0
NUM_LINES = 20_000


@dataclass(frozen=True)
class Stage:
    """Where a story is played."""

    launcher: Launcher
    node: Node
    number: int
    folder: Path

    def order(self, name: str, do: str = "serve", **more: Any) -> Order:
        spec = json.dumps({"do": do, "lines": NUM_LINES, "clears": str(self.cleared(name))})
        return Order(name, "launched_child", spec, self.folder, SECRET, secrets={"OTHER": OTHER}, **more)

    def cleared(self, name: str) -> Path:
        """Is there once the process has ended because its parent has."""
        return self.folder / f"{name}.cleared"

    def make(self, name: str, do: str = "serve", **more: Any) -> Process:
        return self.launcher.process(self.number, self.order(name, do, **more))

    @contextlib.asynccontextmanager
    async def started(self, name: str, do: str = "serve", **more: Any) -> AsyncIterator[Process]:
        process = self.make(name, do, **more)
        await process.start()
        try:
            yield process
        finally:
            await process.aclose()


Story = Callable[[Stage], Awaitable[None]]


async def probed(process: Process, secret: str = SECRET) -> dict[str, Any]:
    async with aiohttp.ClientSession(headers={"authorization": f"Bearer {secret}"}) as session:
        async with session.get(f"{process.url}/probe") as answer:
            assert answer.status == 200, await answer.text()
            seen: dict[str, Any] = await answer.json()
            return seen


async def end_of(process: Process) -> RoomError:
    with pytest.raises(RoomError) as caught:
        async with asyncio.timeout(LIMIT_S):
            await process.watch()
    return caught.value


def log_of(process: Process) -> str:
    return Path(process.log_path).read_text()


async def until_logged(process: Process, words: str) -> None:
    async with asyncio.timeout(LIMIT_S):
        while words not in log_of(process):  # noqa: ASYNC110  nothing tells
            await asyncio.sleep(0.05)


async def it_serves_at_its_node_and_ends_when_it_is_closed(stage: Stage) -> None:
    process = stage.make("server")
    assert (process.url, process.returncode, process.seen()) == ("", None, "not started")
    await process.start()
    assert process.url.startswith(f"http://{stage.node.address}:")
    seen = await probed(process)
    assert seen["other secret"] == OTHER
    assert seen["environ"]["OMP_NUM_THREADS"] == os.environ.get("OMP_NUM_THREADS", "1")
    assert "RAY_AUTH_TOKEN" not in seen["environ"]
    for secret in (SECRET, OTHER):
        assert secret not in seen["in the open"]
    await until_logged(process, "serving")
    assert process.returncode is None
    assert "process " in process.seen()
    for _ in range(2):
        await process.aclose()
    assert (process.returncode, process.left) == (0, "")
    async with asyncio.timeout(LIMIT_S):
        await process.wait()


async def its_last_words_are_its_death_and_its_successor_is_not_blamed_for_them(stage: Stage) -> None:
    async with stage.started("refusing", "refuse") as first:
        death = await end_of(first)
        assert (death.room, death.fault, death.way_out) == ("refusing", "no such model", "give one.")
        again = first.renewed()
        await again.start()
        assert "no such model" in str(await end_of(again))
        await again.aclose()
        assert log_of(first).count("no such model") == 2
    async with stage.started("refusing", "crash") as other:
        death = await end_of(other)
        assert "exited with code 1" in death.fault
        assert "something nobody thought of" in death.fault
        assert "no such model" not in death.fault


async def all_that_it_wrote_is_there_before_its_end_is_told(stage: Stage) -> None:
    async with stage.started("talking", "talk") as process:
        death = await end_of(process)
        assert f"line {NUM_LINES - 1} " in death.fault
        assert "exited with code 3" in death.fault
        lines = log_of(process).splitlines()
        assert [line.split()[1] for line in lines] == [str(number) for number in range(NUM_LINES)]
        assert f"line {NUM_LINES - 1} " in process.log_tail()


async def a_killed_one_says_by_which_signal(stage: Stage) -> None:
    async with stage.started("killed") as process:
        await probed(process)
        process.kill_nowait()
        assert "was killed by SIGKILL" in str(await end_of(process))


async def its_stacks_come_into_its_log(stage: Stage) -> None:
    async with stage.started("dumping") as process:
        await until_logged(process, "serving")
        process.dump_stacks_nowait()
        await until_logged(process, "most recent call first")
        await probed(process)


async def a_port_that_is_taken_is_refused_by_name(stage: Stage) -> None:
    port = await stage.launcher.free_port(stage.number)
    async with stage.started("first", port=port) as first:
        assert first.url.endswith(f":{port}")
        second = stage.make("second", port=port)
        with pytest.raises(ConfigError, match=f"port {port} for second cannot be used"):
            await second.start()
        await second.aclose()
        await probed(first)


def find_listing(folder: Path) -> Path:
    """A Python, as it were, that says what its PYTHONPATH holds."""
    if not folder.is_dir():
        raise ConfigError(f"{folder} has no Python", way_out="install one.")
    python = folder / "python"
    python.write_text('#!/bin/sh\nfor one in "$PYTHONPATH"/*; do readlink "$one"; done\nexit 9\n')
    python.chmod(0o755)
    return python


def folder_of(package: str) -> str:
    return os.path.realpath(str(files(package)))


async def a_start_that_is_given_up_leaves_no_process(stage: Stage) -> None:
    """Whenever that is: a start beside it that fails gives it up."""
    name = f"given-up-{os.getpid()}-here"  # these tests may run beside themselves
    for delay_s in (0.0, 0.01, 0.05, 0.2, 1.0):
        given_up = stage.make(name)
        starting = asyncio.ensure_future(given_up.start())
        await asyncio.sleep(delay_s)  # no wait for anything: it is when the start is given up
        starting.cancel()
        await asyncio.wait({starting})
        await given_up.aclose()
        async with stage.started("next") as process:  # whatever was under way there is over
            await probed(process)
        lines = [" ".join(one.info["cmdline"] or ()) for one in psutil.process_iter(["cmdline"])]
        mine = [line for line in lines if name in line and "launched_child" in line]
        assert mine == [], delay_s


async def a_python_of_its_own_is_found_on_its_node_and_sees_our_packages_there_alone(stage: Stage) -> None:
    async with stage.started("listing", python=partial(find_listing, stage.folder)) as process:
        assert "exited with code 9" in (await end_of(process)).fault
        assert log_of(process).split() == [folder_of(name) for name in PACKAGES]
    with pytest.raises(ConfigError, match="nowhere has no Python") as caught:
        await stage.make("lacking", python=partial(find_listing, stage.folder / "nowhere")).start()
    assert caught.value.way_out == "install one."


STORIES: dict[str, Story] = {
    story.__name__: story
    for story in (
        it_serves_at_its_node_and_ends_when_it_is_closed,
        its_last_words_are_its_death_and_its_successor_is_not_blamed_for_them,
        all_that_it_wrote_is_there_before_its_end_is_told,
        a_killed_one_says_by_which_signal,
        its_stacks_come_into_its_log,
        a_port_that_is_taken_is_refused_by_name,
        a_start_that_is_given_up_leaves_no_process,
        a_python_of_its_own_is_found_on_its_node_and_sees_our_packages_there_alone,
    )
}


# ---- as a program: what came of each, '' for well


async def outcome(play: Awaitable[Any]) -> str:
    try:
        async with asyncio.timeout(2 * LIMIT_S):
            await play
    except (Exception, pytest.fail.Exception):
        return traceback.format_exc()
    return ""


async def play_all(launcher: Launcher, folder: Path) -> Mapping[str, str]:
    """All stories on two nodes, then the faults."""
    told = dict[str, str]()
    for fault in (
        more_than_there_is_is_refused,
        what_others_hold_is_waited_for_and_named,
        what_a_node_does_not_see_is_refused,
        a_node_without_the_engines_package_or_with_another_version_is_refused,
    ):
        told[fault.__name__] = await outcome(fault(launcher))
    try:
        parts = {0: ["cpu"], 1: ["cpu", "cuda:2", "cuda:3"]}
        await launcher.hold(parts, {})
        for number, node in enumerate(launcher.nodes):
            stage = Stage(launcher, node, number, folder / str(number))
            stage.folder.mkdir()
            for name, story in STORIES.items():
                told[f"{name}/{number}"] = await outcome(story(stage))
        for fault in (
            each_sees_its_devices_alone,
            an_actor_is_lost,
            a_node_is_lost,
        ):
            told[fault.__name__] = await outcome(fault(stage))
    finally:
        since_s = time.monotonic()
        await launcher.aclose()
        told["closing took"] = "" if time.monotonic() - since_s < LIMIT_S else "too long"
    return told


async def more_than_there_is_is_refused(launcher: Launcher) -> None:
    with pytest.raises(ConfigError, match=r"takes 4 CPU of the node \S+, which has 3 for Ray"):
        await launcher.hold({1: ["cpu"] * 4}, {})
    with pytest.raises(ConfigError, match=r"takes 1 GPU of the node \S+, which has 0 for Ray"):
        await launcher.hold({0: ["cuda:0"]}, {})


async def what_a_node_does_not_see_is_refused(launcher: Launcher) -> None:
    here = {__file__: "what_a_node_does_not_see_is_refused"}
    with pytest.raises(ConfigError, match=f"the node {launcher.nodes[1].name} does not see /nothing, "):
        await launcher.hold({0: ["cpu"], 1: ["cpu"]}, {0: Needs(here), 1: Needs({**here, "/nothing": ""})})
    await launcher.aclose()


def lacking() -> dict[str, str]:
    raise ConfigError("/bin/python cannot import vllm", way_out="install it.")


async def a_node_without_the_engines_package_or_with_another_version_is_refused(launcher: Launcher) -> None:
    """Where processes of the run are to be, and as one that takes the place of another."""
    other = launcher.nodes[1]
    old, new = Needs(package=partial(dict, vllm="1.0")), Needs(package=partial(dict, vllm="2.0"))
    differs = f"the node {other.name} has vllm 2.0, the first node with engines has vllm 1.0"
    with pytest.raises(ConfigError, match=differs):
        await launcher.hold({0: ["cpu"], 1: ["cpu"]}, {0: old, 1: new})
    await launcher.aclose()
    ray, own = ray_launcher.import_ray(), dict[str, str]()
    found = [node for node in ray.nodes() if node["NodeID"] == other.id]
    (told,) = await asyncio.to_thread(ask_each, ray, found, own, old)
    assert isinstance(told, Node), told
    assert (told.id, own["vllm"]) == (other.id, "1.0")
    lacks = f"the node {other.name} lacks what its engines need: /bin/python cannot import vllm"
    for needs, why in ((new, differs), (Needs(package=lacking), lacks)):
        (told,) = await asyncio.to_thread(ask_each, ray, found, own, needs)
        assert why in str(told)


async def what_others_hold_is_waited_for_and_named(launcher: Launcher) -> None:
    from ray.util import placement_group, remove_placement_group

    other = await asyncio.to_thread(placement_group, [{"CPU": 2}, {"CPU": 2}], strategy="STRICT_SPREAD")
    assert await asyncio.to_thread(other.wait, LIMIT_S)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ray_launcher, "HOLD_S", 2.0)
        with pytest.raises(
            RoomError, match=r"did not give 2 CPU of \S+ within 2 s; free are 0 CPU"
        ) as caught:
            await launcher.hold({0: ["cpu", "cpu"]}, {})
    assert "`ray status`" in caught.value.way_out
    await launcher.aclose()
    await asyncio.to_thread(remove_placement_group, other)


async def each_sees_its_devices_alone(stage: Stage) -> None:
    """The numbers of a placement, and what Ray calls them."""
    for devices, names in ((("cuda:2",), "0"), (("cuda:3", "cuda:2"), "1,0")):
        async with stage.started("seeing", devices=devices) as process:
            assert (await probed(process))["environ"]["CUDA_VISIBLE_DEVICES"] == names


async def an_actor_is_lost(stage: Stage) -> None:
    """Its children end with it; the others go on, and a new one takes its place."""
    other = Stage(stage.launcher, stage.node, 0, stage.folder)
    async with other.started("beside") as beside, stage.started("orphan") as process:
        seen = await probed(process)
        actor = psutil.Process(seen["parent"])
        (child,) = [one for one in actor.children() if "launched_child" in one.cmdline()]
        actor.kill()
        death = str(await end_of(process))
        assert f"orphan: the node {stage.node.name} ({stage.node.address}) is gone" in death
        assert all_gone([child])
        await probed(beside)
        assert beside.returncode is None
        again = process.renewed()
        await again.start()
        await probed(again)
        await again.aclose()
        assert again.returncode == 0


async def a_node_is_lost(stage: Stage) -> None:
    """Its raylet is killed: all there clears up and ends, and a start says so at once."""
    async with stage.started("orphan") as process:
        seen = await probed(process)
        actor = psutil.Process(seen["parent"])
        family = [actor, *actor.children(recursive=True)]
        os.kill(int(actor.environ()["RAY_RAYLET_PID"]), signal.SIGKILL)
        death = str(await end_of(process))
        assert f"the node {stage.node.name} ({stage.node.address}) is gone" in death
        assert all_gone(family)
        assert stage.cleared("orphan").exists(), "Ray did not kill it"
        async with asyncio.timeout(LIMIT_S):
            with pytest.raises(RoomError, match="orphan: .* is gone: Ray "):
                await process.renewed().start()


async def wait_to_be_killed(launcher: Launcher, folder: Path) -> None:
    """With one process, whose id and whose parent's are printed."""
    await launcher.hold({0: ["cpu"]}, {})
    async with Stage(launcher, launcher.nodes[0], 0, folder).started("orphan") as process:
        print(json.dumps([process.pid, (await probed(process))["parent"]]), flush=True)
        await asyncio.Event().wait()


def main(address: str, folder: str, *is_killed: str) -> None:
    if is_killed:
        with opened(f"ray:{address}") as launcher:
            asyncio.run(wait_to_be_killed(launcher, Path(folder)))
    with opened(f"ray:{address}") as launcher:
        told = asyncio.run(play_all(launcher, Path(folder)))
    print(json.dumps({"nodes": [node.address for node in launcher.nodes], "told": told}))


if __name__ == "__main__":
    main(*sys.argv[1:])
