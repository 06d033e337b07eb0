"""The trainer's weights as they leave it: named, gathered, in the engines' dtype.

Sharded weights are gathered one tensor at a time; the ranks that write nothing go through the same pass
(gather_along).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from asyncrl.files import open_as, whole_folder
from asyncrl.messages.base import joint_digest
from asyncrl.messages.calls import ExportResponse
from asyncrl.weights.tensor_files import digest_of_tensor, dtype_name, write_tensors


class LazyWeights(Mapping[str, Tensor]):
    """Weights of which some are computed at each access. `like` has shape and dtype of each, without
    computing it.
    """

    def __init__(
        self, like: Mapping[str, Tensor], computed: Mapping[str, Callable[[], Tensor]] | None = None
    ) -> None:
        self.like, self._computed = like, computed or {}

    def __getitem__(self, name: str) -> Tensor:
        compute = self._computed.get(name)
        return self.like[name] if compute is None else compute()

    def __iter__(self) -> Iterator[str]:
        return iter(self.like)

    def __len__(self) -> int:
        return len(self.like)

    def only(self, names: list[str]) -> LazyWeights:
        """These, in this order."""
        return LazyWeights({name: self.like[name] for name in names}, self._computed)


def named_weights(model: Any) -> dict[str, Tensor]:
    """Every parameter once (tied duplicates left out) and every persistent buffer, by the model's own
    names.
    """
    weights = dict(model.named_parameters())
    with_duplicates = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    weights.update(
        (name, tensor)
        for name, tensor in model.state_dict(keep_vars=True).items()
        if name not in with_duplicates
    )
    return {name: tensor.detach() for name, tensor in weights.items()}


def whole_tensors(
    weights: Mapping[str, Tensor], dtype: torch.dtype | None = None, device: str | torch.device = "cpu"
) -> Iterator[tuple[str, Tensor]]:
    """Each tensor on `device`, contiguous, a floating point one as `dtype`. Copies only what is not so
    already.

    A sharded tensor is gathered on all ranks, each of which must go through all of them.
    """
    for name, tensor in weights.items():
        target = _export_dtype(tensor, dtype)
        whole: Tensor = (
            cast(DTensor, tensor.to(target)).full_tensor() if isinstance(tensor, DTensor) else tensor
        )
        yield name, whole.detach().to(device=device, dtype=target).contiguous()


@contextmanager
def gathered(
    weights: Mapping[str, Tensor], dtype: torch.dtype | None, device: str | torch.device = "cpu"
) -> Iterator[Iterator[tuple[str, Tensor]]]:
    """whole_tensors, gone through to the end even after an error: the other ranks gather along."""
    tensors = whole_tensors(weights, dtype, device)
    try:
        yield tensors
    finally:
        for _ in tensors:
            pass


def in_export_dtype(weights: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """whole_tensors, all at once."""
    return dict(whole_tensors(weights, dtype))


def gather_along(weights: Mapping[str, Tensor], dtype: torch.dtype | None) -> None:
    """Go with the rank that writes these weights through its gathering, and keep nothing."""
    for _ in whole_tensors(weights, dtype, "meta"):
        pass


def digest_of(weights: Mapping[str, Tensor]) -> str:
    """asyncrl.messages.base.weights_digest, gathered where sharded."""
    return joint_digest(digest_of_tensor(name, tensor) for name, tensor in whole_tensors(weights))


def export_weights(
    weights: Mapping[str, Tensor], path: Path, version: int, dtype: torch.dtype | None = None
) -> ExportResponse:
    """Write a safetensors file, complete or not at all. Raises OSError, a full shared memory for one."""
    weights = weights if isinstance(weights, LazyWeights) else LazyWeights(in_file_order(weights))
    unfinished = path.with_name(path.name + ".unfinished")
    try:
        with gathered(weights, dtype) as tensors, unfinished.open("wb", buffering=0) as file:
            digests = write_tensors(file, entries_of(weights, dtype), tensors)
        unfinished.rename(path)
    finally:
        unfinished.unlink(missing_ok=True)
    return manifest_of(weights, dtype, version, digests, str(path))


def manifest_of(
    weights: LazyWeights, dtype: torch.dtype | None, version: int, digests: Mapping[str, bytes], path: str
) -> ExportResponse:
    """The answer about an export; without a file ('') the trainer holds it."""
    return ExportResponse(
        version=version,
        path=path,
        digest=joint_digest(digests.values()),
        num_tensors=len(weights),
        num_bytes=sum(sizes_of(weights, dtype).values()),
        is_held=not path,
    )


def in_file_order(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """As export_weights goes through them."""
    return {name: weights[name] for name in sorted(weights)}


def save_folder(
    model: Any, weights: dict[str, Tensor], tokenizer: Any, dtype: torch.dtype, path: Path
) -> None:
    """Write a Hugging Face folder of `model` with these weights as `dtype`, complete or not at all; replaces
    one. Raises OSError.
    """
    with whole_folder(path) as unfinished:
        model.save_pretrained(unfinished, state_dict=in_export_dtype(weights, dtype))
        config_file = unfinished / "config.json"
        config = json.loads(config_file.read_text(encoding="utf-8"))
        # save_pretrained notes the dtype of the master weights, not of the state_dict that it was given.
        config["dtype"] = dtype_name(dtype)
        config_file.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
        tokenizer.save_pretrained(unfinished)
        open_as(unfinished, config_file)


def _export_dtype(tensor: Tensor, dtype: torch.dtype | None) -> torch.dtype:
    return dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype


def entries_of(weights: LazyWeights, dtype: torch.dtype | None) -> list[tuple[str, str, list[int]]]:
    """(name, dtype, shape) of each as it is exported."""
    return [
        (name, dtype_name(_export_dtype(tensor, dtype)), list(tensor.shape))
        for name, tensor in weights.like.items()
    ]


def sizes_of(weights: LazyWeights, dtype: torch.dtype | None) -> dict[str, int]:
    """Bytes of each tensor as it is exported, whole, sharded or not."""
    return {
        name: tensor.numel() * _export_dtype(tensor, dtype).itemsize for name, tensor in weights.like.items()
    }
