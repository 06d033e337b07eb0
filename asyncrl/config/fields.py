"""Base of all sections, and shared types."""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import (
    Annotated,
    Any,
    ClassVar,
    Literal,
    Self,
    TypeVar,
    get_args,
    get_origin,
)

from pydantic import (
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    ValidationInfo,
    model_validator,
)
from pydantic_core import core_schema

from asyncrl.base.extensions import load_place
from asyncrl.messages.records import Count as Count
from asyncrl.messages.sampling import DRAW_PARAMETERS, SamplingParameters

READS = "reads"
"""Context of a validation that accepts conflicts: the written config of a run may lack
settings of an extension that is not installed.
"""


class FrozenConfig(BaseModel):
    """Frozen; refuses unknown keys."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        use_attribute_docstrings=True,
        protected_namespaces=(),
        # Only a whole config is built: a section is part of it.
        defer_build=True,
        # JSON has no infinite numbers: a child process would read null.
        allow_inf_nan=False,
    )
    free_keys: ClassVar[Collection[str]] = ()
    """Keys that change no computed value, so that a resume accepts any (`*` = all)."""
    refusals: ClassVar[Sequence[str]] = ()
    """Places of functions of extensions from this section to more conflicts."""

    @model_validator(mode="before")
    @classmethod
    def _read_words(cls, values: object) -> object:
        """Read `none` as null if the field allows null, and booleans only if it allows
        booleans.
        """
        if not isinstance(values, dict):
            return values
        read = dict[object, object]()
        for key, value in values.items():
            info = cls.model_fields.get(key)
            allowed = set() if info is None else {*_types(info.annotation)}
            read[key] = value
            # The docs write `none`, which YAML reads as text. Only where null is
            # allowed: in `console: none` it is a word.
            if value == "none" and type(None) in allowed:
                read[key] = None
            # Pydantic takes true for the number 1, and refuses this text for a number.
            elif not allowed & {bool, str, object, Any}:
                is_section = any(
                    isinstance(kind, type) and issubclass(kind, FrozenConfig)
                    for kind in allowed
                )
                read[key] = _without_booleans(value, is_section=is_section)
        return read

    def conflicts(self) -> Iterator[str]:
        """Yield why settings do not go together, and what to set or remove instead. The
        section's own settings are written as .key. Only the first sentence is shown: the
        ones after it are often its consequences.
        """
        yield from ()

    @model_validator(mode="after")
    def _refuse_conflict(self, info: ValidationInfo) -> Self:
        if info.context == READS:
            return self
        for name, value in self:
            # A sum of sizes must still be a float, and SQLite's integers have 64 bits.
            if isinstance(value, int) and value.bit_length() > 63:
                raise ValueError(
                    f".{name} is an integer of more than 64 bits; write a smaller one"
                )
        # Refusals of extensions are first: what a section lacks may be theirs.
        added = (load_place(place)(self) for place in self.refusals)
        rules = (self._without_effect(), self.conflicts())
        for conflict in itertools.chain(*added, *rules):
            raise ValueError(conflict)
        return self

    def _without_effect(self) -> Iterator[str]:
        fields = type(self).model_fields
        for name in self.given(*fields):
            for rule in fields[name].metadata:
                if not (isinstance(rule, OnlyWith) and rule.is_broken(self)):
                    continue
                value = getattr(self, rule.key)
                text = "none" if value is None else _as_text(value)
                only = ""
                if rule.is_wanted and rule.values:
                    only = f", only with {' or '.join(map(str, rule.values))}"
                yield f".{name} has no effect with .{rule.key}={text}{only}; remove it"

    def given(self, *names: str) -> list[str]:
        return [
            name
            for name in names
            if getattr(self, name) != type(self).model_fields[name].default
        ]


@dataclass(frozen=True, slots=True)
class OnlyWith:
    """Metadata of a setting that is refused, because it has no effect, unless another
    setting of its section has one of these values; without `values`, any but its default.
    """

    key: str
    values: Collection[object] = ()

    is_wanted: ClassVar = True

    def is_broken(self, section: FrozenConfig) -> bool:
        is_met = bool(section.given(self.key))
        if self.values:
            is_met = getattr(section, self.key) in self.values
        return is_met != self.is_wanted


class NotWith(OnlyWith):
    """Metadata of a setting that is refused where OnlyWith would accept it."""

    is_wanted: ClassVar = False


class ScoredReward(FrozenConfig):
    """A reward that an extension asks a model or a service for: a section whose only key
    is the name of its kind (RewardKind in base/extensions.py).
    """

    title: ClassVar[str] = ""
    """Example: the judge."""

    @property
    def called(self) -> str:
        """Return the name of the model or service, for errors."""
        return ""

    @property
    def kind(self) -> str:
        return next(iter(type(self).model_fields))

    def conflicts(self) -> Iterator[str]:
        if not type(self).model_fields:
            yield "no installed extension has a reward that is a section; name a function, as module:name"


@dataclass(frozen=True, slots=True)
class EngineWith:
    """Kinds of engines with this fact, for a setting of an extension. They are read when
    the section is built: until then, not all extensions are known.
    """

    fact: str

    def kinds(self) -> list[str]:
        # By its place: settings of extensions, which import this module, must not import
        # the table.
        table = load_place("asyncrl.config.engine_kinds:ENGINES")
        return [kind for kind, facts in table.items() if getattr(facts, self.fact)]

    def __get_pydantic_core_schema__(self, *_: object) -> core_schema.CoreSchema:
        return core_schema.literal_schema(self.kinds())


class SampledConfig(FrozenConfig):
    """A section with the parameters of sampling."""

    @property
    def sampling(self) -> SamplingParameters:
        given = {name: getattr(self, name) for name in DRAW_PARAMETERS}
        return SamplingParameters(**given)


def _types(annotation: object) -> Iterator[object]:
    """Yield a type, the members of a union, and the types of its items."""
    yield annotation
    if get_origin(annotation) is not Literal:
        for part in get_args(annotation):
            yield from _types(part)


def _without_booleans(value: object, *, is_section: bool) -> object:
    """Replace booleans by text, also among several numbers. A section reads its own."""
    if is_section or not isinstance(value, list | tuple | dict):
        return _as_text(value)
    if isinstance(value, dict):
        return {key: _as_text(item) for key, item in value.items()}
    return [_as_text(item) for item in value]


def _as_text(value: object) -> object:
    return str(value).lower() if isinstance(value, bool) else value


def located(rule: str, section: str) -> str:
    """Return the text of a broken rule. The rules of a section write its settings as
    .key, because the section may be one of several, such as task.0.

    >>> located("Value error, .min=3 is above .max=2", "rollout.num_engines")
    'rollout.num_engines.min=3 is above rollout.num_engines.max=2'
    """
    text = rule.removeprefix("Value error, ")
    return re.sub(r"(?<!\S)\.(?=[a-z])", f"{section}.", text)


def _tag_of(value: object) -> str:
    """Tag one form of a section, without the tag in errors."""
    return "[several]" if isinstance(value, list) else "[one]"


Section = TypeVar("Section", bound=FrozenConfig)
OneOrSeveral = Annotated[
    Annotated[Section, Tag("[one]")]
    | Annotated[list[Section], Field(min_length=1), Tag("[several]")],
    Discriminator(_tag_of),
]
"""A section, or a list of such sections."""


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
