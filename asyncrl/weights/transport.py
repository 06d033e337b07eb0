"""Trainer end of each weight_sync.transport.

shm, disk, stream: the trainer writes all weights as one safetensors file, which engines read, copy and hash
during generation (prepare) and swap to (commit); with stream other nodes fetch it. With shared devices a
sleeping engine has memory for one set of weights, which arrive by chunks (export.py), with ipc through shared
memory (ipc.py). lora: adapters.py. nccl: nccl.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from asyncrl.messages.trainer_api import BroadcastRequest, BroadcastResponse, ExportResponse
from asyncrl.weights.export import LazyWeights, begin_export, gather_along


@dataclass(frozen=True, slots=True)
class TrainerEnd:
    """Trainer properties for a transport. `is_file_wanted`: evaluation reads each export as a file. `store`:
    ADDRESS:PORT of rank 0's store for engines on several nodes.
    """

    device: torch.device
    dtype: torch.dtype
    chunk_bytes: int
    is_first: bool = True
    is_file_wanted: bool = False
    store: str = ""


@dataclass(frozen=True, slots=True)
class Exported:
    """Weights of `version`: all of them, adapters merged, and only the adapters, if any. Calling `adapters`
    gathers them.
    """

    version: int
    merged: Callable[[], LazyWeights]
    adapters: Callable[[], Mapping[str, Tensor]] | None = None


def only_gathered(version: int) -> ExportResponse:
    return ExportResponse(version=version, path="", digest="", num_tensors=0, num_bytes=0)


def done(answer: ExportResponse) -> Future[ExportResponse]:
    future: Future[ExportResponse] = Future()
    future.set_result(answer)
    return future


class Transport:
    """Trainer end of a transport, writing a file. Constructed on every rank; all call begin() together."""

    sends_chunks = True
    version = -1
    """Version of the held copy; -1: none."""

    def __init__(self, end: TrainerEnd) -> None:
        self.end = end
        self._writer = ThreadPoolExecutor(1, "export")

    def begin(self, exported: Exported, path: Path) -> Future[ExportResponse]:
        """Bring the weights to the engines during the next forward and backward pass; no weight may change
        before the Future ends. Rank 0 describes them; the others gather. Raises OSError, here or in the
        Future.
        """
        return self._begin_file(exported, path)

    def _begin_file(self, exported: Exported, path: Path) -> Future[ExportResponse]:
        weights = exported.merged()
        if self.end.is_first:
            return begin_export(self._writer, weights, path, exported.version, self.end.dtype)
        gather_along(weights, self.end.dtype)
        return done(only_gathered(exported.version))

    def send(self, request: BroadcastRequest) -> BroadcastResponse:
        """Send the held copy: transport nccl. Raises Refused."""
        raise NotImplementedError
