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
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from vllm.config import set_current_vllm_config
from vllm.model_executor.layers.attention import is_deferred_attention_layer
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.platforms import current_platform

from asyncrl.http import Refused
from asyncrl.messages.base import ChunkMemory, joint_digest
from asyncrl.weights.shared_memory import byte_digest, word_digest
from asyncrl_servers.trainer_memory import TrainerMemory

# Safetensors files on their way into a vLLM worker: mapped, hashed, cut into chunks. Knows torch; knows no
# vLLM.


RESEND = "export and prepare again; if it repeats, look for what else writes the staging file."


def map_file(path: str) -> dict[str, Tensor]:
    """All tensors of the file, in its order, lying in the file itself. Raises Refused if it cannot be
    read.
    """
    if not Path(path).is_file():
        raise Refused(400, f"no weights file {path}", way_out=RESEND)
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            return {name: file.get_tensor(name) for name in file.offset_keys()}
    except (SafetensorError, OSError) as error:
        raise Refused(400, f"cannot read the weights file {path}: {error}", way_out=RESEND) from error


def check_counts(tensors: Mapping[str, Tensor], path: str, num_tensors: int, num_bytes: int) -> None:
    """Raise Refused if the file has not as many tensors and bytes as were announced."""
    found = (len(tensors), sum(tensor.nbytes for tensor in tensors.values()))
    if found != (num_tensors, num_bytes):
        raise Refused(
            409,
            f"{path} has {found[0]} tensors of {found[1]} bytes, announced were {num_tensors} of {num_bytes}",
            rule="a version is served only when what was loaded is what was sent",
            way_out=RESEND,
        )


def check_digest(version: int, path: str, found: str, announced: str) -> None:
    """Raise Refused if these are not the weights that were announced."""
    if found != announced:
        raise Refused(
            409,
            f"weights of version {version} in {path} have digest {found}, announced was {announced}",
            rule="a version is served only when what was loaded is what was sent",
            way_out=RESEND,
        )


def chunks_of(tensors: Mapping[str, Tensor], chunk_bytes: int) -> Iterator[list[tuple[str, Tensor]]]:
    """The tensors in order, in chunks of at most `chunk_bytes`, or of one tensor where that is larger."""
    chunk: list[tuple[str, Tensor]] = []
    size = 0
    for name, tensor in tensors.items():
        if chunk and size + tensor.nbytes > chunk_bytes:
            yield chunk
            chunk, size = [], 0
        chunk.append((name, tensor))
        size += tensor.nbytes
    if chunk:
        yield chunk


class Staged:
    """A weights file that waits for its load. Its digest is computed in a thread, while the worker goes on
    generating.

    Life:       hashing -> staged, or failed: what was announced is another digest, or the file cannot be
    hashed. Is never hashed again. Waits:      nobody; whoever wants to know asks `is_hashed` again. `wait` is
    for a load that comes too early. Invariant:  `tensors` lie in the file that was mapped: replacing the file
    changes nothing here, as nobody writes into it.
    """

    def __init__(self, version: int, path: str, announced: str, num_tensors: int, num_bytes: int) -> None:
        """Raises Refused if the file has not the size that was announced; check() compares the digest."""
        self.version, self.path, self.announced = version, path, announced
        self.tensors = map_file(path)
        check_counts(self.tensors, path, num_tensors, num_bytes)
        self.num_bytes = num_bytes
        self.digest: str | None = None
        self.error: str | None = None
        self._thread = threading.Thread(target=self._hash, name=f"hash weights {version}", daemon=True)
        self._thread.start()

    @property
    def is_hashed(self) -> bool:
        """Whether the digest is there, or the error."""
        return self.digest is not None or self.error is not None

    def wait(self) -> None:
        """Sleep until it is."""
        self._thread.join()

    def check(self) -> None:
        """Raise Refused if the file could not be hashed, or is not what was announced."""
        if self.error is not None:
            raise Refused(400, self.error, way_out=RESEND)
        check_digest(self.version, self.path, self.digest or "", self.announced)

    def _hash(self) -> None:
        try:
            self.digest = joint_digest(byte_digest(name, tensor) for name, tensor in self.tensors.items())
        except Exception as error:
            self.error = f"cannot hash {self.path}: {type(error).__name__}: {error}"


BROKEN = "the weights of this server are of no version until a load succeeds: load a whole set again, or restart it."


class Loader:
    """The weights of one worker. Knows files and vLLM's model; knows no route and no other worker.

    Life:       idle -> staging -> staged -> load -> idle;  or  idle -> open (one chunk after the other) ->
    finished -> idle.
                A load that fails after it has begun leaves the weights `broken`, until one succeeds: it
                replaces them all.
    Waits:      nowhere but for a digest that is asked to be loaded while it is still computed.
    Invariant:  a load answers without error only if every parameter of the model got its elements from it.
    """

    def __init__(self, worker: Any) -> None:
        self.worker = worker
        self._memory = TrainerMemory(worker.device)
        self.staged: Staged | None = None
        self.broken: str | None = None
        self.open_version: int | None = None
        self._num_chunks = 0
        self._digests: list[bytes] = []
        self._names: set[str] = set()
        self._owners: set[str] = set()

    @property
    def model(self) -> nn.Module:
        """The model that serves."""
        model: nn.Module = self.worker.model_runner.get_model()
        return model

    def stage(
        self, version: int, path: str, digest: str, num_tensors: int, num_bytes: int, kind: str = "weights"
    ) -> dict[str, Any]:
        """Begin to stage this file, or say how far it is. Raises Refused; then nothing is staged."""
        if kind != "weights":
            raise Refused(
                400,
                f"cannot stage {kind}",
                rule="adapters come through /v1/load_lora_adapter",
                way_out="send whole weights.",
            )
        staged = self.staged
        if staged is None or (staged.version, staged.path, staged.announced) != (version, path, digest):
            self.staged = None
            staged = self.staged = Staged(version, path, digest, num_tensors, num_bytes)
        if not staged.is_hashed:
            return {"state": "hashing"}
        self._check_staged(staged)
        return {"state": "staged", "digest": staged.digest}

    def load(self, version: int, digest: str, chunk_bytes: int) -> dict[str, Any]:
        """Load what is staged under this digest: one reload, one load call a chunk. Raises Refused."""
        staged = self.staged
        if staged is None or (staged.version, staged.announced) != (version, digest):
            lies = f"version {staged.version} with digest {staged.announced}" if staged else "nothing"
            raise Refused(
                409,
                f"load of version {version} with digest {digest}, but staged is {lies}",
                rule="only staged weights are loaded",
                way_out="stage it first.",
            )
        staged.wait()
        self._check_staged(staged)
        started = time.monotonic()
        self.begin(version)
        for chunk in self._chunks(staged, chunk_bytes):
            self.add(chunk)
        self.finish()
        self.staged = None  # its mapping holds the file's memory
        seconds = time.monotonic() - started
        return {
            "num_tensors": len(staged.tensors),
            "num_bytes": staged.num_bytes,
            "num_chunks": self._num_chunks,
            "seconds": seconds,
        }

    def load_chunk(
        self,
        version: int,
        index: int,
        path: str,
        digest: str,
        num_tensors: int,
        num_bytes: int,
        memory: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Load chunk `index` of an update, from a file or from memory that the trainer shares; 0 opens an
        update. Raises Refused.
        """
        expected = self._num_chunks if self.open_version == version else 0
        if index not in (0, expected):
            raise Refused(
                409,
                f"chunk {index} of version {version}, expected chunk {expected}",
                rule="chunks come in order, from 0",
                way_out="send them again from 0.",
            )
        # A copy: the next chunk may be written over this one while vLLM holds tensors of it until their layer
        # is complete.
        if memory is None:
            tensors, hashed = {name: tensor.clone() for name, tensor in map_file(path).items()}, byte_digest
        else:
            path, tensors, hashed = (
                f"chunk {index}",
                self._memory.copies(ChunkMemory.model_validate(memory)),
                word_digest,
            )
        check_counts(tensors, path, num_tensors, num_bytes)
        if index and (again := sorted(self._names & tensors.keys())):
            raise Refused(
                409,
                f"{path} has {len(again)} tensors that came in an earlier chunk of version {version}: "
                f"{', '.join(again[:3])}",
                rule="each tensor of a push comes once",
                way_out="send them again from 0.",
            )
        digests = [hashed(name, tensor) for name, tensor in tensors.items()]
        check_digest(version, path, joint_digest(digests), digest)
        if index == 0:
            self.begin(version)
        self.add(tensors.items())
        self._digests += digests
        self._names |= tensors.keys()
        return {"digest": digest}

    def finish_chunks(self, version: int) -> dict[str, Any]:
        """End the update that is open. Raises Refused."""
        if self.open_version != version:
            raise Refused(
                409,
                f"no update of version {version} is open",
                rule="chunk 0 opens an update",
                way_out="send it again from 0.",
            )
        self.finish()
        return {"digest": joint_digest(self._digests)}

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
        self.open_version, self._num_chunks, self._digests, self._names = version, 0, [], set()
        # A tied parameter is listed once, for its first layer. Layers without parameters have buffers that
        # they compute themselves.
        self._owners = {name.rpartition(".")[0] for name, _ in self.model.named_parameters()}
        with self._changing():
            initialize_layerwise_reload(self.model)

    def add(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Load some tensors into the update that is open."""
        with self._changing():
            self.model.load_weights(iter(tensors))  # type: ignore[operator]  # every model of vLLM has it
        self._num_chunks += 1

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
        return chunks_of(staged.tensors, chunk_bytes)

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

    def _check_staged(self, staged: Staged) -> None:
        """Raise Refused, and stage nothing any more, if the file could not be hashed or is not what was
        announced.
        """
        try:
            staged.check()
        except Refused:
            self.staged = None
            raise

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
        self.broken = f"version {self.open_version} came in part ({self._num_chunks} chunks, {why})"
        self.open_version = None
        with (
            torch.no_grad(),
            set_current_vllm_config(self.worker.vllm_config),
            torch.device(self.worker.device),
        ):
            self._finalize()
