"""The texts that the product prints, and the settings and commands that they name."""

from __future__ import annotations

import ast
import re
import shlex
import tomllib
from collections.abc import Iterable, Iterator
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, get_args, get_origin

import yaml
from pydantic import BaseModel, ValidationError
from typer.main import get_command

from asyncrl.cli import app
from asyncrl.config.load import job_forms

ROOT = Path(__file__).parents[2]
HOLE = "\0"
"""Stands for a part of a text that is known only at run time."""
ROOTS = tuple(job_forms().values())
SECTIONS = "|".join({name: "" for form in ROOTS for name in form.model_fields})
KEY = rf"(?:{SECTIONS})(?:\.[\w{HOLE}-]+)*"
BRACES = r"\{(?:[^{}]|\{[^{}]*\})*\}|\[[^\[\]]*\]"
VALUE = rf"'[^']*'|{BRACES}|[\w{HOLE}+-](?:[\w{HOLE}+./:-]*[\w{HOLE}])?"
END = r"(?=[`,;)]|\.(?!\w)|$| or\b| and\b| \()"
SETTING = re.compile(
    rf"(?<![\w.{{/@-])(?:({KEY})=({VALUE})|({KEY}\.\w+)(?:: | to )({VALUE}){END})"
)
OTHER_VALUE = re.compile(rf"(?:, or|,| or) (?!more|less|lower)([\w-]+){END}")
DOTTED = re.compile(
    rf"(?<![\w./:{{@\-\[])(?:{SECTIONS})(?:\.[a-z_0-9]+)+(?![\w/(.]|\.\w)"
)
COMMAND = re.compile(r"(`|: |^|\()asyncrl ([a-z][\w-]*|-[\w-]+)([^`;:,)\n]*)")
OTHER_PROGRAM = re.compile(
    r"`(?:ray|hf|vf-eval) [^`]*`|docker run --\S+|--env\.NAME|without -\S+|has --\S+"
)
FILE = re.compile(r"(?<![\w/.])(?:docs|examples|asyncrl|configs)/[\w./-]+\.\w+")
IS_FILE = re.compile(r"\.(py|md|json|jsonl|sqlite|lock|key|log)$")
OF_THE_EXAMPLE = "generator.tries"
"""A setting of examples/extension. tests/test_extensions.py runs the page's command."""
NO_SETTINGS = frozenset(
    (
        "task.answer",
        "data.digest",
        "task.digest",
        "rollout.oversample",
        OF_THE_EXAMPLE,
        "rollout.fixed_tokens",
    )
)
"""An attribute that harnesses read, names of --allow-change, a key of a framework, and
keys of examples/extension.
"""
EXAMPLES = frozenset(("0", "1", "2", "sums", "words", "NAME", "KEY", HOLE))
"""Parts of a key that stand for one of several tasks, evaluations or teachers."""


class Printed(NamedTuple):
    """A text in the code, with holes."""

    place: str
    text: str

    @property
    def shown(self) -> str:
        return self.text.replace(HOLE, "{}")

    @property
    def pattern(self) -> re.Pattern[str]:
        """Match the text as it is printed, with values, and .key with its section."""
        parts = map(re.escape, self.text.split(HOLE))
        text = re.sub(r"(?<!\S)\\\.(?=[a-z]|\.\*\?)", r"\\S*\\.", ".*?".join(parts))
        return re.compile(text, re.DOTALL)


def texts_of(folder: str) -> Iterator[Printed]:
    """Yield every text in the code of a folder that has several words and is not a
    docstring.
    """
    for path in sorted((ROOT / folder).rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        nodes = list(ast.walk(tree))
        inner = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
        for node in nodes:
            if isinstance(node, ast.JoinedStr):
                inner |= {id(part) for part in node.values}
        outer = (node for node in nodes if id(node) not in inner)
        for printed in literals_of(str(path.relative_to(ROOT)), tree, outer):
            # A text that begins with an empty line is a table or a program.
            if " " in printed.text and not printed.text.startswith("\n"):
                yield printed


def literals_of(
    path: str, tree: ast.Module, nodes: Iterable[ast.AST | None]
) -> Iterator[Printed]:
    """Yield the literal texts among the nodes of a module."""
    constants = {
        target.id: node.value
        for node in tree.body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    for node in nodes:
        text = text_of(node, constants)
        if text is not None:
            yield Printed(f"{path}:{node.lineno}", text)  # type: ignore[union-attr]


def text_of(node: ast.AST | None, constants: dict[str, ast.expr]) -> str | None:
    """Return the text of a literal, or None."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else None
    if not isinstance(node, ast.JoinedStr):
        return None
    parts = list[str]()
    for part in node.values:
        value = part.value if isinstance(part, ast.FormattedValue) else part
        if isinstance(value, ast.Name):
            value = constants.get(value.id, value)
        parts.append(text_of(value, {}) or HOLE)
    return "".join(parts)


# ---- settings


def types_in(annotation: object) -> Iterator[object]:
    yield annotation
    for part in get_args(annotation):
        yield from types_in(part)


def fields_named(key: str) -> list[tuple[type[BaseModel], str]]:
    """Return the sections and fields that a key names; empty if there is no such key."""
    head, *parts = key.split(".")
    found: list[tuple[type[BaseModel], str]]
    found = [(form, head) for form in ROOTS if head in form.model_fields]
    for part in parts:
        inner = [
            kind
            for form, name in found
            for kind in types_in(form.model_fields[name].annotation)
        ]
        if any(dict in (kind, get_origin(kind)) for kind in inner):
            return found
        sections = [
            kind
            for kind in inner
            if isinstance(kind, type) and issubclass(kind, BaseModel)
        ]
        named = [(form, part) for form in sections if part in form.model_fields]
        if not named and part in EXAMPLES:
            continue
        found = named
    return found


def fault_of_value(key: str, value: str) -> str | None:
    """Return why a key cannot have this value, or None."""
    faults = list[str]()
    for form, name in fields_named(key):
        kinds = [*types_in(form.model_fields[name].annotation)]
        if dict in map(get_origin, kinds) and not key.endswith(f".{name}"):
            return None
        try:
            form.model_validate({name: yaml.safe_load(value)})
        except ValidationError as error:
            own = [one["msg"] for one in error.errors() if one["loc"][:1] == (name,)]
            if not own:
                return None
            faults += own
        else:
            return None
    return f"{key}={value}: {faults[0]}" if faults else f"no setting {key}"


def values_in(text: str) -> Iterator[tuple[str, str]]:
    """Yield (key, value) for `a.b=c`, `a.b: c`, `a.b to c`, and for `a.b=c or d` twice."""
    for match in SETTING.finditer(text):
        key = match[1] or match[3]
        yield key, (match[2] or match[4]).strip("'")
        at = match.end()
        while other := OTHER_VALUE.match(text, at):
            yield key, other[1]
            at = other.end()


# ---- commands


@cache
def cached_app() -> Any:
    return deepcopy(get_command(app))  # parse() replaces the callbacks


def commands() -> dict[str, Any]:
    return dict(cached_app().commands)


@cache
def options() -> frozenset[str]:
    found = set[str]()
    waiting = [cached_app()]
    while waiting:
        command: Any = waiting.pop()
        waiting += getattr(command, "commands", {}).values()
        found |= {name for one in command.params for name in one.opts}
    return frozenset(found | {"--help", "-h"})


def parse(arguments: list[str]) -> dict[str, Any]:
    """Parse the arguments of `asyncrl` with its own parser. No command runs."""
    parsed: dict[str, Any] = {}

    def capture(command: Any) -> None:
        for sub in getattr(command, "commands", {}).values():
            capture(sub)
        if not hasattr(command, "commands"):
            command.callback = parsed.update

    group = cached_app()
    capture(group)
    group.main(arguments, prog_name="asyncrl", standalone_mode=False)
    return parsed


@cache
def fault_of_command(name: str, rest: str) -> str | None:
    """Return why `asyncrl NAME REST` cannot be typed, or None. The name alone is a
    mention.
    """
    try:
        arguments = shlex.split(f"{name} {rest}".replace(HOLE, "1"))
    except ValueError as error:
        return f"asyncrl {name}{rest}: {error}"
    if name in options() or (name in commands() and arguments[1:] in ([], ["--help"])):
        return None
    numbers = {"N": "1", "...": "1", "MODULE:FUNCTION": "a:b"}
    try:
        parse([numbers.get(word, word) for word in arguments])
    except (Exception, SystemExit) as error:
        code = getattr(error, "code", error)
        return f"asyncrl {name}{rest}: {code}" if code else None
    return None


# ---- all of a text


@cache
def extras() -> frozenset[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    return frozenset(project["project"]["optional-dependencies"])


@cache
def targets() -> frozenset[str]:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    return frozenset(re.findall(r"^([\w-]+):", makefile, re.MULTILINE))


def faults_of(text: str) -> Iterator[str]:
    """Yield each key, value, command, option, extra, target and file that a text names
    and that does not exist.
    """
    for key in DOTTED.findall(text):
        if key not in NO_SETTINGS and not fields_named(key) and not IS_FILE.search(key):
            yield f"no setting {key}"
    for key, value in values_in(text):
        is_known = HOLE not in key + value and "..." not in value
        if is_known and (fault := fault_of_value(key, value)):
            yield fault
    for mark, name, rest in COMMAND.findall(text):
        is_named = name in commands() or mark == "`" or name.startswith("-")
        if is_named and (fault := fault_of_command(name, rest.rstrip(". "))):
            yield fault
    own = OTHER_PROGRAM.sub("", text)
    for option in re.findall(r"(?<![\w-])--[a-z][a-z-]*[a-z]", own):
        if option not in options():
            yield f"no option {option}"
    for extra in re.findall(r"asyncrl\[([^\]]*)\]", text):
        if extra != HOLE and extra not in extras():
            yield f"no extra {extra}"
    for target in re.findall(r"`make ([\w-]+)`", text):
        if target not in targets():
            yield f"no target {target}"
    for file in FILE.findall(text):
        if not (ROOT / file).exists():
            yield f"no file {file}"
