"""Scoring models: a decoder, pairs and sections."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import torch
from tiny_model import make_tiny_model
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
)

from asyncrl.messages.records import Prompt

ENDING = "<|end|>"


def make_decoder(folder: Path, pad: str | None, **sizes: int) -> Path:
    """Write a tiny decoder with a scoring head. `pad`: end or pad sets
    config.pad_token_id.
    """
    make_tiny_model(folder, **sizes)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    pads = {"end": tokenizer.eos_token_id, "pad": tokenizer.pad_token_id, None: None}
    torch.manual_seed(3)
    model = AutoModelForSequenceClassification.from_pretrained(
        folder, num_labels=1, pad_token_id=pads[pad]
    )
    torch.nn.init.normal_(model.score.weight)
    model.save_pretrained(folder)
    return folder


def chat(text: str) -> Prompt:
    return Prompt("0/1", ({"role": "user", "content": text},), answer="x")


PAIRS = [
    (chat("say x"), "x"),
    (chat("what is 2 + 2?"), "it is 4. " * 6),
    (chat("a"), ENDING),
    (chat("b"), "yes" + ENDING + ENDING),
    (chat("count"), " ".join(map(str, range(40)))),
]


def spec_of(folder: Path, **values: Any) -> dict[str, Any]:
    return {
        "name": "reward",
        "model_path": str(folder),
        "dtype": "float32",
        "device": "cpu",
        "threads": 1,
        "reads": "chat",
        "label": 0,
        "batch_tokens": 512,
        **values,
    }


def without_template(folder: Path) -> None:
    for path in folder.glob("chat_template*"):
        path.unlink()
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text())
    config.pop("chat_template", None)
    path.write_text(json.dumps(config))


PAGE = (Path(__file__).parents[2] / "docs" / "rewards.md").read_text(encoding="utf-8")


SECTIONS = re.findall(r"^```yaml\n(.*?)^```$", PAGE, flags=re.DOTALL | re.MULTILINE)
