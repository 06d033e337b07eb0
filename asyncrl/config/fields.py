"""Base of all sections, and shared types."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Annotated, ClassVar, Literal, Self, get_args

from pydantic import BaseModel, ConfigDict, Field, model_validator

from asyncrl.messages.records import Count as Count


class FrozenConfig(BaseModel):
    """Frozen; refuses unknown keys."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        use_attribute_docstrings=True,
        protected_namespaces=(),
        # JSON has no infinite numbers: a child process would read null.
        allow_inf_nan=False,
    )
    free_keys: ClassVar[Collection[str]] = ()
    """Keys that change no computed value, so that a resume accepts any (`*` = all)."""

    @model_validator(mode="before")
    @classmethod
    def _none_is_the_off_word(cls, values: object) -> object:
        """Read `none` as null if the field allows null."""
        if not isinstance(values, dict):
            return values
        # The docs write `none`, which YAML reads as text. Only where null is allowed:
        # in `console: none` it is a word.
        fields = cls.model_fields.items()
        nullable = {
            name for name, info in fields if type(None) in get_args(info.annotation)
        }
        return {
            key: None if value == "none" and key in nullable else value
            for key, value in values.items()
        }

    def conflicts(self) -> Iterator[str]:
        """Yield why settings do not go together. Only the first sentence is shown: the
        ones after it are often its consequences.
        """
        yield from ()

    @model_validator(mode="after")
    def _refuse_conflict(self) -> Self:
        for conflict in self.conflicts():
            raise ValueError(conflict)
        return self

    def given(self, *names: str) -> list[str]:
        return [
            name
            for name in names
            if getattr(self, name) != type(self).model_fields[name].default
        ]


def tag_of(value: object) -> str:
    """Tag one form of a section, without the tag in errors."""
    return "[several]" if isinstance(value, list) else "[one]"


Name = Annotated[str, Field(pattern=r"^[A-Za-z][A-Za-z0-9_-]{0,63}$")]
"""Part of prompt ids and metric names."""

Seed = Annotated[int, Field(ge=0, lt=2**31)]

Fraction = Annotated[float, Field(ge=0, le=1)]

PositiveFraction = Annotated[float, Field(gt=0, le=1)]

Device = Literal["auto", "cpu", "cuda"]
"""auto = CUDA if available, else CPU."""

DType = Literal["auto", "float32", "bfloat16"]
"""launch/plan.py resolves auto."""

Port = Annotated[int, Field(ge=1, le=65535)]
