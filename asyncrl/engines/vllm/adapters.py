"""Adapters as vLLM takes them: a peft folder made of the trainer's file. Knows files and raw bytes; knows no torch and no server.

The trainer's file holds `<module>.lora_A.weight` [rank, in] and `<module>.lora_B.weight` [out, rank] of each layer that has one, and
the scalar `scale`, which is alpha / rank.
"""

from __future__ import annotations

import json
import mmap
import shutil
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from asyncrl.errors import EngineError
from asyncrl.types import WeightManifest
from asyncrl.wire import weights_digest

ADAPTER = "policy-adapter"
SCALE = "scale"
_SUFFIXES = (".lora_A.weight", ".lora_B.weight")
_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16", "F64": "float64"}
_RULE = "adapters are <module>.lora_A.weight and <module>.lora_B.weight of one rank, and one float32 scale"
_RESEND = "export and prepare again; if it repeats, look for what else writes the staging file."


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor as it lies in its file."""

    dtype: str
    shape: tuple[int, ...]
    data: memoryview


def write_adapter_folder(name: str, manifest: WeightManifest) -> tuple[Path, str]:
    """Write the adapters of the manifest as a folder beside its file, for server `name`; (folder, digest of what was read).

    A folder of its own for each version: vLLM's prefix cache tells adapters apart by it. Raises EngineError.
    """
    folder = Path(manifest.path).with_name(f"{name}-adapter-{manifest.version}")
    try:
        with _open_tensors(Path(manifest.path)) as tensors:
            digest = weights_digest((key, _DTYPES.get(one.dtype, one.dtype), one.shape, one.data) for key, one in tensors.items())
            _check(name, manifest, tensors, digest)
            config = json.dumps(_config(name, manifest, tensors))
            remove_folder(folder)
            folder.mkdir()
            (folder / "adapter_config.json").write_text(config, encoding="utf-8")
            _write(folder / "adapter_model.safetensors", {f"base_model.model.{key}": one for key, one in tensors.items() if key != SCALE})
    except (OSError, ValueError, KeyError, struct.error) as error:
        raise EngineError(name, f"cannot make an adapter of {manifest.path}: {error}", rule=_RULE, way_out=_RESEND) from error
    return folder, digest


def remove_folder(folder: Path) -> None:
    """Whether or not it is there."""
    shutil.rmtree(folder, ignore_errors=True)


def _check(name: str, manifest: WeightManifest, tensors: Mapping[str, Tensor], digest: str) -> None:
    found = (len(tensors), sum(len(one.data) for one in tensors.values()))
    if found != (manifest.num_tensors, manifest.num_bytes) or digest != manifest.digest:
        raise EngineError(
            name,
            f"{manifest.path} has {found[0]} tensors of {found[1]} bytes with digest {digest}, announced for policy_version "
            f"{manifest.version} were {manifest.num_tensors} of {manifest.num_bytes} with {manifest.digest}",
            rule="a version is served only when what was loaded is what was sent",
            way_out=_RESEND,
        )


def _config(name: str, manifest: WeightManifest, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    modules = sorted({key.removesuffix(suffix) for key in tensors for suffix in _SUFFIXES if key.endswith(suffix)})
    ranks = {tensors[f"{module}.lora_A.weight"].shape[0] for module in modules}
    ranks |= {tensors[f"{module}.lora_B.weight"].shape[1] for module in modules}
    if len(tensors) != 2 * len(modules) + 1 or len(ranks) != 1 or tensors[SCALE].dtype != "F32":
        raise EngineError(
            name, f"{manifest.path} has {len(tensors)} tensors for adapters of {len(modules)} layers, of ranks {sorted(ranks)}",
            rule=_RULE, way_out=_RESEND,
        )  # fmt: skip
    (rank,) = ranks
    (scale,) = struct.unpack("<f", tensors[SCALE].data)
    return {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "bias": "none", "r": rank, "lora_alpha": scale * rank,
        "target_modules": sorted({module.rpartition(".")[2] for module in modules}),
    }  # fmt: skip


@contextmanager
def _open_tensors(path: Path) -> Iterator[dict[str, Tensor]]:
    """All tensors of a safetensors file, lying in it: 8 bytes length, a JSON header, the data."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        with memoryview(mapped) as view:
            (length,) = struct.unpack("<Q", view[:8])
            header = json.loads(bytes(view[8 : 8 + length]))
            header.pop("__metadata__", None)
            data = view[8 + length :]
            tensors = {
                key: Tensor(entry["dtype"], tuple(entry["shape"]), data[slice(*entry["data_offsets"])]) for key, entry in header.items()
            }
            try:
                yield tensors
            finally:
                for one in tensors.values():
                    one.data.release()
                data.release()


def _write(path: Path, tensors: Mapping[str, Tensor]) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for key, one in tensors.items():
        header[key] = {"dtype": one.dtype, "shape": list(one.shape), "data_offsets": [at, at + len(one.data)]}
        at += len(one.data)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # the data is aligned
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for one in tensors.values():
            file.write(one.data)
