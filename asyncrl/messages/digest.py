"""Digest of a set of weights, with numpy; weights/tensor_files.py computes the same with torch. It detects
faults, not attacks.

A tensor's bytes are cut into blocks of 2048, zero-padded. Each block gives 8 exact sums of byte * key
(signed); sha256 runs over name, dtype, shape and all sums. Two different blocks have equal sums under at most
one in 127**8 = 2**55 choices of keys: a linear hash (Carter and Wegman, Universal classes of hash functions,
1979). |sum| <= 2048 * 128 * 63 < 2**24, so a float32 matrix product is exact in any order.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

BLOCK_BYTES, NUM_SUMS = 2048, 8
_MAX_KEY = 63
_ROWS = 16
"""Blocks per product, too few for numpy to start threads."""


@functools.cache
def block_keys() -> npt.NDArray[np.int8]:
    """Keys [2048, 8], uniform in -63..63."""
    num_keys, num_values = BLOCK_BYTES * NUM_SUMS, 2 * _MAX_KEY + 1
    drawn = np.frombuffer(hashlib.shake_128(b"asyncrl weights").digest(2 * num_keys), np.uint8)
    fair = drawn[drawn < 2 * num_values][:num_keys]
    return (fair % num_values).astype(np.int8).reshape(BLOCK_BYTES, NUM_SUMS) - np.int8(_MAX_KEY)


def block_sums(data: memoryview | bytes) -> bytes:
    """Return the sums of each block: int32 [blocks, 8], little-endian."""
    flat = np.frombuffer(data, np.int8)
    num_whole = len(flat) // BLOCK_BYTES
    blocks = flat[: num_whole * BLOCK_BYTES].reshape(num_whole, BLOCK_BYTES)
    last = flat[num_whole * BLOCK_BYTES :]
    pieces = [blocks[start : start + _ROWS] for start in range(0, num_whole, _ROWS)]
    if len(last):
        pieces.append(np.pad(last, (0, BLOCK_BYTES - len(last)))[None])
    keys = block_keys().astype(np.float32)
    return b"".join((piece.astype(np.float32) @ keys).astype("<i4").tobytes() for piece in pieces)


def digest_of_sums(name: str, dtype: str, shape: Iterable[int], sums: bytes | memoryview) -> bytes:
    """Return a tensor's digest from its block_sums; dtype as torch calls it ("float32")."""
    digest = hashlib.sha256(f"{name}|{dtype}|{','.join(map(str, shape))}|".encode())
    digest.update(sums)
    return digest.digest()


def tensor_digest(name: str, dtype: str, shape: tuple[int, ...], data: memoryview | bytes) -> bytes:
    return digest_of_sums(name, dtype, shape, block_sums(data))


def joint_digest(tensor_digests: Iterable[bytes]) -> str:
    return hashlib.sha256(b"".join(sorted(tensor_digests))).hexdigest()[:32]


def weights_digest(tensors: Iterable[tuple[str, str, tuple[int, ...], memoryview | bytes]]) -> str:
    """Return the digest of tensors (name, dtype, shape, raw bytes), in any order."""
    return joint_digest(tensor_digest(*tensor) for tensor in tensors)
