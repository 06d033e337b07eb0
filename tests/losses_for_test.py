"""Losses that misbehave, for runs in tests."""

from __future__ import annotations

from typing import Any


def nan_loss(
    current_M: Any, anchor_M: Any, behaviour_M: Any, advantage_M: Any, sequence_M: Any, settings: Any
) -> Any:
    """NaN from the first batch on."""
    return current_M * float("nan"), {}
