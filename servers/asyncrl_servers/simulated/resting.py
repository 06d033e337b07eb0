"""Sleep and wake of an engine without a model: the same states and refusals as the real one's, and numbers instead of memory."""

from __future__ import annotations

from collections.abc import Collection

from asyncrl.serving import Refused
from asyncrl.wire import CommitRequest, EnginePart, LoadChunkRequest, LoadChunkResponse, joint_digest
from asyncrl_servers.checks import not_newer, wrong_digest
from asyncrl_servers.simulated.spec import SimulatedSpec
from asyncrl_servers.simulated.staging import read_digests
from asyncrl_servers.sleeping import ChunkedPush, Source, Wakefulness, nowhere_whole


class SimulatedResting:
    """Which parts are asleep, and the push that lies in the weights.

    Life:       as the Resting of the embedded engine: awake -> free() -> asleep -> take() -> awake, and the weights without content
                until they are restored or a whole push is committed.
    """

    def __init__(self, spec: SimulatedSpec) -> None:
        self._num_bytes: dict[EnginePart, int] = {"weights": spec.weights_bytes, "kv": spec.kv_bytes}
        self.state = Wakefulness()
        self.push = ChunkedPush()
        self.source: Source | None = Source(None, "")
        """Where the weights that served last can be read again."""

    def free(self, parts: Collection[EnginePart]) -> int:
        """Put these parts to sleep; returns the bytes of those that were awake."""
        freed = [part for part in self._num_bytes if part in parts and self.state.is_awake(part)]
        for part in freed:
            self.state.set_asleep(part)
        if "weights" in freed:
            self.push.clear()
        return sum(self._num_bytes[part] for part in freed)

    def take(self, parts: Collection[EnginePart], version: int, *, restore: bool) -> int:
        """Wake these parts; returns the bytes of those that were asleep. Raises Refused (400, 409) with nothing changed."""
        is_restored = restore and "weights" in parts and not self.state.has_content
        if is_restored:
            self._check_source(version)
        taken = [part for part in self._num_bytes if part in parts and not self.state.is_awake(part)]
        for part in taken:
            self.state.set_awake(part)
        if is_restored:
            self.push.clear()
            self.state.set_content()
        return sum(self._num_bytes[part] for part in taken)

    def load_chunk(self, request: LoadChunkRequest, serving: int) -> LoadChunkResponse:
        """Read and verify a chunk, then drop it. Raises Refused (400, 409), after which no chunk is there."""
        self.state.check_may_load(request.version)
        self.push.expect(request, serving)
        try:
            digests, num_bytes = read_digests(request.path)
        except Refused:
            self.push.clear()
            raise
        digest = self.push.add(request, digests, num_bytes)
        return LoadChunkResponse(version=request.version, index=request.index, digest=digest)

    def commit(self, request: CommitRequest, serving: int, digest: str) -> None:
        """Serve the push that lies here. Raises Refused (409), after which no chunk is there. `digest` is that of `serving`."""
        if request.version == serving and digest not in ("", request.digest):
            raise not_newer(request.version, serving)
        self.settle(self.push.take(request.version, request.digest))

    def settle(self, source: Source | None) -> None:
        """The weights have content, which came from `source`."""
        self.source = source
        self.state.set_content()

    def _check_source(self, version: int) -> None:
        if self.source is None:
            raise nowhere_whole(version)
        if self.source.path is not None:
            digest = joint_digest(read_digests(self.source.path)[0].values())
            if digest != self.source.digest:
                raise wrong_digest(version, self.source.path, digest, self.source.digest)
