"""The part of each sent tensor that a worker must hold, and where its parameters hold
it.

Transport digests prove what a worker received, and the canary tolerates rounding.
Neither notices a worker that keeps a tensor of the last version, so the loaded parts
are compared byte for byte.

Example: tensor_parallel=2, and k_proj is 8 x 64. The part of worker 1 is rows 4..7. Its
qkv_proj, 16 x 64, has 8 rows of q, 4 of k and 4 of v, so rows 8..11 must hold that
part.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from asyncrl.weights.tensor_files import digests_of

CHECKED = (
    "Gemma3ForCausalLM",
    "LlamaForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    "Qwen3MoeForCausalLM",
)
"""Models whose tensors vLLM only cuts and joins. For others it reorders or computes
some while loading.
"""

Expected = dict[str, tuple[bytes, int]]
"""Digest and rows of a worker's parts, by the name of the sent tensor."""


class LoadedParts:
    """Parts of `model` on worker `rank` of `num_workers`. Parts of experts, quantized
    and packed weights are unknown.
    """

    def __init__(self, model: nn.Module, rank: int, num_workers: int) -> None:
        self._rank = rank
        self._num_workers = num_workers
        self._places: dict[str, tuple[nn.Module, str, list[int], int]] = {}
        """(layer, parameter, rows of each part of a joined layer, index of the part) by
        the tensor's name.
        """
        if type(model).__name__ in CHECKED:
            for path, layer in model.named_modules():
                self._add(path, layer, model.packed_modules_mapping)  # type: ignore[arg-type]

    def _add(
        self, path: str, layer: nn.Module, joined: Mapping[str, list[str]]
    ) -> None:
        module = path.rpartition(".")[2]
        parts = joined.get(module, [module])
        # A wrapper for adapters lacks the sizes, and has no parameters either.
        sizes: list[int] = (
            getattr(layer, "output_partition_sizes", []) if module in joined else []
        )
        for leaf, _ in layer.named_parameters(recurse=False):
            for index, part in enumerate(parts):
                name = f"{path.removesuffix(module)}{part}.{leaf}"
                self._places[name] = (layer, leaf, sizes, index)

    def expected(
        self, sent: Mapping[str, Tensor], digests: Mapping[str, bytes]
    ) -> Expected:
        """Return what the worker must hold of the sent tensors, whose digests these
        are.
        """
        parts = {
            name: self._part(name, tensor)
            for name, tensor in sent.items()
            if name in self._places
        }
        known = {name: part for name, part in parts.items() if part is not None}
        # A whole tensor has the digest of its transport; only cut ones are hashed
        # again.
        cut = {
            name: part for name, part in known.items() if part.shape != sent[name].shape
        }
        found = {**digests, **digests_of(cut)}
        return {name: (found[name], len(part)) for name, part in known.items()}

    def wrong(self, expected: Expected) -> list[str]:
        """Return the sent tensors whose parts the parameters do not hold."""
        # Without the padding of the vocabulary. Packed weights are empty.
        held = {
            name: self.held(name)[:num_rows] for name, (_, num_rows) in expected.items()
        }
        digests = digests_of(
            {name: part for name, part in held.items() if part.numel()}
        )
        return [name for name in digests if digests[name] != expected[name][0]]

    def held(self, name: str) -> Tensor:
        """Return the rows of the parameter for this tensor."""
        layer, leaf, sizes, index = self._places[name]
        parameter: Tensor = getattr(layer, leaf)
        return (
            torch.split(parameter, sizes)[index]
            if sizes and parameter.numel()
            else parameter
        )

    def _part(self, name: str, tensor: Tensor) -> Tensor | None:
        held = self.held(name)
        # Packed or quantized: other bytes than were sent, so nothing can be compared.
        if (held.dim(), held.dtype) != (tensor.dim(), tensor.dtype):
            return None
        for axis, size in enumerate(held.shape):
            num_sent = tensor.shape[axis]
            if size != num_sent:
                # With more workers than KV heads, several hold the same rows of k and
                # v.
                is_joined = bool(self._places[name][2])
                num_holders = (
                    max(1, size * self._num_workers // num_sent) if is_joined else 1
                )
                start = min(self._rank // num_holders * size, num_sent)
                tensor = tensor.narrow(axis, start, min(size, num_sent - start))
        return tensor
