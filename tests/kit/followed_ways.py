"""A person who follows the ways out of printed refusals, to the letter."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, TypeAlias

from printed_texts import END, KEY, ROOT, Printed, literals_of, values_in

Way: TypeAlias = list[str]
"""Settings to write, such as a.b=1, and to remove, such as -a.b. `-a.b?`: if given."""
REMOVED = re.compile(rf"(remove|no) (it|{KEY})\b(?!=)")
PIECES = re.compile(r",? or (?!less|more|lower|higher)")
LONE = re.compile(rf"[\w-]+{END}")
GENERAL = "correct the file or the key=value after it"
"""The way out of a broken rule: what to do is said with the rule."""


@dataclass(frozen=True)
class Typed:
    """A config and the settings on the command line. `devices`: of another machine."""

    file: dict[str, Any]
    overrides: tuple[str, ...]
    devices: str | None = None

    def without(self, key: str) -> Typed | None:
        """Return it without a setting, or None if there is no such setting."""
        kept = [
            one
            for one in self.overrides
            if one != key and not re.match(rf"{key}[.=]", one)
        ]
        if len(kept) < len(self.overrides):
            return replace(self, overrides=tuple(kept))
        section, _, name = key.partition(".")
        inner = self.file.get(section, {})
        if name not in inner:
            return None
        left = {one: value for one, value in inner.items() if one != name}
        return replace(self, file=self.file | {section: left})

    def changed(self, way: Way) -> Typed | None:
        """Return it after a way out, or None if there is nothing to remove."""
        typed = self
        for setting in way:
            if setting.startswith("-"):
                left = typed.without(setting.strip("-?"))
                if left is None and not setting.endswith("?"):
                    return None
                typed = left or typed
            else:
                typed = replace(typed, overrides=(*typed.overrides, setting))
        return typed


Check: TypeAlias = Callable[[Typed], str | None]
"""Returns the printed refusal, or None."""


def split(line: str) -> Way:
    """Return the arguments of a line without its shell's quotes."""
    return re.split(r" (?=-?[a-z_]+(?:[.=]| =|$))", line)


def parts_of(line: str) -> tuple[str, str, list[Way]]:
    """Return the parts of `MISTAKE -> words of the refusal => WAY | WAY`."""
    mistake, _, rest = line.partition(" -> ")
    says, _, written = rest.partition(" => ")
    return mistake, says, [split(way) for way in written.split(" | ") if way]


def advice_of(said: str) -> tuple[str, str]:
    """Return what a refusal says to do, and the setting that `it` stands for."""
    fault, _, way_out = said.removeprefix("ConfigError: ").partition("\n  Way out: ")
    line = fault.split("\n  ")[0]
    if quoted := re.match(r"override '(.*?)' is ", line):
        return way_out, quoted[1]
    is_rule = way_out.startswith(GENERAL)
    if is_rule and not re.match(r"\S+=", line):
        line = re.sub(r"^\S+ (?:on the command line|in \S+)(?:: )?", "", line)
    named = re.search(KEY, line)
    rule = re.search(r"; .*|\bwrite .*", line)
    advice = way_out if not is_rule else rule[0].removeprefix("; ") if rule else ""
    # What follows another ; or a full stop is a remark.
    return re.split(r"; |\. |\n", advice)[0], named[0] if named else ""


def ways_in(said: str, *, has_cuda: bool = True) -> list[Way]:
    """Return the alternatives that a refusal offers."""
    advice, it = advice_of(said)
    ways = list[Way]()
    for piece in PIECES.split(advice.strip().rstrip(".")):
        if "CUDA only" in piece and not has_cuda:
            continue
        removed = [
            f"-{it if key == 'it' else key}{'?' if verb == 'no' else ''}"
            for verb, key in REMOVED.findall(piece)
        ]
        values = [*values_in(piece)]
        settings = [f"{key}={value}" for key, value in values]
        if len({key for key, _ in values}) < len(values):  # `a.b to x, y`
            ways += [[one] for one in settings]
        elif removed or settings:
            # The argument `a.b = 1` is written over.
            over = [f"-{it}"] if it and not re.fullmatch(KEY, it) else []
            ways.append([*over, *removed, *settings])
        elif ways and LONE.fullmatch(piece):  # `a.b=x or y`
            *before, last = ways[-1]
            ways.append([*before, f"{last.partition('=')[0]}={piece}"])
        elif ways and re.fullmatch(KEY, piece) and ways[-1][0].startswith("-"):
            ways.append([f"-{piece}"])  # `remove a.b, or c.d`
    return ways


def refusals() -> Iterator[Printed]:
    """Yield the text of each refusal of settings: rules of sections, and errors of the
    modules that choose algorithms and devices.
    """
    config = sorted((ROOT / "asyncrl/config").glob("*.py"))
    config += sorted((ROOT / "asyncrl").glob("extensions/*/*_config.py"))
    config += sorted((ROOT / "asyncrl").glob("extensions/*/*_rules.py"))
    others = ("algorithms/registry.py", "launch/placement.py")
    for path in [*config, *(ROOT / "asyncrl" / name for name in others)]:
        tree = ast.parse(path.read_text(encoding="utf-8"))
        nodes = list[ast.expr | None]()
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef) and "conflicts" in node.name:
                yielded = (one for one in ast.walk(node) if isinstance(one, ast.Yield))
                nodes += [one.value for one in yielded]
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                is_raised = node.func.id in ("ConfigError", "ValueError", "_refused")
                nodes += node.args[:1] if is_raised else []
        yield from literals_of(path.name, tree, nodes)


def ways_of_errors() -> Iterator[Printed]:
    """Yield the ways out with a setting of all other errors in a config."""
    covered = ("algorithms/registry.py", "launch/placement.py", "config/")
    for path in sorted((ROOT / "asyncrl").rglob("*.py")):
        place = str(path.relative_to(ROOT / "asyncrl"))
        text = path.read_text(encoding="utf-8")
        if place.startswith(covered) or "way_out" not in text:
            continue
        tree = ast.parse(text)
        ways = [
            word.value
            for node in ast.walk(tree)
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "ConfigError"
            for word in node.keywords
            if word.arg == "way_out"
        ]
        for printed in literals_of(place, tree, ways):
            if [*values_in(printed.text)] or REMOVED.search(printed.text):
                yield printed


@cache
def all_refusals() -> tuple[Printed, ...]:
    return tuple(refusals())


@cache
def patterns() -> tuple[tuple[re.Pattern[str], str], ...]:
    """Return how each refusal is printed, the most specific first."""
    texts = sorted(all_refusals(), key=lambda one: -len(one.text))
    return tuple((one.pattern, one.shown) for one in texts)


@cache
def name_of(said: str) -> str:
    """Return the text of a refusal in the code, with holes; of others as it is."""
    return next((shown for pattern, shown in patterns() if pattern.search(said)), said)


def leads_out(typed: Typed, way: Way, check: Check, met: frozenset[str]) -> bool:
    """Return whether a config is taken after a way out, at once or by one of the ways
    out of each further refusal. No refusal may come again. A further refusal without
    such a way, which names no setting of this one, is of another mistake.
    """
    changed = typed.changed(way)
    said = None if changed is None else check(changed)
    if changed is None or said is None:
        return changed is not None
    name = name_of(said)
    if name in met:
        return False
    ways = ways_in(said, has_cuda=typed.devices is not None)
    keys = [setting.strip("-?").partition("=")[0] for setting in way]
    is_other = not ways and not any(key in said for key in keys)
    return is_other or any(
        leads_out(changed, further, check, met | {name}) for further in ways
    )


def dead_ends(typed: Typed, check: Check, ways: Sequence[Way] = ()) -> list[Way] | None:
    """Return the ways out of a refusal that do not lead out; None if it has no way out
    that is a setting. `ways`: in place of the printed ones, where a rule is printed.
    """
    said = check(typed)
    assert said is not None
    for first, *_ in ways:
        key = re.split(r"[.=?-]", first.partition("=")[0])[-1]
        assert key in said, f"{key} is not named in: {said}"
    ways = ways or ways_in(said, has_cuda=typed.devices is not None)
    met = frozenset({name_of(said)})
    dead = [way for way in ways if not leads_out(typed, way, check, met)]
    return dead if ways else None
