"""A TrainStep whose state can be moved off the device, and whose weights leave it in chunks: for a trainer
that takes turns.

    weights     all that the model computes with: the policy's, buffers and adapters included, and the
    reference's gradients   there only within a step; what is left is dropped
    optimizer   AdamW's moments, and float32 master weights that are not the model's own: an export does not
    need them

Knows which tensors these are and what each request needs; how memory moves, it leaves to offload.py.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from torch import Tensor

from asyncrl.errors import ConfigError
from asyncrl.http import Refused
from asyncrl.messages.base import Moved, TrainerPart
from asyncrl.messages.trainer_calls import BatchArrays, BatchHeader, ExportChunkResponse, ExportResponse
from asyncrl.trainer.canary import checked
from asyncrl.trainer.host_memory import trim
from asyncrl.trainer.offload import Offload
from asyncrl.trainer.ranks import ALONE, Ranks
from asyncrl.trainer.spec import TrainerSpec
from asyncrl.trainer.state import PendingSave, Progress
from asyncrl.trainer.step import TrainStep
from asyncrl.weights.chunk_export import ChunkPlace, Chunks, cut
from asyncrl.weights.export import entries_of, gather_along, sizes_of
from asyncrl.weights.ipc import SharedChunk
from asyncrl.weights.shm import ChunkFile

CHUNK_FILE = "chunk.safetensors"


class MovableStep(TrainStep):
    """Life: as TrainStep's; between any two calls offload and onload, of any parts. What needs a part that is
    away is refused.

    Invariant:  a checkpoint is never refused: what is away is saved from where it lies, and stays there.
    """

    def __init__(self, spec: TrainerSpec, ranks: Ranks = ALONE) -> None:
        super().__init__(spec, ranks)
        self._offload = Offload(ranks, self.device, spec.offload_dir, self._tensors_of, self._with_gradients)
        self._chunks = Chunks(self._chunk_place(), spec.chunk_bytes, self.dtype)

    @property
    def offloaded(self) -> list[TrainerPart]:
        """The parts that are away. Any thread may ask."""
        return self._offload.listed()

    def offload(self, parts: Iterable[TrainerPart]) -> Moved:
        """Move these parts off the device; on all ranks. Raises Refused, with all where it was."""
        moved = self._offload.offload(parts)
        self.release_copy()
        return moved

    def onload(self, parts: Iterable[TrainerPart]) -> Moved:
        """Move these parts back; on all ranks. Raises Refused, with all where it was."""
        return self._offload.onload(parts)

    def release_copy(self) -> None:
        """On the CPU the copy that a checkpoint was written from lies in the memory that offloading is to
        free.
        """
        if self.offloaded and self.device.type == "cpu":
            self._state.drop_copy()
            trim()

    def end_save_state(self) -> None:
        """wait_save_state, and release_copy. Raises StateError."""
        self.wait_save_state()
        self.release_copy()

    def train(self, header: BatchHeader, arrays: BatchArrays) -> dict[str, float]:
        """As TrainStep's. Raises Refused."""
        self._offload.need("train", "weights", "optimizer")
        self._offload.gradients_made()
        return super().train(header, arrays)

    def export(self, path: Path) -> ExportResponse:
        """As TrainStep's. Raises Refused, OSError."""
        self._offload.need("export", "weights")
        return super().export(path)

    def check_save(self, *, merged: bool) -> None:
        """As TrainStep's. Raises Refused too."""
        self._offload.need("save", "weights")
        super().check_save(merged=merged)

    def begin_save_state(self, path: Path) -> PendingSave:
        """As TrainStep's, wherever the state lies. Raises StateError."""
        progress = Progress(self.policy_version, self.num_optimizer_steps, self.num_skipped_in_a_row)
        self._pending = self._state.begin_save(progress, path, self._offload.content_of)
        return self._pending

    def load_state(self, path: Path, *, is_checked: bool = False) -> None:
        """As TrainStep's. Raises Refused."""
        self._offload.need("load a state", "weights", "optimizer")
        self._chunks.forget()
        super().load_state(path, is_checked=is_checked)

    def chunk_names(self, version: int, index: int) -> list[str]:
        """On rank 0: the tensors that all ranks gather for this chunk. Raises Refused."""
        self._offload.need("export a chunk", "weights")
        if not self.transport.sends_chunks:
            raise Refused(
                409,
                "chunks were asked for, and publisher.transport=lora sends the adapters alone",
                rule="adapters are small: they are exported at once",
                way_out="POST /export, or set publisher.transport=shm to have merged weights sent.",
            )
        if version != self.policy_version:
            raise Refused(
                409,
                f"a chunk of version {version} was asked for while the trainer is at policy_version "
                f"{self.policy_version}",
                rule="the newest weights are exported, and a set of chunks is of one version",
                way_out="begin again with chunk 0 of the newest version.",
            )
        return self._chunks.names(self._lazy_weights(), version, index)

    def export_chunk(self, index: int) -> ExportChunkResponse:
        """On rank 0: write it, after chunk_names(); the canary goes with the last one. Raises OSError, or
        Refused as export().
        """
        canary = self._canary() if self.is_last_chunk(index) else None
        answer = self._chunks.write(self._lazy_weights(), index)
        trim()  # what the allocator keeps of the gathered tensors would add up, chunk by chunk
        return answer.model_copy(update={"canary": checked(canary)})

    def is_last_chunk(self, index: int) -> bool:
        """Whether all ranks compute the canary with this chunk."""
        return self._chunks.is_last(self._lazy_weights(), index)

    def join_chunk(self, names: list[str], *, is_last: bool) -> None:
        """The other ranks' part of export_chunk: their shards."""
        if is_last:
            self._canary()
        gather_along(self._lazy_weights().only(names), self.dtype)
        trim()

    def _chunk_place(self) -> ChunkPlace:
        spec = self.spec
        if spec.chunks == "file" or not self.ranks.is_first:
            return ChunkFile(spec.staging_dir / CHUNK_FILE)
        weights = self._lazy_weights()
        chunks = cut(sizes_of(weights, self.dtype), spec.chunk_bytes)
        entries = [entries_of(weights.only(names), self.dtype) for names in chunks]
        try:
            return SharedChunk(spec.staging_dir, entries, self.device)
        except OSError as error:
            raise ConfigError(
                f"no memory for a chunk on {self.device.type} that trainer and engines could share: {error}",
                rule="in turns, weights go through memory that both sides open (CUDA IPC on a device, "
                "/dev/shm on the CPU)",
                way_out="lower publisher.chunk_bytes if there is no room, else give trainer and engines "
                "devices of their own.",
            ) from error

    def _tensors_of(self, part: TrainerPart) -> list[Tensor]:
        models = [self.policy] if self._reference is None else [self.policy, self._reference]
        weights: list[Tensor] = [
            tensor for model in models for tensor in (*model.parameters(), *model.buffers())
        ]
        if part == "weights":
            return weights
        of_model = {id(tensor) for tensor in weights}
        masters = [master for master in self._masters.named.values() if id(master) not in of_model]
        moments = [
            value
            for state in self._optimizer.state.values()
            for value in state.values()
            if isinstance(value, Tensor)
        ]
        return [*masters, *moments]

    def _with_gradients(self) -> list[Tensor]:
        return [*self.policy.parameters(), *self._masters.named.values()]
