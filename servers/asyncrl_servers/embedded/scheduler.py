"""Sequences of an embedded engine: admission with prefix reuse, decoding, and
interruption.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Iterable
from typing import NamedTuple, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from asyncrl.base.http import Refused
from asyncrl.messages.codec import Asked, Sampled, spans_between
from asyncrl.messages.sampling import DRAW_PARAMETERS, StopWatch
from asyncrl.messages.token_grammars import GrammarError, TokenMatcher
from asyncrl.messages.tokens import (
    BEHAVIOUR,
    EMPTY,
    NO_EXPERT,
    ROUTING,
    Ragged,
    Tokens,
    Values,
)
from asyncrl_servers.embedded.adjusted_logits import AdjustedRow, adjust
from asyncrl_servers.embedded.decoder import (
    Drawn,
    EmbeddedSpec,
    draws_from_all,
    grammar_refusal,
    mask,
    sample,
)
from asyncrl_servers.embedded.fused_decode import FusedSteps
from asyncrl_servers.embedded.kv_attention import CHUNK, LENGTH_STEP, Ints
from asyncrl_servers.embedded.loaded_weights import Weights
from asyncrl_servers.embedded.row_adapters import Adapter
from asyncrl_servers.embedded.runner import Runner
from asyncrl_servers.engine_routes import Listener, Run, RunQueue, check_request

MIN_COPIED = 32
"""Minimum prefix length worth copying in the cache."""
_HEAD = 64
"""Tokens of all rows that are compared at once."""


Owner = tuple[Weights, str]
"""Weights that computed keys and values, and whose adapter among them: a role."""


class Sequence(Run):
    """A request in the engine.

    Life: queued -> running in a slot -> finished or aborted; an interrupted one keeps
        its slot.
    Invariant: `token_ids` int64 [T] holds all tokens unless it runs.
    """

    def __init__(
        self,
        asked: Asked,
        listener: Listener,
        token_ids: npt.NDArray[np.int64],
        end_ids: frozenset[int],
        stop_watch: StopWatch | None,
        matcher: TokenMatcher | None,
        adjusted: AdjustedRow | None,
    ) -> None:
        """`end_ids`: a token with one of these ends the answer."""
        super().__init__(asked, listener)
        self.weights: Weights
        """Of its adapter, from submit() on."""
        self.token_ids = token_ids
        self.end_ids = end_ids
        self.stop_watch = stop_watch
        self.matcher = matcher
        self.allowed = None if matcher is None else matcher.allowed()
        """Next tokens, bool [V]; None: all."""
        self.adjusted = adjusted
        self.lists: dict[str, list[npt.NDArray[np.generic]]] = {}
        """Of the unreported tokens, by column."""
        self.num_told = len(token_ids)
        self.limit = len(token_ids) + self.request.max_tokens
        self.next_logits_V: Tensor | None = None
        self.admitted_ids = b""
        self.is_mixed = False
        """True if older weights computed part of its KV cache."""
        self.routing: list[npt.NDArray[np.uint16]] = []
        """Of unreported tokens: the experts that read the token before."""
        self.num_routed = 0

    @property
    def owner(self) -> Owner:
        return self.weights, self.request.role

    def forget_routing(self) -> None:
        """Report the experts of the whole text again: other weights are to read it."""
        self.routing = []
        self.num_routed = 0


class Rows:
    """Running sequences: row i is slot i of the KV cache. The last `num_kept` rows are
    kept for next turns (LRU).
    """

    def __init__(self, slots: int, num_kept: int, max_length: int) -> None:
        self.sequences: list[Sequence] = []
        num_rows = slots + num_kept
        self.token_ids = np.zeros((num_rows, max_length), np.int64)
        self.logprobs = np.zeros((slots, max_length), np.float32)
        self.lengths = np.zeros(num_rows, np.int64)
        """Tokens including the prompt; the newest is not cached yet."""
        draw = [(name, np.float64) for name in DRAW_PARAMETERS]
        self.settings = np.zeros(
            slots, [("limit", np.int64), ("seed", np.uint64), *draw]
        )
        # Least recently used first. Kept rows come after the slots: a decode step needs
        # running rows 0..n-1 without a gap.
        self.kept: OrderedDict[int, Owner | None] = OrderedDict.fromkeys(
            range(slots, num_rows)
        )

    def __len__(self) -> int:
        return len(self.sequences)

    def add(self, sequence: Sequence) -> None:
        row, request, ids = len(self.sequences), sequence.request, sequence.token_ids
        self.sequences.append(sequence)
        self.token_ids[row, : len(ids)] = ids
        self.lengths[row] = len(ids)
        self.settings[row] = (sequence.limit, request.seed, *request.draw)

    def keep(self, row: int) -> int:
        """Keep this row's tokens; return the kept row or -1."""
        if not self.kept:
            return -1
        target: int = next(iter(self.kept))
        self.kept.move_to_end(target)
        self.kept[target] = self.sequences[row].owner
        length = self.lengths[target] = self.lengths[row]
        self.token_ids[target, :length] = self.token_ids[row, :length]
        return target

    def use_kept(self, row: int, length: int) -> None:
        """A row that is extended is the next to be replaced."""
        if row in self.kept:
            # If the new sequence contains the whole row, it will be kept instead when
            # it ends. If it branches off earlier, other turns may still continue the
            # row, so the row counts as used.
            self.kept.move_to_end(row, last=length < self.lengths[row] - 1)

    def forget_kept(self, weights: Weights) -> None:
        for row in [row for row, one in self.kept.items() if one and one[0] is weights]:
            self.kept[row] = None
            self.lengths[row] = 0

    def owner(self, row: int) -> Owner | None:
        return self.kept[row] if row in self.kept else self.sequences[row].owner

    def of(self, weights: Weights) -> list[int]:
        """Return the rows that run on these weights."""
        return [row for row, one in enumerate(self.sequences) if one.weights is weights]

    def adapters(self) -> list[Adapter]:
        """Return the adapter of each row; [] if all have the run's only one."""
        asked = [one.request for one in self.sequences]
        if all(not one.adapter and not one.role for one in asked):
            return []
        return [one.weights.adapters[one.request.role] for one in self.sequences]

    def are_simple(self) -> bool:
        """Whether each row only draws a token from the model's own distribution."""
        is_adjusted = any(
            one.allowed is not None
            or one.adjusted is not None
            or one.request.top_logprobs
            for one in self.sequences
        )
        drawn = draws_from_all(self.settings[: len(self.sequences)])
        return bool(drawn.all()) and not is_adjusted

    def move(self, source: int, target: int) -> None:
        length = self.lengths[target] = self.lengths[source]
        self.sequences[target] = self.sequences[source]
        self.token_ids[target, :length] = self.token_ids[source, :length]
        self.logprobs[target, :length] = self.logprobs[source, :length]
        self.settings[target] = self.settings[source]

    def append(self, drawn: Drawn) -> None:
        for name, by_row in drawn.lists.items():
            for row, values in by_row.items():
                self.sequences[row].lists.setdefault(name, []).append(values)
        rows = np.arange(len(self.sequences))
        places = self.lengths[rows]
        self.token_ids[rows, places] = drawn.ids
        self.logprobs[rows, places] = drawn.logprobs
        self.lengths[rows] += 1

    def record_routing(self, rows: Iterable[int], routing_SPE: Tensor) -> None:
        """Record the experts of tokens read since the last call. `routing_SPE`: the KV
        cache's. One copy from the device for all rows.
        """
        num_experts = routing_SPE.shape[2]
        if not num_experts:
            return
        due = list[tuple[Sequence, int]]()
        places, positions = list[int](), list[int]()
        for row in rows:
            sequence, num_read = self.sequences[row], int(self.lengths[row]) - 1
            if num_read > sequence.num_routed:
                due.append((sequence, num_read))
                places += [row] * (num_read - sequence.num_routed)
                positions += range(sequence.num_routed, num_read)
        if not due:
            return
        read = routing_SPE[places, positions].cpu().numpy().astype(np.uint16)
        start = 0
        for sequence, num_read in due:
            if not sequence.num_routed:  # nothing was read before the first token
                sequence.routing.append(np.full((1, num_experts), NO_EXPERT, np.uint16))
            end = start + num_read - sequence.num_routed
            sequence.routing.append(read[start:end])
            sequence.num_routed = num_read
            start = end

    def unsent(self, row: int, then: str, routing_SPE: Tensor) -> Sampled:
        """Return the unreported tokens and mark them as reported; with experts first
        the whole prompt.
        """
        sequence = self.sequences[row]
        start, end = sequence.num_told, int(self.lengths[row])
        sequence.num_told = end
        columns: dict[str, Values] = {BEHAVIOUR: self.logprobs[row, start:end].copy()}
        for name, lists in sequence.lists.items():
            sizes = np.array([len(values) for values in lists], np.int32)
            columns[name] = Ragged(np.concatenate(lists), sizes)
        sequence.lists = {}
        tokens = Tokens(
            self.token_ids[row, start:end].astype(np.int32),
            spans_between(sequence.marks, start, end),
            columns,
        )
        self.record_routing([row], routing_SPE)
        if sequence.routing:
            routing = np.concatenate(sequence.routing)
            sequence.routing = []
            if len(routing) > end - start:
                prompt = Tokens(self.token_ids[row, :start].astype(np.int32))
                tokens = Tokens.join([prompt, tokens])
            tokens = tokens.with_columns({ROUTING: routing})
        return Sampled(sequence.number, tokens, then)

    def begins(self, row: int, token_ids: npt.NDArray[np.int64]) -> bool:
        """Whether `token_ids` continues all cached tokens of the row."""
        num = self.lengths[row] - 1
        return np.array_equal(self.token_ids[row, :num], token_ids[:-1][:num])

    def common_prefix(
        self, token_ids: npt.NDArray[np.int64], among: list[int]
    ) -> tuple[int, int]:
        """Return (row, length) of the longest cached prefix of `token_ids[:-1]`, or
        (-1, 0).

        Example: the newest token of a row is not cached yet, and the last id is always computed.
            >>> rows = Rows(slots=2, num_kept=0, max_length=8)
            >>> rows.token_ids[0, :5] = [1, 2, 3, 4, 5]
            >>> rows.token_ids[1, :3] = [1, 2, 9]
            >>> rows.lengths[:] = 5, 3
            >>> rows.common_prefix(np.array([1, 2, 3, 4, 5, 6]), among=[0, 1])
            (0, 4)
            >>> rows.common_prefix(np.array([1, 2, 3]), among=[0, 1])
            (0, 2)
        """
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
            # Only rows that agree on the whole head are compared further. A row that
            # differs at the best length so far cannot be longer, so one token rules it
            # out.
            for row, num in zip(
                rows[nums == head].tolist(), most[nums == head].tolist(), strict=True
            ):
                if num > longest and self.token_ids[row, longest] == token_ids[longest]:
                    differs = np.flatnonzero(
                        self.token_ids[row, :num] != token_ids[:num]
                    )
                    num = int(differs[0]) if len(differs) else num
                    best_row, longest = (
                        (row, num) if num > longest else (best_row, longest)
                    )
        return (best_row, longest) if longest > 0 else (-1, 0)


def moves_after_removal(row: int, lengths: Ints) -> list[tuple[int, int]]:
    """Return moves (source, target) that close the gap at `row`; similar lengths stay
    together.

    Example: rows 0..7 have 90 tokens, 8..11 have 60, 12..15 have 50, and 16 and 17 have
    20 and 10. In units of LENGTH_STEP the chunks' maxima are 6, 4 and 2. Row 0 ends: the
    longest row of chunk 1 fills the gap, then the longest of chunk 2, then the last row.
    The last row in slot 0 instead would be read up to 96 positions in every step.
        >>> lengths = np.array([90] * 8 + [60] * 4 + [50] * 4 + [20, 10])
        >>> moves_after_removal(0, lengths)
        [(8, 0), (16, 8), (17, 16)]

    Of rows that read the same number of positions, the last one fills the gap.
        >>> moves_after_removal(0, np.array([12] * 11 + [3]))
        [(11, 0)]
    """
    moves, gap, last = [], row, len(lengths) - 1
    # Most often in short texts: one move, and less to compute.
    if lengths[row:].max() <= -(-lengths[last] // LENGTH_STEP) * LENGTH_STEP:
        return [(last, row)] if row < last else []
    starts = np.arange((row // CHUNK + 1) * CHUNK, last + 1, CHUNK)
    longest = (
        np.maximum.reduceat(-(-lengths // LENGTH_STEP), starts).tolist()
        if len(starts)
        else []
    )
    for number, start in enumerate(starts.tolist()):
        # If the longest row of the next chunk is as long, it fills the gap as well, and
        # one move is saved.
        if longest[number] not in longest[number + 1 : number + 2]:
            source = start + int(lengths[start : min(start + CHUNK, last + 1)].argmax())
            moves.append((source, gap))
            gap = source
    if gap != last:
        moves.append((last, gap))
    return moves


class Prefill(NamedTuple):
    """Prefill of `ids` [T] in slot `row`, after copying `num_copied` tokens from slot
    `source`.
    """

    row: int
    ids: Ints
    source: int
    num_copied: int

    @property
    def is_whole(self) -> bool:
        return self.num_copied == len(self.ids)


class Scheduler(RunQueue[Sequence]):
    """Sequences of an engine, and their results until hand_over.

    Invariant: every token carries the version of the weights that computed it.
    """

    def __init__(self, spec: EmbeddedSpec, runner: Runner) -> None:
        super().__init__()
        self._spec = spec
        self._runner = runner
        self.rows = Rows(spec.slots, spec.num_kept, spec.max_length)
        self.num_generated = 0

    @property
    def _num_free(self) -> int:
        # An interrupted sequence keeps its slot until the controller resumes or aborts
        # it: new requests must not overtake it between the two.
        return self._spec.slots - len(self.rows) - len(self.interrupted)

    @property
    def has_work(self) -> bool:
        return bool(self.rows) or bool(self._startable())

    def _startable(self) -> list[Sequence]:
        """Return the queued sequences that may start, in order."""
        serving = (one for one in self.queued if one.weights.may_start)
        return list(itertools.islice(serving, self._num_free))

    def new_sequence(self, asked: Asked, listener: Listener) -> Sequence:
        """Return a sequence, from any thread. Raises Refused (400)."""
        loaded = self._runner.loaded
        token_ids = check_request(asked, self._spec.max_length, loaded.vocab_size)
        request = asked.request
        resumed = token_ids[len(token_ids) - request.num_resumed :].tolist()
        end_ids = frozenset(request.stop_ids)
        if not request.ignore_eos:
            end_ids |= loaded.eos_ids
        stop_watch = matcher = None
        if request.stop:
            stop_ids = [
                loaded.special_ids[text]
                for text in request.stop
                if text in loaded.special_ids
            ]
            stop_watch = StopWatch(
                request.stop, loaded.decode, resumed, stop_ids, request.thinking
            )
        adjusted = None
        if (adjustment := request.adjustment) is not None:
            adjusted = AdjustedRow(
                adjustment, token_ids, request.num_resumed, loaded.vocab_size
            )
        try:
            if request.grammar is not None:
                matcher = loaded.grammars.begin(request.grammar, resumed)
            return Sequence(
                asked, listener, token_ids, end_ids, stop_watch, matcher, adjusted
            )
        except GrammarError as error:
            raise grammar_refusal(request, error) from None

    def abort(self, wanted: set[Sequence]) -> None:
        """End these sequences with their tokens so far; ended ones are ignored."""
        # From the last row on: removing a row moves only rows above it, which were
        # visited already.
        for row in reversed(range(len(self.rows))):
            if self.rows.sequences[row] in wanted:
                self._report(row, "abort")
                self._remove(row)
        self._runner.cache.settle()
        for waiting in (self.queued, self.interrupted):
            for sequence in wanted & waiting.keys():
                del waiting[sequence]
                # Empty: an interrupted sequence reported all tokens when it was
                # interrupted, and a queued one has sampled none since.
                self.report(sequence, Sampled(sequence.number, EMPTY, "abort"))

    def forget(self, weights: Weights) -> None:
        """End the sequences of a dropped adapter."""
        known = (*self.rows.sequences, *self.queued, *self.interrupted)
        self.abort({one for one in known if one.weights is weights})
        self.rows.forget_kept(weights)

    def interrupt(self, weights: Weights) -> int:
        """Report and stop the sequences that run on these weights; return their number.
        Each keeps a slot until it is resumed or aborted.
        """
        rows = self.rows
        stopped = rows.of(weights)
        for row in stopped:
            sequence = rows.sequences[row]
            self._report(row, "interrupted")
            # Its row will be used by others. On resume it is read as a prompt, under
            # the new weights.
            sequence.token_ids = rows.token_ids[row, : rows.lengths[row]].copy()
            sequence.next_logits_V = None
            sequence.is_mixed = False
            sequence.forget_routing()
            self.interrupted[sequence] = None
        for row in reversed(stopped):
            self._remove(row)
        self._runner.cache.settle()
        return len(stopped)

    def weights_changed(self, weights: Weights, *, rereads: bool) -> None:
        """Continue the sequences of these weights under their new version. `rereads`:
        recompute the KV cache without the newest tokens.
        """
        rows, runner = self.rows, self._runner
        # Older weights computed them.
        rows.forget_kept(weights)
        kept = []
        for row in rows.of(weights):
            sequence, length = rows.sequences[row], int(rows.lengths[row])
            sequence.marks.append((length, weights.version))
            # Without logits the row is not a source for new sequences, which would copy
            # the cache of older weights.
            sequence.next_logits_V = None
            # With keep_kv the cache stays mixed until the sequence ends. Then the row
            # is not kept: the next turn would sample over a cache of older weights.
            sequence.is_mixed = not rereads
            if rereads:
                sequence.forget_routing()
            # Without the newest token, which the next decode step reads.
            kept.append((row, rows.token_ids[row, : length - 1], 0))
        if rereads and kept:
            runner.step(kept, adapters=rows.adapters())

    def step(self) -> None:
        """Admit sequences, and sample one token for each running one in one model call."""
        rows, runner, num_running = self.rows, self._runner, len(self.rows)
        # Admission adds rows behind the running ones, so their prefill and this decode
        # step are one call.
        reads = self._admit()
        lengths = rows.lengths[:num_running].copy()
        last_ids = rows.token_ids[np.arange(num_running), lengths - 1]
        adapters = rows.adapters()
        graphs = None if adapters else runner.graphs
        if isinstance(graphs, FusedSteps) and not reads and rows.are_simple():
            settings = rows.settings[:num_running]
            self._append(graphs.draw(last_ids, lengths, settings, settings["seed"]))
            return
        partial = [one for one in reads if not one.is_whole]
        # Before the call, which computes the rest of these prompts over the copied start.
        runner.cache.copy_slots(
            [(one.source, one.row, one.num_copied) for one in partial if one.num_copied]
        )
        jobs = [(one.row, one.ids, one.num_copied) for one in partial]
        computed = runner.step(jobs, last_ids, lengths, adapters)
        for one, logits_V in zip(partial, computed[num_running:], strict=True):
            # A view would keep the logits of the whole call in memory for as long as
            # the sequence runs.
            rows.sequences[one.row].next_logits_V = logits_V.clone()
        # After the call: the source may be a sibling that was read in this very call.
        # Equal prompts cost one prefill and a copy, also if they arrive while the first
        # one is decoding.
        whole = [one for one in reads if one.is_whole]
        runner.cache.copy_slots(
            [(one.source, one.row, one.num_copied) for one in whole]
        )
        for one in whole:
            rows.sequences[one.row].next_logits_V = rows.sequences[
                one.source
            ].next_logits_V
        first = [
            cast(Tensor, rows.sequences[one.row].next_logits_V)[None] for one in reads
        ]
        self._sample(torch.cat([computed[:num_running], *first]) if reads else computed)

    def report_streams(self) -> None:
        rows = self.rows
        streamed = [
            row
            for row, sequence in enumerate(rows.sequences)
            if sequence.is_streamed and sequence.num_told < rows.lengths[row]
        ]
        rows.record_routing(streamed, self._runner.cache.routing)
        for row in streamed:
            self._report(row, "more")

    def _admit(self) -> list[Prefill]:
        """Assign rows to queued sequences. A prompt that continues another prompt of
        this step waits for the next step.
        """
        rows = self.rows
        if not (taken := self._startable()):
            return []
        for sequence in taken:
            del self.queued[sequence]
        whole = {
            (one.owner, one.admitted_ids): row
            for row, one in enumerate(rows.sequences)
            if one.next_logits_V is not None
        }
        standing = [*whole.values(), *rows.kept]
        has_states = bool(self._runner.loaded.mixers)
        if has_states:
            whole.clear()  # the states of these rows have read answers too
        reads = dict[int, Prefill]()
        later = list[Sequence]()
        # Shortest first: a prompt that continues another prompt of this step finds it
        # in `reads`.
        for sequence in sorted(taken, key=lambda one: len(one.token_ids)):
            ids = sequence.token_ids
            key, row = (sequence.owner, ids.tobytes()), len(rows)
            if key in whole:
                source, num_copied = whole[key], len(ids)
            else:
                # Other adapters compute other keys and values for the same tokens. A
                # state cannot be rewound.
                usable = [
                    one
                    for one in (*standing, *reads)
                    if rows.owner(one) == sequence.owner
                    and (not has_states or rows.begins(one, ids))
                ]
                source, num_copied = rows.common_prefix(ids, usable)
                if num_copied < MIN_COPIED:
                    source, num_copied = row, 0
                # The start of this prompt is computed in this step. One step later it
                # can be copied.
                elif source in reads:
                    later.append(sequence)
                    continue
                rows.use_kept(source, num_copied)
                whole[key] = row
            sequence.marks.append((len(ids), sequence.weights.version))
            sequence.admitted_ids = key[1]
            rows.add(sequence)
            reads[row] = Prefill(row, ids, source, num_copied)
        self.put_first(later)
        return list(reads.values())

    def _sample(self, logits_NV: Tensor) -> None:
        """Draw a token for each row, and append it."""
        rows = self.rows
        settings, lengths = rows.settings[: len(rows)], rows.lengths[: len(rows)]
        allowed = {
            row: one.allowed
            for row, one in enumerate(rows.sequences)
            if one.allowed is not None
        }
        adjusted = {
            row: one.adjusted
            for row, one in enumerate(rows.sequences)
            if one.adjusted is not None
        }
        logits_NV = adjust(adjusted, logits_NV)
        mask(allowed, logits_NV)
        num_top = {
            row: num
            for row, one in enumerate(rows.sequences)
            if (num := one.request.top_logprobs)
        }
        self._append(sample(logits_NV, settings, settings["seed"], lengths, num_top))

    def _append(self, drawn: Drawn) -> None:
        """Append a token to each row, and report and remove the rows that end with it."""
        rows = self.rows
        settings, lengths = rows.settings[: len(rows)], rows.lengths[: len(rows)]
        failed = dict[int, Refused]()
        for row in np.flatnonzero(~np.isfinite(drawn.logprobs)).tolist():
            failed[row] = rows.sequences[row].weights.non_finite()
        # The next sequences in these slots multiply masked values by 0.
        if failed:
            self._runner.cache.clear([*failed])
        rows.append(drawn)
        token_ids = drawn.ids
        self.num_generated += len(token_ids)
        pairs = zip(token_ids.tolist(), rows.sequences, strict=True)
        is_stop = np.array([token_id in one.end_ids for token_id, one in pairs], bool)
        for row, sequence in enumerate(rows.sequences):
            if sequence.stop_watch is not None and sequence.stop_watch.is_complete(
                int(token_ids[row])
            ):
                is_stop[row] = True
            if sequence.adjusted is not None:
                sequence.adjusted.take(int(token_ids[row]))
            if sequence.matcher is not None:
                try:
                    sequence.matcher.take(int(token_ids[row]))
                    sequence.allowed = sequence.matcher.allowed()
                except GrammarError as error:
                    failed[row] = grammar_refusal(sequence.request, error)
        is_over = is_stop | (lengths >= settings["limit"])
        is_over[[*failed]] = True
        # only rows above a removed row move
        for row in np.flatnonzero(is_over)[::-1].tolist():
            sequence = rows.sequences[row]
            if row in failed:
                self.hand_over()  # results precede the refusal
                sequence.listener.on_refused(sequence.number, failed[row])
            else:
                self._report(row, "stop" if is_stop[row] else "length")
            # Kept before _remove, which fills this row with another one.
            is_kept = row not in failed and not sequence.is_mixed
            if is_kept and (kept := rows.keep(row)) >= 0:
                self._runner.cache.move_slot(row, kept, int(rows.lengths[kept]) - 1)
            self._remove(row)
        self._runner.cache.settle()

    def _report(self, row: int, then: str) -> None:
        self.report(
            self.rows.sequences[row],
            self.rows.unsent(row, then, self._runner.cache.routing),
        )

    def _remove(self, row: int) -> None:
        rows = self.rows
        for source, target in moves_after_removal(row, rows.lengths[: len(rows)]):
            rows.move(source, target)
            self._runner.cache.move_slot(source, target, int(rows.lengths[target]))
        rows.sequences.pop()
