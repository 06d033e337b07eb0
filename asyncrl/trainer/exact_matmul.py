"""Float32 products of bfloat16 numbers at the speed of bfloat16 hardware. Knows torch's switches alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def exact_in_bfloat16(dtype: torch.dtype, device: torch.device) -> Iterator[None]:
    """On the CPU, multiply float32 operands that hold bfloat16 numbers as bfloat16 and sum up in float32: nothing is lost.

    Does nothing unless `dtype`, that of the numbers, is bfloat16. Where the CPU has no such instructions it changes nothing.
    """
    if device.type != "cpu" or dtype != torch.bfloat16:
        yield
        return
    matmul: Any = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    before = matmul.fp32_precision
    matmul.fp32_precision = "bf16"
    try:
        yield
    finally:
        matmul.fp32_precision = before
