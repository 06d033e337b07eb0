"""The page on staleness runs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parent.parent / "docs" / "staleness.md"


def test_the_example_on_the_staleness_page_runs(capsys: pytest.CaptureFixture[str]) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL)
    exec(compile(example, str(PAGE), "exec"), {})
    assert "mean age" in capsys.readouterr().out
