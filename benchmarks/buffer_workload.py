"""What a simulation plays: rollouts, and how fast the machine is that samples them and trains on them."""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol


class TurnPlan(NamedTuple):
    """`wait_s` before a turn, for a tool say, then the tokens that the engine reads, and that it samples."""

    wait_s: float
    num_read: float
    num_sampled: float


@dataclass(frozen=True, slots=True)
class RolloutPlan:
    """What one rollout takes: its turns, and `held_s` after the last, with its slot; then `reward_s` without.
    `trained`: share of its tokens that the trainer computes; a group without a gradient costs it nothing.
    """

    turns: tuple[TurnPlan, ...]
    held_s: float = 0.0
    reward_s: float = 0.0
    trained: float = 1.0


class Workload(Protocol):
    """Where rollouts come from."""

    def group(self, prompt: int, num_requeued: int, progress: float) -> Sequence[RolloutPlan]:
        """The rollouts of one prompt; `progress` 0..1 is how much of the run lies behind when it starts."""
        ...


@dataclass(frozen=True)
class Lognormal:
    """Rollouts of one turn of lognormal length, with mean `tokens` and shape `sigma`.

    `prompt_share` of the variance of its logarithm is the prompt's own: long for all rollouts of it, and as
    long when it comes again. With `tool_s` > 0 a rollout that has sampled waits for a tool or a reward,
    lognormal with mean `tool_s` and shape `tool_sigma`; without its slot, unless it `holds_slot`. No turn is
    longer than `most`.
    """

    sigma: float
    tokens: float = 1.0
    prompt_share: float = 0.0
    tool_s: float = 0.0
    tool_sigma: float = 1.0
    holds_slot: bool = False
    group_size: int = 1
    most: float = math.inf
    seed: int = 0

    def group(self, prompt: int, num_requeued: int, progress: float = 0.0) -> Sequence[RolloutPlan]:
        """The same at any time of the run."""
        return self._drawn(prompt, num_requeued)

    @functools.lru_cache(2**15)  # noqa: B019  a workload is small, and simulated under many settings
    def _drawn(self, prompt: int, num_requeued: int) -> Sequence[RolloutPlan]:
        plans = list[RolloutPlan]()
        for index in range(self.group_size):
            tokens = min(self.most, self.length(prompt, num_requeued, index))
            wait_s = self.wait_s(prompt, num_requeued, index)
            with_slot_s = wait_s if self.holds_slot else 0.0
            plans.append(RolloutPlan((TurnPlan(0.0, 0.0, tokens),), with_slot_s, wait_s - with_slot_s))
        return plans

    def length(self, prompt: int, num_requeued: int, sample_index: int) -> float:
        """Tokens of one rollout."""
        of_prompt = random.Random(f"{self.seed}/{prompt}").gauss(0.0, 1.0) if self.prompt_share else 0.0
        of_sample = random.Random(f"{self.seed}/{prompt}/{num_requeued}/{sample_index}").gauss(0.0, 1.0)
        normal = math.sqrt(self.prompt_share) * of_prompt + math.sqrt(1 - self.prompt_share) * of_sample
        return self.tokens * math.exp(self.sigma * normal - self.sigma**2 / 2)

    def wait_s(self, prompt: int, num_requeued: int, sample_index: int) -> float:
        """For the tool of one rollout."""
        if not self.tool_s:
            return 0.0
        draw = random.Random(f"tool {self.seed}/{prompt}/{num_requeued}/{sample_index}").gauss(0.0, 1.0)
        return self.tool_s * math.exp(self.tool_sigma * draw - self.tool_sigma**2 / 2)


@dataclass(frozen=True, slots=True)
class SimulatedMachine:
    """How fast its parts are; times in seconds.

    An engine has `slots` places and gives each of the n sequences that run there one token in `step_s + n *
    row_s`. A request waits `request_s` by itself, then it costs its engine `admit_s`, and `read_s` for each
    token that is read, in which all that runs there stands still. A rollout without a place waits for one in
    order of admission; a group is admitted when a place is free and no rollout waits. A batch trains for
    `train_s + tokens * train_token_s`, and takes `overhead_s` besides, half of it before and half after; its
    version is served `publish_s` later, and stops decoding for `pause_s`, and, if it `reads_again`, for all
    tokens of what runs. While a publish is under way newer versions wait and are skipped over. Where both
    sides share cores, engines lose the share `train_drag` of their speed while the trainer works, and it
    loses the share `decode_drag` of its own while they do.
    """

    slots: int
    num_engines: int = 1
    step_s: float = 1.0
    row_s: float = 0.0
    request_s: float = 0.0
    admit_s: float = 0.0
    read_s: float = 0.0
    reads_again: bool = True
    train_s: float = 1.0
    train_token_s: float = 0.0
    overhead_s: float = 0.0
    publish_s: float = 0.0
    pause_s: float = 0.0
    train_drag: float = 0.0
    decode_drag: float = 0.0


class EngineClock:
    """All that runs gets a token a step, so one clock of steps tells how far each is, as in the simulated
    engine server.
    """

    def __init__(self, machine: SimulatedMachine) -> None:
        self.machine = machine
        self.clock = self.busy_s = 0.0
        self.num_running = 0
        self.served_at = [0.0]
        """By version: the clock when it came."""
        self.drag = 1.0
        """How many times longer all takes, beside the trainer."""
        self._at_s = self._stalled_until_s = self._origins = 0.0

    @property
    def _token_s(self) -> float:
        return (self.machine.step_s + self.num_running * self.machine.row_s) * self.drag

    def advance(self, now_s: float) -> None:
        """Before anything changes."""
        if self.num_running:
            self.busy_s += now_s - self._at_s
            self.clock += max(0.0, now_s - max(self._at_s, self._stalled_until_s)) / self._token_s
        self._at_s = now_s

    def enter(self, num_tokens: float, num_read: float) -> None:
        """A sequence that has so many tokens begins to sample; the last `num_read` are read now."""
        self.num_running += 1
        self._origins += self.clock - num_tokens
        self._stall(self.machine.admit_s + num_read * self.machine.read_s)

    def leave(self, origin: float) -> None:
        """It ends; `origin`: the clock when it entered, less the tokens that it had."""
        self.num_running -= 1
        self._origins -= origin

    def swap(self, version: int) -> None:
        """To newer weights."""
        self.served_at += [self.clock] * (version + 1 - len(self.served_at))
        num_tokens = self.num_running * self.clock - self._origins if self.machine.reads_again else 0.0
        self._stall(self.machine.pause_s + num_tokens * self.machine.read_s)

    def ends_s(self, clock: float) -> float:
        """When its clock will be there, if nothing changes."""
        return max(self._at_s, self._stalled_until_s) + (clock - self.clock) * self._token_s

    def _stall(self, seconds: float) -> None:
        self._stalled_until_s = max(self._stalled_until_s, self._at_s) + seconds * self.drag


@dataclass(frozen=True, slots=True)
class SimulationResult:
    """Of the batches after the first ones that are not counted. Shares are 0..1 of the time: the trainer
    waits, an engine decodes nothing. Ages are in versions: batch index - oldest version of a token with a
    loss weight, one value a rollout. `num_requeued` and `num_given_up` are of the whole run.
    """

    batches_per_s: float
    trainer_idle: float
    engines_idle: float
    age_mean: float
    age_max: int
    late_fraction: float
    masked_fraction: float
    again_fraction: float
    num_requeued: int
    num_given_up: int
    look_ahead_mean: float
