"""Split a batch into optimizer steps and micro-batches, stored as prefix trees
(tree.py) without padding.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby
from operator import attrgetter
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from asyncrl.config.trainer_config import CPU_MICRO_BATCH_TOKENS
from asyncrl.messages.records import part_of
from asyncrl.messages.token_grammars import GrammarError, TokenGrammars
from asyncrl.messages.tokens import ROUTING, Tokens
from asyncrl.messages.trainer_api import BatchHeader, TrajectoryHeader
from asyncrl.models.devices import to_device
from asyncrl.models.rope_lengths import LengthBorder
from asyncrl.trainer.attention.tree import (
    BoolN,
    IntN,
    Layout,
    TokenRange,
    in_tree_order,
    lay_out,
    places_of,
)
from asyncrl.trainer.loss.supports import FULL, DistillRows, SupportRows, SupportSets
from asyncrl.trainer.ranks.ranks import Ranks

log = logging.getLogger("asyncrl.trainer")

NOT_ALLOWED = -1e30
"""Masked logit. Differences stay finite, unlike with -inf."""
ANY = -1


class AllowedSets(NamedTuple):
    """K token sets as bits, uint8 [K, B], lowest bit first. `set_N` int32 [N]: each
    token's set, or ANY.
    """

    bits_KB: npt.NDArray[np.uint8]
    set_N: npt.NDArray[np.int32]


class AllowedRows(NamedTuple):
    """Sets of the tokens `row_R`: `set_R` int64 indexes `bits_KB`."""

    bits_KB: Tensor
    set_R: Tensor
    row_R: Tensor

    @classmethod
    def of(
        cls,
        bits_KB: npt.NDArray[np.uint8],
        set_M: npt.NDArray[np.int32],
        device: torch.device,
    ) -> AllowedRows | None:
        """`set_M`: the set of each token, or ANY. Return None if all have ANY."""
        (row_R,) = np.nonzero(set_M != ANY)
        if not len(row_R):
            return None
        used, set_R = np.unique(set_M[row_R], return_inverse=True)
        arrays = bits_KB[used], set_R, row_R
        return cls(*(to_device(array, device) for array in arrays))

    def mask(self, logits_MC: Tensor, part: slice) -> None:
        rows = self.row_R
        # A slice of the vocabulary may begin within a byte. Take whole bytes, then cut
        # the bits before and after it.
        first, last = part.start // 8, -(-part.stop // 8)
        bytes_RB = self.bits_KB[self.set_R, first:last]
        shifts = torch.arange(8, device=bytes_RB.device, dtype=torch.uint8)
        is_set_RC = (bytes_RB[:, :, None] >> shifts & 1).flatten(1).bool()
        is_set_RC = is_set_RC[:, part.start - 8 * first :][:, : part.stop - part.start]
        logits_MC[rows] = logits_MC[rows].masked_fill(~is_set_RC, NOT_ALLOWED)


def find_allowed(
    arrays: Tokens, has_loss: npt.NDArray[np.bool_], make: Callable[[], TokenGrammars]
) -> AllowedSets | None:
    """Return the sets of loss tokens with a grammar, or None. Forbidden tokens lose
    their loss.
    """
    calls = [call for call in arrays.calls if call.grammar is not None]
    if not calls:
        return None
    # The engine sampled only allowed tokens, so its logprobs are normalized over them.
    # The trainer needs the same sets, or each ratio would be wrong by the forbidden
    # mass.
    set_N = np.full(len(has_loss), ANY, np.int32)
    known = dict[bytes, int]()
    num_lost = 0
    for span in calls:
        at = span.start
        places = at + np.flatnonzero(has_loss[at : span.end])
        if not len(places):
            continue
        try:
            matcher = make().begin(span.grammar or "")
            # The matcher must read tokens without loss too, since each changes the sets
            # after it. It can stop at the last loss token.
            for at in range(span.start, int(places[-1]) + 1):
                if has_loss[at]:
                    # Many places of a grammar allow the same tokens. Each set is kept
                    # once.
                    set_N[at] = known.setdefault(matcher.allowed_bits(), len(known))
                matcher.take(int(arrays.ids[at]))
        except GrammarError as error:
            reason = str(error)
            # After a token that the grammar forbids, the matcher's state means nothing,
            # so no later set can be computed. The tokens before it are fine.
            lost = places[places >= at]
            set_N[lost] = ANY
            has_loss[lost] = False
            num_lost += len(lost)
    if num_lost:
        what = "%d tokens are not trained: their grammar does not allow them here (%s)"
        log.warning(what, num_lost, reason)
    if not known:
        return None
    return AllowedSets(
        np.stack([np.frombuffer(bits, np.uint8) for bits in known]), set_N
    )


class LogitSets(NamedTuple):
    """What restricted the logits of a batch's tokens at sampling."""

    allowed: AllowedSets | None = None
    supports: SupportSets | None = None


# How finely a group may be cut: a bundle costs at most a rank's share of a step,
# divided by the size (inf: one sequence per bundle). Coarse bundles compute a shared
# prefix once, fine ones balance the ranks. assign() tries all and takes the cheapest
# plan.
BUNDLE_SIZES = (1, 2, 4, 8, math.inf)


class Costs(NamedTuple):
    """FLOPs relative to a token in all linear layers."""

    key: float
    loss_token: float
    num_weights: float = math.nan
    trained: float = 1.0

    def of(self, length: int, shared: int, num_loss: int) -> float:
        # Token i attends to i tokens: the pairs of all tokens minus those of the shared
        # ones.
        num_pairs = (length * (length + 1) - shared * (shared + 1)) / 2
        return length - shared + self.key * num_pairs + self.loss_token * num_loss

    def flops(
        self, num_tokens: int, num_pairs: int, num_targets: int, *, has_backward: bool
    ) -> float:
        """Return a pass's model FLOPs after PaLM (https://arxiv.org/abs/2204.02311,
        appendix B), counting the causal half of the pairs, and recomputation once.
        """
        linear = num_tokens + self.loss_token * num_targets
        attention = self.key * num_pairs
        if has_backward:
            linear, attention = (2 + self.trained) * linear, 3 * attention
        return 2 * self.num_weights * (linear + attention)


def costs_of(model: PreTrainedModel) -> Costs:
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
    num_trained = sum(
        part * weight.numel() for part, weight in layers if weight.requires_grad
    )
    num_heads = getattr(config, "num_attention_heads", None) or 0
    rope_dim, nope_dim = (
        vars(config).get(f"qk_{part}_head_dim") for part in ("rope", "nope")
    )
    if rope_dim and nope_dim:  # multi-head latent attention
        head_dim = nope_dim + rope_dim
    else:  # Gemma 4's head_dim depends on the layer: reading it raises an error
        head_dim = vars(config).get("head_dim") or config.hidden_size // max(
            num_heads, 1
        )
    # A weight costs one multiply-add; a key two.
    key = 2 * config.num_hidden_layers * num_heads * head_dim / num_weights
    return Costs(
        key, head.numel() / num_weights, num_weights, num_trained / num_weights
    )


def _active_part(name: str, config: PreTrainedConfig) -> float:
    sizes = (
        getattr(config, key, None)
        for key in ("num_experts", "num_local_experts", "n_routed_experts")
    )
    num_experts = next((size for size in sizes if size), None)
    chosen = getattr(config, "num_experts_per_tok", None)
    if ".experts." in name and isinstance(num_experts, int) and isinstance(chosen, int):
        return chosen / num_experts
    return 1.0


@dataclass
class Bundle:
    """Neighbors in the prefix tree of a group; all of the group share `common_tokens`."""

    group: int
    sequences: list[TokenRange]
    num_tokens: int
    cost: float
    common_tokens: int
    common_cost: float


Tree = list[tuple[TokenRange, int]]
"""Sequences of a group in tree order, and the tokens that each shares with the one
before.
"""
Bin = tuple[float, list[TokenRange]]
"""Cost and sequences of a micro-batch."""


def assign(
    sequences: Sequence[TokenRange],
    readings: npt.NDArray[np.int32],
    costs: Costs,
    max_tokens: int,
    num_ranks: int,
) -> list[list[list[TokenRange]]]:
    """Return sequences by micro-step and rank, at most `max_tokens` packed tokens or
    one sequence.

    Example: two answers to a prompt of 4 tokens, and a text of 6 in another group, for two ranks. The prompt
    is computed once, so the answers are packed together.
        >>> ids = np.array([1, 2, 3, 4, 8, 9, 1, 2, 3, 4, 7, 7, 5, 5, 5, 5, 5, 5], np.int32)
        >>> sequences = [
        ...     TokenRange(0, start=0, length=6, group=0, first=4, num_loss=2),
        ...     TokenRange(1, start=6, length=6, group=0, first=4, num_loss=2),
        ...     TokenRange(2, start=12, length=6, group=1, first=1, num_loss=5),
        ... ]
        >>> steps = assign(sequences, ids, Costs(key=0.0, loss_token=0.0), max_tokens=8, num_ranks=2)
        >>> [[[one.trajectory for one in rank] for rank in step] for step in steps]
        [[[1, 0], [2]]]
    """
    if not sequences:
        return []
    # pack_groups() orders a batch by group, as groupby needs. Every rank gets the same
    # batch and computes the same plan, so no message is needed to agree on it.
    groups = groupby(sequences, key=lambda one: one.group)
    trees = [in_tree_order([*group], readings) for _, group in groups]
    if num_ranks == 1:
        # One rank waits for nobody, so balance is worth nothing: share as much as fits.
        bins = _place(_cut(trees, costs, max_tokens, math.inf), max_tokens)
        return [[sequences] for _, sequences in bins]
    nodes = [pair for tree in trees for pair in tree]
    num_tokens = sum(one.length - shared for one, shared in nodes)
    cost = sum(costs.of(one.length, shared, one.num_loss) for one, shared in nodes)
    # An even share of cost for each rank in each step, by the least number of steps
    # that the tokens need.
    share = cost / (
        num_ranks * math.ceil(num_tokens / (num_ranks * max(max_tokens, 1)))
    )
    cuts = [_cut(trees, costs, max_tokens, share / size) for size in BUNDLE_SIZES]
    plans = [_steps(bundles, max_tokens, num_ranks) for bundles in cuts]
    # Ranks run in lockstep: a step takes as long as its most expensive rank, which
    # _steps() puts first.
    best = min(plans, key=lambda steps: sum(step[0][0] for step in steps))
    return [[sequences for _, sequences in step] for step in best]


def _cut(
    trees: list[Tree], costs: Costs, max_tokens: float, max_cost: float
) -> list[Bundle]:
    bundles = list[Bundle]()
    for group, tree in enumerate(trees):
        # Sorted sequences share the most with their neighbors, so the minimum is common
        # to the whole group: usually the prompt.
        common = min((shared for _, shared in tree[1:]), default=0)
        last: Bundle | None = None
        for one, shared in tree:
            num_tokens = one.length - shared
            cost = costs.of(one.length, shared, one.num_loss)
            if (
                last
                and last.num_tokens + num_tokens <= max_tokens
                and last.cost + cost <= max_cost
            ):
                last.sequences.append(one)
                last.num_tokens += num_tokens
                last.cost += cost
            else:
                # The first sequence of a bundle computes the prefix that the others
                # share with it. Another bundle may compute that prefix too.
                cost = costs.of(one.length, 0, one.num_loss)
                last = Bundle(
                    group, [one], one.length, cost, common, costs.of(common, 0, 0)
                )
                bundles.append(last)
    return bundles


def _steps(bundles: list[Bundle], max_tokens: int, num_ranks: int) -> list[list[Bin]]:
    """Return one bin per rank for each step, the most expensive first."""
    bins = _place(bundles, max_tokens)
    # First fit finds how few bins the tokens need. The second call fills that number,
    # rounded up to whole steps, evenly by cost. It returns nothing if some bundle does
    # not fit; then the first result stands.
    num_bins = num_ranks * math.ceil(len(bins) / num_ranks)
    bins = _place(bundles, max_tokens, num_bins) or bins
    bins.sort(key=lambda one: -one[0])
    bins += [(0.0, []) for _ in range(num_bins - len(bins))]
    return [bins[first : first + num_ranks] for first in range(0, num_bins, num_ranks)]


def _place(bundles: list[Bundle], max_tokens: int, num_bins: int = 0) -> list[Bin]:
    """Return bins of about equal cost, or none if there is no room; without `num_bins`
    few, by first fit.
    """
    by_cost = num_bins > 0
    if not by_cost:
        # First fit leaves no two bins that fit into one, so their tokens are above
        # max_tokens in pairs. This bounds the number of bins.
        most = (
            2 * sum(bundle.num_tokens for bundle in bundles) // max(max_tokens, 1) + 1
        )
        num_bins = min(most, len(bundles))
    tokens_B = np.zeros(num_bins, np.int64)
    cost_B = np.zeros(num_bins)
    is_there_GB = np.zeros(
        (max(bundle.group for bundle in bundles) + 1, num_bins), np.bool_
    )
    bins: list[list[TokenRange]] = [[] for _ in range(num_bins)]
    for bundle in sorted(
        bundles, key=lambda one: -one.cost if by_cost else -one.num_tokens
    ):
        is_there_B = is_there_GB[bundle.group]
        # A bin that holds a part of the group already has the common prefix: it costs
        # nothing there a second time.
        tokens_then_B = tokens_B + bundle.num_tokens - is_there_B * bundle.common_tokens
        cost_then_B = cost_B + bundle.cost - is_there_B * bundle.common_cost
        # A sequence above max_tokens still has to run: it gets an empty bin.
        has_room_B = (tokens_then_B <= max_tokens) | (tokens_B == 0)
        if not has_room_B.any():
            return []
        best = int(
            np.argmin(np.where(has_room_B, cost_then_B, np.inf))
            if by_cost
            else np.argmax(has_room_B)
        )
        bins[best] += bundle.sequences
        tokens_B[best] = tokens_then_B[best]
        cost_B[best] = cost_then_B[best]
        is_there_B[best] = True
    return [(float(cost), bin) for cost, bin in zip(cost_B, bins, strict=True) if bin]


MOST_TOKENS = {"cpu": CPU_MICRO_BATCH_TOKENS}


class AdapterStretch(NamedTuple):
    """Packed tokens [start, end) that one adapter computes."""

    start: int
    end: int
    adapter: str


# No tuple: FSDP2 would round the teacher's logprobs in it to bfloat16, as it does with
# all tensors in tuples that a forward pass gets.
@dataclass(frozen=True)
class MicroBatch:
    """Whole sequences for one forward-backward: N packed tokens, M loss tokens, S
    sequences, U pairs; int64.

    The hidden state at `predict_U` predicts `target_U`. Loss token m has pair `pair_M`,
    is at `source_M` in the batch's arrays and belongs to `sequence_M`. Pairs without a
    support come first; `allowed_P` and `distilled` are of these, `supports` of the
    others. `stretches` cover the tokens, one for each adapter.
    """

    token_ids_N: Tensor
    position_N: Tensor
    layout: Layout
    stretches: tuple[AdapterStretch, ...]
    predict_U: Tensor
    target_U: Tensor
    pair_M: Tensor
    source_M: IntN
    sequence_M: Tensor
    allowed_P: AllowedRows | None = None
    supports: SupportRows | None = None
    distilled: DistillRows | None = None
    routing_N: Tensor | None = None
    """int32 [N, E]: each token's experts at sampling."""

    @property
    def size(self) -> tuple[int, int, int]:
        """Numbers of tokens, pairs of query and key, and targets."""
        num_pairs = sum(one.num_pairs for one in self.layout.passes)
        return self.layout.num_tokens, num_pairs, len(self.target_U)


def token_ranges(
    header: BatchHeader, has_loss: BoolN, *, reads_all: bool = False
) -> list[TokenRange]:
    """Return what is read of each trajectory with a loss: up to its last loss token, or
    `reads_all`.
    """
    ranges = []
    for index, entry in enumerate(header.trajectories):
        places = np.flatnonzero(has_loss[entry.start : entry.end])
        if len(places):
            first, last = int(places[0]), int(places[-1])
            # Token `last` is only predicted. What follows it has no loss and would be
            # computed for nothing.
            length = entry.end - entry.start if reads_all else last
            ranges.append(
                TokenRange(
                    index,
                    entry.start,
                    length,
                    entry.group_index,
                    first,
                    len(places),
                    entry.adapter,
                )
            )
    return ranges


def mini_batches(header: BatchHeader, has_loss: BoolN, count: int) -> list[BoolN]:
    """Return each step's loss tokens: whole groups in admission order."""
    num_groups = header.trajectories[-1].group_index + 1
    count = min(count, num_groups)
    entries = header.trajectories
    steps = [entry.group_index * count // num_groups for entry in entries]
    step_of_N = np.repeat(steps, [entry.end - entry.start for entry in entries])
    return [
        chosen
        for step in range(count)
        if (chosen := has_loss & (step_of_N == step)).any()
    ]


def cut_parts(header: BatchHeader, arrays: Tokens) -> list[tuple[BatchHeader, Tokens]]:
    """Return the parts of a batch (see Batch), each as a batch."""
    if not header.part_groups:
        return [(header, arrays)]
    return cut_where(
        header, arrays, lambda one: part_of(one.group_id, header.part_groups)
    )


def cut_where(
    header: BatchHeader, arrays: Tokens, key: Callable[[TrajectoryHeader], object]
) -> list[tuple[BatchHeader, Tokens]]:
    """Cut a batch where the key of a trajectory changes."""
    if len({*map(key, header.trajectories)}) == 1:
        return [(header, arrays)]
    found = list[tuple[BatchHeader, Tokens]]()
    for _, entries in groupby(header.trajectories, key=key):
        own = list(entries)
        start, first_group = own[0].start, own[0].group_index
        moved = [
            entry.model_copy(
                update={
                    "group_index": entry.group_index - first_group,
                    "start": entry.start - start,
                    "end": entry.end - start,
                }
            )
            for entry in own
        ]
        update = {"trajectories": moved, "part_groups": 0}
        tokens = arrays.slice(start, own[-1].end)
        found.append((header.model_copy(update=update), tokens))
    return found


class PackRules(NamedTuple):
    """What may share a micro-batch of `max_tokens` (0: one sequence).

    `border`: sequences of more tokens and of fewer are apart. Each
    sequence above it is by itself, unless all share their frequencies.
    """

    max_tokens: int
    border: LengthBorder | None = None
    reads_all: bool = False
    """Read the tokens behind the last loss token too."""
    mixes_adapters: bool = False
    """Let adapters share micro-batches. Apart, the bits of each adapter's gradient do not
    depend on the others. On a CPU, sharing is not faster: 8 adapters with 64 tokens each
    took 27.8 ms together, and 26.7 ms one after the other.
    """

    def sides(self, sequences: list[TokenRange]) -> list[tuple[list[TokenRange], int]]:
        """Return sequences that may share micro-batches, with the maximum of their
        tokens.
        """
        if not self.mixes_adapters:
            alike = self._replace(mixes_adapters=True)
            by_adapter = dict[str, list[TokenRange]]()
            for one in sequences:
                by_adapter.setdefault(one.adapter, []).append(one)
            return [side for own in by_adapter.values() for side in alike.sides(own)]
        if self.border is None:
            return [(sequences, self.max_tokens)]
        _, longest, is_stepwise = self.border
        below = [one for one in sequences if one.length <= longest]
        above = [one for one in sequences if one.length > longest]
        most_above = self.max_tokens if is_stepwise else 0
        return [(below, self.max_tokens), (above, most_above)]


def micro_batches(
    header: BatchHeader,
    arrays: Tokens,
    has_loss: BoolN,
    rules: PackRules,
    device: torch.device,
    ranks: Ranks,
    costs: Costs,
    sets: LogitSets = LogitSets(),
) -> list[tuple[MicroBatch, bool]]:
    """Return this rank's micro-batches. Padding micro-batches, which keep ranks in
    lockstep, are flagged False.
    """
    # The length of a whole trajectory decides its rotary frequencies.
    reads_all = rules.reads_all or rules.border is not None
    sequences = token_ranges(header, has_loss, reads_all=reads_all)
    micros = []
    for side, side_tokens in rules.sides(sequences):
        max_tokens = min(side_tokens, MOST_TOKENS.get(device.type, side_tokens))
        for step in assign(side, arrays.readings, costs, max_tokens, ranks.size):
            if share := step[ranks.rank]:
                micro = _assemble(share, arrays, has_loss, max_tokens, device, sets)
                micros.append((micro, True))
                continue
            # FSDP2's collectives need a pass on every rank. A rank without a share runs
            # the shortest one: up to the earliest loss token of the batch.
            shortest = min(sequences, key=lambda sequence: sequence.first)
            one_token = np.zeros_like(has_loss)
            one_token[shortest.start + shortest.first] = True
            filler = token_ranges(header, one_token)
            micros.append(
                (_assemble(filler, arrays, one_token, max_tokens, device), False)
            )
    return micros


def pack_texts(texts: list[npt.NDArray[np.int64]], device: torch.device) -> MicroBatch:
    """Return one micro-batch of texts, with every token but the first predicted."""
    lengths = [len(text) for text in texts]
    starts = accumulate(lengths[:-1], initial=0)
    sequences = [
        TokenRange(index, start, length - 1, group=0, first=1, num_loss=length - 1)
        for index, (start, length) in enumerate(zip(starts, lengths, strict=True))
    ]
    end = sum(lengths)
    has_loss = np.ones(end, np.bool_)
    has_loss[[one.start for one in sequences]] = False
    arrays = Tokens(np.concatenate(texts).astype(np.int32))
    return _assemble(sequences, arrays, has_loss, end, device)


def _assemble(
    sequences: Sequence[TokenRange],
    arrays: Tokens,
    has_loss: BoolN,
    max_tokens: int,
    device: torch.device,
    sets: LogitSets = LogitSets(),
) -> MicroBatch:
    allowed, supports = sets

    def tensor(array: npt.NDArray[np.generic]) -> Tensor:
        return to_device(array.astype(np.int64), device)

    sequences = sorted(sequences, key=attrgetter("adapter", "trajectory"))
    layout, source_N, position_N = lay_out(sequences, arrays.readings, max_tokens)
    starts = dict[str, int]()
    for sequence, runs in zip(sequences, layout.rows, strict=True):
        start, _ = runs[0]
        starts[sequence.adapter] = min(start, starts.get(sequence.adapter, start))
    ends = [*starts.values(), layout.num_tokens][1:]
    stretches = map(AdapterStretch, starts.values(), ends, starts)
    sources, predicts = list[IntN](), list[IntN]()
    for sequence, runs in zip(sequences, layout.rows, strict=True):
        offset = np.flatnonzero(
            has_loss[sequence.start : sequence.start + sequence.length + 1]
        )
        sources.append(sequence.start + offset)
        predicts.append(places_of(runs)[offset - 1])
    source_M = np.concatenate(sources)
    target_M = arrays.ids[source_M].astype(np.int64)
    # A pair is one int64, place above target, so np.unique sorts numbers instead of
    # rows.
    # Equal continuations share a logprob.
    both_M = np.concatenate(predicts) << 32 | target_M
    _, first_U, pair_M = np.unique(both_M, return_index=True, return_inverse=True)
    # Under two sets of allowed tokens or two supports, an equal continuation has two
    # logprobs, so the sets become part of the pair. The last one decides the order:
    # FULL is -1, so pairs without a support come first.
    for kind in sets:
        if kind is not None:
            set_M = kind.set_N[source_M].astype(np.int64) + 1
            numbers = set_M * len(first_U) + pair_M
            _, first_U, pair_M = np.unique(
                numbers, return_index=True, return_inverse=True
            )
    pair_U, source_U = both_M[first_U], source_M[first_U]
    support_rows = None
    num_plain = len(source_U)
    if supports is not None:
        set_U = supports.set_N[source_U]
        num_plain = int((set_U == FULL).sum())
        if num_plain < len(set_U):
            support_rows = SupportRows.of(
                [supports.sets[number] for number in set_U[num_plain:]],
                target_M[first_U[num_plain:]],
                num_plain,
                device,
            )
    allowed_P = None
    # A support has only allowed tokens, so its pairs need no mask.
    if allowed is not None:
        set_P = allowed.set_N[source_U[:num_plain]]
        allowed_P = AllowedRows.of(allowed.bits_KB, set_P, device)
    routing_N = None
    if ROUTING in arrays.columns:
        # A token's experts are recorded with the token after it; those of a text's last
        # token are unknown, like those recorded with the first token of the next text,
        # and of the first text.
        following_N = (source_N + 1) % len(arrays)
        routing_NE = arrays.column(ROUTING)[following_N]
        routing_N = to_device(routing_NE.astype(np.int32), device)
    return MicroBatch(
        token_ids_N=tensor(arrays.ids[source_N]),
        position_N=tensor(position_N),
        layout=layout,
        stretches=tuple(stretches),
        predict_U=tensor(pair_U >> 32),
        target_U=tensor(pair_U & 0xFFFFFFFF),
        pair_M=tensor(pair_M),
        source_M=source_M,
        sequence_M=tensor(
            np.repeat(np.arange(len(sequences)), [len(part) for part in sources])
        ),
        allowed_P=allowed_P,
        supports=support_rows,
        distilled=DistillRows.of(arrays, source_M, pair_M, device),
        routing_N=routing_N,
    )
