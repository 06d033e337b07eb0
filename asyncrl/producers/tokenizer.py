"""The tokenizer of a Hugging Face model, for prompts and completions. Knows no model, and does not import torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from asyncrl.errors import ConfigError


class HFChatTokenizer:
    """A ChatTokenizer over a Hugging Face folder or hub id.

    It loads tokenizer.json by itself, because AutoTokenizer imports torch; only a model without that file
    takes the way over AutoTokenizer.
    """

    def __init__(self, model_path: str | Path, *, chat_template: str | Path | None = None) -> None:
        """Load it. `chat_template`: a Jinja file that replaces the tokenizer's own.

        Raises ConfigError if the tokenizer or the file cannot be read, or if there is no chat template.
        """
        self.model_path = str(model_path)
        self._tokenizer = _load(self.model_path)
        if chat_template is not None:
            self._tokenizer.chat_template = _read_template(Path(chat_template))
        if not self._tokenizer.chat_template:
            raise ConfigError(
                f"the tokenizer of {self.model_path} has no chat template",
                rule="prompts are chats, and the template says how the model reads one",
                way_out="set model.chat_template to a Jinja file, or choose an instruct model.",
            )

    def __repr__(self) -> str:
        return f"<HFChatTokenizer {self.model_path}, {len(self._tokenizer)} tokens>"

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> tuple[int, ...]:
        """Token ids of the chat, with the prompt for the next assistant turn."""
        chat = [dict(message) for message in messages]
        ids = self._tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=True, return_dict=False)
        return tuple(ids)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of the ids, special tokens left out."""
        text: str = self._tokenizer.decode(list(token_ids), skip_special_tokens=True)
        return text


def _load(model_path: str) -> Any:
    from transformers import PreTrainedTokenizerFast

    try:
        try:
            return PreTrainedTokenizerFast.from_pretrained(model_path)
        except (OSError, ValueError):  # no tokenizer.json: a format that only the model's own class can read
            from transformers import AutoTokenizer

            return AutoTokenizer.from_pretrained(model_path)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(
            f"cannot load a tokenizer from {model_path}: {error}",
            way_out="set model.path to a Hugging Face folder or hub id of a causal language model with its tokenizer.",
        ) from error


def _read_template(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read model.chat_template={path}: {error}", way_out="give the path of a Jinja file.") from error
