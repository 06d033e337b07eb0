"""Transport nccl: one broadcast of all weights to all workers of all engines.

The trainer copies each version into reusable device buffers (export), which takes the
memory of all weights once more. Once every engine waits (engines/broadcast.py), rank 0
sends them, and receivers check the digest. The group uses NCCL on CUDA and gloo on CPU,
in its own stream.

vLLM's helpers unpickle what any program writes into their TCP store, and their waits
never end. Here nothing is pickled and every wait is limited. Processes meet in a
private file, or across nodes in a TCP store of rank 0. That store, gloo and NCCL do not
authenticate: a program that reaches their ports can read and change weights.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import psutil
import torch
import torch.distributed as dist
from torch import Tensor

from asyncrl.base.errors import ConfigError
from asyncrl.base.http import Refused
from asyncrl.messages.engine_api import GroupMember, SentChunk, SentWeights
from asyncrl.messages.trainer_api import (
    BroadcastRequest,
    BroadcastResponse,
)
from asyncrl.weights import export as exports
from asyncrl.weights.ipc import copy_placed, lay_out, views
from asyncrl.weights.tensor_files import joint_digest

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

T = TypeVar("T")
_LATE_S = 1.0
"""Extra time of a torch thread, so that its own error is reported."""
_LOOK_S = 0.0005
OPEN_PORTS = "let the nodes of the run reach each other at every TCP port"


class BroadcastTransport(exports.HeldTransport):
    """Trainer end: copies a version and sends it.

    Life: empty -> begin() -> send(), any number of times -> begin() the next.
    Waits: begin and send for each other; send for every group member.
    Invariant: a held version is sent whole.
    """

    def __init__(self, end: exports.TrainerEnd) -> None:
        """Open the store of groups on several nodes. Raises OSError if it cannot."""
        super().__init__(end)
        self._store = serve_store(end.store) if end.store and end.is_first else None
        """Store for groups on several nodes."""
        self._filled: torch.cuda.Event | None = None
        """CUDA event: the buffers are filled."""
        self._digest = ""
        self._chunks: list[SentChunk] = []
        self._buffers: list[Tensor] = []
        self._group: WeightGroup | None = None
        self._in_use = threading.Lock()

    def _hold(
        self,
        version: int,
        weights: exports.LazyWeights,
        tensors: Iterator[tuple[str, Tensor]],
        folder: Path,
    ) -> exports.Put:
        with self._in_use:
            self.version = -1
            # Made once: the memory stays reserved, so that a later version cannot fail
            # for lack of it.
            if not self._chunks:
                self._make_buffers(weights)
            digests: dict[str, bytes] = {}
            for chunk, buffer in zip(self._chunks, self._buffers, strict=True):
                digests |= copy_placed(chunk.tensors, buffer, tensors)
            if self.end.device.type == "cuda":
                self._filled = torch.cuda.Event()  # type: ignore[no-untyped-call]
                # Copies are only queued. The event lets the group's stream wait for
                # them, without stopping the training stream.
                self._filled.record()
            self._digest = joint_digest(digests.values())
            self.version = version
        return digests, {}

    def send(self, request: BroadcastRequest) -> BroadcastResponse:
        """Send to all group members, in a separate thread. Raises Refused."""
        member = request.member
        with self._in_use:
            # The trainer has exported a newer version since the push began, or was
            # restarted and holds none.
            if self.version != request.version:
                what = f"policy_version {request.version} was asked for, the trainer holds {self.version}"
                raise Refused(409, what, rule="only the newest export is held")
            try:
                # The path names one set of members. A group never gains a member: other
                # engines mean another group.
                if self._group is None or self._group.path != member.path:
                    if self._group is not None:
                        self._group.close()
                    self._group = WeightGroup(member, self.end.device)
                sent_weights = SentWeights(version=self.version, chunks=self._chunks)
                self._group.send(sent_weights, self._buffers, self._filled)
            except GroupBroken as broken:
                self._group = None
                what = f"policy_version {request.version} was not sent: {broken}"
                way_out = "read the logs of the engines; the weights are sent again after a restart."
                raise Refused(409, what, way_out=way_out) from broken
            sent = sum(chunk.num_bytes for chunk in self._chunks)
            return BroadcastResponse(
                version=self.version, digest=self._digest, num_bytes=sent
            )

    def _make_buffers(self, weights: exports.LazyWeights) -> None:
        for chunk in exports.chunks_of(weights, self.end.dtype, self.end.chunk_bytes):
            placed, size = lay_out(exports.entries_of(chunk, self.end.dtype))
            self._buffers.append(
                torch.zeros(size, dtype=torch.uint8, device=self.end.device)
            )
            self._chunks.append(SentChunk(num_bytes=size, tensors=placed))


class GroupBroken(Exception):  # noqa: N818  a state of the group
    """A group member is gone, late, or out of order; the group is unusable."""


class WeightGroup:
    """Membership of this process in a group.

    Life: joined, once all are present -> send or receive, repeatedly -> closed, also by
        the first failure.
    Waits: every call waits for the others, at most timeout_s.
    Invariant: all members make the same calls in the same order, on CUDA in the group's
        stream.
    """

    def __init__(self, member: GroupMember, device: torch.device) -> None:
        """Join the group. Raises GroupBroken."""
        self.path = member.path
        self._device = device
        self._timeout = timedelta(seconds=member.timeout_s)
        self._group: Any = None
        self._stream: torch.cuda.Stream | None = None
        # high priority: few short kernels that engines wait for
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
        try:
            # torch's limits miss a silent store.
            connect = partial(_connect, member, device, self._timeout)
            self._group = run_within(member.timeout_s + _LATE_S, connect, name="join")
        except (RuntimeError, OSError, ConfigError) as error:
            where, way_out = (
                (f" at {member.store}", f"; {OPEN_PORTS}") if member.store else ("", "")
            )
            what = f"no group of {member.size} processes{where} within {member.timeout_s} s"
            why = str(error).partition("\n")[0] or "no answer"
            raise GroupBroken(f"{what}: {why}{way_out}") from error

    def close(self) -> None:
        """Leave the group. Idempotent; the others notice at their next call."""
        group = self._group
        self._group = None
        if group is not None and self._device.type == "cuda":
            # abort() also ends kernels that wait for a dead member; without it they
            # would occupy the device.
            group.abort()

    def send(
        self,
        weights: SentWeights,
        buffers: list[Tensor],
        filled: torch.cuda.Event | None = None,
    ) -> None:
        """Send the description, then the buffers after the event `filled`. Raises
        GroupBroken.
        """
        # Receivers know no sizes: first the length of the description, then the
        # description, then buffers that it describes.
        text = bytearray(weights.model_dump_json().encode())
        with self._in_stream():
            head = torch.frombuffer(text, dtype=torch.uint8).to(self._device)
            if self._stream is not None and filled is not None:
                self._stream.wait_event(filled)
            for tensor in (
                torch.tensor([len(head)], device=self._device),
                head,
                *buffers,
            ):
                self._broadcast(tensor)

    def receive(self) -> Iterator[tuple[int, dict[str, Tensor]]]:
        """Yield (version, tensors of a buffer), each complete and in separate memory.
        Raises GroupBroken.
        """
        with self._in_stream():
            length = torch.zeros(1, dtype=torch.int64, device=self._device)
            self._broadcast(length)
            head = torch.empty(
                int(length.item()), dtype=torch.uint8, device=self._device
            )
            self._broadcast(head)
            weights = SentWeights.model_validate_json(head.cpu().numpy().tobytes())
        for chunk in weights.chunks:
            # Memory of the caller's stream, which may still read its previous content.
            buffer = torch.empty(
                chunk.num_bytes, dtype=torch.uint8, device=self._device
            )
            if self._stream is not None:
                self._stream.wait_stream(torch.cuda.current_stream(self._device))
            with self._in_stream():
                self._broadcast(buffer)
            yield weights.version, views(chunk.tensors, buffer)

    def _in_stream(self) -> AbstractContextManager[object]:
        """Enter the group's stream in this thread. Never keep it open over a yield."""
        return (
            nullcontext() if self._stream is None else torch.cuda.stream(self._stream)
        )

    def _broadcast(self, tensor: Tensor) -> None:
        if self._group is None:
            raise GroupBroken("the group is closed")
        options = dist.BroadcastOptions()
        options.rootRank = 0
        options.rootTensor = 0
        options.timeout = self._timeout
        try:
            self._wait(self._group.broadcast([tensor], options))
        except RuntimeError as error:
            self.close()
            raise GroupBroken(
                f"a broadcast of {tensor.nbytes} bytes failed: {error}"
            ) from error

    def _wait(self, work: dist.Work) -> None:
        """Wait for a broadcast, on the device too. Raises RuntimeError."""
        work.wait(self._timeout)
        if self._stream is None:
            return
        end = time.monotonic() + self._timeout.total_seconds()
        # On CUDA work.wait() only orders streams and returns at once. Synchronizing
        # would have no limit, so the event is polled.
        done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        done.record()
        while not done.query():  # type: ignore[no-untyped-call]
            if time.monotonic() > end:
                raise RuntimeError(f"not done after {self._timeout.total_seconds()} s")
            time.sleep(_LOOK_S)


def _connect(member: GroupMember, device: torch.device, timeout: timedelta) -> Any:
    store, interfaces = _meet(member, timeout)
    if device.type == "cuda":
        if device.index is not None:
            torch.cuda.set_device(device)
        nccl = dist.ProcessGroupNCCL.Options()
        nccl._timeout = 2 * timeout  # our limit comes first
        # NCCL's kernels run in a separate stream after ours
        nccl.is_high_priority_stream = True
        # Without this, another member's death would end the process. Groups of the
        # trainer exist already.
        os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"
        group = dist.ProcessGroupNCCL(store, member.rank, member.size, nccl)
        # Otherwise it connects at its first broadcast, without limit if a member is
        # gone.
        index = torch.cuda.current_device() if device.index is None else device.index
        group.eager_connect_single_device(torch.device("cuda", index))
        return group
    gloo = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    make = dist.ProcessGroupGloo.create_device
    gloo._timeout = timeout
    gloo._devices = [make(interface=name) for name in interfaces]
    return dist.ProcessGroupGloo(store, member.rank, member.size, gloo)


def _meet(member: GroupMember, timeout: timedelta) -> tuple[Store, list[str]]:
    """Return the members' store and gloo's interfaces; on several nodes the route to
    the trainer.
    """
    if not member.store:
        store: Store = dist.FileStore(member.path, member.size)  # type: ignore[attr-defined]
        interfaces = ["lo"]
    else:
        host, _, port = member.store.rpartition(":")
        # Connecting a datagram socket sends nothing, but makes the kernel choose the
        # route and with it the local address.
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as route:
            route.connect((host, int(port)))
            use_interface(route.getsockname()[0], is_apart=True)
        interfaces = os.environ["GLOO_SOCKET_IFNAME"].split(",")
        server = dist.TCPStore(host, int(port), timeout=timeout, wait_for_workers=False)  # type: ignore[attr-defined]
        store = dist.PrefixStore(member.path, server)  # type: ignore[attr-defined]
    store.set_timeout(timeout)
    return store, interfaces


def serve_store(
    where: str,
    world_size: int | None = None,
    timeout: timedelta = timedelta(minutes=5),
) -> Store:
    """Open a store at ADDRESS:PORT. Raises OSError."""
    host, _, port = where.rpartition(":")
    # Bound here: a port in use is an OSError at the start, and only this address is
    # served. torch's own server would listen on every interface; the store has no
    # secret.
    listener = socket.create_server((host, int(port)))
    return dist.TCPStore(  # type: ignore[attr-defined]
        host,
        int(port),
        world_size,
        is_master=True,
        timeout=timeout,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )


def run_within(timeout_s: float, work: Callable[[], T], *, name: str) -> T:
    """Run `work` in a thread with a time limit, since torch's limits are unreliable.
    Raises its errors, and TimeoutError.
    """
    done: Future[T] = Future()

    def run() -> None:
        try:
            done.set_result(work())
        except Exception as error:
            done.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return done.result(timeout_s)


def use_interface(address: str, *, is_apart: bool) -> None:
    """Make gloo (with `is_apart` also NCCL) listen on the interface of `address`,
    unless the environment sets one. Raises ConfigError.
    """
    if "GLOO_SOCKET_IFNAME" in os.environ:
        return
    named = {
        one.address: name.partition(":")[0]
        for name, ones in psutil.net_if_addrs().items()
        for one in ones
        if one.family == socket.AF_INET
    }
    if address not in named:
        what = f"no network interface here has {address}, the address of this rank"
        rule = f"ranks reach each other at IPv4 addresses of their nodes; here are {', '.join(sorted(named))}"
        raise ConfigError(
            what, rule=rule, way_out="give the trainer's nodes by such addresses."
        )
    os.environ["GLOO_SOCKET_IFNAME"] = named[address]
    if is_apart:
        os.environ.setdefault(
            "NCCL_SOCKET_IFNAME", f"={named[address]}"
        )  # exactly this name, no prefix match
