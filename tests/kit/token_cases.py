"""Token records of tests, from plain lists."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from asyncrl.messages.records import Completion, Trajectory, VersionSpan
from asyncrl.messages.tokens import BEHAVIOUR, Tokens, spans_of


def sampled_tokens(
    ids: Sequence[int],
    logprobs: Sequence[float] | None = None,
    spans: Iterable[VersionSpan] | None = None,
    **columns: Any,
) -> Tokens:
    """Return sampled tokens only; by default with logprob -1 under version 0."""
    values = [-1.0] * len(ids) if logprobs is None else logprobs
    all_spans = (
        (VersionSpan(0, len(ids), 0),)
        if spans is None and len(ids)
        else tuple(spans or ())
    )
    return Tokens(
        np.array(ids, np.int32),
        all_spans,
        {BEHAVIOUR: np.array(values, np.float32)} | columns,
    )


def completion_of(
    ids: Sequence[int],
    logprobs: Sequence[float] | None = None,
    spans: Iterable[VersionSpan] | None = None,
    finish: Any = None,
    num_interruptions: int = 0,
    *,
    prompt: Sequence[int] | np.ndarray[Any, Any] = (),
) -> Completion:
    """`spans` count from the first sampled token."""
    context = Tokens(np.array(prompt, np.int32))
    tokens = Tokens.join([context, sampled_tokens(ids, logprobs, spans)])
    return Completion(tokens, len(prompt), finish, num_interruptions)


def masked_tokens(
    ids: Any,
    mask: Any,
    logprobs: Any,
    spans: Iterable[VersionSpan] | int = 0,
    **columns: Any,
) -> Tokens:
    """Tokens sampled where `mask` is true, under `spans` or one version."""
    if isinstance(spans, int):
        spans = spans_of(np.where(mask, spans, -1))
    values = np.asarray(logprobs, np.float32)
    return Tokens(
        np.asarray(ids, np.int32), tuple(spans), {BEHAVIOUR: values} | columns
    )


def trajectory_of(
    sample_index: int,
    ids: Any,
    mask: Any,
    logprobs: Any,
    spans: Any,
    reward: float = 0.0,
    **more: Any,
) -> Trajectory:
    return Trajectory(
        sample_index, masked_tokens(ids, mask, logprobs, spans), reward, **more
    )


def with_ids(trajectory: Trajectory, ids: Sequence[int]) -> Trajectory:
    tokens = replace(trajectory.tokens, ids=np.array(ids, np.int32))
    return replace(trajectory, tokens=tokens)


def same_tokens(one: Tokens, other: Tokens) -> bool:
    """Equal to the last bit."""
    return _bits(one) == _bits(other)


def _bits(tokens: Tokens) -> tuple[Any, ...]:
    arrays = {
        name: (array.dtype.str, array.tobytes())
        for name, array in tokens.arrays().items()
    }
    shapes = {
        name: getattr(values, "shape", None) for name, values in tokens.columns.items()
    }
    return arrays, shapes, tokens.spans, tokens.calls
