"""Which parts of a fake engine server are awake, and the pushes that fill its weights. Knows no request that samples."""

from __future__ import annotations

from asyncrl.calling import CallRefused
from asyncrl.wire import EnginePart, ErrorBody, LoadChunkRequest, Moved, SleepRequest, WakeRequest


class FakeParts:
    """Parts of `part_bytes` each, asleep or awake.

    Life:       awake -> sleep() -> asleep -> wake() -> awake, weights without content until restored, or until take_push()
                has found a whole push.
    Knobs:      `fail_wake` (a reason answers 507: no memory).
    """

    def __init__(self, name: str, part_bytes: int = 1000) -> None:
        self.name, self.part_bytes = name, part_bytes
        self.asleep: set[EnginePart] = set()
        self.has_content, self.can_restore = True, True
        self.fail_wake = ""
        self.pushed: list[LoadChunkRequest] = []
        """The chunks of the push in hand."""

    @property
    def can_serve(self) -> bool:
        """Both parts are awake, and the weights are some version's."""
        return self.has_content and not self.asleep

    def sleep(self, request: SleepRequest) -> Moved:
        """Free the parts that are awake."""
        freed = set(request.parts) - self.asleep
        self.asleep |= freed
        if "weights" in freed:
            self.has_content, self.pushed = False, []
        return Moved(num_bytes=len(freed) * self.part_bytes, seconds=0.0)

    def wake(self, request: WakeRequest) -> Moved:
        """Take the parts that are asleep."""
        if self.fail_wake:
            raise self._refused("/wake", 507, self.fail_wake)
        if "weights" in request.parts and request.restore and not self.has_content:
            if not self.can_restore:
                raise self._refused("/wake", 409, "what served came in chunks, and is nowhere whole")
            self.has_content = True
        taken = set(request.parts) & self.asleep
        self.asleep -= taken
        return Moved(num_bytes=len(taken) * self.part_bytes, seconds=0.0)

    def load(self, request: LoadChunkRequest) -> None:
        """One more chunk of the push."""
        self.check_weights_awake("/load_chunk")
        if self.has_content:
            raise self._refused("/load_chunk", 409, "the weights are being served")
        if request.index == 0:
            self.pushed = []
        is_next = request.index == len(self.pushed) and all(chunk.version == request.version for chunk in self.pushed)
        if not is_next:
            raise self._refused("/load_chunk", 409, f"chunk {request.index} does not come next")
        self.pushed.append(request)

    def take_push(self, version: int) -> None:
        """Serve the push in hand, if it is this version and whole."""
        pushed, self.pushed = self.pushed, []
        if not pushed or pushed[0].version != version or not pushed[-1].is_last:
            raise self._refused("/commit", 409, f"no whole push of {version} is here")
        self.has_content, self.can_restore = True, len(pushed) == 1

    def check_weights_awake(self, path: str) -> None:
        """Raise CallRefused while there is no memory for weights."""
        if "weights" in self.asleep:
            raise self._refused(path, 409, "the weights are asleep")

    def _refused(self, path: str, status: int, why: str) -> CallRefused:
        return CallRefused(self.name, path, status, ErrorBody(error=why))
