"""Exact conversion of token records to bytes, for the journal.

A blob is a zlib-compressed frame (messages/codec.py). Its arrays are in byte planes, which compress better.
"""

from __future__ import annotations

import sqlite3
import zlib
from dataclasses import astuple

import numpy as np

from asyncrl.messages.codec import read_frame, write_frame
from asyncrl.messages.records import Completion, Credit, GrammarSpan, Rollout, Trajectory, VersionSpan

_LEVEL = 1  # higher levels save 1 to 3 % at twice the time
_SHORT = 1024
"""Blobs up to this size in bytes are stored uncompressed, since zlib's setup dominates."""
_DTYPES = {"token_ids": "<i4", "behaviour_logprobs": "<f4", "teacher_logprobs": "<f4", "routing": "<u2"}


def encode_trajectory(group_id: int, trajectory: Trajectory) -> bytes:
    arrays = {}
    for name, dtype in _DTYPES.items():
        array = getattr(trajectory, name)
        if array is not None:
            assert array.dtype == np.dtype(dtype), f"{array.dtype} instead of {dtype}"
            arrays[name] = array.view(np.uint8).reshape(-1, array.itemsize).T.reshape(-1)
    arrays["loss_mask"] = np.packbits(trajectory.loss_mask)
    head = {
        "place": [int(group_id), int(trajectory.sample_index), int(trajectory.branch)],
        "reward": float(trajectory.reward),
        "spans": [span.plain for span in trajectory.version_spans],
        "is_truncated": bool(trajectory.is_truncated),
        "num_interruptions": int(trajectory.num_interruptions),
        "metrics": {str(name): float(value) for name, value in trajectory.metrics.items()},
        "credits": [astuple(credit) for credit in trajectory.credits],
        "grammars": [astuple(span) for span in trajectory.grammars],
    }
    whole = write_frame("trajectory", arrays, head)
    return zlib.compress(whole, _LEVEL if len(whole) > _SHORT else 0)


def decode_trajectory(blob: bytes, group_id: int, sample_index: int, branch: int) -> Trajectory:
    """Decode a trajectory. Raises ValueError for a damaged blob or another branch's."""
    try:
        frame = read_frame(zlib.decompress(blob))
        head = frame.text
        if head["place"] != [group_id, sample_index, branch]:
            raise ValueError(f"they are of {head['place']}")
        arrays = {}
        for name, dtype in _DTYPES.items():
            if name in frame.arrays:
                planes = frame.arrays[name].reshape(np.dtype(dtype).itemsize, -1)
                arrays[name] = planes.T.copy().view(dtype).reshape(-1)
        num_tokens = len(arrays["token_ids"])
        routing = arrays.get("routing")
        return Trajectory(
            sample_index=sample_index,
            token_ids=arrays["token_ids"],
            behaviour_logprobs=arrays["behaviour_logprobs"],
            loss_mask=np.unpackbits(frame.arrays["loss_mask"], count=num_tokens).astype(np.bool_),
            version_spans=tuple(VersionSpan(*span) for span in head["spans"]),
            reward=head["reward"],
            is_truncated=head["is_truncated"],
            num_interruptions=head["num_interruptions"],
            metrics=head["metrics"],
            branch=branch,
            credits=tuple(Credit(*credit) for credit in head["credits"]),
            grammars=tuple(GrammarSpan(*span) for span in head["grammars"]),
            teacher_logprobs=arrays.get("teacher_logprobs"),
            routing=None if routing is None else routing.reshape(num_tokens, -1),
        )
    except (zlib.error, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"the tokens of g{group_id}/r{sample_index} do not unpack ({error})") from error


def encode_partial(group_id: int, sample_index: int, partial: Completion) -> bytes:
    trajectory = Trajectory(
        sample_index,
        np.array(partial.token_ids, np.int32),
        np.ones(len(partial.token_ids), np.bool_),
        np.array(partial.behaviour_logprobs, np.float32),
        partial.version_spans,
        reward=0.0,
        num_interruptions=partial.num_interruptions,
    )
    return encode_trajectory(group_id, trajectory)


def decode_partial(blob: bytes, group_id: int, sample_index: int) -> Completion:
    """Decode an unfinished completion. Raises ValueError for a damaged blob or another rollout's."""
    found = decode_trajectory(blob, group_id, sample_index, 0)
    token_ids = tuple(found.token_ids.tolist())
    logprobs = tuple(found.behaviour_logprobs.tolist())
    return Completion(token_ids, logprobs, found.version_spans, num_interruptions=found.num_interruptions)


def rollouts_of(connection: sqlite3.Connection, group_id: int) -> dict[int, Rollout]:
    query = (
        "SELECT sample_index, branch, blob FROM trajectories WHERE group_id = ? ORDER BY sample_index, branch"
    )
    found: dict[int, Rollout] = {}
    for index, branch, blob in connection.execute(query, (group_id,)):
        found[index] = (*found.get(index, ()), decode_trajectory(blob, group_id, index, branch))
    return found


def failures_of(connection: sqlite3.Connection, group_id: int) -> dict[int, tuple[int, str]]:
    query = "SELECT sample_index, attempts, why FROM failures WHERE group_id = ? ORDER BY sample_index"
    return {index: (attempts, why) for index, attempts, why in connection.execute(query, (group_id,))}


def partials_of(connection: sqlite3.Connection, group_id: int) -> dict[int, tuple[int, Completion]]:
    query = "SELECT sample_index, attempt, blob FROM segments WHERE group_id = ? ORDER BY sample_index"
    return {
        index: (attempt, decode_partial(blob, group_id, index))
        for index, attempt, blob in connection.execute(query, (group_id,))
    }
