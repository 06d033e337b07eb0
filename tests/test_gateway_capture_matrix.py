"""A tokenizer for each chat template of trl; system messages with each."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
from gateway_capture_cases import Message, assistant, user
from jinja2 import TemplateError
from text_tokenizers import byte_level, save
from tokenizers import AddedToken

from asyncrl.rollouts.tokenizer import HFChatTokenizer

# the originals say what day it is: a test that runs at midnight sees one day
TEMPLATES = {
    Path(file.name).stem: file.read_text(encoding="utf-8").replace("strftime_now is defined", "false")
    for file in (resources.files("trl") / "chat_templates").iterdir()
    if file.name.endswith(".jinja")
}
OURS = Path(__file__).parent / "chat_templates"
TEMPLATES |= {file.stem: file.read_text(encoding="utf-8") for file in OURS.glob("*.jinja")}
PARTS = {"idefics3", "llava_next", "smolvlm"}
"""They write the parts of a message, and nothing of a message that is a text."""

SPECIAL = re.compile(
    r"<\|[^|<>\s]+\|?>|<[^|<>\s]+\|>|<｜[^｜]+｜>|<(?:start|end)_of_(?:turn|utterance)>|</s>|<eos>|\[/?INST\]"
)
END = re.compile(
    r"<\|(?:im_end|eot_id|eom_id|eot|eom|end|return|call|END_OF_TURN_TOKEN|observation|user)\|>"
    r"|<end_of_turn>|<turn\|>|<\|tool_response>|<｜end▁of▁sentence｜>|</s>|<eos>"
)
"""Text that ends an answer: some models write the beginning of the next turn."""

Renderers = Callable[..., HFChatTokenizer]


def system(text: str) -> Message:
    return {"role": "system", "content": text}


def as_transformers(renderer: HFChatTokenizer, chat: list[Message]) -> str:
    """Return what the template itself writes; empty if it refuses the chat or takes only parts."""
    try:
        return str(renderer._tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True))
    except TemplateError:
        return ""


def base(name: str) -> str:
    return name.removesuffix("_training")


def renderers(folder: Path) -> Renderers:
    """One tokenizer, with the special tokens of all templates."""
    special = sorted({token for text in TEMPLATES.values() for token in SPECIAL.findall(text)})
    tokenizer = byte_level()
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in special])
    save(tokenizer, folder)
    ends = [tokenizer.token_to_id(token) for token in special if END.fullmatch(token)]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))

    @functools.cache
    def renderer(name: str, **settings: Any) -> HFChatTokenizer:
        file = folder / f"{name}.jinja"
        file.write_text(TEMPLATES[name], encoding="utf-8")
        return HFChatTokenizer(folder, chat_template=file, chat_template_kwargs=settings)

    return renderer


@pytest.fixture(scope="module")
def renderer_for(tmp_path_factory: pytest.TempPathFactory) -> Renderers:
    return renderers(tmp_path_factory.mktemp("matrix"))


LATE = [
    [system("Be brief."), user("go"), system("Be kind.")],
    [user("go"), assistant("Yes."), user("on"), system("Be brief."), system("Be kind.")],
    [system("Be brief."), {"role": "developer", "content": "Be kind."}, user("go")],
]


@pytest.mark.parametrize("name", sorted({base(name) for name in TEMPLATES} - {"gemma"}))
def test_system_messages_reach_the_prompt_wherever_they_are(name: str, renderer_for: Renderers) -> None:
    renderer = renderer_for(name)
    kept = 0
    for chat in LATE:
        texts = [message["content"] for message in chat]
        others = [message for message in chat if message["role"] in ("user", "assistant")]
        merged = as_transformers(renderer, [system("Be brief.Be kind."), *others])
        as_given = as_transformers(renderer, chat)
        sent = renderer.render(chat)
        assert all(text in sent for text in texts)
        assert base(name) in PARTS or sent in (as_given, merged)
        kept += sent == as_given
    if name in ("qwen2_5", "qwen3", "llama3_1", "phi3"):
        assert kept == 2, "system messages stay where a template takes them; developer's become system's"
