"""Exact conversion of token records to bytes, for the journal and recordings.

A blob is zlib over: head length (uint32), head (JSON), token ids (int32), logprobs (float32), loss mask
(one bit per token), optional teacher logprobs (float32) and experts per token (uint16), little endian in
byte planes, which compress better.
"""

from __future__ import annotations

import json
import sqlite3
import struct
import zlib
from dataclasses import astuple
from typing import Any

import numpy as np
import numpy.typing as npt

from asyncrl.messages.records import Completion, Credit, GrammarSpan, Rollout, Trajectory, VersionSpan

FORMAT = 2
_LEVEL = 1  # higher levels save 1 to 3 % at twice the time
_SHORT = 1024
"""Blobs up to this size in bytes are stored uncompressed, since zlib's setup dominates."""
_json = json.JSONEncoder(separators=(",", ":")).encode
_LENGTH = struct.Struct("<I")


def encode_trajectory(group_id: int, trajectory: Trajectory) -> bytes:
    head: dict[str, Any] = {
        "format": FORMAT,
        "place": _place(group_id, trajectory.sample_index, trajectory.branch),
        "num_tokens": len(trajectory.token_ids),
        "reward": float(trajectory.reward),
        "spans": [span.plain for span in trajectory.version_spans],
        "is_truncated": bool(trajectory.is_truncated),
        "num_interruptions": int(trajectory.num_interruptions),
        "metrics": {str(name): float(value) for name, value in trajectory.metrics.items()},
    }
    if trajectory.credits:
        head["credits"] = [astuple(credit) for credit in trajectory.credits]
    if trajectory.grammars:
        head["grammars"] = [astuple(span) for span in trajectory.grammars]
    if (taught := trajectory.teacher_logprobs) is not None:
        head["is_taught"] = True
    if (routing := trajectory.routing) is not None:
        head["num_routed"] = routing.shape[1]
    text = _json(head).encode()
    parts = (
        _LENGTH.pack(len(text)),
        text,
        _planes(trajectory.token_ids, "<i4"),
        _planes(trajectory.behaviour_logprobs, "<f4"),
        np.packbits(trajectory.loss_mask).tobytes(),
        b"" if taught is None else _planes(taught, "<f4"),
        b"" if routing is None else _planes(routing.reshape(-1), "<u2"),
    )
    whole = b"".join(parts)
    return zlib.compress(whole, _LEVEL if len(whole) > _SHORT else 0)


def decode_trajectory(blob: bytes, group_id: int, sample_index: int, branch: int) -> Trajectory:
    """Decode a trajectory. Raises ValueError for a damaged blob or another branch's."""
    try:
        whole = zlib.decompress(blob)
        end = _LENGTH.size + _LENGTH.unpack_from(whole)[0]
        head, body = json.loads(whole[_LENGTH.size : end]), whole[end:]
        if (found := (head["format"], head["place"])) != (FORMAT, _place(group_id, sample_index, branch)):
            raise ValueError(f"format and place are {found}")
        num_tokens = head["num_tokens"]
        mask = np.unpackbits(np.frombuffer(body, np.uint8, offset=8 * num_tokens), count=num_tokens)
        end_of_mask = 8 * num_tokens + -(-num_tokens // 8)
        is_taught, num_routed = head.get("is_taught", False), head.get("num_routed")
        routing = None
        if num_routed is not None:
            start = end_of_mask + 4 * num_tokens * is_taught
            routing = _from_planes(body, start, num_tokens * num_routed, "<u2").reshape(-1, num_routed)
        return Trajectory(
            sample_index=sample_index,
            token_ids=_from_planes(body, 0, num_tokens, "<i4"),
            behaviour_logprobs=_from_planes(body, 4 * num_tokens, num_tokens, "<f4"),
            loss_mask=mask.astype(np.bool_),
            version_spans=tuple(VersionSpan(*span) for span in head["spans"]),
            reward=head["reward"],
            is_truncated=head["is_truncated"],
            num_interruptions=head["num_interruptions"],
            metrics=head["metrics"],
            branch=branch,
            credits=tuple(Credit(*one) for one in head.get("credits", ())),
            grammars=tuple(GrammarSpan(*one) for one in head.get("grammars", ())),
            teacher_logprobs=_from_planes(body, end_of_mask, num_tokens, "<f4") if is_taught else None,
            routing=routing,
        )
    except (zlib.error, struct.error, ValueError, KeyError, TypeError) as error:
        name = f"g{group_id}/r{sample_index}" + (f", branch {branch}," if branch else "")
        raise ValueError(f"the tokens of {name} do not unpack ({error})") from error


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
    token_ids, logprobs = tuple(found.token_ids.tolist()), tuple(found.behaviour_logprobs.tolist())
    return Completion(token_ids, logprobs, found.version_spans, num_interruptions=found.num_interruptions)


def _place(group_id: int, sample_index: int, branch: int) -> list[int]:
    return [int(group_id), int(sample_index), *([int(branch)] if branch else [])]


def _planes(array: npt.NDArray[Any], dtype: str) -> bytes:
    assert array.dtype == np.dtype(dtype), f"{array.dtype} instead of {dtype}"
    return array.view(np.uint8).reshape(-1, array.itemsize).T.tobytes() if len(array) else b""


def _from_planes(body: bytes, start: int, count: int, dtype: str) -> npt.NDArray[Any]:
    size = np.dtype(dtype).itemsize
    planes = np.frombuffer(body, np.uint8, count=size * count, offset=start).reshape(size, count)
    return planes.T.copy().view(dtype).reshape(count)


def rollouts_of(connection: sqlite3.Connection, group_id: int) -> dict[int, Rollout]:
    found: dict[int, Rollout] = {}
    query = (
        "SELECT sample_index, branch, blob FROM trajectories WHERE group_id = ? ORDER BY sample_index, branch"
    )
    for index, branch, blob in connection.execute(query, (group_id,)):
        branches = found.get(index, ())
        if len(branches) != branch:
            raise ValueError(f"g{group_id}/r{index} has branch {branch} after {len(branches)} others")
        found[index] = (*branches, decode_trajectory(blob, group_id, index, branch))
    return found


def failures_of(connection: sqlite3.Connection, group_id: int) -> dict[int, tuple[int, str]]:
    query = "SELECT sample_index, attempts, why FROM failures WHERE group_id = ? ORDER BY sample_index"
    return {index: (attempts, why) for index, attempts, why in connection.execute(query, (group_id,))}


def partials_of(connection: sqlite3.Connection, group_id: int) -> dict[int, tuple[int, int, Completion]]:
    query = "SELECT sample_index, attempt, turn, blob FROM segments WHERE group_id = ? ORDER BY sample_index"
    return {
        index: (attempt, turn, decode_partial(blob, group_id, index))
        for index, attempt, turn, blob in connection.execute(query, (group_id,))
    }
