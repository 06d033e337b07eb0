"""Records that several parts of asyncrl share.

Positions: every index into a trajectory counts from its first prompt token; every index into a completion
counts from its first sampled token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Literal, NewType

from pydantic import ConfigDict, Field

if TYPE_CHECKING:  # a worker (`asyncrl work`) runs where numpy is not installed
    import numpy as np
    import numpy.typing as npt

LARGEST_NUMBER = 1e18
"""Largest absolute value of rewards and metrics: means, squares and sums of many stay finite in float32."""
MAX_METRICS = 256
"""Most metrics of one rollout. Each name becomes a curve of the run; names that contain a number or an id
would make thousands of curves.
"""
Number = Annotated[float, Field(ge=-LARGEST_NUMBER, le=LARGEST_NUMBER, allow_inf_nan=False)]

GroupId = NewType("GroupId", int)
"""Number of a group in order of admission, from 0; never reused, so its order is the order of admission."""

TopLogprobs = Sequence[tuple[int, float]]
"""The most likely tokens at one place: (id, logprob in nats of the distribution that was sampled from), the
likeliest first.
"""

Finished = Literal["ready", "filtered", "requeued"]
"""Fate of a finished group: ready; replaced by buffer.filter because it has no gradient; dropped earlier; or
all its tokens are too old and its prompt is queued again."""


@dataclass(frozen=True, slots=True)
class VersionSpan:
    """Tokens [start, end) were sampled under policy_version `version`, by engine server number `engine` (-1:
    not known).
    """

    start: int
    end: int
    version: int
    engine: int = -1

    @property
    def plain(self) -> list[int]:
        """[start, end, version, engine] for files; engine is absent if unknown, as in older files."""
        span = (self.start, self.end, self.version, self.engine)
        return [int(number) for number in (span if self.engine >= 0 else span[:3])]


@dataclass(frozen=True, slots=True)
class GrammarSpan:
    """Tokens [start, end) were sampled from what `grammar` allows, whose first token is at `start`."""

    start: int
    end: int
    grammar: str


@dataclass(frozen=True, slots=True)
class Prompt:
    """A task item of a group.

    `prompt_id` is unique within a run: epoch/index, or task/epoch/index with several tasks. `messages` are
    chat messages (role and content). Only the reward function sees `answer` and `info`; no model does.
    `num_requeued`: times that its group failed or became too old.
    """

    prompt_id: str
    messages: tuple[Mapping[str, str], ...]
    answer: Any = None
    info: Mapping[str, Any] = field(default_factory=dict)
    num_requeued: int = 0

    @property
    def task(self) -> str:
        """Name of its task; '' in a run of one task."""
        return task_of(self.prompt_id)

    @property
    def seed_id(self) -> str:
        """The prompt's part of each seed. It changes when the group is dropped, so that the same long
        completion is not sampled again.
        """
        return f"{self.prompt_id} requeued {self.num_requeued}" if self.num_requeued else self.prompt_id


def task_of(prompt_id: str) -> str:
    """Name of the task that a prompt is of; '' in a run of one task."""
    name, *rest = prompt_id.split("/")
    return name if len(rest) == 2 else ""


def by_task(gauge: str, counts: Mapping[str, float]) -> dict[str, float]:
    """Return counts by task as metrics: the sum, and gauge/TASK if there are several."""
    return {gauge: sum(counts.values())} | {f"{gauge}/{name}": num for name, num in counts.items() if name}


@dataclass(frozen=True, slots=True)
class SamplingRequest:
    """A logical request to the model: prompt token ids in, at most `max_tokens` sampled tokens out.

    `route_key` keeps requests with a common prompt (the samples of a group) on one engine. `after`: the last
    span of the previous turn, whose engine has the conversation in its cache. `grammar`: a grammar of
    messages/token_grammars.py that limits the completion. `top_logprobs`: number of most likely tokens to
    return at each place, at most MAX_TOP_LOGPROBS.
    """

    request_id: str
    prompt_ids: Sequence[int] | npt.NDArray[np.int32]
    max_tokens: int
    temperature: float
    top_p: float = 1.0
    stop: tuple[str, ...] = ()
    seed: int = 0
    route_key: str = ""
    after: VersionSpan | None = None
    grammar: str | None = None
    top_logprobs: int = 0


@dataclass(frozen=True, slots=True)
class Completion:
    """Tokens of one logical request, joined from its segments; so far, if it has no `finish_reason`.

    `behaviour_logprobs`: float32 in nats of the sampled distribution, one per token. `version_spans` cover
    every token once, in order. `top_logprobs`: the requested most likely tokens at each place, the likeliest
    first; empty for tokens of an earlier process. `routing`: RoutedTokens.known of engines/segment_check.py.
    """

    token_ids: tuple[int, ...] = ()
    behaviour_logprobs: tuple[float, ...] = ()
    version_spans: tuple[VersionSpan, ...] = ()
    finish_reason: Literal["stop", "length"] | None = None
    num_interruptions: int = 0
    top_logprobs: tuple[TopLogprobs, ...] = ()
    routing: bytes = b""


@dataclass(frozen=True, slots=True)
class Credit:
    """Credit of tokens [start, end) of a trajectory: they earn `reward` as part `unit` of their rollout.
    Units of one rollout with the same number are one sample of the advantage and have one reward.
    """

    start: int
    end: int
    reward: float
    unit: int


@dataclass(frozen=True, slots=True, eq=False)
class Trajectory:
    """The token record of one branch of a finished rollout; all arrays have one entry per token, prompt
    included.

    token_ids int32 [T]; loss_mask bool [T], true only on tokens sampled in this branch; behaviour_logprobs
    float32 [T] in nats, 0 without loss_mask; version_spans cover the tokens with loss_mask, in order. A
    harness that edits its history makes several branches; each sampled token is in the loss_mask of one.
    `credits` assign a reward to each token with loss_mask and replace `reward` in the advantage. `grammars`:
    spans that were sampled under a grammar. teacher_logprobs float32 [T], like behaviour_logprobs. routing
    uint16 [T, E]: for each router in order, the experts that read the token, NO_EXPERT if unknown.
    """

    sample_index: int
    token_ids: npt.NDArray[np.int32]
    loss_mask: npt.NDArray[np.bool_]
    behaviour_logprobs: npt.NDArray[np.float32]
    version_spans: tuple[VersionSpan, ...]
    reward: float
    is_truncated: bool = False
    num_interruptions: int = 0
    metrics: Mapping[str, float] = field(default_factory=dict)
    branch: int = 0
    credits: tuple[Credit, ...] = ()
    grammars: tuple[GrammarSpan, ...] = ()
    teacher_logprobs: npt.NDArray[np.float32] | None = None
    routing: npt.NDArray[np.uint16] | None = None

    @property
    def oldest_version(self) -> int:
        """Oldest policy_version of any sampled token."""
        return min(span.version for span in self.version_spans)

    @property
    def num_sampled(self) -> int:
        """Number of sampled tokens."""
        return sum(span.end - span.start for span in self.version_spans)


Rollout = tuple[Trajectory, ...]
"""The branches of one finished rollout, by their number; at least one."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """Outcome of a rollout, from its harness.

    `reward` None: the task's reward function scores the text of the last completion. `turn_rewards` and
    `branch_rewards` map completion ids (chatcmpl-0, ...) to rewards: each completion, or each branch named by
    any completion found only in it, is a separate sample of the advantage, and all must be named. Give only
    one; `reward` None is then their mean. Validated in messages and in the results of harnesses.
    """

    __pydantic_config__ = ConfigDict(extra="forbid", revalidate_instances="always")

    reward: Number | None = None
    metrics: Annotated[Mapping[str, Number], Field(max_length=MAX_METRICS)] = field(default_factory=dict)
    turn_rewards: Mapping[str, Number] = field(default_factory=dict)
    branch_rewards: Mapping[str, Number] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.turn_rewards and self.branch_rewards:
            raise ValueError("give turn_rewards or branch_rewards, not both: a token answers for one reward")


@dataclass(frozen=True, slots=True)
class Ticket:
    """Leave to start one group. No token of it may be older than `start_version`; charged until consumed."""

    group_id: GroupId
    start_version: int


@dataclass(frozen=True, slots=True, eq=False)
class Group:
    """The finished rollouts of one prompt, scored against each other; at least one trajectory."""

    group_id: GroupId
    prompt: Prompt
    trajectories: tuple[Trajectory, ...]

    @property
    def oldest_version(self) -> int:
        """Oldest policy_version of any sampled token in the group."""
        return min(trajectory.oldest_version for trajectory in self.trajectories)


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """Groups of one optimizer step, in order of admission; the step turns policy_version v into v + 1. Tokens
    older than `min_version` must carry no loss: `mask_older` makes the trainer mask them
    (buffer.on_overdue=mask); otherwise the trainer refuses such a batch.
    """

    version: int
    groups: tuple[Group, ...]
    min_version: int
    mask_older: bool = False


@dataclass(frozen=True, slots=True)
class WaitReport:
    """Seconds that the trainer waited for one batch, by cause; their sum is the whole wait.

    generation: fewer than num_groups groups were ready, and admission was open or everything admitted was
    running. stragglers: enough groups were ready, but taking them would have made a running group too old
    (on_overdue=wait). publishing: too few groups in the system, because admission waited for a newer version
    to be served.
    """

    generation_s: float = 0.0
    stragglers_s: float = 0.0
    publishing_s: float = 0.0

    @property
    def total_s(self) -> float:
        """The whole wait."""
        return self.generation_s + self.stragglers_s + self.publishing_s


@dataclass(frozen=True, slots=True, eq=False)
class UnfinishedGroup:
    """A group that was running when its run was killed, with the state of its rollouts by sample_index.
    `failures`: (attempts, reason) of rollouts that failed for good, attempts 0 if the prompt can never be
    sampled; `partials`: (number of the attempt, sampled tokens) of running rollouts. Any other rollout starts
    from its prompt.
    """

    ticket: Ticket
    prompt: Prompt
    rollouts: Mapping[int, Rollout] = field(default_factory=dict)
    failures: Mapping[int, tuple[int, str]] = field(default_factory=dict)
    partials: Mapping[int, tuple[int, Completion]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Work:
    """An attempt of a rollout for a harness, with its `key`."""

    rollout_id: str
    prompt: Prompt
    sample_index: int
    attempt: int
    key: str
    timeout_s: float | None
