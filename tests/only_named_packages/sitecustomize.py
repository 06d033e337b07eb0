"""Hide all installed packages but those named in ONLY_PACKAGES, and what they require.

A folder for PYTHONPATH: Python imports this module at its start.
"""

import importlib.metadata
import os
import re
import sys
from importlib.machinery import PathFinder
from typing import Any


def requirements(names: set[str]) -> set[str]:
    """Return the import names of these packages and of all that they require, extras left out."""
    providers = importlib.metadata.packages_distributions()
    waiting = [one for name in names for one in providers.get(name, ())]
    seen = set[str]()
    while waiting:
        distribution = re.sub(r"[-_.]+", "-", waiting.pop()).lower()
        if distribution in seen:
            continue
        seen.add(distribution)
        try:
            required = importlib.metadata.requires(distribution) or []
        except importlib.metadata.PackageNotFoundError:
            continue
        waiting += [re.split(r"[^\w.-]", one)[0] for one in required if "extra ==" not in one]
    return {
        name
        for name, given in providers.items()
        if seen & {re.sub(r"[-_.]+", "-", one).lower() for one in given}
    }


class Shown:
    """Python's finder of files without the hidden packages."""

    def __init__(self, finder: Any, shown: set[str]) -> None:
        self.finder = finder
        self.hidden = {*importlib.metadata.packages_distributions()} - shown - {"asyncrl", "asyncrl_servers"}

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        is_hidden = name.partition(".")[0] in self.hidden
        return None if is_hidden else self.finder.find_spec(name, path, target)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.finder, name)


if "ONLY_PACKAGES" in os.environ:
    at = sys.meta_path.index(PathFinder)
    sys.meta_path[at] = Shown(PathFinder, requirements({*os.environ["ONLY_PACKAGES"].split()}))
