"""Weights in safetensors files, checked against the model that they are for. Knows files and tensors; knows no version."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from asyncrl.serving import Refused
from asyncrl.sharing import byte_digest, bytes_of
from asyncrl.wire import joint_digest
from asyncrl_servers.checks import RESEND
from asyncrl_servers.embedded.storage import own_copy

_DTYPE_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.float64: "F64"}


@dataclass(frozen=True, slots=True)
class Kind:
    """What a parameter is, whether or not it has memory."""

    shape: torch.Size
    dtype: torch.dtype


@contextmanager
def weights_file(path: str) -> Iterator[Any]:
    """An open safetensors file, its tensors on the CPU. Raises Refused (400) if it cannot be read."""
    if not Path(path).is_file():
        raise Refused(400, f"no weights file {path}", way_out=RESEND)
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            yield file
    except (SafetensorError, OSError) as error:
        raise Refused(400, f"cannot read the weights file {path}: {error}", way_out=RESEND) from error


def read_all(path: str, kinds: Mapping[str, Kind], device: torch.device) -> dict[str, Tensor]:
    """Copies of all tensors of the file, which must be the parameters `kinds`. Raises Refused (400, 409)."""
    with weights_file(path) as file:
        check_names(set(file.keys()), kinds, path)
        # A copy: the file may be replaced by the next export while these weights serve.
        return {name: own_copy(fitting(name, file.get_tensor(name), kinds[name], path), device) for name in kinds}


def read_adapter_tensors(path: str) -> dict[str, Tensor]:
    """Copies of all tensors of a file of adapters, whatever they are. Raises Refused (400)."""
    with weights_file(path) as file:
        return {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118  not a mapping


def check_names(found: set[str], kinds: Mapping[str, Kind], path: str, *, is_part: bool = False) -> None:
    """Raise Refused (409) if the names of a file are not those of the parameters; `is_part`: of some of them."""
    missing, unknown = sorted(kinds.keys() - found) if not is_part else [], sorted(found - kinds.keys())
    if missing or unknown:
        raise Refused(
            409,
            f"{path} lacks {len(missing)} parameters {missing[:3]} and has {len(unknown)} unknown ones {unknown[:3]}",
            rule="a set of weights is dict(model.named_parameters()), tied ones once",
            way_out="use the same model in trainer and engine.",
        )


def fitting(name: str, tensor: Tensor, kind: Kind, path: str) -> Tensor:
    """The tensor, if it is of this kind. Raises Refused (409)."""
    if tensor.shape != kind.shape or tensor.dtype != kind.dtype:
        raise Refused(
            409,
            f"{name} in {path} is {tensor.dtype} {tuple(tensor.shape)}, the model has {kind.dtype} {tuple(kind.shape)}",
            rule="trainer and engine hold the same model in the same dtype",
            way_out="set model.dtype to the same for both.",
        )
    return tensor


def write_all(path: str, tensors: Mapping[str, Tensor]) -> None:
    """Write a safetensors file, whole or not at all, one tensor after the other (safetensors' own function copies all first)."""
    header: dict[str, dict[str, object]] = {}
    end = 0
    for name, tensor in tensors.items():
        start, end = end, end + tensor.nbytes
        header[name] = {"dtype": _DTYPE_NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    partial = Path(f"{path}.partial")
    with partial.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors.values():
            file.write(bytes_of(tensor))
    partial.replace(path)


def digest_tensors(tensors: Mapping[str, Tensor]) -> str:
    """`wire.weights_digest` of torch tensors."""
    return joint_digest(byte_digest(name, tensor) for name, tensor in tensors.items())
