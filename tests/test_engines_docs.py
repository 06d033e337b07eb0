"""docs/engines.md: examples that load, and the flags that vLLM needs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from asyncrl.config import RunConfig

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "engines.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"```yaml\n(.*?)```", PAGE, flags=re.DOTALL)


@pytest.mark.parametrize("example", EXAMPLES, ids=range(len(EXAMPLES)))
def test_every_example_is_a_config_once_it_has_a_task(example: str) -> None:
    sections = {"model": {"path": "/model"}, "task": {"files": ["data.jsonl"], "reward": "my:reward"}}
    RunConfig.model_validate(sections | yaml.safe_load(example))


def test_every_page_that_is_linked_exists() -> None:
    pages = re.findall(r"\]\(([\w.-]+)\)", PAGE)
    assert not [page for page in pages if not (ROOT / "docs" / page).exists()]


def test_the_command_for_servers_of_ones_own_gives_every_flag_that_the_run_asks_for() -> None:
    facts = (ROOT / "asyncrl" / "engines" / "vllm_process.py").read_text(encoding="utf-8")
    wanted = set(re.findall(r"(--[a-z-]{4,}|\bVLLM_[A-Z_]+)", facts))
    assert "--logprobs-mode" in wanted
    blocks = re.findall(r"```bash\n(.*?)```", PAGE, flags=re.DOTALL)
    (command,) = [block for block in blocks if "vllm serve" in block]
    for_experts = "--enable-return-routed-experts"  # refused by vLLM for a model that has none
    assert for_experts in PAGE
    assert not [flag for flag in wanted - {for_experts} if flag not in command]
