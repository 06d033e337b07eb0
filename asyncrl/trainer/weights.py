"""Reads, exports and saves model weights. Knows files and digests; knows no batch.

Export is one pass over the weights: each tensor's bytes go straight into the file while another thread hashes them.
"""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from asyncrl.wire import ExportResponse, weights_digest

SAFETENSORS_NAMES = {
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.bool: "BOOL",
}


def named_weights(model: Any) -> dict[str, Tensor]:
    """Every parameter once (tied duplicates left out) and every persistent buffer, by the model's own names."""
    weights = dict(model.named_parameters())
    with_duplicates = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    weights.update((name, tensor) for name, tensor in model.state_dict(keep_vars=True).items() if name not in with_duplicates)
    return {name: tensor.detach() for name, tensor in weights.items()}


def in_export_dtype(weights: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """The weights on the CPU, contiguous, floating point ones as `dtype`. Copies only what is not so already."""
    return {
        name: tensor.to(device="cpu", dtype=dtype if tensor.is_floating_point() else None).contiguous() for name, tensor in weights.items()
    }


def digest_of(weights: dict[str, Tensor]) -> str:
    """asyncrl.wire.weights_digest of CPU tensors."""
    return weights_digest(_parts(weights))


def export_weights(weights: dict[str, Tensor], path: Path, version: int) -> ExportResponse:
    """Write CPU tensors as a safetensors file, complete or not at all. Raises OSError, a full shared memory for one."""
    order = sorted(weights)
    unfinished = path.with_name(path.name + ".unfinished")
    try:
        with ThreadPoolExecutor(1, "digest") as hashing:
            digest = hashing.submit(digest_of, weights)
            with unfinished.open("wb", buffering=0) as file:
                _write_all(file, _safetensors_head(weights, order))
                for name in order:
                    _write_all(file, raw_bytes(weights[name]))
        unfinished.rename(path)
    finally:
        unfinished.unlink(missing_ok=True)
    num_bytes = sum(tensor.nbytes for tensor in weights.values())
    return ExportResponse(version=version, path=str(path), digest=digest.result(), num_tensors=len(weights), num_bytes=num_bytes)


def save_folder(model: Any, tokenizer: Any, dtype: torch.dtype, path: Path) -> None:
    """Write a Hugging Face folder with weights as `dtype`, complete or not at all. Raises FileExistsError, OSError."""
    if path.exists():
        raise FileExistsError(f"{path} exists already")
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        model.save_pretrained(unfinished, state_dict=in_export_dtype(named_weights(model), dtype))
        config_file = unfinished / "config.json"
        config = json.loads(config_file.read_text(encoding="utf-8"))
        # save_pretrained notes the dtype of the master weights, not of the state_dict that it was given.
        config["dtype"] = str(dtype).removeprefix("torch.")
        config_file.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
        tokenizer.save_pretrained(unfinished)
        unfinished.rename(path)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def raw_bytes(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, not copied."""
    return tensor.reshape(-1).view(torch.uint8).numpy().data


def _parts(weights: dict[str, Tensor]) -> Iterable[tuple[str, str, tuple[int, ...], memoryview]]:
    for name, tensor in weights.items():
        yield name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), raw_bytes(tensor)


def _safetensors_head(weights: dict[str, Tensor], order: list[str]) -> bytes:
    """Eight bytes of length and a JSON header: https://github.com/huggingface/safetensors#format."""
    entries: dict[str, Any] = {}
    offset = 0
    for name in order:
        tensor = weights[name]
        entries[name] = {
            "dtype": SAFETENSORS_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + tensor.nbytes],
        }
        offset += tensor.nbytes
    head = json.dumps({"__metadata__": {"format": "pt"}, **entries}).encode()
    head += b" " * (math.ceil(len(head) / 8) * 8 - len(head))  # data starts on a multiple of 8 bytes, as the format asks
    return len(head).to_bytes(8, "little") + head


def _write_all(file: Any, data: bytes | memoryview) -> None:
    """Unbuffered write() may take less than it was given, 2 GiB at most on Linux."""
    view = memoryview(data)
    while view:
        view = view[file.write(view) :]
