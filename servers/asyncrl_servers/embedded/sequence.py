"""One request on its way through the engine, and the table of the running ones. Knows ids and numbers; knows no torch."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Literal

import numpy as np

from asyncrl.wire import GenerateRequest, GenerateResponse, Span
from asyncrl_servers.checks import spans_of
from asyncrl_servers.embedded.segments import moves_after_removal
from asyncrl_servers.embedded.stopping import StopWatch
from asyncrl_servers.streaming import TokenStream, Told

FinishReason = Literal["stop", "length", "abort"]


class Sequence:
    """A request from its arrival to its answer.

    Life: queued -> running in a slot -> answered, or queued -> answered (aborted). `answer` is set exactly once.
    """

    __slots__ = ("answer", "marks", "num_told", "prompt_ids", "request", "stop_watch", "stream")

    def __init__(self, request: GenerateRequest, stop_watch: StopWatch | None, stream: TokenStream | None = None) -> None:
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
    """The running sequences as columns; row i stands in slot i of the KV cache, rows 0..n-1 are taken, without a gap."""

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
        self._columns = (self.lengths, self.counts, self.last_ids, self.max_tokens, self.temperatures, self.top_ps, self.seeds)

    def add(self, sequence: Sequence) -> int:
        """Take the next row for a sequence whose prompt is (being) prefilled into that slot; returns the row."""
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
        """Free a row; returns the moves (source, target) that closed the gap, to be repeated in order by the KV cache.

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
                told += [(sequence.stream, (token_ids[s.start : s.end], logprobs[s.start : s.end], s.version)) for s in spans]
                sequence.num_told += len(token_ids)
        return told
