"""Decode steps of compiled layers: 10 kernels a layer, where the plain decoder launches
34. Sampling is a part of the step.

Inductor fuses everything around four products and one opaque operator, which writes the
new keys and values into the cache and attends over all positions. Layers have the same
shapes, so one compilation serves all of them, for every number of rows.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from asyncrl.models.devices import pinned
from asyncrl_servers.embedded.decoder import (
    Drawn,
    Layer,
    Maps,
    PlainDecoder,
    draw,
    layer_of,
    layer_step,
    separate,
    to_host,
)
from asyncrl_servers.embedded.kv_attention import SPLITS, Ints
from asyncrl_servers.embedded.row_adapters import Added
from asyncrl_servers.embedded.runner import DecodeGraphs, Layout, Runner
from asyncrl_servers.engine_routes import uniform_draws

Floats = npt.NDArray[np.float64]
NO_SAMPLING: Floats = np.zeros((2, 0))
DRAWN_ROWS = 32
"""Rows drawn at once. Graphs keep this memory, also asleep: 28 bytes for each row and
token of the vocabulary, 140 MB with 152,000.
"""
MIN_HEAD_DIM = 16
"""Smallest side of a Triton product."""
KERNEL_DEVICES = {"cuda"}
"""Kinds of device with a kernel of decode_attention."""


@torch.library.custom_op(
    "asyncrl::decode_attention",
    mutates_args=("keys", "values"),
    schema="(Tensor query, Tensor key, Tensor value, Tensor(a!) keys, Tensor(b!) values, Tensor table, "
    "Tensor lengths, float scale) -> (Tensor, Tensor)",
    device_types="cuda",
)
def decode_attention(*inputs: Tensor | float) -> tuple[Tensor, Tensor]:
    """Write each row's new key and value [R, kv_heads, d] into its slot, at position
    length - 1, and attend from query [R, heads, d] over all its positions. Return means
    [R, heads, SPLITS, d] and log-sum-exps [R, heads, SPLITS] over parts of the
    positions, in float32.

    Row i is slot i. keys, values: [pages, kv_heads, positions, d]; table: int32 [slots,
    pages of a slot]; lengths: int32 [R], with the new token. Rows of length 0 are
    padding: they write nothing, and their result is undefined.
    """
    # Triton comes with torch for CUDA only.
    from asyncrl_servers.embedded.decode_kernel import attend

    return attend(*inputs)


@decode_attention.register_fake
def _(query: Tensor, *others: Tensor | float) -> tuple[Tensor, Tensor]:
    rows, heads, head_dim = query.shape
    parts = query.new_empty((rows, heads, SPLITS, head_dim), dtype=torch.float32)
    return parts, parts.new_empty((rows, heads, SPLITS))


def fused_layer(
    hidden_RH: Tensor,
    added_RH: Tensor,
    layer: Layer,
    rotation: list[Tensor],
    *read: Tensor | float,
) -> tuple[Tensor, Tensor]:
    """Compute layer_step over the cache. `read`: keys, values, table, lengths and
    scale.
    """

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        parts, logsums = decode_attention(query, key, value, *read)
        mixed: Tensor = (parts * logsums.softmax(-1).unsqueeze(-1)).sum(2)
        return mixed.to(query.dtype)

    return layer_step(hidden_RH, added_RH, layer, rotation, attend)


def merged(*maps: nn.Linear) -> Maps:
    """Join the maps' weights in one tensor. The maps keep views of it, so pushes still
    write by name.
    """
    apart = separate(*maps)
    sizes = apart.sizes
    # Compiled steps are only for rows with the run's own adapter.
    own = [one.own if isinstance(one, Added) else one for one in apart.adds]
    if len(maps) == 1:
        return apart._replace(adds=own)
    tensors = list[Tensor]()
    for name in ("weight", "bias"):
        parts = [getattr(one, name) for one in maps]
        if parts[0] is None:
            continue
        whole = whole_of([part.data for part in parts])
        for part, view in zip(parts, whole.split_with_sizes(sizes), strict=True):
            part.data = view
        tensors.append(whole)
    whole_map = tensors[0], tensors[1] if len(tensors) > 1 else None
    return Maps([whole_map], sizes, own)


def whole_of(parts: list[Tensor]) -> Tensor:
    """Join tensors along axis 0. Parts that follow each other in one storage are not
    copied: they were joined before.
    """
    first = parts[0]
    storage, end = first.untyped_storage().data_ptr(), first.data_ptr()
    for part in parts:
        is_next = part.is_contiguous() and part.data_ptr() == end
        if not is_next or part.untyped_storage().data_ptr() != storage:
            return torch.cat(parts)
        end += part.nbytes
    shape = (sum(len(part) for part in parts), *first.shape[1:])
    return first.as_strided(shape, first.stride())


def why_not_fused(runner: Runner) -> str:
    """Return why the model's decode step cannot be fused; "" if it can."""
    device = runner.loaded.device.type
    if runner.plain is None:
        return (
            f"model type {runner.loaded.model.config.model_type} has no plain decoder"
        )
    if runner.is_exact or device not in KERNEL_DEVICES:
        return f"the kernel needs CUDA and is not deterministic (device {device})"
    head_dim = runner.loaded.shape.layers[0].head_dim
    if head_dim < MIN_HEAD_DIM or head_dim & (head_dim - 1):
        return f"heads of size {head_dim} are not a power of two of at least {MIN_HEAD_DIM}"
    return ""


class FusedSteps(DecodeGraphs):
    """Decode steps with merged weights and compiled layers; on CUDA one graph for each
    number of rows, which is a power of two or `most_rows`.

    Weights that a push moved or that woke are merged again before the next step.
    In-place pushes keep the graphs. A sleep that frees memory drops them; they are
    captured again on use. At start capture_all captures them.
    """

    min_steps = 0
    is_alone = True
    num_inputs = 4
    """Token id, length, uniform draw and temperature of each row; the last two are the
    bits of float64.
    """

    def __init__(self, runner: Runner, decoder: PlainDecoder, most_rows: int) -> None:
        self._layers = list[Layer]()
        self._sampling: Floats = NO_SAMPLING
        # One row counts as two: torch.compile would compile again for 1.
        super().__init__(runner, decoder, max(2, most_rows))
        is_cuda = runner.loaded.device.type == "cuda"
        self.run_layer = (
            torch.compile(fused_layer, fullgraph=True) if is_cuda else fused_layer
        )
        rows, device = self._most_rows, runner.loaded.device
        self._token_ids = torch.zeros(rows, dtype=torch.int64, device=device)
        self._logprobs = torch.zeros(rows, device=device)
        # Without CUDA there are no graphs to capture; tests run the steps uncompiled.
        self.is_refused = not is_cuda

    @torch.inference_mode()  # as the engine's loop, or layers are compiled again there
    def capture_all(self) -> None:
        """Capture a graph for each number of rows, so that no request waits for one."""
        if not self.is_refused:
            # The largest first: the others find room in its memory.
            for bits in reversed(range(1, self._most_rows.bit_length() + 1)):
                padding = np.zeros(min(1 << bits, self._most_rows), np.int64)
                self.step(padding, padding)  # rows of length 0 write nothing

    def draw(
        self,
        last_ids: Ints,
        lengths: Ints,
        sampling: npt.NDArray[np.void],
        seeds: npt.NDArray[np.uint64],
    ) -> Drawn:
        """Decode, and draw a token per row as sample() does, in the same graph. All
        rows draw from the whole vocabulary, without an adjustment.
        """
        temperatures = sampling["temperature"].astype(np.float32)
        self._sampling = np.stack((uniform_draws(seeds, lengths), temperatures))
        try:
            self.step(last_ids, lengths)
        finally:
            self._sampling = NO_SAMPLING
        num = len(last_ids)
        token_ids, logprobs = to_host(self._token_ids[:num], self._logprobs[:num])
        return Drawn(token_ids, logprobs, {})

    def drop(self) -> None:
        super().drop()
        self._layers.clear()

    @torch.inference_mode(False)  # pushes write into merged weights from other threads
    def _prepare(self) -> None:
        self._layers = [
            layer_of(one, merged) for one in self._runner.loaded.model.model.layers
        ]

    def _fill(self, last_ids: Ints, lengths: Ints) -> Layout:
        """Rows after the last have length 0."""
        num = len(last_ids)
        inputs = np.zeros((self.num_inputs, self._most_rows), np.int64)
        inputs[:2, :num] = last_ids, lengths
        # Rows that draw nothing here, and padding, are divided by 1.
        inputs[3] = np.float64(1.0).view(np.int64)
        num_drawn = self._sampling.shape[1]
        inputs[2:, :num_drawn] = self._sampling.view(np.int64)
        self._inputs.copy_(pinned(inputs, self._inputs.device), non_blocking=True)
        # Powers of two: a graph for each of a few numbers of rows.
        return min(max(2, 1 << (num - 1).bit_length()), self._most_rows), ()

    def _compute(self, layout: Layout, logits: Tensor) -> None:
        rows, cache, decoder = layout[0], self._runner.cache, self._decoder
        ids_R, lengths_R = self._inputs[:2, :rows].unbind()
        rotation = decoder.rotation((lengths_R - 1).clamp(min=0))
        hidden_RH = self._runner.loaded.model.model.embed_tokens(ids_R)
        added_RH, int_lengths_R = torch.zeros_like(hidden_RH), lengths_R.int()
        for one in (hidden_RH, added_RH, *rotation, int_lengths_R):
            # The number of rows, so that one compilation serves all of them.
            torch._dynamo.maybe_mark_dynamic(one, 0)  # noqa: SLF001
        read = cache.table, int_lengths_R, decoder.scaling
        for layer, keys, values in zip(
            self._layers, cache.keys, cache.values, strict=True
        ):
            hidden_RH, added_RH = self.run_layer(
                hidden_RH, added_RH, layer, rotation, keys, values, *read
            )
        logits[:rows] = decoder.logits(hidden_RH + added_RH)
        # Also for rows that sample() draws again from these logits, because a grammar
        # or top_p cuts them: a second set of graphs would take twice the memory.
        for start in range(0, rows, DRAWN_ROWS):
            part = slice(start, min(start + DRAWN_ROWS, rows))
            draws_R, temperatures_R = self._inputs[2:, part].view(torch.float64)
            scaled_RV = logits[part].float() / temperatures_R.float()[:, None]
            token_ids_R1, logprobs_RV = draw(scaled_RV, draws_R[:, None])
            self._token_ids[part] = token_ids_R1[:, 0]
            self._logprobs[part] = logprobs_RV.gather(1, token_ids_R1)[:, 0]
