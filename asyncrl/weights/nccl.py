"""transport: nccl. One broadcast of all weights to all workers of all engines.

The trainer copies each version on its device, in the dtype of an export, into buffers of
weight_sync.chunk_bytes that are made once (export): all weights once more is the memory it takes, and
training goes on with the originals. When every engine waits for it (asyncrl/engines/broadcast.py), rank
0 sends the buffers (send); each receiver takes one after the other and compares the digest of what came: an
embedded engine (servers/asyncrl_servers/embedded/loaded_weights.py), or each worker of a vLLM
(servers/asyncrl_servers/vllm/worker_extension.py).

On CUDA devices the group of processes is NCCL's, on the CPU gloo's; they differ in _connect, _wait and close.
A thread of torch works in the device's default stream until it is given another one. Sent from there, a
buffer would wait for every kernel that training has begun, and what training begins next for the slowest
engine. So a group has a stream of its own, which waits for the event of the buffers' fill, and for nothing
else.

Why not vLLM's own helpers (nccl_common.trainer_init and PyNcclCommunicator): their processes meet in a TCP
store whose content they unpickle, which any program that reaches the port may write; the trainer would have
to import vLLM; and nothing in them ends a wait for a process that has died. Here nothing is pickled, every
wait has an end, and on one machine they meet in a file of a folder that is ours alone. On several nodes they
meet in a TCP store, too, which rank 0 opens at its node's address. Neither that nor gloo nor NCCL asks who
comes: a program that reaches their ports can read and change weights.
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
from typing import Any, TypeVar

import psutil
import torch
import torch.distributed as dist
from torch import Tensor

from asyncrl.errors import ConfigError
from asyncrl.messages.base import BroadcastRequest, BroadcastResponse, GroupSeat, SentChunk, SentWeights
from asyncrl.messages.calls import ExportResponse
from asyncrl.serving import Refused
from asyncrl.weights.export import (
    LazyWeights,
    chunks_of,
    entries_of,
    gather_along,
    gathered,
    manifest_of,
)
from asyncrl.weights.ipc import copy_placed, lay_out, views
from asyncrl.weights.transport import Exported, TrainerEnd, Transport, done, only_gathered

T = TypeVar("T")
SENDER = 0
_LATE_S = 1.0
"""By how much more a thread of torch may take than its limit, so that its own words are told."""
_LOOK_S = 0.0005
"""How often an unfinished NCCL call is looked at."""
OPEN_PORTS = "let the nodes of the run reach each other at every TCP port of their own network"


class BroadcastTransport(Transport):
    """The trainer's end: the copy of one version, and its way to the engines.

    Life: empty -> export(): rank 0 holds a version -> send() it, any number of times -> export() the next,
        over it.
    Waits: export for a send that is under way, and the other way round; send for every member of its group,
        as long as a seat says.
    Invariant: what is sent is what was held, whole: they exclude each other. A group that broke is never used
        again.
    """

    def __init__(self, end: TrainerEnd, cuda: Any = None) -> None:
        """`cuda`: what has streams and events, torch.cuda unless it is given; on the CPU there is none.
        Raises ConfigError where no store can be opened.
        """
        super().__init__(end)
        self._store = _open_store(end.store) if end.store and end.is_first else None
        """Where groups of several nodes meet: it is there as long as this object is."""
        self._cuda = cuda or _cuda_of(end.device)
        self._filled: Any = None
        """The event after which the buffers hold what was exported last."""
        self._digest = ""
        self._chunks: list[SentChunk] = []
        self._buffers: list[Tensor] = []
        self._group: WeightGroup | None = None
        self._in_use = threading.Lock()

    def begin(self, exported: Exported, path: Path) -> Future[ExportResponse]:
        """The copy is made when this returns."""
        return done(self.export(exported, path))

    def export(self, exported: Exported, path: Path) -> ExportResponse:
        """Copy the weights over what was held, gathering what is sharded; where evaluation wants a file,
        write it too. Raises OSError, or RuntimeError if there is no memory for the copy.
        """
        end, version = self.end, exported.version
        written = self._begin_file(exported, path).result().path if end.is_file_wanted else ""
        weights = exported.merged()
        if not end.is_first:
            gather_along(weights, end.dtype)
            return only_gathered(version)
        with self._in_use, gathered(weights, end.dtype, end.device) as tensors:
            self.version = -1
            if not self._chunks:
                self._make_buffers(weights)
            digests: dict[str, bytes] = {}
            for chunk, buffer in zip(self._chunks, self._buffers, strict=True):
                digests |= copy_placed(chunk.tensors, buffer, tensors)
            if self._cuda is not None:
                self._filled = self._cuda.Event()
                self._filled.record()
            answer = manifest_of(weights, end.dtype, version, digests, "")
            self._digest, self.version = answer.digest, version
        return answer.model_copy(update={"path": written})

    def send(self, request: BroadcastRequest) -> BroadcastResponse:
        """To all members of the group; in a thread of its own. Raises Refused."""
        seat = request.seat
        with self._in_use:
            if self.version != request.version:
                what = f"policy_version {request.version} is to be sent, and what is held is version "
                raise Refused(409, f"{what}{self.version}", rule="the newest export alone is held")
            try:
                if self._group is None or self._group.path != seat.path:
                    self._leave()
                    self._group = WeightGroup(seat, self.end.device, self._cuda)
                sent_weights = SentWeights(version=self.version, chunks=self._chunks)
                self._group.send(sent_weights, self._buffers, self._filled)
            except GroupBroken as broken:
                self._leave()
                what = f"policy_version {request.version} was not sent: {broken}"
                rule = "weights are sent once, to all workers of all engines"
                way_out = "read the logs of the engines; they are sent anew once those were started again."
                raise Refused(409, what, rule=rule, way_out=way_out) from broken
            sent = sum(chunk.num_bytes for chunk in self._chunks)
            return BroadcastResponse(version=self.version, digest=self._digest, num_bytes=sent)

    def _leave(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            group.close()

    def _make_buffers(self, weights: LazyWeights) -> None:
        for chunk in chunks_of(weights, self.end.dtype, self.end.chunk_bytes):
            placed, size = lay_out(entries_of(chunk, self.end.dtype))
            self._buffers.append(torch.zeros(size, dtype=torch.uint8, device=self.end.device))
            self._chunks.append(SentChunk(num_bytes=size, tensors=placed))


class GroupBroken(Exception):  # noqa: N818  what it is, not what went wrong
    """A member of the group is gone, late, or did something else. The group cannot be used any more."""


class WeightGroup:
    """One member of a group: this process.

    Life: joined, once all are there -> send, or receive, any number of times -> closed, by the first failure
        too.
    Waits: every call for the others, timeout_s at most; then the group is broken.
    Invariant: all members make the same calls in the same order: what is sent says its own shape first. On a
        CUDA device all of it is done in the group's own stream, whatever the caller's is.
    """

    def __init__(self, seat: GroupSeat, device: torch.device, cuda: Any = None) -> None:
        """Join. `cuda`: as a BroadcastTransport's. Raises GroupBroken."""
        self.path, self._device, self._timeout = seat.path, device, timedelta(seconds=seat.timeout_s)
        self._group: Any = None
        self._cuda = cuda or _cuda_of(device)
        # of high priority: its kernels are few and short, and engines stand still until they are done
        self._stream = None if self._cuda is None else self._cuda.Stream(device, priority=-1)
        try:
            # The limits of torch do not cover a store that is silent.
            connect = partial(_connect, seat, device, self._timeout)
            self._group = run_within(seat.timeout_s + _LATE_S, connect, name="join")
        except (RuntimeError, OSError, ConfigError) as error:  # a TimeoutError is an OSError
            where, way_out = (f" at {seat.store}", f"; {OPEN_PORTS}") if seat.store else ("", "")
            what = f"no group of {seat.size} processes{where} within {seat.timeout_s} s"
            why = str(error).partition("\n")[0] or "no answer"  # behind it are frames of torch
            raise GroupBroken(f"{what}: {why}{way_out}") from error

    def close(self) -> None:
        """Leave. Idempotent; the others notice at their next call."""
        group, self._group = self._group, None
        if group is not None and self._device.type == "cuda":
            group.abort()

    def send(self, weights: SentWeights, buffers: list[Tensor], filled: Any = None) -> None:
        """As the sender: what comes, then the buffers, which are whole after the event `filled`. Returns when
        all of it was sent. Raises GroupBroken.
        """
        text = bytearray(weights.model_dump_json().encode())
        with self._beside():
            head = torch.frombuffer(text, dtype=torch.uint8).to(self._device)
            if self._stream is not None and filled is not None:
                self._stream.wait_event(filled)
            for tensor in (torch.tensor([len(head)], device=self._device), head, *buffers):
                self._broadcast(tensor)

    def receive(self) -> Iterator[tuple[int, dict[str, Tensor]]]:
        """The version, and the tensors of one buffer after the other, each buffer in memory of its own, and
        whole when it is told. Raises GroupBroken.
        """
        with self._beside():
            length = torch.zeros(1, dtype=torch.int64, device=self._device)
            self._broadcast(length)
            head = torch.empty(int(length.item()), dtype=torch.uint8, device=self._device)
            self._broadcast(head)
            weights = SentWeights.model_validate_json(head.cpu().numpy().tobytes())
        for chunk in weights.chunks:
            # Memory of the caller's stream, which reads it, and may not have read yet what lay there before.
            buffer = torch.empty(chunk.num_bytes, dtype=torch.uint8, device=self._device)
            if self._stream is not None:
                self._stream.wait_stream(self._cuda.current_stream(self._device))
            with self._beside():
                self._broadcast(buffer)
            yield weights.version, views(chunk.tensors, buffer)

    def _beside(self) -> AbstractContextManager[Any]:
        """A context in which this thread works in the group's own stream. Never open over a yield."""
        return nullcontext() if self._stream is None else self._cuda.stream(self._stream)

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
        if self._cuda is None:
            return
        done, end = self._cuda.Event(), time.monotonic() + self._timeout.total_seconds()
        done.record()
        while not done.query():
            if time.monotonic() > end:
                raise RuntimeError(f"not done after {self._timeout.total_seconds()} s")
            time.sleep(_LOOK_S)


def _cuda_of(device: torch.device) -> Any:
    return torch.cuda if device.type == "cuda" else None


def _connect(seat: GroupSeat, device: torch.device, timeout: timedelta) -> Any:
    store, interfaces = _meet(seat, timeout)
    if device.type == "cuda":
        if device.index is not None:  # of this thread; a trainer's rank 0 has no number, and is on the first
            torch.cuda.set_device(device)
        nccl = dist.ProcessGroupNCCL.Options()
        nccl._timeout = 2 * timeout  # ours comes first
        nccl.is_high_priority_stream = True  # NCCL's kernels run in a stream of its own after ours
        # A group made here does not end the process when another member dies: training goes on.
        name = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
        before = os.environ.get(name)
        os.environ[name] = "0"
        try:
            group = dist.ProcessGroupNCCL(store, seat.rank, seat.size, nccl)
        finally:
            del os.environ[name]
            if before is not None:
                os.environ[name] = before
        # Else it connects in its first broadcast, which has no limit where a member is gone by then.
        index = torch.cuda.current_device() if device.index is None else device.index
        group.eager_connect_single_device(torch.device("cuda", index))
        return group
    gloo = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    make = dist.ProcessGroupGloo.create_device
    gloo._timeout, gloo._devices = timeout, [make(interface=name) for name in interfaces]
    return dist.ProcessGroupGloo(store, seat.rank, seat.size, gloo)


def _meet(seat: GroupSeat, timeout: timedelta) -> tuple[Any, list[str]]:
    """Where the members find each other, and the interfaces on which gloo listens. On several nodes those are
    of the address from which this node reaches the trainer's.
    """
    if not seat.store:
        store: Any = dist.FileStore(seat.path, seat.size)  # type: ignore[attr-defined]
        interfaces = ["lo"]
    else:
        host, _, port = seat.store.rpartition(":")
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as route:  # to which nothing is sent
            route.connect((host, int(port)))
            use_interface(route.getsockname()[0], is_apart=True)
        interfaces = os.environ["GLOO_SOCKET_IFNAME"].split(",")
        server = dist.TCPStore(host, int(port), timeout=timeout, wait_for_workers=False)  # type: ignore[attr-defined]
        store = dist.PrefixStore(seat.path, server)  # type: ignore[attr-defined]
    store.set_timeout(timeout)
    return store, interfaces


def _open_store(where: str) -> Any:
    """A store at ADDRESS:PORT that is open as long as the object is. Raises ConfigError."""
    host, _, port = where.rpartition(":")
    descriptor = listen_at(where, "there it opens the store in which trainer and engines meet")
    options: dict[str, Any] = {"is_master": True, "wait_for_workers": False, "master_listen_fd": descriptor}
    return dist.TCPStore(host, int(port), **options)  # type: ignore[attr-defined]


def listen_at(where: str, rule: str) -> int:
    """A descriptor for rank 0's store at ADDRESS:PORT, which closes it. Raises ConfigError."""
    host, _, port = where.rpartition(":")
    try:
        return socket.create_server((host, int(port))).detach()
    except OSError as error:
        what = f"rank 0 cannot listen at {where}: {error.strerror or error}"
        way_out = f"end what listens there (`ss -ltnp sport = :{port}`), or give another port."
        raise ConfigError(what, rule=rule, way_out=way_out) from error


def run_within(timeout_s: float, work: Callable[[], T], *, name: str) -> T:
    """What `work` returns, for calls of torch whose own limits do not hold: it runs in a thread, which the
    process leaves behind if it takes longer. Raises what it raises, and TimeoutError.
    """
    done: Future[T] = Future()

    def run() -> None:
        try:
            done.set_result(work())
        except Exception as error:  # the caller's
            done.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return done.result(timeout_s)


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
