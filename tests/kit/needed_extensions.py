"""Files of the repository that need extensions. Tests that are parametrised by such a
file, and tests marked `extension`, are skipped if the extension is not in use:
`ASYNCRL_EXTENSIONS=core` runs the tests of the core.
"""

from __future__ import annotations

from pathlib import Path

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
    "ray": [
        "configs/gsm8k-qwen2.5-7b-2x8gpu-colocated.yaml",
        "configs/gsm8k-qwen2.5-7b-2x8gpu.yaml",
        "docs/clusters.md",
    ],
    "sft": [
        "configs/sft.yaml",
        "docs/sft.md",
        "docs/sft-then-rl.md",
        "examples/sft_then_rl/rl.yaml",
        "examples/sft_then_rl/sft.yaml",
    ],
}
"""Pages and configs with settings of an extension."""


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
    marked = [mark.args[0] for mark in item.iter_markers("extension")]
    missing = [name for name in marked if name not in extensions()]
    callspec = getattr(item, "callspec", None)
    for value in callspec.params.values() if callspec is not None else ():
        missing += missing_for(value) if isinstance(value, str | Path) else []
    return missing
