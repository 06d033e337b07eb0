"""A latency model behind the endpoints of an engine server. Imports no torch."""

from __future__ import annotations

import asyncio
import heapq
from collections import OrderedDict
from typing import Literal, TypeVar

from asyncrl.http import Refused
from asyncrl.messages.base import EnginePart, Moved, joint_digest, tensor_digest
from asyncrl.messages.calls import (
    CommitRequest,
    CommitResponse,
    EngineHealth,
    GenerateRequest,
    GenerateResponse,
    LoadChunkRequest,
    LoadChunkResponse,
    PrepareRequest,
    PrepareResponse,
    SleepRequest,
    WakeRequest,
)
from asyncrl.weights.tensor_files import read_or_refuse
from asyncrl_servers.checks import check_queue, check_request
from asyncrl_servers.engine_app import TokenStream
from asyncrl_servers.simulated.simulated_state import SimulatedRequest, SimulatedSpec
from asyncrl_servers.weight_state import Staged, WeightState, check_arrived, commit_waits

Answer = TypeVar("Answer")


class SimulatedEngine:
    """Holds any number of requests at the cost of a heap entry each, whatever the number of their tokens.

    All running requests get a token a step, so one clock of steps tells how far each is: it runs at 1 /
    (decode_step_s + n * per_row_s) and stands still during prefill and swaps. A request ends when the clock
    reaches its start plus its length; version changes are places on the clock. Tokens are drawn at the end,
    or once a step if they are streamed.

    Life: a request is queued -> running -> answered, or queued -> answered (aborted).
    Waits: one timer, for the next end (with a stream running, for the next step); every change of what runs
        sets it anew. A commit with interrupt=wait waits for the last running request, whose end or abort
        answers it.
    Invariant: the clock never runs back, and answers never hold a token that the clock has not passed.
    """

    def __init__(self, spec: SimulatedSpec) -> None:
        self.spec, self.weights = spec, WeightState(spec.start_version)
        self._num_bytes: dict[EnginePart, int] = {"weights": spec.weights_bytes, "kv": spec.kv_bytes}
        self._queued: OrderedDict[str, SimulatedRequest] = OrderedDict()
        self._running: dict[str, SimulatedRequest] = {}
        self._streamed: dict[str, SimulatedRequest] = {}
        self._ends: list[SimulatedRequest] = []
        self._steps, self._updated_s, self._stalled_until_s = 0.0, 0.0, 0.0
        self._changes: list[tuple[float, int]] = [(0.0, spec.start_version)]
        self._timer: asyncio.TimerHandle | None = None
        self._draining: tuple[CommitRequest, Staged, asyncio.Future[CommitResponse]] | None = None
        self._tokens_generated, self._busy_s = 0, 0.0

    def health(self) -> EngineHealth:
        """Counts of this moment."""
        self._advance()
        num_sampled = sum(entry.num_sampled(self._steps) for entry in self._running.values())
        return EngineHealth(
            name=self.spec.name,
            kind="simulated",
            policy_version=self.weights.version,
            slots=self.spec.slots,
            max_length=self.spec.max_length,
            num_running=len(self._running),
            num_queued=len(self._queued),
            tokens_generated=self._tokens_generated + num_sampled,
            device="none",
            decode_s=self._busy_s,
            asleep=self.weights.asleep,
        )

    def submit(
        self, request: GenerateRequest, stream: TokenStream | None = None
    ) -> asyncio.Future[GenerateResponse]:
        """Queue a request. Stop strings never match: there is no text. Raises Refused (400, 409, 503)."""
        check_request(request, self.spec.max_length, self.spec.vocab_size)
        check_queue(request.request_id, self._running, self._queued, max_queued=self.spec.max_queued)
        entry = self._queued[request.request_id] = SimulatedRequest(request, stream)
        self._update()
        return entry.answer

    def abort(self, request_ids: list[str] | None) -> asyncio.Future[list[str]]:
        """End these requests (None: all) with what they have; names those that were here."""
        self._update()  # what is over by now has ended by itself
        wanted = [*self._running, *self._queued] if request_ids is None else dict.fromkeys(request_ids)
        aborted = [request_id for request_id in wanted if self._end_early(request_id)]
        self._update()
        return _done(aborted)

    def prepare(self, request: PrepareRequest) -> PrepareResponse:
        """Read and verify the weights, then drop them. Raises Refused (400, 409)."""
        if request.kind != "weights":
            raise Refused(
                400,
                f"policy_version {request.version} comes as adapters, and this server has no weights to "
                "merge them over",
                rule="rollout.engine=simulated takes whole weights alone",
                way_out="set weight_sync.transport=shm, or rollout.engine=embedded.",
            )
        self.weights.check_awake(f"policy_version {request.version} cannot be staged")
        self.weights.staged = None
        check_arrived(request.path, *_digests(request.path), request)
        self.weights.staged = Staged(request)
        return PrepareResponse(version=request.version, digest=request.digest)

    def commit(self, request: CommitRequest) -> asyncio.Future[CommitResponse]:
        """Serve under the new version after swap_s; the answer comes when decoding can go on. Raises Refused
        (409).
        """
        if self._draining is not None:
            raise commit_waits(self._draining[0].version)
        self._update()
        version, staged = self.weights.version, self.weights.begin_commit(request)
        if staged is None:
            if self.weights.version != version:
                self._changes.append((self._steps, request.version))
            self._update()
            same = CommitResponse(
                version=request.version, digest=request.digest, pause_s=0.0, num_interrupted=0
            )
            return _done(same)
        answer: asyncio.Future[CommitResponse] = asyncio.get_running_loop().create_future()
        self._draining = (request, staged, answer)
        if request.interrupt != "wait":
            self._swap()
        self._update()
        return answer

    def sleep(self, request: SleepRequest) -> asyncio.Future[Moved]:
        """Abort what runs and put these parts to sleep; what is queued stays."""
        self._update()
        for request_id in list(self._running):
            self._end_early(request_id)
        if self._draining is not None:
            self._swap()
        freed = [part for part in self._num_bytes if part in set(request.parts) - set(self.weights.asleep)]
        for part in freed:
            self.weights.set_asleep(part)
        self._update()
        return _done(Moved(num_bytes=sum(self._num_bytes[part] for part in freed), seconds=0.0))

    def wake(self, request: WakeRequest) -> asyncio.Future[Moved]:
        """Wake these parts. Raises Refused (400, 409) with nothing changed."""
        weights = self.weights
        if weights.must_restore(request.parts, restore=request.restore):
            if weights.source:
                weights.check_restored(joint_digest(_digests(weights.source)[0].values()), weights.source)
            weights.settle(weights.version, weights.digest, weights.source)
        taken = [part for part in weights.asleep if part in request.parts]
        for part in taken:
            weights.set_awake(part)
        self._update()
        return _done(Moved(num_bytes=sum(self._num_bytes[part] for part in taken), seconds=0.0))

    def load_chunk(self, request: LoadChunkRequest) -> LoadChunkResponse:
        """Read and verify a chunk, then drop it. Raises Refused (400, 409)."""
        self.weights.check_may_load(request.version)
        push = self.weights.push
        with push.receiving(request, self.weights.version):
            digest = push.add(request, *_digests(request.path))
        return LoadChunkResponse(version=request.version, index=request.index, digest=digest)

    def _swap(self) -> None:
        assert self._draining is not None
        (request, staged, answer), weights = self._draining, self.weights
        self._draining = None
        is_abort = request.interrupt == "abort" and weights.has_content
        num_interrupted = len(self._running) + (len(self._queued) if is_abort else 0)
        pause_s = self.spec.swap_s
        if is_abort:
            for request_id in [*self._running, *self._queued]:
                self._end_early(request_id)
        if request.interrupt == "keep":
            for entry in self._running.values():
                num_tokens = len(entry.request.prompt_ids) + entry.num_sampled(self._steps)
                pause_s += self.spec.prefill_s_per_token * num_tokens
        weights.settle(request.version, request.digest, staged.request.path)
        self._changes.append((self._steps, request.version))
        self._stall(pause_s)
        response = CommitResponse(
            version=request.version, digest=request.digest, pause_s=pause_s, num_interrupted=num_interrupted
        )

        def tell() -> None:
            if not answer.done():
                answer.set_result(response)

        asyncio.get_running_loop().call_later(pause_s, tell)

    def _stall(self, seconds: float) -> None:
        self._stalled_until_s = max(self._stalled_until_s, self._updated_s) + seconds
        self._busy_s += seconds

    def _step_s(self) -> float:
        return self.spec.decode_step_s + self.spec.per_row_s * len(self._running)

    def _advance(self) -> None:
        """Bring the step clock to this moment."""
        now_s = asyncio.get_running_loop().time()
        if self._running:
            decoded_s = max(0.0, now_s - max(self._updated_s, self._stalled_until_s))
            self._busy_s += decoded_s
            self._steps += decoded_s / self._step_s()
        self._updated_s = now_s

    def _update(self) -> None:
        """End what is over, admit what fits, and set the timer for the next end."""
        self._advance()
        while self._ends and (self._ends[0].end <= self._steps + 1e-9 or self._ends[0].answer.done()):
            entry = heapq.heappop(self._ends)
            if not entry.answer.done():
                self._finish(entry, entry.length, "stop" if entry.is_stop else "length")
        if self._draining is not None and not self._running:
            self._swap()
        may_start = self._draining is None and self.weights.can_serve
        while may_start and self._queued and len(self._running) < self.spec.slots:
            self._start(self._queued.popitem(last=False)[1])
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for entry in self._streamed.values():
            entry.tell(entry.num_sampled(self._steps), self.spec, self._changes)
        if self._ends:
            num_steps = self._ends[0].end - self._steps
            wait_s = (min(num_steps, 1.0) if self._streamed else num_steps) * self._step_s()
            at_s = max(self._updated_s, self._stalled_until_s) + wait_s
            self._timer = asyncio.get_running_loop().call_at(at_s, self._update)

    def _start(self, entry: SimulatedRequest) -> None:
        request = entry.request
        wanted = self.spec.completion_length(request.seed) - request.num_resumed
        entry.begin(self._steps, max(1, wanted))
        self._running[request.request_id] = entry
        if entry.stream is not None:
            self._streamed[request.request_id] = entry
        heapq.heappush(self._ends, entry)
        self._stall(self.spec.prefill_s_per_token * len(request.prompt_ids))

    def _end_early(self, request_id: str) -> bool:
        entry = self._running.get(request_id) or self._queued.get(request_id)
        if entry is not None:
            num_tokens = entry.num_sampled(self._steps) if request_id in self._running else 0
            self._finish(entry, num_tokens, "abort")
        return entry is not None

    def _finish(
        self, entry: SimulatedRequest, num_tokens: int, reason: Literal["stop", "length", "abort"]
    ) -> None:
        for entries in (self._running, self._streamed, self._queued):
            entries.pop(entry.request.request_id, None)
        self._tokens_generated += num_tokens
        if not entry.answer.done():
            entry.answer.set_result(entry.sampled(0, num_tokens, self.spec, self._changes, reason))


def _digests(path: str) -> tuple[dict[str, bytes], int]:
    """(digest of each tensor of a file by name, bytes of all). Raises Refused (400)."""
    tensors = read_or_refuse(path)
    digests = {name: tensor_digest(name, raw.dtype, raw.shape, raw.data) for name, raw in tensors.items()}
    return digests, sum(len(raw.data) for raw in tensors.values())


def _done(result: Answer) -> asyncio.Future[Answer]:
    answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
    answer.set_result(result)
    return answer
