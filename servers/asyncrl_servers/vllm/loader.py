"""Loads weights into one vLLM worker's model and refuses incomplete sets."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from torch import Tensor, nn

from asyncrl.base.serving import Refused
from asyncrl.messages.engine_api import LoadChunkRequest, PrepareRequest
from asyncrl.weights.export import cut
from asyncrl.weights.ipc import TrainerMemory
from asyncrl.weights.tensor_files import digest_and_size, read_or_refuse
from asyncrl_servers.vllm.reload import Reload, Twin, can_have_twin
from asyncrl_servers.weight_state import PUSH_AGAIN, ChunkedPush, Staged, check_arrived, the_staged


class Loader:
    """Weights of one worker.

    Life: idle -> staging (hashed, and loaded into a twin if possible) -> staged -> load -> idle; or idle ->
        open (chunk after chunk) -> finished -> idle. A failed load into the serving model leaves it `broken`
        until a load replaces all weights.
    Invariant: a load succeeds only if every parameter received all its elements. Staged tensors survive a
        replaced file.
    """

    reload_class, can_have_twin = Reload, staticmethod(can_have_twin)

    def __init__(self, worker: Any) -> None:
        self.worker = worker
        self._memory = TrainerMemory(worker.device)
        self._push = ChunkedPush()
        self._staging = ThreadPoolExecutor(1, "stage weights")
        self._is_ready: Future[None] = Future()
        """Completion of staging."""
        self._twin: Twin | None = None
        self.staged: Staged | None = None
        self.broken: str | None = None
        self.open_version: int | None = None
        self._reload: Reload | None = None

    @property
    def model(self) -> nn.Module:
        model: nn.Module = self.worker.model_runner.get_model()
        return model

    def stage(self, *, chunk_bytes: int, **fields: Any) -> dict[str, Any]:
        """Begin to stage a PrepareRequest's file, or report progress. Raises Refused and stages nothing."""
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
        """Serve the staged weights: swap with the twin, or reload by chunks. Raises Refused."""
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
        self._forget()  # free the file and the twin
        return {"num_tensors": staged.request.num_tensors, "num_bytes": staged.request.num_bytes}

    def load_chunk(self, **fields: Any) -> dict[str, Any]:
        """Load a LoadChunkRequest's chunk, from a file or shared memory; chunk 0 opens an update. Raises
        Refused.
        """
        request = LoadChunkRequest(**fields)
        if request.index and self.open_version is None:
            self._push.clear()
        with self._push.receiving(request, serving=0):
            # Copy: vLLM keeps tensors until their layer is complete, and the next chunk may overwrite them.
            with self._memory.chunk(request) as views:
                tensors = {name: view.clone() for name, view in views.items()}
            digest = self._push.add(request, digest_and_size(tensors))
        if request.index == 0:
            self.begin(request.version)
        self.add(tensors.items())
        return {"digest": digest}

    def finish_chunks(self, version: int, digest: str) -> dict[str, Any]:
        """Close the open update, which must be the whole push. Raises Refused."""
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
        """Drop the staged file. An open update cannot be undone, and breaks the weights."""
        self._forget()
        if self.open_version is not None:
            self._abandon("dropped")

    def begin(self, version: int) -> None:
        """Open an update, abandoning an open one."""
        if self.open_version is not None:
            self._abandon("given up")
        self.open_version, self._reload = version, self.reload_class(self.worker, self.model)
        with self._changing() as reload:
            reload.begin()

    def add(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        with self._changing() as reload:
            reload.add(tensors)

    def finish(self) -> None:
        """Close the update. Raises Refused if a parameter is incomplete."""
        assert self.open_version is not None, f"no update is open ({self.broken})"
        with self._changing() as reload:
            rule = "the weights of this server are of no version until a load succeeds"
            _check_complete(reload, self.open_version, rule)
            reload.finish()
        self.open_version = None
        self._now_whole()

    def _now_whole(self) -> None:
        """Mark the weights as whole. Broken weights may leave NaN in the KV cache, which masked attention
        does not remove.
        """
        if self.broken is not None:
            for cache in self.worker.model_runner.kv_caches:
                for part in [cache] if isinstance(cache, Tensor) else cache:
                    part.zero_()
        self.broken = None

    def _make_ready(self, staged: Staged, twin: Twin | None, chunk_bytes: int) -> None:
        """Hash the staged tensors and load them into the twin, in a thread. Raises Refused."""
        check_arrived(staged.request.path, digest_and_size(staged.tensors), staged.request)
        if twin is None:
            return
        reload = self.reload_class(self.worker, twin.model)
        try:
            reload.begin()
            for chunk in self._chunks(staged, chunk_bytes):
                reload.add(chunk)
            _check_complete(
                reload, staged.request.version, "weights are loaded whole; the serving weights stay"
            )
            reload.finish()
        finally:
            twin.end_loading()

    def _check_ready(self) -> None:
        """Raise Refused and forget the set if staging failed."""
        try:
            self._is_ready.result()
        except Exception:
            self._forget()
            raise

    def _forget(self) -> None:
        self.staged = self._twin = None

    def _chunks(self, staged: Staged, chunk_bytes: int) -> Iterable[list[tuple[str, Tensor]]]:
        """Yield the tensors in order, in chunks of at most `chunk_bytes` (or one tensor)."""
        for names in cut({name: tensor.nbytes for name, tensor in staged.tensors.items()}, chunk_bytes):
            yield [(name, staged.tensors[name]) for name in names]

    @contextlib.contextmanager
    def _changing(self) -> Iterator[Reload]:
        """Yield the open update; abandon it on failure."""
        assert self._reload is not None, "begin() comes first"
        try:
            yield self._reload
        except Exception as error:
            self._abandon(f"{type(error).__name__}: {error}")
            raise

    def _abandon(self, why: str) -> None:
        """Close an incomplete update. The layers need tensors, or the next request ends the engine."""
        assert self._reload is not None
        self.broken = f"version {self.open_version} came in part ({why})"
        self.open_version = None
        self._reload.finish()


def _check_complete(reload: Reload, version: int, rule: str) -> None:
    """Raise Refused if a parameter is incomplete."""
    if missing := reload.incomplete():
        what = f"version {version} lacks {len(missing)} parameters: {missing[:5]}"
        raise Refused(409, what, rule=rule, way_out="load a whole set again, or restart it.")
