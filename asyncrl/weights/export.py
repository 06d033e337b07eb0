"""Export of the trainer's weights: named, gathered, in the engines' dtype, whole or by chunks; the base class
of transports.

Exports use the checkpoint's names: stacked experts are gathered as one tensor and split on writing. A
chunk contains tensors, in export order, up to chunk_bytes, or one larger tensor. Any chunk may be
requested at any time, even from a restarted trainer.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeAlias, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from asyncrl.base.http import Refused
from asyncrl.messages.trainer_api import (
    BroadcastRequest,
    BroadcastResponse,
    ExportChunkResponse,
    ExportResponse,
)
from asyncrl.weights.tensor_files import (
    Digests,
    Pieces,
    digest_of_tensor,
    dtype_name,
    float32_names,
    joint_digest,
    pieces_of,
    weights_of,
    write_tensors,
)

Entries = list[tuple[str, str, list[int]]]
DType: TypeAlias = torch.dtype | None
Device: TypeAlias = str | torch.device


class LazyWeights(Mapping[str, Tensor]):
    """Weights by the model's names, some computed on access. `pieces`: tensors by checkpoint names."""

    def __init__(
        self,
        like: Mapping[str, Tensor],
        computed: Mapping[str, Callable[[], Tensor]] | None = None,
        pieces: Pieces | None = None,
    ) -> None:
        self.like, self._computed, self.pieces = dict(sorted(like.items())), computed or {}, pieces or {}

    def __getitem__(self, name: str) -> Tensor:
        compute = self._computed.get(name)
        return self.like[name] if compute is None else compute()

    def __iter__(self) -> Iterator[str]:
        return iter(self.like)

    def __len__(self) -> int:
        return len(self.like)

    @property
    def are_plain(self) -> bool:
        return not self._computed and not any(isinstance(one, DTensor) for one in self.like.values())

    def only(self, names: list[str]) -> LazyWeights:
        return LazyWeights({name: self.like[name] for name in names}, self._computed, self.pieces)


def named_weights(model: Any) -> dict[str, Tensor]:
    """Return weights_of(model), detached; a mesh of one rank gives the local tensor. An nn.Buffer keeps its
    dtype in exports.
    """
    found, kept = dict[str, Tensor](), float32_names(model)
    for name, tensor in weights_of(model).items():
        is_parameter = isinstance(tensor, nn.Parameter)
        here = whole_here(tensor.detach()) if is_parameter else tensor
        found[name] = here if is_parameter and name not in kept else nn.Buffer(here)
    return found


def whole_here(tensor: Tensor) -> Tensor:
    is_one = isinstance(tensor, DTensor) and tensor.device_mesh.size() == 1
    return cast(DTensor, tensor).to_local() if is_one else tensor


def whole_tensors(
    weights: Mapping[str, Tensor], dtype: DType = None, device: Device = "cpu", *, on_all: bool = False
) -> Iterator[tuple[str, Tensor]]:
    """Yield each tensor (LazyWeights: its pieces) on `device`, contiguous, floats as `dtype`.

    Sharded tensors are gathered on rank 0 (`on_all`: everywhere); all ranks must iterate.
    """
    pieces = weights.pieces if isinstance(weights, LazyWeights) else {}
    for name, tensor in weights.items():
        target = _export_dtype(tensor, dtype)
        is_sharded = isinstance(tensor, DTensor)
        whole = _gathered(cast(DTensor, tensor.to(target)), on_all=on_all) if is_sharded else tensor
        if whole is not None:
            # cast before moving: to() with both would cast on the CPU
            moved = whole.detach().to(target).to(device).contiguous()
            yield from ((one, piece.contiguous()) for one, piece in pieces_of({name: moved}, pieces).items())


def _gathered(tensor: DTensor, *, on_all: bool = False) -> Tensor | None:
    """Return the whole tensor on rank 0 of its mesh, None elsewhere; or on all."""
    if tensor.device_mesh.size() == 1:
        return tensor.to_local()
    if on_all:
        return tensor.full_tensor()
    local, group, (placement, *others) = tensor.to_local(), tensor.device_mesh.get_group(0), tensor.placements
    is_first = tensor.device_mesh.get_rank() == 0
    if others or not placement.is_shard(0):
        whole = tensor.full_tensor()
        return whole if is_first else None
    size = tensor.device_mesh.size()
    num_rows = -(-len(tensor) // size)  # rows of each shard; the last ones are padded
    padded = local
    if len(local) < num_rows:
        padded = local.new_zeros(num_rows, *local.shape[1:])
        padded[: len(local)] = local
    filled = local.new_empty(size * num_rows, *local.shape[1:]) if is_first else None
    parts = None if filled is None else list(filled.view(size, num_rows, *local.shape[1:]).unbind())
    dist.gather(padded.contiguous(), parts, group=group, group_dst=0)
    return None if filled is None else filled[: len(tensor)]


@contextmanager
def gathered(
    weights: Mapping[str, Tensor], dtype: DType, device: Device = "cpu", *, on_all: bool = False
) -> Iterator[Iterator[tuple[str, Tensor]]]:
    """Exhaust whole_tensors even after an error, since other ranks gather too."""
    tensors = whole_tensors(weights, dtype, device, on_all=on_all)
    try:
        yield tensors
    finally:
        for _ in tensors:
            pass


def in_export_dtype(weights: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    return dict(whole_tensors(weights, dtype))


def gather_along(weights: Mapping[str, Tensor], dtype: torch.dtype | None) -> None:
    """Take part in the writing rank's gathering."""
    for tensor in weights.values():
        if isinstance(tensor, DTensor):
            _gathered(cast(DTensor, tensor.to(_export_dtype(tensor, dtype))))


def digest_of(weights: Mapping[str, Tensor]) -> str:
    """Return the digest of all tensors; of sharded weights on rank 0 only."""
    digests = Digests()
    for name, tensor in whole_tensors(weights):
        digests.add(name, tensor)
    return joint_digest(digests.finish().values())


def export_weights(
    weights: Mapping[str, Tensor], path: Path, version: int, dtype: torch.dtype | None = None
) -> ExportResponse:
    """Write a safetensors file atomically. Raises OSError."""
    weights = weights if isinstance(weights, LazyWeights) else LazyWeights(weights)
    unfinished = path.with_name(path.name + ".unfinished")
    entries = entries_of(weights, dtype)
    try:
        with gathered(weights, dtype) as tensors, unfinished.open("wb") as file:
            digests = write_tensors(file, entries, tensors)
        assert len(digests) == len(entries), f"{len(digests)} of {len(entries)} tensors were gathered"
        unfinished.rename(path)
    finally:
        unfinished.unlink(missing_ok=True)
    return manifest_of(weights, dtype, version, digests, str(path))


def begin_export(
    writer: ThreadPoolExecutor, weights: LazyWeights, path: Path, version: int, dtype: torch.dtype
) -> Future[ExportResponse]:
    """Run export_weights on the thread of `writer`, or here if weights must be gathered.

    Whole local weights must not change before the Future ends.
    """
    if not weights.are_plain:
        return done(version, export_weights(weights, path, version, dtype))
    reading = after_what_was_begun(next((one.device for one in weights.like.values()), None))

    def read_and_write() -> ExportResponse:
        with reading:
            return export_weights(weights, path, version, dtype)

    return writer.submit(read_and_write)


def after_what_was_begun(device: torch.device | None) -> AbstractContextManager[Any]:
    """Return a context in which another thread reads a CUDA device's tensors as of now."""
    if device is None or device.type != "cuda":
        return nullcontext()
    index = torch.cuda.current_device() if device.index is None else device.index
    stream = torch.cuda.Stream(index)  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream(index))
    return _beside(index, stream)


@contextmanager
def _beside(index: int, stream: Any) -> Iterator[None]:
    # New threads use the first device. A stream context would return to it and create a CUDA context there,
    # half a GB per rank; a device context returns only to existing contexts.
    with torch.cuda.device(index), torch.cuda.stream(stream):
        yield


def manifest_of(
    weights: LazyWeights, dtype: torch.dtype | None, version: int, digests: Mapping[str, bytes], path: str
) -> ExportResponse:
    """Return the export's description; path '': the trainer holds it."""
    return ExportResponse(
        version=version,
        path=path,
        digest=joint_digest(digests.values()),
        num_tensors=len(digests),
        num_bytes=sum(sizes_of(weights, dtype).values()),
        is_held=not path,
    )


def _export_dtype(tensor: Tensor, dtype: torch.dtype | None) -> torch.dtype:
    is_cast = tensor.is_floating_point() and not isinstance(tensor, nn.Buffer)
    return dtype if is_cast and dtype is not None else tensor.dtype


def entries_of(weights: LazyWeights, dtype: torch.dtype | None) -> Entries:
    return [
        (piece, dtype_name(_export_dtype(tensor, dtype)), list(tensor.shape if cut is None else cut.shape))
        for name, tensor in weights.like.items()
        for piece, cut in weights.pieces.get(name, {name: None}).items()
    ]


def sizes_of(weights: LazyWeights, dtype: torch.dtype | None) -> dict[str, int]:
    return {
        name: tensor.numel() * _export_dtype(tensor, dtype).itemsize for name, tensor in weights.like.items()
    }


class ChunkPlace(Protocol):
    """Destination of chunks: ChunkFile, or SharedChunk of ipc.py.

    `device`: required device of tensors. `on_all`: each rank writes to its own place. put overwrites the
    place and returns digests; it raises OSError. `told()` returns fields of an ExportChunkResponse.
    """

    device: torch.device
    on_all: bool

    def put(self, entries: Entries, tensors: Iterator[tuple[str, Tensor]]) -> dict[str, bytes]: ...
    def told(self) -> dict[str, Any]: ...


class Chunks:
    """Chunks of a trainer's weights, version after version. All ranks make the same calls."""

    def __init__(self, place: ChunkPlace, like: LazyWeights, chunk_bytes: int, dtype: torch.dtype) -> None:
        self._place = place
        self._chunks = cut(sizes_of(like, dtype), chunk_bytes)
        self._dtype = dtype
        self.forget()

    def forget(self) -> None:
        self._version = -1
        self._gathered: set[str] = set()
        self._digests: dict[str, bytes] = {}

    def check(self, version: int, index: int) -> None:
        if index >= len(self._chunks):
            what = f"chunk {index} was asked for, and version {version} has {len(self._chunks)} of them"
            raise Refused(422, what, rule="chunks are numbered from 0 to the one with is_last")

    def is_last(self, index: int) -> bool:
        return index + 1 == len(self._chunks)

    def write(
        self, weights: LazyWeights, version: int, index: int, *, is_first: bool = True
    ) -> ExportChunkResponse | None:
        """Write the chunk over the previous one; before the last chunk also hash tensors without a digest.
        Return None on other ranks, which only gather or write to their own place. Raises OSError.
        """
        if version != self._version:
            self.forget()
            self._version = version
        names, is_last = self._chunks[index], self.is_last(index)
        before = itertools.chain(*self._chunks[:index]) if is_last else ()
        gathering = weights.only([*(name for name in before if name not in self._gathered), *names])
        self._gathered.update(gathering)
        if not (is_first or self._place.on_all):
            gather_along(gathering, self._dtype)
            return None
        chunk = weights.only(names)
        entries = entries_of(chunk, self._dtype)
        num_before = len(entries_of(gathering, self._dtype)) - len(entries)
        with gathered(gathering, self._dtype, self._place.device, on_all=self._place.on_all) as tensors:
            for name, tensor in itertools.islice(tensors, num_before):
                self._digests[name] = digest_of_tensor(name, tensor)
            digests = self._place.put(entries, tensors)
        self._digests.update(digests)
        return ExportChunkResponse(
            version=version,
            index=index,
            **self._place.told(),
            digest=joint_digest(digests.values()),
            num_tensors=len(digests),
            num_bytes=sum(sizes_of(chunk, self._dtype).values()),
            is_last=is_last,
            whole_digest=joint_digest(self._digests.values()) if is_last else "",
        )


def chunks_of(weights: LazyWeights, dtype: torch.dtype, chunk_bytes: int) -> list[LazyWeights]:
    return [weights.only(names) for names in cut(sizes_of(weights, dtype), chunk_bytes)]


def cut(sizes: Mapping[str, int], chunk_bytes: int) -> list[list[str]]:
    """Return names by chunk: up to chunk_bytes, or one larger tensor."""
    chunks: list[list[str]] = []
    room = 0
    for name, size in sizes.items():
        if not chunks or size > room:
            chunks.append([])
            room = chunk_bytes
        chunks[-1].append(name)
        room -= size
    return chunks


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


def done(version: int, answer: ExportResponse | None = None) -> Future[ExportResponse]:
    """Return a finished export; without an answer, of a rank that only gathered."""
    future: Future[ExportResponse] = Future()
    none = ExportResponse(version=version, path="", digest="", num_tensors=0, num_bytes=0)
    future.set_result(none if answer is None else answer)
    return future


class Transport:
    """Trainer end of a transport, on every rank; all call begin() together.

    Transports shm, disk and stream: one safetensors file, which engines copy during generation and swap to.
    """

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
        return done(exported.version)

    def send(self, request: BroadcastRequest) -> BroadcastResponse:
        """Transport nccl. Raises Refused."""
        raise NotImplementedError
