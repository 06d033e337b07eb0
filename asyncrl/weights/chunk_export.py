"""Exports weights chunk by chunk into one place that is written over again and again.

A chunk is as many tensors, in the order of an export, as fit into chunk_bytes, or one that does not. A
request for the next chunk means that the one before is loaded: it is overwritten. Any chunk may be asked for
at any time: a trainer that was started again goes on where the lost one was. Each tensor is gathered, written
and forgotten: beside the place, which holds one chunk, that is the memory it takes.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from asyncrl.http import Refused
from asyncrl.messages.base import joint_digest
from asyncrl.messages.calls import ExportChunkResponse
from asyncrl.weights.export import LazyWeights, entries_of, gathered, sizes_of
from asyncrl.weights.tensor_files import digest_of_tensor, write_tensors

Entries = list[tuple[str, str, list[int]]]


class ChunkPlace(Protocol):
    """Where chunks are put: ChunkFile or ipc.SharedChunk. `device`: where tensors must be for it.

    put writes the tensors, which have names, dtypes and shapes of `entries`, over what was there, and returns
    their digests; it raises OSError. told: the fields of an ExportChunkResponse that say where the chunk is.
    """

    device: torch.device

    def put(self, entries: Entries, tensors: Iterator[tuple[str, Tensor]]) -> dict[str, bytes]: ...
    def told(self) -> dict[str, Any]: ...


class ChunkFile:
    """A safetensors file, whose pages are used again."""

    def __init__(self, path: Path) -> None:
        self.path, self.device = path, torch.device("cpu")

    def put(self, entries: Entries, tensors: Iterator[tuple[str, Tensor]]) -> dict[str, bytes]:
        with self.path.open("r+b" if self.path.exists() else "w+b", buffering=0) as file:
            digests = write_tensors(file, entries, tensors)
            file.truncate()
        return digests

    def told(self) -> dict[str, Any]:
        return {"path": str(self.path)}


class Chunks:
    """The chunks of one trainer's weights, version after version.

    Life: for each version: chunk after chunk; with the last one the digest of all, for which each tensor's is
        kept.
    """

    def __init__(self, place: ChunkPlace, chunk_bytes: int, dtype: torch.dtype) -> None:
        self._place, self.chunk_bytes, self._dtype = place, chunk_bytes, dtype
        self.forget()

    def forget(self) -> None:
        """The weights are others, under whatever version."""
        self._version = -1
        self._digests: dict[str, bytes] = {}

    def names(self, weights: LazyWeights, version: int, index: int) -> list[str]:
        """The tensors that all ranks gather for this chunk, in this order; with the last one, those that have
        no digest yet come first. Raises Refused.
        """
        if version != self._version:
            self._version, self._digests = version, {}
        chunks = self._cut(weights)
        if index >= len(chunks):
            what = f"chunk {index} was asked for, and version {version} has {len(chunks)} of them"
            raise Refused(422, what, rule="chunks are numbered from 0 to the one with is_last")
        before = [name for chunk in chunks[:index] for name in chunk if name not in self._digests]
        return (before if index + 1 == len(chunks) else []) + chunks[index]

    def is_last(self, weights: LazyWeights, index: int) -> bool:
        """Whether this chunk ends them."""
        return index + 1 == len(self._cut(weights))

    def write(self, weights: LazyWeights, index: int) -> ExportChunkResponse:
        """Write the chunk over the one before, gathering what names() said. Raises OSError."""
        chunks, names = self._cut(weights), self.names(weights, self._version, index)
        chunk = weights.only(chunks[index])
        with gathered(weights.only(names), self._dtype, self._place.device) as tensors:
            for name, tensor in itertools.islice(tensors, len(names) - len(chunk)):
                self._digests[name] = digest_of_tensor(name, tensor)
            digests = self._place.put(entries_of(chunk, self._dtype), tensors)
        self._digests.update(digests)
        is_last = index + 1 == len(chunks)
        return ExportChunkResponse(
            version=self._version,
            index=index,
            **self._place.told(),
            digest=joint_digest(digests.values()),
            num_tensors=len(chunk),
            num_bytes=sum(sizes_of(chunk, self._dtype).values()),
            is_last=is_last,
            whole_digest=joint_digest(self._digests.values()) if is_last else "",
        )

    def _cut(self, weights: LazyWeights) -> list[list[str]]:
        return cut(sizes_of(weights, self._dtype), self.chunk_bytes)


def cut(sizes: Mapping[str, int], chunk_bytes: int) -> list[list[str]]:
    """Names by chunk, in their order: as many as fit into chunk_bytes, or one that does not."""
    chunks: list[list[str]] = []
    room = 0
    for name, size in sizes.items():
        if not chunks or size > room:
            chunks.append([])
            room = chunk_bytes
        chunks[-1].append(name)
        room -= size
    return chunks
