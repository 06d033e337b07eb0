"""Check a batch and compute a step's loss from logprobs.

Invariant: no token sampled before header.min_version carries loss, independently of the
    buffer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from asyncrl.algorithms import losses
from asyncrl.algorithms.advantages import (
    Turns,
    checked_advantages,
    gae,
    gigpo,
    normalize_then_sum,
    overlong_penalty,
    rewards_to_go,
    turn_rloo,
    whitened,
)
from asyncrl.algorithms.registry import (
    WHOLE_BATCH,
    WITHIN_RATIO,
    importance_cap,
    resolve,
)
from asyncrl.base.errors import ConfigError
from asyncrl.base.http import Refused
from asyncrl.base.user_code import load_advantage, load_loss
from asyncrl.config.algorithm_config import TURN_ADVANTAGES, AlgorithmConfig
from asyncrl.messages.records import Credit, RewardPart, task_of
from asyncrl.messages.tokens import DISTILL_IDS, TEACHER, Tokens
from asyncrl.messages.trainer_api import BatchHeader
from asyncrl.models.devices import to_device
from asyncrl.trainer.attention.tree import BoolN, IntN
from asyncrl.trainer.loss.packing import LogitSets, MicroBatch
from asyncrl.trainer.loss.supports import (
    DistillRows,
    check_supports,
)
from asyncrl.trainer.trainer_client import TrainerSpec

Float32N = npt.NDArray[np.float32]
Float64N = npt.NDArray[np.float64]
Stats = dict[str, Tensor | float]


def check_batch(
    header: BatchHeader, arrays: Tokens, policy_version: int, vocab_size: int
) -> None:
    """Raise Refused for a batch of another version (409), or tokens that no model can
    have sampled (422).
    """
    # A batch that is trained twice, or in another order than the journal has, would
    # make a version that no resume could repeat.
    if header.version != policy_version:
        raise Refused(
            409,
            f"batch {header.version} came while the trainer is at policy_version {policy_version}",
            rule="batch v is trained once, by policy_version v",
            way_out="start the run again.",
        )
    ids = arrays.ids
    # Before anything is computed: a NaN logprob would cost the whole step, and an id
    # out of range would end the process on CUDA.
    is_wrong = (ids < 0) | (ids >= vocab_size)
    is_wrong |= ~np.isfinite(arrays.behaviour_logprobs)
    is_wrong |= arrays.is_sampled & (arrays.versions > header.version)
    compared = arrays.column(DISTILL_IDS)
    is_unknown = (compared.values < 0) | (compared.values >= vocab_size)
    is_wrong[np.repeat(np.arange(len(ids)), compared.sizes)[is_unknown]] = True
    if is_wrong.any():
        first = int(np.argmax(is_wrong))
        logprob = arrays.behaviour_logprobs[first]
        version = arrays.versions[first]
        raise Refused(
            422,
            f"batch {header.version} has {is_wrong.sum()} invalid tokens, for example "
            f"id {ids[first]} with logprob {logprob} of version {version}",
            rule=f"ids (compared ones too) are below {vocab_size}, logprobs finite, no newer version",
            way_out="use engines that serve this model; start the run again.",
        )
    check_supports(arrays, vocab_size)


def loss_tokens(header: BatchHeader, arrays: Tokens) -> BoolN:
    """Return the loss tokens, bool [N]. Raises Refused (409) for old tokens."""
    # The buffer keeps this limit already. The trainer checks it again for each token,
    # because stale tokens train silently.
    old = arrays.is_sampled & (arrays.versions < header.min_version)
    if old.any() and not header.mask_older:
        oldest = np.argmin(arrays.versions[old])
        worst = int(np.flatnonzero(old)[oldest])
        entry = next(
            entry for entry in header.trajectories if entry.start <= worst < entry.end
        )
        position = worst - entry.start
        name = f"g{entry.group_id}/r{entry.sample_index}/b{entry.branch}, position {position}"
        raise Refused(
            409,
            f"a token of {name} was sampled at version {arrays.versions[worst]}, and "
            f"{int(old.sum())} are older than min_version {header.min_version} in batch {header.version}",
            rule="no token older than version - buffer.max_staleness may be trained on",
            way_out="buffer.on_overdue=mask gives such tokens no weight.",
        )
    # Old tokens lose their loss, not their place: later tokens of the sequence were
    # sampled after them and still read them.
    return arrays.is_sampled & ~old


def check_any_loss(header: BatchHeader, arrays: Tokens, has_loss: BoolN) -> None:
    if not has_loss.any():
        raise Refused(
            409,
            f"batch {header.version} has no token that carries loss ({int(arrays.is_sampled.sum())} sampled, "
            f"all older than version {header.min_version}, or not allowed by their grammar)",
            rule="an optimizer step needs at least one loss token",
            way_out="raise buffer.max_staleness, or set buffer.on_overdue=wait.",
        )


class Unit(NamedTuple):
    """A unit of the advantage: a rollout, `sample` of its group, or the unit `number` of
    its credits. `parts`: of the reward.
    """

    reward: float
    group: int
    sample: int
    number: int
    state: str
    task: str
    parts: Mapping[str, RewardPart] = {}


def find_units(header: BatchHeader, num_tokens: int) -> tuple[list[Unit], IntN]:
    """Return the units of a batch, and each token's, int64 [N], or -1."""
    units = list[Unit]()
    unit_N = np.full(num_tokens, -1, np.int64)
    numbers: dict[tuple[int, int, int], int] = {}
    for entry in header.trajectories:
        # Without credits, all branches of a rollout are one unit, which has its reward.
        num = entry.end - entry.start
        whole = Credit(0, num, entry.reward, -1, parts=entry.parts)
        for credit in entry.credits or [whole]:
            # The branch is not part of the key: a unit that several branches repeat
            # gets one advantage.
            key = (entry.group_index, entry.sample_index, credit.unit)
            if key not in numbers:
                numbers[key] = len(units)
                task = task_of(entry.prompt_id)
                state, parts = credit.state, credit.parts
                units.append(Unit(credit.reward, *key, state, task, parts))
            start = entry.start + credit.start
            unit_N[start : entry.start + credit.end] = numbers[key]
    return units, unit_N


def by_role(units: Sequence[Unit]) -> Tensor:
    """Return a group for each role of each group, int64 [B], from 0.

    A group with a unit without a role, such as a rollout that was cut before its harness
    named roles, stays whole: alone, the cut one would not be punished.
    """
    states = [unit.state for unit in units]
    group_B = np.array([unit.group for unit in units])
    _, role_B = np.unique(states, return_inverse=True)
    is_whole_B = np.isin(group_B, group_B[np.array(states) == ""])
    role_B = np.where(is_whole_B, -1, role_B.reshape(-1))
    pairs_B2 = np.stack([group_B, role_B], axis=1)
    _, group_B = np.unique(pairs_B2, axis=0, return_inverse=True)
    return torch.from_numpy(group_B.reshape(-1))


def part_table(units: Sequence[Unit], group_B: Tensor) -> tuple[Tensor, Tensor]:
    """Return values and weights of the parts of each unit, float64 [K, B], by name. NaN:
    the part does not apply.

    A unit with one number has one part without a name. But 0 is all parts of its group,
    if others have some: it was cut at a limit before it was scored.
    """
    groups = group_B.tolist()
    known = dict[int, Mapping[str, RewardPart]]()
    for unit, group in zip(units, groups, strict=True):
        known[group] = known.get(group) or unit.parts
    rows = list[Mapping[str, RewardPart]]()
    for unit, group in zip(units, groups, strict=True):
        zeros = {name: part._replace(value=0.0) for name, part in known[group].items()}
        is_cut = unit.reward == 0 and zeros
        number = zeros if is_cut else {"": RewardPart(unit.reward)}
        rows.append(unit.parts or number)
    names = sorted({name for row in rows for name in row})
    absent = RewardPart(None)
    table = [[row.get(name, absent) for row in rows] for name in names]
    # numpy reads None as NaN.
    table_KB2 = torch.from_numpy(np.array(table, np.float64))
    value_KB, weight_KB = table_KB2.permute(2, 0, 1).contiguous()
    return value_KB, weight_KB


def turns_of(units: Sequence[Unit]) -> Turns:
    keys_B3 = np.array([(unit.group, unit.sample, unit.number) for unit in units])
    _, inverse = np.unique(keys_B3[:, :2], axis=0, return_inverse=True)
    rollout_B = inverse.reshape(-1)
    group_R = np.zeros(rollout_B.max() + 1, np.int64)
    _, group_R[rollout_B] = np.unique(keys_B3[:, 0], return_inverse=True)
    # In order of the calls. Branches are in the order of their ids.
    order_B = np.lexsort((keys_B3[:, 2], rollout_B))
    _, first_R = np.unique(rollout_B[order_B], return_index=True)
    turn_B = np.zeros_like(rollout_B)
    turn_B[order_B] = np.arange(len(order_B)) - first_R[rollout_B[order_B]]
    # Nothing is known to be equal to an unknown state.
    names = [
        f"{unit.group}/{unit.state}" if unit.state else f"unknown {number}"
        for number, unit in enumerate(units)
    ]
    _, state_B = np.unique(names, return_inverse=True)
    return Turns(*map(torch.from_numpy, (rollout_B, turn_B, group_R, state_B)))


@dataclass
class BatchNumbers:
    """Data of a batch, [N]. `proximal_N`, `entropy_N`, `value_N`: by the weights before
    the batch; `reference_N`: by the initial weights. `value_N`, `return_N`: of all
    sampled tokens, if there is a critic.
    """

    header: BatchHeader
    arrays: Tokens
    has_loss: BoolN
    proximal_N: Float32N | None = None
    reference_N: Float32N | None = None
    entropy_N: Float32N | None = None
    value_N: Float32N | None = None
    return_N: Float32N | None = None
    sets: LogitSets = LogitSets()
    advantage_N: Float32N = field(init=False)
    packed: tuple[BoolN, list[tuple[MicroBatch, bool]]] | None = None
    """Tokens of the last pass without a gradient, and its micro-batches."""

    @classmethod
    def join(
        cls, header: BatchHeader, arrays: Tokens, parts: Sequence[BatchNumbers]
    ) -> BatchNumbers:
        """Return the numbers of a batch after its parts, which are in its order."""
        joined = cls(header, arrays, np.concatenate([part.has_loss for part in parts]))
        joined.advantage_N = np.concatenate([part.advantage_N for part in parts])
        # With a critic all parts have them, without one none has.
        values = [part.value_N for part in parts if part.value_N is not None]
        returns = [part.return_N for part in parts if part.return_N is not None]
        if values and returns:
            joined.value_N = np.concatenate(values)
            joined.return_N = np.concatenate(returns)
        return joined


class StepNumbers(NamedTuple):
    """Numbers of one optimizer step: a weight, a correction and a mask per token. The
    loss is a mean over `size` tokens or sequences.
    """

    size: int
    weight_N: Float32N
    correction_N: Float32N | None
    mask_N: Float32N | None


class Compare:
    """The advantages of algorithm.advantage."""

    def __init__(self, settings: AlgorithmConfig) -> None:
        self.settings = settings
        if settings.advantage not in ("gae", "gigpo"):
            self._function = load_advantage(resolve(settings).advantage)

    def __call__(self, units: Sequence[Unit], reward_B: Tensor) -> Tensor:
        """Return the advantage of each unit, float32 [B]."""
        settings = self.settings
        if settings.turn_discount is None:
            group_B = by_role(units)
        else:
            turns = turns_of(units)
            group_B = turns.group_R[turns.rollout_B]
            to_go_B = rewards_to_go(reward_B, turns, settings.turn_discount)
            if settings.advantage == "gigpo":
                return gigpo(reward_B, to_go_B, turns).float()
            if settings.advantage in TURN_ADVANTAGES:
                return turn_rloo(to_go_B, turns).float()
            reward_B = to_go_B
        if settings.rewards == "sum":
            return self._of_group(reward_B, group_B).float()
        parts = part_table(units, group_B)
        return normalize_then_sum(*parts, group_B, self._of_group).float()

    def _of_group(self, reward_B: Tensor, group_B: Tensor) -> Tensor:
        given = self._function(reward_B, group_B)
        return checked_advantages(given, reward_B, self.settings)


class Objective:
    def __init__(self, spec: TrainerSpec) -> None:
        self.spec = spec
        self.settings = spec.algorithm
        self._recipe = resolve(spec.algorithm)
        self._cap = importance_cap(spec.algorithm, self._recipe)
        # Without settings of tasks, all samples of a batch are compared.
        self._advantages = {
            name: Compare(settings)
            for name, settings in (spec.algorithms or {"": spec.algorithm}).items()
        }
        self._surrogate = load_loss(self._recipe.surrogate)
        self._is_corrected = self._recipe.correction != "none"
        self._is_whole_batch = self._recipe.correction in WHOLE_BATCH
        self.needs_reference = self.settings.kl_coefficient > 0
        self._is_penalised = self.needs_reference and self.settings.kl_in == "reward"

    @property
    def needs_proximal(self) -> bool:
        """True if the first step's own logprobs or entropies come too late."""
        loop = self.spec.trainer
        is_used = self._recipe.ratio == "proximal" or self._is_corrected
        # Before the only step of a version, the current policy is the proximal one, so
        # its logprobs come with the loss and the extra pass is saved.
        has_later_steps = loop.mini_batches * loop.epochs > 1
        is_recomputed = (
            is_used and has_later_steps and self.settings.proximal == "recompute"
        )
        is_masked = self.settings.top_entropy < 1
        return is_recomputed or self._is_penalised or self._is_whole_batch or is_masked

    def advantages(self, batch: BatchNumbers) -> Float32N:
        """Return advantages, float32 [N]. With a critic, set the batch's returns."""
        settings = self.settings
        has_loss = batch.has_loss
        units, unit_N = find_units(batch.header, len(has_loss))
        assert (unit_N[batch.arrays.is_sampled] >= 0).all(), (
            "credits cover every sampled token"
        )
        rewards = [unit.reward for unit in units]
        reward_B = torch.tensor(rewards, dtype=torch.float64)
        if settings.overlong_tokens > 0:
            unit_M = torch.from_numpy(unit_N[batch.arrays.is_sampled])
            length_B = unit_M.bincount(minlength=len(reward_B))
            penalty_B = overlong_penalty(
                length_B, self.spec.max_tokens, settings.overlong_tokens
            )
            reward_B = reward_B + penalty_B
        if self._is_penalised:
            assert batch.proximal_N is not None
            assert batch.reference_N is not None
            penalty_B = losses.kl_reward_penalty(
                torch.from_numpy(batch.proximal_N[has_loss]),
                torch.from_numpy(batch.reference_N[has_loss]),
                torch.from_numpy(unit_N[has_loss]),
                len(reward_B),
            )
            reward_B = reward_B - settings.kl_coefficient * penalty_B
        advantage_N: Float32N
        if batch.value_N is not None:
            advantage_N, batch.return_N = self._estimate(
                batch, batch.value_N, reward_B.numpy(), unit_N
            )
        else:
            advantage_B = self._compared(units, reward_B)
            # Tokens without a unit (-1) take the last unit's number. None has a loss.
            advantage_N = advantage_B.numpy()[unit_N]
        if settings.distill_weight == 0:
            return advantage_N
        return self._taught(batch, advantage_N)

    def _compared(self, units: Sequence[Unit], reward_B: Tensor) -> Tensor:
        """Return the advantage of each unit, float32 [B]."""
        advantage_B = torch.zeros(len(units))
        places = dict[str, list[int]]()
        for place, unit in enumerate(units):
            task = unit.task if self.spec.algorithms else ""
            places.setdefault(task, []).append(place)
        for name, place_U in places.items():
            own = [units[place] for place in place_U]
            of_task = self._advantages[name](own, reward_B[place_U])
            advantage_B[place_U] = of_task * self.spec.weights.get(name, 1.0)
        return advantage_B

    def _estimate(
        self, batch: BatchNumbers, value_N: Float32N, reward_B: Float64N, unit_N: IntN
    ) -> tuple[Float32N, Float32N]:
        """Return advantages and returns by gae, float32 [N], 0 without a sampled token."""
        settings = self.settings
        is_sampled = batch.arrays.is_sampled
        reward_N = np.zeros(len(is_sampled))
        lengths = list[int]()
        for entry in batch.header.trajectories:
            place_M = entry.start + np.flatnonzero(is_sampled[entry.start : entry.end])
            lengths.append(len(place_M))
            # A unit's reward comes with its last sampled token. In reverse order, that
            # is the first of the unit.
            reversed_M = place_M[::-1]
            unit_U, first_U = np.unique(unit_N[reversed_M], return_index=True)
            reward_N[reversed_M[first_U]] = reward_B[unit_U]
        advantage_M, return_M = gae(
            torch.from_numpy(reward_N[is_sampled]),
            torch.from_numpy(value_N[is_sampled]),
            torch.tensor(lengths),
            settings.discount,
            settings.gae_lambda,
        )
        if settings.whiten_advantages:
            has_loss_M = torch.from_numpy(batch.has_loss[is_sampled])
            advantage_M[has_loss_M] = whitened(advantage_M[has_loss_M])
        advantage_N, return_N = np.zeros((2, len(is_sampled)), np.float32)
        advantage_N[is_sampled], return_N[is_sampled] = advantage_M, return_M
        return advantage_N, return_N

    def _taught(self, batch: BatchNumbers, advantage_N: Float32N) -> Float32N:
        settings = self.settings
        assert TEACHER in batch.arrays.columns, "every rollout has passed the teacher"
        teacher_N = batch.arrays.column(TEACHER)
        taught_N = settings.reward_weight * advantage_N
        # A loss over several tokens has another gradient (micro_loss).
        if settings.num_distill_ids > 0:
            return taught_N
        has_loss = batch.has_loss
        behaviour_M = torch.from_numpy(batch.arrays.behaviour_logprobs[has_loss])
        teacher_M = torch.from_numpy(teacher_N[has_loss])
        distilled_M = losses.distillation(
            behaviour_M, teacher_M, settings.distill_loss
        ).numpy()
        taught_N[has_loss] += settings.distill_weight * distilled_M
        return taught_N

    def step_numbers(self, batch: BatchNumbers, has_loss: BoolN) -> StepNumbers:
        entries = batch.header.trajectories
        counts = [int(has_loss[one.start : one.end].sum()) for one in entries]
        tokens_S = torch.tensor(counts)
        # By the counts of the whole step, not of a micro-batch: any cut into
        # micro-batches and ranks gives the same gradient (docs/decisions/0008).
        weight_S = losses.token_weights(
            self._recipe.aggregate, tokens_S, self.spec.max_tokens
        )
        weight_N = weight_S.numpy().repeat([one.end - one.start for one in entries])
        mask_N = None
        correction_N = None
        if self.settings.top_entropy < 1:
            assert batch.entropy_N is not None
            mask_N = np.zeros(len(has_loss), np.float32)
            entropy_M = torch.from_numpy(batch.entropy_N[has_loss])
            mask_N[has_loss] = losses.top_entropy_mask(
                entropy_M, self.settings.top_entropy
            )
        if self._is_whole_batch:
            assert batch.proximal_N is not None
            log_weight_N = batch.proximal_N - batch.arrays.behaviour_logprobs
            # Sequences without loss have no number.
            number_S = (tokens_S > 0).cumsum(0) - 1
            sequence_M = torch.repeat_interleave(number_S, tokens_S)
            log_weight_M = torch.from_numpy(log_weight_N[has_loss])
            advantage_M = torch.from_numpy(batch.advantage_N[has_loss])
            correction_N = np.zeros(len(has_loss), np.float32)
            correction_N[has_loss] = self._correct(
                log_weight_M, advantage_M, sequence_M
            )
        size = losses.num_averaged(self._recipe.aggregate, tokens_S)
        return StepNumbers(size, weight_N, correction_N, mask_N)

    def _correct(
        self, log_weight_M: Tensor, advantage_M: Tensor, sequence_M: Tensor
    ) -> Tensor:
        correction = self._recipe.correction
        return losses.correct(
            correction, log_weight_M, advantage_M, sequence_M, self._cap
        )

    def micro_loss(
        self,
        micro: MicroBatch,
        current_M: Tensor,
        batch: BatchNumbers,
        step: StepNumbers,
        entry_E: Tensor | None = None,
    ) -> tuple[Tensor, Stats]:
        """Return this part of the loss, and sums of statistics, without a device sync.
        `entry_E`: logprobs of micro.distilled's entries, with gradient.
        """

        def over_tokens(values_N: npt.NDArray[np.generic]) -> Tensor:
            return to_device(values_N[micro.source_M], current_M.device)

        behaviour_M = over_tokens(batch.arrays.behaviour_logprobs)
        advantage_M = over_tokens(batch.advantage_N)
        detached_M = current_M.detach()
        proximal_M = self._proximal(
            batch,
            behaviour_M,
            detached_M,
            over_tokens,
        )
        anchor_M = behaviour_M if self._recipe.ratio == "behaviour" else proximal_M
        correction_M = kl_weight_M = None
        if self._is_corrected:
            correction_M, kl_weight_M = self._corrections(
                batch,
                step,
                proximal_M - behaviour_M,
                advantage_M,
                micro.sequence_M,
                over_tokens,
            )
        is_within = self._recipe.surrogate in WITHIN_RATIO
        denominator_M = anchor_M
        if correction_M is not None and is_within:
            # current - (anchor - log w) makes the ratio r * w, so that the surrogate
            # shapes both together.
            denominator_M = anchor_M - losses.log_of_weight(correction_M)
        tokens = losses.LossTokens(
            current_M,
            denominator_M,
            behaviour_M,
            advantage_M,
            micro.sequence_M,
        )
        loss_M, stats = self._call_surrogate(tokens)
        if correction_M is not None:
            stats["importance_weight"] = correction_M.sum()
            # Multiplied here only if the ratio does not contain it, or it would count
            # twice.
            loss_M = loss_M if is_within else loss_M * correction_M
        limit = self.settings.off_policy_mask
        if limit is not None:
            mask_M = losses.off_policy_mask(tokens, limit)
            loss_M = loss_M * mask_M
            stats["off_policy_fraction"] = (mask_M == 0).sum()
        if step.mask_N is not None:
            loss_M = loss_M * over_tokens(step.mask_N)
        if batch.reference_N is not None:
            reference_M = over_tokens(batch.reference_N)
            kl_M = self._kl(
                current_M,
                reference_M,
                anchor_M,
                kl_weight_M,
            )
            stats["kl_reference"] = kl_M.detach().sum()
            # Masks exclude a token's surrogate, not its KL, so this comes after them.
            if self.settings.kl_in == "loss":
                loss_M = loss_M + self.settings.kl_coefficient * kl_M
        if TEACHER in batch.arrays.columns:
            teacher_M = over_tokens(batch.arrays.column(TEACHER))
            kl_M = losses.kl(detached_M, teacher_M, "k1")
            stats["kl_teacher"] = kl_M.sum()
        if micro.distilled is not None and entry_E is not None:
            loss_M = loss_M + self._distance(micro.distilled, entry_E, len(loss_M))
        return (loss_M * over_tokens(step.weight_N)).sum(), stats

    def _distance(
        self, distilled: DistillRows, student_E: Tensor, num_tokens: int
    ) -> Tensor:
        # Exact at each sampled place, so neither the ratio nor a correction weighs it.
        # Like the KL to the initial weights, it comes after the masks.
        settings = self.settings
        is_reverse = settings.distill_loss == "topk_reverse_kl"
        distance_M = losses.divergence(
            student_E,
            distilled.other_E,
            distilled.token_E,
            num_tokens,
            1.0 if is_reverse else settings.distill_beta,
        )
        return settings.distill_weight * distance_M

    def _corrections(
        self,
        batch: BatchNumbers,
        step: StepNumbers,
        log_weight_M: Tensor,
        advantage_M: Tensor,
        sequence_M: Tensor,
        read: Callable[[npt.NDArray[np.generic]], Tensor],
    ) -> tuple[Tensor, Tensor]:
        """Return the weights of the surrogate and of the KL, float32 [M]."""
        if self._recipe.correction == "age_clip":
            age_M = batch.header.version - read(batch.arrays.versions)
            low, high = self.settings.clip_low, self.settings.clip_high
            mask_M = losses.age_clip(log_weight_M, advantage_M, age_M, low, high)
            # A masked token keeps its KL, which pulls it back into the region.
            return mask_M, losses.exp_ratio(log_weight_M).clamp(max=1.0)
        if step.correction_N is not None:
            correction_M = read(step.correction_N)
        else:
            correction_M = self._correct(log_weight_M, advantage_M, sequence_M)
        return correction_M, correction_M

    def _proximal(
        self,
        batch: BatchNumbers,
        behaviour_M: Tensor,
        current_M: Tensor,
        read: Callable[[npt.NDArray[np.generic]], Tensor],
    ) -> Tensor:
        if self.settings.proximal == "interpolate":
            staleness_M = batch.header.version - read(batch.arrays.versions)
            return losses.interpolate(behaviour_M, current_M, staleness_M)
        if batch.proximal_N is None:
            return current_M  # equal before the only step
        return read(batch.proximal_N)

    def _kl(
        self,
        current_M: Tensor,
        reference_M: Tensor,
        anchor_M: Tensor,
        weight_M: Tensor | None,
    ) -> Tensor:
        estimator = self.settings.kl_estimator
        if self.settings.kl_in == "reward" or not self.settings.kl_weighted:
            return losses.kl(current_M, reference_M, estimator)
        kl_M = losses.weighted_kl(
            current_M,
            reference_M,
            anchor_M,
            estimator,
        )
        return kl_M if weight_M is None else kl_M * weight_M

    def _call_surrogate(self, tokens: losses.LossTokens) -> tuple[Tensor, Stats]:
        loss_M, stats = self._surrogate(tokens, self.settings)
        # A user's loss of another shape would broadcast in the weighted sum below and
        # train on something without an error.
        is_tensor = isinstance(loss_M, Tensor) and loss_M.requires_grad
        if not is_tensor or loss_M.shape != tokens.current_M.shape:
            raise ConfigError(
                f"algorithm.loss={self.settings.loss} returned {loss_M!r}"[:500],
                rule=f"it returns a tensor [{len(tokens.current_M)}] with gradient, and a dict of numbers",
                way_out="correct the function; asyncrl/algorithms/losses.py has some that fit.",
            )
        detached: Stats = {}
        for name, value in stats.items():
            detached[name] = torch.as_tensor(value).detach()
        return loss_M, detached
