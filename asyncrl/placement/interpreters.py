"""Which Python runs vLLM's servers, and how it finds our packages without the rest of ours. Starts none but to ask it a question."""

from __future__ import annotations

import functools
import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import asyncrl
from asyncrl.config import RolloutConfig
from asyncrl.errors import ConfigError, install_extra

CHECKOUT = Path(asyncrl.__file__).resolve().parent.parent
VENV_ENV = "VENV_VLLM"
"""Environment variable that `make setup-vllm` takes its folder from."""
VENV_NAME = ".venv-vllm"
ASK = "import importlib.util, sys; sys.exit(importlib.util.find_spec('vllm') is None)"
ASK_TIMEOUT_S = 30.0
PACKAGES = ("asyncrl", "asyncrl_servers")
INSTALL = f"{install_extra('vllm')} (CUDA), or `make setup-vllm` there (CPU)"


def find_vllm_python(rollout: RolloutConfig, *, checkout: Path = CHECKOUT, has_vllm: Callable[[Path], bool] | None = None) -> Path:
    """rollout.vllm_python, else this Python, else the one of `make setup-vllm`. Raises ConfigError if it has no vLLM."""
    has = has_vllm or _has_vllm
    if rollout.vllm_python != "auto":
        given = Path(rollout.vllm_python).expanduser()
        found = given if given.is_file() else Path(shutil.which(rollout.vllm_python) or "")
        if not (found.is_file() and os.access(found, os.X_OK)):
            raise ConfigError(
                f"rollout.vllm_python={rollout.vllm_python} is no program", rule="it is the Python that vLLM is installed in",
                way_out=f"give the path of its bin/python, or auto after {INSTALL}.",
            )  # fmt: skip
        if not has(found):
            raise ConfigError(
                f"rollout.vllm_python={rollout.vllm_python} cannot import vllm", rule="it is the Python that vLLM is installed in",
                way_out=f"install vLLM there, or set rollout.vllm_python=auto after {INSTALL}.",
            )  # fmt: skip
        return found.absolute()  # not resolved: a venv's python is a link to one that does not have its packages
    if importlib.util.find_spec("vllm") is not None:
        return Path(sys.executable)
    own = Path(os.environ.get(VENV_ENV) or checkout / VENV_NAME) / "bin" / "python"
    if own.is_file() and has(own):
        return own.absolute()
    raise ConfigError(
        f"rollout.engine=vllm, and neither {sys.executable} nor {own} can import vllm",
        rule="vLLM runs in a process of its own, under a Python that it is installed in",
        way_out=f"{INSTALL}; or name the Python that has it: rollout.vllm_python=/path/to/bin/python.",
    )


def import_folder(folder: Path) -> Path:
    """`folder` with links to our two packages and nothing else, for PYTHONPATH: another Python must not see our site-packages."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in PACKAGES:
        spec = importlib.util.find_spec(name)
        if spec is None or not spec.submodule_search_locations:
            raise ConfigError(f"the package {name} is not installed", way_out="install asyncrl again.")
        link, target = folder / name, Path(next(iter(spec.submodule_search_locations))).resolve()
        if link.is_symlink() and link.readlink() == target:
            continue
        link.unlink(missing_ok=True)  # of an installation that has moved since
        link.symlink_to(target, target_is_directory=True)
    return folder


@functools.cache
def _has_vllm(python: Path) -> bool:
    """Asks that Python where vllm is, without importing it, which would take seconds."""
    environ = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    try:
        asked = subprocess.run([str(python), "-c", ASK], env=environ, capture_output=True, timeout=ASK_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return asked.returncode == 0
