"""Brings weights into the model of one vLLM worker, whole or chunk by chunk, and says when they are not all
there. Knows vLLM's reload.

Plain `model.load_weights` is wrong after the start: layers have their weights packed for the kernels by then
(on CPU every linear layer is, and its parameter is empty). vLLM's layerwise reload gives the layers their
first form back, buffers what is loaded, and packs a layer as soon as it is complete.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from vllm.config import set_current_vllm_config
from vllm.model_executor.layers.attention import is_deferred_attention_layer
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.platforms import current_platform

from asyncrl.http import Refused
from asyncrl.messages.engine_calls import LoadChunkRequest, PrepareRequest
from asyncrl.weights.chunk_export import cut
from asyncrl.weights.ipc import TrainerMemory
from asyncrl.weights.tensor_files import RESEND, digest_of_tensor, digest_tensors, read_or_refuse
from asyncrl_servers.checks import wrong_digest
from asyncrl_servers.sleeping import PUSH_AGAIN, ChunkedPush

BROKEN = (
    "the weights of this server are of no version until a load succeeds: load a whole set again, or restart "
    "it."
)


def check_counts(tensors: Mapping[str, Tensor], place: str, num_tensors: int, num_bytes: int) -> None:
    """Raise Refused if there are not as many tensors and bytes as were announced."""
    found = (len(tensors), sum(tensor.nbytes for tensor in tensors.values()))
    if found != (num_tensors, num_bytes):
        raise Refused(
            409,
            f"{place} has {found[0]} tensors of {found[1]} bytes, announced were {num_tensors} of "
            f"{num_bytes}",
            rule="a version is served only when what was loaded is what was sent",
            way_out=RESEND,
        )


class Staged:
    """A weights file that waits for its load. Its digest is computed in a thread, while the worker goes on
    generating.

    Invariant:  `tensors` lie in the file that was mapped: replacing the file changes nothing here, as nothing
                writes into it.
    """

    def __init__(self, request: PrepareRequest) -> None:
        """Raises Refused if the file has not the size that was announced; check() compares the digest."""
        self.request = request
        self.tensors = {name: raw.as_torch() for name, raw in read_or_refuse(request.path).items()}
        check_counts(self.tensors, request.path, request.num_tensors, request.num_bytes)
        self.digest: str | None = None
        self._error: str | None = None
        self.thread = threading.Thread(target=self._hash, name=f"hash weights {request.version}", daemon=True)
        self.thread.start()

    def check(self) -> None:
        """Raise Refused if the file could not be hashed, or is not what was announced."""
        request = self.request
        if self._error is not None:
            raise Refused(400, self._error, way_out=RESEND)
        if self.digest != request.digest:
            raise wrong_digest(request.version, request.path, self.digest or "", request.digest)

    def _hash(self) -> None:
        try:
            self.digest = digest_tensors(self.tensors)
        except Exception as error:
            self._error = f"cannot hash {self.request.path}: {type(error).__name__}: {error}"


class Loader:
    """The weights of one worker. Knows files and vLLM's model; knows no route and no other worker.

    Life:       idle -> staging -> staged -> load -> idle;  or  idle -> open (one chunk after the other) ->
                finished -> idle. A load that fails after it has begun leaves the weights `broken`, until one
                succeeds: it replaces them all.
    Waits:      nowhere but for a digest that is asked to be loaded while it is still computed.
    Invariant:  a load answers without error only if every parameter of the model got its elements from it.
    """

    def __init__(self, worker: Any) -> None:
        self.worker = worker
        self._memory = TrainerMemory(worker.device)
        self._push = ChunkedPush()
        self.staged: Staged | None = None
        self.broken: str | None = None
        self.open_version: int | None = None
        self._num_calls = 0
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
        if request.kind != "weights":
            rule = "adapters come through /v1/load_lora_adapter"
            raise Refused(400, f"cannot stage {request.kind}", rule=rule, way_out="send whole weights.")
        if self.staged is None or self.staged.request != request:
            self.staged = None
            self.staged = Staged(request)
        if self.staged.thread.is_alive():
            return {"state": "hashing"}
        return {"state": "staged", "digest": self._checked(self.staged).digest}

    def load(self, version: int, digest: str, chunk_bytes: int) -> dict[str, Any]:
        """Load what is staged under this digest: one reload, one load call a chunk. Raises Refused."""
        staged = self.staged
        if staged is None or (staged.request.version, staged.request.digest) != (version, digest):
            lies = (
                f"version {staged.request.version} with digest {staged.request.digest}"
                if staged
                else "nothing"
            )
            raise Refused(
                409,
                f"load of version {version} with digest {digest}, but staged is {lies}",
                rule="only staged weights are loaded",
                way_out="stage it first.",
            )
        staged.thread.join()
        self._checked(staged)
        started = time.monotonic()
        self.begin(version)
        for chunk in self._chunks(staged, chunk_bytes):
            self.add(chunk)
        self.finish()
        self.staged = None  # its mapping holds the file's memory
        return {
            "num_tensors": len(staged.tensors),
            "num_bytes": staged.request.num_bytes,
            "num_chunks": self._num_calls,
            "seconds": time.monotonic() - started,
        }

    def load_chunk(self, **fields: Any) -> dict[str, Any]:
        """Load the chunk of a LoadChunkRequest, from a file or from memory that the trainer shares; chunk 0
        opens an update. Raises Refused.
        """
        request = LoadChunkRequest(**fields)
        if request.index and self.open_version is None:
            self._push.clear()
        self._push.expect(request, serving=0)
        # A copy: the next chunk may be written over this one while vLLM holds tensors of it until their layer
        # is complete.
        if request.memory is None:
            raw = read_or_refuse(request.path)
            tensors = {name: one.as_torch().clone() for name, one in raw.items()}
        else:
            with self._memory.tensors(request.memory) as views:
                tensors = {name: view.clone() for name, view in views.items()}
        digests = {name: digest_of_tensor(name, tensor) for name, tensor in tensors.items()}
        digest = self._push.add(request, digests, sum(tensor.nbytes for tensor in tensors.values()))
        if request.index == 0:
            self.begin(request.version)
        self.add(tensors.items())
        return {"digest": digest}

    def finish_chunks(self, version: int, digest: str) -> dict[str, Any]:
        """End the update that is open, which must be the whole push with this digest. Raises Refused."""
        if self.open_version != version:
            raise Refused(
                409,
                f"no update of version {version} is open",
                rule="chunk 0 opens an update",
                way_out=PUSH_AGAIN,
            )
        try:
            self._push.take(version, digest)
        except Refused as refusal:
            self._abandon(str(refusal))
            raise
        self.finish()
        return {"digest": digest}

    def drop(self) -> None:
        """Forget what is staged. An update that is open cannot be undone: its weights are partly the new
        ones.
        """
        self.staged = None
        if self.open_version is not None:
            self._abandon("dropped")

    def begin(self, version: int) -> None:
        """Open an update of the model; one that was open is given up, as this one replaces all weights."""
        if self.open_version is not None:
            self._abandon("given up")
        self.open_version, self._num_calls = version, 0
        # A tied parameter is listed once, for its first layer. Layers without parameters have buffers that
        # they compute themselves.
        self._owners = {name.rpartition(".")[0] for name, _ in self.model.named_parameters()}
        with self._changing():
            initialize_layerwise_reload(self.model)

    def add(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Load some tensors into the update that is open."""
        with self._changing():
            self.model.load_weights(iter(tensors))  # type: ignore[operator]  # every model of vLLM has it
        self._num_calls += 1

    def finish(self) -> None:
        """Close the update. Raises Refused if a parameter got nothing, or too little."""
        if self.open_version is None:
            raise Refused(
                409,
                "no update is open",
                rule=f"one that failed is closed already ({self.broken})",
                way_out=BROKEN,
            )
        with self._changing():
            missing = self._incomplete()
            if missing:
                raise Refused(
                    409,
                    f"the weights of version {self.open_version} lack {len(missing)} parameters of the "
                    f"model: {', '.join(missing[:5])}",
                    rule="a version is served only when every parameter came from it",
                    way_out=BROKEN,
                )
            self._finalize()
        self.open_version = self.broken = None

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
            is_padded = hasattr(
                layer, "num_embeddings_padded"
            )  # a vocabulary is padded with rows that no file has
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
            if (
                hasattr(layer, "cpu_linear")
                and isinstance(weight, Tensor)
                and weight.numel()
                and weight.dim() == 2
            ):
                dispatch_cpu_unquantized_gemm(layer, remove_weight=False)

    def _checked(self, staged: Staged) -> Staged:
        """Raise Refused, and stage nothing any more, if it could not be hashed or is not what was
        announced.
        """
        try:
            staged.check()
        except Refused:
            self.staged = None
            raise
        return staged

    @contextlib.contextmanager
    def _changing(self) -> Iterator[None]:
        """The context that vLLM's own worker loads in; a failure there gives the update up."""
        try:
            with (
                torch.no_grad(),
                set_current_vllm_config(self.worker.vllm_config),
                torch.device(self.worker.device),
            ):
                yield
        except Exception as error:
            self._abandon(f"{type(error).__name__}: {error}")
            raise

    def _abandon(self, why: str) -> None:
        """Close an update that cannot be completed. The layers get tensors again, else the next request would
        end the engine.
        """
        self.broken = f"version {self.open_version} came in part ({self._num_calls} chunks, {why})"
        self.open_version = None
        with (
            torch.no_grad(),
            set_current_vllm_config(self.worker.vllm_config),
            torch.device(self.worker.device),
        ):
            self._finalize()
