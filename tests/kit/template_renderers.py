"""A tokenizer for all chat templates of trl, and some more."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from template_oracle import END, SPECIAL, collected, installed
from text_tokenizers import byte_level, save
from tokenizers import AddedToken

from asyncrl.rollouts.tokenizer import HFChatTokenizer

OURS = Path(__file__).parents[1] / "chat_templates"
TEMPLATES = {
    name.removeprefix("trl."): text for name, text in installed().items()
} | collected(OURS)

Renderers = Callable[..., HFChatTokenizer]


def renderers(folder: Path) -> Renderers:
    """Return a function that opens the tokenizer with a template, by the template's
    name.
    """
    special = sorted(
        {token for text in TEMPLATES.values() for token in SPECIAL.findall(text)}
    )
    tokenizer = byte_level()
    tokenizer.add_special_tokens(
        [AddedToken(token, normalized=False) for token in special]
    )
    save(tokenizer, folder)
    ends = [tokenizer.token_to_id(token) for token in special if END.fullmatch(token)]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))

    @functools.cache
    def renderer(name: str, **settings: Any) -> HFChatTokenizer:
        file = folder / f"{name}.jinja"
        file.write_text(TEMPLATES[name], encoding="utf-8")
        return HFChatTokenizer(
            folder, chat_template=file, chat_template_kwargs=settings
        )

    return renderer
