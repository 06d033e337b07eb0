"""Weights of an engine without a model: read and verified like real ones, and dropped. Knows the file format, no torch."""

from __future__ import annotations

import json
import mmap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from asyncrl.serving import Refused
from asyncrl.wire import PrepareRequest, joint_digest, tensor_digest
from asyncrl_servers.checks import RESEND, wrong_digest

_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16", "F64": "float64"}


def verify_weights(request: PrepareRequest) -> str:
    """Digest of the tensors in the safetensors file. Raises Refused: 400 if it cannot be read, 409 if it is not what was sent."""
    if request.kind != "weights":
        raise Refused(
            400,
            f"policy_version {request.version} comes as adapters (kind={request.kind}), and this server has no weights to merge them over",
            rule="rollout.engine=simulated takes whole weights alone",
            way_out="set publisher.transport=shm, or rollout.engine=embedded.",
        )
    digest = joint_digest(read_digests(request.path)[0].values())
    if digest != request.digest:
        raise wrong_digest(request.version, request.path, digest, request.digest)
    return digest


def read_digests(path: str) -> tuple[dict[str, bytes], int]:
    """(digest of each tensor by name, bytes of all) of a safetensors file. Raises Refused (400) if it cannot be read."""
    try:
        with Path(path).open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data, memoryview(data) as view:
            header_size = int.from_bytes(view[:8], "little")
            header: dict[str, Any] = json.loads(bytes(view[8 : 8 + header_size]))
            header.pop("__metadata__", None)
            digests = {tensor[0]: tensor_digest(*tensor) for tensor in _tensors(header, view[8 + header_size :])}
            return digests, sum(info["data_offsets"][1] - info["data_offsets"][0] for info in header.values())
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise Refused(400, f"cannot read the weights file {path}: {error}", way_out=RESEND) from error


def _tensors(header: dict[str, Any], data: memoryview) -> Iterator[tuple[str, str, tuple[int, ...], memoryview]]:
    with data:
        for name, info in header.items():
            start, end = info["data_offsets"]
            with data[start:end] as part:
                yield name, _DTYPES[info["dtype"]], tuple(info["shape"]), part
