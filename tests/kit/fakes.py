"""Fakes with behaviour of what producers, weight sync and train loop call, for the
virtual clock. No process is started.
"""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import count
from typing import Any, Literal

from fake_engine import END_TOKEN
from token_cases import completion_of

from asyncrl.base.errors import RewardFailure
from asyncrl.messages.records import (
    Batch,
    Completion,
    GroupId,
    Prompt,
    Ticket,
    VersionSpan,
)
from asyncrl.messages.sampling import SamplingRequest
from asyncrl.messages.trainer_api import ExportResponse, TrainResponse


class FakeEngine:
    """In place of an EnginePool, with a latency for each request and no servers:
    `tokens` z, under `policy_version`.

    `latency_s(request)` seconds after it was sent, a request is answered;
    `tokens(request)` says with how many.
    """

    def __init__(
        self,
        *,
        latency_s: Callable[[SamplingRequest], float] = lambda _: 1.0,
        tokens: Callable[[SamplingRequest], int] = lambda _: 4,
    ) -> None:
        self._latency_s, self._tokens = latency_s, tokens
        self.policy_version = 0
        self.requests: list[SamplingRequest] = []
        self.resumed: dict[str, Completion] = {}
        self.running = self.peak_running = 0

    async def generate(
        self,
        request: SamplingRequest,
        *,
        partial: Completion | None = None,
        on_segment: Callable[[Completion], None] | None = None,
        on_spent: Callable[[int], None] | None = None,
    ) -> Completion:
        """Sleep, then answer. `partial` is noted in `resumed`; nothing interrupts, so
        `on_segment` is never called.
        """
        self.requests.append(request)
        if partial is not None:
            self.resumed[request.request_id] = partial
        version = self.policy_version
        self.running += 1
        self.peak_running = max(self.peak_running, self.running)
        try:
            await asyncio.sleep(self._latency_s(request))
        finally:
            self.running -= 1
        length = min(self._tokens(request), request.max_tokens)
        reason: Literal["stop", "length"] = (
            "length" if length == request.max_tokens else "stop"
        )
        if on_spent is not None:
            on_spent(length)
        spans = [VersionSpan(0, length, version)]
        return completion_of(
            [ord("z")] * length, spans=spans, finish=reason, prompt=request.prompt_ids
        )


class FakeTokenizer:
    """In place of the tokenizer, one token a character: its code point; the prompts'
    contents one after the other.
    """

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> tuple[int, ...]:
        """Code points of all contents. Raises ValueError for a zero byte, as a template
        may for any message.
        """
        text = "".join(message["content"] for message in messages)
        if "\0" in text:
            raise ValueError("no zero bytes")
        return tuple(map(ord, text))

    end_ids = frozenset({END_TOKEN})

    def decode(
        self, token_ids: Sequence[int], *, skip_special_tokens: bool = True
    ) -> str:
        """Decode characters, without END_TOKEN."""
        return "".join(chr(token) for token in token_ids if token != END_TOKEN)


class FakeSource:
    """A PromptSource without end: prompts p0, p1, ..., after requeued ones."""

    def __init__(self) -> None:
        self.requeued: list[Prompt] = []
        self.front: deque[Prompt] = deque()
        self._numbers = count()

    def observe_nowait(self, prompt_id: str, reward: float, version: int) -> None:
        """It draws without a look at rewards."""

    def next_nowait(self, version: int | None = None) -> Prompt:
        """The front, or a new one."""
        if self.front:
            return self.front.popleft()
        name = f"p{next(self._numbers)}"
        return Prompt(name, ({"role": "user", "content": name},))

    def requeue_nowait(self, prompt: Prompt) -> None:
        """To the front."""
        self.requeued.append(prompt)
        self.front.appendleft(prompt)


class FakeScorer:
    """Replaces Scorers: answers `reward(prompt, completion)` after `latency_s`; a text
    instead of a number is a failure.
    """

    def __init__(
        self,
        reward: Callable[[Prompt, str], float | str] = lambda _, text: float(len(text)),
        *,
        latency_s: float = 0.0,
    ) -> None:
        self._reward, self.latency_s = reward, latency_s

    has_score = shows_special = True
    scores_groups = is_library = False
    asked = None
    weights: Mapping[str, float] = {}

    def of(self, prompt: Prompt) -> FakeScorer:
        return self

    async def score(self, prompt: Prompt, sampled: Completion) -> float:
        """The reward, or RewardFailure."""
        await asyncio.sleep(self.latency_s)
        reward = self._reward(prompt, FakeTokenizer().decode(sampled.token_ids))
        if isinstance(reward, str):
            raise RewardFailure(f"the reward of {prompt.prompt_id} failed: {reward}")
        return reward


class FakeTrainer:
    """The trainer as weight sync and the train loop see it: a step takes `train_s`, an
    export `export_s`.

    Like the worker it does one thing at a time: an export waits for the step that runs.
    The digest of a version is `w{version}`, or always `w0` if `is_frozen` (a publish of
    the same weights).
    """

    def __init__(
        self, *, train_s: float = 1.0, export_s: float = 0.0, is_frozen: bool = False
    ) -> None:
        self.train_s, self.export_s, self.is_frozen = train_s, export_s, is_frozen
        self.is_up, self.went_up, self.num_restarts = True, asyncio.Event(), 0
        self.policy_version = 0
        self.steps_begun = 0
        self._begun: int | None = None
        self._worker = asyncio.Lock()
        self._changed = asyncio.Event()

    async def train(self, batch: Batch) -> TrainResponse:
        """Take an optimizer step: the version rises by one."""
        self.steps_begun += 1
        self._changed.set()
        async with self._worker:
            await asyncio.sleep(self.train_s)
            self.step()
        return TrainResponse(
            policy_version=self.policy_version, metrics={"policy/loss": 0.0}
        )

    def step(self) -> None:
        """The next version, at once."""
        self.policy_version += 1
        self.steps_begun = max(self.steps_begun, self.policy_version)
        self._changed.set()

    async def wait_version_above(self, version: int) -> int:
        """The newest version, once it is above `version`."""
        while self.policy_version <= version:
            self._changed.clear()
            await self._changed.wait()
        return self.policy_version

    async def wait_step_above(self, version: int) -> int:
        """The version that a begun step makes, once it is above `version`."""
        while self.steps_begun <= version:
            self._changed.clear()
            await self._changed.wait()
        return self.steps_begun

    async def wait_up(self) -> None:
        """Sleep while `is_up` is false; code that sets it to true also sets `went_up`."""
        while not self.is_up:
            await self.went_up.wait()

    async def begin_export(self, above: int) -> int:
        """Pin the newest version for export()."""
        await self.wait_version_above(above)
        async with self._worker:
            self._begun = self.policy_version
        return self._begun

    async def export(self) -> ExportResponse:
        """The version that was begun, or else the newest one, in staging; weights
        change only afterwards.
        """
        async with self._worker:
            await asyncio.sleep(self.export_s)
            version = self.policy_version if self._begun is None else self._begun
            self._begun = None
            name = "w0" if self.is_frozen else f"w{version}"
            return ExportResponse(
                version=version, path=name, digest=name, num_tensors=1, num_bytes=1000
            )


class MemoryJournal:
    """A journal that keeps every call: `events` in order as (method without _nowait,
    its arguments ...), `states` of groups, and `batches`.
    """

    name = "journal"

    def __init__(self) -> None:
        self.events: list[tuple[Any, ...]] = []
        self.states: dict[GroupId, str] = {}
        self.batches: dict[int, Batch] = {}

    def __getattr__(self, method: str) -> Callable[..., None]:
        if not method.endswith("_nowait"):
            raise AttributeError(method)
        return partial(self._note, method.removesuffix("_nowait"))

    def named(self, method: str) -> list[tuple[Any, ...]]:
        """The events of this method, in order."""
        return [event for event in self.events if event[0] == method]

    def add_admission_nowait(self, ticket: Ticket, prompt: Prompt) -> None:
        self.states[ticket.group_id] = "running"
        self._note("add_admission", ticket, prompt)

    def end_group_nowait(
        self, group_id: GroupId, state: str, reason: str, *, requeued: int | None = None
    ) -> None:
        change = (self.states[group_id], state)
        assert change[0] == "running" or change == ("ready", "requeued"), (
            f"group {group_id}: {change}"
        )
        self._note("end_group", group_id, state, reason, requeued)
        self.states[group_id] = state

    async def add_batch(self, batch: Batch) -> None:
        await asyncio.sleep(0)
        self._note("add_batch", batch)
        self.batches[batch.version] = batch

    async def flush(self) -> None:
        await asyncio.sleep(0)

    async def read_note(self, key: str) -> Any:
        notes = {event[1]: event[2] for event in self.named("note")}
        return json.loads(json.dumps(notes.get(key)))  # as the journal does

    async def wait_failed(self) -> None:
        """Writing never fails."""
        await asyncio.Event().wait()

    async def compact(self, before_version: int) -> None:
        self._note("compact", before_version)

    def _note(self, *event: Any) -> None:
        self.events.append(event)
