"""Sleep and wake of an engine without a model: the same states and refusals as the real one's, and numbers
instead of memory.
"""

from __future__ import annotations

from collections.abc import Collection

from pydantic import BaseModel, ConfigDict, Field

from asyncrl.http import Refused
from asyncrl.messages.base import EnginePart, joint_digest, tensor_digest
from asyncrl.messages.engine_calls import CommitRequest, LoadChunkRequest, LoadChunkResponse, PrepareRequest
from asyncrl.weights.tensor_files import read_or_refuse
from asyncrl_servers.checks import not_newer, wrong_digest
from asyncrl_servers.sleeping import ChunkedPush, Source, Wakefulness, nowhere_whole

# What the parent tells a simulated engine server at its start.


class SimulatedSpec(BaseModel):
    """The spec file of `python -m asyncrl_servers.simulated`: one JSON object, unknown keys refused.

    With n running requests a decode step takes decode_step_s + n * per_row_s, and each of them gets one
    token.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    """Name of this server in logs and errors, like engine-0."""
    slots: int = Field(ge=1)
    """Requests that run at once."""
    max_length: int = Field(ge=2)
    """Most tokens of prompt and completion together."""
    vocab_size: int = Field(default=1000, ge=1)
    """Token ids are drawn from 0..vocab_size-1, each as likely as the other."""
    decode_step_s: float = Field(default=0.002, gt=0)
    """Seconds of a decode step, however many requests run."""
    per_row_s: float = Field(default=0.0001, ge=0)
    """Seconds that each running request adds to a decode step."""
    prefill_s_per_token: float = Field(default=0.00002, ge=0)
    """Seconds for each prompt token of an admitted request; decoding stands still meanwhile."""
    swap_s: float = Field(default=0.001, ge=0)
    """Seconds that a weight swap stops decoding."""
    mean_tokens: float = Field(default=64.0, ge=1)
    """Mean length of a completion, lognormal and drawn from the request's seed; max_tokens cuts it."""
    sigma: float = Field(default=1.0, ge=0)
    """Sigma of the lognormal length (0 = all completions have mean_tokens)."""
    weights_bytes: int = Field(default=2**20, ge=0)
    """Bytes that it says the weights take, when they sleep and wake."""
    kv_bytes: int = Field(default=2**20, ge=0)
    """Bytes that it says the KV cache takes."""
    start_version: int = Field(default=0, ge=0)
    """policy_version at the start."""
    max_queued: int = Field(default=1_000_000, ge=1)
    """Requests that may wait for a slot; one more is refused with 503."""


def verify_weights(request: PrepareRequest) -> str:
    """Digest of the tensors in the safetensors file. Raises Refused: 400 if it cannot be read, 409 if it is
    not what was sent.
    """
    if request.kind != "weights":
        raise Refused(
            400,
            f"policy_version {request.version} comes as adapters (kind={request.kind}), and this server has "
            f"no weights to merge them over",
            rule="rollout.engine=simulated takes whole weights alone",
            way_out="set weight_sync.transport=shm, or rollout.engine=embedded.",
        )
    return _verified(request.version, request.path, request.digest)


def _verified(version: int, path: str, announced: str) -> str:
    digest = joint_digest(_digests(path)[0].values())
    if digest != announced:
        raise wrong_digest(version, path, digest, announced)
    return digest


def _digests(path: str) -> tuple[dict[str, bytes], int]:
    """(digest of each tensor of a file by name, bytes of all). Raises Refused (400)."""
    tensors = read_or_refuse(path)
    digests = {name: tensor_digest(name, raw.dtype, raw.shape, raw.data) for name, raw in tensors.items()}
    return digests, sum(len(raw.data) for raw in tensors.values())


class SimulatedSleep:
    """Which parts are asleep, and the push that lies in the weights; its life is that of the embedded
    engine's SleepMode.
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
        """Wake these parts; returns the bytes of those that were asleep. Raises Refused (400, 409) with
        nothing changed.
        """
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
            digests, num_bytes = _digests(request.path)
        except Refused:
            self.push.clear()
            raise
        digest = self.push.add(request, digests, num_bytes)
        return LoadChunkResponse(version=request.version, index=request.index, digest=digest)

    def commit(self, request: CommitRequest, serving: int, digest: str) -> None:
        """Serve the push that lies here. Raises Refused (409), after which no chunk is there. `digest` is
        that of `serving`.
        """
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
            _verified(version, self.source.path, self.source.digest)
