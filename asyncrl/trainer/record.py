"""The trained record: one JSON line a step, enough to check the staleness bound with nothing else. Knows no
torch.

A line holds `version` (the batch turned it into version + 1), `min_version`, `loss` (null where all of its
steps were skipped), `num_loss_tokens`, and for each trajectory (a branch of a rollout) its ids, the rollout's
reward, `num_tokens`, `num_loss_tokens`,
`tokens_sha` (first 16 hex digits of the sha256 of its int32 token ids) and `spans`: [start, end, version] of
the tokens that carried loss, positions counted from the first prompt token.

A line {"restored": v} says that the trainer went on from the weights of version v: later lines of v and above
count, earlier ones do not. Does it hold "lost": [first, last], then the lines of these versions are missing,
for the reason that "why" gives: they cannot come back, because the weights hold what was trained on.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import math
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from asyncrl.files import LOST, cut_at, lines_from_end
from asyncrl.messages.calls import BatchArrays, BatchHeader


def trained_line(
    header: BatchHeader, arrays: BatchArrays, has_loss: npt.NDArray[np.bool_], loss: float
) -> dict[str, Any]:
    """The record of one step. `has_loss` bool [N]: what carried loss, masks applied."""
    trajectories = []
    for entry in header.trajectories:
        part = slice(entry.start, entry.end)
        trajectories.append(
            {
                "group_id": entry.group_id,
                "prompt_id": entry.prompt_id,
                "sample_index": entry.sample_index,
                "branch": entry.branch,
                "reward": entry.reward,
                "num_tokens": entry.end - entry.start,
                "num_loss_tokens": int(has_loss[part].sum()),
                "tokens_sha": hashlib.sha256(arrays.token_ids[part].astype("<i4").tobytes()).hexdigest()[:16],
                "spans": loss_spans(has_loss[part], arrays.versions[part]),
            }
        )
    return {
        "version": header.version,
        "min_version": header.min_version,
        "loss": loss if math.isfinite(loss) else None,
        "num_loss_tokens": int(has_loss.sum()),
        "trajectories": trajectories,
    }


def loss_spans(has_loss: npt.NDArray[np.bool_], versions: npt.NDArray[np.int32]) -> list[list[int]]:
    """[start, end, version] of each run of neighbours that carry loss and have one version."""
    label = np.where(has_loss, versions, -1)
    edges = np.flatnonzero(np.diff(label)) + 1
    starts = np.concatenate([[0], edges])
    ends = np.concatenate([edges, [len(label)]])
    return [
        [int(start), int(end), int(label[start])]
        for start, end in zip(starts, ends, strict=True)
        if label[start] >= 0
    ]


def hold_record(path: Path, timeout_s: float = 60.0) -> int:
    """Lock the record for this process until it ends; waits for an older process that is being killed.
    Returns the descriptor to keep open.

    Without it the trainer of a killed run could write one more line after that of the resumed one. Raises
    TimeoutError.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    file = os.open(path.with_name(f".{path.name}.lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return file
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise TimeoutError(f"another trainer process holds {path} for {timeout_s:.0f} s") from None
        time.sleep(0.05)


def note_restored(path: Path, version: int) -> None:
    """Say that the batches from `version` on are about to be trained again, and which of those before are
    missing.

    An incomplete last line is cut off first. A machine that stops can lose only the end of a file, so only
    the last lines are read.
    """
    reached = -1
    if path.is_file():
        for start, line in lines_from_end(path):
            if not line.endswith(b"\n"):
                cut_at(path, start)
            elif (found := _reached(line)) is not None:
                reached = found
                break
    if reached < version - 1:
        append_line(path, {"restored": version, "lost": [reached + 1, version - 1], "why": LOST})
    elif path.is_file() and path.stat().st_size:
        append_line(path, {"restored": version})


def _reached(line: bytes) -> int | None:
    """The newest version that the record has up to here; None if the line does not say."""
    try:
        told = json.loads(line)
        return int(told["restored"]) - 1 if "restored" in told else int(told["version"])
    except (ValueError, KeyError, TypeError):
        return None


def append_line(path: Path, line: dict[str, Any]) -> None:
    """Append and flush; the line is in the file when this returns."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")
