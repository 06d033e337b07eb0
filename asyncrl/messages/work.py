"""Messages between the gateway and its workers, and the gateway's interfaces for producers.

Workers call the gateway, never the reverse, so that a worker may run behind any firewall. Their key, sent as
`Authorization: Bearer KEY`, opens these routes and no session:

    POST /work/take     TakeRequest    -> TakeAnswer    long poll for work, `wait_s` at most
    POST /work/alive    AliveRequest   -> AliveAnswer   heartbeat; answers which items to cancel
    POST /work/result   ResultRequest  -> Accepted      410 if the item is no longer this worker's
    POST /v1/outcome    Outcome        -> Accepted      with an item's outcome key; also /s/KEY/v1/outcome
    GET /health         -> WorkerHealth                 of a run's own worker, with its own secret
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from functools import partial
from hashlib import blake2b
from typing import Any, Protocol

from pydantic import ConfigDict, Field

from asyncrl.base.message import ErrorBody, Message
from asyncrl.messages.records import Outcome, Rollout, Work

MAX_WAIT_S = 20.0
"""Longest wait of /work/take."""

MAX_OUTCOME_BYTES = 2**18
"""Largest Outcome that is posted or returned; its metrics are kept with every branch of the rollout."""

MAX_MESSAGE_BYTES = 2**22
"""Largest message of a worker. gateway.max_body_bytes limits only calls."""

VERIFIERS_KEY = "verifiers"
"""Key in a prompt's info of the data from which a worker rebuilds a verifiers task."""


class WorkItem(Message):
    """An attempt of a rollout for a worker.

    `key` opens only the session of this attempt; non-finite numbers stay non-finite. `answer` is withheld
    unless `has_answer`. `outcome_key` (None: nothing is posted) writes only the outcome of this attempt: it
    is for the harness, never for programs that the model runs.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="constants")

    item_id: str
    rollout_id: str
    prompt_id: str
    messages: list[dict[str, str]]
    answer: Any = None
    has_answer: bool = False
    info: dict[str, Any] = {}
    sample_index: int
    attempt: int
    seed: int
    key: str
    outcome_key: str | None = None
    timeout_s: float | None


class WorkerMessage(Message):
    """Base of worker messages; each is a heartbeat. Every process draws a new `instance`."""

    worker: str = Field(min_length=1, max_length=200)
    instance: str = Field(min_length=1, max_length=64)


class TakeRequest(WorkerMessage):
    """Request for work, at most `max_items`.

    `holding`: all items that the worker has and has not returned. An item that it was given and does not hold
    was lost in transit and is queued again. Requests have a growing `number`; late ones are ignored.
    """

    number: int = Field(ge=0)
    max_items: int = Field(ge=1, le=100_000)
    slots: int = Field(ge=1, le=100_000)
    holding: list[str]
    wait_s: float = Field(default=MAX_WAIT_S, ge=0)


class TakeAnswer(Message):
    """Work, or none within the time. A worker that is silent for `lease_timeout_s` loses all of it. `model`:
    name for calls. `is_over`: the run is done.
    """

    model_config = WorkItem.model_config

    items: list[WorkItem]
    model: str
    lease_timeout_s: float
    is_over: bool = False


class AliveRequest(WorkerMessage):
    """A worker's heartbeat, with its items. `is_leaving`: it ends without finishing them."""

    holding: list[str]
    is_leaving: bool = False


class AliveAnswer(Message):
    """`cancel`: held items that are no longer this worker's, with the reason."""

    cancel: dict[str, str]


class ResultRequest(WorkerMessage):
    """Result of an item: `failure` or `outcome`. Neither: the harness returned nothing, and its posted
    outcome counts.
    """

    item_id: str
    outcome: Outcome | None = None
    failure: ErrorBody | None = None


class Accepted(Message):
    """The result or outcome was accepted."""


class WorkerHealth(Message):
    """Answer of GET /health. `loop_lag_s`: for how long its event loop, on which harnesses run, has been
    blocked.

    `gateway_lost_s`: seconds since the gateway last answered, if its last call failed. `num_abandoned`: calls
    of its harness that were given up because they did not end when they were cancelled.
    """

    name: str
    slots: int
    num_running: int
    loop_lag_s: float
    gateway_lost_s: float | None = None
    num_abandoned: int = 0


# Interfaces of the gateway and the tokenizer, which are on the same floor.


class RolloutSession(Protocol):
    """One attempt's conversation with the endpoint, and the tokens sampled in it."""

    key: str
    """The bearer token. Unguessable; dies with the session."""
    overflow: str | None
    """The limit that ended its calls, if any."""
    num_spent: int
    """Number of tokens that the engines returned to its calls."""

    @property
    def num_completions(self) -> int:
        """Answers that its harness got."""
        ...

    def end_nowait(self, reason: str) -> None:
        """Refuse all further and pending calls (410 with `reason`). Idempotent: the first reason stays."""
        ...

    def while_open(self) -> AbstractAsyncContextManager[object]:
        """Raise RolloutFailure in the block if another component ends the session."""
        ...

    def last_text(self) -> str:
        """Return the text of the newest completion. Raises RolloutFailure if there is none."""
        ...

    def rollout(self, sample_index: int, outcome: Outcome, reward: float) -> Rollout:
        """Return all sampled tokens by branch. Raises RolloutFailure if there are none, or `outcome` names an
        unknown completion.
        """
        ...


class SessionHost(Protocol):
    """The gateway as producers see it."""

    def open_nowait(
        self,
        rollout_id: str,
        *,
        prompt_id: str,
        sample_index: int,
        attempt: int,
        route_key: str,
        shows_special: bool = True,
    ) -> RolloutSession:
        """Open a session; the caller has to end it. Seeds derive from `prompt_id` (Prompt.seed_id), sample,
        attempt and call. `shows_special`: answers contain the text of sampled special tokens.
        """
        ...


class WorkQueue(Protocol):
    """The work queue as producers see it."""

    async def run(self, work: Work, *, started: Callable[[], None]) -> Outcome:
        """Let a worker run it; `started` is called once a worker has taken it. Raises RolloutFailure (data).

        Cancelling this call withdraws the work; the worker learns of it at its next heartbeat.
        """
        ...


new_hash = partial(blake2b, digest_size=16)
"""Hash of a growing text or ids: copying the hash of a prefix continues it."""


class ChatRenderer(Protocol):
    """The tokenizer as the gateway sees it, with template and encoding apart."""

    @property
    def end_ids(self) -> frozenset[int]:
        """Tokens that end a turn."""
        ...

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        settings: Mapping[str, Any] | None = None,
    ) -> str:
        """The chat as text, up to the assistant's next turn. `settings`: variables of the template. Raises
        ValueError if it refuses the chat or the settings.
        """
        ...

    def encode(self, text: str) -> tuple[int, ...]:
        """Return token ids. Special tokens are recognized by their text; none is added. Raises ValueError for
        text that is not valid Unicode. Long texts run in a thread, in parallel with other methods.
        """
        ...

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of the ids."""
        ...


def answer_text(tokenizer: ChatRenderer, token_ids: Sequence[int], *, shows_special: bool) -> str:
    """Return the text of a sampled answer without its end-of-turn token. `shows_special`: keep other special
    tokens as text (task.special_tokens=visible); otherwise they are removed.
    """
    is_ended = len(token_ids) > 0 and token_ids[-1] in tokenizer.end_ids
    said = token_ids[:-1] if is_ended else token_ids
    return tokenizer.decode(said, skip_special_tokens=not shows_special)
