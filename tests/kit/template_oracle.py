"""The prompt of a chat template by transformers only: no code of asyncrl runs here.

A tokenizer is built around a template in kinds that real models have. `Oracle.expected`
is the prompt of a turn: the ids of `apply_chat_template(whole chat, tokenize=True)`, or
the sampled ids, then the template's.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import json
import os
import re
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

from text_tokenizers import byte_fallback, byte_level
from tokenizers import AddedToken, Tokenizer, pre_tokenizers, processors
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
ARGUMENT = re.compile("</?arg_(?:key|value)>")
"""Marks inside of a call, which end no answer. A checkpoint may make them special."""
ADDED = (
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
)
"""Tokens that are not special, as in Qwen."""
END = re.compile(
    r"<\|(?:im_end|eot_id|eom_id|eot|eom|end|return|call|END_OF_TURN_TOKEN|observation|user"
    r"|end_of_text|EOT|message_sep|assistant_end|role_end|end_of_turn|end_of_sentence|endofturn|function_call_end)\|>"
    r"|<end_of_\w+>|<turn\|>|<\|tool_response>|<｜end▁of▁sentence｜>|<｜hy_\w+[^｜]*｜>|</s>|<eos>|<seed:eos>|\[e~\[|<\|endoftext\|>|\[\|endofturn\|\]"
    r"|</assistant>|<SPECIAL_12>|<sep>|<\|(?:end_of_msg|calls|tools_suffix)\|>"
)
"""Text that ends an answer: some models write the beginning of the next message."""
THOUGHT = "<think>\n{}\n</think>\n\n"
THOUGHT_MARK = re.compile(
    r"(?:<[^<>\s]*think[^<>\s]*>|\[/?THINK\]|<\|channel>\s*thought|<channel\|>|<\|inner_\w+\|>"
    r"|<\|channel\|>\s*analysis<\|message\|>|to=self<\|message\|>|<\|(?:open|close)\|>\s*think<\|sep\|>)\s*",
    re.IGNORECASE,
)
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Add.",
            "parameters": {
                "type": "object",
                "properties": {"a": {"type": "string"}},
                "required": ["a"],
            },
        },
    }
]


# ---- tokenizers


class Kind(NamedTuple):
    base: str
    """bytes, or like sentencepiece: legacy (a normalizer puts the space first), or a
    prepend scheme.
    """
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
"""Every pair of features is in some kind."""


@functools.cache
def _trained() -> str:
    return byte_level().to_str()


def base_tokenizer(base: str) -> Tokenizer:
    if base == "bytes":
        return Tokenizer.from_str(_trained())
    tokenizer = byte_fallback()
    if base != "legacy":
        tokenizer.normalizer = None
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(
            replacement="▁", prepend_scheme=base, split=False
        )
    return tokenizer


# ---- the oracle


class Refused(Exception):  # noqa: N818  not one of our errors
    """The template refuses the chat, or leaves out the answer."""


PROBES = ("ssu", "us", "susu", "suasu")
"""Roles of chats: a template that refuses one, or leaves out a message, gets system
texts in one message.
"""


def rendered(template: str, chat: Chat, tools: Any, **options: Any) -> str:
    """Return the text, repaired like in vLLM: objects as arguments, merged system
    texts, parts.
    """
    chat = [_as_server(message) for message in chat]
    late = any(message["role"] == "system" for message in chat[1:])
    wants_parts = not _writes(template, "u", options, wants_parts=False)
    if late and not all(
        _writes(template, probe, options, wants_parts=wants_parts) for probe in PROBES
    ):
        text = "".join(each["content"] for each in chat if each["role"] == "system")
        chat = [
            {"role": "system", "content": text},
            *(each for each in chat if each["role"] != "system"),
        ]
    with contextlib.suppress(Refused):
        return _render(template, chat, tools, options, wants_parts=wants_parts)
    return _render(
        template, _with_text_arguments(chat), tools, options, wants_parts=wants_parts
    )


def _render(
    template: str, chat: Chat, tools: Any, options: Any, *, wants_parts: bool
) -> str:
    if wants_parts:
        chat = [
            {**each, "content": [{"type": "text", "text": each["content"]}]}
            for each in chat
        ]
    try:
        return str(
            render_jinja_template([chat], tools, chat_template=template, **options)[0][
                0
            ]
        )
    except Exception as error:  # a template may raise anything
        raise Refused(str(error)) from None


def _writes(template: str, probe: str, options: Any, *, wants_parts: bool) -> bool:
    return _can_write(template, probe, json.dumps(options), wants_parts)


@functools.cache
def _can_write(template: str, probe: str, given: str, wants_parts: bool) -> bool:
    roles = {"s": "system", "u": "user", "a": "assistant"}
    chat = [
        {"role": roles[each], "content": f"Text {number}."}
        for number, each in enumerate(probe)
    ]
    try:
        options = {**json.loads(given), "add_generation_prompt": True}
        text = _render(template, chat, None, options, wants_parts=wants_parts)
    except Refused:
        return False
    return all(message["content"] in text for message in chat)


def _as_server(message: Message) -> Message:
    message = copy.deepcopy(message)
    if thought := message.get("reasoning_content"):
        message |= {"reasoning": thought, "thinking": thought}
    for call in message.get("tool_calls", ()):
        arguments = call["function"]["arguments"]
        if isinstance(arguments, str):
            call["function"]["arguments"] = json.loads(arguments)
    return message


def _with_text_arguments(chat: Chat) -> list[Message]:
    chat = copy.deepcopy(list(chat))
    for call in (call for message in chat for call in message.get("tool_calls", ())):
        call["function"]["arguments"] = json.dumps(call["function"]["arguments"])
    return chat


def _without(message: Message, name: str) -> Message:
    return {key: value for key, value in message.items() if key != name}


class Expected(NamedTuple):
    ids: list[int]
    names: frozenset[str] = frozenset()
    """Names of the deviations. Empty: the ids are the template's own."""


class Oracle:
    """A template with a tokenizer of a kind, saved in a folder."""

    def __init__(self, template: str, kind: Kind, folder: Path) -> None:
        self.template, self.kind = template, kind
        self.options = {"eos_token": EOS} | ({"bos_token": BOS} if kind.has_bos else {})
        self._text = functools.cache(self._rendered)
        """Most are needed several times."""
        self.tools: Any = None
        """None: the template does not show tools, calls and results."""
        last, self.closing = self._closings(answer("It is 97."), user("Ask 99"), None)
        self.last = last or self.closing
        last_call, self.call = self._closings(called(["97"]), result("97"), TOOLS)
        self.writes_end = {False: bool(last), True: bool(last_call)}
        """Marks by whether an answer calls tools. GLM writes nothing after the last
        answer: the model ends with the mark of the next message.
        """
        marks = [
            end.group()
            for text in (self.last, self.call, self.closing)
            if (end := END.search(text))
        ]
        self.ends = list(dict.fromkeys(marks[:2] if self.call else marks[:1])) or [EOS]
        self.other_end = EOS if OTHER_END in self.ends else OTHER_END
        self.fast = self._tokenizer()
        self.fast.save_pretrained(folder)
        ends = [*self.ends, self.other_end] if kind.has_several_ends else self.ends
        self.end_ids = self.fast.convert_tokens_to_ids(ends)
        self.closers = self.fast.convert_tokens_to_ids(marks)
        (folder / "generation_config.json").write_text(
            json.dumps({"eos_token_id": self.end_ids})
        )

    def text(
        self, chat: Chat, tools: Any = None, *, is_open: bool = True, **settings: object
    ) -> str:
        return self._text(json.dumps([chat, tools, is_open, settings]))

    def _rendered(self, key: str) -> str:
        chat, tools, is_open, settings = json.loads(key)
        options = {**self.options, **settings, "add_generation_prompt": is_open}
        return rendered(self.template, chat, tools, **options)

    def assistant_mask(self, chat: Chat, tools: Any) -> list[int]:
        """Return the mask of transformers: the tokens of {% generation %} blocks."""
        given = [_as_server(message) for message in chat]
        if not _writes(self.template, "u", self.options, wants_parts=False):
            for message in given:
                message["content"] = [{"type": "text", "text": message["content"]}]
        encoded = self.fast.apply_chat_template(
            given, tools=tools, return_dict=True, return_assistant_tokens_mask=True
        )
        return list(encoded["assistant_masks"])

    def ids(self, text: str) -> list[int]:
        return list(self.fast(text, add_special_tokens=False)["input_ids"])

    def _closings(self, said: Message, then: Message, tools: Any) -> tuple[str, str]:
        """Return the text from an answer through its end mark, at the end of a chat and
        before a message.
        """
        chat = [user("Ask 98"), said]
        texts = ["", ""]
        with contextlib.suppress(Refused):
            whole = self.text([*chat, then], tools)
            if tools and all(
                each in whole for each in ("Add.", anchor(said), then["content"])
            ):
                self.tools = tools
            if not tools or self.tools:
                texts = [
                    self.text(chat, tools, is_open=False),
                    whole.rpartition(then["content"])[0],
                ]
        after = [text.rpartition(anchor(said))[2] for text in texts]
        ends = [END.search(text) or SPECIAL.search(text) for text in after]
        last, inner = (
            text[: end.end()] if end else ""
            for text, end in zip(after, ends, strict=True)
        )
        return last, inner

    def _tokenizer(self) -> PreTrainedTokenizerFast:
        texts = [
            self.template,
            self.text([user("Ask 98"), answer("It is 97."), user("Ask 99")]),
        ]
        if self.tools:
            texts.append(
                self.text([user("Ask 98"), called(["97"]), result("97")], TOOLS)
            )
        marks = (
            mark
            for text in texts
            for pattern in (SPECIAL, ARGUMENT)
            for mark in pattern.findall(text)
        )
        special = {*marks} | {
            BOS,
            EOS,
            OTHER_END,
            *self.ends,
        }
        strips = {"lstrip": "l" in self.kind.strips, "rstrip": "r" in self.kind.strips}
        # the beginning of an answer takes no white space: it is in the prompt already
        roles = {*SPECIAL.findall(self.text([user("Ask 98")])), *self.ends} - {
            BOS,
            EOS,
            OTHER_END,
        }
        base = base_tokenizer(self.kind.base)
        for mark in sorted(special):
            base.add_special_tokens(
                [
                    AddedToken(
                        mark, normalized=False, **(strips if mark in roles else {})
                    )
                ]
            )
        base.add_tokens(
            [
                AddedToken(mark, normalized=False)
                for mark in ADDED
                if mark in self.template
            ]
        )
        if self.kind.has_bos:
            begin = [(BOS, base.token_to_id(BOS))]
            base.post_processor = processors.TemplateProcessing(
                single=f"{BOS} $A", special_tokens=begin
            )
        return PreTrainedTokenizerFast(
            tokenizer_object=base,
            clean_up_tokenization_spaces=False,
            chat_template=self.template,
            **self.options,
        )

    def sampled(self, chat: Chat, turn: Turn, tools: Any) -> list[int]:
        """Return the ids of the answer and its end as the template itself writes them
        after the prompt.
        """
        prompt = self.text(chat, tools)
        text = self._written(prompt, chat, turn.said, tools)
        before = self.ids(prompt)
        # a mark between the parts of an answer, such as a thought and a call, does not
        # end it
        inside = len(self.ids(text.rpartition(anchor(turn.said))[0]))
        for more in (
            "",
            self.call if turn.said.get("tool_calls") else self.last,
            self.ends[0],
        ):
            ids = self.ids(prompt + text + more)
            ids = (
                ids[len(before) :]
                if ids[: len(before)] == before
                else self.ids(text + more)
            )
            end = next(
                (
                    at
                    for at, token in enumerate(ids)
                    if at >= inside and token in self.end_ids
                ),
                None,
            )
            if end is not None:
                break
        last = (
            self.fast.convert_tokens_to_ids(self.other_end)
            if turn.other_end
            else ids[end]
        )
        return [*ids[:end], last]

    def per_byte(self, ids: Sequence[int]) -> list[int]:
        """Return ids of the same text, a token for each byte; added tokens stay."""
        split: list[int] = []
        for token, piece in zip(ids, self.fast.convert_ids_to_tokens(ids), strict=True):
            parts = list(piece)
            if self.kind.base != "bytes":
                parts = [f"<0x{byte:02X}>" for byte in piece.replace("▁", " ").encode()]
            is_whole = token in self.fast.added_tokens_decoder or piece.startswith(
                "<0x"
            )
            split += [token] if is_whole else self.fast.convert_tokens_to_ids(parts)
        return split

    def _written(self, prompt: str, chat: Chat, said: Message, tools: Any) -> str:
        """Return the answer as the template writes it at the end of a chat, else in the
        usual form.
        """
        bare = _without(said, "reasoning_content")
        thought = said.get("reasoning_content", "")
        forms = [said]
        if thought and "<think>" in self.template:
            forms.append({**bare, "content": THOUGHT.format(thought) + said["content"]})
        written = ""
        for form in forms:
            with contextlib.suppress(Refused):
                whole = self.text([*chat, form], tools, is_open=False)
                common = len(os.path.commonprefix([whole, prompt]))
                inside = (
                    mark.start()
                    for mark in SPECIAL.finditer(whole)
                    if mark.start() < common < mark.end()
                )
                written = whole[next(inside, common) :]
                is_empty = thought and re.search(r"(<think>|\A)\s*</think>", written)
                if whole.startswith(prompt) and thought in written and not is_empty:
                    return written
        if not said.get("tool_calls"):
            written = said["content"]
        if "<think>" not in self.template:
            return self._written(prompt, chat, bare, tools) if thought else written
        if prompt.rstrip().endswith("<think>"):
            return THOUGHT.format(thought).removeprefix("<think>\n") + written
        return (THOUGHT.format(thought) if thought else "") + written

    def expected(
        self, chat: Chat, tools: Any, places: Sequence[int], kept: list[int]
    ) -> Expected:
        """Return the prompt of a chat with answers at `places`. `kept`: the ids through
        the last of them.
        """
        at = places[-1]
        whole, said = self.text(chat, tools), chat[at]
        has_calls = bool(said.get("tool_calls"))
        after = whole.rpartition(chat[at + 1]["content"])[2]
        if has_calls and said["content"].strip() and said["content"].strip() in after:
            # the template writes it behind the results, a second time
            whole = self.text(
                [*chat[:at], {**said, "content": ""}, *chat[at + 1 :]], tools
            )
        begin = whole.rfind(anchor(said)) + len(anchor(said))
        if begin < len(anchor(said)):
            raise Refused("it leaves out the answer")
        encoded = self.fast(
            whole, add_special_tokens=False, return_offsets_mapping=True
        )
        ids, offsets = list(encoded["input_ids"]), encoded["offset_mapping"]
        space = whole[begin : len(whole) - len(whole[begin:].lstrip())]
        if self.fast.decode(kept[:-1]).endswith(space):  # it is not written again
            begin += len(space)
        rest = next(
            (index for index, (start, _) in enumerate(offsets) if start >= begin),
            len(ids),
        )
        close = next(
            (index for index in range(rest, len(ids)) if ids[index] in self.closers),
            None,
        )
        closing = "" if close is None else whole[begin : offsets[close][1]].strip()
        is_same = False
        if close is not None and (
            has_calls or closing in (self.closing.strip(), self.last.strip())
        ):
            is_same = ids[close] == kept[-1]
            rest = close + (is_same or self.writes_end[has_calls])
        names = set() if is_same else {"end_token"}
        if kept == ids[:rest]:
            return Expected(ids)
        if not self._shown(chat, tools).startswith(self._before(chat[:at], tools)):
            return Expected(ids)  # the template moved or changed other text
        mine = self.fast.decode(kept)
        if mine == self.fast.decode(ids[:rest]):
            names = {"tokens"}
        else:
            names |= self._names(chat, tools, mine, whole, places)
        return Expected([*kept, *ids[rest:]], frozenset(names or {"form"}))

    def _names(
        self, chat: Chat, tools: Any, mine: str, whole: str, places: Sequence[int]
    ) -> set[str]:
        thought = "hm" + re.findall(r"\d+", anchor(chat[places[-1]]))[0]
        is_stripped = thought not in whole and re.search(
            THOUGHT_MARK.pattern + thought, mine, re.IGNORECASE
        )
        text = self.text(_with_stand_ins(chat), tools)
        is_opened = all(
            text.startswith(self.text(_with_stand_ins(chat[:index]), tools))
            for index in places
        )
        return ({"thought"} if is_stripped else set()) | (
            set() if is_opened else {"opening"}
        )

    def _shown(self, chat: Chat, tools: Any, *, is_open: bool = True) -> str:
        return THOUGHT_MARK.sub(
            "", self.text(_with_stand_ins(chat), tools, is_open=is_open)
        )

    def _before(self, chat: Chat, tools: Any) -> str:
        """Return the text of a chat without the beginning of an answer."""
        texts = [self._shown(chat, tools, is_open=is_open) for is_open in (True, False)]
        return os.path.commonprefix(texts).rstrip()


def _with_stand_ins(chat: Chat) -> list[Message]:
    """Return the chat with answers that no template changes."""
    return [
        {
            **_without(each, "reasoning_content"),
            "content": "" if each.get("tool_calls") else "answer",
        }
        if each["role"] == "assistant"
        else each
        for each in chat
    ]


# ---- stories


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def answer(text: str, thought: str = "") -> Message:
    return {"role": "assistant", "content": text} | (
        {"reasoning_content": thought} if thought else {}
    )


def called(numbers: Sequence[str], text: str = "", thought: str = "") -> Message:
    calls = []
    for number in numbers:
        function = {"name": "add", "arguments": json.dumps({"a": f"x{number}"})}
        calls.append(
            {"id": f"callid{number}0", "type": "function", "function": function}
        )
    return {**answer(text, thought), "tool_calls": calls}


def result(number: str) -> Message:
    return {
        "role": "tool",
        "tool_call_id": f"callid{number}0",
        "name": "add",
        "content": f"R{number} is it",
    }


def anchor(said: Message) -> str:
    """Return the end of what an answer says, which no other message says."""
    if said.get("tool_calls"):
        return str(json.loads(said["tool_calls"][-1]["function"]["arguments"])["a"])
    return str(said["content"])[-9:]


class Turn(NamedTuple):
    new: list[Message]
    said: Message
    """The answer as the template is to write it."""
    got: Message
    """The answer, as delivered."""
    back: Message
    """It, as the harness sends it back."""
    other_end: bool
    """It ends with another end token than the template's."""
    change: str
    """Change of the history before the turn: edited, trimmed, or empty."""


STORIES = {
    "plain": "u10 a10; u11 a11; u12 a12",
    "system first": "s10 u10 a10; u11 a11; u12 a12",
    "system in the middle": "s10 u10 a10; u11 s11 a11; u12 a12",
    "system repeated": "s10 s11 u10 a10; u11 a11; u12 a12",
    "other end": "u10 a10!; u11 a11; u12 a12",
    "call": "u10 c10; r10 c11; r11 a12; u13 a13; u14 a14",
    "call with text": "u10 c10+; r10 a12; u13 a13",
    "call, other end": "u10 c10!; r10 a12; u13 a13",
    "two calls": "u10 c10,11; r10 r11 a12; u13 a13",
    "results in another order": "u10 c10,11; r11 r10 a12; u13 a13",
    "edited": "u10 a10; u11 a11; edited u12 a12; u13 a13",
    "trimmed": "u10 a10; u11 a11; trimmed u12 a12; u13 a13",
    "plain, a token per byte": "u10 a10; u11 a11; u12 a12",
    "call, a token per byte": "u10 c10; r10 c11; r11 a12; u13 a13; u14 a14",
}
"""Turns of messages: s system, u user, r result, a answer, c calls; + with text, ! with
another end token. A word changes the history.
"""
CHANGES = ("edited", "trimmed")
HOWS = ("apart", "inline", "dropped")
"""Place where the thought of an answer returns: in a field, in the content, not at all.
"""
WITH_THOUGHTS = {
    f"{title}, thoughts {how}": (title, how)
    for title in ("plain", "call")
    for how in HOWS
}


def story(title: str) -> list[Turn]:
    name, how = WITH_THOUGHTS.get(title, (title, ""))
    return [_turn(part.split(), how) for part in STORIES[name].split(";")]


def _turn(words: Sequence[str], how: str) -> Turn:
    makers = {
        "u": lambda at: user(f"Ask {at}"),
        "s": lambda at: {"role": "system", "content": f"Rule {at}."},
        "r": result,
    }
    last = words[-1]
    numbers = re.findall(r"\d+", last)
    thought = f"hm{numbers[0]}" if how else ""
    if last[0] == "c":
        said = called(numbers, "I look." if "+" in last else "", thought)
    else:
        said = answer(f"It is {numbers[0]}.", thought)
    bare = _without(said, "reasoning_content")
    inline = {**bare, "content": THOUGHT.format(thought) + said["content"]}
    got = inline if how == "inline" else said
    new = [makers[word[0]](word[1:]) for word in words[:-1] if word not in CHANGES]
    change = words[0] if words[0] in CHANGES else ""
    return Turn(new, said, got, bare if how == "dropped" else got, "!" in last, change)


# ---- templates


def installed() -> dict[str, str]:
    """Return the templates that installed packages contain."""
    with resources.as_file(resources.files("trl") / "chat_templates") as folder:
        return {f"trl.{name}": text for name, text in collected(folder).items()}


def collected(folder: Path) -> dict[str, str]:
    """Some say what day it is: with a test that runs at midnight they see one day."""
    return {
        file.stem: file.read_text(encoding="utf-8").replace(
            "strftime_now is defined", "false"
        )
        for file in sorted(folder.glob("*.jinja"))
    }
