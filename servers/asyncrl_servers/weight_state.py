"""Served version, staged set, push chunks and sleeping parts, without tensors."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

from asyncrl.base.http import Refused
from asyncrl.messages import engine_api as api
from asyncrl.weights.tensor_files import RESEND, joint_digest

if TYPE_CHECKING:
    from torch import Tensor

PUSH_AGAIN = "push this version again, from chunk 0."
Arrived = tuple[dict[str, bytes], int]
"""(digest of each tensor by name, total bytes)."""
Part = TypeVar("Part")


def check_arrived(
    place: str, arrived: Arrived, announced: api.PrepareRequest | api.LoadChunkRequest
) -> str:
    """Return the digest. Raises Refused (409) on a mismatch."""
    digests, num_bytes = arrived
    digest = joint_digest(digests.values())
    expected = (announced.num_tensors, announced.num_bytes, announced.digest)
    # Counts too: they say in the message whether tensors are missing or bytes are
    # wrong.
    if (len(digests), num_bytes, digest) != expected:
        what = f"{place} holds {len(digests)} tensors of {num_bytes} bytes with digest {digest}, announced "
        what += f"were {expected[0]} of {expected[1]} with digest {expected[2]} (version {announced.version})"
        raise Refused(409, what, way_out=RESEND)
    return digest


def take_announced(
    received: Iterable[tuple[int, Part]],
    announced: api.PrepareRequest,
    place: str,
    take: Callable[[Part], Arrived],
) -> dict[str, bytes]:
    """Pass received parts to `take` and return the digests. Raises Refused (409) on a
    mismatch.
    """
    digests, num_bytes = dict[str, bytes](), 0
    for _, part in received:
        new, size = take(part)
        digests |= new
        num_bytes += size
    check_arrived(place, (digests, num_bytes), announced)
    return digests


class ChunkedPush:
    """Loaded chunks of the newest push.

    Life: empty -> chunk 0, 1, ... of one version -> whole -> taken. A corrupt chunk or
        refused take() empties it.
    """

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self.version = -1
        self.num_chunks = 0
        self.digests: dict[str, bytes] = {}

    def load(
        self,
        request: api.LoadChunkRequest,
        read: Callable[[api.LoadChunkRequest], Arrived],
    ) -> str:
        """Load a chunk with `read` and return its digest; an error ends the push.
        Raises Refused (409).
        """
        # A new push, perhaps after a failed one of the same version.
        if request.index == 0:
            self.clear()
        elif (request.version, request.index) != (self.version, self.num_chunks):
            what = f"chunk {request.index} of policy_version {request.version} came, loaded are "
            raise Refused(
                409, f"{what}{self.num_chunks} of {self.version}", way_out=PUSH_AGAIN
            )
        try:
            arrived = read(request)
            digest = check_arrived(request.place, arrived, request)
        except Exception:
            # The weights now hold part of a chunk. Only a whole new push makes them a
            # version again.
            self.clear()
            raise
        self.version = request.version
        self.num_chunks = request.index + 1
        self.digests |= arrived[0]
        return digest

    def take(self, version: int, digest: str, names: Collection[str] = ()) -> None:
        """Accept the loaded chunks as this version, and forget them. Raises Refused (409)
        for an incomplete push, missing `names`, or another digest.
        """
        # The trainer's digest covers only the tensors that it sent. A parameter that
        # was never sent would have content of no version.
        missing = sorted(set(names) - self.digests.keys())
        loaded = joint_digest(self.digests.values())
        is_other = (self.version, loaded) != (version, digest)
        what = f"commit of policy_version {version} with digest {digest}: loaded are "
        what += f"{self.num_chunks} chunks of {self.version} with digest {loaded}, "
        what += f"which lack {len(missing)} tensors {missing[:3]}"
        # Also when refused: a second commit must not find half of a push.
        self.clear()
        if missing or is_other:
            raise Refused(409, what, way_out=PUSH_AGAIN)


@dataclass(frozen=True, slots=True)
class Staged:
    request: api.PrepareRequest
    tensors: Mapping[str, Tensor] = field(default_factory=dict)


def require_staged(staged: Staged | None, version: int, digest: str) -> Staged:
    """Return the staged set. Raise Refused (409) for another version or digest."""
    if staged is None or (staged.request.version, staged.request.digest) != (
        version,
        digest,
    ):
        there = (
            f"{staged.request.version} with digest {staged.request.digest}"
            if staged
            else "nothing"
        )
        raise Refused(
            409,
            f"policy_version {version} with digest {digest} is not staged: that is {there}",
        )
    return staged


class WeightState:
    """Serving weights, at most one staged set, and sleeping parts.

    Life: serving -> asleep -> awake without content -> serving, after a commit.
    Waits: prepare() and load_chunk() run in any thread; memory changes hold `lock`.
    Invariant: can_serve requires memory for every part and a checked digest.
    """

    def __init__(
        self, names: Collection[str] = (), asleep: Iterable[api.EnginePart] = ()
    ) -> None:
        """`names`: tensors that a chunked push must contain."""
        self.version = 0
        self.names = names
        self.lock = threading.Lock()
        self.push = ChunkedPush()
        self.staged: Staged | None = None
        self.swapping: tuple[api.CommitRequest, Staged] | None = None
        self.has_content = True
        self._digest = ""
        self._asleep = set(asleep)

    def read(self, request: api.PrepareRequest) -> Mapping[str, Tensor]:
        """Return the verified tensors to stage. Raises Refused (400, 409)."""
        raise NotImplementedError

    def load(self, request: api.LoadChunkRequest) -> Arrived:
        raise NotImplementedError

    @property
    def digest(self) -> str:
        return self._digest

    @property
    def asleep(self) -> list[api.EnginePart]:
        return sorted(self._asleep)

    @property
    def can_serve(self) -> bool:
        return self.has_content and not self._asleep

    @property
    def may_start(self) -> bool:
        """Whether requests may start. With interrupt=wait a commit waits until none runs."""
        return self.can_serve and self.swapping is None

    def set_asleep(self) -> None:
        self._asleep = {"kv", "weights"}
        self.has_content = False
        self.staged = None
        self.push.clear()

    def set_awake(self, part: api.EnginePart) -> None:
        self._asleep.discard(part)

    def settle(self, version: int, digest: str) -> None:
        self.push.clear()
        self.version = version
        self._digest = digest
        self.has_content = True
        self.staged = None
        self.swapping = None

    def prepare(self, request: api.PrepareRequest) -> api.Loaded:
        """Stage during generation. Raises Refused (400, 409)."""
        with self.lock:
            # Before read(): two staged sets would need three times the memory of the
            # weights.
            self.staged = None
            self.staged = Staged(request, self.read(request))
        return api.Loaded(digest=request.digest)

    def load_chunk(self, request: api.LoadChunkRequest) -> api.Loaded:
        """Load into weights without content. Raises Refused (400, 409) and drops all
        chunks.
        """
        with self.lock:
            # A chunk goes into the serving weights. With content, requests may be
            # sampling from them; asleep, there is no memory.
            if self.has_content or "weights" in self._asleep:
                rule = "chunks are loaded into weights that have slept, and are awake"
                raise Refused(
                    409, f"a chunk of policy_version {request.version} came", rule=rule
                )
            digest = self.push.load(request, self.load)
        return api.Loaded(digest=digest)

    def begin_commit(self, request: api.CommitRequest) -> api.CommitResponse | None:
        """Return the answer if this version serves, else set `swapping`. Raises Refused
        (409).
        """
        version, digest = request.version, request.digest
        # Compare the digest last: the initial digest takes long to compute.
        # A sleep loses the content and its digest. The version that served before may
        # then be committed again, which is how a sleep is undone.
        is_same = version == self.version and self.digest in (
            {digest} if self.has_content else {"", digest}
        )
        if version <= self.version and not is_same:
            what = f"policy_version {version} with digest {digest} cannot be committed over {self.version}"
            raise Refused(409, what, rule="versions only grow")
        # Chunks are in place already, so there is nothing to swap.
        if not self.has_content and self.push.version == version:
            self.push.take(version, digest, self.names)
            self.settle(version, digest)
        elif not (is_same and self.has_content):
            self.swapping = request, require_staged(self.staged, version, digest)
            return None
        return api.CommitResponse(
            version=version, digest=digest, pause_s=0.0, num_interrupted=0
        )
