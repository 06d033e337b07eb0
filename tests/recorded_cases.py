"""Recorded rollouts for tests."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from journal_cases import same_trajectory

from asyncrl.messages.records import Prompt, Rollout, Trajectory, VersionSpan
from asyncrl.rollouts.recording import RecordedRollout, RolloutRecorder, SampledBy

SAMPLED_BY = SampledBy("aaaa", "float32", "bbbb", 1.0)


def make_prompt(number: int, **values: Any) -> Prompt:
    return Prompt(f"0/{number}", ({"role": "user", "content": f"b {number}"},), **values)


def make_branch(
    spans: Sequence[tuple[int, int]] = ((2, 4),), *, version: int = 0, num_tokens: int = 6, **values: Any
) -> Trajectory:
    """Tokens 0, 1, 2, ..., of which those in `spans` were sampled."""
    mask, logprobs = np.zeros(num_tokens, dtype=np.bool_), np.zeros(num_tokens, dtype=np.float32)
    for start, end in spans:
        mask[start:end] = True
    logprobs[mask] = -0.1 - np.arange(int(mask.sum()), dtype=np.float32) / 7
    version_spans = tuple(VersionSpan(start, end, version) for start, end in spans)
    return Trajectory(
        **({"sample_index": 0, "reward": 1.0} | values),
        token_ids=np.arange(num_tokens, dtype=np.int32),
        loss_mask=mask,
        behaviour_logprobs=logprobs,
        version_spans=version_spans,
    )


def make_record(
    number: int = 0, index: int = 0, *, reward: float | None = 1.0, **values: Any
) -> RecordedRollout:
    branch = make_branch(sample_index=index, reward=0.0 if reward is None else reward, **values)
    return RecordedRollout(make_prompt(number), reward, (branch,))


def rollouts_equal(one: Rollout, other: Rollout) -> bool:
    """Every field of every branch, to the last bit."""
    return len(one) == len(other) and all(map(same_trajectory, one, other))


def write(path: Path, *records: RecordedRollout, warn: Any = pytest.fail, **opened: Any) -> Path:
    tokenizer: Any = SimpleNamespace(decode=lambda ids, skip_special_tokens: "said")
    recorder = RolloutRecorder(tokenizer, warn=warn)
    recorder.open(path, **{"sampled_by": SAMPLED_BY, **opened})
    for record in records:
        recorder.record(record.prompt, record.reward, record.rollout)
    recorder.close()
    return path
