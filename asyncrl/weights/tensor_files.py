"""Tensors in safetensors files, and their digests.

The format: 8 bytes with the length of a JSON head, the head, the data
(https://github.com/huggingface/safetensors#format). torch is imported where tensors are made or hashed on a
device: the controller and the simulated engine read files without it.
"""

from __future__ import annotations

import ctypes
import json
import math
import mmap
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from asyncrl.messages.digest import WORD_MIXERS, digest_of_sum, joint_digest, tensor_digest
from asyncrl.serving import Refused

if TYPE_CHECKING:
    import torch
    from torch import Tensor

DTYPES = {
    "F64": ("float64", 8),
    "F32": ("float32", 4),
    "F16": ("float16", 2),
    "BF16": ("bfloat16", 2),
    "I64": ("int64", 8),
    "I32": ("int32", 4),
    "U8": ("uint8", 1),
    "BOOL": ("bool", 1),
}
"""Names of the format: (torch's name, bytes of an element)."""
_FILE_NAMES = {name: code for code, (name, _) in DTYPES.items()}
_ITEM_BYTES = dict(DTYPES.values())
_PIECE_WORDS = 2**20
"""Words that a device mixes at once: what the temporaries of a checksum take."""
SCALE = "scale"
"""In a file of adapters: the scalar float32 tensor alpha / rank. An engine needs it, and the digest covers
it.
"""
SUFFIXES = (".lora_A.weight", ".lora_B.weight")
RESEND = "export and prepare again; if it repeats, find the other program that writes the staging file."


@dataclass(frozen=True, slots=True)
class RawTensor:
    """A tensor as it lies in a file; `dtype` as torch calls it."""

    dtype: str
    shape: tuple[int, ...]
    data: memoryview

    def as_torch(self) -> Tensor:
        """On the CPU, over the same memory."""
        import torch

        dtype = getattr(torch, self.dtype)
        if not self.data:
            return torch.empty(self.shape, dtype=dtype)
        return torch.frombuffer(self.data, dtype=dtype).view(self.shape)


def read_tensors(path: Path) -> dict[str, RawTensor]:
    """All tensors of a file in its order, lying in a private mapping of it. Raises OSError or ValueError."""
    with path.open("rb") as file:
        view = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY))
    length = int.from_bytes(view[:8], "little")
    try:
        head: dict[str, Any] = json.loads(bytes(view[8 : 8 + length]))
        head.pop("__metadata__", None)
        data = view[8 + length :]
        return {name: _raw(name, entry, data) for name, entry in head.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is no safetensors file: {error}") from error


def read_or_refuse(path: str) -> dict[str, RawTensor]:
    """read_tensors for a server. Raises Refused (400)."""
    try:
        return read_tensors(Path(path))
    except (OSError, ValueError) as error:
        raise Refused(400, f"cannot read the weights file {path}: {error}", way_out=RESEND) from error


def _raw(name: str, entry: Mapping[str, Any], data: memoryview) -> RawTensor:
    dtype, size = DTYPES[entry["dtype"]]
    start, end = entry["data_offsets"]
    if not 0 <= start <= end <= len(data) or end - start != math.prod(entry["shape"]) * size:
        raise ValueError(f"{name} cannot lie in bytes {start} to {end} of {len(data)}")
    return RawTensor(dtype, tuple(entry["shape"]), data[start:end])


def safetensors_head(entries: Iterable[tuple[str, str, Iterable[int]]]) -> bytes:
    """What comes before the data of tensors given as (name, torch's dtype, shape)."""
    head: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, dtype, shape in entries:
        start, end = end, end + math.prod(shape) * _ITEM_BYTES[dtype]
        head[name] = {"dtype": _FILE_NAMES[dtype], "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(head).encode()
    text += b" " * (-len(text) % 8)  # the data starts on a multiple of 8 bytes, as the format asks
    return len(text).to_bytes(8, "little") + text


def write_tensors(
    file: Any, entries: Iterable[tuple[str, str, Iterable[int]]], tensors: Iterator[tuple[str, Tensor]]
) -> dict[str, bytes]:
    """Write `tensors`, which are those of `entries` in their order, one after the other, each hashed while it
    is written; returns their digests. Raises OSError.
    """
    digests = {}
    file.write(safetensors_head(entries))
    with ThreadPoolExecutor(1, "digest") as hashing:
        for name, tensor in tensors:
            digest = hashing.submit(digest_of_tensor, name, tensor)
            file.write(host_bytes(tensor))
            digests[name] = digest.result()
    return digests


def dtype_name(dtype: torch.dtype) -> str:
    """float32, bfloat16, ..."""
    return str(dtype).removeprefix("torch.")


def digest_of_tensor(name: str, tensor: Tensor) -> bytes:
    """tensor_digest of a torch tensor, computed where it lies."""
    tensor = tensor.detach().contiguous()
    dtype, shape = dtype_name(tensor.dtype), tuple(tensor.shape)
    if tensor.device.type == "cpu":
        return tensor_digest(name, dtype, shape, host_bytes(tensor))
    return digest_of_sum(name, dtype, shape, device_word_sum(tensor))


def digest_and_size(tensors: Mapping[str, Tensor]) -> tuple[dict[str, bytes], int]:
    """The digest of each tensor, and the bytes of all."""
    digests = {name: digest_of_tensor(name, tensor) for name, tensor in tensors.items()}
    return digests, sum(tensor.nbytes for tensor in tensors.values())


def digest_tensors(tensors: Mapping[str, Tensor]) -> str:
    """weights_digest of torch tensors."""
    return joint_digest(digest_and_size(tensors)[0].values())


def device_word_sum(tensor: Tensor) -> bytes:
    """word_sum of a contiguous tensor's bytes, by torch: nothing but the sum leaves the device."""
    import torch

    flat, per_word = tensor.reshape(-1), 8 // tensor.element_size()
    num_words = flat.numel() // per_word
    if flat.storage_offset() % per_word:
        flat = flat.clone()
    words, rest = flat[: num_words * per_word].view(torch.int64), flat[num_words * per_word :]
    first, *mixers = (mixer - 2**64 for mixer in WORD_MIXERS)  # as int64 has them
    positions = torch.arange(min(num_words, _PIECE_WORDS), dtype=torch.int64, device=tensor.device)
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for start in range(0, num_words, _PIECE_WORDS):
        piece = words[start : start + _PIECE_WORDS]
        mixed = (positions[: len(piece)] + start) * first
        mixed.bitwise_xor_(piece)
        for shift, mixer in zip((30, 27), mixers, strict=True):
            high = (mixed >> shift).bitwise_and_(2 ** (64 - shift) - 1)  # int64 shifts its sign along
            mixed.bitwise_xor_(high).mul_(mixer)
        total += mixed.sum()
    odd = rest.view(torch.uint8).cpu().numpy().tobytes() if rest.numel() else b""
    return int(total.item()).to_bytes(8, "little", signed=True) + odd


def host_bytes(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous tensor in host memory, not copied. Unlike numpy(), it does not tie the tensor
    to its storage's size, which an offload changes.
    """
    if not tensor.nbytes:
        return memoryview(b"")
    array = (ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr())
    array.owner = tensor  # type: ignore[attr-defined]  # lives as long as the view
    return memoryview(array).cast("B")


def adapted_modules(names: Iterable[str]) -> list[str]:
    """The layers that have an adapter in a file with these tensors."""
    return sorted({name.removesuffix(end) for name in names for end in SUFFIXES if name.endswith(end)})
