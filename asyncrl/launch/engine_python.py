"""Find the Python of separately installed engines (vLLM)."""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import subprocess
import sys
from pathlib import Path

import asyncrl
from asyncrl.base.errors import ConfigError, install_extra
from asyncrl.config import RolloutConfig

CHECKOUT = Path(asyncrl.__file__).resolve().parent.parent
ASK = "import importlib.metadata, sys; importlib.metadata.version(sys.argv[1])"
ASK_TIMEOUT_S = 30.0


def find_python(rollout: RolloutConfig) -> Path:
    """Return rollout.vllm_python, ours, or the Python in .venv-vllm or $VENV_VLLM. Raises ConfigError."""
    package = rollout.facts.package or ""
    given = getattr(rollout, f"{package}_python")
    named = Path(shutil.which(Path(given).expanduser()) or given)
    folder = Path(os.environ.get(f"VENV_{package.upper()}") or CHECKOUT / f".venv-{package}")
    pythons = [Path(sys.executable), folder / "bin" / "python"] if given == "auto" else [named]
    for python in pythons:
        if has_package(python.absolute(), package):
            return python.absolute()  # do not resolve: a venv's python is a link
    raise ConfigError(
        f"rollout.{package}_python={given}: {' and '.join(map(str, pythons))} cannot import {package}",
        way_out=f"{install_extra(package)} (CUDA), or `make setup-{package}` (CPU); or name one.",
    )


@functools.cache
def has_package(python: Path, package: str) -> bool:
    environ = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    asking = [str(python), "-c", ASK, package]
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        return not subprocess.run(asking, env=environ, capture_output=True, timeout=ASK_TIMEOUT_S).returncode
    return False
