"""A working directory in which recipes of tinker_cookbook run without a network: the
model and the data sets are folders that have their names on the hub.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

MODEL = "Qwen/Qwen3-8B"
"""A name in the cookbook's table of models: some recipes look up their renderer there."""
END = "<|im_end|>"
SPECIAL = ["<|endoftext|>", "<|im_start|>", END]
WORDS = ["<think>", "</think>", "\\boxed{3}", "Guess: 5"]
"""Single tokens. The last two earn rewards, which random tokens would not."""
LIKELY = {END: 0.5, "\\boxed{3}": 0.3, "Guess: 5": 0.6} | dict.fromkeys("0123456789", 0.2)
"""Bias of these tokens in the output head, in units of a residual's largest part."""
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
CORPUS = [
    "system user assistant player What is 4 + 5? How many r's are in strawberry? "
    "Provide a numerical answer without units, written inside \\boxed{}. "
    "Your job is to guess a integer between 0 and 1024. You can output your guess with the "
    "format Guess: <guess> (without the angle brackets), and say nothing else. Then we will "
    "tell you whether you guess is too high, too low, or correct. "
    "Failed to parse. Please output in the format"
]
"""Text of the recipes, so that their prompts are short."""


def make_place(folder: Path) -> None:
    """Write the model and the data sets."""
    make_model(folder / MODEL)
    for name, splits in _datasets().items():
        _make_dataset(folder / name, splits)


def make_model(folder: Path) -> None:
    tokenizer = make_tokenizer()
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
        initializer_range=0.1,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
    )
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(config)
    # The first feature is the same for all inputs, so its weights in the head are a bias.
    with torch.no_grad():
        model.model.embed_tokens.weight[:, 0] = 1.0
        for word, bias in LIKELY.items():
            model.lm_head.weight[tokenizer.convert_tokens_to_ids(word), 0] = bias
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Return a byte-level BPE tokenizer, which can encode any text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=512, initial_alphabet=alphabet, special_tokens=SPECIAL
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens(WORDS)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END,
        pad_token="<|endoftext|>",
        chat_template=CHAT_TEMPLATE,
    )


def _datasets() -> Mapping[str, Mapping[str, list[Any]]]:
    """Return rows by name and split."""
    chats = [
        {
            "messages": [
                {"role": "user", "content": f"Say {number}."},
                {"role": "assistant", "content": f"It is {number}, as you wish."},
            ]
        }
        for number in range(12)
    ]
    sums = [
        {"question": f"What is {number} + 3?", "answer": f"{number} and 3.\n#### 3"}
        for number in range(12)
    ]
    pairs = [
        {
            "chosen": f"\n\nHuman: Say {number}.\n\nAssistant: It is {number}.",
            "rejected": f"\n\nHuman: Say {number}.\n\nAssistant: I will not.",
        }
        for number in range(12)
    ]
    return {
        "HuggingFaceH4/no_robots": {"train": chats, "test": chats},
        "openai/gsm8k": {"train": sums, "test": sums},
        "Anthropic/hh-rlhf": {"train": pairs, "test": pairs},
        "zwhe99/DeepMath-103K": {"train": sums},
    }


def _make_dataset(folder: Path, splits: Mapping[str, Iterable[Any]]) -> None:
    """Write a data set with the configuration "main"."""
    folder.mkdir(parents=True)
    lines = ["---", "configs:", "- config_name: main", "  data_files:"]
    for split, rows in splits.items():
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / f"{split}.jsonl").write_text(text)
        lines += [f"  - split: {split}", f"    path: {split}.jsonl"]
    (folder / "README.md").write_text("\n".join([*lines, "---", ""]))


def run_recipe(place: Path, url: str, key: str, name: str, **options: object) -> Path:
    """Run `python -m tinker_cookbook.recipes.NAME`; return its log directory."""
    log_path = place / "logs" / str(options.pop("log", name))
    given = {"model_name": MODEL, "log_path": log_path} | options
    arguments = [f"{option}={value}" for option, value in given.items()]
    ended = subprocess.run(
        [sys.executable, "-m", f"tinker_cookbook.recipes.{name}", *arguments],
        cwd=place,
        env=os.environ
        | {
            "TINKER_BASE_URL": url,
            "TINKER_API_KEY": key,
            "HF_HUB_OFFLINE": "1",
            "HF_HOME": str(place / "hub"),
            "HOME": str(place),
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
    )
    assert ended.returncode == 0, ended.stdout[-8000:]
    return log_path


def metrics_of(log_path: Path) -> list[dict[str, Any]]:
    """Return what each step logged."""
    lines = (log_path / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]
