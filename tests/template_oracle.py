"""What a chat template makes of a chat, said by transformers alone: no code of asyncrl runs here.

A tokenizer is built around a template in kinds that real models have. `Oracle.check` compares the prompt that a
product made for a turn with the ids of `apply_chat_template(whole chat, tokenize=True)`.
"""

from __future__ import annotations

import functools
import json
import re
import string
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast
from transformers.utils.chat_template_utils import render_jinja_template

Message = dict[str, Any]
Chat = Sequence[Message]

BOS, EOS, OTHER_END = "<s>", "</s>", "<|endoftext|>"
SPECIAL = re.compile(
    r"<\|[^|<>\s]+\|?>|<[^|<>\s/]+\|>|<｜[^｜]+｜>|<(?:start|end)_of_\w+>|</?s>|<eos>|<bos>"
    r"|\[/?(?:INST|TOOL_CALLS|TOOL_RESULTS|AVAILABLE_TOOLS|SYSTEM_PROMPT|ARGS|CALL_ID|TOOL_CONTENT|THINK|MODEL_SETTINGS)\]"
    r"|<\[(?:BOS|EOS)_NEVER_USED[^>]*>|</?seed:[a-z_]+>|\]<\][a-z_]+\[>\[|\[e~\[|\]~b\]|\]~!b\[|\[\|\w+\|\]|</assistant>|<SPECIAL_\d+>|<sep>"
)
ADDED = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
"""Tokens that are not special, as Qwen has them."""
END = re.compile(
    r"<\|(?:im_end|eot_id|eom_id|eot|eom|end|return|call|END_OF_TURN_TOKEN|END_RESPONSE|END_TEXT|END_ACTION|observation|user"
    r"|end_of_text|EOT|message_sep|assistant_end|close|role_end|end_of_turn|end_of_sentence|endofturn|function_call_end)\|>"
    r"|<end_of_\w+>|<turn\|>|<\|tool_response>|<｜end▁of▁sentence｜>|<｜hy_\w+[^｜]*｜>|</s>|<eos>|<seed:eos>|\[e~\[|<\|endoftext\|>|\[\|endofturn\|\]"
    r"|</assistant>|<SPECIAL_12>|<sep>|<\|(?:end_of_msg|calls|tools_suffix)\|>"
)
"""What ends an answer: some models write the beginning of the next message."""
THOUGHT = "<think>\n{}\n</think>\n\n"
EMPTY_THOUGHT = re.compile(r"<think>\s*(?:</think>\s*)?|</think>\s*")
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Add.",
            "parameters": {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]},
        },
    }
]


# ---- tokenizers


class Kind(NamedTuple):
    base: str
    """bytes, or like sentencepiece: legacy (a normalizer puts the space first), or a prepend scheme."""
    strips: str
    """Sides at which the marks of the template take white space: l, r."""
    has_bos: bool
    has_several_ends: bool


BASES = ("bytes", "legacy", "always", "first", "never")
STRIPS = ("", "r", "l", "lr")
KINDS = [
    Kind(base, strips, (row + column) % 2 == 0, (row + column // 2) % 2 == 0)
    for row, base in enumerate(BASES)
    for column, strips in enumerate(STRIPS)
]
"""Every pair of features is in one of them."""


def byte_level() -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={each: at for at, each in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def sentencepiece(base: str) -> Tokenizer:
    merges = [("▁", "t"), ("t", "h"), ("▁t", "h"), ("▁th", "e"), ("▁", "▁"), ("\n", "\n")]
    single = [*(f"<0x{byte:02X}>" for byte in range(256)), "▁", *string.printable.replace(" ", "")]
    vocab = {each: at for at, each in enumerate(["<unk>", *single, *("".join(pair) for pair in merges)])}
    tokenizer = Tokenizer(
        models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    if base == "legacy":
        tokenizer.normalizer = normalizers.Sequence(
            [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        )
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme=base, split=False)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


# ---- the oracle


class Refused(Exception):
    """The template refuses the chat."""


def rendered(template: str, chat: Chat, tools: Any, *, is_open: bool, **tokens: str) -> str:
    """Render text with the repairs of vLLM: arguments are objects, later system texts go to the first."""
    calls = [{**each, "tool_calls": [_as_object(call) for call in each.get("tool_calls") or ()]} for each in chat]
    chat = [each if each["tool_calls"] else _without(each, "tool_calls") for each in calls]
    refusal: Exception | None = None
    for form in (chat, _with_text_arguments(chat), _merged(chat)):
        try:
            (text,), _ = render_jinja_template([form], tools, chat_template=template, add_generation_prompt=is_open, **tokens)
            return str(text)
        except Exception as error:  # noqa: BLE001  a template may raise anything
            refusal = refusal or error
    raise Refused(str(refusal))


def _without(message: Message, name: str) -> Message:
    return {key: value for key, value in message.items() if key != name}


def _as_object(call: Message) -> Message:
    return {**call, "function": {**call["function"], "arguments": json.loads(call["function"]["arguments"])}}


def _with_text_arguments(chat: Chat) -> Chat:
    changed = []
    for message in chat:
        if message.get("tool_calls"):
            calls = []
            for call in message["tool_calls"]:
                arguments = json.dumps(call["function"]["arguments"])
                calls.append({**call, "function": {**call["function"], "arguments": arguments}})
            message = {**message, "tool_calls": calls}
        changed.append(message)
    return changed


def _merged(chat: Chat) -> Chat:
    system = "".join(each["content"] for each in chat if each["role"] == "system")
    others = [each for each in chat if each["role"] != "system"]
    return [{"role": "system", "content": system}, *others] if system else others


class Expected(NamedTuple):
    ids: list[int]
    names: frozenset[str]
    is_whole: bool
    """They are the template's own."""


class Oracle:
    def __init__(self, template: str, kind: Kind, folder: Path) -> None:
        self.template, self.kind, self.folder = template, kind, folder
        self.tokens = {"eos_token": EOS} | ({"bos_token": BOS} if kind.has_bos else {})
        self.has_tools = self._shows_tools()
        self.closing = self._after_answer(answer("It is 71."), user("Why so?"), "It is 71.")
        self.call_closing = ""
        if self.has_tools:
            self.call_closing = self._after_answer(called(71), result(71), "x71")
        last = self._text([user("What is it?"), answer("It is 71.")], None, is_open=False).partition("It is 71.")[2]
        self.writes_end = bool(last.strip())
        self.last_closing = mark.group() if (mark := SPECIAL.match(last.lstrip())) else self.closing
        ends = [END.search(text) for text in (self.last_closing, self.call_closing)]
        self.ends = list(dict.fromkeys(end.group() for end in ends if end)) or [EOS]
        self.other_end = OTHER_END if OTHER_END not in self.ends else EOS
        self.fast = self._tokenizer()
        self.end_ids = {self.fast.convert_tokens_to_ids(end) for end in self.ends}
        closers = [END.search(text) for text in (self.closing, self.last_closing, self.call_closing)]
        self.closers = {self.fast.convert_tokens_to_ids(end.group()) for end in closers if end}
        if kind.has_several_ends:
            self.end_ids.add(self.fast.convert_tokens_to_ids(self.other_end))

    def _text(self, chat: Chat, tools: Any, *, is_open: bool = True) -> str:
        return rendered(self.template, chat, tools, is_open=is_open, **self.tokens)

    def _shows_tools(self) -> bool:
        try:
            text = self._text([user("What is it?"), called(71), result(71)], TOOLS)
        except Refused:
            return False
        return "x71" in text and "R71" in text and "Add." in text

    def _after_answer(self, said: Message, then: Message, anchor: str) -> str:
        """Return the text between the answer and its end mark, and the mark."""
        tools = TOOLS if said.get("tool_calls") else None
        after = self._text([user("What is it?"), said, then], tools).rpartition(anchor)[2]
        after = after.partition(then["content"])[0]
        end = SPECIAL.match(after.lstrip()) if tools is None else END.search(after)
        if end is None:
            return ""
        return after[: after.index(end.group()) + len(end.group())]

    def _tokenizer(self) -> PreTrainedTokenizerFast:
        chats: list[tuple[Chat, Any]] = [([system("Be kind."), user("Hi"), answer("It is 71."), user("Go")], None)]
        if self.has_tools:
            chats.append(([user("What is it?"), called(71), result(71)], TOOLS))
        texts = [self.template]
        for chat, tools in chats:
            try:
                texts.append(self._text(chat, tools))
            except Refused:
                continue
        special = {mark for text in texts for mark in SPECIAL.findall(text)} | {BOS, EOS, OTHER_END, *self.ends}
        base = byte_level() if self.kind.base == "bytes" else sentencepiece(self.kind.base)
        strips = {"lstrip": "l" in self.kind.strips, "rstrip": "r" in self.kind.strips}
        roles = {*SPECIAL.findall(self._text([user("Hi")], None)), *self.ends} - {BOS, EOS, OTHER_END}
        for mark in sorted(special):  # what begins an answer cannot take white space from the prompt
            base.add_special_tokens([AddedToken(mark, normalized=False, **(strips if mark in roles else {}))])
        base.add_tokens([AddedToken(mark, normalized=False) for mark in ADDED if mark in self.template])
        if self.kind.has_bos:
            base.post_processor = processors.TemplateProcessing(
                single=f"{BOS} $A", special_tokens=[(BOS, base.token_to_id(BOS))]
            )
        fast = PreTrainedTokenizerFast(
            tokenizer_object=base, clean_up_tokenization_spaces=False, chat_template=self.template, **self.tokens
        )
        fast.save_pretrained(self.folder)
        ends = [base.token_to_id(end) for end in self.ends]
        ends += [base.token_to_id(self.other_end)] if self.kind.has_several_ends else []
        (self.folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
        return fast

    def ids(self, text: str) -> list[int]:
        return list(self.fast(text, add_special_tokens=False)["input_ids"])

    def text(self, chat: Chat, tools: Any = None, *, is_open: bool = True) -> str:
        return self._text(chat, tools, is_open=is_open)

    def after(self, before: str, text: str) -> list[int]:
        """Return the ids of a text where it follows another one."""
        first, both = self.ids(before), self.ids(before + text)
        return both[len(first) :] if both[: len(first)] == first else self.ids(text)

    # ---- what a model samples

    def sampled(self, chat: Chat, said: Message, tools: Any, *, other_end: bool = False) -> list[int]:
        """Return the ids after the prompt with which the template itself writes the answer, with its end."""
        prompt = self.text(chat, tools)
        text = self._answer_text(prompt, chat, said, tools)
        ids = self.after(prompt, text)
        end = next((at for at, token in enumerate(ids) if token in self.end_ids), None)
        if end is None:
            closing = self.call_closing if said.get("tool_calls") else self.last_closing
            text += closing if END.search(closing) else self.ends[0]
            ids = self.after(prompt, text)
            end = next(at for at, token in enumerate(ids) if token in self.end_ids)
        last = self.fast.convert_tokens_to_ids(self.other_end) if other_end else ids[end]
        return [*ids[:end], last]

    def _answer_text(self, prompt: str, chat: Chat, said: Message, tools: Any) -> str:
        """Return the answer as the template writes it at the end of a chat, else in the form of most models."""
        thought = said.get("reasoning_content", "")
        bare = _without(said, "reasoning_content")
        forms = [said]
        if thought:
            forms += [{**bare, name: thought} for name in ("thinking", "reasoning")]
            forms.append({**bare, "content": THOUGHT.format(thought) + said["content"]})
        written = ""
        for form in forms:
            try:
                whole = self.text([*chat, form], tools, is_open=False)
            except Refused:
                continue
            common = _common(whole, prompt)
            inside = (mark.start() for mark in SPECIAL.finditer(whole) if mark.start() < common < mark.end())
            written = whole[next(inside, common) :]
            if whole.startswith(prompt) and thought in written:
                return written
        if not said.get("tool_calls"):
            written = said["content"]
        if prompt.rstrip().endswith("<think>"):
            return THOUGHT.format(thought).removeprefix("<think>\n") + written
        return (THOUGHT.format(thought) if thought else "") + written

    # ---- what the next prompt is

    def expected(self, chat: Chat, tools: Any, sent: Sequence[int], said: Sequence[int], at: int) -> Expected:
        """Return the prompt of a chat that goes on after chat[at], whose prompt was `sent` and whose ids are `said`."""
        whole = self.text(chat, tools)
        content = chat[at]["content"]
        if chat[at].get("tool_calls") and content and content in whole.partition(anchor(chat[at]))[2]:
            # the template writes it behind the results, where it would stand a second time
            whole = self.text([*chat[:at], {**chat[at], "content": ""}, *chat[at + 1 :]], tools)
        encoded = self.fast(whole, add_special_tokens=False, return_offsets_mapping=True)
        ids, offsets = list(encoded["input_ids"]), encoded["offset_mapping"]
        place = whole.rfind(anchor(chat[at]))
        if place < 0:
            raise Refused("the template leaves out the answer")
        begin = place + len(anchor(chat[at]))
        has_calls = bool(chat[at].get("tool_calls"))
        first = next((index for index, (start, _) in enumerate(offsets) if start >= begin), len(ids))
        close = next((index for index in range(first, len(ids)) if ids[index] in self.closers), None)
        if close is not None and not has_calls and whole[begin : offsets[close][0]].strip():
            close = None
        if close is not None and ids[close] != said[-1] and not self.writes_end:
            close -= 1  # a mark that only begins the next message
        rest = first if close is None else close + 1
        kept = [*sent, *said]
        if kept == ids[:rest]:
            return Expected(ids, frozenset(), True)
        if not EMPTY_THOUGHT.sub("", self.text(_with_stand_ins(chat), tools)).startswith(self._before(chat[:at], tools)):
            return Expected(ids, frozenset(), True)
        if self.fast.decode(kept) == self.fast.decode(ids[:rest]):
            return Expected([*kept, *ids[rest:]], frozenset({"tokens"}), False)
        names = self._names(chat, tools, kept, ids[:rest], whole)
        return Expected([*kept, *ids[rest:]], names, False)

    def _before(self, chat: Chat, tools: Any) -> str:
        """Return the text of a chat without the beginning of an answer."""
        shown = _with_stand_ins(chat)
        texts = [EMPTY_THOUGHT.sub("", self.text(shown, tools, is_open=is_open)) for is_open in (True, False)]
        return texts[0][: _common(*texts)].rstrip()

    def _names(self, chat: Chat, tools: Any, kept: list[int], theirs: list[int], whole: str) -> frozenset[str]:
        names = set()
        if kept[-1] != theirs[-1]:
            names.add("end_token")
        mine = self.fast.decode(kept, skip_special_tokens=False)
        if any(thought not in whole for thought in re.findall(r"hm\d+", mine)):
            names.add("thought")
        shown = _with_stand_ins(chat)
        text = self.text(shown, tools)
        answers = [index for index, message in enumerate(chat) if message["role"] == "assistant"]
        if not all(text.startswith(self.text(shown[:index], tools)) for index in answers):
            names.add("opening")
        return frozenset(names)


def _common(one: str, two: str) -> int:
    return next((at for at, pair in enumerate(zip(one, two, strict=False)) if pair[0] != pair[1]), min(len(one), len(two)))


def _with_stand_ins(chat: Chat) -> list[Message]:
    """Return the chat with answers that no template changes."""
    shown = []
    for message in chat:
        if message["role"] == "assistant":
            content = "" if message.get("tool_calls") else "answer"
            message = {**_without(message, "reasoning_content"), "content": content}
        shown.append(message)
    return shown


def anchor(said: Message) -> str:
    """Return the end of what an answer says."""
    if said.get("tool_calls"):
        return str(json.loads(said["tool_calls"][-1]["function"]["arguments"])["a"])
    return str(said["content"])[-9:]


# ---- messages; every text is there once


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def system(text: str) -> Message:
    return {"role": "system", "content": text}


def answer(text: str, thought: str = "") -> Message:
    return {"role": "assistant", "content": text} | ({"reasoning_content": thought} if thought else {})


def called(*numbers: int, text: str = "", thought: str = "") -> Message:
    calls = [
        {"id": f"callid{number:03d}", "type": "function", "function": {"name": "add", "arguments": json.dumps({"a": f"x{number}"})}}
        for number in numbers
    ]
    return {**answer(text, thought), "tool_calls": calls}


def result(number: int) -> Message:
    return {"role": "tool", "tool_call_id": f"callid{number:03d}", "name": "add", "content": f"R{number} is it"}


class Turn(NamedTuple):
    """New messages, the answer as the template is to write it, how its thought returns."""

    new: list[Message]
    said: Message
    how: str = "apart"
    """apart, inline, dropped."""
    other_end: bool = False

    def delivered(self) -> Message:
        if self.how == "inline" and (thought := self.said.get("reasoning_content")):
            text = THOUGHT.format(thought) + self.said["content"]
            return {**_without(self.said, "reasoning_content"), "content": text}
        return self.said

    def returned(self) -> Message:
        return _without(self.said, "reasoning_content") if self.how == "dropped" else self.delivered()


def plain(number: int, thought: str = "", **how: Any) -> Turn:
    return Turn([user(f"Ask {number}")], answer(f"It is {number}.", thought), **how)


STORIES: dict[str, list[Turn]] = {
    "plain": [plain(71), plain(72), plain(73)],
    "system first": [Turn([system("Be kind."), user("Ask 71")], answer("It is 71.")), plain(72), plain(73)],
    "system in the middle": [
        Turn([system("Be kind."), user("Ask 71")], answer("It is 71.")),
        Turn([user("Ask 72"), system("Be quick.")], answer("It is 72.")),
        plain(73),
    ],
    "system repeated": [
        Turn([system("Be kind."), system("Be quick."), user("Ask 71")], answer("It is 71.")),
        plain(72),
        plain(73),
    ],
    "other end": [plain(71, other_end=True), plain(72), plain(73)],
    **{f"thoughts {how}": [plain(at, f"hm{at}", how=how) for at in (71, 72, 73)] for how in ("apart", "inline", "dropped")},
}
TOOL_STORIES: dict[str, list[Turn]] = {
    "call": [
        Turn([user("Ask 70")], called(71)),
        Turn([result(71)], called(72)),
        Turn([result(72)], answer("It is 73.")),
        plain(74),
        plain(75),
    ],
    "call with text": [Turn([user("Ask 70")], called(71, text="I look.")), Turn([result(71)], answer("It is 73.")), plain(74)],
    "two calls": [Turn([user("Ask 70")], called(71, 72)), Turn([result(71), result(72)], answer("It is 73.")), plain(74)],
    "two calls, results in another order": [
        Turn([user("Ask 70")], called(71, 72)),
        Turn([result(72), result(71)], answer("It is 73.")),
        plain(74),
    ],
    **{
        f"call, thoughts {how}": [
            Turn([user("Ask 70")], called(71, thought="hm71"), how),
            Turn([result(71)], called(72, thought="hm72"), how),
            Turn([result(72)], answer("It is 73.", "hm73"), how),
            plain(74, "hm74", how=how),
            plain(75),
        ]
        for how in ("apart", "inline", "dropped")
    },
    "call, other end": [Turn([user("Ask 70")], called(71), other_end=True), Turn([result(71)], answer("It is 73.")), plain(74)],
}


# ---- templates


@functools.cache
def installed() -> dict[str, str]:
    """Return the templates that installed packages contain."""
    files = (resources.files("trl") / "chat_templates").iterdir()
    found = {f"trl.{Path(file.name).stem}": file.read_text(encoding="utf-8") for file in files if file.name.endswith(".jinja")}
    return {name: without_date(text) for name, text in sorted(found.items())}


def collected(folder: Path) -> dict[str, str]:
    files = sorted(folder.glob("*.jinja"))
    return {file.stem: without_date(file.read_text(encoding="utf-8")) for file in files}


def without_date(template: str) -> str:
    """The originals say what day it is: a test that runs at midnight sees one day."""
    return template.replace("strftime_now is defined", "false")
