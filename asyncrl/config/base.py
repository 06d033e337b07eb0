"""The base of all config sections."""

from __future__ import annotations

from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, model_validator


class FrozenConfig(BaseModel):
    """Frozen, and refuses keys it does not know. Validators reject; they never repair."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, protected_namespaces=())

    @model_validator(mode="before")
    @classmethod
    def _none_is_the_off_word(cls, values: Any) -> Any:
        """`none` is null wherever null is allowed, in the file as in a key=value; elsewhere it is a text like any other."""
        if not isinstance(values, dict):
            return values
        return {key: None if value == "none" and cls._may_be_null(key) else value for key, value in values.items()}

    @classmethod
    def _may_be_null(cls, key: Any) -> bool:
        return key in cls.model_fields and type(None) in get_args(cls.model_fields[key].annotation)


Device = Literal["auto", "cpu", "cuda"]
"""auto = CUDA where there is a device, else CPU."""

DType = Literal["auto", "float32", "bfloat16"]
"""What auto is in a run: placement/dtype.py. A process that is started alone takes bfloat16 on CUDA, float32 on CPU."""

Port = Annotated[int, Field(ge=1, le=65535)]
"""A TCP port."""
