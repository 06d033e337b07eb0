"""Forward passes over slots: prefill, decode (as CUDA graphs), and scores of given
texts.
"""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from asyncrl.models.devices import pinned, to_device
from asyncrl.weights.ipc import aligned
from asyncrl_servers.embedded.decoder import (
    LoadedModel,
    PlainDecoder,
)
from asyncrl_servers.embedded.fixed_memory import FixedMemory
from asyncrl_servers.embedded.kv_attention import (
    CHUNK,
    LENGTH_STEP,
    NO_INTS,
    Ids,
    Ints,
    Part,
    Pass,
    SlotCache,
    Stretch,
    cut_rows,
    in_force,
    padded_length,
)
from asyncrl_servers.embedded.row_adapters import Adapter, JoinedAdapters, adapted

log = logging.getLogger(__name__)
PREFILL_ROWS = 1024
"""Maximum tokens per prefill call."""
QUERY_CHUNK = 256
"""Maximum tokens of one sequence per score computation."""
EXACT_ROWS = 16
"""A row of a float32 product keeps its bits from this row multiple on."""
GRAPH_STEP = 64
"""Length step of short layouts; long ones use an eighth to a quarter."""
MIN_STEPS = 4
"""Steps before a layout is captured, which costs as much as several steps."""
MOST_GRAPHS = 64
"""Maximum number of captured layouts (LRU)."""

Job = tuple[int, Ids, int]
"""(slot, token ids, number already in the slot)."""
Cut = tuple[int, int, int]
"""(first slot, end, length)."""
Layout = tuple[int, tuple[Cut, ...]]
"""(rows, stretches)."""


class Runner:
    """Runs the model over slots 0..n-1 of a cache, in one thread."""

    def __init__(
        self,
        loaded: LoadedModel,
        slots: int,
        max_length: int,
        *,
        is_exact: bool,
    ) -> None:
        self.loaded = loaded
        self.slots = slots
        self.max_length = max_length
        self.is_exact = is_exact
        self.note = ""
        """What the controller shall log about this engine."""
        self.plain = (
            PlainDecoder.of(loaded.model, max_length) if loaded.shape.is_plain else None
        )
        is_cut = all(mixer.is_continuing for mixer in loaded.mixers)
        # A recurrent layer that cannot continue with several tokens at once would read
        # every chunk after the first token by token.
        self._query_chunk = QUERY_CHUNK if is_cut else max_length
        self._positions = torch.arange(padded_length(max_length), device=loaded.device)
        self.joined = JoinedAdapters()
        self.graphs: DecodeGraphs | None = None
        self.memory: FixedMemory | None = None
        """Of the KV cache (None: torch's)."""
        self._take_cache(slots)

    def fix_cache(self) -> None:
        """Move the empty KV cache to addresses that it keeps. Raises OSError and
        RuntimeError; then it has torch's memory.
        """
        tensors = self.cache.keys + self.cache.values
        num_bytes = sum(aligned(one.nbytes) for one in tensors)
        del tensors
        self._take_cache(0)  # both at once may not fit on the device
        try:
            self.memory = FixedMemory(num_bytes, self.loaded.device)
        finally:
            self._take_cache(self.slots)

    def free_cache(self) -> int:
        """Free the memory of the KV cache, which no slot uses, and return its bytes."""
        self.joined.clear()
        if self.memory is not None:
            return self.memory.unmap()
        num_bytes = self.cache.num_bytes
        self._take_cache(0)
        return num_bytes

    def allocate_cache(self) -> int:
        """Take the memory again; return its bytes. Raises OSError and RuntimeError."""
        if self.memory is not None:
            self.memory.map()
            return self.memory.num_bytes
        self._take_cache(self.slots)
        return self.cache.num_bytes

    def _take_cache(self, slots: int) -> None:
        loaded = self.loaded
        self.cache = SlotCache(
            loaded.shape,
            slots,
            self.max_length,
            loaded.dtype,
            loaded.device,
            memory=self.memory,
        )

    def step(
        self,
        jobs: Sequence[Job],
        last_ids: Ints = NO_INTS,
        lengths: Ints = NO_INTS,
        adapters: Sequence[Adapter] = (),
    ) -> Tensor:
        """Decode slots 0..n-1 after `last_ids` [n] at position `lengths` - 1, and
        prefill slots. `adapters`: of each slot; (): all have the run's own.

        Returns the next logits [n + jobs, V]. A call reads up to PREFILL_ROWS tokens.
        """
        graphs = None if adapters else self.graphs
        if graphs is not None and not jobs:
            return graphs.step(last_ids, lengths)
        # Fused steps decode only. cat copies their logits, which the next step
        # overwrites.
        if graphs is not None and graphs.is_alone and len(last_ids):
            return torch.cat([graphs.step(last_ids, lengths), self.step(jobs)])
        calls = cut_calls(jobs, self._query_chunk)
        # The decoded rows share a call with the start of the prompts, so a step with
        # short prompts is a single call.
        logits = [self._step_call(last_ids, lengths, calls[0], adapters)]
        logits += [
            self._step_call(NO_INTS, NO_INTS, parts, adapters) for parts in calls[1:]
        ]
        return torch.cat(logits) if len(logits) > 1 else logits[0]

    def _step_call(
        self,
        last_ids: Ints,
        lengths: Ints,
        parts: Sequence[Part],
        adapters: Sequence[Adapter],
    ) -> Tensor:
        """Return logits [n + K, V] of n slots and K ending sequences."""
        device, num_decoded = self.loaded.device, len(last_ids)
        worth = self.loaded.shape.stretch_worth(device)
        cuts = cut_rows(-(-lengths // LENGTH_STEP) * LENGTH_STEP, worth)
        stretches = self.decode_stretches(cuts, to_device(lengths - 1, device))
        stretches += self.read_stretches(parts)
        # Logits are [rows, V]. Only rows that need them pass the head: decoded rows,
        # and the last row of each prompt that ends in this call.
        kept, row = list(range(num_decoded)), num_decoded
        for _, all_ids, start, end in parts:
            row += end - start
            if end == len(all_ids):
                kept.append(row - 1)
        logits = self._call(
            stretches, parts, kept if parts else None, last_ids, lengths, adapters
        )
        return logits[: len(kept)]

    def decode_stretches(
        self, cuts: Sequence[Cut], positions_R: Tensor
    ) -> list[Stretch]:
        own = positions_R[:, None, None, None, None]
        return [
            Stretch(start, end, 1, length, self._positions[:length], own[start:end])
            for start, end, length in cuts
        ]

    def read_stretches(self, parts: Sequence[Part]) -> list[Stretch]:
        stretches = []
        for first, last, start, end in join_parts(parts):
            length = padded_length(end)
            own = self._positions[None, None, None, start:end, None]
            positions = self._positions[:length]
            stretches.append(Stretch(first, last, end - start, length, positions, own))
        return stretches

    def _num_rows(self, needed: int) -> int:
        if not self.is_exact:
            return needed
        return -(-(needed + self.loaded.spare_rows) // EXACT_ROWS) * EXACT_ROWS

    def _call(
        self,
        stretches: list[Stretch],
        parts: Sequence[Part],
        kept: Sequence[int] | None,
        last_ids: Ints = NO_INTS,
        lengths: Ints = NO_INTS,
        adapters: Sequence[Adapter] = (),
    ) -> Tensor:
        """Return logits [rows, V] of rows `kept` and padding (None: of all rows)."""
        ids = np.concatenate(
            [last_ids, *(all_ids[start:end] for _, all_ids, start, end in parts)]
        )
        slots = np.concatenate(
            [
                np.arange(len(lengths)),
                *(np.full(end - start, slot) for slot, _, start, end in parts),
            ]
        )
        positions = np.concatenate(
            [lengths - 1, *(np.arange(start, end) for _, _, start, end in parts)]
        )
        device, rows = self.loaded.device, self._num_rows(len(ids))
        padded = np.zeros((2, rows), dtype=np.int64)
        padded[:, : len(ids)] = ids, positions
        # One transfer for all four arrays: on CUDA each transfer has a fixed cost.
        packed = np.concatenate((padded.reshape(-1), slots, positions))
        sizes = [rows, rows, len(ids), len(ids)]
        ids_R, positions_R, slots_N, offsets_N = to_device(
            packed, device
        ).split_with_sizes(sizes)
        pass_ = Pass(
            self.cache,
            stretches,
            slots_N,
            offsets_N,
            self.is_exact,
            positions=positions_R,
        )
        # In exact mode the head's product needs padding too, or its bits would depend
        # on the number of prompts that end here.
        keep = None if kept is None else self._padded(kept)
        of_rows = [adapters[slot] for slot in slots] if adapters else []
        of_layers = of_head = self.joined.of_rows(of_rows, rows)
        if kept is not None and keep is not None:
            of_kept = [of_rows[row] for row in kept] if adapters else []
            of_head = self.joined.of_rows(of_kept, len(keep))
        with adapted(of_layers, of_head):
            if self.plain is not None:
                return self.plain.forward(pass_, ids_R, positions_R, keep)
            # A cut has one adapter, so with adapters each slot is a cut.
            num = len(last_ids)
            size = 1 if adapters else max(1, num)
            spans = [(slot, slot + size, 1, False) for slot in range(0, num, size)]
            spans += [
                (slot, slot + 1, end - start, start == 0)
                for slot, _, start, end in parts
            ]
            pass_.cuts = self.cache.states.cut(spans, adapters)
            logits = self._call_model(pass_, ids_R, positions_R, keep)
        if (routed := self.loaded.routed) is not None:
            places = to_device(slots, device), to_device(positions, device)
            self.cache.routing[places] = routed.take()[: len(ids)]
        return logits

    def _call_model(
        self, pass_: Pass, ids_R: Tensor, positions_R: Tensor, keep: Tensor | None
    ) -> Tensor:
        """Return logits [rows, V] of transformers' own forward."""
        # [R, 1] is faster, but logits_to_keep and cuts are along the other axis.
        axis = int(keep is None and not pass_.cuts)
        options = {} if keep is None else {"logits_to_keep": keep}
        with in_force(pass_, self.max_length):
            answer = self.loaded.model(
                input_ids=ids_R.unsqueeze(axis),
                position_ids=positions_R.unsqueeze(axis),
                use_cache=False,
                return_dict=True,
                **options,
            )
        return cast(Tensor, answer.logits.squeeze(axis))

    def _padded(self, rows: Sequence[int]) -> Tensor:
        """Return numbers of rows, int64, with padding as in any call."""
        padded = np.zeros(self._num_rows(max(1, len(rows))), dtype=np.int64)
        padded[: len(rows)] = rows
        return to_device(padded, self.loaded.device)


def cut_calls(jobs: Sequence[Job], query_chunk: int) -> list[list[Part]]:
    calls: list[list[Part]] = [[]]
    room = PREFILL_ROWS
    for slot, ids, first in jobs:
        for start in range(first, len(ids), query_chunk):
            end = min(start + query_chunk, len(ids))
            # A part is never cut to fit, so a prompt's parts are the same in any
            # company. Without chunks a part may be longer than a whole call.
            if end - start > room and calls[-1]:
                calls.append([])
                room = PREFILL_ROWS
            calls[-1].append((slot, ids, start, end))
            room -= end - start
    return calls


def join_parts(parts: Sequence[Part]) -> list[list[int]]:
    """Return [first slot, end, start, end] of neighbors that read the same positions, up
    to QUERY_CHUNK tokens.

    Example: after new weights, three interrupted texts are read again.
        >>> join_parts([(0, [5, 6], 0, 2), (1, [5, 7], 0, 2), (2, [5, 6, 8], 0, 3)])
        [[0, 2, 0, 2], [2, 3, 0, 3]]
    """
    joined = [[0] * 4]
    for slot, _, start, end in parts:
        last = joined[-1]
        has_room = slot - last[0] < QUERY_CHUNK // (end - start)
        if has_room and last[1:] == [slot, start, end]:
            last[1] += 1
        else:
            joined.append([slot, slot + 1, start, end])
    return joined[1:]


class DecodeGraphs:
    """Decode steps of up to `most_rows` rows as CUDA graphs; not in exact mode.

    Moved weights or caches drop all graphs. Rows and lengths are padded so that layouts
    recur. A layout is captured after min_steps steps.
    """

    min_steps = MIN_STEPS
    is_alone = False
    """Prompts are read in calls of their own."""
    num_inputs = 3
    """Token id, position, and the source of the key of each row."""

    def __init__(self, runner: Runner, decoder: PlainDecoder, most_rows: int) -> None:
        self._runner = runner
        self._decoder = decoder
        self._most_rows = most_rows
        self._parameters = [*runner.loaded.model.parameters()]
        self._inputs = torch.zeros(
            self.num_inputs, most_rows, dtype=torch.int64, device=runner.loaded.device
        )
        self._addresses: list[int] = []
        self._num_steps = Counter[Layout]()
        self._replays: OrderedDict[Layout, Callable[[], None]] = OrderedDict()
        self.is_refused = False
        """A capture failed: steps go on without graphs."""
        self.drop()

    def step(self, last_ids: Ints, lengths: Ints) -> Tensor:
        """Return logits [n, V]; the next step overwrites them."""
        # A graph reads the addresses of its capture. After a swap of pointers, or with
        # a new cache, it would read old or freed memory without any error.
        if self._addresses != self._addresses_now():
            self.drop()
            self._prepare()
            # After _prepare: fused steps merge weights, which moves them.
            self._addresses = self._addresses_now()
        layout = self._fill(last_ids, lengths)
        logits = self._take_logits()
        replay = self._replay_of(layout, logits)
        if replay is None:
            self._compute(layout, logits)
        else:
            replay()
        return logits[: len(last_ids)]

    def _addresses_now(self) -> list[int]:
        cache = self._runner.cache
        return [
            one.data_ptr() for one in (*self._parameters, *cache.keys, *cache.values)
        ]

    def _prepare(self) -> None:
        """Prepare for weights at other addresses."""

    def drop(self) -> None:
        self._addresses = []
        self._replays.clear()
        self._num_steps.clear()
        self._logits: Tensor | None = None
        self._capturing: tuple[torch.cuda.Stream, Any] | None = None
        """Stream and memory of all graphs: a replay overwrites other graphs' results.
        """

    def capture(self, function: Callable[[], None]) -> Callable[[], None]:
        """Return a function that replays `function`, which runs once before the
        capture, to initialize libraries. Raises RuntimeError.
        """
        if self._capturing is None:
            self._capturing = torch.cuda.Stream(), torch.cuda.graph_pool_handle()  # type: ignore[no-untyped-call]
        stream, pool = self._capturing
        here, graph = torch.cuda.current_stream(), torch.cuda.CUDAGraph()
        stream.wait_stream(here)
        try:
            with torch.cuda.stream(stream):
                function()
            here.wait_stream(stream)
            # Other threads may allocate memory during the capture.
            with torch.cuda.graph(
                graph, pool=pool, stream=stream, capture_error_mode="thread_local"
            ):
                function()
        finally:
            torch.cuda.set_stream(here)  # a failed capture leaves its own stream
        return graph.replay

    def _fill(self, last_ids: Ints, lengths: Ints) -> Layout:
        """Padding rows repeat the first row's key; their slots may be in use."""
        num, most_length = len(last_ids), padded_length(self._runner.max_length)
        # Numbers of rows and lengths are rounded, so that few layouts exist: a layout
        # is captured only after it has recurred.
        rows = min(
            -(-num // CHUNK) * CHUNK if num > CHUNK // 2 else num, self._most_rows
        )
        inputs, padded = (
            np.zeros((3, self._most_rows), np.int64),
            np.ones(rows, np.int64),
        )
        inputs[:, :num] = last_ids, lengths - 1, np.arange(num)
        inputs[:, num:rows] = inputs[:, :1]
        padded[:num] = lengths
        self._inputs.copy_(pinned(inputs, self._inputs.device), non_blocking=True)
        steps = np.maximum(
            GRAPH_STEP, 1 << np.maximum(np.log2(padded).astype(np.int64) - 2, 0)
        )
        padded = np.minimum(-(-padded // steps) * steps, most_length)
        return rows, tuple(
            cut_rows(
                padded, self._runner.loaded.shape.stretch_worth(self._inputs.device)
            )
        )

    @torch.inference_mode(False)
    def _take_logits(self) -> Tensor:
        if self._logits is None:
            head = self._runner.loaded.model.lm_head.weight
            self._logits = torch.zeros(
                self._most_rows, len(head), dtype=head.dtype, device=head.device
            )
        return self._logits

    def _compute(self, layout: Layout, logits: Tensor) -> None:
        (rows, cuts), cache = layout, self._runner.cache
        ids_R, positions_R, slots_R = self._inputs[:, :rows].unbind()
        stretches = self._runner.decode_stretches(cuts, positions_R)
        pass_ = Pass(
            cache, stretches, slots_R, positions_R, is_exact=False, source=slots_R
        )
        logits[:rows] = self._decoder.forward(pass_, ids_R, positions_R, None)

    def _replay_of(self, layout: Layout, logits: Tensor) -> Callable[[], None] | None:
        if layout in self._replays:
            self._replays.move_to_end(layout)
            return self._replays[layout]
        # A bound for the table. Layouts that recur are counted again soon.
        if len(self._num_steps) >= 16 * MOST_GRAPHS:
            self._num_steps.clear()
        self._num_steps[layout] += 1
        if self._num_steps[layout] <= self.min_steps or self.is_refused:
            return None
        try:
            replay = self.capture(partial(self._compute, layout, logits))
        except RuntimeError as error:
            # Not an error: the same kernels run one by one, which is only slower.
            self.is_refused = True
            self._replays.clear()
            what = "decode steps go on without CUDA graphs: a step of %d rows cannot be captured: %s"
            log.warning(what, layout[0], error)
            return None
        if len(self._replays) >= MOST_GRAPHS:
            self._replays.popitem(last=False)
        self._replays[layout] = replay
        return replay
