"""Section `model`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import ClassVar

from pydantic import Field

from asyncrl.config.fields import DType, FrozenConfig


def split_hub_id(path: str) -> tuple[str, str | None]:
    """Split owner/name@revision; the revision may be absent."""
    name, _, revision = path.partition("@")
    return name, revision or None


class ScratchConfig(FrozenConfig):
    """A small model with random weights, seeded by `seed`."""

    architecture: dict[str, object]
    """Keys of a transformers config, `model_type` included, without vocab_size and
    token ids.
    """
    characters: str = Field(min_length=2)
    """Alphabet of the character-level tokenizer, one token per character."""
    has_tool_role: bool = False
    """The chat template knows messages of the role `tool`."""

    def conflicts(self) -> Iterator[str]:
        # Two tokens of one character would decode alike and never both be encoded.
        counted = Counter(self.characters)
        twice = sorted(one for one, number in counted.items() if number > 1)
        if twice:
            yield f".characters names {''.join(twice)!r} twice; remove one of each"


class ModelConfig(FrozenConfig):
    """The trained model: `path` or `scratch`."""

    # A moved folder is still the same model: a resume compares its files with the
    # ModelPin, which the run wrote at its start.
    free_keys: ClassVar = ("path",)

    path: str | None = None
    """Hugging Face folder or hub id of a causal language model with a chat template. A hub
    id may end with a branch, tag or commit: owner/name@v2. A resumed run keeps its first
    commit.
    """
    scratch: ScratchConfig | None = None
    """Architecture and alphabet of a random model, instead of `path`."""
    dtype: DType = "auto"
    """Dtype of the weights (auto = bfloat16 on CUDA, except on cards before Ampere such
    as T4 and V100, and on a CPU with avx512_bf16 or amx_bf16; else float32).
    """
    chat_template: str | None = None
    """Jinja file that replaces the tokenizer's chat template (none = the tokenizer's
    own).
    """
    chat_template_kwargs: dict[str, object] = {}
    """Variables of the chat template, such as enable_thinking: false; calls may
    override them.
    """

    def conflicts(self) -> Iterator[str]:
        if (self.path is None) == (self.scratch is None):
            yield "give one of model.path (a folder or hub id) and model.scratch (random weights)"
