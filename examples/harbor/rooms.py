"""Where the shell of the model and the tests of a task run: a container, or bubblewrap
over folders. Neither has a network; nothing of a task but its environment is there
before its tests are run.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import shlex
import shutil
import uuid
from collections.abc import Sequence
from pathlib import Path

from asyncrl.agents.sandbox import bubblewrap_options
from examples.harbor.tasks import HarborTask

MAX_OUTPUT_BYTES = 20_000
Ran = tuple[int | None, str]
"""Exit code (None: it was ended), and what was said."""


class FolderRoom:
    """bubblewrap, with the folders of the task as they are on the disk. For a
    Dockerfile that copies files and no more: the programs are those of this machine.
    """

    def __init__(self, task: HarborTask, folder: Path) -> None:
        self._task, self._folder = task, folder
        self.workdir = "/app"

    async def start(self) -> None:
        """Lay out the files. Raises ValueError for a Dockerfile that does more than
        that.
        """
        for name in ("app", "tmp", "logs"):
            (self._folder / name).mkdir()
        context = self._task.folder / "environment"
        for line in (context / "Dockerfile").read_text(encoding="utf-8").splitlines():
            word, *given = shlex.split(line, comments=True) or ["FROM"]
            if word == "WORKDIR" and given == [self.workdir]:
                continue
            if (
                word == "COPY"
                and len(given) == 2
                and Path(given[1]).is_relative_to(self.workdir)
            ):
                goal = self._folder / "app" / Path(given[1]).relative_to(self.workdir)
                source = context / given[0]
                if source.is_dir():
                    shutil.copytree(source, goal, dirs_exist_ok=True)
                else:
                    goal = goal / source.name if given[1].endswith("/") else goal
                    goal.parent.mkdir(parents=True, exist_ok=True)
                    shutil.copy(source, goal)
            elif word != "FROM":
                raise ValueError(
                    f"{context}/Dockerfile: {line!r} needs a container: give room=podman"
                )

    async def run(self, command: Sequence[str], timeout_s: float) -> Ran:
        return await self._run(command, timeout_s, {})

    async def verify(self, timeout_s: float) -> tuple[Ran, str]:
        """Run the tests; what they wrote as the reward, empty if nothing."""
        (self._folder / "logs/verifier").mkdir()  # anew: only the tests see it
        ran = await self._run(
            ["bash", "/tests/test.sh"],
            timeout_s,
            {"/tests": str(self._task.folder / "tests")},
        )
        return ran, read_reward(self._folder / "logs/verifier")

    async def _run(
        self, command: Sequence[str], timeout_s: float, shown: dict[str, str]
    ) -> Ran:
        binds = {self.workdir: self._folder / "app", "/tmp": self._folder / "tmp"}
        if shown:
            binds["/logs"] = self._folder / "logs"
        memory = f"ulimit -d {self._task.memory_mb * 1024}; exec {shlex.join(command)}"
        options = bubblewrap_options(binds, shown, self.workdir)
        return await said(["bwrap", *options, "--", "bash", "-c", memory], timeout_s)

    async def close(self) -> None:
        """Nothing runs between two commands."""


class ContainerRoom:
    """A container of podman, of the image that the Dockerfile says."""

    def __init__(self, task: HarborTask, folder: Path) -> None:
        self._task, self._folder = task, folder
        self._image = f"localhost/asyncrl-harbor-{task.folder.name}"
        self._name = f"asyncrl-harbor-{uuid.uuid4().hex}"

    async def start(self) -> None:
        """Raises RuntimeError if the image cannot be built, or the container not
        started.
        """
        build = [
            "podman",
            "build",
            "--quiet",
            "--tag",
            self._image,
            str(self._task.folder / "environment"),
        ]
        await self._must(build, 600)
        limits = [
            f"--memory={self._task.memory_mb}m",
            "--pids-limit=1024",
            "--network=none",
        ]
        limits += ["--cgroupns=private", "--ulimit=nofile=4096", "--ulimit=nproc=1024"]
        start = [
            "podman",
            "run",
            "--detach",
            "--rm",
            f"--name={self._name}",
            *limits,
            self._image,
        ]
        await self._must([*start, "sleep", "infinity"], 60)

    async def run(self, command: Sequence[str], timeout_s: float) -> Ran:
        # what is in the container outlives the podman that asked for it
        limited = ["timeout", "--signal=KILL", str(timeout_s), *command]
        return await said(["podman", "exec", self._name, *limited], timeout_s + 10)

    async def verify(self, timeout_s: float) -> tuple[Ran, str]:
        """As FolderRoom.verify."""
        await self._must(
            ["podman", "exec", self._name, "rm", "-rf", "/tests", "/logs/verifier"], 60
        )
        await self._must(
            ["podman", "exec", self._name, "mkdir", "-p", "/logs/verifier"], 60
        )
        await self._must(
            ["podman", "cp", f"{self._task.folder}/tests", f"{self._name}:/tests"], 60
        )
        ran = await self.run(["bash", "/tests/test.sh"], timeout_s)
        await self._must(
            [
                "podman",
                "cp",
                f"{self._name}:/logs/verifier",
                f"{self._folder}/verifier",
            ],
            60,
        )
        return ran, read_reward(self._folder / "verifier")

    async def close(self) -> None:
        """Remove the container."""
        await said(["podman", "rm", "--force", "--ignore", "--time=0", self._name], 60)

    async def _must(self, command: Sequence[str], timeout_s: float) -> None:
        code, text = await said(command, timeout_s)
        if code != 0:
            raise RuntimeError(f"{shlex.join(command)}: exit code {code}: {text}")


Room = FolderRoom | ContainerRoom
ROOMS = {"bubblewrap": FolderRoom, "podman": ContainerRoom}


def read_reward(folder: Path) -> str:
    """JSON of what tests left in /logs/verifier: {"reward": number, ...}; empty if
    nothing.
    """
    found = [folder / "reward.txt", folder / "reward.json"]
    files = (path for path in found if path.is_file() and not path.is_symlink())
    text = next((path.read_text(encoding="utf-8") for path in files), "").strip()
    return (
        text
        if text.startswith("{") or not text
        else json.dumps({"reward": float(text)})
    )


async def said(command: Sequence[str], timeout_s: float) -> Ran:
    """Run it to its end, or until it has said too much or taken too long."""
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        *command,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=pipe,
        stderr=asyncio.subprocess.STDOUT,
    )
    assert process.stdout is not None
    text, code, note = b"", None, ""
    try:
        async with asyncio.timeout(timeout_s):
            while len(text) <= MAX_OUTPUT_BYTES and (
                chunk := await process.stdout.read(4096)
            ):
                text += chunk
            if len(text) > MAX_OUTPUT_BYTES:
                note = f"\n[ended: it said more than {MAX_OUTPUT_BYTES} bytes]"
            else:
                code = await process.wait()
    except TimeoutError:
        note = f"\n[ended after {timeout_s:.0f} s]"
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        # asyncio sees no end of a process whose pipe is not empty
        while await process.stdout.read(2**16):
            pass
        await process.wait()
    return code, text[:MAX_OUTPUT_BYTES].decode(errors="replace") + note
