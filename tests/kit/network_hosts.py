"""Hosts of a network on this one machine: network namespaces with veth pairs on a
bridge, each with its own /dev/shm and temporary folder. What runs on one sees its own
address, its own loopback and its own shared memory; all other files are shared, as on a
cluster's file system.

Needs root (CAP_NET_ADMIN, CAP_SYS_ADMIN) and iproute2; `reason_for_none` says why there
are none here.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

_networks = itertools.count()


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


@cache
def reason_for_none() -> str:
    """Why no hosts can be made here; '' if they can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None:
        return "there is no `ip` (Debian: iproute2)"
    try:
        with network(1) as hosts:
            hosts[0].run(["true"], check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        return f"this machine forbids network namespaces: {getattr(error, 'stderr', '') or error}"
    return ""


@dataclass(frozen=True)
class Host:
    """A namespace. `address`: the others reach it there."""

    name: str
    address: str
    folder: Path
    """Holds its /dev/shm and TMPDIR."""
    started: list[subprocess.Popen[Any]] = field(default_factory=list)

    def command(self, command: Sequence[str]) -> list[str]:
        """Return the command line that runs `command` on this host."""
        script = f'mount --bind {self.folder / "shm"} /dev/shm; exec "$@"'
        return [
            "ip",
            "netns",
            "exec",
            self.name,
            "sh",
            "-c",
            script,
            self.name,
            *command,
        ]

    def run(
        self, command: Sequence[str], **how: Any
    ) -> subprocess.CompletedProcess[Any]:
        """Call subprocess.run on this host."""
        return subprocess.run(
            self.command(command), **{"capture_output": True, "text": True, **how}
        )

    def start(
        self, command: Sequence[str], env: Mapping[str, str] | None = None, **how: Any
    ) -> subprocess.Popen[Any]:
        """Call subprocess.Popen on this host; the process ends with the network."""
        environ = {**os.environ, "TMPDIR": str(self.folder / "tmp"), **(env or {})}
        process = subprocess.Popen(
            self.command(command), env=environ, start_new_session=True, **how
        )
        self.started.append(process)
        return process

    def pids(self) -> list[int]:
        """All processes of this host."""
        listed = subprocess.run(
            ["ip", "netns", "pids", self.name],
            capture_output=True,
            text=True,
            check=False,
        )
        return [int(pid) for pid in listed.stdout.split()]

    def commands(self) -> list[str]:
        """Their command lines."""
        found = list[str]()
        for pid in self.pids():
            with contextlib.suppress(OSError):  # it has ended
                found.append(
                    Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
                )
        return found

    def kill(self) -> None:
        """Send SIGKILL to all of its processes until none exists."""
        while pids := self.pids():
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.01)

    def sent_bytes(self) -> int:
        """Return the bytes that it has sent so far."""
        return int(
            Path(f"/sys/class/net/{self.name}-w/statistics/rx_bytes").read_text()
        )


@contextlib.contextmanager
def network(num: int) -> Iterator[list[Host]]:
    """Yield hosts on one bridge; everything that runs on them is killed at the end."""
    tag = f"ar{os.getpid():x}{next(_networks):x}"
    second, third = 64 + os.getpid() // 250 % 64, os.getpid() % 250
    folder = Path(tempfile.mkdtemp(prefix="hosts-"))
    shm = Path(tempfile.mkdtemp(prefix="hosts-", dir="/dev/shm"))
    hosts = list[Host]()
    try:
        ip("link", "add", f"{tag}b", "type", "bridge")
        ip("link", "set", f"{tag}b", "up")
        for number in range(num):
            host = Host(
                f"{tag}{number}",
                f"10.{second}.{third}.{number + 1}",
                folder / str(number),
            )
            hosts.append(host)
            (host.folder / "tmp").mkdir(parents=True)
            (shm / str(number)).mkdir()
            (host.folder / "shm").symlink_to(shm / str(number))
            ip("netns", "add", host.name)
            ip(
                "link",
                "add",
                f"{host.name}-w",
                "type",
                "veth",
                "peer",
                "name",
                "eth0",
                "netns",
                host.name,
            )
            ip("link", "set", f"{host.name}-w", "master", f"{tag}b", "up")
            ip("-n", host.name, "addr", "add", f"{host.address}/24", "dev", "eth0")
            ip("-n", host.name, "link", "set", "eth0", "up")
            ip("-n", host.name, "link", "set", "lo", "up")
        yield hosts
    finally:
        for host in hosts:
            host.kill()
            for process in host.started:
                process.wait()
            subprocess.run(
                ["ip", "netns", "del", host.name], capture_output=True, check=False
            )
        subprocess.run(
            ["ip", "link", "del", f"{tag}b"], capture_output=True, check=False
        )
        shutil.rmtree(folder, ignore_errors=True)
        shutil.rmtree(shm, ignore_errors=True)
