"""Checks a batch before anything is computed from it. Imports no torch.

Invariant: no token sampled before header.min_version carries loss. loss_tokens guarantees it here, whatever
    the buffer did before: such a token gets weight 0 where the batch allows it (mask_older), or the batch is
    refused.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from asyncrl.http import Refused
from asyncrl.messages.calls import BatchArrays, BatchHeader, Credit, TrajectoryHeader

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
            way_out="start the run again.",
        )
    num_tokens = len(arrays.token_ids)
    for name, dtype in DTYPES.items():
        array = getattr(arrays, name)
        _expect(
            array.dtype == dtype and array.shape == (num_tokens,), f"{name} is {array.dtype} {array.shape}"
        )
    entries = header.trajectories
    ends = [entry.end for entry in entries]
    _expect([entry.start for entry in entries] == [0, *ends[:-1]], "trajectories do not follow each other")
    _expect(ends[-1:] == [num_tokens], f"trajectories end at {ends[-1:]} of {num_tokens} tokens")
    groups = [-1, *(entry.group_index for entry in entries)]
    _expect(set(np.diff(groups)) <= {0, 1}, f"group indices {groups[1:]} do not follow each other")
    unit_N = find_units(header, num_tokens).unit_N
    _expect((unit_N[arrays.loss_mask] >= 0).all(), "credits do not cover every loss token")
    ids, logprobs, sampled = arrays.token_ids, arrays.behaviour_logprobs, arrays.loss_mask
    starts = np.zeros_like(sampled)
    starts[[entry.start for entry in entries]] = True
    is_outside = (arrays.versions < 0) | (arrays.versions > header.version)
    for wrong, values, what in (
        ((ids < 0) | (ids >= vocab_size), ids, f"token id not below {vocab_size}"),
        (~np.isfinite(logprobs), logprobs, "behaviour_logprob that is not finite"),
        (sampled & (logprobs > LOGPROB_SLACK), logprobs, "behaviour_logprob above 0"),
        (sampled & is_outside, arrays.versions, f"version of a sampled token not in 0 to {header.version}"),
        (sampled & starts, ids, "sampled token with none before it"),
    ):
        first = int(np.argmax(wrong))
        where = f"{values[first]} at {_token_name(header, first)}, {wrong.sum()} such"
        _expect(not wrong.any(), f"{what}: {where}")


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
            f"{int(old.sum())} are older than min_version {header.min_version} in batch {header.version}",
            rule="no token older than version - buffer.max_staleness may be trained on",
            way_out="buffer.on_overdue=mask gives such tokens no weight.",
        )
    kept = arrays.loss_mask & ~old
    if not kept.any():
        raise Refused(
            409,
            f"batch {header.version} has no token that carries loss ({int(arrays.loss_mask.sum())} sampled, "
            f"all older than version {header.min_version})",
            rule="an optimizer step needs at least one loss token",
            way_out="raise buffer.max_staleness, or set buffer.on_overdue=wait.",
        )
    return kept


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


def _expect(is_right: bool | np.bool_, error: str) -> None:
    """Refuse the batch unless it `is_right`."""
    if not is_right:
        raise Refused(422, error, rule="the parts of a batch fit together", way_out="start the run again.")
