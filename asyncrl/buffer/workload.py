"""What a simulation plays: rollouts, and how fast the machine is that samples them and trains on them."""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class RolloutPlan:
    """What one rollout takes. `turns`: (seconds before it, for a tool say; tokens that it samples) of each,
    and `held_s` after the last, all with its slot; then `reward_s` without.
    """

    turns: tuple[tuple[float, float], ...]
    held_s: float = 0.0
    reward_s: float = 0.0


class Workload(Protocol):
    """Where rollouts come from."""

    def group(self, prompt: int, num_handed_back: int, progress: float) -> Sequence[RolloutPlan]:
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

    def group(self, prompt: int, num_handed_back: int, progress: float = 0.0) -> Sequence[RolloutPlan]:
        """The same at any time of the run."""
        return self._drawn(prompt, num_handed_back)

    @functools.lru_cache(2**15)  # noqa: B019  a workload is small, and simulated under many settings
    def _drawn(self, prompt: int, num_handed_back: int) -> Sequence[RolloutPlan]:
        plans = list[RolloutPlan]()
        for index in range(self.group_size):
            tokens = min(self.most, self.length(prompt, num_handed_back, index))
            wait_s = self.wait_s(prompt, num_handed_back, index)
            with_slot_s = wait_s if self.holds_slot else 0.0
            plans.append(RolloutPlan(((0.0, tokens),), with_slot_s, wait_s - with_slot_s))
        return plans

    def length(self, prompt: int, num_handed_back: int, sample_index: int) -> float:
        """Tokens of one rollout."""
        of_prompt = random.Random(f"{self.seed}/{prompt}").gauss(0.0, 1.0) if self.prompt_share else 0.0
        of_sample = random.Random(f"{self.seed}/{prompt}/{num_handed_back}/{sample_index}").gauss(0.0, 1.0)
        normal = math.sqrt(self.prompt_share) * of_prompt + math.sqrt(1 - self.prompt_share) * of_sample
        return self.tokens * math.exp(self.sigma * normal - self.sigma**2 / 2)

    def wait_s(self, prompt: int, num_handed_back: int, sample_index: int) -> float:
        """For the tool of one rollout."""
        if not self.tool_s:
            return 0.0
        draw = random.Random(f"tool {self.seed}/{prompt}/{num_handed_back}/{sample_index}").gauss(0.0, 1.0)
        return self.tool_s * math.exp(self.tool_sigma * draw - self.tool_sigma**2 / 2)


@dataclass(frozen=True, slots=True)
class SimulatedMachine:
    """How fast its parts are; times in seconds.

    An engine has `slots` places, gives each of the n sequences that run there one token in `step_s + n *
    row_s`, and a request waits `request_s` for its first one. A rollout without a place waits for one in
    order of admission; a group is admitted when a place is free and no rollout waits. A batch trains for
    `train_s + tokens * train_token_s`, and takes `overhead_s` besides, half of it before and half after; its
    version is served `publish_s` later, and stops decoding for `pause_s`. While a publish is under way newer
    versions wait and are skipped over. Where both sides share cores, engines lose the share `train_drag` of
    their speed while the trainer works, and it loses the share `decode_drag` of its own while they do.
    """

    slots: int
    num_engines: int = 1
    step_s: float = 1.0
    row_s: float = 0.0
    request_s: float = 0.0
    train_s: float = 1.0
    train_token_s: float = 0.0
    overhead_s: float = 0.0
    publish_s: float = 0.0
    pause_s: float = 0.0
    train_drag: float = 0.0
    decode_drag: float = 0.0


@dataclass(frozen=True, slots=True)
class SimulationResult:
    """Of the batches after the first ones that are not counted. Shares are 0..1 of the time: the trainer
    waits, an engine decodes nothing. Ages are in versions: batch index - oldest version of a token with a
    loss weight, one value a rollout. `num_handed_back` and `num_given_up` are of the whole run.
    """

    batches_per_s: float
    trainer_idle: float
    engines_idle: float
    age_mean: float
    age_max: int
    late_fraction: float
    masked_fraction: float
    again_fraction: float
    num_handed_back: int
    num_given_up: int
    look_ahead_mean: float
