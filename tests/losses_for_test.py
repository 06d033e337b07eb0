"""Losses that misbehave, for runs in tests."""

from __future__ import annotations

from typing import Any


def nan_loss(current: Any, proximal: Any, behaviour: Any, advantages: Any, mask: Any, **_: float) -> Any:
    """NaN from the first batch on."""
    return (current * float("nan"))[mask].sum(), {}
