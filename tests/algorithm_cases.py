"""Tokens for the tests of asyncrl/algorithms: by hand, and drawn by Hypothesis."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from asyncrl.config import AlgorithmConfig

SETTINGS = AlgorithmConfig(
    clip_low=0.2, clip_high=0.3, importance_cap=2.0, importance_floor=0.5, m2_limit=0.04
)


def function(name: str) -> Callable[..., Any]:
    """The function that module:function names."""
    module, _, attribute = name.partition(":")
    return getattr(importlib.import_module(module), attribute)  # type: ignore[no-any-return]


def tokens(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float32)


def numbered(*lengths: int) -> Tensor:
    """sequence_M of sequences of these lengths."""
    return torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths, dtype=torch.int64))


@dataclass(frozen=True)
class Case:
    """Whole sequences; the advantage is the same for all tokens of one."""

    current_M: Tensor
    anchor_M: Tensor
    behaviour_M: Tensor
    advantage_M: Tensor
    sequence_M: Tensor

    @property
    def num_sequences(self) -> int:
        return int(self.sequence_M[-1]) + 1

    def part(self, first: int, end: int) -> Case:
        """The sequences first to end - 1, numbered from 0."""
        chosen_M = (self.sequence_M >= first) & (self.sequence_M < end)
        parts = {field.name: getattr(self, field.name)[chosen_M] for field in fields(self)}
        return Case(**{**parts, "sequence_M": parts["sequence_M"] - first})


@st.composite
def cases(draw: st.DrawFn, min_sequences: int = 1, spread: float = 3.0) -> Case:
    """Cases whose logprobs differ by up to `spread` nats."""
    lengths = draw(st.lists(st.integers(1, 5), min_size=min_sequences, max_size=5))
    count = sum(lengths)

    def column(low: float, high: float, size: int) -> Tensor:
        return tokens(*draw(st.lists(st.floats(low, high, width=32), min_size=size, max_size=size)))

    behaviour_M = column(-8.0, 0.0, count)
    current_M, anchor_M = (behaviour_M + column(-spread, spread, count) for _ in range(2))
    sequence_M = numbered(*lengths)
    return Case(current_M, anchor_M, behaviour_M, column(-4.0, 4.0, len(lengths))[sequence_M], sequence_M)


def for_any_case(
    min_sequences: int = 1, spread: float = 3.0
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Run the test with an argument `case`, thirty times."""

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        return settings(max_examples=30, deadline=None)(given(case=cases(min_sequences, spread))(test))

    return decorate
