"""asyncrl: fully asynchronous reinforcement learning of language models, with a hard
staleness bound on every token. From Python: docs/python.md.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.2.0.dev0"
_FOUND_IN = {
    "RunConfig": "asyncrl.config",
    "RunRecord": "asyncrl.observe.read_run",
    "delete_run": "asyncrl.job.run_control",
    "evaluate": "asyncrl.job.evaluate",
    "load_config": "asyncrl.config",
    "read_run": "asyncrl.observe.read_run",
    "run": "asyncrl.api",
    "stop_run": "asyncrl.job.run_control",
    "sweep": "asyncrl.job.sweep",
}
"""Imported on access, because servers and workers do not need them."""
__all__ = ["__version__", *_FOUND_IN]


def __getattr__(name: str) -> Any:
    if name not in _FOUND_IN:
        raise AttributeError(f"module 'asyncrl' has no attribute {name!r}")
    return getattr(importlib.import_module(_FOUND_IN[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_FOUND_IN})
