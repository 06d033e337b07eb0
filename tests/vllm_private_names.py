"""Print the signature of each MODULE:NAME(...) on stdin. Run by vLLM's Python."""

from __future__ import annotations

import importlib
import inspect
import sys


def signature(name: str) -> str:
    """Return the parameters, or the type of what cannot be called."""
    module, _, path = name.partition(":")
    try:
        found = importlib.import_module(module)
        for part in path.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        return repr(error)
    found = inspect.unwrap(found)
    return ", ".join(inspect.signature(found).parameters) if callable(found) else type(found).__name__


for line in sys.stdin:
    name = line.partition("(")[0]
    print(f"{name}({signature(name)})")
