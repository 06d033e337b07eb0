"""Exports of one rank: whole, by chunks, or as a model folder, each with a canary.

The canary is the trainer's logprobs of a short text, which engines recompute with the
weights they loaded.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from asyncrl.base.files import whole_folder
from asyncrl.base.http import Refused
from asyncrl.messages import trainer_api as api
from asyncrl.models.structure import hooked
from asyncrl.trainer.loss import packing
from asyncrl.trainer.model.build_model import TrainedModel, reshard
from asyncrl.trainer.ranks.ranks import Ranks
from asyncrl.trainer.ranks.state import save_folder
from asyncrl.trainer.trainer_client import TrainerSpec
from asyncrl.weights import export
from asyncrl.weights.export import LazyWeights, Transport
from asyncrl.weights.ipc import (
    ChunkFile,
    ChunkPlace,
    Chunks,
    SharedChunk,
    SharedTransport,
)
from asyncrl.weights.nccl import BroadcastTransport
from asyncrl.weights.tensor_files import (
    Pieces,
    of_role,
    rename_adapters,
    stored_names,
    stored_pieces,
)

TRANSPORTS = {
    "nccl": BroadcastTransport,
    "ipc": SharedTransport,
}
"""Transports that write no file of all weights, by name."""


class Exports:
    """Exports the weights of a model. All ranks make the same calls; rank 0 writes
    files.

    `exporting`: the latest export; until it ends, no weight may change.
    """

    def __init__(self, model: TrainedModel, spec: TrainerSpec, ranks: Ranks) -> None:
        self._model = model
        self._spec = spec
        self._ranks = ranks
        # Engines know tensors by the checkpoint's names. The cuts of stacked experts
        # never change, so they are found once.
        self._pieces: Pieces = {}
        self._pieces = stored_pieces(model.policy.model, self.whole_model().like)
        chunks = export.chunks_of(self.pushed(), model.dtype, spec.chunk_bytes)
        self._chunks = Chunks(self._chunk_place(chunks), chunks, model.dtype)
        end = export.TrainerEnd(
            model.device,
            model.dtype,
            spec.chunk_bytes,
            is_first=ranks.is_first,
            is_file_wanted=spec.is_file_wanted,
            store=spec.weights_store,
        )
        kind = TRANSPORTS.get(spec.transport, Transport)
        if spec.chunks != "file":
            # Colocated engines get chunks in shared memory; a whole export is a file,
            # for evaluation.
            kind = Transport
        self.transport = kind(end)
        self.exporting: Future[api.ExportResponse] | None = None

    def pushed(self) -> LazyWeights:
        """Return the trained tensors that engines get: adapters under checkpoint names,
        or all weights under the model's names.
        """
        adapters = self._model.adapters
        if adapters is None:
            return self.whole_model()
        names = stored_names(self._pieces)
        pushed = dict[str, Tensor]()
        for role in adapters.of_run:
            pushed |= of_role(role, rename_adapters(adapters.tensors(role), names))
        return LazyWeights(pushed)

    def whole_model(self, role: str | None = None) -> LazyWeights:
        """Return all weights under the model's names, the adapter of a role, or of the
        first one, merged on access.
        """
        weights = export.named_weights(self._model.policy.model)
        merges = None
        if self._model.adapters is not None:
            role = role or self._model.adapters.of_run[0]
            weights, merges = self._model.adapters.merging(weights, role)
        return LazyWeights(weights, merges, self._pieces)

    def begin(self, path: Path, version: int) -> Callable[[], api.ExportResponse]:
        """Begin an export to `path`. The returned function waits for it, in any thread.

        Both raise OSError. The function also raises Refused if the weights give NaN.
        """
        canary = self._canary()
        exporting = self.transport.begin(version, self.pushed(), path)
        self.exporting = exporting

        def finish() -> api.ExportResponse:
            # Checked here and not in begin(): only rank 0 gets here, after the
            # collective part, so a refusal leaves no rank waiting in it.
            answer = exporting.result()
            return answer.model_copy(update={"canary": _checked(canary)})

        return finish

    def chunk(self, version: int, index: int) -> api.ExportChunkResponse | None:
        """Write a chunk; the last one has the canary. Return None on other ranks.

        Raises OSError, or Refused if the weights give NaN.
        """
        canary = self._canary() if self._chunks.is_last(index) else None
        is_first = self._ranks.is_first
        chunk = self._chunks.write(
            self.pushed(),
            version,
            index,
            is_first=is_first,
        )
        if chunk is None or not is_first:
            return None
        return chunk.model_copy(update={"canary": _checked(canary)})

    def forget_chunks(self) -> None:
        """Write all chunks again, even of the same version: its weights have changed."""
        self._chunks.forget()

    def save(self, path: Path) -> None:
        """Write a Hugging Face folder, adapters merged, for each role one of its name.
        Raises OSError, SafetensorError and Refused.
        """
        if self._spec.trainer.roles is None:
            self._save(path, None)
            return
        with whole_folder(path) as unfinished:
            unfinished.mkdir()
            for role in self._spec.trainer.roles:
                self._save(unfinished / role, role)

    def _save(self, path: Path, role: str | None) -> None:
        weights = dict(self.whole_model(role))
        dtype = self._model.dtype
        # Shards are gathered tensor by tensor, by all ranks in one order. Only rank 0
        # keeps the result.
        if not self._ranks.is_first:
            export.gather_along(weights, dtype)
            return
        gathered = dict(export.whole_tensors(weights, dtype))
        save_folder(
            self._model.policy.model,
            gathered,
            Path(self._spec.model_path),
            path,
            dtype=dtype,
            template=self._spec.chat_template,
        )

    def _chunk_place(self, chunks: list[LazyWeights]) -> ChunkPlace:
        spec = self._spec
        # With "memory", only rank 0 has memory to share. The others take part in
        # gathering, and their file is never written.
        if spec.chunks == "file" or (
            spec.chunks == "memory" and not self._ranks.is_first
        ):
            return ChunkFile(spec.staging_dir / "chunk.safetensors")
        gather = self._ranks.gather if spec.chunks == "memories" else None
        entries = [export.entries_of(chunk, self._model.dtype) for chunk in chunks]
        return SharedChunk(
            spec.staging_dir,
            entries,
            self._model.device,
            self._ranks.rank,
            gather,
        )

    @torch.no_grad()
    def _canary(self) -> api.Canary | None:
        if not self._spec.canary_tokens:
            return None
        # The same text for every version and every rank. Its numbers mean nothing: any
        # text shows whether an engine computes with the weights that it loaded.
        random = np.random.default_rng(0)
        ids = random.integers(0, self._model.vocab_size, self._spec.canary_tokens)
        # The last token is only predicted, so the pass needs one more: any will do.
        text = np.append(ids, 0)
        micro = packing.pack_texts([text], self._model.device)
        # At temperature 1 and without a grammar, as engines compute the canary.
        scores = self._model.policy(micro)
        # Embeddings that are larger by one step of the dtype make all layers round in
        # another way, as another implementation of the model does.
        larger = 1 + torch.finfo(self._model.dtype).eps
        embedding = self._model.policy.model.get_input_embeddings()
        with hooked({embedding: ""}, lambda *call: call[-1] * larger):
            others = self._model.policy(micro)
        reshard(self._model.policy)
        return api.Canary(
            token_ids=ids.tolist(),
            logprobs=scores.logprob_M[:-1].tolist(),
            next_logprob=float(scores.highest_M[-1]),
            noise=float((others.logprob_M - scores.logprob_M)[:-1].abs().median()),
        )


def _checked(canary: api.Canary | None) -> api.Canary | None:
    if canary is None or all(
        map(math.isfinite, [*canary.logprobs, canary.next_logprob])
    ):
        return canary
    raise Refused(
        422,
        "the weights give logprobs of the canary that are not finite",
        rule="every engine must reproduce the logprobs of a fixed text",
        way_out="resume with a lower trainer.learning_rate and --allow-change trainer.learning_rate, or "
        "with weight_sync.canary_limit=none.",
    )
