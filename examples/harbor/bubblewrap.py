"""An environment of Harbor without containers: one bubblewrap sandbox per trial.

Its image is the root of this machine, read-only. Of a Dockerfile it honours FROM (any
image), WORKDIR, ENV and COPY, and refuses every other line. It has no network. Only
root exists, and no limit on CPU or processes: Harbor's time limits end a trial.
"""

from __future__ import annotations

import asyncio
import base64
import io
import itertools
import json
import os
import shlex
import shutil
import tarfile
import tempfile
from pathlib import Path
from typing import Any

from harbor.environments.base import BaseEnvironment, ExecResult
from harbor.environments.capabilities import EnvironmentCapabilities

PYTHON = "/usr/bin/python3"
WRITABLE = ("app", "tmp", "logs", "tests", "solution", "root", "run")
MAX_LINE_BYTES = 2**28
KEPT_ENV = ("PATH", "ASYNCRL_COMMAND")  # the second marks a command for its worker

# Inside: runs each command of its input, at the same time, in the one sandbox, so that
# what a command leaves running (tmux) is there for the next.
_SERVER = """
import json, os, resource, signal, subprocess, sys, tempfile, threading
limit = int(sys.argv[1])
resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
lock = threading.Lock()
def run(call):
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
        texts = []
        for file in (out, err):
            file.seek(0)
            texts.append(file.read().decode(errors="replace"))
    with lock:
        print(json.dumps([call["id"], code, *texts]), flush=True)
print("[-1, 0, null, null]", flush=True)
for line in sys.stdin:
    threading.Thread(target=run, args=(json.loads(line),), daemon=True).start()
"""


class BubblewrapEnvironment(BaseEnvironment):
    """Invariant: after stop(), no process or folder of the sandbox remains."""

    @staticmethod
    def type() -> str:
        return "bubblewrap"

    @property
    def capabilities(self) -> EnvironmentCapabilities:
        return EnvironmentCapabilities(disable_internet=True)

    def _validate_definition(self) -> None:
        """Raises ValueError for what a sandbox without an image cannot do."""
        self._process: asyncio.subprocess.Process | None = None
        self._folder = self.trial_paths.trial_dir / "sandbox"
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
        max_bytes = (self._effective_memory_mb or 2048) * 2**20
        server = [PYTHON, "-I", "-S", "-c", _SERVER, str(max_bytes)]
        ready = self._calls[-1] = asyncio.get_running_loop().create_future()
        self._process = await asyncio.create_subprocess_exec(
            *["bwrap", *options, "--remount-ro", "/", "--", *server],
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=MAX_LINE_BYTES,
            # Commands can read what the sandbox has inherited: no key of the endpoint.
            env={name: os.environ[name] for name in KEPT_ENV if name in os.environ},
        )
        self._reader = asyncio.create_task(self._read())  # noqa: TID251  stop() waits for it
        await ready
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
            await self._reader
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
        number = next(self._numbers)
        waiting = self._calls[number] = asyncio.get_running_loop().create_future()
        path = "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin"
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
