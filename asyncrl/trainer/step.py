"""Learner that exports, saves and offloads its weights. All calls are collective; rank 0 writes files.

An export's canary is the logprobs of a short text, which engines recompute.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from asyncrl.base.errors import ConfigError
from asyncrl.base.http import Refused
from asyncrl.messages.engine_api import TransferStats
from asyncrl.messages.trainer_api import (
    BatchArrays,
    BatchHeader,
    Canary,
    ExportChunkResponse,
    ExportResponse,
    TrainerPart,
)
from asyncrl.trainer.learner import Learner
from asyncrl.trainer.model.build_model import reshard
from asyncrl.trainer.model.loading import load_tokenizer
from asyncrl.trainer.model.lora import save_adapter
from asyncrl.trainer.model.packing import pack_texts
from asyncrl.trainer.model_folder import hub_source
from asyncrl.trainer.offload import Offload
from asyncrl.trainer.ranks import ONE_RANK, Ranks
from asyncrl.trainer.saved_model import save_folder
from asyncrl.trainer.state import Progress, TrainerState
from asyncrl.trainer.trainer_client import TrainerSpec
from asyncrl.weights.adapters import AdapterTransport
from asyncrl.weights.export import (
    ChunkPlace,
    Chunks,
    LazyWeights,
    chunks_of,
    digest_of,
    entries_of,
    gather_along,
    in_export_dtype,
    named_weights,
)
from asyncrl.weights.ipc import ChunkFile, SharedChunk
from asyncrl.weights.nccl import BroadcastTransport
from asyncrl.weights.tensor_files import Pieces, stored_pieces
from asyncrl.weights.transport import Exported, TrainerEnd, Transport

CHUNK_FILE = "chunk.safetensors"
TRANSPORTS = {"lora": AdapterTransport, "nccl": BroadcastTransport}
"""Transports that write no file of all weights, by name."""


class TrainStep(Learner):
    def __init__(self, spec: TrainerSpec, ranks: Ranks = ONE_RANK) -> None:
        super().__init__(spec, ranks)
        self._state = TrainerState(self._masters, self._optimizer, ranks, spec, self.device)
        folder = spec.failed_dir.parent / "offload"
        self._offload = Offload(ranks, self.device, folder, self._tensors_of)
        self._pieces: Pieces | None = None
        self._chunks = Chunks(
            self._chunk_place(), spec.chunk_bytes, self.dtype, on_all=spec.chunks == "memories"
        )
        end = TrainerEnd(
            self.device,
            self.dtype,
            spec.chunk_bytes,
            is_first=ranks.is_first,
            is_file_wanted=spec.is_file_wanted,
            store=spec.weights_store,
        )
        self.transport = TRANSPORTS.get(spec.transport, Transport)(end)
        self._exporting: Future[ExportResponse] | None = None

    @property
    def offloaded(self) -> list[TrainerPart]:
        return sorted(self._offload.away)

    def train(self, header: BatchHeader, arrays: BatchArrays) -> dict[str, float]:
        self._offload.need("train", "weights", "optimizer")
        metrics = super().train(header, arrays)
        self._state.wait_lent()  # charge a slow disk to a step, not to a handover
        return metrics

    def begin_export(self, path: Path) -> Callable[[], ExportResponse]:
        """Begin an export. The returned function waits, in any thread, and raises OSError, or Refused for
        NaN.
        """
        self._offload.need("export", "weights")
        canary = self._canary()
        adapters = None if self._adapters is None else self._adapters.export_tensors
        exported = Exported(self.policy_version, self._lazy_weights, adapters)
        exporting = self._exporting = self.transport.begin(exported, path)
        return lambda: exporting.result().model_copy(update={"canary": _checked(canary)})

    def export(self, path: Path) -> ExportResponse:
        return self.begin_export(path)()

    def before_change(self) -> None:
        readers: list[Future[Any] | None] = [self._exporting, self._state.copying]
        wait([reader for reader in readers if reader is not None])

    def offload(self, parts: Iterable[TrainerPart]) -> TransferStats:
        self.before_change()
        self._state.wait_lent()
        parts = frozenset(parts)
        if self._adapters is not None and "weights" in parts:
            self._adapters.forget_merged()
        try:
            return self._offload.offload(parts)
        finally:
            self._merge_again()

    def onload(self, parts: Iterable[TrainerPart]) -> TransferStats:
        self.before_change()
        moved = self._offload.onload(parts)
        self._merge_again()
        return moved

    def save(self, path: Path, *, merged: bool = True) -> None:
        """Write a Hugging Face or peft folder. Raises OSError, SafetensorError and Refused."""
        self._offload.need("save", "weights")
        adapters = None if merged else self._adapters
        if not merged and adapters is None:
            what = "adapters were asked for, and trainer.lora is none"
            raise Refused(409, what, way_out="save all weights.")
        weights = dict(self._lazy_weights()) if adapters is None else adapters.tensors()
        if not self.ranks.is_first:
            gather_along(weights, self.dtype)
            return
        gathered = in_export_dtype(weights, self.dtype)
        if adapters is None:
            tokenizer = load_tokenizer(self.spec.model_path, self.spec.chat_template)
            save_folder(self.policy.model, gathered, tokenizer, self.dtype, path)
        else:
            assert self.spec.trainer.lora is not None, "there are adapters"
            base, commit = hub_source(Path(self.spec.model_path)) or (self.spec.model_path, None)
            save_adapter(path, gathered, self.spec.trainer.lora, base, commit)

    def begin_save_state(self, path: Path) -> Future[None]:
        """Begin to write the state to the new folder `path`."""
        progress = Progress.model_validate(self, from_attributes=True)
        return self._state.begin_save(progress, path, self._offload.content_of)

    def wait_save_state(self) -> None:
        if self._state.pending is not None:
            self._state.pending.result()

    def load_state(self, path: Path) -> None:
        self._offload.need("load a state", "weights", "optimizer")
        self.before_change()
        self._chunks.forget()
        vars(self).update(self._state.load(path))
        self._schedule_ahead = self.policy_version * self.spec.steps_per_batch - self.num_optimizer_steps
        self._note_restored(self.policy_version)

    def weights_digest(self) -> str:
        return digest_of(self._masters.named)

    def chunk_names(self, version: int, index: int) -> list[str]:
        """Return the tensors of this chunk, on rank 0. Raises Refused."""
        self._offload.need("export a chunk", "weights")
        assert self.transport.sends_chunks, "the config refuses weight_sync.transport=lora when colocated"
        if version != self.policy_version:
            what = f"a chunk of version {version} was requested at policy_version {self.policy_version}"
            rule = "chunks are of the newest version"
            raise Refused(409, what, rule=rule, way_out="begin again with chunk 0 of that.")
        return self._chunks.names(self._lazy_weights(), version, index)

    def export_chunk(self, index: int, names: Sequence[str] = ()) -> ExportChunkResponse | None:
        """Write a chunk; the last has the canary. Raises OSError or Refused."""
        weights = self._lazy_weights()
        canary = self._canary() if self._chunks.is_last(weights, index) else None
        if not self.ranks.is_first:
            self._chunks.write_along(weights, index, list(names))
            return None
        return self._chunks.write(weights, index).model_copy(update={"canary": _checked(canary)})

    @torch.no_grad()
    def _canary(self) -> Canary | None:
        if not self.spec.canary_tokens:
            return None
        vocab_size = self.policy.model.get_input_embeddings().num_embeddings
        ids = np.random.default_rng(0).integers(0, vocab_size, self.spec.canary_tokens)
        scores = self.policy(pack_texts([[np.append(ids, 0)]], self.device))
        reshard(self.policy)
        logprobs = scores.logprob_M[:-1].tolist()
        return Canary(token_ids=ids.tolist(), logprobs=logprobs, next_logprob=float(scores.highest_M[-1]))

    def _chunk_place(self) -> ChunkPlace:
        spec = self.spec
        if spec.chunks == "file" or (spec.chunks == "memory" and not self.ranks.is_first):
            return ChunkFile(spec.staging_dir / CHUNK_FILE)
        chunks = chunks_of(self._lazy_weights(), self.dtype, spec.chunk_bytes)
        entries = [entries_of(chunk, self.dtype) for chunk in chunks]
        try:
            if spec.chunks == "memories":
                ranks = self.ranks
                return SharedChunk(spec.staging_dir, entries, self.device, ranks.rank, ranks.gather)
            return SharedChunk(spec.staging_dir, entries, self.device)
        except OSError as error:
            what = f"no memory on {self.device.type} for a chunk that both trainer and engines open: {error}"
            way_out = "lower weight_sync.chunk_bytes, or give trainer and engines separate devices."
            raise ConfigError(what, way_out=way_out) from error

    def _merge_again(self) -> None:
        if self._adapters is not None and self._adapters.is_forgotten and "weights" not in self.offloaded:
            self._adapters.keep_merged()

    def _lazy_weights(self) -> LazyWeights:
        merges: dict[str, Callable[[], Tensor]] = {}
        if self._adapters is None:
            weights = named_weights(self.policy.model)
        else:
            weights, merges = self._adapters.merging()
        if self._pieces is None:
            self._pieces = stored_pieces(self.policy.model, weights)
        return LazyWeights(weights, merges, self._pieces)

    def _tensors_of(self, part: TrainerPart) -> list[Tensor]:
        if part == "gradients":
            return []
        models = [self.policy] if self._reference is None else [self.policy, self._reference]
        weights = [tensor for model in models for tensor in (*model.parameters(), *model.buffers())]
        if part == "weights":
            return weights
        of_model = {id(tensor) for tensor in weights}
        states = [value for state in self._optimizer.state.values() for value in state.values()]
        masters = [master for master in self._masters.named.values() if id(master) not in of_model]
        return [*masters, *(value for value in states if isinstance(value, Tensor))]


def _checked(canary: Canary | None) -> Canary | None:
    if canary is None or all(map(math.isfinite, [*canary.logprobs, canary.next_logprob])):
        return canary
    num_bad = sum(not math.isfinite(one) for one in canary.logprobs)
    what = f"the weights give logprobs that are not finite, {num_bad} of {len(canary.logprobs)} tokens"
    rule = "every engine must reproduce the logprobs of a fixed text"
    way_out = "resume from a checkpoint with a lower trainer.learning_rate, or weight_sync.canary_limit=none."
    raise Refused(422, what, rule=rule, way_out=way_out)
