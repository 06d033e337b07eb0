"""Tensors in safetensors files: format, digests, and storage of a model's tensors.

Format: 8 bytes with the length of a JSON head, the head, the data
(https://github.com/huggingface/safetensors#format).

Digest: a tensor's bytes are cut into blocks of 2048, zero-padded. Each block gives 8
exact sums of byte * key (signed); sha256 runs over name, dtype, shape and all sums. Two
different blocks have equal sums under at most one in 127**8 = 2**55 choices of keys: a
linear hash (Carter and Wegman, Universal classes of hash functions, 1979). |sum| <=
2048 * 128 * 63 < 2**24, so a float32 matrix product is exact in any order. It detects
faults, not attacks.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, BinaryIO, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError

from asyncrl.base.http import Refused

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

T = TypeVar("T")
_FILE_NAMES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "int64": "I64",
    "int32": "I32",
    "uint8": "U8",
    "bool": "BOOL",
}
"""The format's dtypes by torch's."""
BLOCK_BYTES, NUM_SUMS = 2048, 8
_MAX_KEY = 63
PIECE_BLOCKS = {"cpu": 512}
"""Blocks in a product, by device type: 1 MiB fits a CPU's cache. Else 16 MiB: a product
of 512 blocks occupies 8 of an H100's 132 multiprocessors, and the float32 copy of 8192
blocks is 64 MiB of scratch memory.
"""
SMALL_BYTES = {"cpu": 2**16}
"""Most bytes of a tensor that shares a product, by device type; else 16 MiB."""
JOINED_BYTES = 2**26
"""Bytes of small tensors in a product."""
MIN_HASHED_BYTES = 2**22
"""Minimum bytes per task of the hashing thread."""
SUFFIXES = (".lora_A.weight", ".lora_B.weight")
RESEND = "export and prepare again; if it repeats, find the other program that writes the staging file."


def read_or_refuse(path: str) -> dict[str, Tensor]:
    """Map a file's tensors. Raises Refused (400)."""
    from safetensors.torch import load_file

    try:
        tensors: dict[str, Tensor] = load_file(path)
        return tensors
    except (OSError, SafetensorError) as error:
        raise Refused(
            400, f"cannot read the weights file {path}: {error}", way_out=RESEND
        ) from error


def safetensors_head(entries: Iterable[tuple[str, str, Iterable[int]]]) -> bytes:
    """Return the bytes before the data of (name, torch's dtype, shape)."""
    import torch

    head: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, dtype, shape in entries:
        start = end
        end += math.prod(shape) * getattr(torch, dtype).itemsize
        head[name] = {
            "dtype": _FILE_NAMES[dtype],
            "shape": list(shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(head).encode()
    text += b" " * (-len(text) % 8)  # the format aligns data to 8 bytes
    return len(text).to_bytes(8, "little") + text


def write_tensors(
    file: BinaryIO,
    entries: Iterable[tuple[str, str, Iterable[int]]],
    tensors: Iterator[tuple[str, Tensor]],
) -> dict[str, bytes]:
    """Write the `tensors` of `entries`; hash, write and compute the next ones in
    parallel. Return their digests. Raises OSError.
    """

    def write(some: Mapping[str, Tensor]) -> None:
        for tensor in some.values():
            file.write(host_bytes(tensor))

    file.write(safetensors_head(entries))
    hashed: list[Future[dict[str, bytes]]] = []
    busy: list[Future[dict[str, bytes]] | Future[None]] = []
    with ThreadPoolExecutor(2, "write weights") as threads:
        for some in _together(tensors):
            # Wait for the previous group: at most two groups of gathered tensors are in
            # memory, this one and the next.
            for one in busy:
                one.result()
            hashed.append(threads.submit(digests_of, some))
            busy = [hashed[-1], threads.submit(write, some)]
        for one in busy:
            one.result()
    return {name: digest for found in hashed for name, digest in found.result().items()}


def _together(tensors: Iterator[tuple[str, Tensor]]) -> Iterator[dict[str, Tensor]]:
    """Yield groups large enough for a thread."""
    some: dict[str, Tensor] = {}
    num_bytes = 0
    for name, tensor in tensors:
        some[name] = tensor
        num_bytes += tensor.nbytes
        if num_bytes >= MIN_HASHED_BYTES:
            yield some
            some = {}
            num_bytes = 0
    if some:
        yield some


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def digests_of(tensors: Mapping[str, Tensor]) -> dict[str, bytes]:
    """Return the digest of each tensor, computed on its device."""
    digests = Digests()
    for name, tensor in tensors.items():
        digests.add(name, tensor)
    return digests.finish()


class Digests:
    """Digests of tensors on one device. Small tensors share a product, and all share
    one copy to the host.
    """

    def __init__(self) -> None:
        self._small: dict[str, Tensor] = {}
        self._small_bytes = 0
        self._sums: list[Tensor] = []
        self._entries: list[tuple[str, str, tuple[int, ...], int]] = []
        """(name, dtype, shape, blocks), in the order of the sums."""

    def add(self, name: str, tensor: Tensor) -> None:
        """Add a tensor, whose content must not change before finish()."""
        tensor = tensor.detach().contiguous()
        if tensor.nbytes > SMALL_BYTES.get(tensor.device.type, 2**24):
            self._sums.append(block_sums(tensor))
            self._note(name, tensor)
            return
        self._small[name] = tensor
        self._small_bytes += tensor.nbytes
        if self._small_bytes >= JOINED_BYTES:
            self._join()

    def finish(self) -> dict[str, bytes]:
        import torch

        self._join()
        if not self._entries:
            return {}
        # One copy to the host for all tensors: each copy waits for the device.
        sizes = [num_blocks for *_, num_blocks in self._entries]
        sums = torch.split(torch.cat(self._sums).cpu(), sizes)
        return {
            name: _digest_of_sums(name, dtype, shape, own_sums)
            for (name, dtype, shape, _), own_sums in zip(
                self._entries, sums, strict=True
            )
        }

    def _join(self) -> None:
        """Sum the small tensors, each padded to whole blocks, in one product."""
        import torch

        if not self._small:
            return
        flats = [tensor.reshape(-1).view(torch.int8) for tensor in self._small.values()]
        padding = torch.zeros(BLOCK_BYTES, dtype=torch.int8, device=flats[0].device)
        parts = [
            part
            for flat in flats
            for part in (flat, padding[: -len(flat) % BLOCK_BYTES])
        ]
        self._sums.append(block_sums(torch.cat(parts)))
        for name, tensor in self._small.items():
            self._note(name, tensor)
        self._small = {}
        self._small_bytes = 0

    def _note(self, name: str, tensor: Tensor) -> None:
        num_blocks = -(-tensor.nbytes // BLOCK_BYTES)
        self._entries.append(
            (name, dtype_name(tensor.dtype), tuple(tensor.shape), num_blocks)
        )


def _digest_of_sums(
    name: str, dtype: str, shape: tuple[int, ...], sums: Tensor
) -> bytes:
    digest = hashlib.sha256(f"{name}|{dtype}|{','.join(map(str, shape))}|".encode())
    digest.update(sums.numpy().astype("<i4", copy=False).data)
    return digest.digest()


def joint_digest(tensor_digests: Iterable[bytes]) -> str:
    # Sorted, because tensors arrive in different orders: by file, by chunk, or by the
    # engine's names.
    return hashlib.sha256(b"".join(sorted(tensor_digests))).hexdigest()[:32]


@functools.cache
def _keys_on(device: torch.device) -> Tensor:
    import torch

    return torch.from_numpy(block_keys()).to(device)


def digest_and_size(tensors: Mapping[str, Tensor]) -> tuple[dict[str, bytes], int]:
    return digests_of(tensors), sum(tensor.nbytes for tensor in tensors.values())


def digest_tensors(tensors: Mapping[str, Tensor]) -> str:
    return joint_digest(digests_of(tensors).values())


@functools.cache
def block_keys() -> npt.NDArray[np.int8]:
    """Return the keys [2048, 8], uniform in -63..63."""
    num_keys = BLOCK_BYTES * NUM_SUMS
    num_values = 2 * _MAX_KEY + 1
    # Fixed keys, made without a random generator whose numbers could differ between
    # versions: both ends must have the same. Values of 254 and 255 are dropped, since
    # 256 is not a multiple of 127.
    drawn = np.frombuffer(
        hashlib.shake_128(b"asyncrl weights").digest(2 * num_keys), np.uint8
    )
    fair = drawn[drawn < 2 * num_values][:num_keys]
    return (fair % num_values).astype(np.int8).reshape(BLOCK_BYTES, NUM_SUMS) - np.int8(
        _MAX_KEY
    )


def block_sums(tensor: Tensor) -> Tensor:
    """Return the sums of a contiguous tensor's bytes, int32 [blocks, 8] on its device."""
    import torch

    flat = tensor.reshape(-1).view(torch.int8)
    keys = _keys_on(tensor.device)
    num_whole = len(flat) // BLOCK_BYTES
    blocks = flat[: num_whole * BLOCK_BYTES].view(num_whole, BLOCK_BYTES)
    last = flat[num_whole * BLOCK_BYTES :]
    sums = torch.empty(
        num_whole + bool(len(last)), NUM_SUMS, dtype=torch.int32, device=tensor.device
    )
    # Integer products if the processor supports them.
    is_integer = tensor.device.type == "cpu" and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    product, keys = (
        (torch._int_mm, keys) if is_integer else (_product_of_floats, keys.float())
    )
    piece = PIECE_BLOCKS.get(tensor.device.type, 8192)
    for start in range(0, num_whole, piece):
        end = min(start + piece, num_whole)
        product(blocks[start:end], keys, out=sums[start:end])
    if len(last):
        product(
            torch.nn.functional.pad(last, (0, BLOCK_BYTES - len(last)))[None],
            keys,
            out=sums[num_whole:],
        )
    return sums


def _product_of_floats(blocks: Tensor, keys: Tensor, *, out: Tensor) -> None:
    # Exact for every cut into pieces: a sum runs over one block, which is never cut,
    # and every partial sum is an integer below 2**24. Exact also if a user allows TF32
    # (11 significant bits) or bfloat16 (8) products: bytes (-128..127) and keys
    # (-63..63) need 7, and the sums stay float32.
    out.copy_(blocks.float() @ keys)


def host_bytes(tensor: Tensor) -> memoryview:
    """Return the bytes without copying. numpy() would fix the storage's size, which an
    offload changes.
    """
    if not tensor.nbytes:
        return memoryview(b"")
    # Also for bfloat16, which numpy lacks.
    array = (ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr())
    array.owner = tensor  # type: ignore[attr-defined]  # lives as long as the view
    return memoryview(array).cast("B")


def adapted_modules(names: Iterable[str]) -> list[str]:
    return sorted(
        {
            name.removesuffix(end)
            for name in names
            for end in SUFFIXES
            if name.endswith(end)
        }
    )


class StoredPiece(NamedTuple):
    """A checkpoint tensor as a view of a model tensor (torch.as_strided).

    Example: expert 3 of experts stacked as [8, 64, 32] has shape (64, 32), stride
    (32, 1) and start 3 * 64 * 32.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    start: int


Pieces = Mapping[str, Mapping[str, StoredPiece]]
"""Checkpoint tensors by name, for model tensors that are split or renamed."""


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    """Return a model's parameters (tied ones once) and persistent buffers by name."""
    from torch import nn

    # One walk through the modules: each walk costs a small model 0.05 ms between steps.
    parameters: dict[str, Tensor] = {}
    buffers: dict[str, Tensor] = {}
    seen = set[int]()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if not isinstance(tensor, nn.Parameter):
            buffers[name] = tensor
        elif id(tensor) not in seen:
            parameters[name] = tensor
            seen.add(id(tensor))
    return parameters | buffers


def float32_names(model: nn.Module) -> set[str]:
    """Return parameters that transformers keeps in float32, such as DeepSeek-V3's
    router weights.
    """
    patterns = [
        one.replace("*", ".*")
        for one in getattr(model, "_keep_in_fp32_modules_strict", None) or ()
    ]
    if not patterns:
        return set()
    return {
        name
        for name, _ in model.named_parameters()
        if any(re.search(pattern, name) for pattern in patterns)
    }


def stored_pieces(model: nn.Module, weights: Mapping[str, Tensor]) -> Pieces:
    """Return the checkpoint's pieces of weights that transformers stacks or renames at
    load.
    """
    import torch
    from torch.overrides import TorchFunctionMode
    from transformers.core_model_loading import revert_weight_conversion

    # transformers makes pieces contiguous, which would copy them. Without the copy,
    # each piece is a view of the meta tensor, and its stride and offset say where the
    # piece is in the model's tensor.
    class Uncopied(TorchFunctionMode):
        def __torch_function__(
            self,
            func: Callable[..., object],
            types: object,
            args: Sequence[object] = (),
            kwargs: Mapping[str, object] | None = None,
        ) -> object:
            is_copy = func is torch.Tensor.contiguous
            return args[0] if is_copy else func(*args, **(kwargs or {}))

    like = {
        name: torch.empty(one.shape, dtype=one.dtype, device="meta")
        for name, one in weights.items()
    }
    owners = {one.untyped_storage()._cdata: name for name, one in like.items()}
    with Uncopied():
        stored = revert_weight_conversion(model, dict(like))
    pieces: dict[str, dict[str, StoredPiece]] = {}
    for name, one in stored.items():
        if owner := owners.get(one.untyped_storage()._cdata):
            pieces.setdefault(owner, {})[name] = StoredPiece(
                tuple(one.shape), one.stride(), one.storage_offset()
            )
    return {
        name: found
        for name, found in pieces.items()
        if found.keys() != {name}
        # Only pieces that cover the tensor exactly. A conversion that computes values
        # cannot be stored as views.
        and sum(math.prod(one.shape) for one in found.values()) == like[name].numel()
    }


def stored_names(pieces: Pieces) -> dict[str, str]:
    """Return the checkpoint names of model tensors that are stored whole under another
    name.
    """
    return {
        name: stored
        for name, found in pieces.items()
        if len(found) == 1
        for stored in found
    }


def of_role(role: str, tensors: Mapping[str, T]) -> dict[str, T]:
    """Return the tensors of a role's adapter by the names that pushes and checkpoints of all
    roles have.

    Example: solver/model.layers.0.self_attn.q_proj.lora_A.weight
    """
    return {f"{role}/{name}" if role else name: one for name, one in tensors.items()}


def rename_adapters(
    tensors: Mapping[str, Tensor], names: Mapping[str, str]
) -> dict[str, Tensor]:
    """Rename adapters like their layers' weights: `names` has the new name of a weight
    by its old one.
    """

    def renamed(name: str) -> str:
        for end in SUFFIXES:
            if name.endswith(end):
                weight = f"{name.removesuffix(end)}.weight"
                return names.get(weight, weight).removesuffix(".weight") + end
        return name

    return {renamed(name): tensor for name, tensor in tensors.items()}


def pieces_of(tensors: Mapping[str, Tensor], pieces: Pieces) -> dict[str, Tensor]:
    return {
        piece: tensor
        if cut is None
        else tensor.as_strided(*cut[:2], tensor.storage_offset() + cut.start)
        for name, tensor in tensors.items()
        for piece, cut in pieces.get(name, {name: None}).items()
    }
