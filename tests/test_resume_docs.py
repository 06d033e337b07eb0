"""The settings that docs/resume.md shows are those that there are, with their defaults, and so are its
options.
"""

from __future__ import annotations

import re
from pathlib import Path

import yaml

from asyncrl import cli
from asyncrl.config import RunConfig

PAGE = (Path(__file__).parent.parent / "docs" / "resume.md").read_text(encoding="utf-8")


def test_the_settings_of_the_page_are_the_defaults() -> None:
    (block,) = re.findall(r"```yaml\n(.*?)```", PAGE, flags=re.DOTALL)
    shown = {
        section: {key: None if value == "none" else value for key, value in keys.items()}
        for section, keys in yaml.safe_load(block).items()
    }
    fields = RunConfig.model_fields
    assert shown == {
        name: fields[name].default.model_dump() for name in ("checkpoint", "journal", "supervision")
    }


def test_the_options_of_the_page_are_options() -> None:
    source = Path(cli.__file__).read_text(encoding="utf-8")
    options = set(re.findall(r"--[a-z][a-z-]+", PAGE))
    assert options >= {"--resume", "--allow-change", "--group"}
    assert {
        option
        for option in options
        if f'"{option}"' not in source and option[2:].replace("-", "_") not in source
    } == set()
