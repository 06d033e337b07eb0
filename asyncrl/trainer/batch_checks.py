"""Checks a batch before anything is computed from it. Knows arrays and ages; knows no torch and no weights.

Invariant: no token sampled before header.min_version carries loss. loss_tokens guarantees it here, whatever
the buffer did before: such a token gets weight 0 where the batch allows it (mask_older), or the batch is
refused.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby

import numpy as np
import numpy.typing as npt

from asyncrl.http import Refused
from asyncrl.messages.trainer_calls import BatchArrays, BatchHeader, Credit, TrajectoryHeader

BoolN = npt.NDArray[np.bool_]
IntN = npt.NDArray[np.int64]

LOGPROB_SLACK = 1e-3
"""Nats by which a float32 logprob may round above 0."""
DTYPES = {
    "token_ids": np.int32,
    "loss_mask": np.bool_,
    "behaviour_logprobs": np.float32,
    "versions": np.int32,
    "engines": np.int16,
}


def check_batch(header: BatchHeader, arrays: BatchArrays, policy_version: int, vocab_size: int) -> None:
    """Refuse (409) a batch for another version, and (422) one whose parts do not fit together; says which and
    where.
    """
    if header.version != policy_version:
        raise Refused(
            409,
            f"batch {header.version} came while the trainer is at policy_version {policy_version}",
            rule="batch v is trained once, by policy_version v",
            way_out="two controllers may share this trainer, or a batch was sent twice; start the run again.",
        )
    if header.min_version > header.version:
        raise _wrong(
            f"min_version {header.min_version} is above version {header.version}", "ages are not below 0"
        )
    for name, dtype in DTYPES.items():
        array = getattr(arrays, name)
        if array.dtype != dtype or array.shape != (len(arrays.token_ids),):
            raise _wrong(
                f"{name} is {array.dtype} {array.shape}",
                f"it must be {np.dtype(dtype)} ({len(arrays.token_ids)},)",
            )
    _check_structure(header, len(arrays.token_ids))
    for _, branches in groupby(
        header.trajectories, key=lambda entry: (entry.group_index, entry.sample_index)
    ):
        _check_rollout(list(branches), arrays.loss_mask)
    _check_tokens(header, arrays, vocab_size)


def loss_tokens(header: BatchHeader, arrays: BatchArrays) -> BoolN:
    """The tokens that carry loss, bool [N]. Refuses (409) an old token if the batch does not allow masking,
    and an empty batch.
    """
    old = arrays.loss_mask & (arrays.versions < header.min_version)
    if old.any() and not header.mask_older:
        worst = int(np.flatnonzero(old)[np.argmin(arrays.versions[old])])
        raise Refused(
            409,
            f"a token of {_token_name(header, worst)} was sampled at version {arrays.versions[worst]}, and "
            f"{int(old.sum())} tokens are older than min_version {header.min_version} in batch "
            f"{header.version}",
            rule="no token older than version - buffer.max_staleness may be trained on",
            way_out="please report it; buffer.on_overdue=mask gives such tokens no weight.",
        )
    kept = arrays.loss_mask & ~old
    if not kept.any():
        raise Refused(
            409,
            f"batch {header.version} has no token that carries loss "
            f"({int(arrays.loss_mask.sum())} sampled, all older than version {header.min_version})",
            rule="an optimizer step needs at least one loss token",
            way_out="raise buffer.max_staleness, or set buffer.on_overdue=wait.",
        )
    return kept


def _check_structure(header: BatchHeader, num_tokens: int) -> None:
    """Trajectories follow each other without gaps, group after group, in a group by sample and branch, each
    once.
    """
    end, group_ids, before = 0, list[int](), (-1, 0)
    for entry in header.trajectories:
        name, place = trajectory_name(entry), (entry.sample_index, entry.branch)
        if entry.start != end or entry.end <= entry.start:
            raise _wrong(
                f"{name} has tokens [{entry.start}, {entry.end}) after {end}",
                "trajectories follow each other, none is empty",
            )
        if entry.group_index == len(group_ids):
            group_ids.append(entry.group_id)
            before = (-1, 0)
        if entry.group_index != len(group_ids) - 1 or group_ids[-1] != entry.group_id:
            raise _wrong(
                f"{name} has group_index {entry.group_index} after group {len(group_ids) - 1}",
                "groups follow each other, one id each",
            )
        if not (place == (before[0], before[1] + 1) or (place[0] > before[0] and place[1] == 0)):
            raise _wrong(
                f"{name}, branch {place[1]}, comes after sample {before[0]}, branch {before[1]}",
                "a group's samples follow each other by number, each once, a sample's branches from 0 "
                "without gaps",
            )
        if not np.isfinite(entry.reward):
            raise _wrong(f"{name} has reward {entry.reward}", "rewards are finite")
        before, end = place, entry.end
    if end != num_tokens or not header.trajectories or len(set(group_ids)) != len(group_ids):
        raise _wrong(
            f"{len(header.trajectories)} trajectories of groups {group_ids} cover {end} of {num_tokens}",
            "they cover every token, each group once",
        )


def _check_tokens(header: BatchHeader, arrays: BatchArrays, vocab_size: int) -> None:
    ids, logprobs, versions, sampled = (
        arrays.token_ids,
        arrays.behaviour_logprobs,
        arrays.versions,
        arrays.loss_mask,
    )
    starts = np.zeros_like(sampled)
    starts[[entry.start for entry in header.trajectories]] = True
    checks = (
        ((ids < 0) | (ids >= vocab_size), ids, "token id", f"ids are 0 to {vocab_size - 1} in this model"),
        (~np.isfinite(logprobs), logprobs, "behaviour_logprob", "logprobs are finite"),
        (sampled & (logprobs > LOGPROB_SLACK), logprobs, "behaviour_logprob", "no logprob is above 0"),
        (
            sampled & ((versions < 0) | (versions > header.version)),
            versions,
            "version",
            f"a sampled token has a version from 0 to {header.version}",
        ),
        (sampled & starts, ids, "sampled first token", "a token needs one before it to be predicted from"),
    )
    for wrong, values, what, rule in checks:
        if wrong.any():
            first = int(np.argmax(wrong))
            raise _wrong(f"{what} {values[first]} of {_token_name(header, first)} ({wrong.sum()} such)", rule)


def _check_rollout(branches: list[TrajectoryHeader], loss_mask: BoolN) -> None:
    """Branches and credits of a rollout add up to samples."""
    first, rewards = branches[0], [entry.reward for entry in branches]
    name = trajectory_name(first)
    if len(set(rewards)) > 1:
        raise _wrong(f"the branches of {name} have rewards {rewards}", "a rollout has one reward")
    with_credits = [entry.branch for entry in branches if entry.credits]
    if with_credits and len(with_credits) < len(branches):
        raise _wrong(
            f"of the {len(branches)} branches of {name} only {with_credits} have credits",
            "credits cover every loss token of a rollout, or there are none",
        )
    rewards_of: dict[int, float] = {}
    for entry in branches:
        if entry.credits:
            _check_coverage(entry, loss_mask[entry.start : entry.end])
        for credit in entry.credits:
            known = rewards_of.setdefault(credit.unit, credit.reward)
            if not np.isfinite(credit.reward) or known != credit.reward:
                raise _wrong(
                    f"unit {credit.unit} of {name} has rewards {known} and {credit.reward}",
                    "a unit of a rollout has one reward, a finite one",
                )


def _check_coverage(entry: TrajectoryHeader, loss_mask: BoolN) -> None:
    """Every loss token once; other tokens may lie in a credit too."""
    times = np.zeros(len(loss_mask), np.int64)
    for credit in entry.credits:
        if not 0 <= credit.start < credit.end <= len(loss_mask) or credit.unit < 0:
            raise _wrong(
                f"{trajectory_name(entry)} has a credit for tokens [{credit.start}, {credit.end}) of "
                f"{len(loss_mask)}, unit {credit.unit}",
                "a credit is for at least one token of its trajectory, its unit 0 or more",
            )
        times[credit.start : credit.end] += 1
    wrong = np.flatnonzero(loss_mask & (times != 1))
    if len(wrong):
        raise _wrong(
            f"token {wrong[0]} of {trajectory_name(entry)} is in {times[wrong[0]]} credits ({len(wrong)})",
            "credits cover every loss token once",
        )


@dataclass(frozen=True)
class Units:
    """What one sample of the advantage is: a rollout, all its branches together, or with credits each of its
    unit numbers, wherever the tokens lie. Numbered in the order in which a batch first names them.

    `rewards` and `groups` (group_index) of the B units; `unit_N` int64 [N]: that of each token, -1 where no
    credit says one.
    """

    rewards: list[float]
    groups: list[int]
    unit_N: IntN

    def count(self, chosen: BoolN) -> IntN:
        """Chosen tokens of each unit, int64 [B]."""
        unit_M = self.unit_N[chosen]
        return np.bincount(unit_M[unit_M >= 0], minlength=len(self.rewards))

    def spread(self, value_B: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        """The value of its unit at every token, 0 where it has none. float32 [N]."""
        return np.where(self.unit_N >= 0, value_B[self.unit_N], np.float32(0.0))


def find_units(header: BatchHeader, num_tokens: int) -> Units:
    """Of a batch that check_batch has found right."""
    rewards, groups, unit_N = list[float](), list[int](), np.full(num_tokens, -1, np.int64)
    numbers: dict[tuple[int, int, int | None], int] = {}
    for entry in header.trajectories:
        for credit in entry.credits or [Credit(0, entry.end - entry.start, entry.reward, -1)]:
            key = (entry.group_index, entry.sample_index, credit.unit)
            if key not in numbers:
                numbers[key] = len(rewards)
                rewards.append(credit.reward)
                groups.append(entry.group_index)
            unit_N[entry.start + credit.start : entry.start + credit.end] = numbers[key]
    return Units(rewards, groups, unit_N)


def trajectory_name(entry: TrajectoryHeader) -> str:
    """`g17/r3`, and its branch unless it is the first."""
    return f"g{entry.group_id}/r{entry.sample_index}" + (f"/b{entry.branch}" if entry.branch else "")


def _token_name(header: BatchHeader, index: int) -> str:
    entry = next(entry for entry in header.trajectories if entry.start <= index < entry.end)
    return f"{trajectory_name(entry)}, position {index - entry.start}"


def _wrong(error: str, rule: str) -> Refused:
    return Refused(422, error, rule=rule, way_out="please report it: the controller made a wrong batch.")
