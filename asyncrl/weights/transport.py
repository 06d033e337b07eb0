"""The ways of the weights from the trainer to the engines, by weight_sync.transport: the trainer's end, and
the table of all.

Each has a file that says its whole way: shm.py (and disk), adapters.py, nccl.py, ipc.py. What a transport
needs of engine, placement and config is in asyncrl/config/transports.py, which needs no torch; how vLLM
takes what comes, in asyncrl/engines/vllm/vllm_weights.py.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from asyncrl.http import Refused
from asyncrl.messages.base import BroadcastRequest, BroadcastResponse
from asyncrl.messages.trainer_calls import ExportResponse
from asyncrl.weights.export import LazyWeights, export_weights, gather_along


@dataclass(frozen=True, slots=True)
class TrainerEnd:
    """What a transport must know of the trainer. `is_file_wanted`: evaluation reads each export as a file."""

    device: torch.device
    dtype: torch.dtype
    chunk_bytes: int
    is_first: bool = True
    is_file_wanted: bool = False


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


class Transport:
    """The trainer's end of one way. Made on every rank; export() is called on all of them at once."""

    sends_chunks = True
    """Whether weights can go this way chunk by chunk."""
    version = -1
    """Of the copy that is held to be sent; -1: none."""

    def __init__(self, end: TrainerEnd) -> None:
        self.end = end

    def export(self, exported: Exported, path: Path) -> ExportResponse:
        """Bring the weights to where engines take them from; rank 0 says what they are. Raises OSError."""
        raise NotImplementedError

    def write(self, exported: Exported, path: Path) -> ExportResponse:
        """All weights into a file, by rank 0, while the other ranks gather along. Raises OSError."""
        weights = exported.merged()
        if self.end.is_first:
            return export_weights(weights, path, exported.version, self.end.dtype)
        gather_along(weights, self.end.dtype)
        return only_gathered(exported.version)

    def send(self, request: BroadcastRequest) -> BroadcastResponse:
        """Send the copy that is held. Raises Refused."""
        raise Refused(
            409,
            f"policy_version {request.version} is to be sent, and none are held",
            rule="weight_sync.transport=nccl holds them",
            way_out="POST /export.",
        )


_CLASSES = {
    "shm": "shm:FileTransport",
    "disk": "shm:FileTransport",
    "ipc": "shm:FileTransport",  # in turns; a whole file is for evaluation alone
    "lora": "adapters:AdapterTransport",
    "nccl": "nccl:BroadcastTransport",
}


def make_transport(name: str, end: TrainerEnd) -> Transport:
    """The one that weight_sync.transport names."""
    module, _, attribute = _CLASSES[name].partition(":")
    made: Transport = getattr(importlib.import_module(f"asyncrl.weights.{module}"), attribute)(end)
    return made
