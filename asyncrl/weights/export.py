"""Reads, exports and saves model weights. Knows files and digests; knows no batch.

Export is one pass over the weights: each tensor's bytes go straight into the file while another thread hashes
them. Sharded weights are gathered one tensor at a time; the ranks that write nothing go through the same pass
(gather_along).
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import Queue
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from asyncrl.files import open_as, whole_folder
from asyncrl.messages.base import joint_digest, tensor_digest
from asyncrl.messages.trainer_calls import ExportResponse
from asyncrl.weights.stores import host_bytes

SAFETENSORS_NAMES = {
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.bool: "BOOL",
}


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


def in_export_dtype(weights: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """whole_tensors, all at once."""
    return dict(whole_tensors(weights, dtype))


def gather_along(weights: Mapping[str, Tensor], dtype: torch.dtype | None) -> None:
    """Go with the rank that writes these weights through its gathering, and keep nothing."""
    for _ in whole_tensors(weights, dtype):
        pass


def digest_of(weights: dict[str, Tensor]) -> str:
    """asyncrl.messages.weights_digest, gathered where sharded."""
    return joint_digest(digests_of(whole_tensors(weights)).values())


def digests_of(tensors: Iterable[tuple[str, Tensor]]) -> dict[str, bytes]:
    """asyncrl.messages.tensor_digest of each."""
    return {
        name: tensor_digest(
            name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), host_bytes(tensor)
        )
        for name, tensor in tensors
    }


def export_weights(
    weights: dict[str, Tensor], path: Path, version: int, dtype: torch.dtype | None = None
) -> ExportResponse:
    """Write a safetensors file, complete or not at all. Raises OSError, a full shared memory for one."""
    weights = in_file_order(weights)
    unfinished = path.with_name(path.name + ".unfinished")
    try:
        tensors = whole_tensors(weights, dtype)
        try:
            with unfinished.open("wb", buffering=0) as file:
                digests = write_tensors(file, weights, tensors, dtype)
        finally:
            for _ in tensors:  # after an error: the other ranks gather on to the end
                pass
        unfinished.rename(path)
    finally:
        unfinished.unlink(missing_ok=True)
    return ExportResponse(
        version=version,
        path=str(path),
        digest=joint_digest(digests.values()),
        num_tensors=len(weights),
        num_bytes=num_bytes(weights, dtype),
    )


def write_tensors(
    file: Any, like: Mapping[str, Tensor], tensors: Iterator[tuple[str, Tensor]], dtype: torch.dtype | None
) -> dict[str, bytes]:
    """Write a safetensors file and return each tensor's digest, computed meanwhile. Raises OSError.

    `like` has names, shapes and dtypes of `tensors`, in the same order; its tensors are not read.
    """
    waiting = Queue[tuple[str, Tensor] | None](maxsize=1)
    with ThreadPoolExecutor(1, "digest") as hashing:
        digests = hashing.submit(_hash_all, iter(waiting.get, None))
        try:
            _write_all(file, _safetensors_head(like, dtype))
            for name, tensor in tensors:
                waiting.put((name, tensor))
                _write_all(file, host_bytes(tensor))
        finally:
            waiting.put(None)
    return digests.result()


def in_file_order(weights: dict[str, Tensor]) -> dict[str, Tensor]:
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
        config["dtype"] = str(dtype).removeprefix("torch.")
        config_file.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
        tokenizer.save_pretrained(unfinished)
        open_as(unfinished, config_file)


def _export_dtype(tensor: Tensor, dtype: torch.dtype | None) -> torch.dtype:
    return dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype


def num_bytes(weights: Mapping[str, Tensor], dtype: torch.dtype | None) -> int:
    """Of all of them in the export's dtype, whole, sharded or not."""
    return sum(_num_bytes(tensor, dtype) for tensor in weights.values())


def _num_bytes(tensor: Tensor, dtype: torch.dtype | None) -> int:
    """Of the whole tensor, sharded or not."""
    return tensor.numel() * _export_dtype(tensor, dtype).itemsize


def _hash_all(tensors: Iterator[tuple[str, Tensor]]) -> dict[str, bytes]:
    try:
        return digests_of(tensors)
    finally:
        for _ in tensors:  # after an error: whoever hands them over must not wait for us
            pass


def _safetensors_head(weights: Mapping[str, Tensor], dtype: torch.dtype | None) -> bytes:
    """Eight bytes of length and a JSON header: https://github.com/huggingface/safetensors#format."""
    entries: dict[str, Any] = {}
    offset = 0
    for name, tensor in weights.items():
        end = offset + _num_bytes(tensor, dtype)
        entries[name] = {
            "dtype": SAFETENSORS_NAMES[_export_dtype(tensor, dtype)],
            "shape": list(tensor.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    head = json.dumps({"__metadata__": {"format": "pt"}, **entries}).encode()
    head += b" " * (
        math.ceil(len(head) / 8) * 8 - len(head)
    )  # data starts on a multiple of 8 bytes, as the format asks
    return len(head).to_bytes(8, "little") + head


def _write_all(file: Any, data: bytes | memoryview) -> None:
    """Unbuffered write() may take less than it was given, 2 GiB at most on Linux."""
    view = memoryview(data)
    while view:
        view = view[file.write(view) :]
