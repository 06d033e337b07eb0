"""The base of all config sections."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict


class FrozenConfig(BaseModel):
    """Frozen, and refuses keys it does not know. Validators reject; they never repair."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, protected_namespaces=())


Device = Literal["auto", "cpu", "cuda"]
"""auto = CUDA where there is a device, else CPU."""

DType = Literal["auto", "float32", "bfloat16"]
"""auto = bfloat16 on CUDA, float32 on CPU."""
