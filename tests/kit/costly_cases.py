"""Cases that cost too much for each commit. A quick case of each kind stays quick."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import pytest

slow = partial(pytest.param, marks=pytest.mark.slow)


def every_third_is_quick(cases: Iterable[tuple[Any, ...]]) -> list[Any]:
    """Return the cases for parametrize. CI rotates the others one by one."""
    marks = [pytest.mark.slow, pytest.mark.rotated]
    return [
        pytest.param(*case, marks=marks if number % 3 else ())
        for number, case in enumerate(cases)
    ]
