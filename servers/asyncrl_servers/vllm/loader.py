"""Loads weights into one vLLM worker's model and refuses incomplete sets."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from torch import Tensor, nn

from asyncrl.base.http import Refused
from asyncrl.messages.engine_api import LoadChunkRequest, PrepareRequest
from asyncrl.weights.ipc import TrainerMemory
from asyncrl.weights.tensor_files import digest_and_size, read_or_refuse
from asyncrl_servers.vllm.reload import Reload
from asyncrl_servers.weight_state import PUSH_AGAIN, ChunkedPush, Staged, check_arrived, the_staged


class Loader:
    """Weights of one worker.

    Life: idle -> staging (hashed in a thread) -> staged -> load -> idle; or idle -> open (chunks) ->
        finished -> idle.
    Invariant: a load succeeds only if every parameter received all its elements; else the model is
        `broken` until a full load.
    """

    reload_class = Reload

    def __init__(self, worker: Any) -> None:
        self.worker = worker
        self._memory = TrainerMemory(worker.device)
        self._push = ChunkedPush()
        self._staging = ThreadPoolExecutor(1, "stage weights")
        self._hashed: Future[str] = Future()
        self.staged: Staged | None = None
        self.broken: str | None = None
        self.open_version: int | None = None
        self._reload: Reload | None = None

    @property
    def model(self) -> nn.Module:
        model: nn.Module = self.worker.model_runner.get_model()
        return model

    def stage(self, **fields: Any) -> dict[str, Any]:
        """Begin to stage a PrepareRequest's file, or report progress. Raises Refused."""
        request = PrepareRequest(**fields)
        if self.staged is None or self.staged.request != request:
            self.staged = None
            tensors = {name: raw.as_torch() for name, raw in read_or_refuse(request.path).items()}
            self.staged = Staged(request, tensors)
            self._hashed = self._staging.submit(_check_staged, self.staged)
        if not self._hashed.done():
            return {"state": "staging"}
        return {"state": "staged", "digest": self._checked_digest()}

    def load(self, version: int, digest: str) -> dict[str, Any]:
        staged = the_staged(self.staged, version, digest)
        self._checked_digest()
        self.begin(version)
        self.add(staged.tensors.items())
        self.finish()
        self.staged = None  # frees the file
        return {"num_tensors": staged.request.num_tensors, "num_bytes": staged.request.num_bytes}

    def load_chunk(self, **fields: Any) -> dict[str, Any]:
        """Load from a file or shared memory; chunk 0 opens an update. Raises Refused."""
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
        """Close the update, which must be the whole push. Raises Refused."""
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
        """Drop the staged file. An open update breaks the weights."""
        self.staged = None
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
        """Raise Refused if a parameter is incomplete."""
        assert self.open_version is not None, f"no update is open ({self.broken})"
        with self._changing() as reload:
            if missing := reload.incomplete():
                what = f"version {self.open_version} lacks {len(missing)} parameters: {missing[:5]}"
                rule = "the weights of this server are of no version until a load succeeds"
                raise Refused(409, what, rule=rule, way_out="load a whole set again, or restart it.")
            reload.finish()
        self.open_version = None
        self._now_whole()

    def _now_whole(self) -> None:
        """Broken weights may leave NaN in the KV cache, which masked attention does not remove."""
        if self.broken is not None:
            for cache in self.worker.model_runner.kv_caches:
                for part in [cache] if isinstance(cache, Tensor) else cache:
                    part.zero_()
        self.broken = None

    def _checked_digest(self) -> str:
        """Raise Refused and forget the set if hashing failed."""
        try:
            return self._hashed.result()
        except Exception:
            self.staged = None
            raise

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
        """Complete the layers: the next request would end the engine."""
        assert self._reload is not None
        self.broken = f"version {self.open_version} came in part ({why})"
        self.open_version = None
        self._reload.finish()


def _check_staged(staged: Staged) -> str:
    return check_arrived(staged.request.path, digest_and_size(staged.tensors), staged.request)
