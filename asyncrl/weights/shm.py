"""transport: shm or disk. All weights as one safetensors file, or chunk after chunk in one.

The trainer writes the file into its staging folder: in shared memory, or in weight_sync.disk_dir, which other
machines can read. Engines read, copy and hash it beside generation (prepare) and swap to the copy (commit).
In turns an engine that slept has room for one set of weights: the trainer writes each chunk over the one
before (ChunkFile), and the engine copies it straight into its weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from asyncrl.messages.trainer_calls import ExportResponse
from asyncrl.weights.chunk_export import Entries
from asyncrl.weights.tensor_files import write_tensors
from asyncrl.weights.transport import Exported, Transport


class FileTransport(Transport):
    """All weights in one file."""

    def export(self, exported: Exported, path: Path) -> ExportResponse:
        """Written by rank 0."""
        return self.write(exported, path)


class ChunkFile:
    """The place of chunks: a safetensors file, whose pages are used again."""

    def __init__(self, path: Path) -> None:
        self.path, self.device = path, torch.device("cpu")

    def put(self, entries: Entries, tensors: Iterator[tuple[str, Tensor]]) -> dict[str, bytes]:
        """The whole file."""
        with open(self.path, "r+b" if self.path.exists() else "w+b", buffering=0) as file:  # noqa: PTH123  its pages are used again
            digests = write_tensors(file, entries, tensors)
            file.truncate()
        return digests

    def told(self) -> dict[str, Any]:
        """Its path."""
        return {"path": str(self.path)}
