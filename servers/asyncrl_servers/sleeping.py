"""What every engine server knows of its sleep, in the same words: which parts are awake, and a push that
comes chunk by chunk.

Knows messages and digests; knows no tensor and no memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from asyncrl.http import Refused
from asyncrl.messages.base import EnginePart, joint_digest
from asyncrl.messages.engine_calls import LoadChunkRequest
from asyncrl.weights.tensor_files import RESEND
from asyncrl_servers.checks import wrong_digest

PARTS: tuple[EnginePart, ...] = ("kv", "weights")
"""In the order in which they go to sleep."""
PUSH_AGAIN = "push this version again, from chunk 0."


@dataclass(frozen=True, slots=True)
class Source:
    """Where the serving weights can be read again: the file `path`, or the model folder of the start
    (None).
    """

    path: str | None
    digest: str


class Wakefulness:
    """Which parts have memory, and whether the weights have content.

    Life:       awake -> asleep(part) -> awake(part). Weights that were asleep come back without content,
                until set_content().
    Invariant:  can_serve is true only while every part has memory and the weights are those of a version
                that was verified.
    """

    def __init__(self) -> None:
        self._asleep: set[EnginePart] = set()
        self.has_content = self.can_serve = True

    @property
    def asleep(self) -> list[EnginePart]:
        """The parts without memory."""
        return [part for part in PARTS if part in self._asleep]

    def is_awake(self, part: EnginePart) -> bool:
        """Whether it has memory."""
        return part not in self._asleep

    def set_asleep(self, part: EnginePart) -> None:
        """It has no memory any more."""
        self._asleep.add(part)
        self.has_content = self.has_content and part != "weights"
        self.can_serve = False

    def set_awake(self, part: EnginePart) -> None:
        """It has memory."""
        self._asleep.discard(part)
        self.can_serve = self.has_content and not self._asleep

    def set_content(self) -> None:
        """The weights are those of a version, and verified."""
        self.has_content = True
        self.can_serve = not self._asleep

    def check_weights_awake(self, what: str) -> None:
        """Raise Refused (409) if `what` would need memory for weights that are asleep."""
        if "weights" in self._asleep:
            rule = "weights that are asleep have no memory"
            raise Refused(409, f"{what}: the weights are asleep", rule=rule, way_out="wake them first.")

    def check_may_load(self, version: int) -> None:
        """Raise Refused (409) if a chunk would be written over weights that are asleep or serve."""
        self.check_weights_awake(f"a chunk of policy_version {version} cannot be loaded")
        if self.has_content:
            raise Refused(
                409,
                f"a chunk of policy_version {version} would be written over weights that are served",
                rule="chunks are loaded into weights that were put to sleep and woken without restore",
                way_out="sleep and wake the weights first, or publish through /prepare.",
            )


def nowhere_whole(version: int) -> Refused:
    """The refusal (409) to restore weights that came in more than one chunk."""
    return Refused(
        409,
        f"policy_version {version} cannot be restored: it came chunk by chunk, and lies nowhere as a whole",
        rule="what is restored is read again from the file or folder that it came from",
        way_out=f"wake without restore, and {PUSH_AGAIN}",
    )


class ChunkedPush:
    """The chunks of the newest push, as far as they are loaded.

    Life:       nothing -> chunk 0, 1, ... of one version -> whole -> committed. Chunk 0 begins anew at any
                time; a chunk that is not what was sent, and a commit that is refused, end it: nothing.
    Invariant:  `digests` has each tensor that was loaded once, under its name.
    """

    def __init__(self) -> None:
        self.clear()

    def __repr__(self) -> str:
        return f"<ChunkedPush v{self.version}, {self.num_chunks} chunks{', whole' if self.is_whole else ''}>"

    def clear(self) -> None:
        """Nothing is loaded."""
        self.version, self.num_chunks, self.is_whole, self.last_path = -1, 0, False, ""
        self.digests: dict[str, bytes] = {}

    def expect(self, request: LoadChunkRequest, serving: int) -> None:
        """Raise Refused (409) if this chunk cannot come now: another one is next, or the version is older
        than the serving one.
        """
        if request.version < serving:
            raise Refused(
                409,
                f"policy_version {request.version} cannot be loaded after {serving}",
                rule="versions only grow",
                way_out="push a newer version.",
            )
        if request.index == 0:
            self.clear()
        elif self.is_whole or (request.version, request.index) != (self.version, self.num_chunks):
            here = f"chunks 0..{self.num_chunks - 1} of policy_version {self.version}"
            raise Refused(
                409,
                f"chunk {request.index} of policy_version {request.version} came, loaded is "
                f"{here if self.num_chunks else 'nothing'}{', which is whole' * self.is_whole}",
                rule="the chunks of one version come in order",
                way_out=PUSH_AGAIN,
            )

    def add(self, request: LoadChunkRequest, digests: Mapping[str, bytes], num_bytes: int) -> str:
        """The tensors of this chunk are loaded; returns their digest. Raises Refused (409) if they are not
        what was sent.
        """
        again = sorted(self.digests.keys() & digests.keys())
        digest = joint_digest(digests.values())
        if again or (len(digests), num_bytes) != (request.num_tensors, request.num_bytes):
            self.clear()
            raise Refused(
                409,
                f"{request.place} holds {len(digests)} tensors of {num_bytes} bytes, announced were "
                f"{request.num_tensors} of {request.num_bytes}; {len(again)} of them came in an earlier "
                f"chunk {again[:3]}",
                rule="each tensor of a push comes once",
                way_out=RESEND,
            )
        if digest != request.digest:
            self.clear()
            raise wrong_digest(request.version, request.place, digest, request.digest)
        self.version, self.num_chunks = request.version, request.index + 1
        self.is_whole, self.last_path = request.is_last, request.path
        self.digests.update(digests)
        return digest

    def take(self, version: int, digest: str, names: Iterable[str] = ()) -> Source | None:
        """End the push: where its weights lie, if in one file. Raises Refused (409) if it is not whole, or
        not `digest`. `names`: the tensors that it must have brought.
        """
        missing = sorted(set(names) - self.digests.keys())
        loaded, state = joint_digest(self.digests.values()), repr(self)
        is_whole = self.is_whole and self.version == version
        source = Source(self.last_path, loaded) if self.num_chunks == 1 and self.last_path else None
        self.clear()
        if not is_whole or missing or loaded != digest:
            raise Refused(
                409,
                f"commit of policy_version {version} with digest {digest}, but loaded is {state} with digest "
                f"{loaded}" + (f", and {len(missing)} tensors never came: {missing[:3]}" if missing else ""),
                rule="a version is served only when all its chunks are here and are what was sent",
                way_out=PUSH_AGAIN,
            )
        return source
