"""The contract of launchers, as stories that are run on each node of each launcher.

As a program this is the controller of a run, on two hosts with Ray.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest
from process_ends import all_gone

from asyncrl.base.errors import ComponentError, ConfigError
from asyncrl.launch.launchers import opened
from asyncrl.launch.machine import Node
from asyncrl.launch.processes import Launcher, Process, ProcessSpec

SECRET, OTHER = "the s3cret of its server", "an0ther s3cret"
LIMIT_S = 120.0


@dataclass(frozen=True)
class Stage:
    """A node of a launcher."""

    launcher: Launcher
    node: Node
    number: int
    folder: Path

    def make(self, name: str, do: str = "serve", **more: Any) -> Process:
        spec = json.dumps({"do": do, "clears": str(self.cleared(name))})
        return self.launcher.process(
            self.number,
            ProcessSpec(
                name,
                "launched_child",
                spec,
                self.folder,
                SECRET,
                secrets={"OTHER": OTHER},
                **more,
            ),
        )

    def cleared(self, name: str) -> Path:
        """Return the file that the process makes when it exits because its parent has
        ended.
        """
        return self.folder / f"{name}.cleared"

    @contextlib.asynccontextmanager
    async def started(
        self, name: str, do: str = "serve", **more: Any
    ) -> AsyncIterator[Process]:
        process = self.make(name, do, **more)
        await process.start()
        try:
            yield process
        finally:
            await process.aclose()


Story = Callable[[Stage], Awaitable[None]]


async def probed(process: Process) -> dict[str, Any]:
    async with aiohttp.ClientSession(
        headers={"authorization": f"Bearer {SECRET}"}
    ) as session:
        async with session.get(f"{process.url}/probe") as answer:
            assert answer.status == 200, await answer.text()
            seen: dict[str, Any] = await answer.json()
            return seen


async def end_of(process: Process) -> ComponentError:
    async with asyncio.timeout(LIMIT_S):
        await process.wait()
    return process.death()


def log_of(process: Process) -> str:
    return Path(process.log_path).read_text()


async def until_logged(process: Process, words: str) -> None:
    async with asyncio.timeout(LIMIT_S):
        while words not in log_of(process):  # noqa: ASYNC110  no event exists
            await asyncio.sleep(0.05)


async def server_runs_at_its_node_until_closed(stage: Stage) -> None:
    process = stage.make("server")
    assert (process.url, process.returncode, process.seen()) == (
        "",
        None,
        "not started by the run",
    )
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
        assert (death.component, death.fault, death.way_out) == (
            "refusing",
            "no such model",
            "give one.",
        )
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


async def cancelled_start_leaves_no_process(stage: Stage) -> None:
    name = f"given-up-{os.getpid()}-here"  # these tests may run in parallel
    for delay_s in (0.0, 0.05, 0.5):
        given_up = stage.make(name)
        starting = asyncio.ensure_future(given_up.start())
        await asyncio.sleep(delay_s)  # the time of the cancellation
        starting.cancel()
        await asyncio.wait({starting})
        await given_up.aclose()
        lines = [
            " ".join(one.info["cmdline"] or ())
            for one in psutil.process_iter(["cmdline"])
        ]
        mine = [line for line in lines if name in line and "launched_child" in line]
        assert mine == [], delay_s


STORIES: dict[str, Story] = {
    story.__name__: story
    for story in (
        server_runs_at_its_node_until_closed,
        death_quotes_the_log_of_this_process_only,
        cancelled_start_leaves_no_process,
    )
}


# ---- on Ray


async def too_few_devices_are_refused(stage: Stage) -> None:
    with pytest.raises(
        ConfigError, match=r"takes 4 CPU of the node \S+, which has 3 for Ray"
    ):
        await stage.launcher.hold({1: ["cpu"] * 4}, {})
    with pytest.raises(
        ConfigError, match=r"takes 1 GPU of the node \S+, which has 0 for Ray"
    ):
        await stage.launcher.hold({0: ["cuda:0"]}, {})


async def process_sees_only_its_devices(stage: Stage) -> None:
    """Numbers of a placement become Ray's."""
    for devices, names in ((("cuda:2",), "0"), (("cuda:3", "cuda:2"), "1,0")):
        async with stage.started("seeing", devices=devices) as process:
            assert (await probed(process))["environ"]["CUDA_VISIBLE_DEVICES"] == names


async def lost_node_is_named(stage: Stage) -> None:
    """After its raylet is killed, all its processes clean up and end, and a start fails
    at once.
    """
    async with stage.started("orphan") as process:
        actor = psutil.Process((await probed(process))["pids"][1])
        family = [actor, *actor.children(recursive=True)]
        os.kill(int(actor.environ()["RAY_RAYLET_PID"]), signal.SIGKILL)
        death = str(await end_of(process))
        assert f"the node {stage.node.name} ({stage.node.address}) is gone" in death
        assert all_gone(family, timeout_s=LIMIT_S)
        assert stage.cleared("orphan").exists(), "Ray did not kill it"
        async with asyncio.timeout(LIMIT_S):
            with pytest.raises(ComponentError, match="orphan: .* is gone: Ray "):
                await process.renewed().start()


RAY_STORIES = [
    *STORIES.values(),
    too_few_devices_are_refused,
    process_sees_only_its_devices,
    lost_node_is_named,
]


def killed(controller: subprocess.Popen[str], folder: Path) -> dict[str, str]:
    """Kill the controller once it has a process; return the stories that it reported."""
    with controller:
        seen = json.loads(
            next(line for line in controller.stdout if line.startswith("{"))
        )
        processes = [
            psutil.Process(pid) for pid in seen["processes"] if pid != controller.pid
        ]
        controller.kill()
    assert all_gone(processes)
    assert (folder / "killed.cleared").exists()
    told: dict[str, str] = seen["told"]
    return told


async def outcome(story: Story, stage: Stage) -> str:
    try:
        async with asyncio.timeout(2 * LIMIT_S):
            await story(stage)
    except (Exception, pytest.fail.Exception):
        return traceback.format_exc()
    return ""


async def control(launcher: Launcher, folder: Path) -> None:
    """Be the controller of one process, on Ray after all stories on a second node;
    print the result.
    """
    nodes = launcher.nodes
    parts = [["cpu"], ["cpu", "cuda:2", "cuda:3"]][: len(nodes)]
    await launcher.hold(dict(enumerate(parts)), {__file__: "Be the controller"})
    told = dict[str, str]()
    if len(nodes) > 1:
        stage = Stage(launcher, nodes[1], 1, folder)
        told = {story.__name__: await outcome(story, stage) for story in RAY_STORIES}
    async with Stage(launcher, nodes[0], 0, folder).started("killed") as process:
        processes = (await probed(process))["pids"]
        print(json.dumps({"told": told, "processes": processes}), flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    with opened(sys.argv[1]) as opened_launcher:
        asyncio.run(control(opened_launcher, Path(sys.argv[2])))
