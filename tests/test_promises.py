"""docs/promises.md: each promise has a test that exists, and its numbers are those of
the code.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from asyncrl.config.load import sections

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs/promises.md").read_text(encoding="utf-8")
ROWS = [
    line.split("|")
    for line in PAGE.splitlines()
    if line.count("|") == 2 and "`" in line
]
"""(promise, settings and constants with its numbers, tests)."""
DEFAULTS = {key.name: key.default for *_, keys in sections() for key in keys}


def quoted(cell: str) -> list[str]:
    return re.findall("`([^`]+)`", cell)


def is_collected(name: str) -> bool:
    """Return whether pytest finds this test: a function, a method, or the case of a
    state machine.
    """
    file, *_, test = name.split("::")
    path = ROOT / "tests" / file
    defined = rf"^(\s*(async )?def {test}\(|{test} = \w+\.TestCase$)"
    return (
        path.match("test_*.py")
        and re.search(defined, path.read_text(), flags=re.M) is not None
    )


def test_each_promise_names_tests_that_are_collected() -> None:
    assert len(ROWS) > 100
    named = [name for promise, _, tests in ROWS for name in quoted(tests) or [promise]]
    missing = [name for name in named if not is_collected(name)]
    assert not missing, missing


def value_of(name: str) -> str | float:
    """Return the default of a setting, or a constant as its file says, without
    importing it.
    """
    if (default := DEFAULTS.get(name)) is not None:
        return float(default) if re.fullmatch(r"\d+(\.\d+)?", default) else default
    stem, _, constant = name.rpartition(".")
    (path,) = (
        path
        for folder in ("asyncrl", "servers")
        for path in (ROOT / folder).rglob(f"{stem}.py")
    )
    (text,) = re.findall(
        rf"^{constant} = ([\d._e*+-]+)$", path.read_text(encoding="utf-8"), flags=re.M
    )
    return float(eval(text))


def spellings(name: str, value: str | float) -> list[str]:
    """Return how the page may write a value: 4,194,304 bytes are 4 MiB, and 600 s are
    10 minutes.
    """
    if isinstance(value, str):
        return [value]
    if name.lower().endswith("_s"):
        return [f"{value:,g} s", f"{value / 60:g} minutes"]
    sizes = [
        f"{value / 2**10:g} KiB",
        f"{value / 2**20:g} MiB",
        f"{value / 2**30:g} GiB",
    ]
    return [f"{value:,.10g}", *sizes]


@pytest.mark.parametrize("row", [row for row in ROWS if row[1]], ids=lambda row: row[1])
def test_numbers_of_the_page_are_those_of_the_code(row: list[str]) -> None:
    promise, numbers, _ = row
    for name in quoted(numbers):
        written = "|".join(map(re.escape, spellings(name, value_of(name))))
        assert re.search(rf"(?<![\w.,])({written})(?!\w|[.,]\d)", promise), (
            name,
            value_of(name),
        )
