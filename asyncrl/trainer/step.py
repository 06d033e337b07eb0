"""A Learner whose weights leave it for the engines, are saved, and can be moved off the device. Every method
is called on all ranks at once, which gather what is sharded; rank 0 alone writes, and its answer alone means
something. Knows no HTTP.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from torch import Tensor

from asyncrl.errors import ConfigError
from asyncrl.http import Refused
from asyncrl.messages.base import Moved, TrainerPart
from asyncrl.messages.trainer_calls import (
    BatchArrays,
    BatchHeader,
    Canary,
    ExportChunkResponse,
    ExportResponse,
)
from asyncrl.trainer.canary import checked, make_canary
from asyncrl.trainer.learner import Learner
from asyncrl.trainer.model.parts import load_tokenizer
from asyncrl.trainer.offload import Offload
from asyncrl.trainer.ranks import ALONE, Ranks
from asyncrl.trainer.spec import TrainerSpec
from asyncrl.trainer.state import PendingSave, Progress, TrainerState
from asyncrl.weights.chunk_export import ChunkFile, ChunkPlace, Chunks, cut
from asyncrl.weights.export import (
    LazyWeights,
    digest_of,
    entries_of,
    gather_along,
    in_export_dtype,
    in_file_order,
    named_weights,
    save_folder,
    sizes_of,
)
from asyncrl.weights.ipc import SharedChunk
from asyncrl.weights.transport import Exported, TrainerEnd, make_transport

CHUNK_FILE = "chunk.safetensors"


class TrainStep(Learner):
    """Life: as Learner's; between any two calls offload and onload, of any parts. What needs a part that is
    away is refused.

    Invariant:  a checkpoint is never refused: what is away is saved from where it lies, and stays there.
    """

    def __init__(self, spec: TrainerSpec, ranks: Ranks = ALONE) -> None:
        """Raises ConfigError."""
        super().__init__(spec, ranks)
        self._pending: PendingSave | None = None
        self._state = TrainerState(
            self._masters,
            self._optimizer,
            ranks,
            model_path=spec.model_path,
            dtype=self.dtype,
            device=self.device,
            lora=spec.trainer.lora,
        )
        self._offload = Offload(ranks, self.device, spec.offload_dir, self._tensors_of, self._with_gradients)
        self._chunks = Chunks(self._chunk_place(), spec.chunk_bytes, self.dtype)
        end = TrainerEnd(self.device, self.dtype, spec.chunk_bytes, ranks.is_first, spec.is_file_wanted)
        self.transport = make_transport(spec.transport, end)

    @property
    def offloaded(self) -> list[TrainerPart]:
        """The parts that are away. Any thread may ask."""
        return self._offload.listed()

    def offload(self, parts: Iterable[TrainerPart]) -> Moved:
        """Move these parts off the device. Raises Refused, with all where it was."""
        return self._offload.offload(parts)

    def onload(self, parts: Iterable[TrainerPart]) -> Moved:
        """Move these parts back. Raises Refused, with all where it was."""
        return self._offload.onload(parts)

    def train(self, header: BatchHeader, arrays: BatchArrays) -> dict[str, float]:
        """As Learner's. Raises Refused."""
        self._offload.need("train", "weights", "optimizer")
        self._offload.gradients_made()
        return super().train(header, arrays)

    def export(self, path: Path) -> ExportResponse:
        """Bring the current weights, in the engine's dtype, to where engines take them from. Raises OSError,
        or Refused if they give NaN.
        """
        self._offload.need("export", "weights")
        canary = self._canary()
        adapters = None if self._adapters is None else self._adapters.export_tensors
        answer = self.transport.export(Exported(self.policy_version, self._lazy_weights, adapters), path)
        return answer.model_copy(update={"canary": checked(canary)})

    def save(self, path: Path, *, merged: bool = True) -> None:
        """Write the current weights and the tokenizer as a Hugging Face folder, or the adapters alone as a
        peft folder. One that is there is replaced by the whole new one. Raises OSError, Refused.
        """
        self._offload.need("save", "weights")
        if not merged and self._adapters is None:
            raise Refused(
                409, "adapters were asked for, and trainer.lora is none", way_out="save all weights (merged)."
            )
        weights = self._merged_weights() if merged or self._adapters is None else self._adapters.tensors()
        if not self.ranks.is_first:
            gather_along(weights, self.dtype)
        elif merged or self._adapters is None:
            gathered = in_export_dtype(weights, self.dtype)  # first of all: the other ranks gather too
            save_folder(self.policy.model, gathered, load_tokenizer(self.spec), self.dtype, path)
        else:
            self._adapters.save(path, self.spec.model_path)

    def begin_save_state(self, path: Path) -> PendingSave:
        """Copy all that is needed to go on, wherever it lies; it is written to the new folder `path` beside
        training. Raises Refused.
        """
        progress = Progress(
            policy_version=self.policy_version,
            num_optimizer_steps=self.num_optimizer_steps,
            num_skipped_in_a_row=self.num_skipped_in_a_row,
        )
        self._pending = self._state.begin_save(progress, path, self._offload.content_of)
        return self._pending

    def wait_save_state(self) -> None:
        """Return when what was begun last is complete, at once if nothing was. Raises Refused. Any thread may
        call it.
        """
        if self._pending is not None:
            self._pending.wait()

    def load_state(self, path: Path) -> None:
        """Go on from a saved folder of a checkpoint that was found whole. Raises Refused."""
        self._offload.need("load a state", "weights", "optimizer")
        self._chunks.forget()
        progress = self._state.load(path)
        self.policy_version, self.num_optimizer_steps = progress.policy_version, progress.num_optimizer_steps
        self._schedule_ahead = self.policy_version * self.spec.steps_per_batch - self.num_optimizer_steps
        self.num_skipped_in_a_row = progress.num_skipped_in_a_row
        self._note_restored(self.policy_version)  # now: there may be no batch left to train on

    def weights_digest(self) -> str:
        """Digest of the float32 master weights: of what is trained, so of the adapters alone with
        trainer.lora.
        """
        return digest_of(self._masters.named)

    def chunk_names(self, version: int, index: int) -> list[str]:
        """On rank 0: the tensors that all ranks gather for this chunk. Raises Refused."""
        self._offload.need("export a chunk", "weights")
        if not self.transport.sends_chunks:
            raise Refused(
                409,
                "chunks were asked for, and weight_sync.transport=lora sends the adapters alone",
                rule="adapters are small: they are exported at once",
                way_out="POST /export, or set weight_sync.transport=shm to have merged weights sent.",
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

    def export_chunk(self, index: int, names: Sequence[str] = ()) -> ExportChunkResponse | None:
        """Rank 0 writes chunk `index`, after chunk_names(), which says what `names` the others gather. The
        canary goes with the last one. Raises OSError, or Refused as export().
        """
        weights = self._lazy_weights()
        canary = self._canary() if self._chunks.is_last(weights, index) else None
        if not self.ranks.is_first:
            gather_along(weights.only(list(names)), self.dtype)
            return None
        return self._chunks.write(weights, index).model_copy(update={"canary": checked(canary)})

    def _canary(self) -> Canary | None:
        """What goes with the export of these weights, if the spec asks for it."""
        return make_canary(self.policy, self.spec.canary_tokens) if self.spec.canary_tokens else None

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
                way_out="lower weight_sync.chunk_bytes if there is no room, else give trainer and engines "
                "devices of their own.",
            ) from error

    def _merged_weights(self) -> dict[str, Tensor]:
        """All weights by the names that the model was loaded with."""
        return named_weights(self.policy.model) if self._adapters is None else self._adapters.merged()

    def _lazy_weights(self) -> LazyWeights:
        """As _merged_weights, in the order of an export, each weight that has an adapter merged only when it
        is asked for.
        """
        if self._adapters is None:
            return LazyWeights(in_file_order(named_weights(self.policy.model)))
        weights, merges = self._adapters.merging()
        return LazyWeights(in_file_order(weights), merges)

    def _tensors_of(self, part: TrainerPart) -> list[Tensor]:
        """Weights: all that the model computes with, the policy's and the reference's, buffers and adapters
        included. Optimizer: AdamW's moments, and float32 master weights that are not the model's own.
        """
        models = [self.policy] if self._reference is None else [self.policy, self._reference]
        weights: list[Tensor] = [
            tensor for model in models for tensor in (*model.parameters(), *model.buffers())
        ]
        if part == "weights":
            return weights
        of_model = {id(tensor) for tensor in weights}
        masters = [master for master in self._masters.named.values() if id(master) not in of_model]
        states = [value for state in self._optimizer.state.values() for value in state.values()]
        return [*masters, *(value for value in states if isinstance(value, Tensor))]

    def _with_gradients(self) -> list[Tensor]:
        return [*self.policy.parameters(), *self._masters.named.values()]
