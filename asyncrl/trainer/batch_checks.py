"""Checks a batch before anything is computed from it. Knows arrays and ages; knows no torch and no weights.

Invariant: no token sampled before header.min_version carries loss. loss_tokens guarantees it here, whatever the
buffer did before: such a token gets weight 0 where the batch allows it (mask_older), or the batch is refused.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from asyncrl.serving import Refused
from asyncrl.trainer.units import check_units, trajectory_name, wrong_batch
from asyncrl.wire import BatchArrays, BatchHeader, TrajectoryHeader

BoolN = npt.NDArray[np.bool_]

LOGPROB_SLACK = 1e-3
"""Nats by which a float32 logprob may round above 0."""


def check_batch(header: BatchHeader, arrays: BatchArrays, policy_version: int, vocab_size: int) -> None:
    """Refuse (409) a batch for another version, and (422) one whose parts do not fit together; says which and where."""
    if header.version != policy_version:
        raise Refused(
            409,
            f"batch {header.version} came while the trainer is at policy_version {policy_version}",
            rule="batch v is trained once, by policy_version v",
            way_out="two controllers may share this trainer, or a batch was sent twice; start the run again.",
        )
    if header.min_version > header.version:
        _refuse(f"min_version {header.min_version} is above version {header.version}", "no token can be that fresh")
    _check_arrays(arrays)
    _check_structure(header, len(arrays.token_ids))
    check_units(header, arrays.loss_mask)
    outside = (arrays.token_ids < 0) | (arrays.token_ids >= vocab_size)
    _refuse_any(outside, header, arrays.token_ids, "token id", f"ids are 0 to {vocab_size - 1} in this model")
    _refuse_any(~np.isfinite(arrays.behaviour_logprobs), header, arrays.behaviour_logprobs, "behaviour_logprob", "logprobs are finite")
    sampled = arrays.loss_mask
    positive = sampled & (arrays.behaviour_logprobs > LOGPROB_SLACK)
    _refuse_any(positive, header, arrays.behaviour_logprobs, "behaviour_logprob", "no logprob is above 0")
    impossible = sampled & ((arrays.versions < 0) | (arrays.versions > header.version))
    _refuse_any(impossible, header, arrays.versions, "version", f"a sampled token has a version from 0 to {header.version}")
    starts = np.zeros_like(sampled)
    starts[[trajectory.start for trajectory in header.trajectories]] = True
    _refuse_any(sampled & starts, header, arrays.token_ids, "sampled first token", "a token needs one before it to be predicted from")


def loss_tokens(header: BatchHeader, arrays: BatchArrays) -> BoolN:
    """The tokens that carry loss, bool [N]. Refuses (409) an old token if the batch does not allow masking, and an empty batch."""
    old = arrays.loss_mask & (arrays.versions < header.min_version)
    if old.any() and not header.mask_older:
        worst = int(np.flatnonzero(old)[np.argmin(arrays.versions[old])])
        raise Refused(
            409,
            f"a token of {_name(header, worst)} was sampled at version {arrays.versions[worst]}, and {int(old.sum())} tokens "
            f"are older than min_version {header.min_version} in batch {header.version}",
            rule="no token older than version - buffer.max_staleness may be trained on",
            way_out="this is a fault of the buffer, please report it; buffer.on_overdue=mask gives such tokens no weight.",
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


def _check_arrays(arrays: BatchArrays) -> None:
    expected = {
        "token_ids": np.int32, "loss_mask": np.bool_, "behaviour_logprobs": np.float32, "versions": np.int32, "engines": np.int16,
    }  # fmt: skip
    for name, dtype in expected.items():
        array = getattr(arrays, name)
        if array.dtype != dtype or array.shape != (len(arrays.token_ids),):
            _refuse(f"{name} is {array.dtype} {array.shape}", f"it must be {np.dtype(dtype)} ({len(arrays.token_ids)},)")


def _check_structure(header: BatchHeader, num_tokens: int) -> None:
    """Trajectories follow each other without gaps, group after group, in a group by sample and branch, each once."""
    end, group_ids, before = 0, list[int](), (-1, 0)
    for trajectory in header.trajectories:
        name = trajectory_name(trajectory)
        if trajectory.start != end or trajectory.end <= trajectory.start:
            _refuse(
                f"{name} has tokens [{trajectory.start}, {trajectory.end}) after {end}", "trajectories follow each other, none is empty"
            )
        if trajectory.group_index == len(group_ids):
            group_ids.append(trajectory.group_id)
            before = (-1, 0)
        if trajectory.group_index != len(group_ids) - 1 or group_ids[-1] != trajectory.group_id:
            _refuse(
                f"{name} has group_index {trajectory.group_index} after group {len(group_ids) - 1}", "groups follow each other, one id each"
            )
        place = (trajectory.sample_index, trajectory.branch)
        if place == before:
            _refuse(f"{name} is there twice", "a group has each branch of a sample once, a batch each group")
        is_next = place == (before[0], before[1] + 1) or (place[0] > before[0] and place[1] == 0)
        if not is_next:
            _refuse(
                f"{name}, branch {place[1]}, comes after sample {before[0]}, branch {before[1]}",
                "a group's samples follow each other by number, a sample's branches from 0 without gaps",
            )
        if not np.isfinite(trajectory.reward):
            _refuse(f"{name} has reward {trajectory.reward}", "rewards are finite")
        before, end = place, trajectory.end
    if end != num_tokens or not header.trajectories or len(set(group_ids)) != len(group_ids):
        _refuse(
            f"{len(header.trajectories)} trajectories of groups {group_ids} cover {end} of {num_tokens} tokens",
            "they cover every token, each group once",
        )


def _refuse_any(wrong: BoolN, header: BatchHeader, values: npt.NDArray[np.generic], what: str, rule: str) -> None:
    if wrong.any():
        first = int(np.argmax(wrong))
        _refuse(f"{what} {values[first]} of {_name(header, first)} ({int(wrong.sum())} such)", rule)


def _name(header: BatchHeader, index: int) -> str:
    trajectory: TrajectoryHeader = next(entry for entry in header.trajectories if entry.start <= index < entry.end)
    return f"{trajectory_name(trajectory)}, position {index - trajectory.start}"


def _refuse(error: str, rule: str) -> None:
    raise wrong_batch(error, rule)
