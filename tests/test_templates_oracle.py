"""Chat templates with many kinds of tokenizers: transformers writes the same prompt of
the whole chat.
"""

from __future__ import annotations

import csv
import os
from pathlib import Path

import pytest
from costly_cases import every_third_is_quick
from template_oracle import KINDS, Oracle, collected, installed
from template_runs import row, tell

from asyncrl.agents.endpoint.tool_formats import find_tool_format
from asyncrl.rollouts.tokenizer import HFChatTokenizer

TEMPLATES = installed() | collected(Path(__file__).parent / "chat_templates")
with (Path(__file__).parent.parent / "docs/templates.csv").open(
    encoding="utf-8", newline=""
) as file:
    TABLE = {name: cells for name, *cells in csv.reader(file)}
PAGE = Path(__file__).parent.parent / "docs/gateway.md"
FOLDER = os.environ.get("ASYNCRL_TEMPLATES", "")


# Every third has all kinds of tokenizers.
@pytest.mark.parametrize(("number", "name"), every_third_is_quick(enumerate(TEMPLATES)))
def test_prompts_are_the_template_s_own_or_deviate_by_name(
    number: int, name: str
) -> None:
    told, wrong = tell(TEMPLATES[name], KINDS[7 * number % len(KINDS)])
    if name in TABLE:
        assert row(TEMPLATES[name], told, wrong) == TABLE[name], (
            f"write docs/templates.csv again. {wrong}"
        )
    assert not wrong


@pytest.mark.slow
def test_check_names_templates_that_change_earlier_answers(tmp_path: Path) -> None:
    wrong = set[str]()
    for name in installed().keys() & TABLE.keys():
        (tmp_path / name).mkdir()
        Oracle(TEMPLATES[name], KINDS[0], tmp_path / name)
        thinking = find_tool_format("auto", TEMPLATES[name]).thinking
        is_changed = HFChatTokenizer(tmp_path / name).changed_answer(thinking)
        _, thoughts, is_exact, *_ = TABLE[name]
        if (
            is_changed is None
            and is_exact == "no"
            or is_changed
            and (thoughts, is_exact) == ("kept", "yes")
        ):
            wrong.add(name)
    # These depend on whether a client returns a thought inside the content.
    assert wrong == {"trl.gemma4_v2", "trl.deepseek_r1_distill_training"}
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
