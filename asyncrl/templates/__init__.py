"""The files that `asyncrl init` writes.

content/ links to the repository's files; a wheel holds copies.
"""

from __future__ import annotations

import re
from importlib.resources import files
from pathlib import Path

from asyncrl.base.errors import ConfigError

GSM8K = "gsm8k-qwen3-0.6b-1gpu.yaml"
TEMPLATES = {
    "quickstart": (("quickstart.yaml",), ("asyncrl run quickstart.yaml",)),
    "gsm8k": ((GSM8K,), (f"asyncrl check {GSM8K}", f"asyncrl run {GSM8K}")),
    "agent": (
        ("agent.yaml", "lookup.py"),
        ("pip install 'asyncrl[harness]'", "asyncrl run agent.yaml"),
    ),
}
"""(files, next commands)."""


def _stored(name: str) -> str:
    text = (files("asyncrl.templates") / "content" / name).read_text(encoding="utf-8")
    # The stored files run in a checkout: they name its schema, its folders and its
    # extras. A user has only the written files, side by side, and a wheel.
    text = re.sub(r"^# yaml-language-server: .*\n", "", text)
    return (
        text.replace("configs/", "")
        .replace("examples.", "")
        .replace("-e '.[", "'asyncrl[")
    )


def write_template(kind: str, folder: Path) -> list[str]:
    """Write a template; return lines that name its files and the next commands.

    Raises ConfigError for an unknown kind or an existing file.
    """
    if kind not in TEMPLATES:
        raise ConfigError(
            f"there is no template {kind}",
            way_out=f"name one of {', '.join(TEMPLATES)}.",
        )
    names, commands = TEMPLATES[kind]
    # Before the first write: a refused init leaves nothing behind, and never replaces a
    # config that the user has edited.
    if existing := [name for name in names if (folder / name).exists()]:
        raise ConfigError(
            f"{', '.join(existing)} exists in {folder}",
            rule="init overwrites no file",
            way_out="move it away, or give an empty folder with --folder.",
        )
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        (folder / name).write_text(_stored(name), encoding="utf-8")
    enter = () if folder.resolve() == Path.cwd() else (f"cd {folder}",)
    next_lines = (f"  {command}" for command in (*enter, *commands))
    return [*(f"wrote {folder / name}" for name in names), "next:", *next_lines]
