"""Files of the repository that need extensions. Tests that are parametrised by such a
file, and tests marked `extension`, are skipped if the extension is not in use:
`ASYNCRL_EXTENSIONS=core` runs the tests of the core.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from asyncrl.base.extensions import extensions

ROOT = Path(__file__).parents[2]
NEEDED = {
    "openenv": [
        "docs/environments.md",
        "docs/openenv.md",
        "docs/results/README.md",
        "examples/openenv/echo.yaml",
        "examples/openenv/learn.yaml",
    ],
    "trackers": ["docs/monitoring.md", "docs/traces.md"],
    "verifiers": [
        "docs/environments.md",
        "docs/evaluation.md",
        "docs/generators.md",
        "docs/verifiers.md",
        "examples/verifiers_env/calculator.yaml",
    ],
    "ray": [
        "configs/gsm8k-qwen2.5-7b-2x8gpu-colocated.yaml",
        "configs/gsm8k-qwen2.5-7b-2x8gpu.yaml",
        "docs/clusters.md",
    ],
}
"""Pages and configs with settings of an extension."""
NAMED = {
    "openenv": "openenv",
    "ray": "launcher=ray|^launch |^2x8x80GB placement",
    "trackers": r"wandb|mlflow|trackio|otlp|opentelemetry|\btraces\b",
    "verifiers": "verifiers|VERIFIED|OWN",
}
"""Words of settings and commands of an extension, as a pattern."""


def marked(line: str, *marks: pytest.MarkDecorator) -> Any:
    """Return a parameter of a test, marked by the extensions that it names."""
    names = [name for name, words in NAMED.items() if re.search(words, line)]
    return pytest.param(line, id=line, marks=[pytest.mark.extension(*names), *marks])


def missing_for(file: object) -> list[str]:
    """Return the extensions that a file needs and that are not in use."""
    name = str(file).removeprefix(f"{ROOT}/")
    return [
        extension
        for extension, files in NEEDED.items()
        if name in files and extension not in extensions()
    ]


def missing_of(item: pytest.Item) -> list[str]:
    """Return the extensions that a test needs and that are not in use."""
    marked = [name for mark in item.iter_markers("extension") for name in mark.args]
    missing = [name for name in marked if name not in extensions()]
    callspec = getattr(item, "callspec", None)
    for value in callspec.params.values() if callspec is not None else ():
        missing += missing_for(value) if isinstance(value, str | Path) else []
    return missing
