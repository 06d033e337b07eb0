"""Messages between the gateway and its workers, and the gateway's interfaces for
producers.

Workers call the gateway, never the reverse, so that they may run behind a firewall.
Their key, sent as `Authorization: Bearer KEY`, opens no session.

    POST /work/take     TakeRequest    -> TakeAnswer    long poll for work, `wait_s` at most; or a heartbeat
    POST /work/result   ResultRequest  -> Accepted      410 if the item is no longer this worker's
    POST /v1/outcome    Outcome        -> Accepted      with an item's outcome key; also /s/KEY/v1/outcome
    GET /health         -> WorkerHealth                 of a run's own worker, with its own secret
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from functools import partial
from hashlib import blake2b
from typing import Protocol

from pydantic import (
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
)

from asyncrl.base.errors import ErrorBody, Message
from asyncrl.base.failures import FailureKind
from asyncrl.messages.records import (
    RUN_RULES,
    Completion,
    Outcome,
    Rollout,
    SessionRules,
    Work,
)

MAX_WAIT_S = 20.0

MAX_OUTCOME_BYTES = 2**18

MAX_MESSAGE_BYTES = 2**22
"""Of workers' messages; the gateway's MAX_BODY_BYTES limits only calls."""


class WorkItem(Message):
    """An attempt of a rollout for a worker.

    `key` opens only the session of this attempt. `answer` is withheld unless
    `has_answer`. `outcome_key` (None: nothing is posted) is for the harness, never for
    programs that the model runs. `harness`: place in the worker's list.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="constants")

    item_id: str
    rollout_id: str
    prompt_id: str
    messages: list[dict[str, str]]
    answer: object = None
    has_answer: bool = False
    info: dict[str, object] = {}
    sample_index: int
    attempt: int
    seed: int
    key: str
    outcome_key: str | None = None
    timeout_s: float | None
    harness: int = 0


class WorkerMessage(Message):
    """Each message is a heartbeat. Each process draws a new `instance`."""

    worker: str = Field(min_length=1, max_length=200)
    instance: str = Field(min_length=1, max_length=64)


class TakeRequest(WorkerMessage):
    """`holding`: all items that the worker has not returned. A given item missing here
    was lost in transit and is queued again. `number` grows; late requests are ignored.
    Without `max_items` it is a heartbeat. `is_leaving`: the worker ends without
    finishing its items. `busy`: why it takes no work now.
    """

    number: NonNegativeInt
    max_items: int = Field(ge=0, le=100_000)
    holding: list[str]
    wait_s: NonNegativeFloat = MAX_WAIT_S
    is_leaving: bool = False
    busy: str = ""


class TakeAnswer(Message):
    """Work, or none within the time. A worker silent for `lease_timeout_s` loses it.
    `cancel`: items that are no longer this worker's.
    """

    model_config = WorkItem.model_config

    items: list[WorkItem]
    cancel: list[str]
    model: str
    lease_timeout_s: float
    roles: tuple[str, ...] = ()
    is_over: bool = False


class FailureBody(ErrorBody):
    kind: FailureKind = FailureKind.AGENT_CRASH


class ResultRequest(WorkerMessage):
    """If neither `failure` nor `outcome`, the posted outcome counts."""

    item_id: str
    outcome: Outcome | None = None
    failure: FailureBody | None = None


class Accepted(Message):
    pass


class WorkerHealth(Message):
    """`num_abandoned`: harness calls that did not end when cancelled; `cpu_s`: CPU time
    of the process.
    """

    num_abandoned: int = 0
    cpu_s: float = 0.0


class RolloutSession(Protocol):
    """One attempt's conversation with the endpoint."""

    key: str
    overflow: str | None
    num_spent: int
    num_calls: int

    @property
    def num_completions(self) -> int: ...

    @property
    def untrained(self) -> tuple[tuple[str, str], ...]:
        """(completion, agent) of the answers without a loss."""
        ...

    def end_nowait(self, reason: str) -> None:
        """Refuse further and pending calls (410). Idempotent: the first reason stays."""
        ...

    def while_open(self) -> AbstractAsyncContextManager[object]:
        """Raise RolloutFailure in the block if another component ends the session."""
        ...

    def last_completion(self) -> Completion:
        """Return the newest completion, which the task's reward function scores.

        Raises RolloutFailure if there is no completion.
        """
        ...

    def rollout(
        self,
        sample_index: int,
        outcome: Outcome,
        reward: float,
        *,
        by_turn: bool = False,
    ) -> Rollout:
        """Return all sampled tokens by branch, `by_turn` with a credit for each turn.
        Raises RolloutFailure.
        """
        ...


class SessionHost(Protocol):
    def open_nowait(
        self,
        rollout_id: str,
        *,
        prompt_id: str,
        sample_index: int,
        attempt: int,
        route_key: str,
        rules: SessionRules = RUN_RULES,
    ) -> RolloutSession:
        """Open a session; the caller ends it. Seeds derive from `prompt_id`
        (Prompt.seed_id), sample, attempt and call.
        """
        ...


class LateOutcomes(Protocol):
    async def check(self, key: str) -> None:
        """Raise Refused for an unknown key (404), or while the run starts or ends (503)."""
        ...

    async def post(self, key: str, outcome: Outcome) -> None:
        """Take the outcome of a rollout. Raises Refused: 409 for another reward than
        before, 410 if none is needed any more.
        """
        ...


class WorkQueue(Protocol):
    async def run(self, work: Work, *, started: Callable[[], None]) -> Outcome:
        """Let a worker run it; `started` is called once it is taken. Raises
        RolloutFailure.

        Cancelling withdraws the work.
        """
        ...


new_hash = partial(blake2b, digest_size=16)
"""Hash of a growing text or ids: copying the hash of a prefix continues it."""


class ChatTokenizer(Protocol):
    end_ids: frozenset[int]
    text_ids: frozenset[int]
    special_ids: frozenset[int]
    byte_ids: frozenset[int]
    """They decode only as a whole run."""
    variables: frozenset[str]
    """Names that the chat template reads and a call may set."""
    closing: str
    """Text that the template writes after an answer, through its last special token;
    may be empty.
    """
    call_closing: str
    """Special token that the template writes after an answer with calls; may be empty.
    """

    @property
    def vocabulary(self) -> Mapping[str, int]:
        """Ids of tokens as the tokenizer writes them, such as `<0xE2>`."""
        ...

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> Sequence[int]:
        """Return the token ids up to the answer. Raises ValueError."""
        ...

    def render(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        tools: Sequence[Mapping[str, object]] | None = None,
        settings: Mapping[str, object] | None = None,
        is_open: bool = True,
    ) -> str:
        """Return the chat, with the beginning of the next answer if `is_open`.

        `settings`: template variables. Raises ValueError.
        """
        ...

    def encode(
        self, text: str, *, after: str = "", adds_special: bool = False
    ) -> tuple[int, ...]:
        """Return the ids of a text that follows the text `after`. Raises ValueError for
        invalid Unicode.

        Special tokens are recognized; with `adds_special` the tokenizer adds its own,
        such as BOS. Long texts run in a thread.
        """
        ...

    def decode(
        self, token_ids: Sequence[int], *, skip_special_tokens: bool = True
    ) -> str: ...


CONTEXT_TOKENS = 4
"""Tokens before a text that decide how it decodes: three bytes of a character, and a
leading space.
"""


def decode_after(
    tokenizer: ChatTokenizer, before: Sequence[int], token_ids: Sequence[int]
) -> str:
    """Return the text, special tokens included, of ids that follow the ids `before`.

    Example: sentencepiece decodes the first token of a text without its space.
    """
    known = tokenizer.decode(before, skip_special_tokens=False)
    return tokenizer.decode([*before, *token_ids], skip_special_tokens=False)[
        len(known) :
    ]


def answer_text(
    tokenizer: ChatTokenizer, token_ids: Sequence[int], *, shows_special: bool
) -> str:
    """Return a sampled answer without its end-of-turn token. `shows_special`: with
    other special tokens.
    """
    is_ended = len(token_ids) > 0 and token_ids[-1] in tokenizer.end_ids
    said = token_ids[:-1] if is_ended else token_ids
    return tokenizer.decode(said, skip_special_tokens=not shows_special)
