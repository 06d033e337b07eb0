"""The files and commands of each skill work in an empty folder."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from job_runs import environment
from page_blocks import blocks

from asyncrl.config import load_any

SKILLS = sorted(Path(__file__).parents[1].glob("skills/*/SKILL.md"))


def write_files(skill: Path, folder: Path) -> list[Path]:
    """Write the blocks that a name precedes."""
    text = skill.read_text(encoding="utf-8")
    named = re.findall(r"^`([\w.]+)`:\n\n```\w+\n(.*?)^```$", text, re.M | re.S)
    for name, content in named:
        (folder / name).write_text(content)
    return [folder / name for name, _ in named]


@pytest.mark.parametrize("skill", SKILLS, ids=lambda skill: skill.parent.name)
def test_skill_has_its_folders_name_and_files_that_load(
    skill: Path, tmp_path: Path
) -> None:
    _, head, body = skill.read_text(encoding="utf-8").split("---\n", 2)
    front = yaml.safe_load(head)
    assert front.keys() == {"name", "description"}
    assert front["name"] == skill.parent.name
    assert len(front["description"]) < 200
    assert len(body.splitlines()) < 120
    for file in write_files(skill, tmp_path):
        if file.suffix == ".yaml":
            load_any(file, [])


@pytest.mark.slow
@pytest.mark.parametrize("skill", SKILLS, ids=lambda skill: skill.parent.name)
def test_commands_of_a_skill_print_what_it_says(skill: Path, tmp_path: Path) -> None:
    write_files(skill, tmp_path)
    asyncrl = f"{sys.executable} -m asyncrl.cli "
    for line in "".join(blocks(skill, "sh")).splitlines():
        command, _, promised = line.partition("# prints: ")
        done = subprocess.run(
            asyncrl + command.removeprefix("asyncrl "),
            shell=True,
            cwd=tmp_path,
            env=environment(),
            capture_output=True,
            text=True,
            timeout=240,
        )
        assert done.returncode == 0, (command, done.stderr)
        assert promised in done.stdout, (command, done.stdout)
