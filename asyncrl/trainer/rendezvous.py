"""How the ranks of a trainer find each other: in a file, on one machine, or in a store that rank 0 opens.

With several nodes each rank needs two things of the network: the store's port of rank 0, and any port of each
other rank, at which gloo and NCCL listen. None of it is encrypted, and neither torch's TCPStore nor gloo nor
NCCL asks who comes: a program that reaches these ports can read and change weights and batches, and can have
a rank run code of its own, since torch.distributed.checkpoint unpickles what ranks send each other. So the
addresses of the ranks must lie in a network that is the cluster's alone. What can be done here is done: the
store listens at one address, and gloo and NCCL use one interface.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeVar

import psutil
import torch.distributed as dist

from asyncrl.errors import ConfigError
from asyncrl.trainer.trainer_client import RENDEZVOUS, TrainerSpec

T = TypeVar("T")
START_S = 240.0
"""How long a rank waits for the others to be there; less than its process is given to answer, so that the
rank says what it lacks.
"""
OPEN_PORTS = "let the trainer's nodes reach each other at every TCP port of their own network"


@dataclass
class Rendezvous:
    """One rank on its way into the group.

    Life: open() -> here() -> connected(). All raise ConfigError.
    Waits: START_S at most for all three together. What of torch goes on waiting past that does so in a
        thread that the process leaves behind at its end.
    """

    spec: TrainerSpec
    start_s: float = START_S
    _since_s: float = field(default_factory=time.monotonic)

    @property
    def _left(self) -> timedelta:
        return timedelta(seconds=max(self._since_s + self.start_s - time.monotonic(), 0.1))

    @property
    def _me(self) -> str:
        return f"rank {self.spec.rank} ({self.spec.address})"

    @property
    def _where(self) -> str:
        return self.spec.store or str(self.spec.staging_dir / RENDEZVOUS)

    def open(self) -> Any:
        """The store; with several nodes rank 0 opens it, at its address alone."""
        spec, size = self.spec, self.spec.trainer.world_size
        if not spec.store:
            return dist.FileStore(self._where, size)  # type: ignore[attr-defined]
        host, _, port = spec.store.rpartition(":")
        options: dict[str, Any] = {"world_size": size, "wait_for_workers": False, "timeout": self._left}
        if spec.rank == 0:
            options |= {"is_master": True, "master_listen_fd": self._listen(host, int(port))}
        what = f"{self._me} cannot reach rank 0 at {spec.store}"
        return self._in_time(what, lambda: dist.TCPStore(host, int(port), **options))  # type: ignore[attr-defined]

    def here(self, store: Any) -> None:
        """Return when all ranks are there."""
        keys = {f"here-{rank}": rank for rank in range(self.spec.trainer.world_size)}

        def wait() -> str:
            if store.add(f"here-{self.spec.rank}", 1) > 1:
                what = f"{self._me} is not the first of its number at {self._where}"
                rule = "new ranks of a trainer meet in a new place"
                raise ConfigError(
                    what, rule=rule, way_out="end the processes of the trainer before this one."
                )
            try:
                store.wait([*keys], self._left)
            except dist.DistStoreError:
                return ", ".join(str(rank) for key, rank in keys.items() if not store.check([key]))
            return ""

        if missing := self._in_time(f"{self._me} has no answer of the store at {self._where}", wait):
            what = f"rank {missing} did not come to {self._where} within {self.start_s:g} s"
            rule = f"{self._me} and all others of trainer.world_size={len(keys)} meet there"
            raise ConfigError(what, rule=rule, way_out=f"read the log of rank {missing}; {OPEN_PORTS}.")

    def connected(self, connect: Callable[[], T]) -> T:
        """What `connect` makes with the others: groups of processes."""
        return self._in_time(f"{self._me} has met the others, and cannot connect to each of them", connect)

    def _listen(self, host: str, port: int) -> int:
        """A descriptor, which the store closes."""
        try:
            return socket.create_server((host, port)).detach()
        except OSError as error:
            what = f"rank 0 cannot listen at {self.spec.store}: {error.strerror or error}"
            rule = "there it opens the store in which the trainer's ranks meet"
            way_out = (
                f"end what listens there (`ss -ltnp 'sport = {port}'`), or start the run again: it takes"
            )
            raise ConfigError(what, rule=rule, way_out=f"{way_out} another port.") from error

    def _in_time(self, what: str, work: Callable[[], T]) -> T:
        """The limits of torch do not cover a server that is silent, or a connection that breaks."""
        done: Future[T] = Future()

        def run() -> None:
            try:
                done.set_result(work())
            except (RuntimeError, OSError, ConfigError) as error:
                done.set_exception(error)

        threading.Thread(target=run, name="rendezvous", daemon=True).start()
        try:
            return done.result(self._left.total_seconds() + 1.0)
        except (RuntimeError, OSError) as error:  # a TimeoutError is one
            why = str(error).partition("\n")[0] or "no answer"
            within = f"within {self.start_s:g} s: {why[:300]}"
            rule = f"the ranks of a trainer meet at {self._where}, then each connects to each"
            way_out = f"read the log of rank 0; {OPEN_PORTS}."
            raise ConfigError(f"{what} {within}", rule=rule, way_out=way_out) from error


def interface_of(address: str) -> str:
    """The network interface that has this IPv4 address. Raises ConfigError."""
    found = {
        one.address: name.partition(":")[0]
        for name, ones in psutil.net_if_addrs().items()
        for one in ones
        if one.family == socket.AF_INET
    }
    if address in found:
        return found[address]
    what = f"no network interface here has {address}, the address of this rank"
    rule = f"ranks reach each other at IPv4 addresses of their nodes; here are {', '.join(sorted(found))}"
    raise ConfigError(what, rule=rule, way_out="give the trainer's nodes by such addresses.")


def use_interface(address: str, *, is_apart: bool) -> None:
    """Have gloo, and with several nodes (`is_apart`) NCCL, listen on the interface of `address`, unless the
    environment names another: no host name is looked up. Raises ConfigError.
    """
    if "GLOO_SOCKET_IFNAME" not in os.environ:
        os.environ["GLOO_SOCKET_IFNAME"] = interface_of(address)
    if is_apart and "NCCL_SOCKET_IFNAME" not in os.environ:
        os.environ["NCCL_SOCKET_IFNAME"] = f"={interface_of(address)}"  # this name, not all that begin so
