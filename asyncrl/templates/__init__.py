"""The files that `asyncrl init` writes.

content/ links to the repository's files; a wheel holds copies.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from asyncrl.base.errors import ConfigError

_SCHEMA = re.compile(r"^# yaml-language-server: .*\n")


@dataclass(frozen=True, slots=True)
class Template:
    """`read`: contents by file name."""

    about: str
    read: Callable[[], Mapping[str, str]]
    next_commands: tuple[str, ...]


def _stored(name: str) -> str:
    return (files("asyncrl.templates") / "content" / name).read_text(encoding="utf-8")


def _copies(*names: str) -> Mapping[str, str]:
    """Return the stored files, adapted for use outside a checkout."""
    texts = dict[str, str]()
    for name in names:
        text = _SCHEMA.sub("", _stored(name))
        texts[name] = text.replace("configs/", "").replace("examples.", "").replace("-e '.[", "'asyncrl[")
    return texts


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


GSM8K = "gsm8k-qwen3-0.6b-1gpu.yaml"
TEMPLATES = {
    "quickstart": Template(
        "a small model learns letters on a CPU in half a minute",
        lambda: _copies("quickstart.yaml"),
        ("asyncrl run quickstart.yaml",),
    ),
    "gsm8k": Template(
        "Qwen3-0.6B learns grade school math on one GPU of 24 GB",
        lambda: _copies(GSM8K),
        (f"asyncrl check {GSM8K}", f"asyncrl run {GSM8K}"),
    ),
    "agent": Template(
        "a small model learns to call a tool on a CPU in five minutes",
        lambda: _copies("agent.yaml", "lookup.py"),
        ("pip install 'asyncrl[harness]'", "asyncrl run agent.yaml"),
    ),
    "tutorial": Template(
        "the tutorial's own task and agent",
        _tutorial,
        (
            "asyncrl run my_task.yaml --run-dir runs/task",
            "pip install 'asyncrl[harness]'",
            "asyncrl run my_agent.yaml --run-dir runs/agent",
        ),
    ),
}


def write_template(kind: str, folder: Path) -> list[str]:
    """Write a template; return lines that name its files and the next commands.

    Raises ConfigError for an unknown kind, an existing file or a folder that cannot be written.
    """
    if (template := TEMPLATES.get(kind)) is None:
        what = f"there is no template {kind}"
        raise ConfigError(what, way_out=f"name one of {', '.join(TEMPLATES)}.")
    texts = template.read()
    if existing := [name for name in texts if (folder / name).exists()]:
        raise ConfigError(
            f"{', '.join(existing)} exists in {folder}",
            rule="init overwrites no file",
            way_out="move it away, or give an empty folder with --folder.",
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            (folder / name).write_text(text, encoding="utf-8")
    except OSError as error:
        what = f"cannot write to {folder}: {error.strerror}"
        raise ConfigError(what, way_out="give another folder with --folder.") from error
    enter = () if folder.resolve() == Path.cwd() else (f"cd {folder}",)
    return [*(f"wrote {folder / name}" for name in texts), "next:"] + [
        f"  {command}" for command in (*enter, *template.next_commands)
    ]
