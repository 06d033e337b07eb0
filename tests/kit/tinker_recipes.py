"""A working directory in which recipes of tinker_cookbook run without a network: the
model and the data sets are folders that have their names on the hub.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
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
LIKELY = {END: 1.6, "\\boxed{3}": 1.5, "Guess: 5": 2.0}
"""Weights of these tokens in the output head for the feature that never changes."""
RECIPE_S = 120.0
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
    # The first feature is nearly the same for all inputs: its weights in the head are a
    # bias.
    with torch.no_grad():
        model.model.embed_tokens.weight[:, 0] = 2.0
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


@dataclass(frozen=True)
class Cookbook:
    """Runs recipes in `place`. Each has its own process: the client leaves its
    connections open.
    """

    place: Path
    url: str
    key: str

    def run(self, recipe: str, *, log: str = "", **options: object) -> Path:
        """Run a recipe to its end; return the directory of its logs."""
        with self.start(recipe, log=log, **options) as process:
            try:
                out, _ = process.communicate(timeout=RECIPE_S)
            finally:
                process.kill()  # it waits for a lost server for five minutes
        assert process.returncode == 0, out[-8000:]
        return self.log_path(log or recipe)

    def start(
        self, recipe: str, *, log: str = "", **options: object
    ) -> subprocess.Popen[str]:
        given = {"model_name": MODEL, "log_path": self.log_path(log or recipe)}
        arguments = [f"{name}={value}" for name, value in (given | options).items()]
        environment = {
            "TINKER_BASE_URL": self.url,
            "TINKER_API_KEY": self.key,
            "HF_HUB_OFFLINE": "1",
            "HOME": str(self.place),
        }
        return subprocess.Popen(
            [sys.executable, "-m", f"tinker_cookbook.recipes.{recipe}", *arguments],
            cwd=self.place,
            env=os.environ | environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def log_path(self, log: str) -> Path:
        return self.place / "logs" / log


def steps_of(log_path: Path) -> list[dict[str, float]]:
    """Return the metrics of each step. Recipes of RL log a line of totals after them."""
    return [
        metrics
        for metrics in read_jsonl(log_path / "metrics.jsonl")
        if any(name.startswith("progress") for name in metrics)
    ]


def read_jsonl(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]
