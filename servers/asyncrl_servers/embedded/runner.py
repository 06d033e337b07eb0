"""Forward passes of the model over slots: prefill, decode, and the prompts it remembers. Knows no request, no
sampling.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from asyncrl_servers.embedded.decoder import LoadedModel
from asyncrl_servers.embedded.kv_attention import (
    LENGTH_STEP,
    DecodePass,
    Pass,
    Segment,
    SlotCache,
    in_force,
    padded_length,
)
from asyncrl_servers.embedded.prefill import PlainDecoder, PrefillItem, PrefillPass
from asyncrl_servers.embedded.sequence import cut_rows

PREFILL_ROWS = 1024
"""Most tokens in one prefill call; a longer prompt takes several."""
EXACT_ROWS = 16
"""Exact calls have a multiple of this many rows: the size from which a row of a float32 product keeps its
bits.
"""


@dataclass(frozen=True, slots=True)
class Remembered:
    """A prefilled prompt of T tokens: keys and values [layers, kv_heads, T, head_dim], logits [V] after its
    last token.
    """

    keys: Tensor
    values: Tensor
    logits: Tensor

    @property
    def num_bytes(self) -> int:
        """Memory it takes."""
        return self.keys.nbytes + self.values.nbytes + self.logits.nbytes


class PromptCache:
    """The prompts used last, at most `max_bytes`. Must be cleared at every weight swap: it never outlives its
    weights.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes, self.num_bytes = max_bytes, 0
        self._entries: OrderedDict[tuple[int, ...], Remembered] = OrderedDict()

    def get(self, prompt_ids: tuple[int, ...]) -> Remembered | None:
        """The entry of exactly this prompt."""
        entry = self._entries.get(prompt_ids)
        if entry is not None:
            self._entries.move_to_end(prompt_ids)
        return entry

    def put(self, prompt_ids: tuple[int, ...], entry: Remembered) -> None:
        """Remember it, and forget what was not used for longest until all fit."""
        if entry.num_bytes > self.max_bytes or prompt_ids in self._entries:
            return
        self._entries[prompt_ids] = entry
        self.num_bytes += entry.num_bytes
        while self.num_bytes > self.max_bytes:
            self.num_bytes -= self._entries.popitem(last=False)[1].num_bytes

    def clear(self) -> None:
        """Forget all."""
        self._entries.clear()
        self.num_bytes = 0


class Runner:
    """Runs the model over a slot cache. One thread owns it.

    Sequences stand in slots 0..n-1 without a gap (the caller sees to it), so that decoding reads a plain
    view.
    """

    def __init__(
        self, loaded: LoadedModel, slots: int, max_length: int, *, is_exact: bool, prompt_cache_bytes: int
    ) -> None:
        self.loaded, self.max_length, self.is_exact, self._slots = loaded, max_length, is_exact, slots
        self.cache = self._allocate(slots)
        self._plain = PlainDecoder.of(loaded.model, max_length)
        self.prompts = PromptCache(prompt_cache_bytes)
        self.num_prefilled = 0
        """Sequences prefilled so far: a group of n that shares its prompt counts once."""
        kv_heads, positions = self.cache.keys.shape[2], self.cache.keys.shape[3]
        self._head_rows = torch.arange(slots * kv_heads, device=loaded.device) * positions
        self._kv_heads = kv_heads
        self._positions = torch.arange(positions, device=loaded.device)

    def free_cache(self) -> int:
        """Drop the KV cache, whose bytes it returns, and all remembered prompts. Nothing can run until
        take_cache.
        """
        num_bytes = self.cache.num_bytes
        self.prompts.clear()
        self.cache = self._allocate(0)
        return num_bytes

    def num_cache_bytes(self) -> int:
        """What take_cache takes."""
        loaded = self.loaded
        return (
            loaded.shape.bytes_per_token(loaded.dtype.itemsize) * padded_length(self.max_length) * self._slots
        )

    def take_cache(self) -> int:
        """A KV cache as at the start; returns its bytes."""
        self.cache = self._allocate(self._slots)
        return self.cache.num_bytes

    @torch.inference_mode(False)
    def _allocate(self, slots: int) -> SlotCache:
        loaded = self.loaded
        return SlotCache.allocate(loaded.shape, slots, self.max_length, loaded.dtype, loaded.device)

    def prefill(self, jobs: Sequence[tuple[int, Sequence[int]]]) -> Tensor:
        """Fill slots with sequences, each (slot, token ids); returns the logits after each last token, [jobs,
        V].
        """
        self.num_prefilled += len(jobs)
        results: list[Tensor] = []
        items: list[PrefillItem] = []
        ids: list[int] = []
        for slot, sequence in jobs:
            start = 0
            while start < len(sequence):
                end = min(len(sequence), start + PREFILL_ROWS - len(ids))
                items.append(PrefillItem(slot, start, end, len(ids)))
                ids.extend(sequence[start:end])
                if len(ids) == PREFILL_ROWS:
                    results.append(self._prefill_call(items, ids, jobs))
                    items, ids = [], []
                start = end
        if items:
            results.append(self._prefill_call(items, ids, jobs))
        return torch.cat(results) if len(results) > 1 else results[0]

    def _prefill_call(
        self, items: list[PrefillItem], ids: list[int], jobs: Sequence[tuple[int, Sequence[int]]]
    ) -> Tensor:
        """Logits [K, V] after the K sequences that end in this call."""
        lengths = {slot: len(sequence) for slot, sequence in jobs}
        ends = [item.row + item.end - item.start - 1 for item in items if item.end == lengths[item.slot]]
        rows = self._num_rows(len(ids))
        positions = np.zeros(rows, dtype=np.int64)
        for item in items:
            positions[item.row : item.row + item.end - item.start] = np.arange(item.start, item.end)
        keep = np.zeros(self._num_rows(len(ends)) if ends else 1, dtype=np.int64)
        keep[: len(ends)] = ends
        padded = np.zeros(rows, dtype=np.int64)
        padded[: len(ids)] = ids
        pass_ = PrefillPass(self.cache, items, self.loaded.num_heads, is_exact=self.is_exact)
        logits = self._call(
            pass_, *(torch.from_numpy(array).to(self.loaded.device) for array in (padded, positions, keep))
        )
        return logits[: len(ends)]

    def decode(self, last_ids: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64]) -> Tensor:
        """One step of the sequences in slots 0..n-1: logits [n, V] after `last_ids` [n], token number
        `lengths` - 1 of each.
        """
        n = len(last_ids)
        rows = self._num_rows(n)
        packed = np.zeros((2, rows), dtype=np.int64)
        packed[0, :n] = last_ids
        packed[1, :n] = lengths - 1
        packed_2R = torch.from_numpy(packed).to(self.loaded.device)
        positions_n = packed_2R[1, :n]
        segments = []
        for start, end, length in cut_rows(
            -(-lengths // LENGTH_STEP) * LENGTH_STEP, self._kv_heads * self.loaded.shape.head_dim
        ):
            invalid = self._positions[:length] > positions_n[start:end, None]
            segments.append(Segment(start, end, length, invalid[:, None, None, :]))
        flat_index = (self._head_rows[: n * self._kv_heads].view(n, -1) + positions_n[:, None]).view(-1)
        return self._call(
            DecodePass(self.cache, n, segments, flat_index, self.is_exact), packed_2R[0], packed_2R[1]
        )[:n]

    def remember(self, slot: int, prompt_ids: tuple[int, ...], logits_V: Tensor) -> None:
        """Keep a prefilled prompt for requests to come."""
        length = len(prompt_ids)
        keys, values = self.cache.keys[:, slot, :, :length], self.cache.values[:, slot, :, :length]
        if keys.nbytes + values.nbytes + logits_V.nbytes <= self.prompts.max_bytes:
            self.prompts.put(prompt_ids, Remembered(keys.clone(), values.clone(), logits_V.clone()))

    def recall(self, slot: int, prompt_ids: tuple[int, ...]) -> Tensor | None:
        """Fill a slot with a remembered prompt and return the logits_V after it; None if it is not
        remembered.
        """
        entry = self.prompts.get(prompt_ids)
        if entry is None:
            return None
        self.cache.keys[:, slot, :, : len(prompt_ids)] = entry.keys
        self.cache.values[:, slot, :, : len(prompt_ids)] = entry.values
        return entry.logits

    def _num_rows(self, needed: int) -> int:
        if not self.is_exact:
            return needed
        return -(-(needed + self.loaded.spare_rows) // EXACT_ROWS) * EXACT_ROWS

    def _call(self, pass_: Pass, ids_R: Tensor, positions_R: Tensor, keep: Tensor | None = None) -> Tensor:
        """Logits of the rows `keep` (None: all), [rows, V]."""
        if self._plain is not None:
            return self._plain.forward(pass_, ids_R, positions_R, keep)
        with in_force(pass_, self.max_length):
            if keep is None:  # [R, 1] is a little faster, but logits_to_keep chooses along the other axis
                ids_R1, positions_R1 = ids_R[:, None], positions_R[:, None]
                logits = self.loaded.model(
                    input_ids=ids_R1, position_ids=positions_R1, use_cache=False, return_dict=True
                ).logits[:, 0]
            else:
                ids_1R, positions_1R = ids_R[None], positions_R[None]
                logits = self.loaded.model(
                    input_ids=ids_1R,
                    position_ids=positions_1R,
                    use_cache=False,
                    logits_to_keep=keep,
                    return_dict=True,
                ).logits[0]
        return cast(Tensor, logits)
