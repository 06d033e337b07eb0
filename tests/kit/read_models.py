"""Read model folders with the transformers at hand: tests/test_transformers_4.py runs
it in transformers 5 and, as a program, in 4.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer

IDS = range(6, 46)
TEXTS = (
    "hello world",
    "3 + 4 = 7",
    "  two  spaces ",
    "\n\nlines\n",
    "Upper Case!",
    "<|im_end|>",
    "<|user|>hi<|im_end|>",
    "an unknown \u20ac",
    "a",
    "a.b,c:d?",
)
CHAT = (
    {"role": "system", "content": "short"},
    {"role": "user", "content": "3 + 4 = ?"},
    {"role": "assistant", "content": "7"},
)


def read(folders: Sequence[Path]) -> dict[str, Any]:
    """Return logits, token ids and texts by the name of the folder, and the version of
    transformers.
    """
    found: dict[str, Any] = {"version": transformers.__version__}
    for folder in folders:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto").eval()
        ids_1T = torch.tensor([[*IDS]]) % model.config.vocab_size
        with torch.no_grad():
            logits_TV = model(ids_1T).logits[0]
        texts: dict[str, Any] = {"eos": model.generation_config.eos_token_id}
        if (folder / "tokenizer.json").is_file():
            tokenizer = AutoTokenizer.from_pretrained(folder)
            ids = [tokenizer(text)["input_ids"] for text in TEXTS]
            texts |= {
                "ids": ids,
                "decoded": [tokenizer.decode(one) for one in ids],
                "special": sorted(tokenizer.all_special_tokens),
                "template": tokenizer.chat_template,
                "chat": tokenizer.apply_chat_template(
                    [*CHAT], tokenize=False, add_generation_prompt=True
                ),
            }
        found[folder.name] = {"logits": logits_TV.double().tolist(), "texts": texts}
    return found


if __name__ == "__main__":
    print(json.dumps(read([Path(folder) for folder in sys.argv[1:]])))
