"""The digest of a set of weights, the same at both ends of a publish."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable


def tensor_digest(name: str, dtype: str, shape: tuple[int, ...], data: memoryview | bytes) -> bytes:
    """Digest of one tensor together with its name, dtype ("float32", "bfloat16") and shape."""
    digest = hashlib.sha256(f"{name}|{dtype}|{','.join(map(str, shape))}|".encode())
    digest.update(data)
    return digest.digest()


def joint_digest(tensor_digests: Iterable[bytes]) -> str:
    """Digest of a set of weights from those of its tensors, in any order."""
    return hashlib.sha256(b"".join(sorted(tensor_digests))).hexdigest()[:32]


def weights_digest(tensors: Iterable[tuple[str, str, tuple[int, ...], memoryview | bytes]]) -> str:
    """Digest of a set of weights, the same on both ends of a publish.

    Takes (name, dtype, shape, raw bytes) in any order. Each tensor is hashed by itself together with its name,
    dtype and shape, and the sorted per-tensor digests are hashed again, so that a swapped name, a skipped tensor
    and a changed byte all change the result.
    """
    return joint_digest(tensor_digest(*tensor) for tensor in tensors)
