"""The functions of the loss that may be the user's: found by name, and how they are called. Knows no torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from asyncrl.loading import load_function


def load_loss(spec: str) -> Callable[..., Any]:
    """The function of a loss. Raises ConfigError if it cannot be imported, or takes other parameters."""
    usage = "loss(current_M, anchor_M, behaviour_M, advantage_M, sequence_M, settings)"
    return load_function(spec, "algorithm.loss", usage=usage, arguments=(None,) * 6)


def load_advantage(spec: str) -> Callable[..., Any]:
    """The function of an advantage. Raises ConfigError if it cannot be imported, or takes other parameters."""
    return load_function(spec, "algorithm.advantage", usage="advantage(reward_B, group_B)", arguments=(None, None))
