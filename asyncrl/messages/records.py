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

Finished = Literal["ready", "filtered", "handed_back"]
"""What became of a finished group: it is ready; buffer.filter replaced it, for it has no gradient; it had
been dropped before; or all its tokens are too old and its prompt went back to the queue.
"""


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
        """[start, end, version, engine], for files; the engine is left out where it is not known, as in files
        before it was recorded.
        """
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
    """One task item as it goes into a group.

    `prompt_id` is unique within a run: epoch/index, or task/epoch/index where the run has several tasks.
    `messages` are chat messages (role and content). `answer` and `info` are for the reward function alone: no
    model sees them. `num_handed_back`: times that its group failed or became too old.
    """

    prompt_id: str
    messages: tuple[Mapping[str, str], ...]
    answer: Any = None
    info: Mapping[str, Any] = field(default_factory=dict)
    num_handed_back: int = 0

    @property
    def task(self) -> str:
        """Name of its task; '' in a run of one task."""
        return task_of(self.prompt_id)

    @property
    def seed_id(self) -> str:
        """The prompt's part of each seed. It changes with each hand-back, or a completion that was too long
        would be sampled again just as it was.
        """
        return (
            f"{self.prompt_id} handed back {self.num_handed_back}" if self.num_handed_back else self.prompt_id
        )


def task_of(prompt_id: str) -> str:
    """Name of the task that a prompt is of; '' in a run of one task."""
    name, *rest = prompt_id.split("/")
    return name if len(rest) == 2 else ""


def by_task(gauge: str, counts: Mapping[str, float]) -> dict[str, float]:
    """What was counted by task as numbers of a run: all together, and gauge/TASK where there are several."""
    return {gauge: sum(counts.values())} | {f"{gauge}/{name}": num for name, num in counts.items() if name}


@dataclass(frozen=True, slots=True)
class SamplingRequest:
    """One logical request to the model: prompt token ids in, at most `max_tokens` sampled tokens out.

    `route_key` keeps requests together that share a prompt (the samples of a group) while they are in flight.
    `after`: the last span of the turn before, whose engine has the conversation so far in its cache.
    `grammar`: of messages/token_grammars.py; the completion is sampled from what it allows. `top_logprobs`:
    most likely tokens to be told at each place, MAX_TOP_LOGPROBS at most.
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
    """What was sampled for one logical request, its segments joined.

    `behaviour_logprobs` are float32 values in nats, of the distribution that was sampled from, one a token;
    `version_spans` cover every token exactly once, in order. `top_logprobs`: if they were asked for, the most
    likely tokens at each place and their logprobs, the likeliest first; nothing for tokens that were sampled
    in an earlier process. `routing`: RoutedTokens.known of engines/segment_check.py, or nothing.
    """

    token_ids: tuple[int, ...]
    behaviour_logprobs: tuple[float, ...]
    version_spans: tuple[VersionSpan, ...]
    finish_reason: Literal["stop", "length"]
    num_interruptions: int = 0
    top_logprobs: tuple[TopLogprobs, ...] = ()
    routing: bytes = b""


@dataclass(frozen=True, slots=True)
class PartialCompletion:
    """What has been sampled so far of a logical request that has not ended; fields as in Completion."""

    token_ids: tuple[int, ...] = ()
    behaviour_logprobs: tuple[float, ...] = ()
    version_spans: tuple[VersionSpan, ...] = ()
    num_interruptions: int = 0


@dataclass(frozen=True, slots=True)
class Credit:
    """Tokens [start, end) of a trajectory, counted from its first, answer for `reward` as part `unit` of
    their rollout.

    Units of one rollout with the same number are one sample of the advantage, wherever their tokens lie, and
    have one reward.
    """

    start: int
    end: int
    reward: float
    unit: int


@dataclass(frozen=True, slots=True, eq=False)
class Trajectory:
    """The token record of one branch of a finished rollout; all arrays have one entry a token, prompt
    included.

    token_ids int32 [T]; loss_mask bool [T], true on tokens sampled in this branch and on no other;
    behaviour_logprobs float32 [T] in nats, 0 where loss_mask is false; version_spans cover exactly the tokens
    with loss_mask, in order. A rollout of one conversation has one branch; one whose harness edited its
    history has more, and each sampled token is in the loss_mask of exactly one of them. `reward` is the
    rollout's. `credits`, if there are any, say which tokens answer for which reward, cover every token with
    loss_mask once, and stand in for `reward` in the advantage; without them all branches are one sample.
    `grammars`: where tokens with loss_mask were sampled from what a grammar allows.
    teacher_logprobs float32 [T] in nats: those of a teacher for the same tokens, 0 where loss_mask is false;
    None where no teacher was asked. routing uint16 [T, E]: for each router of the model, in order, the
    experts that read the token, NO_EXPERT where that is not known, as of the last token; None without router
    replay.
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
    """What a harness says of its rollout.

    `reward` None: the task's own reward function scores the text of the last completion. `turn_rewards` and
    `branch_rewards`, by the id of a completion (chatcmpl-0, ...): each completion, or each branch by any
    completion that lies in it alone, is a sample of its own in the advantage, and must be named; give one of
    the two. Then `reward` None is their mean. It is checked where it is validated: messages, and what a
    harness returns.
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
    """The groups of one optimizer step, in order of admission: turns policy_version v into v + 1.

    Tokens older than `min_version` must carry no loss: `mask_older` says whether the trainer gives them
    weight 0 (buffer.on_overdue=mask) or refuses the batch (every other choice, where there are none).
    """

    version: int
    groups: tuple[Group, ...]
    min_version: int
    mask_older: bool = False


@dataclass(frozen=True, slots=True)
class WaitReport:
    """Seconds that the trainer waited for one batch, by what it waited for. They add up to the whole wait.

    generation: fewer than num_groups groups were ready, and admission was open or everything admitted was
    running; stragglers: enough were ready, but taking them would have made a running group too old
    (on_overdue=wait); publishing: too few groups in the system, because admission waited for a newer version
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
    """A group that ran when its run was killed: what is known of its rollouts, by sample_index.

    `failures`: (attempts, why) of those that failed for good, attempts 0 where the prompt can never be
    sampled; `partials`: (number of the attempt, what it had sampled) of those that ran. A rollout that is in
    none of the three starts from its prompt.
    """

    ticket: Ticket
    prompt: Prompt
    rollouts: Mapping[int, Rollout] = field(default_factory=dict)
    failures: Mapping[int, tuple[int, str]] = field(default_factory=dict)
    partials: Mapping[int, tuple[int, PartialCompletion]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Work:
    """One attempt of a rollout, to be run by a harness under `key`."""

    rollout_id: str
    prompt: Prompt
    sample_index: int
    attempt: int
    key: str
    timeout_s: float | None
