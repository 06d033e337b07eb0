"""Assign the sequences of an optimizer step to the micro-batches of all ranks.

Every rank computes the same plan: first-fit decreasing, then longest processing time first (Graham 1969),
then micro-batches sorted by cost. Neighbors in a prefix tree stay together as bundles.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from asyncrl.trainer.model.tree import TokenRange, in_tree_order

BUNDLE_SIZES = (1, 2, 4, 8, math.inf)


@dataclass(frozen=True)
class PassSize:
    num_tokens: int
    num_pairs: int
    num_targets: int


@dataclass(frozen=True)
class Costs:
    """FLOPs relative to a token in all linear layers."""

    key: float
    loss_token: float
    num_weights: float = math.nan
    trained: float = 1.0

    def of(self, length: int, shared: int, num_loss: int) -> float:
        num_pairs = (length * (length + 1) - shared * (shared + 1)) / 2
        return length - shared + self.key * num_pairs + self.loss_token * num_loss

    def flops(self, size: PassSize, *, has_backward: bool) -> float:
        """Return a pass's model FLOPs after PaLM (https://arxiv.org/abs/2204.02311, appendix B), counting
        the causal half of the pairs, and recomputation once.
        """
        linear = size.num_tokens + self.loss_token * size.num_targets
        attention = self.key * size.num_pairs
        if has_backward:
            linear, attention = (2 + self.trained) * linear, 3 * attention
        return 2 * self.num_weights * (linear + attention)


def costs_of(model: Any) -> Costs:
    """Return the costs of a model's active weights."""
    config = model.config.get_text_config()
    embedding = model.get_input_embeddings().weight
    head = getattr(model.get_output_embeddings(), "weight", embedding)
    layers = [
        (_active_part(name, config), weight)
        for name, weight in model.named_parameters()
        if weight.ndim >= 2 and weight is not head and weight is not embedding
    ]
    num_weights = max(sum(part * weight.numel() for part, weight in layers), 1)
    num_trained = sum(part * weight.numel() for part, weight in layers if weight.requires_grad)
    num_heads = getattr(config, "num_attention_heads", None) or 0
    if getattr(config, "qk_rope_head_dim", None):  # multi-head latent attention
        head_dim = config.qk_nope_head_dim + config.qk_rope_head_dim
    else:
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // max(num_heads, 1)
    # A weight costs one multiply-add; a key two.
    key = 2 * config.num_hidden_layers * num_heads * head_dim / num_weights
    return Costs(key, head.numel() / num_weights, num_weights, num_trained / num_weights)


def _active_part(name: str, config: Any) -> float:
    sizes = (getattr(config, key, None) for key in ("num_experts", "num_local_experts", "n_routed_experts"))
    num_experts = next((size for size in sizes if size), None)
    chosen = getattr(config, "num_experts_per_tok", None)
    if ".experts." in name and isinstance(num_experts, int) and isinstance(chosen, int):
        return chosen / num_experts
    return 1.0


@dataclass(frozen=True)
class Bundle:
    group: int
    sequences: tuple[TokenRange, ...]
    num_tokens: int
    cost: float
    common_tokens: int
    common_cost: float


@dataclass
class Bin:
    sequences: list[TokenRange] = field(default_factory=list)
    cost: float = 0.0


class GroupTree:
    def __init__(
        self, number: int, group: Sequence[TokenRange], token_ids: npt.NDArray[np.int32], costs: Costs
    ) -> None:
        self._number, self._costs = number, costs
        self._ordered, self._shared = zip(*in_tree_order(group, token_ids), strict=True)
        self._common = min(self._shared[1:], default=0)
        self.num_tokens = sum(one.length for one in self._ordered) - sum(self._shared)
        self.cost = sum(map(self._cost, range(len(self._ordered)), self._shared))

    def _cost(self, index: int, shared: int) -> float:
        one = self._ordered[index]
        return self._costs.of(one.length, shared, one.num_loss)

    def cut(self, max_tokens: float, max_cost: float) -> list[Bundle]:
        cuts, tokens, cost = list[tuple[int, int, float]](), 0, 0.0
        for index, shared in enumerate(self._shared):
            one = self._ordered[index]
            more_tokens, more_cost = tokens + one.length - shared, cost + self._cost(index, shared)
            if index == 0 or more_tokens > max_tokens or more_cost > max_cost:
                cuts.append((index, 0, 0.0))
                more_tokens, more_cost = one.length, self._cost(index, 0)
            tokens, cost = more_tokens, more_cost
            cuts[-1] = (cuts[-1][0], tokens, cost)
        ends = [first for first, *_ in cuts[1:]] + [len(self._ordered)]
        common = self._common, self._costs.of(self._common, 0, 0)
        return [
            Bundle(self._number, self._ordered[first:end], tokens, cost, *common)
            for (first, tokens, cost), end in zip(cuts, ends, strict=True)
        ]


def assign(
    groups: Sequence[Sequence[TokenRange]],
    token_ids: npt.NDArray[np.int32],
    costs: Costs,
    max_tokens: int,
    num_ranks: int,
) -> list[list[list[TokenRange]]]:
    """Return sequences by micro-step and rank, at most `max_tokens` packed tokens or one sequence."""
    if not groups:
        return []
    trees = [GroupTree(number, group, token_ids, costs) for number, group in enumerate(groups)]
    if num_ranks == 1:
        whole = [bundle for tree in trees for bundle in tree.cut(max_tokens, math.inf)]
        return [[one.sequences] for one in _first_fit(whole, max_tokens)]
    num_bins = num_ranks * math.ceil(
        sum(tree.num_tokens for tree in trees) / (num_ranks * max(max_tokens, 1))
    )
    share = sum(tree.cost for tree in trees) / num_bins
    plans = [_plan(trees, max_tokens, share / size, num_ranks) for size in BUNDLE_SIZES]
    steps = min(plans, key=lambda plan: sum(step[0].cost for step in plan))
    return [[one.sequences for one in step] for step in steps]


def _plan(trees: list[GroupTree], max_tokens: int, max_cost: float, num_ranks: int) -> list[list[Bin]]:
    bundles = [bundle for tree in trees for bundle in tree.cut(max_tokens, max_cost)]
    bins = _first_fit(bundles, max_tokens)
    num_bins = num_ranks * math.ceil(len(bins) / num_ranks)
    bins = _place(bundles, num_bins, max_tokens, by_cost=True) or bins
    bins.sort(key=lambda one: -one.cost)
    bins += [Bin() for _ in range(num_bins - len(bins))]
    return [bins[first : first + num_ranks] for first in range(0, num_bins, num_ranks)]


def _first_fit(bundles: list[Bundle], max_tokens: int) -> list[Bin]:
    most = 2 * sum(bundle.num_tokens for bundle in bundles) // max(max_tokens, 1) + 1
    bins = _place(bundles, min(most, len(bundles)), max_tokens, by_cost=False)
    assert bins is not None
    return bins


def _place(bundles: list[Bundle], num_bins: int, max_tokens: int, *, by_cost: bool) -> list[Bin] | None:
    tokens_B, cost_B = np.zeros(num_bins, np.int64), np.zeros(num_bins)
    is_there_GB = np.zeros((max(bundle.group for bundle in bundles) + 1, num_bins), np.bool_)
    bins = [Bin() for _ in range(num_bins)]
    for bundle in sorted(bundles, key=lambda one: -one.cost if by_cost else -one.num_tokens):
        is_there_B = is_there_GB[bundle.group]
        tokens_then_B = tokens_B + bundle.num_tokens - is_there_B * bundle.common_tokens
        cost_then_B = cost_B + bundle.cost - is_there_B * bundle.common_cost
        has_room_B = (tokens_then_B <= max_tokens) | (tokens_B == 0)
        if not has_room_B.any():
            return None
        best = int(np.argmin(np.where(has_room_B, cost_then_B, np.inf)) if by_cost else np.argmax(has_room_B))
        bins[best].sequences += bundle.sequences
        tokens_B[best], cost_B[best], is_there_B[best] = tokens_then_B[best], cost_then_B[best], True
        bins[best].cost = float(cost_then_B[best])
    return [one for one in bins if one.sequences]
