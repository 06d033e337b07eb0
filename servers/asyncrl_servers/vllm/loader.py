"""Loads weights into the model of one vLLM worker, whole or chunk by chunk, and refuses incomplete ones."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from torch import Tensor, nn

from asyncrl.messages.calls import LoadChunkRequest, PrepareRequest
from asyncrl.serving import Refused
from asyncrl.weights.export import cut
from asyncrl.weights.ipc import TrainerMemory
from asyncrl.weights.tensor_files import digest_and_size, read_or_refuse
from asyncrl_servers.vllm.reload import Reload, Twin, can_have_twin
from asyncrl_servers.weight_state import PUSH_AGAIN, ChunkedPush, Staged, check_arrived, the_staged


class Loader:
    """The weights of one worker. It sees files and vLLM's model; routes and other workers do not concern it.

    Life: idle -> staging (hashed; and loaded into a twin of the model, if it can have one) -> staged -> load
        -> idle;  or  idle -> open (one chunk after the other) -> finished -> idle. A load into the serving
        model that fails after it has begun leaves the weights `broken`, until one succeeds: it replaces them
        all. What is loaded into a twin and refused has changed nothing.
    Waits: nowhere but for what is asked to be loaded while it is still staged.
    Invariant: a load answers without error only if every parameter of the model got its elements from it.
        Staged tensors lie in the file that was mapped: replacing the file changes nothing here.
    """

    reload_class, can_have_twin = Reload, staticmethod(can_have_twin)

    def __init__(self, worker: Any) -> None:
        self.worker = worker
        self._memory = TrainerMemory(worker.device)
        self._push = ChunkedPush()
        self._staging = ThreadPoolExecutor(1, "stage weights")
        self._is_ready: Future[None] = Future()
        """Of what is staged, while the worker goes on generating."""
        self._twin: Twin | None = None
        self.staged: Staged | None = None
        self.broken: str | None = None
        self.open_version: int | None = None
        self._reload: Reload | None = None

    @property
    def model(self) -> nn.Module:
        """The model that serves."""
        model: nn.Module = self.worker.model_runner.get_model()
        return model

    def stage(self, *, chunk_bytes: int, **fields: Any) -> dict[str, Any]:
        """Begin to stage the file of a PrepareRequest, or say how far it is; `chunk_bytes` are loaded at
        once. Raises Refused; then nothing is staged.
        """
        request = PrepareRequest(**fields)
        if self.staged is None or self.staged.request != request:
            self._forget()
            tensors = {name: raw.as_torch() for name, raw in read_or_refuse(request.path).items()}
            if self.open_version is None and self.can_have_twin(self.model):
                self._twin = Twin(self.model)
            staged = Staged(request, tensors)
            self._is_ready = self._staging.submit(self._make_ready, staged, self._twin, chunk_bytes)
            self.staged, self._chunk_bytes = staged, chunk_bytes
        if not self._is_ready.done():
            return {"state": "staging"}
        self._check_ready()
        return {"state": "staged", "digest": request.digest}

    def load(self, version: int, digest: str) -> dict[str, Any]:
        """Serve what is staged under this digest: by exchanging weights with the twin, or by one reload, one
        load call a chunk. Raises Refused.
        """
        staged = the_staged(self.staged, version, digest)
        self._check_ready()
        if self._twin is not None:
            if self.open_version is not None:
                self._abandon("given up")
            self._twin.swap_in()
            self._now_whole()
        else:
            self.begin(version)
            for chunk in self._chunks(staged, self._chunk_bytes):
                self.add(chunk)
            self.finish()
        self._forget()  # the mapping holds the file's memory, the twin the weights that served
        return {"num_tensors": staged.request.num_tensors, "num_bytes": staged.request.num_bytes}

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
        self._forget()
        if self.open_version is not None:
            self._abandon("dropped")

    def begin(self, version: int) -> None:
        """Open an update of the model; one that was open is given up, as this one replaces all weights."""
        if self.open_version is not None:
            self._abandon("given up")
        self.open_version, self._reload = version, self.reload_class(self.worker, self.model)
        with self._changing() as reload:
            reload.begin()

    def add(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Load some tensors into the update that is open."""
        with self._changing() as reload:
            reload.add(tensors)

    def finish(self) -> None:
        """Close the update. Raises Refused if a parameter got nothing, or too little."""
        assert self.open_version is not None, f"no update is open ({self.broken})"
        with self._changing() as reload:
            rule = "the weights of this server are of no version until a load succeeds"
            _check_complete(reload, self.open_version, rule)
            reload.finish()
        self.open_version = None
        self._now_whole()

    def _now_whole(self) -> None:
        """Serve weights of one load. What broken ones left in the KV cache may be NaN, and attention that
        masks such a position still multiplies it by 0: NaN.
        """
        if self.broken is not None:
            for cache in self.worker.model_runner.kv_caches:
                for part in [cache] if isinstance(cache, Tensor) else cache:
                    part.zero_()
        self.broken = None

    def _make_ready(self, staged: Staged, twin: Twin | None, chunk_bytes: int) -> None:
        """On a thread: hash what is staged and load it into the twin. Raises Refused."""
        check_arrived(staged.request.path, digest_and_size(staged.tensors), staged.request)
        if twin is None:
            return
        reload = self.reload_class(self.worker, twin.model)
        try:
            reload.begin()
            for chunk in self._chunks(staged, chunk_bytes):
                reload.add(chunk)
            _check_complete(reload, staged.request.version, "weights are loaded whole; those that serve stay")
            reload.finish()
        finally:
            twin.end_loading()

    def _check_ready(self) -> None:
        """Raises Refused if what is staged is not what was announced, or not whole; then nothing is."""
        try:
            self._is_ready.result()
        except Exception:
            self._forget()
            raise

    def _forget(self) -> None:
        self.staged = self._twin = None

    def _chunks(self, staged: Staged, chunk_bytes: int) -> Iterable[list[tuple[str, Tensor]]]:
        """The tensors in order, in chunks of at most `chunk_bytes`, or of one tensor where that is larger."""
        for names in cut({name: tensor.nbytes for name, tensor in staged.tensors.items()}, chunk_bytes):
            yield [(name, staged.tensors[name]) for name in names]

    @contextlib.contextmanager
    def _changing(self) -> Iterator[Reload]:
        """The update that is open; a failure within gives it up."""
        assert self._reload is not None, "begin() comes first"
        try:
            yield self._reload
        except Exception as error:
            self._abandon(f"{type(error).__name__}: {error}")
            raise

    def _abandon(self, why: str) -> None:
        """Close an update that cannot be completed. The layers get tensors again, else the next request would
        end the engine.
        """
        assert self._reload is not None
        self.broken = f"version {self.open_version} came in part ({why})"
        self.open_version = None
        self._reload.finish()


def _check_complete(reload: Reload, version: int, rule: str) -> None:
    """Raises Refused if a parameter got nothing, or too little."""
    if missing := reload.incomplete():
        what = f"version {version} lacks {len(missing)} parameters: {missing[:5]}"
        raise Refused(409, what, rule=rule, way_out="load a whole set again, or restart it.")
