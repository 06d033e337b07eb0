"""Sandboxes for the harness `command`: bubblewrap, or a container of podman.

A command in one sees a read-only system, its own folders, its own processes, and of the network one address:
the gateway's. The address is a door: the first program in the sandbox listens on the sandbox's own loopback,
hands that socket to the worker, and becomes the command; what connects there is forwarded to the gateway by
the worker, and nothing else of the network is in the sandbox.
"""

from __future__ import annotations

import logging
import os
import shlex
import shutil
import subprocess
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from asyncrl.agents.sandbox_door import DOOR_PORT
from asyncrl.config import GeneratorConfig
from asyncrl.errors import ConfigError, RolloutFailure

log = logging.getLogger(__name__)

ROOM, TEMP = "/rollout", "/tmp"
"""Working folder and temporary folder, as a command in a sandbox sees them."""
MAX_PROCESSES, MAX_FILES = 1024, 4096
TRY_S = 60.0
PLACES = {"HOME": ROOM, "TMPDIR": TEMP}
PODMAN_ENV = ("PATH", "HOME", "LANG", "XDG_RUNTIME_DIR", "DBUS_SESSION_BUS_ADDRESS", "CONTAINERS_CONF")
"""What podman itself reads."""
SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
SETTINGS = "alternatives ca-certificates group hosts ld.so.cache ld.so.conf ld.so.conf.d localtime".split()
SETTINGS += ["nsswitch.conf", "passwd", "pki", "ssl"]
"""What programs need of /etc; the rest of it may hold secrets."""

_FIRST = """
import os, resource, socket, sys
door, port, max_bytes, *command = sys.argv[1:]
listener = socket.create_server(("127.0.0.1", int(port)), backlog=64)
with socket.socket(fileno=int(door)) as out:
    socket.send_fds(out, [b"1"], [listener.fileno()])
listener.close()
if int(max_bytes):
    resource.setrlimit(resource.RLIMIT_DATA, (int(max_bytes),) * 2)
try:
    os.execvp(command[0], command)
except OSError as error:
    sys.exit(f"{command[0]} cannot be started in the sandbox: {error}")
"""
"""The first program in a sandbox."""

_AS_FD_3 = "import os, sys; os.dup2(int(sys.argv[1]), 3); os.execvp(sys.argv[2], sys.argv[2:])"


@dataclass(frozen=True)
class Sandbox(ABC):
    """A way to run a command apart from the rest. `paths` are read-only in it, `max_bytes` is the memory that
    a command may use (0: no limit). `is_watched`: not all of its limits are kept by the system, so that the
    harness has to look.
    """

    name: ClassVar[str]
    program: ClassVar[str]
    is_watched: ClassVar[bool]
    paths: tuple[str, ...]
    max_bytes: int = 0

    @abstractmethod
    def around(
        self, command: Sequence[str], environment: Mapping[str, str], folder: Path, door: int, mark: str
    ) -> tuple[list[str], dict[str, str]]:
        """What to start instead of `command`, and its environment. `folder` has `work`, `tmp` and `shm`;
        `door` is the file descriptor to hand the listening socket to.
        """

    @abstractmethod
    def trial(self) -> list[str]:
        """A command that fails where it cannot be had."""

    @abstractmethod
    def cleanup(self, mark: str) -> None:
        """End what killing the processes of a command does not."""


@dataclass(frozen=True)
class Bubblewrap(Sandbox):
    """Namespaces of its own for users, processes, the network and all else; the files of the system
    read-only; everything else of the disk is not there. The kernel limits the memory of each process; that of
    all together is looked at.
    """

    name = "bubblewrap"
    program = "bwrap"
    is_watched = True

    def around(
        self, command: Sequence[str], environment: Mapping[str, str], folder: Path, door: int, mark: str
    ) -> tuple[list[str], dict[str, str]]:
        binds = {ROOM: folder / "work", TEMP: folder / "tmp", "/dev/shm": folder / "shm"}
        paths = [sys.base_prefix, sys.prefix, *self.paths]
        parts = [self.program, *bubblewrap_options(binds, {path: path for path in paths}, ROOM), "--"]
        first = [os.path.realpath(sys.executable), "-I", "-S", "-c", _FIRST, str(door), str(DOOR_PORT)]
        return [*parts, *first, str(self.max_bytes), *command], {**environment, **PLACES}

    def trial(self) -> list[str]:
        return [self.program, "--unshare-all", "--ro-bind", "/", "/", "--proc", "/proc", "true"]

    def cleanup(self, mark: str) -> None:
        """Nothing: the processes in it end with the first, and that with bwrap."""


def bubblewrap_options(binds: Mapping[str, Path], shown: Mapping[str, str], folder: str) -> list[str]:
    """Options of bwrap for the system read-only and no network; by their place in the sandbox: `binds` can be
    written to, `shown` read. `folder` is the working one.
    """
    parts = ["--unshare-all", "--die-with-parent", "--new-session", "--cap-drop", "ALL"]
    for path in SYSTEM:
        if Path(path).is_symlink():
            parts += ["--symlink", str(Path(path).readlink()), path]
        elif Path(path).exists():
            parts += ["--ro-bind", path, path]
    for name in SETTINGS:
        parts += ["--ro-bind-try", f"/etc/{name}", f"/etc/{name}"]
    parts += ["--proc", "/proc", "--dev", "/dev"]
    for place, bound in binds.items():
        parts += ["--bind", str(bound), place]
    seen = list(SYSTEM)
    for place, source in shown.items():
        if not any(Path(place).is_relative_to(each) for each in seen):
            parts += ["--ro-bind", source, place]
            seen.append(place)
    # its own root and /dev are of memory, which is not to be filled
    return [*parts, "--remount-ro", "/dev", "--remount-ro", "/", "--chdir", folder]


@dataclass(frozen=True)
class Podman(Sandbox):
    """A container of `image`, which has a python3, without a network. Where its memory is too small, the
    kernel kills one of its processes.
    """

    name = "podman"
    program = "podman"
    is_watched = False
    image: str = ""

    def around(
        self, command: Sequence[str], environment: Mapping[str, str], folder: Path, door: int, mark: str
    ) -> tuple[list[str], dict[str, str]]:
        parts = [self.program, "run", "--rm", "--interactive", "--pull=never", f"--name={_container(mark)}"]
        parts += ["--network=none", "--read-only", "--cap-drop=all", "--security-opt=no-new-privileges"]
        parts += ["--cgroupns=private", f"--pids-limit={MAX_PROCESSES}", f"--ulimit=nofile={MAX_FILES}"]
        parts += [f"--ulimit=nproc={MAX_PROCESSES}"]
        if self.max_bytes:
            parts += [f"--memory={self.max_bytes}", f"--memory-swap={self.max_bytes}"]
        parts += [f"--volume={folder / 'work'}:{ROOM}", f"--volume={folder / 'tmp'}:{TEMP}"]
        parts += [f"--volume={path}:{path}:ro" for path in self.paths]
        ours = {name: os.environ[name] for name in PODMAN_ENV if name in os.environ}
        given = {name: value for name, value in environment.items() if name not in {*ours, *PLACES}}
        # the values are podman's own environment: arguments are public
        parts += [*(f"--env={name}" for name in given), *(f"--env={k}={v}" for k, v in PLACES.items())]
        parts += [f"--workdir={ROOM}", "--preserve-fds=1", self.image]
        first = ["python3", "-I", "-S", "-c", _FIRST, "3", str(DOOR_PORT), "0"]
        whole = [sys.executable, "-I", "-S", "-c", _AS_FD_3, str(door), *parts, *first, *command]
        return whole, {**given, **ours}

    def trial(self) -> list[str]:
        return [self.program, "image", "exists", self.image]

    def cleanup(self, mark: str) -> None:
        """Remove the container, which outlives the podman that started it."""
        remove = [self.program, "rm", "--force", "--ignore", "--time=0", _container(mark)]
        try:
            done = subprocess.run(remove, capture_output=True, text=True, timeout=TRY_S)
        except (OSError, subprocess.TimeoutExpired) as error:
            log.error("%s does not run: %s", shlex.join(remove), error)
        else:
            if done.returncode != 0:
                log.error("%s: %s", shlex.join(remove), done.stderr.strip())


def _container(mark: str) -> str:
    return f"asyncrl-{mark.rstrip('.')}"


def find_sandbox(config: GeneratorConfig, command: Sequence[str]) -> Sandbox | None:
    """The sandbox that generator.sandbox asks for, tried out; None for `none`. Files that `command` names are
    seen in it. Raises ConfigError if it cannot be had: no command is run without it.
    """
    if config.sandbox == "none":
        return None
    max_bytes = (config.max_memory_mb or 0) * 2**20
    files = [part for part in command if part.startswith("/") and is_file(part)]
    for path in config.sandbox_paths:
        if not Path(path).exists():
            raise ConfigError(f"generator.sandbox_paths has {path}, which does not exist")
    paths = tuple(dict.fromkeys([str(Path(path).absolute()) for path in config.sandbox_paths] + files))
    found: list[Sandbox] = [
        Bubblewrap(paths, max_bytes),
        Podman(paths, max_bytes, config.sandbox_image or ""),
    ]
    whys = []
    for sandbox in found:
        if config.sandbox in ("auto", sandbox.name):
            if (why := _why_not(sandbox)) is None:
                log.info("commands are run in the sandbox %s", sandbox.name)
                return sandbox
            whys.append(why)
    raise ConfigError(
        f"generator.sandbox={config.sandbox}: {'; '.join(whys)}",
        rule="no command is run without the sandbox that the config asks for",
        way_out="install bubblewrap (apt-get install bubblewrap), or podman and set generator.sandbox_image; "
        "or set generator.sandbox=none.",
    )


def is_file(text: str) -> bool:
    """Whether this argument of a command names a file; a whole script is no name."""
    try:
        return Path(text).is_file()
    except (OSError, ValueError):
        return False


def _why_not(sandbox: Sandbox) -> str | None:
    """Why it cannot be had here; None if it can."""
    if isinstance(sandbox, Podman) and not sandbox.image:
        return "podman needs an image, generator.sandbox_image"
    if shutil.which(sandbox.program) is None:
        return f"there is no program {sandbox.program} on PATH={os.environ.get('PATH', '')}"
    trial = sandbox.trial()
    try:
        done = subprocess.run(trial, capture_output=True, text=True, timeout=TRY_S, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{shlex.join(trial)} does not run: {error}"
    if done.returncode == 0:
        return None
    return f"{shlex.join(trial)} ends with code {done.returncode}: {done.stderr.strip()[:300]}"


def check_usage(sandbox: Sandbox, num_processes: int, num_bytes: int) -> None:
    """Raises RolloutFailure for a command that uses more than it may."""
    if num_processes > MAX_PROCESSES:
        raise RolloutFailure(f"the command has {num_processes} processes; {MAX_PROCESSES} is the limit")
    if sandbox.max_bytes and num_bytes > sandbox.max_bytes:
        what = f"the command uses {num_bytes / 2**20:.0f} MiB of memory; generator.max_memory_mb is"
        raise RolloutFailure(f"{what} {sandbox.max_bytes // 2**20}")
