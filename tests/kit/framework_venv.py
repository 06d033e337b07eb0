"""Packages that `make setup-frameworks` installs beside the environment of the tests."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def framework(name: str) -> Path:
    """Return where `make setup-frameworks` installs it, or skip the test."""
    venv = Path(os.environ.get("VENV_FRAMEWORKS", ROOT / ".venv-frameworks"))
    if not (venv / name).is_dir():
        end = pytest.skip
        if os.environ.get("ASYNCRL_REQUIRE_FRAMEWORKS") == "1":
            end = pytest.fail
        end(f"no {name} at {venv}: run `make setup-frameworks`")
    return venv / name
