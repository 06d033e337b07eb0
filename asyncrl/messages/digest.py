"""The digest of a set of weights, the same wherever it is computed: on the host, or on a device
(asyncrl/weights/tensor_files.py). It proves that names, dtypes, shapes and bytes are those that were sent,
against any fault and not against an attacker.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import numpy as np

WORD_MIXERS = (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
"""The odd 64-bit numbers of splitmix64: https://prng.di.unimi.it/splitmix64.c."""
_PIECE_WORDS = 2**15
"""Words that are mixed at once: the temporaries stay in the processor's cache."""


def word_sum(data: memoryview | bytes) -> bytes:
    """Each 64-bit word is mixed with its position, and all are added modulo 2**64; then come the odd bytes.

    A change of one word always changes the sum, since mixing loses nothing; of several, all but once in
    2**64.
    """
    view = memoryview(data).cast("B")
    end = len(view) // 8 * 8
    words = np.frombuffer(view[:end], dtype=np.uint64)
    first, *mixers = (np.uint64(mixer) for mixer in WORD_MIXERS)
    positions = np.arange(min(len(words), _PIECE_WORDS), dtype=np.uint64) * first
    mixed, high = np.empty_like(positions), np.empty_like(positions)
    total = 0
    for start in range(0, len(words), _PIECE_WORDS):
        piece = words[start : start + _PIECE_WORDS]
        mixed, high = mixed[: len(piece)], high[: len(piece)]
        np.add(positions[: len(piece)], np.uint64(start * WORD_MIXERS[0] % 2**64), out=mixed)
        np.bitwise_xor(mixed, piece, out=mixed)
        for shift, mixer in zip((30, 27), mixers, strict=True):
            np.right_shift(mixed, np.uint64(shift), out=high)
            np.bitwise_xor(mixed, high, out=mixed)
            np.multiply(mixed, mixer, out=mixed)
        total += int(mixed.sum())
    return (total % 2**64).to_bytes(8, "little") + bytes(view[end:])


def digest_of_sum(name: str, dtype: str, shape: Iterable[int], checksum: bytes) -> bytes:
    """Digest of one tensor from the word_sum of its bytes; dtype as torch calls it ("float32")."""
    return hashlib.sha256(f"{name}|{dtype}|{','.join(map(str, shape))}|".encode() + checksum).digest()


def tensor_digest(name: str, dtype: str, shape: tuple[int, ...], data: memoryview | bytes) -> bytes:
    """Digest of one tensor in host memory, with its name, dtype and shape."""
    return digest_of_sum(name, dtype, shape, word_sum(data))


def joint_digest(tensor_digests: Iterable[bytes]) -> str:
    """Digest of a set of weights from those of its tensors, in any order."""
    return hashlib.sha256(b"".join(sorted(tensor_digests))).hexdigest()[:32]


def weights_digest(tensors: Iterable[tuple[str, str, tuple[int, ...], memoryview | bytes]]) -> str:
    """Digest of a set of weights given as (name, dtype, shape, raw bytes), in any order."""
    return joint_digest(tensor_digest(*tensor) for tensor in tensors)
