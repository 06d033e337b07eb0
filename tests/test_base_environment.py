"""Every command ends with a result or a clear error where only the base packages are
installed.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from launch_cases import CONFIGS

from asyncrl.base.errors import OF_TRAIN
from asyncrl.cli import app

HIDE = f"""
import importlib.machinery as machinery, sys
find = machinery.PathFinder.find_spec
def hidden(name, *of):
    return None if name.split(".")[0] in {sorted(OF_TRAIN)} else find(name, *of)
machinery.PathFinder.find_spec = hidden
from asyncrl.cli import main
main()
"""


def commands_of(group: Any, *path: str) -> Iterator[tuple[str, ...]]:
    for name, one in group.commands.items():
        if hasattr(one, "commands"):
            yield from commands_of(one, *path, name)
        else:
            yield *path, name


COMMANDS = [*commands_of(typer.main.get_command(app))]
VALID = {
    "init": ["quickstart", "--folder", "new"],
    "keys": ["buffer"],
    "scale": ["run", "engines=2"],
    "work": ["http://127.0.0.1:1", "--python", "os:getcwd"],
    "export": ["run", "out"],
    "watch": ["run"],
}
"""Arguments of commands that do not begin with CONFIG or RUN_DIR."""
NEEDS_TRAIN = {"run", "sft", "check", "serve gateway", "serve engine"}


def in_base_environment(folder: Path, *words: str) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, "-c", HIDE, *words],
        cwd=folder,
        env={**os.environ, "COLUMNS": "100", "HF_HUB_OFFLINE": "1"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    return done.returncode, done.stdout


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_a_command_without_the_train_extra_has_no_traceback(
    command: tuple[str, ...], tmp_path: Path
) -> None:
    name = " ".join(command)
    kind = "sft" if name == "sft" else "quickstart"
    written = (CONFIGS / f"{kind}.yaml").read_text(encoding="utf-8")
    (tmp_path / "valid.yaml").write_text(written, encoding="utf-8")
    (tmp_path / "invalid.yaml").write_text("model: qwen\n", encoding="utf-8")
    (tmp_path / "run").mkdir()
    for config in ("valid", "invalid"):
        words = VALID.get(name, [f"{config}.yaml"])
        code, said = in_base_environment(tmp_path, *command, *words)
        assert "Traceback" not in said
        assert code in (0, 1, 2)
        if code:
            assert re.search(r"Error: .*|No such command|Usage: ", said), said
        if name in NEEDS_TRAIN and config == "valid":
            assert "pip install 'asyncrl[train]'" in said
        if name in NEEDS_TRAIN and config == "invalid":
            assert "model" in said
