"""Sections that extensions add settings and refusals to."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from operator import eq
from typing import TypeVar

from pydantic.fields import FieldInfo

from asyncrl.base.errors import ConfigError
from asyncrl.base.extensions import SWITCH, AddedField, discover, extensions
from asyncrl.config.fields import FrozenConfig

Section = TypeVar("Section", bound=FrozenConfig)

EXTENDED = dict[str, type[FrozenConfig]]()
"""Extended classes by section; '' is the top level."""


def extended(section: str) -> Callable[[type[Section]], type[Section]]:
    """Add the settings and refusals of all extensions to the class of a section.

    Settings are fields of the class itself, not of a subclass: default sections, pickles
    and isinstance know one class.
    """

    def extend(cls: type[Section]) -> type[Section]:
        EXTENDED[section] = cls
        for name, extension in extensions().items():
            if section in extension.refusals:
                cls.refusals = (*cls.refusals, extension.refusals[section])
            for added in extension.fields_of(section):
                if added.name in cls.model_fields:
                    discover().broken[name] = (
                        f"it adds the setting {added.name}, which the section {section} has"
                    )
                else:
                    _add(cls, added)
        return cls

    return extend


def _add(cls: type[FrozenConfig], added: AddedField[object]) -> None:
    info = FieldInfo.from_annotated_attribute(added.kind, added.default)
    info.description = added.text
    # A default is in no dump, so that the files of a run can be read without the
    # extension.
    info.exclude_if = partial(eq, added.default)
    cls.__pydantic_fields__[added.name] = info
    cls.__annotations__[added.name] = added.kind
    if added.is_free:
        cls.free_keys = (*cls.free_keys, added.name)


def broken_extensions() -> dict[str, str]:
    """Return why extensions cannot be used, by name. All sections must be imported."""
    found = discover()
    broken = {**found.broken}
    for name, extension in found.used.items():
        for section in {*extension.fields, *extension.refusals} - EXTENDED.keys():
            broken[name] = f"no settings can be added to the section {section}"
    return broken


def refuse_broken() -> None:
    """Raise ConfigError if an extension cannot be used."""
    broken = broken_extensions()
    found = discover()
    left = ",".join(["core", *sorted(found.used.keys() - broken.keys())])
    for name, why in broken.items():
        repair = ""
        if name in found.sources:
            repair = f"repair or uninstall {found.sources[name].package}, or "
        raise ConfigError(
            f"the extension {found.sources.get(name, name)} cannot be used: {why}",
            way_out=f"{repair}set {SWITCH}={left}. `asyncrl extensions` lists all extensions.",
        )


def extensions_text() -> Iterator[str]:
    """Yield the lines of `asyncrl extensions`."""
    found = discover()
    broken = broken_extensions()
    for name in [*found.used, *broken.keys() - found.used.keys(), *found.off]:
        yield str(found.sources.get(name, name))
        if name in broken:
            yield f"    cannot be used: {broken[name]}"
        elif name in found.off:
            yield f"    off: {SWITCH} does not name it"
        else:
            extension = found.used[name]
            rows = extension.model_dump() | {"fields": extension.keys()}
            for row, value in rows.items():
                if value:
                    names = [value] if isinstance(value, str) else value
                    yield f"    {row}: {', '.join(name or 'all' for name in names)}"
