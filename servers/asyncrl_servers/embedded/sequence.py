"""Requests in the engine, and sampling."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from itertools import chain

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from asyncrl.messages.codec import Asked, Sampled, spans_of
from asyncrl.messages.records import TopLogprobs
from asyncrl.messages.stop_watch import StopWatch
from asyncrl.messages.token_grammars import TokenMatcher
from asyncrl_servers.embedded.decoder import to_device, to_host
from asyncrl_servers.embedded.kv_attention import CHUNK, LENGTH_STEP, Ints
from asyncrl_servers.served_engine import Listener, Run, uniform_draws

_HEAD = 64


class Sequence(Run):
    """A request in the engine.

    Life: queued -> running in a slot -> finished or aborted; an interrupted one keeps its slot.
    Invariant: `token_ids` int64 [T] holds all tokens unless it runs.
    """

    def __init__(
        self,
        asked: Asked,
        listener: Listener,
        token_ids: npt.NDArray[np.int64],
        stop_watch: StopWatch | None = None,
        matcher: TokenMatcher | None = None,
    ) -> None:
        super().__init__(asked, listener)
        self.token_ids, self.stop_watch = token_ids, stop_watch
        self.matcher = matcher
        self.top_logprobs: list[TopLogprobs] = []
        self.num_told = len(token_ids)
        self.limit = len(token_ids) + self.request.max_tokens
        self.marks: list[tuple[int, int]] = []
        """(position of the first token, policy_version)."""
        self.next_logits_V: Tensor | None = None
        self.admitted_ids = b""
        self.is_mixed = False
        """True if older weights computed part of its KV cache."""
        self.kept_row = -1
        self.routing, self.num_routed = b"", 0
        """Experts of unreported tokens, and the number of recorded tokens."""


class Rows:
    """Running sequences: row i is slot i of the KV cache. The last `num_kept` rows are kept for next
    turns (LRU).
    """

    def __init__(self, slots: int, num_kept: int, max_length: int) -> None:
        self.sequences: list[Sequence] = []
        num_rows = slots + num_kept
        self.token_ids = np.zeros((num_rows, max_length), np.int64)
        self.logprobs = np.zeros((slots, max_length), np.float32)
        self.lengths, self.limits = np.zeros(num_rows, np.int64), np.zeros(num_rows, np.int64)
        """Tokens including the prompt; the newest is not cached yet."""
        self.seeds = np.zeros(num_rows, np.uint64)
        self.temperatures, self.top_ps = np.zeros(num_rows, np.float32), np.zeros(num_rows)
        self._columns = (self.limits, self.seeds, self.temperatures, self.top_ps)
        self._kept = OrderedDict.fromkeys(range(slots, num_rows))

    @property
    def kept(self) -> list[int]:
        return list(self._kept)

    def __len__(self) -> int:
        return len(self.sequences)

    def add(self, sequence: Sequence) -> int:
        row, request, ids = len(self.sequences), sequence.request, sequence.token_ids
        self.sequences.append(sequence)
        self.token_ids[row, : len(ids)], self.lengths[row] = ids, len(ids)
        self.limits[row], self.seeds[row] = sequence.limit, request.seed
        self.temperatures[row], self.top_ps[row] = request.temperature, request.top_p
        return row

    def keep(self, row: int) -> int:
        """Keep this row's tokens; return the kept row or -1."""
        if not self._kept:
            return -1
        target = self.sequences[row].kept_row
        if target < 0:
            target = next(iter(self._kept))
        self._kept.move_to_end(target)
        length = self.lengths[target] = self.lengths[row]
        self.token_ids[target, :length] = self.token_ids[row, :length]
        return target

    def forget_kept(self) -> None:
        self.lengths[list(self._kept)] = 0
        for sequence in self.sequences:
            sequence.kept_row = -1

    def move(self, source: int, target: int) -> None:
        length = self.lengths[target] = self.lengths[source]
        self.sequences[target] = self.sequences[source]
        self.token_ids[target, :length] = self.token_ids[source, :length]
        self.logprobs[target, :length] = self.logprobs[source, :length]
        for column in self._columns:
            column[target] = column[source]

    def last_ids(self, num_rows: int) -> npt.NDArray[np.int64]:
        rows = np.arange(num_rows)
        return self.token_ids[rows, self.lengths[rows] - 1]

    def sampling(self) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float64], npt.NDArray[np.uint64]]:
        running = slice(len(self.sequences))
        return self.temperatures[running], self.top_ps[running], self.seeds[running]

    def num_top(self) -> dict[int, int]:
        asked = enumerate(one.request.top_logprobs for one in self.sequences)
        return {row: num for row, num in asked if num}

    def append(
        self,
        token_ids: npt.NDArray[np.int64],
        logprobs: npt.NDArray[np.float32],
        top: Mapping[int, TopLogprobs],
    ) -> None:
        for row, found in top.items():
            self.sequences[row].top_logprobs.append(found)
        rows = np.arange(len(self.sequences))
        places = self.lengths[rows]
        self.token_ids[rows, places], self.logprobs[rows, places] = token_ids, logprobs
        self.lengths[rows] += 1

    def keep_routing(self, routing_SPE: Tensor, rows: Iterable[int] | None = None) -> None:
        """Record experts of the read tokens. `routing_SPE`: the KV cache's."""
        if not routing_SPE.shape[2]:
            return
        for row in range(len(self.sequences)) if rows is None else rows:
            sequence, end = self.sequences[row], int(self.lengths[row]) - 1
            sequence.routing += routing_SPE[row, sequence.num_routed : end].cpu().numpy().tobytes()
            sequence.num_routed = max(sequence.num_routed, end)

    def untold(self, row: int, then: str, routing_SPE: Tensor) -> Sampled:
        """Return the unreported tokens and mark them as reported."""
        sequence, end, routing = self.sequences[row], int(self.lengths[row]), b""
        start, sequence.num_told = sequence.num_told, end
        top, sequence.top_logprobs = sequence.top_logprobs, []
        if then != "more":
            self.keep_routing(routing_SPE, [row])
            routing, sequence.routing = sequence.routing, b""
        return Sampled(
            sequence.number,
            self.token_ids[row, start:end].astype(np.int32),
            self.logprobs[row, start:end].copy(),
            spans_of(sequence.marks, start, end),
            then,
            top,
            routing,
        )

    def common_prefix(self, token_ids: npt.NDArray[np.int64], among: list[int]) -> tuple[int, int]:
        """Return (row, length) of the longest cached prefix of `token_ids[:-1]`, or (-1, 0)."""
        if not among:
            return -1, 0
        rows = np.array(among)
        most = np.minimum(self.lengths[rows], len(token_ids)) - 1
        head = min(len(token_ids), _HEAD)
        differs = self.token_ids[rows, :head] != token_ids[:head]
        nums = np.minimum(np.where(differs.any(1), differs.argmax(1), head), most)
        best = int(nums.argmax())
        best_row, longest = int(rows[best]), int(nums[best])
        if longest == head < len(token_ids):
            for row, num in zip(rows[nums == head].tolist(), most[nums == head].tolist(), strict=True):
                if num > longest and self.token_ids[row, longest] == token_ids[longest]:
                    differs = np.flatnonzero(self.token_ids[row, :num] != token_ids[:num])
                    num = int(differs[0]) if len(differs) else num
                    best_row, longest = (row, num) if num > longest else (best_row, longest)
        return (best_row, longest) if longest > 0 else (-1, 0)

    def use_kept(self, sequence: Sequence, row: int, length: int) -> None:
        """Replace a kept row that the sequence extends."""
        if row in self._kept:
            self._kept.move_to_end(row)
            if length >= self.lengths[row] - 1:
                sequence.kept_row = row


def moves_after_removal(row: int, lengths: Ints) -> list[tuple[int, int]]:
    """Return moves (source, target) that close the gap at `row`; similar lengths stay together."""
    moves, gap, last = [], row, len(lengths) - 1
    starts = np.arange((row // CHUNK + 1) * CHUNK, last + 1, CHUNK)
    longest = np.maximum.reduceat(-(-lengths // LENGTH_STEP), starts).tolist() if len(starts) else []
    for number, start in enumerate(starts.tolist()):
        if longest[number] not in longest[number + 1 : number + 2]:
            source = start + int(lengths[start : min(start + CHUNK, last + 1)].argmax())
            moves.append((source, gap))
            gap = source
    if gap != last:
        moves.append((last, gap))
    return moves


Drawn = tuple[npt.NDArray[np.int64], npt.NDArray[np.float32], dict[int, TopLogprobs]]


def sample(
    logits_NV: Tensor,
    temperatures: npt.NDArray[np.float32],
    top_ps: npt.NDArray[np.float64],
    seeds: npt.NDArray[np.uint64],
    positions: npt.NDArray[np.int64],
    top: Mapping[int, int] | None = None,
) -> Drawn:
    """Draw a token per row: ids int64 [N], logprobs float32 [N] in nats, `top` likeliest tokens.

    Inverts the cumulative distribution in token-id order, in float64. Temperature 0 is greedy.
    """
    device = logits_NV.device
    logits_NV = logits_NV.float()
    if (temperatures != 1.0).any():
        divisors = np.where(temperatures == 0.0, np.float32(1.0), temperatures)
        logits_NV = logits_NV / to_device(divisors, device)[:, None]
    is_cut = (top_ps < 1.0) & (temperatures > 0.0)
    if is_cut.any():
        logits_NV = _cut_top_p(logits_NV, np.flatnonzero(is_cut), top_ps)
    logprobs_NV = torch.log_softmax(logits_NV, dim=-1)
    cdf_NV = logprobs_NV.exp().cumsum(-1, dtype=torch.float64)
    draws = to_device(uniform_draws(seeds, positions), device)[:, None]
    tokens_N1 = torch.searchsorted(cdf_NV, draws * cdf_NV[:, -1:], right=True)
    # A product may round up to the total; take the last token with probability above 0.
    tokens_N1 = torch.minimum(tokens_N1, torch.searchsorted(cdf_NV, cdf_NV[:, -1:].contiguous()))
    if (is_greedy := temperatures == 0.0).any():
        chosen = to_device(np.flatnonzero(is_greedy), device)
        tokens_N1[chosen, 0] = logits_NV[chosen].argmax(-1)
    # Only non-finite logits still exceed the last token.
    tokens_N1.clamp_(max=logits_NV.shape[1] - 1)
    picked_N1 = logprobs_NV.gather(1, tokens_N1)
    top = top or {}
    likeliest = [logprobs_NV[row].topk(min(num, logprobs_NV.shape[1])) for row, num in top.items()]
    token_ids, logprobs, *found = to_host(tokens_N1[:, 0], picked_N1[:, 0], *chain.from_iterable(likeliest))
    pairs = zip(top, found[::2], found[1::2], strict=True)
    return token_ids, logprobs, {row: _likeliest(values, ids) for row, values, ids in pairs}


def _likeliest(values: npt.NDArray[np.float32], ids: npt.NDArray[np.int64]) -> TopLogprobs:
    pairs = zip(ids.tolist(), values.tolist(), strict=True)
    return [(token, value) for token, value in pairs if value > float("-inf")]


def _cut_top_p(logits_NV: Tensor, cut: npt.NDArray[np.int64], top_ps: npt.NDArray[np.float64]) -> Tensor:
    """Nucleus sampling in the rows `cut` (Holtzman et al. 2020)."""
    index = to_device(cut, logits_NV.device)
    limits = to_device(top_ps[cut], logits_NV.device)[:, None]
    chosen_MV = logits_NV[index]
    ordered_MV, order_MV = chosen_MV.sort(dim=-1, descending=True, stable=True)
    probabilities_MV = torch.softmax(ordered_MV, dim=-1).double()
    is_out_MV = probabilities_MV.cumsum(-1) - probabilities_MV >= limits
    is_out_MV[:, 0] = False
    ordered_MV = ordered_MV.masked_fill(is_out_MV, float("-inf"))
    result = logits_NV.clone()
    result[index] = chosen_MV.scatter(1, order_MV, ordered_MV)
    return result
