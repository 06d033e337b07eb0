"""An environment of Harbor without containers: one bubblewrap sandbox per trial.

Its image is the root of this machine, read-only. Of a Dockerfile it honours FROM (any
image), WORKDIR, ENV and COPY, and refuses every other line. Only root exists. On the
network it reaches the endpoint of the model, and only for agents that run inside.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import io
import itertools
import json
import os
import shlex
import shutil
import tarfile
import tempfile
import uuid
from pathlib import Path
from typing import Any

from asyncrl.agents.sandbox import PORT, forwarded
from harbor.environments.base import BaseEnvironment, ExecResult
from harbor.environments.capabilities import (
    EnvironmentCapabilities,
    EnvironmentResourceCapabilities,
)

PYTHON = "/usr/bin/python3"
SYSTEM_PATH = "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin"
WRITABLE = ("app", "tmp", "logs", "tests", "solution", "root", "run", "installed-agent")
MAX_LINE_BYTES = 2**28
MAX_MEMORY_MB = 2048
"""Limit for tasks that name none."""
MAX_PROCESSES = 256

# Inside: runs each command of its input, at the same time, in the one sandbox, so that
# the next command finds what a command leaves running (tmux).
#
# Kernel limits hold per process: memory, the size of a file, CPUs, and, except for a
# root outside, processes. The watch bounds their sum. Its kill(-1) reaches all
# processes of the sandbox but itself and bubblewrap's, and leaves a fork bomb no time.
_SERVER = """
import json, os, random, resource, signal, socket, subprocess, sys, tempfile, threading
import time
max_bytes, max_processes, cpus, port, channel = map(int, sys.argv[1:])
if channel >= 0:
    listener = socket.create_server(("127.0.0.1", port), backlog=64)
    with socket.socket(fileno=channel) as out:
        socket.send_fds(out, [b"1"], [listener.fileno()])
    listener.close()
own = {"1", str(os.getpid())}
resource.setrlimit(resource.RLIMIT_DATA, (max_bytes, max_bytes))
resource.setrlimit(resource.RLIMIT_FSIZE, (2**30, 2**30))
resource.setrlimit(resource.RLIMIT_NPROC, (max_processes + 32, max_processes + 32))
usable = sorted(os.sched_getaffinity(0))
os.sched_setaffinity(0, random.sample(usable, min(max(cpus, 1), len(usable))))
lock = threading.Lock()
ends = []
def fault():
    pids = [name for name in os.listdir("/proc") if name.isdigit() and name not in own]
    if len(pids) > max_processes:
        return f"more than {max_processes} processes"
    pages = 0
    for pid in pids:
        try:
            with open(f"/proc/{pid}/statm") as file:
                pages += int(file.read().split()[1])
        except (OSError, IndexError):
            pass
    if pages * resource.getpagesize() > max_bytes:
        return f"more than {max_bytes >> 20} MiB of memory"
    return None
def watch():
    while True:
        if found := fault():
            ends.append(found)
            os.kill(-1, signal.SIGKILL)
        time.sleep(0.2)
def run(call):
    num_ends = len(ends)
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        try:
            child = subprocess.Popen(["bash", "-c", call["command"]], cwd=call["cwd"],
                env=call["env"], stdin=subprocess.DEVNULL, stdout=out, stderr=err,
                start_new_session=True)
            code = child.wait(call["limit"])
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, signal.SIGKILL)
            code = 124
        except OSError as error:
            err.write(str(error).encode())
            code = 126
        if ends[num_ends:]:
            err.write(f"\\n[killed: {ends[-1]}]".encode())
        texts = []
        for file in (out, err):
            file.seek(0)
            texts.append(file.read(2**26).decode(errors="replace"))
    with lock:
        print(json.dumps([call["id"], code, *texts]), flush=True)
threading.Thread(target=watch, daemon=True).start()
print("[-1, 0, null, null]", flush=True)
for line in sys.stdin:
    threading.Thread(target=run, args=(json.loads(line),), daemon=True).start()
"""


class SandboxStartError(RuntimeError):
    """bubblewrap did not start: an error of this machine."""


class BubblewrapEnvironment(BaseEnvironment):
    """`processes` bounds them, `tools` is a venv of agents that run inside, which then
    reach `endpoint` at 127.0.0.1:PORT.

    Invariant: after stop(), and after the death of this process, no process of the
    sandbox remains; after stop(), no folder.
    """

    def __init__(
        self,
        *args: Any,
        processes: int = MAX_PROCESSES,
        tools: str | None = None,
        endpoint: str | None = None,
        **kwargs: Any,
    ) -> None:
        self._max_processes, self._endpoint = processes, endpoint
        self._tools = Path(tools) if tools else None
        self._cleanup = contextlib.AsyncExitStack()
        super().__init__(*args, **kwargs)

    @staticmethod
    def type() -> str:
        return "bubblewrap"

    @property
    def capabilities(self) -> EnvironmentCapabilities:
        return EnvironmentCapabilities(disable_internet=True)

    @classmethod
    def resource_capabilities(cls) -> EnvironmentResourceCapabilities:
        return EnvironmentResourceCapabilities(cpu_limit=True, memory_limit=True)

    def _validate_definition(self) -> None:
        """Raises ValueError for what a sandbox without an image cannot do."""
        # A trial may have a second sandbox, for its verifier.
        name = f"sandbox-{uuid.uuid4().hex}"
        self._folder = self.trial_paths.trial_dir / name
        self._process: asyncio.subprocess.Process | None = None
        self._reader: asyncio.Task[None] | None = None
        self._workdir, self._image_env = "/app", dict[str, str]()
        self._copies: list[tuple[Path, str]] = []
        for line in (self.environment_dir / "Dockerfile").read_text().splitlines():
            word, *given = shlex.split(line, comments=True) or ["FROM"]
            if word == "WORKDIR" and len(given) == 1:
                self._workdir = given[0]
            elif word == "ENV" and given and all("=" in each for each in given):
                self._image_env |= dict(each.split("=", 1) for each in given)
            elif word == "COPY" and len(given) == 2 and given[0][:2] != "--":
                self._copies.append((self.environment_dir / given[0], given[1]))
            elif word != "FROM":
                raise ValueError(f"bubblewrap cannot honour {line!r} of the Dockerfile")
        if self._workdir.split("/")[1] not in WRITABLE:
            raise ValueError(f"bubblewrap cannot write to WORKDIR {self._workdir}")

    async def start(self, force_build: bool) -> None:
        self._folder.mkdir(parents=True)
        self._numbers, self._calls = itertools.count(), dict[int, Any]()
        options = ["--unshare-all", "--die-with-parent", "--new-session"]
        options += ["--uid", "0", "--gid", "0", "--cap-drop", "ALL"]
        for path in ("/usr", "/bin", "/sbin", "/lib", "/lib64"):
            options += ["--ro-bind-try", path, path]
        for name in ("alternatives", "passwd", "group", "ld.so.cache", "terminfo"):
            options += ["--ro-bind-try", f"/etc/{name}", f"/etc/{name}"]
        options += ["--proc", "/proc", "--dev", "/dev"]
        for name in WRITABLE:
            (self._folder / name).mkdir()
            options += ["--bind", str(self._folder / name), f"/{name}"]
        # Read-only inside, or a link there could lead an upload out of the sandbox.
        (self._folder / "uploads").mkdir()
        options += ["--ro-bind", str(self._folder / "uploads"), "/uploads"]
        for path in self._shown():
            options += ["--ro-bind", path, path]
        max_bytes = (self._effective_memory_mb or MAX_MEMORY_MB) * 2**20
        channel = -1
        if self._endpoint is not None:
            opened = await self._cleanup.enter_async_context(forwarded(self._endpoint))
            channel = opened[1]
        numbers = [max_bytes, self._max_processes, self._effective_cpus or 1, PORT]
        server = [PYTHON, "-I", "-S", "-c", _SERVER, *map(str, [*numbers, channel])]
        ready = self._calls[-1] = asyncio.get_running_loop().create_future()
        with (self._folder / "bwrap.log").open("wb") as log:
            self._process = await asyncio.create_subprocess_exec(
                *["bwrap", *options, "--remount-ro", "/", "--", *server],
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
                limit=MAX_LINE_BYTES,
                pass_fds=[channel] if channel >= 0 else [],
                # Commands can read what the sandbox has inherited: no key.
                env={"PATH": os.environ["PATH"]},
            )
        self._reader = asyncio.create_task(self._read())  # noqa: TID251  stop() waits for it
        try:
            await ready
        except RuntimeError as error:
            said = (self._folder / "bwrap.log").read_text(errors="replace")
            raise SandboxStartError(f"bubblewrap did not start: {said}") from error
        made = [self._workdir, *(f"/logs/{n}" for n in ("agent", "verifier"))]
        await self._checked(f"mkdir -p {shlex.join([*made, '/logs/artifacts'])}", "/")
        for source, target in self._copies:
            place = str(Path(self._workdir, target))
            if source.is_dir():
                await self.upload_dir(source, place)
            else:
                slash = target.endswith("/") or target == "."
                await self.upload_file(
                    source, f"{place}/{source.name}" if slash else place
                )

    def _shown(self) -> list[str]:
        """Return the folders of the venv of agents, and of its Python."""
        if self._tools is None:
            return []
        python = (self._tools / "bin/python").resolve()
        return [str(self._tools), str(python.parents[1])]

    async def _read(self) -> None:
        assert self._process is not None
        assert self._process.stdout is not None
        while line := await self._process.stdout.readline():
            number, code, out, err = json.loads(line)
            if (waiting := self._calls.pop(number, None)) and not waiting.done():
                waiting.set_result(ExecResult(stdout=out, stderr=err, return_code=code))
        for waiting in self._calls.values():
            if not waiting.done():
                waiting.set_exception(RuntimeError("the sandbox has ended"))

    async def stop(self, delete: bool) -> None:
        if self._process is not None:
            if self._process.returncode is None:
                self._process.kill()  # and with it, its namespace
            await self._process.wait()
        if self._reader is not None:
            await self._reader
        await self._cleanup.aclose()
        shutil.rmtree(self._folder, ignore_errors=True)

    async def exec(
        self,
        command: str,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        timeout_sec: int | None = None,
        user: str | int | None = None,
    ) -> ExecResult:
        if (who := self._resolve_user(user)) not in (None, "root", 0, "0"):
            raise ValueError(f"bubblewrap has no user {who}, only root")
        if self._reader is None or self._reader.done():
            raise RuntimeError("the sandbox has ended")
        number = next(self._numbers)
        waiting = self._calls[number] = asyncio.get_running_loop().create_future()
        path = f"{self._tools}/bin:{SYSTEM_PATH}" if self._tools else SYSTEM_PATH
        call = {
            "id": number,
            "command": command,
            "cwd": cwd or self.task_env_config.workdir or self._workdir,
            "env": {"PATH": path, "HOME": "/root", "LANG": "C.UTF-8"}
            | self._image_env
            | (self._merge_env(env) or {}),
            "limit": timeout_sec,
        }
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(call).encode() + b"\n")
        await self._process.stdin.drain()
        result: ExecResult = await waiting
        return result

    async def _checked(self, command: str, cwd: str | None = None) -> str:
        result = await self.exec(command, cwd, user="root")
        if result.return_code != 0:
            raise RuntimeError(f"{command} failed in the sandbox: {result.stderr}")
        return result.stdout or ""

    # Files pass as archives that are packed and unpacked inside: a link that the
    # agent has made leads to nothing of this machine.

    async def _upload(self, source: Path, folder: str, name: str) -> None:
        archive = self._folder / "uploads" / f"upload-{next(self._numbers)}.tar"
        with tarfile.open(archive, "w") as tar:
            tar.add(source, name)
        place = shlex.quote(folder)
        unpack = f"tar -xf /uploads/{archive.name} --no-same-owner -C {place}"
        await self._checked(f"mkdir -p {place} && {unpack}", "/")

    async def upload_file(self, source_path: Path | str, target_path: str) -> None:
        target = Path(target_path)
        await self._upload(Path(source_path), str(target.parent), target.name)

    async def upload_dir(self, source_dir: Path | str, target_dir: str) -> None:
        await self._upload(Path(source_dir), target_dir, ".")

    async def _download(self, folder: str, name: str, target: Path) -> None:
        pack = f"tar -cf - -C {shlex.quote(folder)} {shlex.quote(name)} | base64 -w0"
        packed = base64.b64decode(await self._checked(f"set -o pipefail; {pack}", "/"))
        with tarfile.open(fileobj=io.BytesIO(packed)) as tar:
            tar.extractall(target, filter="data")

    async def download_file(self, source_path: str, target_path: Path | str) -> None:
        source = Path(source_path)
        with tempfile.TemporaryDirectory() as folder:
            await self._download(str(source.parent), source.name, Path(folder))
            shutil.copy(Path(folder, source.name), target_path, follow_symlinks=False)

    async def download_dir(self, source_dir: str, target_dir: Path | str) -> None:
        await self._download(source_dir, ".", Path(target_dir))
