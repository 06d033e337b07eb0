"""Capture with the chat templates of public models, over a byte-level BPE tokenizer that was trained for this
test.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
from gateway_capture_cases import Message, Play, assistant, plan, user

from asyncrl.rollouts.tokenizer import HFChatTokenizer

OURS = Path(__file__).parent / "chat_templates"

IM_END, EOT, TURN_END, EOS = "<|im_end|>", "<|eot_id|>", "<end_of_turn>", "</s>"
DEEPSEEK_END = "<｜end▁of▁sentence｜>"
SPECIAL = [IM_END, EOT, TURN_END, DEEPSEEK_END, EOS, "<s>", "<|im_start|>", "<|start_header_id|>", "[INST]"]
SPECIAL += ["<|end_header_id|>", "[/INST]", "<start_of_turn>", "<｜User｜>", "<｜Assistant｜>"]

WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
"""How text is split before it is merged: line feeds stay together whatever follows, as with Qwen and Llama
3.
"""

END_OF = {"llama3_2": EOT, "gemma3": TURN_END, "deepseek_r1_distill": DEEPSEEK_END, "inst": EOS}
"""Of templates that do not end a turn with IM_END."""
ADD = {"name": "add", "description": "Add two numbers.", "parameters": {"type": "object"}}
TOOLS = [{"type": "function", "function": ADD}]


@dataclass(frozen=True)
class Turn:
    """An answer as it is sampled, without the end of the turn, and the message that the harness makes of
    it.
    """

    raw: str
    message: Message
    is_cut: bool = False


def said(text: str, *, is_cut: bool = False) -> Turn:
    return Turn(text, assistant(text), is_cut)


def called(raw: str, content: str = "") -> Turn:
    """A tool call, in the form of the model's family, after `content`."""
    call = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": 2}}}
    return Turn(raw, assistant(content, tool_calls=[call]))


Renderers = Callable[[str], HFChatTokenizer]


@pytest.fixture(scope="session")
def renderer_for(tmp_path_factory: pytest.TempPathFactory) -> Renderers:
    """The tokenizer with a template, by the template's name."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    words = pre_tokenizers.Split(Regex(WORDS), "isolated")
    as_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([words, as_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    pages = sorted(Path(__file__).parents[1].glob("docs/*.md"))
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=2000, initial_alphabet=alphabet, special_tokens=SPECIAL)
    tokenizer.train_from_iterator([page.read_text(encoding="utf-8") for page in pages], trainer)

    @functools.cache
    def renderer(name: str) -> HFChatTokenizer:
        folder, end = tmp_path_factory.mktemp(name), END_OF.get(name, IM_END)
        fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=end, bos_token="<s>")
        fast.chat_template = template(name)
        fast.save_pretrained(folder)
        return HFChatTokenizer(folder)

    return renderer


def template(name: str) -> str:
    ours = OURS / f"{name}.jinja"
    if ours.exists():
        return ours.read_text(encoding="utf-8")
    original = resources.files("trl") / "chat_templates" / f"{name}.jinja"
    # the originals say what day it is: a test that runs at midnight sees one day
    return original.read_text(encoding="utf-8").replace("strftime_now is defined", "false")


PLAIN = [said("Four."), said("It is."), said("Yes.")]
PADDED = [said(" Four.\n"), said("It is.")]
CUT = [said("Well, the sum of", is_cut=True), said("Four.")]
INNER_SPACE = [said("It  is\nfour."), said("Yes.")]
REASONED = [said("<think>\nTwo and two.\n</think>\n\nFour."), said("<think>\nSure.\n</think>\n\nYes.")]
REASONED_AFTER_PROMPT = [said("Two and two.\n</think>\n\nFour."), said("Sure.</think>Yes.")]
HERMES = [called('<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'), said("Three.")]
HERMES_SPACED = [called('<tool_call>{"name":"add","arguments":{"a":1,"b":2}}</tool_call>'), said("Three.")]
THOUGHT = "<think>\nAdd them.\n</think>"
HERMES_REASONED = [called(f"{THOUGHT}\n\n{HERMES[0].raw}", THOUGHT), said("Three.")]
LLAMA = [called('{"name": "add", "parameters": {"a": 1, "b": 2}}'), said("Three.")]

# Each row: template, what is answered, and what the calls are, the one after the last answer included.
TABLE: list[tuple[str, list[Turn], str]] = [
    ("qwen2_5", PADDED, "new extended extended"),
    ("qwen2_5", CUT, "new extended extended"),
    ("qwen2_5", REASONED, "new extended extended"),
    ("qwen2_5", HERMES, "new extended extended"),
    ("qwen2_5", HERMES_SPACED, "new realigned realigned"),
    ("qwen3", PLAIN, "new extended extended extended"),
    ("qwen3", REASONED, "new realigned realigned"),  # strips reasoning before the last question
    ("qwen3", HERMES_REASONED, "new extended realigned"),  # it stays until the next question
    ("llama3_2", PADDED, "new realigned realigned"),  # trims what was said
    ("llama3_2", LLAMA, "new extended extended"),
    ("gemma3", PLAIN, "new extended extended extended"),
    ("deepseek_r1_distill", REASONED_AFTER_PROMPT, "new realigned realigned"),
    ("chatml", CUT, "new extended extended"),
    ("inst", CUT, "new extended extended"),
    ("merges_white_space", INNER_SPACE, "new realigned realigned"),
    ("forgets", PLAIN, "new extended realigned realigned"),  # the first answer is gone once there is a second
    ("shouts", PLAIN, "new uncut uncut uncut"),
]


@pytest.mark.parametrize(("name", "turns", "hows"), TABLE)
@pytest.mark.parametrize("as_bytes", [False, True], ids=["as-encoded", "byte-by-byte"])
def test_what_each_template_makes_of_a_chat(
    name: str, turns: list[Turn], hows: str, as_bytes: bool, renderer_for: Renderers
) -> None:
    renderer = renderer_for(name)
    play = Play(renderer)
    tools: Any = TOOLS if any(turn.message.get("tool_calls") for turn in turns) else None
    chat = [user("What is 2 + 2?")]
    sampled: list[int] = []
    for number, how in enumerate(hows.split()):
        planned = plan(play.capture, chat, tools)
        assert planned.how == how, f"call {number}"
        text = renderer.render(chat, tools=tools)
        is_reused = how in ("extended", "realigned")
        if is_reused:
            assert tuple(planned.prompt_ids.tolist())[: len(sampled)] == tuple(sampled), (
                "it is not tokenised again"
            )
        if how != "realigned":
            assert renderer.decode(tuple(planned.prompt_ids.tolist()), skip_special_tokens=False) == text
        if how != "realigned" and not (as_bytes and is_reused):
            assert tuple(planned.prompt_ids.tolist()) == renderer.encode(text), (
                "what the whole chat is tokenised to"
            )
        if number == len(turns):
            break
        turn = turns[number]
        end = "" if turn.is_cut else END_OF.get(name, IM_END)
        parts = [*turn.raw, end] if as_bytes else [turn.raw + end]
        ids = [token for part in parts for token in renderer.encode(part)]
        play.answer(planned, turn.raw + end, turn.message, ids=ids, is_truncated=turn.is_cut)
        sampled = [*tuple(planned.prompt_ids.tolist()), *ids]
        result = {"role": "tool", "tool_call_id": "call_1", "content": "3"}
        chat += [
            turn.message,
            result if turn.message.get("tool_calls") else user(f"Are you sure ({number})?"),
        ]


def test_what_comes_behind_a_realigned_answer_is_what_the_template_writes_there(
    renderer_for: Renderers,
) -> None:
    renderer = renderer_for("qwen3")
    play = Play(renderer)
    first = play.ask([user("2 + 2?")], f"{REASONED[0].raw}{IM_END}")
    second = plan(play.capture, [user("2 + 2?"), REASONED[0].message, user("Sure?")], None)
    text = renderer.decode(tuple(second.prompt_ids.tolist()), skip_special_tokens=False)
    asked = renderer.decode(tuple(first.prompt_ids.tolist()), skip_special_tokens=False) + REASONED[0].raw
    assert text == f"{asked}{IM_END}\n<|im_start|>user\nSure?{IM_END}\n<|im_start|>assistant\n"
