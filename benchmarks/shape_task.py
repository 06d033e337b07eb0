"""The shape of SmolLM2-135M with random weights, and a task whose rewards differ so
that every group trains. Nothing is learned; step times are measured.
"""

from __future__ import annotations

import random
from pathlib import Path

from asyncrl.config.model_config import ScratchConfig
from asyncrl.messages.records import Prompt
from asyncrl.trainer.model.random_init import (
    SPECIAL_TOKENS,
    ScratchSpec,
    make_scratch_model,
)

VOCABULARY = 49_152
FIRST_CHARACTER = 0x20000
"""The tokenizer has one token per character; they begin here."""
PROMPT_CHARACTERS = 40
ARCHITECTURE = {
    "model_type": "llama",
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
}


class ShapeTask:
    """Prompts of random characters. Reward: the share of characters with an even
    number.
    """

    def __init__(self, *, size: int, seed: int) -> None:
        self.size = size
        self.seed = seed

    def __len__(self) -> int:
        return self.size

    def prompt(self, index: int) -> str:
        draw = random.Random(f"{self.seed}/{index}")
        return "".join(
            chr(FIRST_CHARACTER + draw.randrange(40_000))
            for _ in range(PROMPT_CHARACTERS)
        )

    def score(self, prompt: Prompt, completion: str) -> float:
        return sum(ord(character) % 2 == 0 for character in completion) / max(
            1, len(completion)
        )


def make_shape(folder: Path) -> Path:
    """Save a random model of 134.5 million parameters, unless `folder` exists; return
    the folder.
    """
    if not folder.exists():
        numbers = range(VOCABULARY - len(SPECIAL_TOKENS))
        characters = "".join(chr(FIRST_CHARACTER + number) for number in numbers)
        scratch = ScratchConfig(architecture=ARCHITECTURE, characters=characters)
        make_scratch_model(ScratchSpec(out=folder, seed=0, scratch=scratch))
    return folder
