"""A copy of the weights that is sent to engines while training goes on with the originals. Knows tensors;
knows no engine.

The copy lies on the trainer's device, in the dtype of an export, in buffers of publisher.chunk_bytes (or of
one tensor that is larger) that are made once and written over by each export: all weights once more is the
memory it takes.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator

import torch
from torch import Tensor

from asyncrl.http import Refused
from asyncrl.messages.base import (
    BroadcastRequest,
    BroadcastResponse,
    PlacedTensor,
    SentChunk,
    SentWeights,
    joint_digest,
)
from asyncrl.messages.trainer_calls import ExportResponse
from asyncrl.weights.broadcasting import GroupBroken, WeightGroup, tensors_in
from asyncrl.weights.chunk_export import LazyWeights, aligned, cut, sizes_of, starts_of
from asyncrl.weights.export import num_bytes, whole_tensors
from asyncrl.weights.shared_memory import word_digest


class HeldWeights:
    """The copy of one version, and its way to the engines; on rank 0.

    Life:       empty -> hold(): a version is held -> send() it, any number of times -> hold() the next, over
    it. Waits:      hold for a send that is under way, and the other way round; send for every member of its
    group, as long as a seat says. Invariant:  what is sent is what was held, whole: they exclude each other.
    A group that broke is never used again.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype, chunk_bytes: int) -> None:
        self.version, self.digest = -1, ""
        self._device, self._dtype, self._chunk_bytes = device, dtype, chunk_bytes
        self._chunks: list[SentChunk] = []
        self._buffers: list[Tensor] = []
        self._group: WeightGroup | None = None
        self._in_use = threading.Lock()

    def __repr__(self) -> str:
        return f"<HeldWeights v{self.version}, {sum(buffer.nbytes for buffer in self._buffers)} bytes on {self._device}>"

    def hold(self, weights: LazyWeights, version: int) -> ExportResponse:
        """Copy them over what was held, gathering what is sharded. Raises RuntimeError if there is no memory
        for it.
        """
        with self._in_use:
            self.version = -1
            tensors = whole_tensors(weights, self._dtype, self._device)
            try:
                self._make_room(weights)
                self.digest = joint_digest(self._copy(tensors))
            finally:
                for _ in tensors:  # after an error: the other ranks gather on to the end
                    pass
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)  # send() works in another thread's stream
            self.version = version
        size = num_bytes(weights.like, self._dtype)
        return ExportResponse(
            version=version,
            path="",
            digest=self.digest,
            held_digest=self.digest,
            num_tensors=len(weights),
            num_bytes=size,
        )

    def send(self, request: BroadcastRequest) -> BroadcastResponse:
        """To everybody in the group; in a thread of its own. Raises Refused."""
        with self._in_use:
            if self.version != request.version:
                raise Refused(
                    409,
                    f"policy_version {request.version} is to be sent, and what is held is version "
                    f"{self.version}",
                    rule="the newest export alone is held",
                    way_out="export, and send that.",
                )
            try:
                self._joined(request).send(
                    SentWeights(version=self.version, chunks=self._chunks), self._buffers
                )
            except GroupBroken as broken:
                self._leave()
                raise Refused(
                    409,
                    f"policy_version {request.version} was not sent: {broken}",
                    rule="weights are sent once, to all workers of all engines",
                    way_out="read the logs of the engines; what they have is sent anew once they were "
                    "started again.",
                ) from broken
            sent = sum(chunk.num_bytes for chunk in self._chunks)
            return BroadcastResponse(version=self.version, digest=self.digest, num_bytes=sent)

    def _joined(self, request: BroadcastRequest) -> WeightGroup:
        if self._group is None or self._group.path != request.seat.path:
            self._leave()
            self._group = WeightGroup(request.seat, self._device)
        return self._group

    def _leave(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            group.close()

    def _make_room(self, weights: LazyWeights) -> None:
        if self._chunks:
            return
        for names in cut(sizes_of(weights, self._dtype), self._chunk_bytes):
            like = {name: weights.like[name] for name in names}
            starts = starts_of(like, self._dtype)
            size = sum(aligned(num_bytes({name: tensor}, self._dtype)) for name, tensor in like.items())
            self._buffers.append(torch.zeros(size, dtype=torch.uint8, device=self._device))
            placed = [
                PlacedTensor(
                    name=name, dtype=self._dtype_of(tensor), shape=list(tensor.shape), start=starts[name]
                )
                for name, tensor in like.items()
            ]
            self._chunks.append(SentChunk(num_bytes=size, tensors=placed))

    def _copy(self, tensors: Iterator[tuple[str, Tensor]]) -> Iterator[bytes]:
        """Digests are of the tensors before they are copied: a fault in the copy shows at the other end
        too.
        """
        for chunk, buffer in zip(self._chunks, self._buffers, strict=True):
            for name, place in tensors_in(chunk, buffer).items():
                found, tensor = next(tensors)
                assert found == name, f"{found} came where {name} was to come"
                place.copy_(tensor)
                yield word_digest(name, tensor)

    def _dtype_of(self, tensor: Tensor) -> str:
        return str(self._dtype if tensor.is_floating_point() else tensor.dtype).removeprefix("torch.")
