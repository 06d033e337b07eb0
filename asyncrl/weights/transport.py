"""Trainer end of each weight_sync.transport.

shm, disk, stream: one safetensors file, which engines copy during generation (prepare) and swap to
(commit). Sleeping engines get chunks (export.py; ipc.py). lora: adapters.py. nccl: nccl.py.
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
    """`is_file_wanted`: for evaluation. `store`: ADDRESS:PORT of rank 0's store, for several nodes."""

    device: torch.device
    dtype: torch.dtype
    chunk_bytes: int
    is_first: bool = True
    is_file_wanted: bool = False
    store: str = ""


@dataclass(frozen=True, slots=True)
class Exported:
    """Weights of `version`: all with adapters merged, and only adapters. Calling `adapters` gathers them."""

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
    """Trainer end of a transport, on every rank; all call begin() together."""

    sends_chunks = True
    version = -1
    """-1: none."""

    def __init__(self, end: TrainerEnd) -> None:
        self.end = end
        self._writer = ThreadPoolExecutor(1, "export")

    def begin(self, exported: Exported, path: Path) -> Future[ExportResponse]:
        """Bring the weights to the engines; no weight may change before the Future ends. Raises OSError,
        here or in the Future.
        """
        return self._begin_file(exported, path)

    def _begin_file(self, exported: Exported, path: Path) -> Future[ExportResponse]:
        weights = exported.merged()
        if self.end.is_first:
            return begin_export(self._writer, weights, path, exported.version, self.end.dtype)
        gather_along(weights, self.end.dtype)
        return done(only_gathered(exported.version))

    def send(self, request: BroadcastRequest) -> BroadcastResponse:
        """Transport nccl. Raises Refused."""
        raise NotImplementedError
