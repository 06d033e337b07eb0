"""Records that several parts of asyncrl share.

Positions in a trajectory count from its first prompt token, in a completion from its
first sampled token.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    Literal,
    NamedTuple,
    NewType,
    cast,
)

from pydantic import ConfigDict, Discriminator, Field, Tag

if TYPE_CHECKING:  # a worker runs without numpy
    import numpy as np
    import numpy.typing as npt

    from asyncrl.messages.tokens import Tokens

LARGEST_NUMBER = 1e18
"""Keeps float32 sums and squares finite."""
MAX_METRICS = 256
"""Each name becomes a curve of the run."""
Number = Annotated[
    float, Field(ge=-LARGEST_NUMBER, le=LARGEST_NUMBER, allow_inf_nan=False)
]

Count = Annotated[int, Field(ge=1)]


class RewardPart(NamedTuple):
    """One of several rewards of a rollout, whose reward is the sum of value * weight.

    `value` None: this part does not apply to the rollout. It adds nothing to the sum,
    and the rollout is not compared by it.
    """

    value: Number | None
    weight: Number = 1.0


Reward = float | Mapping[str, RewardPart]


def total(reward: Reward) -> float:
    """Return the weighted sum of the parts that apply, in any order the same bits."""
    if not isinstance(reward, Mapping):
        return reward
    return math.fsum(
        part.value * part.weight for part in reward.values() if part.value is not None
    )


State = Annotated[str, Field(min_length=1, max_length=256)]
"""Key of an environment's state. A longer one can be hashed."""
_OnePart = Annotated[
    Annotated[Number, Tag("[number]")] | Annotated[RewardPart, Tag("[pair]")],
    Discriminator(
        lambda one: "[pair]" if isinstance(one, tuple | list) else "[number]"
    ),
]
_Parts = Annotated[
    Mapping[State, _OnePart | None], Field(min_length=1, max_length=MAX_METRICS)
]
GivenReward = Annotated[
    Annotated[Number, Tag("[number]")] | Annotated[_Parts, Tag("[parts]")],
    Discriminator(lambda one: "[parts]" if isinstance(one, Mapping) else "[number]"),
]
"""A reward, or its parts by name; a part that is a number has the weight 1."""

GroupId = NewType("GroupId", int)
"""In order of admission, from 0; never reused."""

Finished = Literal["ready", "filtered", "requeued"]
"""ready; replaced by buffer.filter; or dropped or too old, and requeued."""


# Not frozen, and never changed: a frozen request takes four times as long to make, once
# in the controller and once in the engine.
@dataclass(unsafe_hash=True, slots=True, kw_only=True)
class Adjustment:
    """Changes of the logits of a call, before temperature and cuts, in vLLM's order:
    add the bias; divide (above 0) or multiply (below 0) by the repetition penalty if
    the token is in the prompt or was sampled in this call; subtract the frequency
    penalty for each time that this call has sampled it, and the presence penalty if it
    has.
    """

    logit_bias: Mapping[int, float] = field(default_factory=dict)
    """By token id."""
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0

    @property
    def has_penalty(self) -> bool:
        is_subtracted = self.presence_penalty != 0.0 or self.frequency_penalty != 0.0
        return is_subtracted or self.repetition_penalty != 1.0


# A tuple, because it is made for each streamed token, and frames hold it flat: four
# numbers (Tokens.arrays).
class VersionSpan(NamedTuple):
    """Tokens [start, end) were sampled under policy_version `version`, by engine number
    `engine` (-1: unknown).
    """

    start: int
    end: int
    version: int
    engine: int = -1


@dataclass(frozen=True, slots=True)
class CallSpan:
    """Tokens [start, end) were sampled in one call, under its `grammar`, which begins at
    `start`.
    """

    start: int
    end: int
    grammar: str


@dataclass(frozen=True, slots=True)
class Prompt:
    """A task item of a group.

    `prompt_id` is unique within a run: [task/]epoch/index. Only the reward function
    sees `answer` and `info`.
    """

    prompt_id: str
    messages: tuple[Mapping[str, str], ...]
    answer: Any = None
    info: Mapping[str, Any] = field(default_factory=dict)
    num_requeued: int = 0

    @property
    def task(self) -> str:
        return task_of(self.prompt_id)

    @property
    def seed_id(self) -> str:
        """Part of each seed. It changes with each requeue, so that the same long
        completion is not sampled again.
        """
        return (
            f"{self.prompt_id} requeued {self.num_requeued}"
            if self.num_requeued
            else self.prompt_id
        )


@lru_cache(1024)
def task_of(prompt_id: str) -> str:
    """Name of the prompt's task; '' in a run of one task."""
    # [task/]epoch/index: only a run of several tasks writes the name.
    name, *rest = prompt_id.split("/")
    return name if len(rest) == 2 else ""


def epoch_of(prompt_id: str) -> int:
    """Return the pass over its task that the prompt is from, counted from 1."""
    return int(prompt_id.split("/")[-2]) + 1


def by_task(gauge: str, counts: Mapping[str, float]) -> dict[str, float]:
    """Return the sum of counts, and gauge/TASK of several tasks."""
    return {gauge: sum(counts.values())} | {
        f"{gauge}/{name}": num for name, num in counts.items() if name
    }


# Here and below, eq=False: fields are arrays, whose == is an array, too.
@dataclass(eq=False)
class Completion:
    """The answer to one logical request, joined from its segments; partial without
    `finish_reason`.

    `tokens`: `num_prompt` prompt tokens, then sampled ones only.
    """

    tokens: Tokens
    num_prompt: int = 0
    finish_reason: Literal["stop", "length"] | None = None
    num_interruptions: int = 0

    @property
    def sampled(self) -> Tokens:
        return self.tokens.slice(self.num_prompt)

    @cached_property
    def token_ids(self) -> tuple[int, ...]:
        """Sampled ids."""
        return tuple(self.tokens.ids[self.num_prompt :].tolist())

    @cached_property
    def behaviour_logprobs(self) -> tuple[float, ...]:
        """Of the sampled ids, float32 in nats."""
        return tuple(self.tokens.behaviour_logprobs[self.num_prompt :].tolist())


@dataclass(frozen=True, slots=True)
class Credit:
    """Tokens [start, end) of a trajectory earn `reward` as part `unit` of their
    rollout, one sample of the advantage.

    With algorithm.turn_discount, units are turns and ascend in the order of the calls,
    and a turn without trained tokens is empty. `state`: equal for turns that started
    from the same state ('' = unknown). Without it, `state` is the role of the agent: a
    sample is compared with the samples of its role. `parts`: what the reward is the sum
    of, if it has several.
    """

    start: int
    end: int
    reward: float
    unit: int
    state: str = ""
    parts: Mapping[str, RewardPart] = field(default_factory=dict)

    def paid(self, reward: Reward) -> Credit:
        """Return it with this reward."""
        parts = reward if isinstance(reward, Mapping) else {}
        return replace(self, reward=total(reward), parts=parts)


# Not frozen, and never changed, like Completion and Trajectory: each rollout makes them,
# and a frozen object takes three times as long to make.
@dataclass(unsafe_hash=True, slots=True)
class PolicyCall:
    """One call of the policy in a trajectory, which sampled tokens [start, end).

    `name`: of the completion, such as chatcmpl-3. Times are in seconds since the epoch.
    `tools`: (id, name) of each tool that the answer calls. `agent`: X-Session-ID of the
    request, such as searcher/reader; "" for the rollout's own agent.
    """

    start: int
    end: int
    name: str
    begun_s: float
    ended_s: float
    finish_reason: str
    tools: tuple[tuple[str, str], ...] = ()
    agent: str = ""


@dataclass(slots=True, eq=False)
class Trajectory:
    """One branch of a finished rollout.

    `tokens`: prompts and results are context; tokens sampled in another branch are,
    too. A harness that edits its history makes several branches; each sampled token has
    loss in one branch. `credits` replace `reward` in the advantage. `parts`: what the
    reward is the weighted sum of; {} if it is one number. `unscored`: the
    text that the reward of the whole group has yet to score (docs/decisions/0033); on
    the first branch only, and `reward` is 0 until then. `awaits`: likewise, the digest of
    the key with which the reward will be posted (rollouts/late_rewards.py), and
    `untrained`: (completion, agent) of the answers without a loss, which may be paid,
    too. `calls`: each call in its first branch. `role`: whose policy sampled the tokens, of
    trainer.roles.
    """

    sample_index: int
    tokens: Tokens
    reward: float
    is_truncated: bool = False
    num_interruptions: int = 0
    metrics: Mapping[str, float] = field(default_factory=dict)
    branch: int = 0
    credits: tuple[Credit, ...] = ()
    unscored: str | None = None
    awaits: str | None = None
    calls: tuple[PolicyCall, ...] = ()
    untrained: tuple[tuple[str, str], ...] = ()
    role: str = ""
    parts: Mapping[str, RewardPart] = field(default_factory=dict)

    @property
    def is_scored(self) -> bool:
        return self.unscored is None and self.awaits is None

    @property
    def part_values(self) -> dict[str, float]:
        """Return the parts of the reward that apply, without their weights."""
        parts = self.parts.items()
        return {name: part.value for name, part in parts if part.value is not None}

    @property
    def token_ids(self) -> npt.NDArray[np.int32]:
        """int32 [T]"""
        return self.tokens.ids

    @property
    def loss_mask(self) -> npt.NDArray[np.bool_]:
        """Bool [T]: true for sampled tokens."""
        return self.tokens.is_sampled

    @property
    def oldest_version(self) -> int:
        return min(span.version for span in self.tokens.spans)

    @property
    def num_sampled(self) -> int:
        return self.tokens.num_sampled


Rollout = tuple[Trajectory, ...]
"""The branches of one finished rollout."""


def num_sampled(branches: Iterable[Trajectory]) -> int:
    """Return the number of sampled tokens of all branches."""
    return sum(branch.num_sampled for branch in branches)


def versions_of(branches: Iterable[Trajectory]) -> list[int]:
    """Return the policy_version of each span of sampled tokens."""
    return [span.version for branch in branches for span in branch.tokens.spans]


MAIN_AGENT = "main"
"""Name of the rollout's own agent in Outcome.turn_rewards."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """Outcome of a rollout, from its harness.

    `reward` None: the task's reward function scores the last completion. A mapping
    gives parts, which are summed by their weights. `turn_rewards` maps all completion
    ids (chatcmpl-0, ...) or agents (docs/generators.md) to rewards, or their parts: each
    completion is a separate sample of the advantage. `roles` maps agents to names that
    are the same in all rollouts of a group: samples are then compared by role
    (default: an agent's name; without any, all are compared). `turn_states` maps
    completion ids to the state before the turn, for algorithm.turn_discount; of the
    others, equal prompt ids are equal states. `untrained` names agents whose tokens get
    no loss. `timed_out`: the agent's own time limit cut it, and generator.on_timeout
    says what becomes of the reward.
    """

    # A harness makes an Outcome itself, and a plain dataclass checks nothing. So it is
    # checked again when it enters a message: NaN as a reward would spoil the advantages
    # of its whole group.
    __pydantic_config__ = ConfigDict(extra="forbid", revalidate_instances="always")

    reward: GivenReward | None = None
    metrics: Annotated[Mapping[str, Number], Field(max_length=MAX_METRICS)] = field(
        default_factory=dict
    )
    turn_rewards: Mapping[str, GivenReward] = field(default_factory=dict)
    turn_states: Mapping[str, State] = field(default_factory=dict)
    roles: Mapping[str, State] = field(default_factory=dict)
    untrained: tuple[State, ...] = ()
    timed_out: bool = False

    @property
    def earned(self) -> Mapping[str, Reward]:
        """Turn rewards whose parts have weights (weighted_outcome of rollouts)."""
        return cast(Mapping[str, Reward], self.turn_rewards)


@dataclass(frozen=True, slots=True)
class Ticket:
    """No token may be older than `start_version`."""

    group_id: GroupId
    start_version: int


@dataclass(frozen=True, slots=True, eq=False)
class Group:
    """The finished rollouts of one prompt, scored against each other."""

    group_id: GroupId
    prompt: Prompt
    trajectories: tuple[Trajectory, ...]

    @property
    def oldest_version(self) -> int:
        return min(trajectory.oldest_version for trajectory in self.trajectories)


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """Groups of one optimizer step, in order of admission, from policy_version v to v +
    1. Tokens older than `min_version` are masked with `mask_older`; otherwise the
    trainer refuses the batch.

    The trainer takes it in parts: groups whose ids have the same quotient by
    `part_groups` (0: all). `next_part_groups`: of the batch after it.
    """

    version: int
    groups: tuple[Group, ...]
    min_version: int
    mask_older: bool = False
    part_groups: int = 0
    next_part_groups: int = 0

    def parts(self) -> dict[int, Batch]:
        """Return a batch of each part's groups, by part_of() their ids.

        Example: part_groups 4 and groups 2, 3, 4, 6. The parts are 0: groups 2 and 3,
        and 1: groups 4 and 6. Group 5 has failed.
        """
        groups = dict[int, list[Group]]()
        for group in self.groups:
            groups.setdefault(part_of(group.group_id, self.part_groups), []).append(
                group
            )
        return {
            part: replace(self, groups=tuple(own), part_groups=0)
            for part, own in groups.items()
        }


def part_of(group_id: int, part_groups: int) -> int:
    """Return the part of its batch that a group is in.

    It follows from the id alone, and so does not depend on the groups that end first.
    """
    return group_id // part_groups if part_groups else 0


@dataclass(frozen=True, slots=True, eq=False)
class UnfinishedGroup:
    """A group of a killed run, by sample_index. `failures`: (attempts, reason),
    attempts 0 if the prompt is impossible; `partials`: (number of the attempt, sampled
    tokens).
    """

    ticket: Ticket
    prompt: Prompt
    rollouts: Mapping[int, Rollout] = field(default_factory=dict)
    failures: Mapping[int, tuple[int, str]] = field(default_factory=dict)
    partials: Mapping[int, tuple[int, Completion]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SessionRules:
    """Rules of one rollout's calls. Limits of None are the run's. `shows_special`:
    answers show special tokens.
    """

    max_tokens: int | None = None
    max_calls: int | None = None
    max_rollout_tokens: int | None = None
    shows_special: bool = True


RUN_RULES = SessionRules()


@dataclass(frozen=True, slots=True)
class Work:
    """`harness`: place in RunConfig.harnesses."""

    rollout_id: str
    prompt: Prompt
    sample_index: int
    attempt: int
    key: str
    timeout_s: float | None
    harness: int = 0
    outcome_key: str | None = None
    """With which the reward is posted later."""
    seed: int | None = None
    """Task.seed; None: the run's, of prompt, sample and attempt."""
