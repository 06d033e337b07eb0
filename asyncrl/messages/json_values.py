"""Values of untyped text: the types that a JSON schema gives them, and Python literals."""

from __future__ import annotations

import ast
import contextlib
import json
import re
import warnings
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, TypeVar
from urllib.parse import unquote

from pydantic_core import from_json

T = TypeVar("T", list[object], dict[str, object])
PYTHON_WORDS = {"True": "true", "False": "false", "None": "null", "(": "[", ")": "]"}
_PYTHON = re.compile(
    r"'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"|\b(?:True|False|None)\b|[()]", re.DOTALL
)
_ESCAPE = re.compile(r"\\['\"\\/bfnrtu]|\\x(?=[0-9a-fA-F]{2})|[\\\"]")
_ESCAPED = {"\\'": "'", '"': '\\"', "\\": "\\\\", "\\x": "\\u00"}


def _quoted(text: str) -> str:
    """Return a Python string as JSON. Quotes inside may not be escaped."""
    inner = _ESCAPE.sub(lambda found: _ESCAPED.get(found[0], found[0]), text[1:-1])
    return f'"{inner}"'


def as_object(arguments: object) -> dict[str, object]:
    """Return the arguments of a call, perhaps JSON, or `{}` if they are not an object, like
    vLLM: every later call has the same history.
    """
    with contextlib.suppress(ValueError):
        arguments = from_json(arguments) if isinstance(arguments, str) else arguments
    return arguments if isinstance(arguments, dict) else {}


def without_nulls(value: Any) -> Any:
    """Leave out keys without a value. Parquet files and datasets give every object the
    keys of all others, as null.
    """
    if isinstance(value, Mapping):
        return {
            name: without_nulls(one) for name, one in value.items() if one is not None
        }
    return [without_nulls(one) for one in value] if isinstance(value, list) else value


def from_python(text: str, *_: object) -> object:
    """Parse a Python literal, or JSON. Raises ValueError.

    Example: `{'k': [1, None, "it's"]}`.
    """
    with contextlib.suppress(ValueError):
        return json.loads(text, strict=False)
    with contextlib.suppress(*_NO_LITERAL), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of escapes that Python keeps, such as "\d"
        return json.loads(json.dumps(ast.literal_eval(text.strip())))
    if len(text) > 1 and text[0] == text[-1] and text[0] in ("'", '"'):
        return json.loads(_quoted(text), strict=False)
    # a model also mixes the two forms, such as {'a': true}
    tokens = _PYTHON.sub(
        lambda found: PYTHON_WORDS.get(found[0]) or _quoted(found[0]), text
    )
    return json.loads(tokens, strict=False)


_NO_LITERAL = (ValueError, TypeError, SyntaxError, MemoryError, RecursionError)
_KINDS = {
    str: "string",
    bool: "boolean",
    int: "number",
    float: "number",
    type(None): "null",
    list: "array",
}
# Tools of Python (BFCL) and Gemini have other names of types, as vLLM knows, too.
_NAMES = {
    **{kind: kind for kind in (*_KINDS.values(), "integer", "object")},
    **{python.__name__: kind for python, kind in _KINDS.items()},
    **{"int": "integer", "dict": "object", "tuple": "array"},
}
_SAMPLES = ("\ufffe", -0.12345, False, None, ["\ufffe"], {"\ufffe": 0})
"""Only a schema without types allows all of them."""
_MAX_SCHEMAS = 100


def typed(raw: str, schema: object, root: object) -> object:
    """Return text if the schema allows this text, else the JSON or Python value. `root`
    has the definitions.

    A `null` or `None` that the schema allows is None. Without types, numbers, words and
    brackets are JSON, because templates write text unquoted.

    Example: the same two characters under three schemas.
        >>> [typed("12", {"type": kind}, {}) for kind in ("string", "integer")]
        ['12', 12]
        >>> typed("12", {}, {})
        12
    """
    is_text = fits(raw, schema, root)
    try:
        value = json.loads(PYTHON_WORDS.get(raw, raw)) if is_text else from_python(raw)
        json.dumps(value, allow_nan=False)
    except (ValueError, RecursionError):
        return raw
    if isinstance(value, str):
        return raw
    is_value = fits(value, schema, root)
    if is_text and is_value:
        is_free = all(fits(each, schema, root) for each in _SAMPLES)
        return value if is_free or value is None else raw
    if not is_text and not is_value:
        is_text, is_value = (
            fits(each, schema, root, by_kind=True) for each in (raw, value)
        )
    return value if is_value and not is_text else raw


def fits(
    value: Any,
    schema: object,
    root: object,
    *,
    by_kind: bool = False,
    left: list[int] | None = None,
) -> bool:
    """Return whether a schema's types, enums and constants allow a value; `by_kind`: a
    value of its kind.

    `left` bounds the schemas that are read: definitions may be recursive.
    """
    left = [_MAX_SCHEMAS] if left is None else left
    left[0] -= 1
    if not isinstance(schema, Mapping) or left[0] < 0:
        return schema is not False
    kind = _KINDS.get(type(value), "object")
    declared = schema.get("type")
    given = [declared] if isinstance(declared, str) else _part(schema, "type", list)
    names = (str(each).lower() for each in given)
    # no name is known: any value
    kinds = [_NAMES[name] for name in names if name in _NAMES] or [kind]
    is_whole = kind == "number" and (by_kind or value == int(value))
    if kind not in kinds and not (is_whole and "integer" in kinds):
        return value is None and schema.get("nullable") is True
    allowed = [schema["const"]] if "const" in schema else _part(schema, "enum", list)
    if allowed:
        alike = [each for each in allowed if _KINDS.get(type(each), "object") == kind]
        if not alike or not (by_kind or value in alike):
            return False
    inner = partial(fits, root=root, by_kind=by_kind, left=left)
    return all(
        any(inner(value, each) for each in choice) for choice in _choices(schema, root)
    )


def _part(schema: Mapping[str, object], key: str, form: type[T]) -> T:
    """Return a keyword's value. A client's schema may be ill-formed: a keyword of
    another form is ignored.
    """
    value = schema.get(key)
    return value if isinstance(value, form) else form()


def _choices(schema: Mapping[str, object], root: object) -> Sequence[Sequence[object]]:
    """Return lists of schemas; in each list, one schema applies."""
    every = list[object](_part(schema, "allOf", list))
    if "$ref" in schema:
        every.append(_resolved(schema["$ref"], root))
    return [
        *([each] for each in every),
        *filter(None, (_part(schema, key, list) for key in ("anyOf", "oneOf"))),
    ]


def _resolved(ref: object, root: object) -> object:
    """Return the schema of a local `$ref`. Another document's allows anything."""
    found: Any = root if str(ref).startswith("#") else {}
    try:
        for part in str(ref).split("/")[1:]:
            part = unquote(part).replace("~1", "/").replace("~0", "~")
            found = found[int(part) if isinstance(found, list) else part]
    except (KeyError, ValueError, IndexError, TypeError):
        return {}
    return found


def property_schema(
    schema: object, key: str | None, root: object, left: list[int] | None = None
) -> object:
    """Return the schema of a property, of items if the key is None."""
    left = [_MAX_SCHEMAS] if left is None else left
    left[0] -= 1
    if not isinstance(schema, Mapping) or left[0] < 0:
        return {}
    properties = _part(schema, "properties", dict)
    other = schema.get("items" if key is None else "additionalProperties", {})
    found = [other if key is None else properties.get(key, other)]
    whole: object = [] if key is None else {}
    for choice in _choices(schema, root):
        fitting = [each for each in choice if fits(whole, each, root, by_kind=True)]
        found.append(
            {"anyOf": [property_schema(each, key, root, left) for each in fitting]}
        )
    return {"allOf": found}
