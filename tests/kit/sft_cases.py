"""Rows and configs of SFT."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from job_runs import CONFIG

from asyncrl.rollouts.tokenizer import HFChatTokenizer

CHATML = (
    "{% for message in messages %}"
    "<|user|>{{ message.role }} {{ message.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|user|>assistant {% endif %}"
)
"""Writes a line end behind each turn, which no engine samples."""


GOOD = {"prompt": "a", "completion": "b"}


def base_model(model: Path, folder: Path) -> Path:
    """Return a copy whose only end of text is another token than the template's."""
    shutil.copytree(model, folder)
    for name in ("config.json", "generation_config.json"):
        path = folder / name
        if path.exists():
            path.write_text(
                json.dumps(json.loads(path.read_text()) | {"eos_token_id": 0})
            )
    path = folder / "tokenizer_config.json"
    settings = json.loads(path.read_text())
    first = HFChatTokenizer(model).decode([0], skip_special_tokens=False)
    path.write_text(json.dumps(settings | {"eos_token": first}))
    return folder


GIVEN: dict[str, Any] = {
    "model": CONFIG["model"],
    "data": {"files": ["rows.jsonl"]},
    "trainer": {"num_groups": 4, "learning_rate": 0.003, "threads": 1},
    "observe": {"console": "plain", "trackers": []},
}
