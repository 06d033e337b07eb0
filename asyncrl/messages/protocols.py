"""Interfaces: of a part on a higher floor, or of one with several implementations."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, Literal, Protocol

from asyncrl.messages.records import (
    Completion,
    Finished,
    Group,
    GroupId,
    Outcome,
    PartialCompletion,
    Prompt,
    Rollout,
    SamplingRequest,
    Ticket,
    Work,
)


class SamplingEngine(Protocol):
    """What producers need of the engines: one logical request in, one joined completion out."""

    async def generate(
        self,
        request: SamplingRequest,
        *,
        partial: PartialCompletion | None = None,
        on_segment: Callable[[PartialCompletion], None] | None = None,
        on_tokens: Callable[[Sequence[int]], None] | None = None,
    ) -> Completion:
        """Sample; survives publishes and the death of a server. Raises RequestRefused (data) or EngineError
        (ends the run).

        `partial`: the tokens that an earlier process had sampled for this request; sampling continues after
        them. `on_segment` is called after each interruption with all tokens so far. `on_tokens` gets each
        sampled token once and in order, a few at a time; the completion contains all tokens that it got, even
        if a server dies.
        """
        ...


class RolloutJournal(Protocol):
    """What producers need of the journal. None of these sleeps; calls become durable in their order."""

    def admitted_nowait(self, ticket: Ticket, prompt: Prompt) -> None:
        """The group starts."""
        ...

    def segment_nowait(
        self, group_id: GroupId, sample_index: int, attempt: int, turn: int, partial: PartialCompletion
    ) -> None:
        """The completion so far; it replaces earlier calls for the same rollout."""
        ...

    def rollout_finished_nowait(self, group_id: GroupId, rollout: Rollout) -> None:
        """One rollout of the group ended well."""
        ...

    def rollout_failed_nowait(
        self, group_id: GroupId, sample_index: int, num_attempts: int, why: str
    ) -> None:
        """One rollout of the group failed at each of its attempts."""
        ...

    def group_ended_nowait(
        self,
        group_id: GroupId,
        state: Literal["ready", "failed", "filtered", "handed_back"],
        reason: str,
        *,
        requeued: int | None = None,
    ) -> None:
        """The group runs no more. Only a ready one can be in a batch later.

        `requeued`: its prompt is sampled again, with that num_handed_back; None: it is not.
        """
        ...


class GroupSink(Protocol):
    """What producers need of the buffer."""

    def admit_nowait(self) -> Ticket:
        """Leave to start one group. Raises WouldWait while the staleness rule gives none."""
        ...

    async def wait_open(self) -> None:
        """Return as soon as it gives leave."""
        ...

    def finish_nowait(self, group: Group) -> Finished:
        """The group has all its rollouts; returns what became of it."""
        ...

    def fail_nowait(self, group_id: GroupId) -> None:
        """The group failed: its admission is handed back."""
        ...


class PromptSource(Protocol):
    """What producers need of the tasks."""

    def next_nowait(self) -> Prompt:
        """The next prompt: handed-back ones first, then the seeded shuffle, epoch after epoch."""
        ...

    def hand_back_nowait(self, prompt: Prompt) -> None:
        """Put a prompt at the queue's front, to be generated again; its num_handed_back is kept."""
        ...


class Scorer(Protocol):
    """What producers need to turn a completion's text into a reward."""

    async def score(self, prompt: Prompt, completion: str) -> float:
        """A finite reward. Raises RewardFailure if the reward function raises, is too slow, or returns
        nonsense.
        """
        ...


class RolloutSession(Protocol):
    """One attempt of a rollout, as its harness sees it: a key for /v1/chat/completions, and the tokens that
    were sampled with it.
    """

    key: str
    """The bearer token. Unguessable; dies with the session."""

    def end_nowait(self, reason: str) -> None:
        """No call is answered any more (410 with `reason`), those in hand included. Idempotent: the first
        reason stays.
        """
        ...

    def while_open(self) -> AbstractAsyncContextManager[None]:
        """A block that raises RolloutFailure if the session is ended by another part than its owner: the work
        of its harness would be lost.
        """
        ...

    def last_text(self) -> str:
        """Text of the completion that was asked for last. Raises RolloutFailure if there is none."""
        ...

    def rollout(self, sample_index: int, outcome: Outcome, reward: float) -> Rollout:
        """Everything that was sampled, by branches. Raises RolloutFailure if that is nothing, or `outcome`
        names what is not there.
        """
        ...


class SessionHost(Protocol):
    """What producers need of the gateway."""

    def open_nowait(
        self, rollout_id: str, *, prompt_id: str, sample_index: int, attempt: int, route_key: str
    ) -> RolloutSession:
        """A new session; the caller has to end it. Seeds derive from `prompt_id` (Prompt.seed_id), sample,
        attempt and call.
        """
        ...


class WorkQueue(Protocol):
    """What producers need of the queue that gives work to harnesses."""

    async def run(self, work: Work, *, started: Callable[[], None]) -> Outcome:
        """Let a worker run it; `started` is called once a worker has taken it. Raises RolloutFailure (data).

        Cancelling this call takes the work back: the worker learns of it at its next sign of life.
        """
        ...


class ChatRenderer(Protocol):
    """What the gateway needs of the tokenizer: the template and the encoding apart."""

    end_ids: frozenset[int]
    """Tokens that end a turn."""

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
    ) -> str:
        """The chat as text. Raises ValueError if the template refuses it."""
        ...

    def encode(self, text: str) -> tuple[int, ...]:
        """Token ids; special tokens are known by their text, none is added. Raises ValueError for text that
        is no Unicode.

        For a long text it runs in a thread, beside any of these methods in others.
        """
        ...

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of the ids."""
        ...


class ChatTokenizer(Protocol):
    """What producers need of the tokenizer."""

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> tuple[int, ...]:
        """Token ids of the chat with the prompt for the next assistant turn."""
        ...

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of the ids, special tokens left out."""
        ...
