"""Digest of a set of weights, whose sums weights/tensor_files.py computes. It detects faults, not attacks.

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


@functools.cache
def block_keys() -> npt.NDArray[np.int8]:
    """Keys [2048, 8], uniform in -63..63."""
    num_keys, num_values = BLOCK_BYTES * NUM_SUMS, 2 * _MAX_KEY + 1
    drawn = np.frombuffer(hashlib.shake_128(b"asyncrl weights").digest(2 * num_keys), np.uint8)
    fair = drawn[drawn < 2 * num_values][:num_keys]
    return (fair % num_values).astype(np.int8).reshape(BLOCK_BYTES, NUM_SUMS) - np.int8(_MAX_KEY)


def digest_of_sums(name: str, dtype: str, shape: Iterable[int], sums: bytes | memoryview) -> bytes:
    """Return a tensor's digest from its sums; dtype as torch calls it ("float32")."""
    digest = hashlib.sha256(f"{name}|{dtype}|{','.join(map(str, shape))}|".encode())
    digest.update(sums)
    return digest.digest()


def joint_digest(tensor_digests: Iterable[bytes]) -> str:
    return hashlib.sha256(b"".join(sorted(tensor_digests))).hexdigest()[:32]
