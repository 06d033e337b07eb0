"""The shape of SmolLM2-135M for benchmarks/end_to_end.py: a model folder with random weights, and a task
whose rewards differ, so that every group trains. Nothing is learnt: what is measured is seconds a step.
"""

from __future__ import annotations

import random
from pathlib import Path

from asyncrl.messages.records import Prompt

VOCABULARY = 49_152
FIRST_CHARACTER = 0x20000
"""The tokenizer has a token a character, and there are as many from here on."""
PROMPT_CHARACTERS = 40
"""A short question's."""


class ShapeTask:
    """Prompts of random characters; the reward is the share of the completion's characters with an even
    number.
    """

    def __init__(self, *, size: int, seed: int) -> None:
        self.size, self.seed = size, seed

    def __len__(self) -> int:
        """Number of prompts."""
        return self.size

    def prompt(self, index: int) -> str:
        """Prompt number `index`."""
        draw = random.Random(f"{self.seed}/{index}")
        return "".join(chr(FIRST_CHARACTER + draw.randrange(40_000)) for _ in range(PROMPT_CHARACTERS))

    def score(self, prompt: Prompt, completion: str) -> float:
        """0 .. 1."""
        return sum(ord(character) % 2 == 0 for character in completion) / max(1, len(completion))


def make_shape(folder: Path) -> Path:
    """134.5 million parameters, drawn here; made once."""
    if folder.exists():
        return folder
    from asyncrl.config import ScratchConfig
    from asyncrl.trainer.model.random_init import SPECIAL_TOKENS, ScratchSpec, make_scratch_model

    characters = "".join(chr(FIRST_CHARACTER + number) for number in range(VOCABULARY - len(SPECIAL_TOKENS)))
    architecture = {
        "model_type": "llama",
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": True,
    }
    scratch = ScratchConfig(architecture=architecture, characters=characters)
    make_scratch_model(ScratchSpec(out=folder, seed=0, scratch=scratch))
    return folder


def shape_overrides(model: Path, num_steps: int) -> list[str]:
    """configs/smollm2.yaml with this model, in float32, this task and longer completions."""
    return [
        f"model.path={model}",
        "model.dtype=float32",
        "task={python: 'end_to_end_shape:ShapeTask', size: 1000, reward_pool: inline}",
        "eval=none",
        "rollout.max_tokens=32",
        f"trainer.num_steps={num_steps}",
    ]
