"""Token records and prompts as bytes and back, bit for bit: what the journal and recordings hold.

A blob is zlib over: length of the head (uint32), head (JSON), token ids (int32), logprobs (float32), loss
mask (one bit a token). Numbers are little endian, in byte planes: first the lowest byte of each, and so on,
which packs much better. zlib brings a checksum, and the head says where the blob belongs, so a changed byte
on disk is found when the blob is read.
"""

from __future__ import annotations

import json
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from asyncrl.errors import JournalError
from asyncrl.journal.schema import damaged
from asyncrl.messages.records import PartialCompletion, Prompt, Ticket, Trajectory, VersionSpan
from asyncrl.messages.trainer_calls import Credit

FORMAT = 1
_LEVEL = 1  # the next levels save 1 to 3 % and cost twice the time
_LENGTH = struct.Struct("<I")
_TAG = "__asyncrl__"
_BROKEN = (zlib.error, struct.error, ValueError, KeyError, TypeError)


def encode_trajectory(group_id: int, trajectory: Trajectory) -> bytes:
    """The whole trajectory. Raises JournalError if an array is not of the type that Trajectory says."""
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
        head["credits"] = [
            [int(one.start), int(one.end), float(one.reward), int(one.unit)] for one in trajectory.credits
        ]
    token_ids = _checked(trajectory, "token_ids", np.dtype("<i4"))
    logprobs = _checked(trajectory, "behaviour_logprobs", np.dtype("<f4"))
    mask = _checked(trajectory, "loss_mask", np.dtype(np.bool_))
    return _pack(head, _planes(token_ids), _planes(logprobs), np.packbits(mask).tobytes())


def decode_trajectory(blob: bytes, group_id: int, sample_index: int, branch: int, path: Path) -> Trajectory:
    """The inverse. Raises JournalError if the blob is damaged, or of another branch."""
    try:
        head, body = _unpack(blob, _place(group_id, sample_index, branch))
        num_tokens = head["num_tokens"]
        return Trajectory(
            sample_index=sample_index,
            token_ids=_from_planes(body, 0, num_tokens, np.dtype("<i4")),
            behaviour_logprobs=_from_planes(body, 4 * num_tokens, num_tokens, np.dtype("<f4")),
            loss_mask=np.unpackbits(
                np.frombuffer(body, np.uint8, offset=8 * num_tokens), count=num_tokens
            ).astype(np.bool_),
            version_spans=tuple(VersionSpan(*span) for span in head["spans"]),
            reward=head.get("reward", 0.0),  # journals of an earlier asyncrl leave it out of segments
            is_truncated=head.get("is_truncated", False),
            num_interruptions=head["num_interruptions"],
            metrics=head.get("metrics", {}),
            branch=branch,
            credits=tuple(Credit(*one) for one in head.get("credits", ())),
        )
    except _BROKEN as error:
        name = f"g{group_id}/r{sample_index}" + (f", branch {branch}," if branch else "")
        raise damaged(path, f"the tokens of {name} do not unpack ({error})") from error


def encode_partial(group_id: int, sample_index: int, partial: PartialCompletion) -> bytes:
    """All of an unfinished completion, as a trajectory without a prompt and a reward."""
    token_ids = np.array(partial.token_ids, np.int32)
    trajectory = Trajectory(
        sample_index,
        token_ids,
        np.ones(len(token_ids), np.bool_),
        np.array(partial.behaviour_logprobs, np.float32),
        partial.version_spans,
        reward=0.0,
        num_interruptions=partial.num_interruptions,
    )
    return encode_trajectory(group_id, trajectory)


def decode_partial(blob: bytes, group_id: int, sample_index: int, path: Path) -> PartialCompletion:
    """The inverse. Raises JournalError if the blob is damaged, or of another rollout."""
    found = decode_trajectory(blob, group_id, sample_index, 0, path)
    token_ids, logprobs = tuple(found.token_ids.tolist()), tuple(found.behaviour_logprobs.tolist())
    return PartialCompletion(token_ids, logprobs, found.version_spans, found.num_interruptions)


def encode_prompt(ticket: Ticket, prompt: Prompt) -> bytes:
    """JSON, packed. Tuples and keys that are no text survive; what JSON cannot hold at all is left out, and
    decode_prompt says so.
    """
    head: dict[str, Any] = {
        "format": FORMAT,
        "place": [int(ticket.group_id), prompt.prompt_id, int(ticket.start_version)],
        "messages": [dict(message) for message in prompt.messages],
        "num_handed_back": int(prompt.num_handed_back),
    }
    try:
        return _pack({**head, "answer": _tagged(prompt.answer), "info": _tagged(dict(prompt.info))})
    except (_NotPlain, ValueError, RecursionError):
        return _pack({**head, "is_cut": True})


def decode_prompt(blob: bytes, ticket: Ticket, prompt_id: str, path: Path) -> tuple[Prompt, bool]:
    """(the prompt, whether it is whole). If it is not, answer and info are missing: the task has to make it
    again.
    """
    try:
        head, _ = _unpack(blob, [ticket.group_id, prompt_id, ticket.start_version])
        messages = tuple(head["messages"])
        num_handed_back = head.get("num_handed_back", 0)
        if head.get("is_cut"):
            return Prompt(prompt_id, messages, num_handed_back=num_handed_back), False
        return Prompt(
            prompt_id, messages, _untagged(head["answer"]), _untagged(head["info"]), num_handed_back
        ), True
    except _BROKEN as error:
        raise damaged(path, f"the prompt of group {ticket.group_id} does not unpack ({error})") from error


def _place(group_id: int, sample_index: int, branch: int) -> list[object]:
    """Branch 0 is not named: so were blobs written before a rollout could have others."""
    return [int(group_id), int(sample_index), *([int(branch)] if branch else [])]


class _NotPlain(Exception):  # noqa: N818  it never leaves this file
    """A value that JSON cannot hold."""


def _tagged(value: object) -> Any:
    if value is None or type(value) in (bool, int, float, str):
        return value
    if type(value) is list:
        return [_tagged(item) for item in value]
    if type(value) is tuple:
        return {_TAG: "tuple", "items": [_tagged(item) for item in value]}
    if type(value) is dict:
        if all(type(key) is str for key in value) and _TAG not in value:
            return {key: _tagged(item) for key, item in value.items()}
        return {_TAG: "dict", "items": [[_tagged(key), _tagged(item)] for key, item in value.items()]}
    raise _NotPlain(type(value).__name__)


def _untagged(value: Any) -> Any:
    if isinstance(value, list):
        return [_untagged(item) for item in value]
    if isinstance(value, dict):
        match value.get(_TAG):
            case "tuple":
                return tuple(_untagged(item) for item in value["items"])
            case "dict":
                return {_untagged(key): _untagged(item) for key, item in value["items"]}
        return {key: _untagged(item) for key, item in value.items()}
    return value


def _checked(trajectory: Trajectory, name: str, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    array: npt.NDArray[Any] = getattr(trajectory, name)
    if array.dtype != dtype or array.shape != (len(trajectory.token_ids),):
        raise JournalError(
            f"sample {trajectory.sample_index} has {name} of {array.dtype} {list(array.shape)}",
            rule=f"it is {dtype.name} with one entry for each of the {len(trajectory.token_ids)} tokens",
        )
    return array


def _planes(array: npt.NDArray[Any]) -> bytes:
    return array.view(np.uint8).reshape(-1, 4).T.tobytes() if len(array) else b""


def _from_planes(body: bytes, start: int, count: int, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    planes = np.frombuffer(body, np.uint8, count=4 * count, offset=start).reshape(4, count)
    return planes.T.copy().view(dtype).reshape(count)


def _pack(head: dict[str, Any], *parts: bytes) -> bytes:
    text = json.dumps(head, separators=(",", ":")).encode()
    return zlib.compress(b"".join((_LENGTH.pack(len(text)), text, *parts)), _LEVEL)


def _unpack(blob: bytes, place: list[object]) -> tuple[dict[str, Any], bytes]:
    whole = zlib.decompress(blob)
    end = _LENGTH.size + _LENGTH.unpack_from(whole)[0]
    head: dict[str, Any] = json.loads(whole[_LENGTH.size : end])
    if head["format"] != FORMAT:
        raise ValueError(f"format {head['format']}, this asyncrl reads {FORMAT}")
    if head["place"] != place:
        raise ValueError(f"it is of {head['place']}, and lies at {place}")
    return head, whole[end:]
