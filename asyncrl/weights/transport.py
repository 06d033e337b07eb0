"""The trainer's end of each weight_sync.transport.

shm and disk: the trainer writes all weights as one safetensors file into its staging folder, in shared memory
or in weight_sync.disk_dir. Engines read, copy and hash it during generation (prepare) and swap to the copy
(commit). stream: the same, and each other node fetches the file into its shared memory. If the sides share
devices, an engine that slept has memory for one set of weights: they arrive chunk by chunk (export.py), with
ipc through memory that both sides map (ipc.py). lora: adapters.py. nccl: nccl.py. Requirements of a transport
on engine, placement and config are in asyncrl/config/weight_sync.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from asyncrl.messages.base import BroadcastRequest, BroadcastResponse, TransportName
from asyncrl.messages.calls import ExportResponse
from asyncrl.weights.export import LazyWeights, begin_export, gather_along


@dataclass(frozen=True, slots=True)
class TrainerEnd:
    """What a transport needs of the trainer. `is_file_wanted`: evaluation reads each export as a file.
    `store`: ADDRESS:PORT at which rank 0 opens where it meets engines of several nodes.
    """

    device: torch.device
    dtype: torch.dtype
    chunk_bytes: int
    is_first: bool = True
    is_file_wanted: bool = False
    store: str = ""


@dataclass(frozen=True, slots=True)
class Exported:
    """The weights of `version`: all of them, adapters merged, and the adapters alone, if there are any. To
    call `adapters` gathers them.
    """

    version: int
    merged: Callable[[], LazyWeights]
    adapters: Callable[[], Mapping[str, Tensor]] | None = None


def only_gathered(version: int) -> ExportResponse:
    """The answer of a rank that writes nothing."""
    return ExportResponse(version=version, path="", digest="", num_tensors=0, num_bytes=0)


def done(answer: ExportResponse) -> Future[ExportResponse]:
    """Of an export that is whole already."""
    future: Future[ExportResponse] = Future()
    future.set_result(answer)
    return future


class Transport:
    """The trainer's end of one way: this one writes a file. Made on every rank; begin() is called on all of
    them at once.
    """

    sends_chunks = True
    """Whether weights can go this way chunk by chunk."""
    version = -1
    """Version of the copy that is held to be sent; -1: none."""

    def __init__(self, end: TrainerEnd) -> None:
        self.end = end
        self._writer = ThreadPoolExecutor(1, "export")

    def begin(self, exported: Exported, path: Path) -> Future[ExportResponse]:
        """Bring the weights to where engines take them from, beside the next forward and backward pass: until
        the Future ends no weight may change. Rank 0 says what they are, while the other ranks gather along.
        This and the Future raise OSError.
        """
        return self._begin_file(exported, path)

    def _begin_file(self, exported: Exported, path: Path) -> Future[ExportResponse]:
        weights = exported.merged()
        if self.end.is_first:
            return begin_export(self._writer, weights, path, exported.version, self.end.dtype)
        gather_along(weights, self.end.dtype)
        return done(only_gathered(exported.version))

    def send(self, request: BroadcastRequest) -> BroadcastResponse:
        """Send the copy that is held: transport nccl. Raises Refused."""
        raise NotImplementedError


def make_transport(name: TransportName, end: TrainerEnd) -> Transport:
    """The one that weight_sync.transport names."""
    from asyncrl.weights.adapters import AdapterTransport
    from asyncrl.weights.nccl import BroadcastTransport

    ways: dict[TransportName, type[Transport]] = {
        "shm": Transport,
        "disk": Transport,
        "stream": Transport,
        "ipc": Transport,
        "lora": AdapterTransport,
        "nccl": BroadcastTransport,
    }
    return ways[name](end)
