"""Chat templates with many kinds of tokenizers: transformers writes the same prompt of
the whole chat.
"""

from __future__ import annotations

import csv
import os
from pathlib import Path

import pytest
from template_oracle import KINDS, collected, installed
from template_runs import row, tell

TEMPLATES = installed() | collected(Path(__file__).parent / "chat_templates")
with (Path(__file__).parent.parent / "docs/templates.csv").open(
    encoding="utf-8", newline=""
) as file:
    TABLE = {name: cells for name, *cells in csv.reader(file)}
PAGE = Path(__file__).parent.parent / "docs/gateway.md"
FOLDER = os.environ.get("ASYNCRL_TEMPLATES", "")


@pytest.mark.parametrize(("number", "name"), list(enumerate(TEMPLATES)))
def test_prompts_are_the_template_s_own_or_deviate_by_name(
    number: int, name: str
) -> None:
    told, wrong = tell(TEMPLATES[name], KINDS[7 * number % len(KINDS)])
    if name in TABLE:
        assert row(TEMPLATES[name], told, wrong) == TABLE[name], (
            f"write docs/templates.csv again. {wrong}"
        )
    assert not wrong


def test_page_counts_templates_that_write_an_answer_differently() -> None:
    num = sum(row[2] == "no" for row in TABLE.values())
    assert f"{num} of {len(TABLE) - 1} templates write" in PAGE.read_text()


@pytest.mark.long
@pytest.mark.skipif(
    not FOLDER, reason="ASYNCRL_TEMPLATES names no folder of scripts/templates.py"
)
def test_collected_templates_are_as_exact() -> None:
    faults = []
    for number, (name, template) in enumerate(collected(Path(FOLDER)).items()):
        for kind in KINDS[number % 4 :: 4]:  # each base once
            faults += [
                f"{name} {kind}: {why}" for why in tell(template, kind)[1].values()
            ]
    assert not faults, "\n".join(faults)
