"""The settings as text, taken from the models: the same words stand in `asyncrl keys` and
docs/configuration.md.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from asyncrl.config.run_config import RunConfig
from asyncrl.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Key:
    """One setting: its full name, its type in words, its default as it is written, and what it means.

    The default of a section is '': its keys have their own.
    """

    name: str
    type: str
    default: str
    meaning: str


def sections() -> Iterator[tuple[str, str, list[Key]]]:
    """(section, what it is about, its keys), in the order of the config; the first one, '', holds the
    top-level keys.
    """
    top = [_key(name, info) for name, info in RunConfig.model_fields.items() if _model_of(info) is None]
    yield "", "Settings outside any section.", top
    for name, info in RunConfig.model_fields.items():
        model = _model_of(info)
        if model is not None:
            about = " ".join((model.__doc__ or "").split())
            yield name, about, list(_keys_of(model, f"{name}."))


def describe_keys(section: str | None = None) -> str:
    """All settings, or one section's, a line or two each. Raises ConfigError for a section that does not
    exist.
    """
    found = [(name, about, keys) for name, about, keys in sections() if section is None or name == section]
    if not found:
        names = [name for name, _, _ in sections() if name]
        closest = difflib.get_close_matches(str(section), names, n=1)
        raise ConfigError(
            f"there is no section {section}" + (f"; did you mean {closest[0]}?" if closest else ""),
            rule=f"sections are {', '.join(names)}",
            way_out="give one of them, or none for all.",
        )
    lines = []
    for name, about, keys in found:
        lines.append(f"{name or 'top level'}: {about}")
        for key in keys:
            default = f", default {key.default}" if key.default else ""
            lines.append(f"  {key.name} ({key.type}{default})")
            lines.append(f"      {key.meaning}")
        lines.append("")
    return "\n".join(lines).rstrip()


def _keys_of(model: type[BaseModel], prefix: str) -> Iterator[Key]:
    for name, info in model.model_fields.items():
        nested = _model_of(info)
        yield _key(prefix + name, info)
        if nested is not None:
            yield from _keys_of(nested, f"{prefix}{name}.")


def _key(name: str, info: FieldInfo) -> Key:
    if info.is_required():
        default = "must be given"
    else:
        value = (
            info.get_default(call_default_factory=True) if info.default is PydanticUndefined else info.default
        )
        default = _value_text(value)
    return Key(name, _type_text(info), default, " ".join((info.description or "").split()))


def _value_text(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, BaseModel):
        return ""
    if isinstance(value, bool):
        return str(value).lower()
    return str(list(value) if isinstance(value, tuple) else value)


def _type_text(info: FieldInfo) -> str:
    names = {int: "integer", float: "number", str: "text", bool: "true or false", type(None): "none"}

    def text(kind: Any) -> str:
        if kind in names:
            return names[kind]
        origin, arguments = get_origin(kind), get_args(kind)
        if origin is Literal:
            return " | ".join(str(argument) for argument in arguments)
        if origin is list:
            return f"list of {text(arguments[0])}"
        if origin is tuple:
            return f"{len(arguments)} numbers"
        if origin is dict:
            return "mapping"
        if origin is not None and hasattr(kind, "__metadata__"):
            return text(arguments[0])
        if arguments:
            return " | ".join(text(argument) for argument in arguments)
        return "section" if isinstance(kind, type) and issubclass(kind, BaseModel) else str(kind)

    return text(info.annotation)


def _model_of(info: FieldInfo) -> type[BaseModel] | None:
    for kind in (info.annotation, *get_args(info.annotation)):
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            return kind
    return None
