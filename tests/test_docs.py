"""The pages: commands parse, configs load, settings and files exist, the site builds."""

from __future__ import annotations

import ast
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, get_args, get_origin

import pytest
import yaml
from pydantic.fields import FieldInfo
from typer.main import get_command

from asyncrl.base.errors import AsyncrlError
from asyncrl.cli import app
from asyncrl.config import RunConfig, load_config
from asyncrl.config.load import section_of

ROOT = Path(__file__).parents[1]
PAGES = sorted(
    page
    for pattern in ("*.md", "docs/**/*.md", "examples/**/*.md", "benchmarks/**/*.md")
    for page in ROOT.glob(pattern)
)
QUICKSTART = str(ROOT / "configs/quickstart.yaml")
PLACEHOLDERS = {"CONFIG": QUICKSTART, "config.yaml": QUICKSTART, "N": "1", "URL": "http://127.0.0.1:8700"}
PLACEHOLDERS |= dict.fromkeys(("my_task.yaml", "my_agent.yaml"), QUICKSTART)
NO_SETTINGS = {"rollout.oversample"}
"""Keys of other frameworks whose section has a name of ours."""


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def blocks(page: Path, *languages: str) -> list[str]:
    found = re.findall(r"^ *```(\w*)\n(.*?)^ *```$", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    return [text for language, text in found if language in languages]


def commands(page: Path) -> Iterator[str]:
    """Yield the lines of shell blocks and of indented blocks that start with one of our programs."""
    text = page.read_text(encoding="utf-8")
    lines = [line for block in blocks(page, "sh", "bash", "console") for line in block.splitlines()]
    lines += re.findall(r"^ {4,}((?:\.venv/bin/)?(?:asyncrl|make|python) .*)$", text, flags=re.M)
    joined = re.sub(r"\\\n\s*", " ", "\n".join(lines))
    for line in joined.splitlines():
        command = re.sub(r"\s+#.*$", "", line.strip().removeprefix("$ "))
        command = re.sub(r"^(?:[A-Z][A-Z0-9_]*=\S* +)+", "", command)
        if re.match(r"(?:\.venv/bin/)?(?:asyncrl|make|python) ", command) and "..." not in command:
            yield command


def parse(arguments: list[str]) -> dict[str, Any]:
    """Parse the arguments of `asyncrl` with its own parser. No command runs."""
    parsed: dict[str, Any] = {}

    def capture(command: Any) -> None:
        for sub in getattr(command, "commands", {}).values():
            capture(sub)
        if not hasattr(command, "commands"):
            command.callback = parsed.update

    group = get_command(app)
    capture(group)
    group.main(arguments, prog_name="asyncrl", standalone_mode=False)
    return parsed


@cache
def fault_of(command: str) -> str | None:
    """Return why the command cannot be typed in a checkout, or None."""
    program, *arguments = shlex.split(command)
    if program.endswith("make"):
        done = subprocess.run(["make", "-n", *arguments], cwd=ROOT, capture_output=True, text=True)
        return done.stderr or None
    if program.endswith("python"):
        is_found = arguments[0].startswith("-") or (ROOT / arguments[0]).is_file()
        return None if is_found else f"no file {arguments[0]}"
    try:
        parsed = parse([PLACEHOLDERS.get(word.split("/")[-1], word) for word in arguments])
        if "config" in parsed:
            load_config(ROOT / parsed["config"], parsed.get("overrides") or [])
    except AsyncrlError as error:
        return str(error)
    except Exception as error:  # typer has a private copy of click's exceptions
        return f"{type(error).__name__}: {error}"
    return None


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_commands_on_a_page_can_be_typed(page: Path) -> None:
    faults = {command: fault_of(command) for command in commands(page)}
    assert {command: fault for command, fault in faults.items() if fault} == {}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_configs_on_a_page_load(page: Path) -> None:
    base = {"model": {"path": "x"}, "task": {"files": ["x.jsonl"], "reward": "math"}}
    for text in blocks(page, "yaml"):
        block = yaml.safe_load(text)
        if isinstance(block, dict) and set(block) <= set(RunConfig.model_fields):
            RunConfig.model_validate(base | block)


def has_setting(name: str) -> bool:
    model: Any = RunConfig
    for part in name.split("."):
        if part in ("0", "sums", "words"):  # an item of a list, the name of one of several tasks
            continue
        if model is dict:
            return True
        if model is None or part not in model.model_fields:
            return False
        field: FieldInfo = model.model_fields[part]
        model = section_of(field)
        kinds = (field.annotation, *get_args(field.annotation))
        if model is None and any(dict in (kind, get_origin(kind)) for kind in kinds):
            model = dict
    return True


def settings_named() -> Iterator[tuple[str, str]]:
    """Yield (file, setting) for backticks on pages and for sentences in the code."""
    sections = "|".join(name for name, field in RunConfig.model_fields.items() if section_of(field))
    # task.answer and the like are attributes of the objects that user code gets
    sections = sections.replace("task|", "").replace("eval|", "")
    dotted = re.compile(rf"(?<![\w./:{{@\-\[])(?:{sections})(?:\.[a-z_0-9]+)+(?![\w/(.]|\.\w)")
    for page in PAGES:
        if page.name != "coming-from.md":  # its left column has the keys of others
            for quoted in re.findall(r"(?<!`)`([^`\n]+)`(?!`)", page.read_text(encoding="utf-8")):
                yield from ((name_of(page), name) for name in dotted.findall(quoted))
    for path in sorted((ROOT / "asyncrl").rglob("*.py")):
        nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
        docstrings = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
        for node in nodes:
            if not isinstance(node, ast.Constant) or id(node) in docstrings:
                continue
            if isinstance(node.value, str) and " " in node.value:
                yield from ((name_of(path), name) for name in dotted.findall(node.value))


def test_settings_named_in_pages_and_messages_exist() -> None:
    is_file = re.compile(r"\.(py|md|json|sqlite|lock)$")
    named = {(place, name) for place, name in settings_named() if not is_file.search(name)}
    assert len(named) > 100
    assert {each for each in named if each[1] not in NO_SETTINGS and not has_setting(each[1])} == set()


@pytest.mark.parametrize("framework", ["TRL", "verl", "AReaL", "SkyRL", "prime-rl"])
def test_settings_compared_with_other_frameworks_exist(framework: str) -> None:
    page = (ROOT / "docs/coming-from.md").read_text(encoding="utf-8")
    section = page.split(f"\n## {framework}\n")[1].split("\n## ")[0]
    cells = [line.split("|")[2] for line in section.splitlines() if line.startswith("| ")][2:]
    named = [name for cell in cells for name in re.findall("`([^`]+)`", cell)]
    assert len(named) > 12
    assert [name for name in named if not has_setting(name)] == []


@pytest.mark.extras
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    env = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
