"""Loads weights into the model of one vLLM worker, whole or chunk by chunk, and refuses incomplete ones. It
uses vLLM's layerwise reload.

Plain `model.load_weights` is wrong after the start: layers have their weights packed for the kernels by then
(on CPU every linear layer is, and its parameter is empty). vLLM's layerwise reload gives the layers their
first form back, buffers what is loaded, and packs a layer as soon as it is complete.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor, nn
from vllm.config import set_current_vllm_config
from vllm.model_executor.layers.attention import is_deferred_attention_layer
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.platforms import current_platform

from asyncrl.messages.calls import LoadChunkRequest, PrepareRequest
from asyncrl.serving import Refused
from asyncrl.weights.export import cut
from asyncrl.weights.ipc import TrainerMemory
from asyncrl.weights.tensor_files import digest_and_size, read_or_refuse
from asyncrl_servers.weight_state import PUSH_AGAIN, Arrived, ChunkedPush, Staged, check_arrived, the_staged


class Loader:
    """The weights of one worker. It sees files and vLLM's model; routes and other workers do not concern it.

    Life: idle -> staging -> staged -> load -> idle;  or  idle -> open (one chunk after the other) -> finished
        -> idle. A load that fails after it has begun leaves the weights `broken`, until one succeeds: it
        replaces them all.
    Waits: nowhere but for a digest that is asked to be loaded while it is still computed.
    Invariant: a load answers without error only if every parameter of the model got its elements from it.
        Staged tensors lie in the file that was mapped: replacing the file changes nothing here.
    """

    def __init__(self, worker: Any) -> None:
        self.worker = worker
        self._memory = TrainerMemory(worker.device)
        self._push = ChunkedPush()
        self._hashing = ThreadPoolExecutor(1, "hash weights")
        self._arrived: Future[Arrived] = Future()
        """Of what is staged, computed while the worker goes on generating."""
        self.staged: Staged | None = None
        self.broken: str | None = None
        self.open_version: int | None = None
        self._owners: set[str] = set()

    @property
    def model(self) -> nn.Module:
        """The model that serves."""
        model: nn.Module = self.worker.model_runner.get_model()
        return model

    def stage(self, **fields: Any) -> dict[str, Any]:
        """Begin to stage the file of a PrepareRequest, or say how far it is. Raises Refused; then nothing is
        staged.
        """
        request = PrepareRequest(**fields)
        if self.staged is None or self.staged.request != request:
            self.staged = None
            tensors = {name: raw.as_torch() for name, raw in read_or_refuse(request.path).items()}
            self._arrived = self._hashing.submit(digest_and_size, tensors)
            self.staged = Staged(request, tensors)
        if not self._arrived.done():
            return {"state": "hashing"}
        return {"state": "staged", "digest": self._check_staged(self.staged)}

    def load(self, version: int, digest: str, chunk_bytes: int) -> dict[str, Any]:
        """Load what is staged under this digest: one reload, one load call a chunk. Raises Refused."""
        staged = the_staged(self.staged, version, digest)
        self._check_staged(staged)
        self.begin(version)
        for chunk in self._chunks(staged, chunk_bytes):
            self.add(chunk)
        self.finish()
        self.staged = None  # its mapping holds the file's memory
        return {"num_tensors": len(staged.tensors), "num_bytes": staged.request.num_bytes}

    def load_chunk(self, **fields: Any) -> dict[str, Any]:
        """Load the chunk of a LoadChunkRequest, from a file or from memory that the trainer shares; chunk 0
        opens an update. Raises Refused.
        """
        request = LoadChunkRequest(**fields)
        if request.index and self.open_version is None:
            self._push.clear()
        with self._push.receiving(request, serving=0):
            # A copy: the next chunk may be written over this one while vLLM holds tensors of it until their
            # layer is complete.
            with self._memory.chunk(request) as views:
                tensors = {name: view.clone() for name, view in views.items()}
            digest = self._push.add(request, digest_and_size(tensors))
        if request.index == 0:
            self.begin(request.version)
        self.add(tensors.items())
        return {"digest": digest}

    def finish_chunks(self, version: int, digest: str) -> dict[str, Any]:
        """End the update that is open, which must be the whole push with this digest. Raises Refused."""
        if self.open_version != version:
            rule = "chunk 0 opens an update"
            raise Refused(409, f"no update of version {version} is open", rule=rule, way_out=PUSH_AGAIN)
        try:
            self._push.take(version, digest)
        except Refused as refusal:
            self._abandon(str(refusal))
            raise
        self.finish()
        return {"digest": digest}

    def drop(self) -> None:
        """Drop the staged file. An open update cannot be undone: a part of its weights is already
        replaced.
        """
        self.staged = None
        if self.open_version is not None:
            self._abandon("dropped")

    def begin(self, version: int) -> None:
        """Open an update of the model; one that was open is given up, as this one replaces all weights."""
        if self.open_version is not None:
            self._abandon("given up")
        self.open_version = version
        # A tied parameter is listed once, for its first layer. Layers without parameters have buffers that
        # they compute themselves.
        self._owners = {name.rpartition(".")[0] for name, _ in self.model.named_parameters()}
        with self._changing():
            initialize_layerwise_reload(self.model)

    def add(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Load some tensors into the update that is open."""
        with self._changing():
            self.model.load_weights(iter(tensors))  # type: ignore[operator]  # every model of vLLM has it

    def finish(self) -> None:
        """Close the update. Raises Refused if a parameter got nothing, or too little."""
        assert self.open_version is not None, f"no update is open ({self.broken})"
        with self._changing():
            if missing := self._incomplete():
                what = f"version {self.open_version} lacks {len(missing)} parameters: {missing[:5]}"
                rule = "the weights of this server are of no version until a load succeeds"
                raise Refused(409, what, rule=rule, way_out="load a whole set again, or restart it.")
            self._finalize()
        self.open_version = self.broken = None

    def _check_staged(self, staged: Staged) -> str:
        """The digest of what is staged. Raises Refused if it is not what was announced; then nothing is."""
        try:
            return check_arrived(staged.request.path, self._arrived.result(), staged.request)
        except Exception:
            self.staged = None
            raise

    def _chunks(self, staged: Staged, chunk_bytes: int) -> Iterable[list[tuple[str, Tensor]]]:
        """The tensors in order, in chunks of at most `chunk_bytes`, or of one tensor where that is larger."""
        for names in cut({name: tensor.nbytes for name, tensor in staged.tensors.items()}, chunk_bytes):
            yield [(name, staged.tensors[name]) for name in names]

    def _incomplete(self) -> list[str]:
        """Names of the layers of an open update that have not got all their elements."""
        missing = []
        for name, layer in self.model.named_modules():
            info = get_layerwise_info(layer)
            if name not in self._owners or not info.can_load() or is_deferred_attention_layer(layer):
                continue  # nothing to load, or complete (then it is packed already)
            # A vocabulary is padded with rows that no file has.
            is_padded = hasattr(layer, "num_embeddings_padded")
            if info.load_numel == 0 or not is_padded:
                missing.append(f"{name} ({info.load_numel} of {info.load_numel_total} elements)")
        return missing

    def _finalize(self) -> None:
        finalize_layerwise_reload(self.model, self.worker.model_runner.model_config)
        self._repack_tied()
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    def _repack_tied(self) -> None:
        """Pack the output layer anew where it shares its weight with the embedding: it loads nothing itself,
        so its packed copy is old.
        """
        if not current_platform.is_cpu():
            return
        from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

        for layer in self.model.modules():
            weight = getattr(layer, "weight", None)
            is_matrix = isinstance(weight, Tensor) and weight.numel() > 0 and weight.dim() == 2
            if hasattr(layer, "cpu_linear") and is_matrix:
                dispatch_cpu_unquantized_gemm(layer, remove_weight=False)

    @contextlib.contextmanager
    def _loading(self) -> Iterator[None]:
        """The context that vLLM's own worker loads in."""
        worker = self.worker
        with torch.no_grad(), set_current_vllm_config(worker.vllm_config), torch.device(worker.device):
            yield

    @contextlib.contextmanager
    def _changing(self) -> Iterator[None]:
        """The same; a failure within gives the update up."""
        try:
            with self._loading():
                yield
        except Exception as error:
            self._abandon(f"{type(error).__name__}: {error}")
            raise

    def _abandon(self, why: str) -> None:
        """Close an update that cannot be completed. The layers get tensors again, else the next request would
        end the engine.
        """
        self.broken = f"version {self.open_version} came in part ({why})"
        self.open_version = None
        with self._loading():
            self._finalize()
