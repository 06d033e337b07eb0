"""Admission with prefix reuse, sampling, and interruption of sequences."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from asyncrl.base.http import Refused
from asyncrl.messages.codec import Asked, Sampled
from asyncrl.messages.stop_watch import StopWatch
from asyncrl_servers.embedded.constraints import Constraints
from asyncrl_servers.embedded.decoder import EmbeddedSpec
from asyncrl_servers.embedded.kv_attention import Ints
from asyncrl_servers.embedded.loaded_weights import Weights
from asyncrl_servers.embedded.runner import Runner
from asyncrl_servers.embedded.sequence import Rows, Sequence, moves_after_removal, sample
from asyncrl_servers.served_engine import Listener, check_request

MIN_COPIED = 32
"""Minimum prefix length worth copying from the cache."""
MIN_SHARED = 2
"""Minimum prefix length shared within a prefill, whose keys are written twice."""


class Prefill(NamedTuple):
    """Prefill of `ids` [T] in slot `row`.

    `num_copied` tokens are copied from slot `source`; tokens up to `num_shared` are computed for both.
    """

    row: int
    ids: Ints
    source: int
    num_copied: int
    num_shared: int

    @property
    def is_whole(self) -> bool:
        return self.num_shared == len(self.ids)


class Scheduler:
    """Sequences of an engine, and their results until hand_over.

    Invariant: every token carries the version of the weights that computed it.
    """

    def __init__(self, spec: EmbeddedSpec, runner: Runner, weights: Weights) -> None:
        self._spec = spec
        self._runner = runner
        self._weights = weights
        self._constraints = Constraints(runner.loaded)
        self._eos_ids = np.array(sorted(runner.loaded.eos_ids), np.int64)
        self.rows = Rows(spec.slots, spec.num_kept, spec.max_length)
        self.queued: OrderedDict[Sequence, None] = OrderedDict()
        self.interrupted: dict[Sequence, None] = {}
        self.num_generated = self.num_prefilled = 0
        self._results: dict[Listener, list[Sampled]] = {}

    @property
    def _num_free(self) -> int:
        return self._spec.slots - len(self.rows) - len(self.interrupted)

    @property
    def has_work(self) -> bool:
        return bool(self.rows) or self._may_admit

    @property
    def _may_admit(self) -> bool:
        is_serving = self._weights.swapping is None and self._weights.can_serve
        return bool(self.queued) and self._num_free > 0 and is_serving

    def new_sequence(self, asked: Asked, listener: Listener) -> Sequence:
        """Return a sequence, from any thread. Raises Refused (400)."""
        loaded = self._runner.loaded
        token_ids = check_request(asked, self._spec.max_length, loaded.vocab_size)
        request = asked.request
        resumed = token_ids[len(token_ids) - request.num_resumed :].tolist()
        stop_watch = None
        if request.stop:
            if loaded.tokenizer is None:
                what = f"request {request.request_id} has stop strings, but the model folder has no tokenizer"
                raise Refused(400, what, way_out="save the tokenizer in the model folder.")
            stop_ids = [loaded.special_ids[text] for text in request.stop if text in loaded.special_ids]
            stop_watch = StopWatch(request.stop, loaded.decode, resumed, stop_ids)
        return Sequence(asked, listener, token_ids, stop_watch, self._constraints.begin(request, resumed))

    def submit(self, sequences: Iterable[Sequence]) -> None:
        self.queued.update(dict.fromkeys(sequences))

    def resume(self, sequences: list[Sequence]) -> None:
        for sequence in reversed(sequences):
            if sequence in self.interrupted:
                del self.interrupted[sequence]
                self.queued[sequence] = None
                self.queued.move_to_end(sequence, last=False)

    def abort(self, wanted: set[Sequence]) -> None:
        for row in reversed(range(len(self.rows))):
            if self.rows.sequences[row] in wanted:
                self._report(row, "abort")
                self._remove(row)
        for waiting in (self.queued, self.interrupted):
            for sequence in wanted & waiting.keys():
                del waiting[sequence]
                ids, logprobs = np.zeros(0, np.int32), np.zeros(0, np.float32)
                empty = Sampled(sequence.number, ids, logprobs, [], "abort")
                self._results.setdefault(sequence.listener, []).append(empty)

    def interrupt(self) -> int:
        rows = self.rows
        for row, sequence in enumerate(rows.sequences):
            self._report(row, "interrupted")
            sequence.token_ids = rows.token_ids[row, : rows.lengths[row]].copy()
            sequence.next_logits_V = None
            sequence.kept_row = -1
            sequence.is_mixed = False
            self.interrupted[sequence] = None
        num_interrupted = len(rows)
        rows.sequences.clear()
        return num_interrupted

    def weights_changed(self, version: int, *, rereads: bool) -> None:
        """Continue under other weights. `rereads`: recompute the KV cache without the newest tokens."""
        rows = self.rows
        rows.forget_kept()
        for row, sequence in enumerate(rows.sequences):
            sequence.marks.append((int(rows.lengths[row]), version))
            sequence.next_logits_V = None
            sequence.is_mixed = not rereads
        if rereads and rows:
            rows.keep_routing(self._runner.cache.routing)
            kept = [rows.token_ids[row, : rows.lengths[row] - 1] for row in range(len(rows))]
            self._runner.prefill([(row, ids, 0) for row, ids in enumerate(kept)])

    def step(self) -> None:
        rows, runner, num_running = self.rows, self._runner, len(self.rows)
        reads = self._admit()
        last_ids = rows.last_ids(num_running)
        lengths = rows.lengths[:num_running].copy()
        for one in reads:
            if one.num_copied:
                runner.cache.copy_slot(one.source, one.row, one.num_copied)
            self.num_prefilled += len(one.ids) - one.num_shared
        shares = [(one.source, one.row, one.num_shared) for one in reads if one.num_copied < one.num_shared]
        jobs = [(one.row, one.ids, one.num_shared) for one in reads if not one.is_whole]
        logits = runner.step(last_ids, lengths, jobs, shares)
        if reads:
            logits = torch.cat([logits[:num_running], self._next_logits(reads, logits[num_running:])])
        self._sample(logits)

    def report_streams(self) -> None:
        for row, sequence in enumerate(self.rows.sequences):
            if sequence.is_streamed and sequence.num_told < self.rows.lengths[row]:
                self._report(row, "more")

    def hand_over(self) -> None:
        results, self._results = self._results, {}
        for listener, sampled in results.items():
            listener.sampled(sampled)

    def _admit(self) -> list[Prefill]:
        """Assign rows to queued sequences, sources before their users."""
        rows = self.rows
        num_taken = min(self._num_free, len(self.queued)) if self._may_admit else 0
        if not num_taken:
            return []
        taken = [self.queued.popitem(last=False)[0] for _ in range(num_taken)]
        whole = {
            one.admitted_ids: row for row, one in enumerate(rows.sequences) if one.next_logits_V is not None
        }
        standing = [*whole.values(), *rows.kept]
        reads = dict[int, Prefill]()
        for sequence in sorted(taken, key=lambda one: len(one.token_ids)):
            ids = sequence.token_ids
            key = ids.tobytes()
            sequence.marks.append((len(ids), self._weights.version))
            row = rows.add(sequence)
            sequence.admitted_ids = key
            if key in whole:
                source = whole[key]
                num_shared = len(ids)
            else:
                source, num_shared = self._longest_prefix(ids, standing, list(reads))
                rows.use_kept(sequence, source, num_shared)
                whole[key] = row
            num_copied = min(num_shared, reads[source].num_copied) if source in reads else num_shared
            reads[row] = Prefill(row, ids, source, num_copied, num_shared)
        return list(reads.values())

    def _longest_prefix(self, ids: Ints, standing: list[int], read_now: list[int]) -> tuple[int, int]:
        """Return (row, length) of the longest prefix of `ids` in the cache or this prefill, or (-1, 0)."""
        source, num_copied = self.rows.common_prefix(ids, standing)
        if num_copied < MIN_COPIED:
            source, num_copied = -1, 0
        together, num_shared = self.rows.common_prefix(ids, read_now)
        if num_shared >= max(MIN_SHARED, num_copied + 1):
            return together, num_shared
        return source, num_copied

    def _next_logits(self, reads: list[Prefill], computed: Tensor) -> Tensor:
        """Store and return next-token logits [reads, V]."""
        of_jobs = iter(computed)
        found = []
        for one in reads:
            sequences = self.rows.sequences
            logits = sequences[one.source].next_logits_V if one.is_whole else next(of_jobs).clone()
            assert logits is not None, "a source precedes its users"
            sequences[one.row].next_logits_V = logits
            found.append(logits)
        return torch.stack(found)

    def _sample(self, logits_NV: Tensor) -> None:
        rows = self.rows
        positions = rows.lengths[: len(rows)]
        failed = self._constraints.mask(rows.sequences, logits_NV)
        token_ids, logprobs, top = sample(logits_NV, *rows.sampling(), positions, rows.num_top())
        if not np.isfinite(logprobs).all():
            raise FloatingPointError(f"policy_version {self._weights.version} gives non-finite logits")
        rows.append(token_ids, logprobs, top)
        self._constraints.advance(rows.sequences, token_ids, failed)
        self.num_generated += len(token_ids)
        is_stop = (token_ids[:, None] == self._eos_ids).any(1)
        for row, sequence in enumerate(rows.sequences):
            if sequence.stop_watch is not None and sequence.stop_watch.is_complete(int(token_ids[row])):
                is_stop[row] = True
        is_over = is_stop | (rows.lengths[: len(rows)] >= rows.limits[: len(rows)])
        is_over[[*failed]] = True
        for row in np.flatnonzero(is_over)[::-1].tolist():  # only rows above a removed row move
            sequence = rows.sequences[row]
            if row in failed:
                self.hand_over()  # results precede the refusal
                sequence.listener.refused(sequence.number, failed[row])
            else:
                self._report(row, "stop" if is_stop[row] else "length")
            if not sequence.is_mixed and (kept := rows.keep(row)) >= 0:
                self._runner.cache.copy_slot(row, kept, int(rows.lengths[kept]) - 1)
            self._remove(row)

    def _report(self, row: int, then: str) -> None:
        sampled = self.rows.untold(row, then, self._runner.cache.routing)
        self._results.setdefault(self.rows.sequences[row].listener, []).append(sampled)

    def _remove(self, row: int) -> None:
        rows = self.rows
        for source, target in moves_after_removal(row, rows.lengths[: len(rows)]):
            rows.move(source, target)
            self._runner.cache.copy_slot(source, target, int(rows.lengths[target]))
        rows.sequences.pop()
