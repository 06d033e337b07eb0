"""Records and Protocols that rooms share. Rooms never import each other: they meet here. Knows no torch.

Positions: every index into a trajectory counts from its first prompt token; every index into a completion
counts from its first sampled token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NewType, Protocol

import numpy as np
import numpy.typing as npt

GroupId = NewType("GroupId", int)
"""Number of a group in order of admission, from 0; never reused, so its order is the order of admission."""

Interrupt = Literal["abort", "keep", "keep_kv", "wait"]
"""What a weight swap does to running requests (see `publisher.interrupt`)."""


@dataclass(frozen=True, slots=True)
class VersionSpan:
    """Tokens [start, end) were sampled under policy_version `version`."""

    start: int
    end: int
    version: int


@dataclass(frozen=True, slots=True)
class Prompt:
    """One task item as it goes into a group.

    `prompt_id` is unique within a run (epoch and index), so seeds derive from it. `messages` are chat
    messages (role and content). `answer` and `info` are for the reward function alone: no model sees them.
    """

    prompt_id: str
    messages: tuple[Mapping[str, str], ...]
    answer: Any = None
    info: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SamplingRequest:
    """One logical request to the model: prompt token ids in, at most `max_tokens` sampled tokens out.

    `route_key` keeps requests together that share a prompt (the samples of a group).
    """

    request_id: str
    prompt_ids: tuple[int, ...]
    max_tokens: int
    temperature: float
    top_p: float = 1.0
    stop: tuple[str, ...] = ()
    seed: int = 0
    route_key: str = ""


@dataclass(frozen=True, slots=True)
class Completion:
    """What was sampled for one logical request, its segments joined.

    `behaviour_logprobs` are float32 values in nats, of the distribution that was sampled from, one a token;
    `version_spans` cover every token exactly once, in order.
    """

    token_ids: tuple[int, ...]
    behaviour_logprobs: tuple[float, ...]
    version_spans: tuple[VersionSpan, ...]
    finish_reason: Literal["stop", "length"]
    num_interruptions: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Trajectory:
    """The token record of one finished rollout; all arrays have one entry a token, prompt included.

    token_ids int32 [T]; loss_mask bool [T], true on sampled tokens alone; behaviour_logprobs float32 [T] in
    nats, 0 where loss_mask is false; version_spans cover exactly the sampled tokens.
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

    @property
    def oldest_version(self) -> int:
        """Oldest policy_version of any sampled token."""
        return min(span.version for span in self.version_spans)

    @property
    def num_sampled(self) -> int:
        """Number of sampled tokens."""
        return sum(span.end - span.start for span in self.version_spans)


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

    generation: fewer than num_groups groups were ready, and admission was open or everything admitted was running;
    stragglers: enough were ready, but taking them would have made a running group too old (on_overdue=wait);
    publishing: too few groups in the system, because admission waited for a newer version to be served.
    """

    generation_s: float = 0.0
    stragglers_s: float = 0.0
    publishing_s: float = 0.0

    @property
    def total_s(self) -> float:
        """The whole wait."""
        return self.generation_s + self.stragglers_s + self.publishing_s


@dataclass(frozen=True, slots=True)
class StepReport:
    """What the trainer says of one optimizer step; `policy_version` is the new one. `metrics` by full name."""

    policy_version: int
    metrics: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class WeightManifest:
    """A set of weights in staging: where it lies, and what it must be.

    `digest` is `asyncrl.wire.weights_digest` of all tensors; `path` is a safetensors file that every engine
    server of this machine can read.
    """

    version: int
    path: str
    digest: str
    num_tensors: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class CommitReport:
    """What one engine server says of a swap: `pause_s` is the time in which it could not decode."""

    version: int
    digest: str
    pause_s: float
    num_interrupted: int


class SamplingEngine(Protocol):
    """What producers need of the engines: one logical request in, one joined completion out."""

    async def generate(self, request: SamplingRequest) -> Completion:
        """Sample; survives publishes. Raises RequestRefused (data) or EngineError (ends the run)."""
        ...


class WeightTarget(Protocol):
    """What the publisher needs of one engine server."""

    name: str

    async def prepare(self, manifest: WeightManifest) -> str:
        """Load the weights beside the serving ones, while generation goes on; return the digest of what was loaded."""
        ...

    async def commit(self, version: int, digest: str, interrupt: Interrupt) -> CommitReport:
        """Swap to the prepared weights between two decode steps and go on serving under `version`."""
        ...


class WeightSource(Protocol):
    """What the publisher needs of the trainer."""

    async def wait_version_above(self, version: int) -> int:
        """Return the trainer's policy_version once it is greater than `version`."""
        ...

    async def export(self) -> WeightManifest:
        """Copy the newest weights into staging, between two optimizer steps; replaces the previous export."""
        ...


class GroupSink(Protocol):
    """What producers need of the buffer."""

    async def wait_admit(self) -> Ticket:
        """Return leave to start one group, as soon as the staleness rule gives it."""
        ...

    def finish_nowait(self, group: Group) -> object:
        """The group is ready to be trained on. What is returned is of no interest to a producer."""
        ...

    def fail_nowait(self, group_id: GroupId, reason: str) -> object:
        """The group failed or was filtered: its admission is handed back. What is returned is of no interest."""
        ...


class PromptSource(Protocol):
    """What producers need of the tasks."""

    def next_nowait(self) -> Prompt:
        """The next prompt: handed-back ones first, then the seeded shuffle, epoch after epoch."""
        ...

    def hand_back_nowait(self, prompt: Prompt) -> None:
        """Put a prompt at the queue's front, to be generated again."""
        ...


class Scorer(Protocol):
    """What producers need to turn a completion's text into a reward."""

    async def score(self, prompt: Prompt, completion: str) -> float:
        """A finite reward. Raises RewardFailure if the reward function raises, is too slow, or returns nonsense."""
        ...


class ChatTokenizer(Protocol):
    """What producers need of the tokenizer."""

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> tuple[int, ...]:
        """Token ids of the chat with the prompt for the next assistant turn."""
        ...

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of the ids, special tokens left out."""
        ...
