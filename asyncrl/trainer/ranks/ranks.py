"""Process group of the trainer: commands of rank 0, sums and agreements.

Keep the ranks in a private network: their ports are neither encrypted nor
authenticated, and torch.distributed.checkpoint unpickles their messages.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn import functional

from asyncrl.base.errors import ConfigError
from asyncrl.base.http import Refused
from asyncrl.trainer.trainer_client import LOST_STATUS, RENDEZVOUS, TrainerSpec
from asyncrl.weights.nccl import OPEN_PORTS, run_within, serve_store, use_interface
from asyncrl.weights.tensor_files import dtype_name

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

T = TypeVar("T")
# Between two calls the other ranks wait in a broadcast, which has a timeout. A beat
# each half of trainer.timeout_s keeps them from it, and finds a dead rank before the
# next call does.
BEATS = 2
"""Heartbeats per trainer.timeout_s."""
NEVER = timedelta(days=365)


@dataclass(frozen=True)
class Ranks:
    """Place of this process in the group.

    `mesh`: its axis "shard" shards the weights (FSDP2); None without sharding. All ranks
    read other data.

    Waits: a collective waits at most trainer.timeout_s, wait_command twice that.
    Invariant: all ranks make the same collective calls in the same order.
    """

    rank: int = 0
    size: int = 1
    mesh: DeviceMesh | None = None
    commands: dist.ProcessGroup | None = None
    group: dist.ProcessGroup | None = None
    timeout: timedelta | None = None

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def with_own_group(self, timeout: timedelta | None = None) -> Ranks:
        """Return the same ranks for another thread, whose collectives wait at most
        `timeout` (None: as here). Collective.
        """
        if self.size == 1:
            return self
        # gloo, also on CUDA: tensors of this thread are in host memory, which NCCL
        # cannot send.
        group = dist.new_group(backend="gloo", timeout=timeout or self.timeout)
        return replace(
            self,
            mesh=None,
            commands=group,
            group=group,
        )

    def gather(self, value: T) -> list[T]:
        """Return the JSON values of all ranks, in their order. Collective."""
        if self.size == 1:
            return [value]
        # Not all_gather_object, which would unpickle what other hosts send.
        text = _bytes_tensor(json.dumps(value).encode())
        lengths = torch.zeros(self.size, dtype=torch.int64)
        dist.all_gather_into_tensor(lengths, torch.tensor([len(text)]), self.group)
        # all_gather needs tensors of one size.
        longest = int(lengths.max())
        padded = functional.pad(text, (0, longest - len(text)))
        texts = torch.zeros(self.size * longest, dtype=torch.uint8)
        dist.all_gather_into_tensor(texts, padded, self.group)
        rows = zip(texts.view(self.size, -1), lengths.tolist(), strict=True)
        return [json.loads(_to_bytes(row[:num_bytes])) for row, num_bytes in rows]

    def agree(self, work: Callable[[], T]) -> T:
        """Return the result of `work`. Raises Refused on all ranks if it does on one."""
        answers = list[T]()
        failure = None
        try:
            answers.append(work())
        except Refused as refused:
            failure = (refused.status, refused.body.model_dump())
        # Every rank gets here, also after a failure: a rank that raised at once would
        # leave the others in the collective.
        for refusal in self.gather(failure):
            if refusal is not None:
                status, body = refusal
                raise Refused(status, **body)
        return answers[0]

    def add_up(self, *arrays: npt.NDArray[np.float32]) -> None:
        """Replace each array by its sum over all ranks. Collective."""
        if self.size == 1:
            return
        for array in arrays:
            dist.all_reduce(torch.from_numpy(array), group=self.group)

    def send(self, name: str, body: bytes) -> None:
        """Send a command from rank 0 to the other ranks, which are in wait_command."""
        if self.size == 1:
            return
        head = name.encode()
        lengths = torch.tensor([len(head), len(body)])
        text = _bytes_tensor(head + body)
        dist.broadcast(lengths, 0, group=self.commands)
        dist.broadcast(text, 0, group=self.commands)

    def wait_command(self) -> tuple[str, bytes]:
        """Wait for a command of rank 0; return its name and body."""
        lengths = torch.zeros(2, dtype=torch.int64)
        dist.broadcast(lengths, 0, group=self.commands)
        len_head, len_body = lengths.tolist()
        text = torch.zeros(len_head + len_body, dtype=torch.uint8)
        dist.broadcast(text, 0, group=self.commands)
        name = _to_bytes(text[:len_head]).decode()
        return name, _to_bytes(text[len_head:])


ONE_RANK = Ranks()


def join_ranks(spec: TrainerSpec, device: torch.device, dtype: torch.dtype) -> Ranks:
    """Connect to the other ranks within spec.meet_s. Raises ConfigError."""
    size = spec.trainer.world_size
    is_cuda = device.type == "cuda"
    if not spec.trainer.is_sharded(device.type, dtype_name(dtype)):
        return ONE_RANK
    is_apart = bool(spec.store or spec.weights_store)
    use_interface(spec.address, is_apart=is_apart)
    timeout = timedelta(seconds=spec.trainer.timeout_s)

    def select_device() -> None:  # of the calling thread
        if is_cuda:
            torch.cuda.set_device(spec.local_rank)

    def connect(store: Store) -> dist.ProcessGroup:
        select_device()
        backend = "cpu:gloo,cuda:nccl" if is_cuda else "gloo"
        dist.init_process_group(
            backend,
            store=store,
            rank=spec.rank,
            world_size=size,
            timeout=timeout,
        )
        # Sending waits for receivers: rank 0 sends only to ranks that wait, or soon
        # will.
        wait = timeout if spec.rank == 0 else 2 * timeout
        commands: dist.ProcessGroup = dist.new_group(backend="gloo", timeout=wait)
        return commands

    select_device()
    commands = meet(spec, connect)
    mesh = init_device_mesh(device.type, (size,), mesh_dim_names=("shard",))
    return Ranks(
        spec.rank,
        size,
        mesh=mesh,
        commands=commands,
        timeout=timeout,
    )


def meet(spec: TrainerSpec, connect: Callable[[Store], T]) -> T:
    """Meet in a file, or in a store at rank 0's address. Raises ConfigError that names
    missing ranks.
    """
    where = spec.store or str(spec.staging_dir / RENDEZVOUS)
    deadline_s = time.monotonic() + spec.meet_s

    def join() -> T:
        store = _open_store(spec, where)
        # init_process_group() would only say that somebody is missing. The keys say
        # who.
        store.add(f"rank {spec.rank}", 1)
        for rank in range(spec.trainer.world_size):
            left_s = max(deadline_s - time.monotonic(), 0.1)
            store.wait([f"rank {rank}"], timedelta(seconds=left_s))
        return connect(store)

    try:
        # an abandonable thread: torch's limits miss silent servers and broken
        # connections
        return run_within(spec.meet_s + 1.0, join, name="rendezvous")
    except (RuntimeError, OSError) as error:  # includes TimeoutError
        first_line, _, _ = str(error).partition("\n")
        why = first_line[:300] or "no answer"
        raise ConfigError(
            f"rank {spec.rank} ({spec.address}) cannot meet the other ranks at {where} "
            f"within {spec.meet_s:g} s: {why}",
            way_out=f"read the log of rank 0; {OPEN_PORTS}.",
        ) from error


def _open_store(spec: TrainerSpec, where: str) -> Store:
    size = spec.trainer.world_size
    if not spec.store:
        return dist.FileStore(where, size)  # type: ignore[attr-defined]
    timeout = timedelta(seconds=spec.meet_s)
    if spec.rank == 0:
        return serve_store(where, world_size=size, timeout=timeout)
    host, _, port = where.rpartition(":")
    return dist.TCPStore(  # type: ignore[attr-defined]
        host,
        int(port),
        size,
        wait_for_workers=False,
        timeout=timeout,
    )


class BrokenStepError(RuntimeError):
    """A call that stopped half-way: models or ranks may differ by a step, so all start
    again from the checkpoint.
    """


def loss_behind(error: Exception, spec: TrainerSpec) -> Refused | None:
    """Return the refusal of a rank that has lost the others, or its own step; None if
    `error` has another cause.
    """
    if isinstance(error, BrokenStepError):
        return Refused(
            LOST_STATUS,
            str(error),
            rule="a call that stops half-way changes the trainer, which starts again from its checkpoint",
            way_out="free memory, or check the disk of the run directory.",
        )
    if not isinstance(error, dist.DistError) and "/gloo/" not in str(error):
        return None
    first_line, _, _ = str(error).partition("\n")
    # torch begins with the place in its source, and ends with a guess.
    why = re.sub(r"^\[[^]]*\] | This (error )?is typically.*", "", first_line)
    return Refused(
        LOST_STATUS,
        f"rank {spec.rank} ({spec.address}) has lost the other ranks of the trainer: {why[:500]}",
        rule=f"trainer.timeout_s={spec.trainer.timeout_s:g} is how long one rank waits for another",
        way_out="read the logs of the other ranks, and check the network between their nodes.",
    )


def _bytes_tensor(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _to_bytes(tensor: Tensor) -> bytes:
    return tensor.numpy().tobytes()
