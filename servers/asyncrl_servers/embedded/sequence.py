"""One request on its way through the engine, and the table of the running ones. Knows ids and numbers; knows
no torch.
"""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from asyncrl.messages.engine_calls import GenerateRequest, GenerateResponse, Span
from asyncrl_servers.checks import spans_of, uniform_draws
from asyncrl_servers.streaming import TokenStream, Told

# Cuts the running rows into stretches of like length, so that a long sequence does not make the short ones
# pay. Knows numbers.


CHUNK = 8
"""Slots are ordered by length chunk by chunk; a stretch is a number of whole chunks."""
OVERHEAD_FLOATS = 30_000
"""Keys read in the time that one more stretch costs (measured: 30 us a layer, on one CPU thread)."""


def cut_rows(padded_lengths: npt.NDArray[np.int64], floats_per_position: int) -> list[tuple[int, int, int]]:
    """Stretches (start, end, length) that cover the rows [n]; each row's padded length is at most its
    stretch's.

    Neighbouring chunks are joined unless the positions saved are worth a stretch of their own.
    """
    n = len(padded_lengths)
    worth = OVERHEAD_FLOATS / floats_per_position
    longest = np.maximum.reduceat(padded_lengths, np.arange(0, n, CHUNK)).tolist()
    stretches = [(0, min(CHUNK, n), longest[0])]
    for index, length in enumerate(longest[1:], start=1):
        start, end, joined_length = stretches[-1]
        new_end = min(end + CHUNK, n)
        common = max(joined_length, length)
        wasted = (end - start) * (common - joined_length) + (new_end - end) * (common - length)
        if wasted <= worth:
            stretches[-1] = (start, new_end, common)
        else:
            stretches.append((index * CHUNK, new_end, length))
    return stretches


def moves_after_removal(row: int, lengths: npt.NDArray[np.int64]) -> list[tuple[int, int]]:
    """Moves (source, target), in order, that close the gap at `row` among rows [n] and keep the chunks
    ordered by length.

    All rows grow alike, so an order once made stays; each chunk hands its longest row to the one before.
    """
    n, moves, gap = len(lengths), [], row
    while gap != n - 1:
        end = min((gap // CHUNK + 1) * CHUNK, n)
        source = n - 1 if end == n else end + int(lengths[end : end + CHUNK].argmax())
        moves.append((source, gap))
        gap = source
    return moves


# Stop strings of one request, watched token by token. Knows a tokenizer; knows no model.


_SLACK = 8
"""Tokens looked at beyond the longest stop string's bytes (each token holds a byte or more, but for special
ones).
"""


class StopWatch:
    """Tells when the decoded text of a request contains one of its stop strings.

    Only the tail is decoded: as many tokens as the longest stop string has bytes, and a few more. Special
    tokens have no text, but a stop string that is one special token's name stops at that token.
    """

    def __init__(self, stop: list[str], tokenizer: Any, resumed_ids: list[int]) -> None:
        self._tokenizer = tokenizer
        self._stop = [text for text in stop if text]
        special = dict(zip(tokenizer.all_special_tokens, tokenizer.all_special_ids, strict=True))
        self._stop_ids = {special[text] for text in self._stop if text in special}
        self._window = max((len(text.encode()) for text in self._stop), default=0) + _SLACK
        self._tail = list(resumed_ids[-self._window :])

    def is_complete(self, token_id: int) -> bool:
        """Take one more token; true if it completes a stop string."""
        self._tail.append(token_id)
        if len(self._tail) > self._window:
            del self._tail[0]
        if token_id in self._stop_ids:
            return True
        text = self._tokenizer.decode(self._tail, skip_special_tokens=True)
        return any(stop in text for stop in self._stop)


# Logits in, tokens and their logprobs out. Knows tensors and seeds; knows no sequence, no model.


@dataclass(slots=True)
class SamplingRows:
    """The sampling settings of N rows; positions are those of the tokens to be drawn."""

    temperatures: npt.NDArray[np.float32]
    top_ps: npt.NDArray[np.float64]
    seeds: npt.NDArray[np.uint64]
    positions: npt.NDArray[np.int64]


def sample(logits_NV: Tensor, rows: SamplingRows) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
    """Draw one token a row: (ids int64 [N], logprobs float32 [N] in nats of the distribution drawn from).

    The draw inverts the cumulative distribution in order of token ids, in float64. Temperature 0 is the
    largest logit, with the logprob of temperature 1.
    """
    device = logits_NV.device
    logits_NV = logits_NV.float()
    if (rows.temperatures != 1.0).any():
        divisors = np.where(rows.temperatures == 0.0, np.float32(1.0), rows.temperatures)
        logits_NV = logits_NV / torch.from_numpy(divisors).to(device)[:, None]
    is_cut = (rows.top_ps < 1.0) & (rows.temperatures > 0.0)
    if is_cut.any():
        logits_NV = _cut_top_p(logits_NV, np.flatnonzero(is_cut), rows.top_ps)
    logprobs_NV = torch.log_softmax(logits_NV, dim=-1)
    cdf_NV = logprobs_NV.exp().cumsum(-1, dtype=torch.float64)
    draws = torch.from_numpy(uniform_draws(rows.seeds, rows.positions)).to(device)[:, None]
    tokens_N1 = torch.searchsorted(cdf_NV, draws * cdf_NV[:, -1:], right=True)
    # A product that rounds up to the total lands behind the last token; the last one of probability above 0
    # is meant.
    tokens_N1 = torch.minimum(tokens_N1, torch.searchsorted(cdf_NV, cdf_NV[:, -1:].contiguous()))
    is_greedy = rows.temperatures == 0.0
    if is_greedy.any():
        chosen = torch.from_numpy(np.flatnonzero(is_greedy)).to(device)
        tokens_N1[chosen, 0] = logits_NV[chosen].argmax(-1)
    tokens_N1.clamp_(
        max=logits_NV.shape[1] - 1
    )  # only logits that are not finite get there; their logprob tells the caller
    picked_N1 = logprobs_NV.gather(1, tokens_N1)
    return tokens_N1[:, 0].cpu().numpy(), picked_N1[:, 0].cpu().numpy()


def _cut_top_p(logits_NV: Tensor, cut: npt.NDArray[np.int64], top_ps: npt.NDArray[np.float64]) -> Tensor:
    """Keep, in the rows `cut`, the fewest most likely tokens whose probabilities add up to top_p (Holtzman et
    al. 2020).
    """
    index = torch.from_numpy(cut).to(logits_NV.device)
    limits = torch.from_numpy(top_ps[cut]).to(logits_NV.device)[:, None]
    chosen_MV = logits_NV[index]
    ordered_MV, order_MV = chosen_MV.sort(dim=-1, descending=True, stable=True)
    probabilities_MV = torch.softmax(ordered_MV, dim=-1).double()
    is_out_MV = probabilities_MV.cumsum(-1) - probabilities_MV >= limits
    is_out_MV[:, 0] = False
    ordered_MV = ordered_MV.masked_fill(is_out_MV, float("-inf"))
    result = logits_NV.clone()
    result[index] = chosen_MV.scatter(1, order_MV, ordered_MV)
    return result


FinishReason = Literal["stop", "length", "abort"]


class Sequence:
    """A request from its arrival to its answer.

    Life: queued -> running in a slot -> answered, or queued -> answered (aborted). `answer` is set exactly
    once.
    """

    __slots__ = ("answer", "marks", "num_told", "prompt_ids", "request", "stop_watch", "stream")

    def __init__(
        self, request: GenerateRequest, stop_watch: StopWatch | None, stream: TokenStream | None = None
    ) -> None:
        self.request, self.stream, self.num_told = request, stream, 0
        self.prompt_ids = tuple(request.prompt_ids)
        self.stop_watch = stop_watch
        self.marks: list[tuple[int, int]] = []
        """(index of the first sampled token, policy_version) of each version it ran under."""
        self.answer: Future[GenerateResponse] = Future()
        self.answer.set_running_or_notify_cancel()  # a caller that goes away must abort, it cannot cancel

    def spans_from(self, start: int, num_tokens: int) -> list[Span]:
        """Version spans of `num_tokens` sampled tokens from number `start` on, which counts as 0."""
        return spans_of([(max(0, first - start), version) for first, version in self.marks], num_tokens)

    def finish(self, token_ids: list[int], logprobs: list[float], reason: FinishReason) -> None:
        """Answer with what was sampled and not told to the stream."""
        self.answer.set_result(
            GenerateResponse(
                request_id=self.request.request_id,
                token_ids=token_ids,
                logprobs=logprobs,
                version_spans=self.spans_from(self.num_told, len(token_ids)),
                finish_reason=reason,
            )
        )


class RunningRows:
    """The running sequences as columns; row i stands in slot i of the KV cache, rows 0..n-1 are taken,
    without a gap.
    """

    def __init__(self, slots: int, max_length: int) -> None:
        self.n = 0
        self.num_streams = 0
        """Running sequences with a stream."""
        self.sequences: list[Sequence] = []
        self.lengths = np.zeros(slots, dtype=np.int64)
        """Tokens so far, prompt included; the newest one is not in the KV cache yet."""
        self.counts = np.zeros(slots, dtype=np.int64)
        """Tokens sampled so far."""
        self.last_ids = np.zeros(slots, dtype=np.int64)
        self.max_tokens = np.zeros(slots, dtype=np.int64)
        self.temperatures = np.ones(slots, dtype=np.float32)
        self.top_ps = np.ones(slots, dtype=np.float64)
        self.seeds = np.zeros(slots, dtype=np.uint64)
        self.token_ids = np.zeros((slots, max_length), dtype=np.int64)
        self.logprobs = np.zeros((slots, max_length), dtype=np.float32)
        self._row_numbers = np.arange(slots)
        self._columns = (
            self.lengths,
            self.counts,
            self.last_ids,
            self.max_tokens,
            self.temperatures,
            self.top_ps,
            self.seeds,
        )

    def add(self, sequence: Sequence) -> int:
        """Take the next row for a sequence whose prompt is (being) prefilled into that slot; returns the
        row.
        """
        row = self.n
        request = sequence.request
        self.sequences.append(sequence)
        self.num_streams += sequence.stream is not None
        self.lengths[row], self.counts[row] = len(sequence.prompt_ids), 0
        self.max_tokens[row], self.seeds[row] = request.max_tokens, request.seed
        self.temperatures[row], self.top_ps[row] = request.temperature, request.top_p
        self.n += 1
        return row

    def append(self, first: int, token_ids: np.ndarray, logprobs: np.ndarray) -> None:
        """One more sampled token for rows first..n-1."""
        rows = self._row_numbers[first : self.n]
        counts = self.counts[first : self.n]
        self.token_ids[rows, counts] = token_ids
        self.logprobs[rows, counts] = logprobs
        self.last_ids[first : self.n] = token_ids
        counts += 1
        self.lengths[first : self.n] += 1

    def remove(self, row: int) -> list[tuple[int, int]]:
        """Free a row; returns the moves (source, target) that closed the gap, to be repeated in order by the
        KV cache.

        Only rows above `row` move.
        """
        self.num_streams -= self.sequences[row].stream is not None
        moves = moves_after_removal(row, self.lengths[: self.n])
        for source, target in moves:
            self.sequences[target] = self.sequences[source]
            for column in self._columns:
                column[target] = column[source]
            count = self.counts[source]
            self.token_ids[target, :count] = self.token_ids[source, :count]
            self.logprobs[target, :count] = self.logprobs[source, :count]
        self.sequences.pop()
        self.n -= 1
        return moves

    def sampled(self, row: int) -> tuple[list[int], list[float]]:
        """Token ids and logprobs sampled so far, without those that were told to the stream."""
        told, count = self.sequences[row].num_told, self.counts[row]
        return self.token_ids[row, told:count].tolist(), self.logprobs[row, told:count].tolist()

    def tell_nowait(self) -> list[tuple[TokenStream, Told]]:
        """What the streams are to be told now: all that was sampled since they were told last."""
        told: list[tuple[TokenStream, Told]] = []
        for row, sequence in enumerate(self.sequences):
            if sequence.stream is not None:
                token_ids, logprobs = self.sampled(row)
                spans = sequence.spans_from(sequence.num_told, len(token_ids))
                told += [
                    (sequence.stream, (token_ids[s.start : s.end], logprobs[s.start : s.end], s.version))
                    for s in spans
                ]
                sequence.num_told += len(token_ids)
        return told
