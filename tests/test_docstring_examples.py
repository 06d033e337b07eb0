"""The worked examples of docstrings are true."""

from __future__ import annotations

import doctest
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FOLDERS = [(ROOT, "asyncrl"), (ROOT / "servers", "asyncrl_servers")]
MODULES = [
    ".".join(path.relative_to(root).with_suffix("").parts)
    for root, name in FOLDERS
    for path in sorted((root / name).rglob("*.py"))
    if ">>> " in path.read_text()
]


@pytest.mark.parametrize("module", MODULES)
def test_examples_of_a_module_are_true(module: str) -> None:
    result = doctest.testmod(import_module(module))
    assert (result.failed, result.attempted > 0) == (0, True)
