"""Hide all installed packages but those named in ONLY_PACKAGES, and what they require.

A folder for PYTHONPATH: Python imports this module at its start.
"""

import importlib.metadata
import os
import re
import sys


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


class Hidden:
    """Import finder that raises for hidden packages."""

    def __init__(self, shown: set[str]) -> None:
        ours = {"asyncrl", "asyncrl_servers"}
        self.hidden = set(importlib.metadata.packages_distributions()) - shown - ours

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name.partition(".")[0] in self.hidden:
            raise ModuleNotFoundError(f"No module named {name!r} (hidden)", name=name)


if "ONLY_PACKAGES" in os.environ:
    sys.meta_path.insert(0, Hidden(requirements(set(os.environ["ONLY_PACKAGES"].split()))))  # type: ignore[arg-type]
