"""Export of the trainer's weights: named, gathered, in the engines' dtype, whole or by
chunks; the base class of transports.

Exports use the checkpoint's names: stacked experts are gathered as one tensor and split
on writing. A chunk contains tensors, in export order, up to chunk_bytes, or one larger
tensor. Any chunk may be requested at any time, even from a restarted trainer.

A run with adapters exports only them: `<module>.lora_A.weight` [rank, in] and
`<module>.lora_B.weight` [out, rank]. Engines know their scale.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias, cast

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from asyncrl.messages.trainer_api import (
    BroadcastRequest,
    BroadcastResponse,
    ExportResponse,
)
from asyncrl.weights.tensor_files import (
    SUFFIXES,
    Pieces,
    adapted_modules,
    dtype_name,
    float32_names,
    joint_digest,
    pieces_of,
    weights_of,
    write_tensors,
)

Entries = list[tuple[str, str, list[int]]]
Put: TypeAlias = tuple[dict[str, bytes], dict[str, object]]
"""Digests, and fields of the response that say where the tensors are."""
DType: TypeAlias = torch.dtype | None
Device: TypeAlias = str | torch.device


class LazyWeights(Mapping[str, Tensor]):
    """Weights by the model's names, some computed on access. `pieces`: tensors by
    checkpoint names.
    """

    def __init__(
        self,
        like: Mapping[str, Tensor],
        computed: Mapping[str, Callable[[], Tensor]] | None = None,
        pieces: Pieces | None = None,
    ) -> None:
        self.like = dict(sorted(like.items()))
        self._computed = computed or {}
        self.pieces = pieces or {}

    def __getitem__(self, name: str) -> Tensor:
        compute = self._computed.get(name)
        return self.like[name] if compute is None else compute()

    def __iter__(self) -> Iterator[str]:
        return iter(self.like)

    def __len__(self) -> int:
        return len(self.like)

    @property
    def are_plain(self) -> bool:
        return not self._computed and not any(
            isinstance(one, DTensor) for one in self.like.values()
        )

    def only(self, names: list[str]) -> LazyWeights:
        return LazyWeights(
            {name: self.like[name] for name in names}, self._computed, self.pieces
        )


def named_weights(model: nn.Module) -> dict[str, Tensor]:
    """Return weights_of(model), detached; a mesh of one rank gives the local tensor. An
    nn.Buffer keeps its dtype in exports.

    nn.Buffer is only a mark here, which survives in the dict: _export_dtype() casts
    parameters and leaves buffers. So a float32 router stays float32 in a bfloat16
    export, as the engine's own model holds it.
    """
    found = dict[str, Tensor]()
    kept = float32_names(model)
    for name, tensor in weights_of(model).items():
        is_parameter = isinstance(tensor, nn.Parameter)
        here = local_if_whole(tensor.detach()) if is_parameter else tensor
        found[name] = here if is_parameter and name not in kept else nn.Buffer(here)
    return found


def local_if_whole(tensor: Tensor) -> Tensor:
    # With one rank the local tensor is the whole one. A DTensor would make `are_plain`
    # false, and the export would delay the next step.
    is_one = isinstance(tensor, DTensor) and tensor.device_mesh.size() == 1
    return cast(DTensor, tensor).to_local() if is_one else tensor


def whole_tensors(
    weights: Mapping[str, Tensor], dtype: DType = None, device: Device = "cpu"
) -> Iterator[tuple[str, Tensor]]:
    """Yield each tensor (LazyWeights: its pieces) on `device`, contiguous, floats as
    `dtype`.

    All ranks of sharded tensors must iterate, or call gather_along.
    """
    pieces = weights.pieces if isinstance(weights, LazyWeights) else {}
    # In sorted order (LazyWeights), because full_tensor() is a collective call: all
    # ranks must gather the same tensors in the same order.
    for name, tensor in weights.items():
        # Cast, gather, move: a cast to bfloat16 halves the bytes of the other two. to()
        # with both dtype and device would cast on the CPU.
        whole = (
            gathered_tensor(tensor.detach().to(_export_dtype(tensor, dtype)))
            .to(device)
            .contiguous()
        )
        yield from (
            (one, piece.contiguous())
            for one, piece in pieces_of({name: whole}, pieces).items()
        )


def gathered_tensor(tensor: Tensor) -> Tensor:
    """Return the whole tensor of a rank's shard. Collective."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


@contextmanager
def gathered(
    weights: Mapping[str, Tensor], dtype: DType, device: Device = "cpu"
) -> Iterator[Iterator[tuple[str, Tensor]]]:
    """Exhaust whole_tensors even after an error, since other ranks gather too."""
    tensors = whole_tensors(weights, dtype, device)
    try:
        yield tensors
    finally:
        # A rank that stops early leaves the others in their next collective call until
        # its time limit.
        for _ in tensors:
            pass


def gather_along(weights: Mapping[str, Tensor], dtype: torch.dtype | None) -> None:
    """Take part in the writing rank's gathering."""
    for tensor in weights.values():
        if isinstance(tensor, DTensor):
            gathered_tensor(tensor.to(_export_dtype(tensor, dtype)))


def export_weights(
    weights: Mapping[str, Tensor],
    path: Path,
    version: int,
    dtype: torch.dtype | None = None,
) -> ExportResponse:
    """Write a safetensors file atomically. Raises OSError."""
    weights = weights if isinstance(weights, LazyWeights) else LazyWeights(weights)
    # Engines open the final name only, so they never map a half-written file. No fsync:
    # after a power cut the trainer exports again.
    unfinished = path.with_name(path.name + ".unfinished")
    entries = entries_of(weights, dtype)
    try:
        with gathered(weights, dtype) as tensors, unfinished.open("wb") as file:
            digests = write_tensors(file, entries, tensors)
        assert len(digests) == len(entries), (
            f"{len(digests)} of {len(entries)} tensors were gathered"
        )
        unfinished.rename(path)
    finally:
        unfinished.unlink(missing_ok=True)
    return manifest_of(weights, dtype, version, digests, str(path))


def after_queued_work(device: torch.device) -> AbstractContextManager[None]:
    """Return a context in which another thread reads a CUDA device's tensors as of now."""
    if device.type != "cuda":
        return nullcontext()
    index = torch.cuda.current_device() if device.index is None else device.index
    # The optimizer step that made these weights may still run on the device. The other
    # thread's stream must wait for it.
    stream = torch.cuda.Stream(index)  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream(index))
    return _on_stream(index, stream)


@contextmanager
def _on_stream(index: int, stream: torch.cuda.Stream) -> Iterator[None]:
    # New threads use the first device. A stream context would return to it and create a
    # CUDA context there, half a GB per rank; a device context returns only to existing
    # contexts.
    with torch.cuda.device(index), torch.cuda.stream(stream):
        yield


def manifest_of(
    weights: LazyWeights,
    dtype: torch.dtype | None,
    version: int,
    digests: Mapping[str, bytes],
    path: str,
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
        (
            piece,
            dtype_name(_export_dtype(tensor, dtype)),
            list(tensor.shape if cut is None else cut.shape),
        )
        for name, tensor in weights.like.items()
        for piece, cut in weights.pieces.get(name, {name: None}).items()
    ]


def sizes_of(weights: LazyWeights, dtype: torch.dtype | None) -> dict[str, int]:
    return {
        name: tensor.numel() * _export_dtype(tensor, dtype).itemsize
        for name, tensor in weights.like.items()
    }


def chunks_of(
    weights: LazyWeights, dtype: torch.dtype, chunk_bytes: int
) -> list[LazyWeights]:
    """Return chunks of up to chunk_bytes, or of one larger tensor.

    Example: sizes a=3, b=4, c=9, d=1 and chunk_bytes=8 give [a, b], [c], [d].
    """
    chunks: list[list[str]] = []
    room = 0
    for name, size in sizes_of(weights, dtype).items():
        if not chunks or size > room:
            chunks.append([])
            room = chunk_bytes
        chunks[-1].append(name)
        room -= size
    return [weights.only(names) for names in chunks]


class TrainerEnd(NamedTuple):
    """`is_file_wanted`: for evaluation. `store`: ADDRESS:PORT of rank 0's store, for
    several nodes.
    """

    device: torch.device
    dtype: torch.dtype
    chunk_bytes: int
    is_first: bool = True
    is_file_wanted: bool = False
    store: str = ""


def finished_export(
    version: int, answer: ExportResponse | None = None
) -> Future[ExportResponse]:
    """Return a finished export; without an answer, of a rank that only gathered."""
    future: Future[ExportResponse] = Future()
    none = ExportResponse(
        version=version, path="", digest="", num_tensors=0, num_bytes=0
    )
    future.set_result(none if answer is None else answer)
    return future


class Transport:
    """Trainer end of a transport, on every rank; all call begin() together.

    Transports shm, disk and stream: one safetensors file, which engines copy during
    generation and swap to.
    """

    version = -1
    """-1: none."""

    def __init__(self, end: TrainerEnd) -> None:
        self.end = end
        self._writer = ThreadPoolExecutor(1, "export")

    def begin(
        self, version: int, weights: LazyWeights, path: Path
    ) -> Future[ExportResponse]:
        """Bring the weights to the engines; no weight may change before the Future
        ends. Raises OSError, here or in the Future.
        """
        dtype = self.end.dtype
        if not self.end.is_first:
            # Only rank 0 writes, but its full_tensor() calls need every rank.
            gather_along(weights, dtype)
            return finished_export(version)
        if not weights.are_plain:
            # Collective calls stay on this thread. From another one, they could mix
            # with those of the forward pass in a different order on each rank.
            return finished_export(
                version, export_weights(weights, path, version, dtype)
            )
        reading = after_queued_work(self.end.device)

        def read_and_write() -> ExportResponse:
            with reading:
                return export_weights(weights, path, version, dtype)

        return self._writer.submit(read_and_write)

    def send(self, request: BroadcastRequest) -> BroadcastResponse:
        """Send a held version to the engines (transport nccl). Raises Refused."""
        raise NotImplementedError


class HeldTransport(Transport, ABC):
    """Trainer end of a transport whose engines read memory that rank 0 holds."""

    def begin(
        self, version: int, weights: LazyWeights, path: Path
    ) -> Future[ExportResponse]:
        """Copy the weights over the held ones; write a file too if evaluation needs
        one. Raises OSError, also without memory, or RuntimeError.
        """
        end = self.end
        written = None
        if end.is_file_wanted:
            written = super().begin(version, weights, path).result()
        if not end.is_first:
            gather_along(weights, end.dtype)
            return finished_export(version)
        with gathered(weights, end.dtype, end.device) as tensors:
            digests, place = self._hold(version, weights, tensors, path.parent)
        answer = manifest_of(weights, end.dtype, version, digests, "")
        place["path"] = "" if written is None else written.path
        return finished_export(version, answer.model_copy(update=place))

    @abstractmethod
    def _hold(
        self,
        version: int,
        weights: LazyWeights,
        tensors: Iterator[tuple[str, Tensor]],
        folder: Path,
    ) -> Put:
        """Copy `tensors`, which are the whole `weights`."""


def routers_of(model: nn.Module) -> list[Any]:
    """Return the router beside each layer's experts, in order; most return (logits,
    weights, indices), from topk.
    """
    blocks = (one for one in model.modules() if hasattr(one, "experts"))
    return [
        getattr(one, name)
        for one in blocks
        for name in ("router", "gate")
        if hasattr(one, name)
    ]


def merge(base: Tensor, lora_A: Tensor, lora_B: Tensor, scale: float) -> Tensor:  # noqa: N803
    """Return W + scale * B A, computed in float32, in the dtype of W."""
    return (base.float() + (lora_B.float() @ lora_A.float()) * scale).to(base.dtype)


def write_peft(
    tensors: Mapping[str, Tensor], scale: float, folder: Path, **facts: object
) -> None:
    """Write pushed adapters as a peft folder. `facts`: more of its config."""
    modules = adapted_modules(tensors)
    rank = len(tensors[modules[0] + SUFFIXES[0]])
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "bias": "none",
        "r": rank,
        "lora_alpha": scale * rank,
        "target_modules": modules,
        **facts,
    }
    (folder / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
    weights = {f"base_model.model.{name}": one for name, one in tensors.items()}
    save_file(weights, folder / "adapter_model.safetensors", metadata={"format": "pt"})
