"""A group of processes of this machine in which one sends buffers to all others. Knows torch's process
groups; knows no model.

On CUDA devices it is NCCL's, on the CPU gloo's. They differ in _connect, _wait and close(); all else is the
same on both.

Why not vLLM's own helpers for this (nccl_common.trainer_init and PyNcclCommunicator): their processes meet in
a TCP store that whoever reaches the port may write to, and unpickle what they find there; the trainer would
have to import vLLM; and nothing in them ends a wait for a process that has died. Here they meet in a file of
a folder that is ours alone, nothing is pickled, and every wait has an end.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from asyncrl.messages.base import GroupSeat, SentChunk, SentWeights

SENDER = 0
_LOOK_S = 0.0005
"""How often an unfinished NCCL call is looked at."""


class GroupBroken(Exception):  # noqa: N818  what it is, not what went wrong
    """Somebody in the group is gone, late, or did something else. It cannot be used any more."""


class WeightGroup:
    """The seat of this process in one group.

    Life:       joined, once all are there -> send, or receive, any number of times -> closed, by the first
    failure too. Waits:      every call for the others, timeout_s at most; then the group is broken.
    Invariant:  all members make the same calls in the same order: what is sent says its own shape first.
    """

    def __init__(self, seat: GroupSeat, device: torch.device) -> None:
        """Join. Raises GroupBroken."""
        self.path, self._device, self._timeout = seat.path, device, timedelta(seconds=seat.timeout_s)
        self._group: Any = None
        try:
            self._group = _connect(seat, device, self._timeout)
        except (RuntimeError, OSError) as error:
            raise GroupBroken(
                f"no group of {seat.size} processes within {seat.timeout_s} s: {error}"
            ) from error

    def __repr__(self) -> str:
        return f"<WeightGroup {self.path} {'closed' if self._group is None else 'joined'}>"

    def close(self) -> None:
        """Leave. Idempotent; the others notice at their next call."""
        group, self._group = self._group, None
        if group is not None and self._device.type == "cuda":
            group.abort()

    def send(self, weights: SentWeights, buffers: list[Tensor]) -> None:
        """As the sender: what comes, then the buffers. Raises GroupBroken."""
        head = torch.frombuffer(bytearray(weights.model_dump_json().encode()), dtype=torch.uint8).to(
            self._device
        )
        self._broadcast(torch.tensor([len(head)], device=self._device))
        self._broadcast(head)
        for buffer in buffers:
            self._broadcast(buffer)

    def receive(self) -> Iterator[tuple[int, dict[str, Tensor]]]:
        """The version, and the tensors of one buffer after the other, each buffer in memory of its own.
        Raises GroupBroken.
        """
        length = torch.zeros(1, dtype=torch.int64, device=self._device)
        self._broadcast(length)
        head = torch.empty(int(length.item()), dtype=torch.uint8, device=self._device)
        self._broadcast(head)
        weights = SentWeights.model_validate_json(head.cpu().numpy().tobytes())
        for chunk in weights.chunks:
            buffer = torch.empty(chunk.num_bytes, dtype=torch.uint8, device=self._device)
            self._broadcast(buffer)
            yield weights.version, tensors_in(chunk, buffer)

    def _broadcast(self, tensor: Tensor) -> None:
        if self._group is None:
            raise GroupBroken("the group is closed")
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor, options.timeout = SENDER, 0, self._timeout
        try:
            self._wait(self._group.broadcast([tensor], options))
        except RuntimeError as error:
            self.close()
            raise GroupBroken(f"a broadcast of {tensor.nbytes} bytes failed: {error}") from error

    def _wait(self, work: Any) -> None:
        """Return when it is done, on the device too. Raises RuntimeError."""
        work.wait(self._timeout)
        if self._device.type != "cuda":
            return
        done, end = torch.cuda.Event(), time.monotonic() + self._timeout.total_seconds()  # type: ignore[no-untyped-call]
        done.record()
        while not done.query():  # type: ignore[no-untyped-call]
            if time.monotonic() > end:
                raise RuntimeError(f"not done after {self._timeout.total_seconds()} s")
            time.sleep(_LOOK_S)


def tensors_in(chunk: SentChunk, buffer: Tensor) -> dict[str, Tensor]:
    """Views of the buffer, by name."""
    found = {}
    for placed in chunk.tensors:
        dtype, shape = getattr(torch, placed.dtype), torch.Size(placed.shape)
        found[placed.name] = (
            buffer[placed.start : placed.start + shape.numel() * dtype.itemsize].view(dtype).view(shape)
        )
    return found


def _connect(seat: GroupSeat, device: torch.device, timeout: timedelta) -> Any:
    store = dist.FileStore(seat.path, seat.size)  # type: ignore[attr-defined]
    store.set_timeout(timeout)
    if device.type == "cuda":
        if device.index is not None:
            torch.cuda.set_device(
                device
            )  # of this thread; a trainer's rank 0 has no number, and is on the first
        nccl = dist.ProcessGroupNCCL.Options()
        nccl._timeout = 2 * timeout  # ours comes first
        with _without_watchdog():
            return dist.ProcessGroupNCCL(store, seat.rank, seat.size, nccl)
    gloo = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    gloo._timeout, gloo._devices = timeout, [dist.ProcessGroupGloo.create_device(interface="lo")]
    return dist.ProcessGroupGloo(store, seat.rank, seat.size, gloo)


@contextmanager
def _without_watchdog() -> Iterator[None]:
    """A group made here does not end the whole process when another member dies: a trainer goes on, with the
    next group.
    """
    name = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
    before = os.environ.get(name)
    os.environ[name] = "0"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
