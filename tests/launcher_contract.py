"""The contract of launchers, as stories that are run on each node of each launcher (test_launchers.py).

As a program this is the controller of a two-host run on Ray: it plays the stories and the faults, and prints
each outcome as JSON.
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
from collections.abc import AsyncIterator, Awaitable, Callable
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
from asyncrl.launch.launchers import Launcher, NodeRequirements, opened
from asyncrl.launch.machine import Node
from asyncrl.launch.processes import PACKAGES, Process, ProcessSpec

SECRET, OTHER = "the s3cret of its server", "an0ther s3cret"
LIMIT_S = 60.0
NUM_LINES = 20_000


@dataclass(frozen=True)
class Stage:
    """A node of a launcher."""

    launcher: Launcher
    node: Node
    number: int
    folder: Path

    def make(self, name: str, do: str = "serve", **more: Any) -> Process:
        spec = json.dumps({"do": do, "lines": NUM_LINES, "clears": str(self.cleared(name))})
        return self.launcher.process(
            self.number,
            ProcessSpec(name, "launched_child", spec, self.folder, SECRET, secrets={"OTHER": OTHER}, **more),
        )

    def cleared(self, name: str) -> Path:
        """Return the file that the process makes when it exits because its parent has ended."""
        return self.folder / f"{name}.cleared"

    @contextlib.asynccontextmanager
    async def started(self, name: str, do: str = "serve", **more: Any) -> AsyncIterator[Process]:
        process = self.make(name, do, **more)
        await process.start()
        try:
            yield process
        finally:
            await process.aclose()


Story = Callable[[Stage], Awaitable[None]]


async def probed(process: Process) -> dict[str, Any]:
    async with aiohttp.ClientSession(headers={"authorization": f"Bearer {SECRET}"}) as session:
        async with session.get(f"{process.url}/probe") as answer:
            assert answer.status == 200, await answer.text()
            seen: dict[str, Any] = await answer.json()
            return seen


async def end_of(process: Process) -> RoomError:
    async with asyncio.timeout(LIMIT_S):
        await process.wait()
    return process.death()


def log_of(process: Process) -> str:
    return Path(process.log_path).read_text()


async def until_logged(process: Process, words: str) -> None:
    async with asyncio.timeout(LIMIT_S):
        while words not in log_of(process):  # noqa: ASYNC110  nothing tells
            await asyncio.sleep(0.05)


async def server_runs_at_its_node_until_closed(stage: Stage) -> None:
    process = stage.make("server")
    assert (process.url, process.returncode, process.seen()) == ("", None, "not started by the run")
    await process.start()
    assert process.url.startswith(f"http://{stage.node.address}:")
    seen = await probed(process)
    assert seen["other secret"] == OTHER
    assert seen["environ"]["OMP_NUM_THREADS"] == os.environ.get("OMP_NUM_THREADS", "1")
    assert "RAY_AUTH_TOKEN" not in seen["environ"]
    for secret in (SECRET, OTHER):
        assert secret not in seen["in the open"]
    await until_logged(process, "serving")
    process.dump_stacks_nowait()
    await until_logged(process, "most recent call first")
    assert process.returncode is None
    assert "process " in process.seen()
    for _ in range(2):
        await process.aclose()
    assert process.returncode == 0
    async with asyncio.timeout(LIMIT_S):
        await process.wait()


async def death_quotes_the_log_of_this_process_only(stage: Stage) -> None:
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
        assert "unexpected failure" in death.fault
        assert "no such model" not in death.fault
    async with stage.started("killed") as process:
        await probed(process)
        process.kill_nowait()
        assert "was killed by SIGKILL" in str(await end_of(process))


async def whole_output_is_there_before_the_end_is_reported(stage: Stage) -> None:
    async with stage.started("talking", "talk") as process:
        death = await end_of(process)
        assert "exited with code 3" in death.fault
        lines = log_of(process).splitlines()
        assert [line.split()[1] for line in lines] == [str(number) for number in range(NUM_LINES)]
        for text in (death.fault, process.log_tail()):
            assert f"line {NUM_LINES - 1} " in text


async def cancelled_start_leaves_no_process(stage: Stage) -> None:
    name = f"given-up-{os.getpid()}-here"  # these tests may run in parallel
    for delay_s in (0.0, 0.01, 0.05, 0.2, 1.0):
        given_up = stage.make(name)
        starting = asyncio.ensure_future(given_up.start())
        await asyncio.sleep(delay_s)  # the time of the cancellation
        starting.cancel()
        await asyncio.wait({starting})
        await given_up.aclose()
        lines = [" ".join(one.info["cmdline"] or ()) for one in psutil.process_iter(["cmdline"])]
        mine = [line for line in lines if name in line and "launched_child" in line]
        assert mine == [], delay_s


def find_listing(folder: Path) -> Path:
    """Return a script in place of a Python that prints the links in its PYTHONPATH."""
    python = folder / "python"
    python.write_text('#!/bin/sh\nfor one in "$PYTHONPATH"/*; do readlink "$one"; done\nexit 9\n')
    python.chmod(0o755)
    return python


def folder_of(package: str) -> str:
    return os.path.realpath(str(files(package)))


async def other_python_sees_only_our_packages(stage: Stage) -> None:
    async with stage.started("listing", python=partial(find_listing, stage.folder)) as process:
        assert "exited with code 9" in (await end_of(process)).fault
        assert log_of(process).split() == [folder_of(name) for name in PACKAGES]


STORIES: dict[str, Story] = {
    story.__name__: story
    for story in (
        server_runs_at_its_node_until_closed,
        death_quotes_the_log_of_this_process_only,
        whole_output_is_there_before_the_end_is_reported,
        cancelled_start_leaves_no_process,
        other_python_sees_only_our_packages,
    )
}


# ---- as a program: the outcome of each story, '' for success


async def outcome(play: Awaitable[Any]) -> str:
    try:
        async with asyncio.timeout(2 * LIMIT_S):
            await play
    except (Exception, pytest.fail.Exception):
        return traceback.format_exc()
    return ""


async def play_all(launcher: Launcher, folder: Path) -> dict[str, str]:
    """Play all stories on two nodes, and the faults."""
    told = dict[str, str]()
    for fault in FAULTS[:3]:
        told[fault.__name__] = await outcome(fault(launcher))
    try:
        await launcher.hold({0: ["cpu"], 1: ["cpu", "cuda:2", "cuda:3"]}, {})
        own, stage = (Stage(launcher, node, at, folder / str(at)) for at, node in enumerate(launcher.nodes))
        own.folder.mkdir()
        stage.folder.mkdir()
        told["own host"] = await outcome(server_runs_at_its_node_until_closed(own))
        for name, story in STORIES.items():
            told[name] = await outcome(story(stage))
        for fault in FAULTS[3:]:
            told[fault.__name__] = await outcome(fault(stage))
    finally:
        since_s = time.monotonic()
        await launcher.aclose()
        told["closing"] = "" if time.monotonic() - since_s < LIMIT_S else "too long"
    return told


async def too_few_devices_are_refused(launcher: Launcher) -> None:
    with pytest.raises(ConfigError, match=r"takes 4 CPU of the node \S+, which has 3 for Ray"):
        await launcher.hold({1: ["cpu"] * 4}, {})
    with pytest.raises(ConfigError, match=r"takes 1 GPU of the node \S+, which has 0 for Ray"):
        await launcher.hold({0: ["cuda:0"]}, {})


async def unmet_requirements_are_refused(launcher: Launcher) -> None:
    needs = {1: NodeRequirements({__file__: "unmet_requirements_are_refused", "/none": ""})}
    with pytest.raises(ConfigError, match=f"the node {launcher.nodes[1].name} does not see /none,"):
        await launcher.hold({0: ["cpu"], 1: ["cpu"]}, needs)
    await launcher.aclose()


async def devices_of_others_are_waited_for(launcher: Launcher) -> None:
    from ray.util import placement_group, remove_placement_group

    from asyncrl.launch import ray_launcher

    other = await asyncio.to_thread(placement_group, [{"CPU": 2}, {"CPU": 2}], strategy="STRICT_SPREAD")
    assert await asyncio.to_thread(other.wait, LIMIT_S)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ray_launcher, "HOLD_S", 2.0)
        with pytest.raises(RoomError, match="did not reserve .* within 2 s") as caught:
            await launcher.hold({0: ["cpu", "cpu"]}, {})
    assert "`ray status`" in caught.value.way_out
    await launcher.aclose()
    await asyncio.to_thread(remove_placement_group, other)


async def process_sees_only_its_devices(stage: Stage) -> None:
    """Numbers of a placement become Ray's."""
    for devices, names in ((("cuda:2",), "0"), (("cuda:3", "cuda:2"), "1,0")):
        async with stage.started("seeing", devices=devices) as process:
            assert (await probed(process))["environ"]["CUDA_VISIBLE_DEVICES"] == names


async def lost_actor_is_replaced(stage: Stage) -> None:
    """Its children end with it; other nodes continue."""
    other = Stage(stage.launcher, stage.node, 0, stage.folder)
    async with other.started("beside") as beside, stage.started("orphan") as process:
        actor = psutil.Process((await probed(process))["parent"])
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


async def lost_node_is_named(stage: Stage) -> None:
    """After its raylet is killed, all its processes clean up and end, and a start fails at once."""
    async with stage.started("orphan") as process:
        actor = psutil.Process((await probed(process))["parent"])
        family = [actor, *actor.children(recursive=True)]
        os.kill(int(actor.environ()["RAY_RAYLET_PID"]), signal.SIGKILL)
        death = str(await end_of(process))
        assert f"the node {stage.node.name} ({stage.node.address}) is gone" in death
        assert all_gone(family)
        assert stage.cleared("orphan").exists(), "Ray did not kill it"
        async with asyncio.timeout(LIMIT_S):
            with pytest.raises(RoomError, match="orphan: .* is gone: Ray "):
                await process.renewed().start()


FAULTS: tuple[Callable[[Any], Awaitable[None]], ...] = (
    too_few_devices_are_refused,
    unmet_requirements_are_refused,
    devices_of_others_are_waited_for,
    process_sees_only_its_devices,
    lost_actor_is_replaced,
    lost_node_is_named,
)


async def wait_to_be_killed(launcher: Launcher, folder: Path) -> None:
    """Run one process; print its id and its parent's."""
    await launcher.hold({0: ["cpu"]}, {})
    async with Stage(launcher, launcher.nodes[0], 0, folder).started("orphan") as process:
        print(json.dumps([process.pid, (await probed(process))["parent"]]), flush=True)
        await asyncio.Event().wait()


def main(name: str, folder: str, *is_killed: str) -> None:
    with opened(name) as launcher:
        told = asyncio.run((wait_to_be_killed if is_killed else play_all)(launcher, Path(folder)))
    print(json.dumps({"nodes": [node.address for node in launcher.nodes], "told": told}))


if __name__ == "__main__":
    main(*sys.argv[1:])
