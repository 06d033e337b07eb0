"""The part of each sent tensor that one worker must hold, and where its parameters hold it.

Transport digests prove what a worker received, and the canary tolerates rounding. Neither notices one of
several workers that keeps a tensor of the last version, so the loaded parts are compared byte for byte.

Example: tensor_parallel=2, and k_proj is 8 x 64. The part of worker 1 is rows 4..7. Its qkv_proj, 16 x 64,
has 8 rows of q, 4 of k and 4 of v, so rows 8..11 must hold that part.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from asyncrl.weights.tensor_files import digests_of

CHECKED = (
    "Gemma3ForCausalLM",
    "LlamaForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    "Qwen3MoeForCausalLM",
)
"""Models whose tensors vLLM only cuts and joins. For others it reorders or computes some while loading."""

Expected = dict[str, tuple[bytes, int]]
"""Digest and rows of a worker's parts, by the name of the sent tensor."""


class LoadedParts:
    """Parts of `model` on worker `rank` of `num_workers`. Those of experts, and of quantized and packed weights,
    are unknown.
    """

    def __init__(self, model: nn.Module, rank: int, num_workers: int) -> None:
        self._model = model
        self._rank = rank
        self._num_workers = num_workers
        self._joined: dict[str, tuple[str, list[str]]] = {}
        """(joined layer, its parts) by part: q_proj is in qkv_proj."""
        self._is_checked = type(model).__name__ in CHECKED
        if self._is_checked:
            for layer, parts in model.packed_modules_mapping.items():  # type: ignore[union-attr, operator]
                self._joined |= dict.fromkeys(parts, (layer, parts))

    def expected(self, sent: Mapping[str, Tensor], digests: Mapping[str, bytes]) -> Expected:
        """Return what the worker must hold of the sent tensors, whose digests these are."""
        parts = {name: self._part(name, tensor) for name, tensor in sent.items()}
        known = {name: part for name, part in parts.items() if part is not None}
        cut = {name: part for name, part in known.items() if part.shape != sent[name].shape}
        found = {**digests, **digests_of(cut)}
        return {name: (found[name], len(part)) for name, part in known.items()}

    def wrong(self, expected: Expected) -> list[str]:
        """Return the sent tensors whose parts the parameters do not hold."""
        held = {}
        for name, (_, num_rows) in expected.items():
            part = self._held(name)
            if part is not None and len(part) >= num_rows:
                held[name] = part[:num_rows]  # without the padding of the vocabulary
        digests = digests_of(held)
        return [name for name in held if digests[name] != expected[name][0]]

    def _part(self, name: str, tensor: Tensor) -> Tensor | None:
        held = self._held(name)
        if held is None or (held.dim(), held.dtype) != (tensor.dim(), tensor.dtype):
            return None
        for axis, size in enumerate(held.shape):
            num_sent = tensor.shape[axis]
            if size != num_sent:
                # With more workers than KV heads, several hold the same rows of k and v.
                is_joined = _module_of(name) in self._joined
                num_holders = max(1, size * self._num_workers // num_sent) if is_joined else 1
                start = min(self._rank // num_holders * size, num_sent)
                tensor = tensor.narrow(axis, start, min(size, num_sent - start))
        return tensor

    def _held(self, name: str) -> Tensor | None:
        """Return the rows of the parameter for this tensor; None if they are unknown."""
        path, _, leaf = name.rpartition(".")
        parent = path.rpartition(".")[0]
        module = _module_of(name)
        layer_name, parts = self._joined.get(module, (module, [module]))
        try:
            layer = self._model.get_submodule(f"{parent}.{layer_name}" if parent else layer_name)
        except AttributeError:
            return None
        parameter = dict(layer.named_parameters(recurse=False)).get(leaf)
        sizes: list[int] = getattr(layer, "output_partition_sizes", [])
        if not self._is_checked or parameter is None or parameter.dim() == 0:
            return None
        if len(parts) == 1:
            # The whole of a joined layer, as Phi-3 sends it, is cut in several places.
            return parameter if len(sizes) <= 1 and parameter.numel() else None
        index = parts.index(module)
        is_known = len(sizes) == len(parts) and sum(sizes) == len(parameter)
        return parameter.narrow(0, sum(sizes[:index]), sizes[index]) if is_known else None


def _module_of(name: str) -> str:
    return name.rpartition(".")[0].rpartition(".")[2]
