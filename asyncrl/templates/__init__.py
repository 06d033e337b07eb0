"""The files that `asyncrl init` writes.

content/ links to the repository's files; a wheel holds copies.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path

from asyncrl.base.errors import ConfigError

GSM8K = "gsm8k-qwen3-0.6b-1gpu.yaml"
HARNESS = "pip install 'asyncrl[harness]'"
FILES = {"quickstart": ("quickstart.yaml",), "gsm8k": (GSM8K,), "agent": ("agent.yaml", "lookup.py")}
COMMANDS = {
    "quickstart": ("asyncrl run quickstart.yaml",),
    "gsm8k": (f"asyncrl check {GSM8K}", f"asyncrl run {GSM8K}"),
    "agent": (HARNESS, "asyncrl run agent.yaml"),
    "tutorial": (
        "asyncrl run my_task.yaml --run-dir runs/task",
        HARNESS,
        "asyncrl run my_agent.yaml --run-dir runs/agent",
    ),
}


def _stored(name: str) -> str:
    return (files("asyncrl.templates") / "content" / name).read_text(encoding="utf-8")


def _outside_a_checkout(text: str) -> str:
    text = re.sub(r"^# yaml-language-server: .*\n", "", text)
    return text.replace("configs/", "").replace("examples.", "").replace("-e '.[", "'asyncrl[")


def _tutorial() -> Mapping[str, str]:
    """Return the tutorial's files; its second YAML block continues the first."""
    text = _stored("tutorial.md")
    python, yaml = (
        re.findall(rf"^```{language}\n(.*?)^```$", text, flags=re.DOTALL | re.MULTILINE)
        for language in ("python", "yaml")
    )
    return {
        "my_task.py": python[0],
        "my_task.yaml": yaml[0],
        "my_agent.py": python[1],
        "my_agent.yaml": yaml[0] + yaml[1],
    }


def write_template(kind: str, folder: Path) -> list[str]:
    """Write a template; return lines that name its files and the next commands.

    Raises ConfigError for an unknown kind or an existing file.
    """
    if kind not in COMMANDS:
        raise ConfigError(f"there is no template {kind}", way_out=f"name one of {', '.join(COMMANDS)}.")
    texts = _tutorial()
    if kind != "tutorial":
        texts = {name: _outside_a_checkout(_stored(name)) for name in FILES[kind]}
    if existing := [name for name in texts if (folder / name).exists()]:
        raise ConfigError(
            f"{', '.join(existing)} exists in {folder}",
            rule="init overwrites no file",
            way_out="move it away, or give an empty folder with --folder.",
        )
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")
    enter = () if folder.resolve() == Path.cwd() else (f"cd {folder}",)
    commands = (f"  {command}" for command in (*enter, *COMMANDS[kind]))
    return [*(f"wrote {folder / name}" for name in texts), "next:", *commands]
