"""How long a rollout was, in words and numbers. Pure."""

from __future__ import annotations

from dataclasses import replace

from asyncrl.recorded import spans_of
from asyncrl.types import Rollout


def num_turns(rollout: Rollout) -> int:
    """Completions: runs of sampled tokens."""
    return sum(len(spans_of(branch.loss_mask)) for branch in rollout)


def num_tokens(rollout: Rollout) -> int:
    """Sampled ones."""
    return sum(branch.num_sampled for branch in rollout)


def shape_text(rollout: Rollout) -> str:
    """Turns, tokens, and branches where there is more than one."""
    turns = num_turns(rollout)
    text = f"{turns} turn{'s' if turns != 1 else ''}, {num_tokens(rollout)} sampled tokens"
    return text if len(rollout) == 1 else f"{text}, {len(rollout)} branches"


def renumbered(rollout: Rollout, sample_index: int) -> Rollout:
    """The same rollout as another sample."""
    return tuple(replace(branch, sample_index=sample_index) for branch in rollout)
