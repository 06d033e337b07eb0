"""The base of all sections, and types that several have."""

from __future__ import annotations

from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, model_validator


class FrozenConfig(BaseModel):
    """Frozen, and refuses keys it does not know. Validators reject; they never repair."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, protected_namespaces=()
    )

    @model_validator(mode="before")
    @classmethod
    def _none_is_the_off_word(cls, values: Any) -> Any:
        """`none` is null wherever null is allowed, in the file as in a key=value; elsewhere it is a text like
        any other.
        """
        if not isinstance(values, dict):
            return values
        fields = cls.model_fields.items()
        nullable = {name for name, info in fields if type(None) in get_args(info.annotation)}
        return {key: None if value == "none" and key in nullable else value for key, value in values.items()}

    def given(self, *names: str) -> list[str]:
        """Those of `names` that are not at their default."""
        return [name for name in names if getattr(self, name) != type(self).model_fields[name].default]


def tag_of(value: Any) -> str:
    """Which shape of a section that may stand there several times. The brackets keep it out of errors."""
    return "[several]" if isinstance(value, list) else "[one]"


Name = Annotated[str, Field(pattern=r"^[A-Za-z][A-Za-z0-9_-]{0,63}$")]
"""Letters, digits, - and _: part of prompt ids and of names of metrics."""

Device = Literal["auto", "cpu", "cuda"]
"""auto = CUDA where there is a device, else CPU."""

DType = Literal["auto", "float32", "bfloat16"]
"""What auto is in a run: placement/fit.py. A process that is started alone takes bfloat16 on CUDA and
float32 on a CPU.
"""

Port = Annotated[int, Field(ge=1, le=65535)]
"""A TCP port."""
