"""Files of the repository that need extensions. Tests that are parametrised by such a
file, and tests marked `extension`, are skipped if the extension is not in use:
`ASYNCRL_EXTENSIONS=core` runs the tests of the core.
"""

from __future__ import annotations

import re
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
    "vllm": [
        "configs/gsm8k-qwen2.5-1.5b-1gpu-shared.yaml",
        "configs/gsm8k-qwen2.5-1.5b-1gpu.yaml",
        "configs/gsm8k-qwen2.5-7b-2x8gpu-colocated.yaml",
        "configs/gsm8k-qwen2.5-7b-2x8gpu.yaml",
        "configs/gsm8k-qwen2.5-7b-8gpu-colocated.yaml",
        "configs/gsm8k-qwen2.5-7b-8gpu.yaml",
        "examples/code.yaml",
        "examples/judge.yaml",
        "README.md",
        "docs/colocation.md",
        "docs/coming-from.md",
        "docs/engines.md",
        "docs/install.md",
        "docs/lora.md",
        "docs/troubleshooting.md",
    ],
    "scoring": [
        "configs/distill.yaml",
        "docs/colocation.md",
        "docs/rewards.md",
    ],
    "tinker": [
        "configs/tinker.yaml",
        "docs/results/README.md",
        "docs/tinker.md",
        "README.md",
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
NAMED = {
    "openenv": "openenv",
    "ray": "launcher=ray|^launch |launch slurm|^2x8x80GB placement|nodes: 2",
    "scoring": r"'teacher'|teacher[.=]|TAUGHT|JUDGED|SCORED|distill_|"
    r"reward'?(\.|: \{'?)(judge|model)|placement\.(judge|reward)",
    "sft": r"\bsft\b",
    "simulated": r"\bsimulated\b",
    "trackers": r"wandb|mlflow|trackio|otlp|opentelemetry|\btraces\b",
    "verifiers": "verifiers|VERIFIED|OWN",
    "vllm": r"\bvllm|\brollout\.(urls|tensor_parallel)\b",
}
"""Words in settings, commands and names of files that need an extension, as a pattern."""


def missing_for(file: object) -> list[str]:
    """Return the extensions that a file or settings need and that are not in use."""
    name = str(file).removeprefix(f"{ROOT}/")
    needed = {extension for extension, files in NEEDED.items() if name in files}
    needed |= {extension for extension in NAMED if re.search(NAMED[extension], name)}
    return sorted(needed - extensions().keys())


def skip_without(*settings: str) -> None:
    """Skip a test if its settings need an extension that is not in use."""
    if missing := missing_for(" ".join(settings)):
        pytest.skip(f"no extension {', '.join(missing)}")


def missing_of(item: pytest.Item) -> list[str]:
    """Return the extensions that a test needs and that are not in use."""
    marked = [name for mark in item.iter_markers("extension") for name in mark.args]
    marked += [mark.name for mark in item.iter_markers("vllm")]
    missing = [name for name in marked if name not in extensions()]
    callspec = getattr(item, "callspec", None)
    for value in callspec.params.values() if callspec is not None else ():
        missing += missing_for(value)
    return missing
