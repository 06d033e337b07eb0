"""Forward passes of the model over slots: prefill and decode."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional

from asyncrl_servers.embedded.decoder import LoadedModel
from asyncrl_servers.embedded.kv_attention import (
    LENGTH_STEP,
    Pass,
    SlotCache,
    Stretch,
    in_force,
    padded_length,
)

PREFILL_ROWS = 1024
"""Most tokens in one prefill call; more take several."""
QUERY_CHUNK = 256
"""Most tokens of one sequence whose scores are computed at once."""
EXACT_ROWS = 16
"""Exact calls have a multiple of this many rows: the size from which a row of a float32 product keeps its
bits.
"""
QUERY_STEP = 16
"""The tokens of a sequence are filled up to a multiple of this many queries, so that several go together."""
SCORE_FLOATS = 2**21
"""Most scores, a query head of each KV head, of a stretch of several slots."""
CHUNK = 8
"""Decoding slots are joined to stretches chunk by chunk."""
STRETCH_FLOATS = 30_000
"""Keys read in the time that one more stretch costs (measured: 30 us a layer, on one CPU thread)."""

MODEL_TYPES = frozenset({"llama", "mistral", "qwen2", "qwen3"})
STATIC_ROPE = frozenset({"default", "linear", "llama3"})
"""Kinds of rotary embedding whose angles depend on the position alone."""

Ints = npt.NDArray[np.int64]
Ids = Sequence[int] | Ints
NO_INTS = np.zeros(0, np.int64)
Job = tuple[int, Ids, int]
"""(slot, token ids, how many of them the slot has already)."""
Share = tuple[int, int, int]
"""(slot of a job, another slot, how many of the first tokens are the other's, too)."""
Part = tuple[int, Ids, int, int]
"""(slot, its token ids, start, end): tokens of a job that go through one call."""


class Runner:
    """Runs the model over a slot cache. One thread owns it.

    Sequences stand in slots 0..n-1 without a gap (the caller guarantees it), so that decoding reads a plain
    view.
    """

    def __init__(self, loaded: LoadedModel, slots: int, max_length: int, *, is_exact: bool) -> None:
        self.loaded, self.slots, self.max_length, self.is_exact = loaded, slots, max_length, is_exact
        self._plain = PlainDecoder.of(loaded.model, max_length)
        self._positions = torch.arange(padded_length(max_length), device=loaded.device)
        self.take_cache(slots)

    @property
    def cache_bytes(self) -> int:
        """What take_cache takes."""
        return self.slots * self.loaded.shape.slot_bytes(self.max_length, self.loaded.dtype.itemsize)

    def take_cache(self, slots: int) -> None:
        """A new KV cache; with 0 slots there is none, and nothing can run."""
        loaded = self.loaded
        self.cache = SlotCache(loaded.shape, slots, self.max_length, loaded.dtype, loaded.device)

    def prefill(self, jobs: Sequence[Job]) -> Tensor:
        """Fill slots with sequences; returns the logits after each last token, [jobs, V]."""
        return self.step(NO_INTS, NO_INTS, jobs)

    def decode(self, last_ids: Ints, lengths: Ints) -> Tensor:
        """One step of the sequences in slots 0..n-1: logits [n, V] after `last_ids` [n], token number
        `lengths` - 1 of each.
        """
        return self.step(last_ids, lengths, ())

    def step(
        self, last_ids: Ints, lengths: Ints, jobs: Sequence[Job], shares: Sequence[Share] = ()
    ) -> Tensor:
        """decode() and prefill() in one call of the model, as far as PREFILL_ROWS allows: [n + jobs, V].

        What is computed for a slot is written to those that share it, too; the job of one that shares comes
        after that of the other, and counts the shared tokens among those that its slot has.
        """
        calls = cut_calls(jobs)
        logits = [self._step_call(last_ids, lengths, calls[0], shares)]
        logits += [self._step_call(NO_INTS, NO_INTS, parts, shares) for parts in calls[1:]]
        return torch.cat(logits) if len(logits) > 1 else logits[0]

    def _step_call(
        self, last_ids: Ints, lengths: Ints, parts: Sequence[Part], shares: Sequence[Share]
    ) -> Tensor:
        """Logits [n + K, V] of a step of n slots, and after the K sequences that end in `parts`."""
        device, num_decoded = self.loaded.device, len(last_ids)
        own = torch.from_numpy(lengths - 1).to(device)[:, None, None, None, None]
        floats = self.loaded.shape.kv_heads * self.loaded.shape.head_dim
        stretches = [
            Stretch(start, end, 1, length, self._positions[:length] > own[start:end])
            for start, end, length in cut_rows(-(-lengths // LENGTH_STEP) * LENGTH_STEP, floats)
        ]
        stretches += self._read_stretches(parts, num_decoded)
        kept, row = list(range(num_decoded)), num_decoded
        for _, all_ids, start, end in parts:
            row += end - start
            if end == len(all_ids):
                kept.append(row - 1)
        keep = None
        if parts:
            keep = np.zeros(self._num_rows(max(1, len(kept))), dtype=np.int64)
            keep[: len(kept)] = kept
        logits = self._call(
            stretches,
            written(lengths - 1, parts, shares),
            np.concatenate([lengths - 1, *(np.arange(start, end) for _, _, start, end in parts)]),
            np.concatenate([last_ids, *(all_ids[start:end] for _, all_ids, start, end in parts)]),
            None if keep is None else torch.from_numpy(keep).to(device),
        )
        return logits[: len(kept)]

    def _read_stretches(self, parts: Sequence[Part], row: int) -> Iterator[Stretch]:
        """Stretches of the parts, whose rows begin at `row`: neighbouring slots with as many padded queries
        are one.
        """
        groups: list[list[Part]] = []
        for part in parts:
            group, tokens = groups[-1] if groups else [], self._padded(part)
            is_next = bool(group) and part[0] == group[-1][0] + 1 and tokens == self._padded(group[-1])
            length = padded_length(max(end for *_, end in (*group, part)))
            floats = (len(group) + 1) * tokens * length * self.loaded.shape.kv_heads
            if is_next and floats <= SCORE_FLOATS:
                group.append(part)
            else:
                groups.append([part])
        device = self.loaded.device
        for group in groups:
            tokens, length = self._padded(group[0]), padded_length(max(end for *_, end in group))
            starts = np.array([start for _, _, start, _ in group])[:, None]
            counts = np.array([end - start for _, _, start, end in group])[:, None]
            firsts = row + np.cumsum(counts, axis=0) - counts
            places = np.arange(tokens)
            gather = firsts + np.minimum(places, counts - 1)
            positions = torch.from_numpy(starts + places).to(device)[:, None, None, :, None]
            yield Stretch(
                group[0][0],
                group[-1][0] + 1,
                tokens,
                length,
                self._positions[:length] > positions,
                torch.from_numpy(gather.reshape(-1)).to(device),
                torch.from_numpy(np.flatnonzero(places < counts)).to(device),
            )
            row += int(counts.sum())

    def _padded(self, part: Part) -> int:
        """Queries of this part, and others beside them that are thrown away, so that products have bits of
        their own.
        """
        _, _, start, end = part
        return -(-(end - start) // QUERY_STEP) * QUERY_STEP if end - start > 1 else 1

    def _num_rows(self, needed: int) -> int:
        if not self.is_exact:
            return needed
        return -(-(needed + self.loaded.spare_rows) // EXACT_ROWS) * EXACT_ROWS

    def _call(
        self, stretches: list[Stretch], writes: Writes, positions: Ints, ids: Ints, keep: Tensor | None
    ) -> Tensor:
        """Logits of the rows `keep` (None: all), [rows, V]; row i is token `ids`[i] at `positions`[i]."""
        device, rows = self.loaded.device, self._num_rows(len(ids))
        _, _, kv_heads, num_positions, _ = self.cache.keys.shape
        heads = writes.slots[:, None] * kv_heads + np.arange(kv_heads)
        num_written = 0 if writes.rows is None else len(writes.rows)
        packed = np.zeros(2 * rows + num_written + heads.size, dtype=np.int64)
        packed[: len(ids)], packed[rows : rows + len(ids)] = ids, positions
        packed[2 * rows : 2 * rows + num_written] = NO_INTS if writes.rows is None else writes.rows
        packed[2 * rows + num_written :] = (heads * num_positions + writes.positions[:, None]).reshape(-1)
        on_device = torch.from_numpy(packed).to(device)
        ids_R, positions_R = on_device[:rows], on_device[rows : 2 * rows]
        source = None if writes.rows is None else on_device[2 * rows : 2 * rows + num_written]
        flat_index = on_device[2 * rows + num_written :]
        pass_ = Pass(self.cache, stretches, flat_index, self.is_exact, source)
        if self._plain is not None:
            return self._plain.forward(pass_, ids_R, positions_R, keep)
        # [R, 1] is a little faster, but logits_to_keep chooses along the other axis.
        axis, how = (1, {}) if keep is None else (0, {"logits_to_keep": keep})
        with in_force(pass_, self.max_length):
            answer = self.loaded.model(
                input_ids=ids_R.unsqueeze(axis),
                position_ids=positions_R.unsqueeze(axis),
                use_cache=False,
                return_dict=True,
                **how,
            )
        if (routed := self.loaded.routed) is not None:
            rows_read = slice(len(writes.slots)) if source is None else source
            slots, places = (torch.from_numpy(one).to(device) for one in (writes.slots, writes.positions))
            self.cache.routing[slots, places] = routed.take()[rows_read]
        return cast(Tensor, answer.logits.squeeze(axis))


def cut_calls(jobs: Sequence[Job]) -> list[list[Part]]:
    """The parts of each call, one call at least."""
    calls: list[list[Part]] = [[]]
    room = PREFILL_ROWS
    for slot, ids, first in jobs:
        for start in range(first, len(ids), QUERY_CHUNK):
            end = min(start + QUERY_CHUNK, len(ids))
            if end - start > room:
                calls.append([])
                room = PREFILL_ROWS
            calls[-1].append((slot, ids, start, end))
            room -= end - start
    return calls


class Writes(NamedTuple):
    """Where the keys of a call go: those of row `rows`[i] (None: i) to position `positions`[i] of slot
    `slots`[i].
    """

    rows: Ints | None
    slots: Ints
    positions: Ints


def written(decoded: Ints, parts: Sequence[Part], shares: Sequence[Share]) -> Writes:
    """Rows are those of the slots 0..n-1, at the positions `decoded` [n], and then of the parts; what a slot
    shares of its parts goes to the other slot as well.
    """
    if not shares:
        slots = [np.full(end - start, slot) for slot, _, start, end in parts]
        positions = [np.arange(start, end) for _, _, start, end in parts]
        return Writes(
            None, np.concatenate([np.arange(len(decoded)), *slots]), np.concatenate([decoded, *positions])
        )
    of_slot, row = dict[int, tuple[int, Ints]](), len(decoded)
    """First position that is written, and the rows from there on."""
    for slot, _, start, end in parts:
        first, rows = of_slot.get(slot, (start, NO_INTS))
        of_slot[slot] = first, np.concatenate([rows, np.arange(row, row + end - start)])
        row += end - start
    for source, slot, length in shares:
        first, rows = of_slot.get(source, (length, NO_INTS))
        if first < length:
            own = of_slot[slot][1] if slot in of_slot else NO_INTS
            of_slot[slot] = first, np.concatenate([rows[: length - first], own])
    sizes = [len(rows) for _, rows in of_slot.values()]
    return Writes(
        np.concatenate([np.arange(len(decoded)), *(rows for _, rows in of_slot.values())]),
        np.concatenate([np.arange(len(decoded)), np.repeat(list(of_slot), sizes)]),
        np.concatenate([decoded, *(np.arange(first, first + len(rows)) for first, rows in of_slot.values())]),
    )


def cut_rows(padded_lengths: Ints, floats_per_position: int) -> list[tuple[int, int, int]]:
    """Stretches (start, end, length) that cover the rows [n]; each row's padded length is at most its
    stretch's.

    Neighbouring chunks are joined unless the positions saved are worth a stretch of their own: a long
    sequence does not make the short ones pay.
    """
    worth = STRETCH_FLOATS / floats_per_position
    stretches: list[tuple[int, int, int]] = []
    for chunk_start in range(0, len(padded_lengths), CHUNK):
        chunk_end = min(chunk_start + CHUNK, len(padded_lengths))
        length = int(padded_lengths[chunk_start:chunk_end].max())
        start, end, joined = stretches[-1] if stretches else (0, 0, length)
        common = max(joined, length)
        wasted = (end - start) * (common - joined) + (chunk_end - chunk_start) * (common - length)
        if wasted > worth:
            stretches.append((chunk_start, chunk_end, length))
        else:
            stretches[-1:] = [(start, chunk_end, common)]
    return stretches


def moves_after_removal(row: int, lengths: Ints) -> list[tuple[int, int]]:
    """Moves (source, target), in order, that close the gap at `row` among rows [n]: only rows above it move.

    Each chunk gets the longest row of those behind it, so that like lengths stand together: from the last of
    the chunks behind it whose longest are as long as the next one's, which saves the moves between them.
    """
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


class PlainDecoder:
    """The forward pass of Llama-like models without the wrappers of transformers, over the model's own
    modules, so that it follows every swap of their weights.

    A small model's decode step is mostly Python, and half of it goes through transformers' layers of calls.
    Llama, Mistral, Qwen2 and Qwen3 share one plain shape (RMSNorm, rotary attention, gated MLP), which is run
    here. Any other model is run through its own forward. Both are compared with the model's own attention at
    start (build_engine.check_same_model).
    """

    def __init__(self, model: Any, max_length: int) -> None:
        self._model, self._layers = model, [_layer(layer) for layer in model.model.layers]
        first = model.model.layers[0].self_attn
        self._head_dim, self._scaling = first.head_dim, first.scaling
        embedding = model.model.embed_tokens.weight
        positions = torch.arange(max_length, device=embedding.device)
        cos_1PD, sin_1PD = model.model.rotary_emb(embedding[:1][None], positions[None])
        half = self._head_dim // 2
        self._cos_PD = cos_1PD[0]
        # rotate_half negates the first half of what it rolls; the sign is put into the table instead.
        self._sin_PD = torch.cat((-sin_1PD[0, :, :half], sin_1PD[0, :, half:]), dim=-1)

    @classmethod
    def of(cls, model: Any, max_length: int) -> PlainDecoder | None:
        """For this model, or None if its forward may be another one."""
        config = model.config
        rope = getattr(config, "rope_parameters", None) or {}
        is_plain = (
            config.model_type in MODEL_TYPES
            and config.hidden_act in ("silu", "swish")
            and rope.get("rope_type", "default") in STATIC_ROPE
            and rope.get("partial_rotary_factor", 1.0) == 1.0
        )
        return cls(model, max_length) if is_plain else None

    def forward(self, pass_: Pass, ids_R: Tensor, positions_R: Tensor, keep: Tensor | None) -> Tensor:
        """Logits of the rows `keep` (None: all), [rows, V]."""
        base, num_rows, head_dim = self._model.model, len(ids_R), self._head_dim
        linear, rms_norm, half = functional.linear, torch.rms_norm, head_dim // 2
        hidden_RH = functional.embedding(ids_R, base.embed_tokens.weight)
        cos_R1D, sin_R1D = self._cos_PD[positions_R].unsqueeze(1), self._sin_PD[positions_R].unsqueeze(1)
        for number, layer in enumerate(self._layers):
            norm, mlp_norm, head_norms, to_query, to_key, to_value, out, gate, up, down = layer
            normed_RH = rms_norm(hidden_RH, *norm)
            query = linear(normed_RH, *to_query).view(num_rows, -1, head_dim)
            key = linear(normed_RH, *to_key).view(num_rows, -1, head_dim)
            value = linear(normed_RH, *to_value).view(num_rows, -1, head_dim)
            if head_norms:
                query, key = rms_norm(query, *head_norms[0]), rms_norm(key, *head_norms[1])
            query = query * cos_R1D + query.roll(half, -1) * sin_R1D
            key = key * cos_R1D + key.roll(half, -1) * sin_R1D
            mixed = pass_.attend(number, query, key, value, self._scaling)
            hidden_RH = hidden_RH + linear(mixed.reshape(num_rows, -1), *out)
            normed_RH = rms_norm(hidden_RH, *mlp_norm)
            gated = functional.silu(linear(normed_RH, *gate)) * linear(normed_RH, *up)
            hidden_RH = hidden_RH + linear(gated, *down)
        if keep is not None:
            hidden_RH = hidden_RH[keep]
        return cast(Tensor, self._model.lm_head(rms_norm(hidden_RH, *_norm(base.norm))))


def _layer(module: Any) -> tuple[Any, ...]:
    """The Parameters of a decoder layer, which cost a lookup each where they are asked of their modules."""
    attention, mlp = module.self_attn, module.mlp
    maps = (attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj)
    head_norms = (attention.q_norm, attention.k_norm) if hasattr(attention, "q_norm") else ()
    norms = (module.input_layernorm, module.post_attention_layernorm)
    return (
        *map(_norm, norms),
        [_norm(one) for one in head_norms],
        *((one.weight, one.bias) for one in (*maps, mlp.gate_proj, mlp.up_proj, mlp.down_proj)),
    )


def _norm(module: Any) -> tuple[Any, ...]:
    return module.weight.shape, module.weight, module.variance_epsilon
