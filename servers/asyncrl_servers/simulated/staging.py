"""Weights of an engine without a model: read and verified like real ones, and dropped. Knows the file format, no torch."""

from __future__ import annotations

import json
import mmap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from asyncrl.serving import Refused
from asyncrl.wire import PrepareRequest, weights_digest
from asyncrl_servers.checks import RESEND, wrong_digest

_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16", "F64": "float64"}


def verify_weights(request: PrepareRequest) -> str:
    """Digest of the tensors in the safetensors file. Raises Refused: 400 if it cannot be read, 409 if it is not what was sent."""
    try:
        with Path(request.path).open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data, memoryview(data) as view:
            header_size = int.from_bytes(view[:8], "little")
            header: dict[str, Any] = json.loads(bytes(view[8 : 8 + header_size]))
            header.pop("__metadata__", None)
            digest = weights_digest(_tensors(header, view[8 + header_size :]))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise Refused(400, f"cannot read the weights file {request.path}: {error}", way_out=RESEND) from error
    if digest != request.digest:
        raise wrong_digest(request.version, request.path, digest, request.digest)
    return digest


def _tensors(header: dict[str, Any], data: memoryview) -> Iterator[tuple[str, str, tuple[int, ...], memoryview]]:
    with data:
        for name, info in header.items():
            start, end = info["data_offsets"]
            with data[start:end] as part:
                yield name, _DTYPES[info["dtype"]], tuple(info["shape"]), part
