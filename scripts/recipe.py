"""Train one of the recipes of docs/recipes.md, and keep its curve.

    python scripts/recipe.py --list
    python scripts/recipe.py NAME [key=value ...] [--run-dir DIR] [--out results]

Makes what the config needs, runs `asyncrl run` (which downloads model and data, and
evaluates on held-out prompts), and writes OUT/NAME-CARD.json. A run
that is interrupted resumes by the same command.
"""

from __future__ import annotations

import argparse
import json
import platform
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Recipe:
    """`needs`: files that a script of examples/ makes. `settings`: overrides of the
    config.
    """

    goal: str
    config: str
    hardware: str
    needs: tuple[tuple[str, str], ...] = ()
    settings: tuple[str, ...] = ()


SMOLLM2 = (("models/smollm2-135m-instruct", "examples/smollm2.py"),)
RECIPES = {
    "math": Recipe(
        "grade school math, GSM8K",
        "configs/gsm8k-qwen3-0.6b-1gpu.yaml",
        "one GPU, 24 GB",
    ),
    "tools": Recipe(
        "call a tool",
        "configs/agent.yaml",
        "2 CPU cores",
        settings=(
            "eval.task.python=examples.lookup:Directory",
            "eval.task.size=64",
            "eval.task.reward_pool=inline",
            "eval.every=60",
        ),
    ),
    "search": Recipe(
        "search, then answer", "examples/search/learn.yaml", "2 CPU cores", SMOLLM2
    ),
    "judge": Recipe(
        "summaries that a judge grades", "examples/judge.yaml", "one GPU, 80 GB"
    ),
    "code": Recipe(
        "functions that pass their tests", "examples/code.yaml", "one GPU, 80 GB"
    ),
}


def train(recipe: Recipe, overrides: list[str], run_dir: Path) -> list[str]:
    """Make what is missing, and run. Return the command. Raises CalledProcessError."""
    for made, script in recipe.needs:
        if not (ROOT / made).exists():
            subprocess.run([sys.executable, script], cwd=ROOT, check=True)
    settings = [*recipe.settings, *overrides]
    words = ["run", recipe.config, *settings, "--run-dir", str(run_dir)]
    subprocess.run([sys.executable, "-m", "asyncrl.cli", *words], cwd=ROOT, check=True)
    return ["asyncrl", *words]


def read_lines(path: Path, *names: str) -> list[dict[str, Any]]:
    """Return these values of each line that has them all."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    rows = [json.loads(line) for line in lines]
    return [
        {name: row[name] for name in names}
        for row in rows
        if all(name in row for name in names)
    ]


def card() -> str:
    """Return the CUDA device's name, or the processor's kind."""
    import torch

    return (
        torch.cuda.get_device_name()
        if torch.cuda.is_available()
        else f"cpu {platform.machine()}"
    )


def main() -> None:
    """List the recipes, or train one."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("name", nargs="?", choices=RECIPES)
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--run-dir", type=Path, help="default: runs/recipe-NAME")
    parser.add_argument("--out", type=Path, default=Path("results"))
    arguments = parser.parse_intermixed_args()
    if arguments.list:
        for name, recipe in RECIPES.items():
            print(f"{name:<8} {recipe.goal:<34} {recipe.hardware:<16} {recipe.config}")
        return
    if arguments.name is None:
        parser.error(f"give --list or a name of {', '.join(RECIPES)}")
    run_dir = (
        arguments.run_dir or ROOT / "runs" / f"recipe-{arguments.name}"
    ).resolve()
    words = train(RECIPES[arguments.name], arguments.overrides, run_dir)
    kept = {
        "recipe": arguments.name,
        "card": card(),
        "command": " ".join(words),
        "training": read_lines(
            run_dir / "metrics.jsonl", "step", "time_s", "reward/mean"
        ),
        "held_out": read_lines(
            run_dir / "eval.jsonl", "policy_version", "time_s", "eval/reward_mean"
        ),
    }
    label = re.sub(r"[^a-z0-9]+", "-", card().lower()).strip("-")
    path = arguments.out / f"{arguments.name}-{label}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
    print(f"{path}: {len(kept['training'])} steps, {len(kept['held_out'])} evaluations")


if __name__ == "__main__":
    main()
