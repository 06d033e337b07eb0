"""docs/engines.md: keys that exist, examples that load, and messages as they are written."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from asyncrl.config import RunConfig
from asyncrl.config.load import all_keys

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "engines.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"```yaml\n(.*?)```", PAGE, flags=re.DOTALL)
SECTIONS = "model|rollout|publisher|trainer|buffer|placement|supervision|observe|eval"


@pytest.mark.parametrize("example", EXAMPLES, ids=range(len(EXAMPLES)))
def test_every_example_is_a_config_once_it_has_a_task(example: str) -> None:
    sections = {"model": {"path": "/model"}, "task": {"files": ["data.jsonl"], "reward": "my:reward"}}
    RunConfig.model_validate(sections | yaml.safe_load(example))


def test_every_key_and_every_file_that_is_named_exists() -> None:
    named = set(re.findall(rf"`((?:{SECTIONS})\.[a-z_]+)", PAGE))
    assert len(named) > 15
    assert named <= set(all_keys())
    files = {f"docs/{path}" for path in re.findall(r"\]\(([\w.-]+)\)", PAGE)}
    files |= set(re.findall(r"(?:configs|benchmarks|docs)/[\w.-]+", PAGE))
    assert not [path for path in files if not (ROOT / path).exists()]


def test_the_command_for_servers_of_ones_own_gives_every_flag_that_the_run_asks_for() -> None:
    facts = (ROOT / "asyncrl" / "engines" / "vllm" / "facts.py").read_text(encoding="utf-8")
    wanted = set(re.findall(r"(--[a-z-]{4,}|\bVLLM_[A-Z_]+)", facts))
    wanted -= {"--enable-lora", "--max-lora-rank", "VLLM_ALLOW_RUNTIME_LORA_UPDATING"}
    assert "--logprobs-mode" in wanted
    blocks = re.findall(r"```bash\n(.*?)```", PAGE, flags=re.DOTALL)
    (command,) = [block for block in blocks if "vllm serve" in block]
    assert not [flag for flag in wanted if flag not in command]
