"""The tokenizer of model.scratch. Knows no model, and does not import torch: the controller asks it before
anything starts.

A character outside the alphabet becomes the one token <unk> when it is encoded, which decodes to nothing when
special tokens are left out: choose an alphabet that holds every prompt.
"""

from __future__ import annotations

from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

PAD, UNK, END = "<pad>", "<unk>", "<|im_end|>"
ROLES = ("<|system|>", "<|user|>", "<|assistant|>")
SPECIAL_TOKENS = (PAD, UNK, END, *ROLES)
TOOL = "<|tool|>"
"""One more special token, of models with model.scratch.has_tool_role."""

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] + '<|im_end|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)

CHAT_TEMPLATE_WITH_TOOLS = CHAT_TEMPLATE.replace("message['content']", "(message['content'] or '')")
"""A message of tool calls may have no content. Neither the calls nor the tools themselves are written: what a
model from nothing makes of them is the task's to teach, in its own words."""


def make_character_tokenizer(characters: str, *, has_tool_role: bool = False) -> Any:
    """A fast tokenizer with one token a character, after the special tokens, in the order given.

    Decoding gives the exact text back: no spaces are added or cleaned up. Raises ValueError if a character is
    there twice.
    """
    twice = sorted({character for character in characters if characters.count(character) > 1})
    if twice:
        raise ValueError(f"model.scratch.characters holds {twice} more than once; name each character once")
    tools = (TOOL,) if has_tool_role else ()
    vocabulary = {token: index for index, token in enumerate((*SPECIAL_TOKENS, *tools, *characters))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNK))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        unk_token=UNK,
        eos_token=END,
        additional_special_tokens=[*ROLES, *tools],
        chat_template=CHAT_TEMPLATE_WITH_TOOLS if has_tool_role else CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )
