"""Process group of the trainer, on one node or several: commands of rank 0, sums and agreements.

Nothing is pickled here. With several nodes each rank needs rank 0's store port, and any port of each other
rank for gloo and NCCL. Nothing is encrypted or authenticated: a program that reaches these ports can read and
change weights and batches and run code, since torch.distributed.checkpoint unpickles messages of ranks. So
the ranks' addresses must be in a private network of the cluster. The store listens at one address, and gloo
and NCCL use one interface.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from asyncrl.base.errors import ConfigError
from asyncrl.base.message import ErrorBody
from asyncrl.base.serving import Refused
from asyncrl.trainer.trainer_client import RENDEZVOUS, TrainerSpec
from asyncrl.weights.nccl import OPEN_PORTS, listen_at, run_within, use_interface

T = TypeVar("T")
BEATS = 2


@dataclass(frozen=True)
class Command:
    name: str
    arguments: dict[str, Any]
    body: bytes


class Ranks:
    """Place of this process in the group. `mesh` is None without sharding.

    Life: join_ranks() -> rank 0 sends commands, the others wait for them -> the process ends.
    Waits: every call and FSDP collective waits at most trainer.timeout_s for the other ranks, wait_command
        twice that, during which rank 0 sends commands or heartbeats. So a rank that is cut off ends too.
    Invariant: all ranks make the same collective calls in the same order.
    """

    def __init__(
        self,
        rank: int = 0,
        size: int = 1,
        mesh: DeviceMesh | None = None,
        commands: dist.ProcessGroup | None = None,
        group: dist.ProcessGroup | None = None,
        timeout: timedelta | None = None,
    ) -> None:
        self.rank, self.size, self.mesh, self._commands, self.group = rank, size, mesh, commands, group
        self._timeout = timeout
        self.is_first = rank == 0

    def beside(self) -> Ranks:
        """Return the same ranks for another thread's calls. All ranks must call it together."""
        group = dist.new_group(backend="gloo", timeout=self._timeout) if self.size > 1 else None
        return Ranks(self.rank, self.size, group=group, timeout=self._timeout)

    def gather(self, value: Any) -> list[Any]:
        if self.size == 1:
            return [value]
        mine = _bytes_tensor(json.dumps(value).encode())
        lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        dist.all_gather(lengths, torch.tensor([len(mine)]), group=self.group)
        longest = int(max(lengths))
        texts = [torch.zeros(longest, dtype=torch.uint8) for _ in range(self.size)]
        dist.all_gather(texts, torch.nn.functional.pad(mine, (0, longest - len(mine))), group=self.group)
        return [json.loads(_to_bytes(text[:length])) for text, length in zip(texts, lengths, strict=True)]

    def agree(self, work: Callable[[], T]) -> T:
        """Run `work` and return its result. Raises Refused on all ranks if it does on one."""
        answer, failure = list[T](), None
        try:
            answer = [work()]
        except Refused as refused:
            failure = [refused.status, refused.body.model_dump()]
        for found in filter(None, self.gather(failure)):
            raise Refused(found[0], **found[1])
        return answer[0]

    def add_up(self, *arrays: npt.NDArray[np.float32]) -> None:
        for array in arrays if self.size > 1 else ():
            dist.all_reduce(torch.from_numpy(array))

    def send(self, command: Command) -> None:
        if self.size > 1:
            head = json.dumps({"name": command.name, "arguments": command.arguments}).encode()
            dist.broadcast(torch.tensor([len(head), len(command.body)]), 0, group=self._commands)
            dist.broadcast(_bytes_tensor(head + command.body), 0, group=self._commands)

    def beat(self) -> None:
        """Exchange a heartbeat with the waiting ranks, from rank 0 between commands."""
        dist.broadcast(torch.zeros(2, dtype=torch.int64), 0, group=self._commands)
        dist.all_reduce(torch.zeros(1), group=self._commands)

    def wait_command(self) -> Command:
        lengths = torch.zeros(2, dtype=torch.int64)
        dist.broadcast(lengths, 0, group=self._commands)
        while not lengths[0]:
            dist.all_reduce(torch.zeros(1), group=self._commands)  # a heartbeat
            dist.broadcast(lengths, 0, group=self._commands)
        head, body = lengths.tolist()
        text = torch.zeros(head + body, dtype=torch.uint8)
        dist.broadcast(text, 0, group=self._commands)
        return Command(**json.loads(_to_bytes(text[:head])), body=_to_bytes(text[head:]))


ALONE = Ranks()


@dataclass
class Rendezvous:
    """Meeting of the ranks, in a file or in a store of rank 0.

    Life: open() -> here() -> connected(). All raise ConfigError.
    Waits: at most spec.meet_s for all three. Longer torch waits continue in a thread that the process leaves
        behind.
    """

    spec: TrainerSpec
    _since_s: float = field(default_factory=time.monotonic)

    @property
    def _left(self) -> timedelta:
        return timedelta(seconds=max(self._since_s + self.spec.meet_s - time.monotonic(), 0.1))

    @property
    def _me(self) -> str:
        return f"rank {self.spec.rank} ({self.spec.address})"

    @property
    def _where(self) -> str:
        return self.spec.store or str(self.spec.staging_dir / RENDEZVOUS)

    def open(self) -> Any:
        """Return the store; with several nodes rank 0 opens it, at its address only."""
        spec, size = self.spec, self.spec.trainer.world_size
        if not spec.store:
            return dist.FileStore(self._where, size)  # type: ignore[attr-defined]
        host, _, port = spec.store.rpartition(":")
        options: dict[str, Any] = {"world_size": size, "wait_for_workers": False, "timeout": self._left}
        if spec.rank == 0:
            rule = "there it opens the store in which the trainer's ranks meet"
            options |= {"is_master": True, "master_listen_fd": listen_at(spec.store, rule)}
        what = f"{self._me} cannot reach rank 0 at {spec.store}"
        return self._in_time(what, lambda: dist.TCPStore(host, int(port), **options))  # type: ignore[attr-defined]

    def here(self, store: Any) -> None:
        keys = {f"here-{rank}": rank for rank in range(self.spec.trainer.world_size)}

        def wait() -> str:
            if store.add(f"here-{self.spec.rank}", 1) > 1:
                what = f"{self._me} is not the first of its number at {self._where}"
                rule = "new ranks of a trainer meet in a new place"
                raise ConfigError(what, rule=rule, way_out="end the processes of the trainer before.")
            try:
                store.wait([*keys], self._left)
            except dist.DistStoreError:
                return ", ".join(str(rank) for key, rank in keys.items() if not store.check([key]))
            return ""

        if missing := self._in_time(f"{self._me} has no answer of the store at {self._where}", wait):
            what = f"rank {missing} did not come to {self._where} within {self.spec.meet_s:g} s"
            rule = f"{self._me} and all others of trainer.world_size={len(keys)} meet there"
            raise ConfigError(what, rule=rule, way_out=f"read the log of rank {missing}; {OPEN_PORTS}.")

    def connected(self, connect: Callable[[], T]) -> T:
        return self._in_time(f"{self._me} has met the others, and cannot connect to each of them", connect)

    def _in_time(self, what: str, work: Callable[[], T]) -> T:
        """Enforce the limit: torch's limits miss silent servers and broken connections."""
        try:
            return run_within(self._left.total_seconds() + 1.0, work, name="rendezvous")
        except (RuntimeError, OSError) as error:  # includes TimeoutError
            why = str(error).partition("\n")[0] or "no answer"
            within = f"within {self.spec.meet_s:g} s: {why[:300]}"
            rule = f"the ranks of a trainer meet at {self._where}, then each connects to each"
            way_out = f"read the log of rank 0; {OPEN_PORTS}."
            raise ConfigError(f"{what} {within}", rule=rule, way_out=way_out) from error


def join_ranks(spec: TrainerSpec, device: torch.device, dtype: torch.dtype) -> Ranks:
    """Meet the other ranks. Raises ConfigError, also for trainer.cpu_offload without a GPU."""
    size, is_cuda = spec.trainer.world_size, device.type == "cuda"
    if spec.trainer.cpu_offload and not is_cuda:
        what = "trainer.cpu_offload=true, and the trainer runs on the CPU"
        raise ConfigError(what, way_out="set trainer.cpu_offload=false, or placement.trainer=0.")
    if not spec.trainer.is_sharded(device.type, str(dtype).removeprefix("torch.")):
        return ALONE
    ordinal = spec.rank if spec.local_rank is None else spec.local_rank
    if is_cuda:
        torch.cuda.set_device(ordinal)
    use_interface(spec.address, is_apart=bool(spec.store or spec.weights_store))
    meeting = Rendezvous(spec)
    store = meeting.open()
    meeting.here(store)
    timeout = timedelta(seconds=spec.trainer.timeout_s)
    backend = "cpu:gloo,cuda:nccl" if is_cuda else "gloo"

    def connect() -> Any:
        if is_cuda:
            torch.cuda.set_device(ordinal)  # for this thread
        dist.init_process_group(backend, store=store, rank=spec.rank, world_size=size, timeout=timeout)
        # Sending waits for receivers: rank 0 sends only to ranks that wait, or soon will.
        return dist.new_group(backend="gloo", timeout=timeout if spec.rank == 0 else 2 * timeout)

    commands = meeting.connected(connect)
    mesh = init_device_mesh(device.type, (size,))
    return Ranks(spec.rank, size, mesh, commands, timeout=timeout)


def loss_behind(error: Exception, spec: TrainerSpec) -> ErrorBody | None:
    """Return the error to report if a collective failed because a rank is gone, late or cut off, otherwise
    None.
    """
    if not isinstance(error, dist.DistError) and "/gloo/" not in str(error):
        return None
    why = re.sub(r"^\[[^]]*\] | This (error )?is typically.*", "", str(error).partition("\n")[0])
    return ErrorBody(
        error=f"rank {spec.rank} ({spec.address}) has lost the other ranks of the trainer: {why[:500]}",
        rule=f"trainer.timeout_s={spec.trainer.timeout_s:g} is how long one rank waits for another",
        way_out="read the logs of the other ranks, and check the network between their nodes.",
    )


def _bytes_tensor(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _to_bytes(tensor: Tensor) -> bytes:
    return tensor.numpy().tobytes()
