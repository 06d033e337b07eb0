"""Formats of tool calls by model family, as data for one parser; and thoughts in
prompts and answers.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import sys
import tomllib
from base64 import b32encode
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import cache, cached_property, partial
from hashlib import blake2b
from pathlib import Path
from typing import Any, Literal, TypeAlias, TypeVar

from pydantic_core import from_json

from asyncrl.base.errors import ConfigError, RolloutFailure
from asyncrl.base.user_code import load_function, raised
from asyncrl.messages.json_values import (
    PYTHON_WORDS,
    fits,
    from_python,
    property_schema,
    typed,
)

# A model may write anything, from broken JSON to endless nesting.
MALFORMED = (ValueError, TypeError, KeyError, RecursionError)
_TOOL = r"(?P<tool>[a-zA-Z0-9_./:-]{1,128})"

Tools: TypeAlias = Sequence[Mapping[str, Any]]
"""`{"type": "function", "function": {"name": ..., "parameters": {...}}}` by tool."""
Value = TypeVar("Value")


Part = Literal["thought", "text", "call"]


@dataclass(eq=False)
class Block:
    """A thought, a text or a call of an answer; it grows while it is sampled. The text
    of a call is JSON of its arguments.

    Example: a streamed call of `add` has the pieces `{"a"`, `: 1, "b"` and `: 2}`.
    """

    part: Part
    number: int = 0
    """Among the blocks of its part: calls may divide a text into several."""
    pieces: list[str] = field(default_factory=list)
    name: str = ""
    """Of the called tool."""
    id: str = ""
    """Of the call; the model's own if it wrote one."""

    @property
    def text(self) -> str:
        return "".join(self.pieces)


def call_id(name: str, number: int) -> str:
    """Return nine letters and digits: Mistral's templates refuse any other id."""
    digest = blake2b(f"{name}-{number}".encode(), digest_size=8).digest()
    return b32encode(digest)[:9].decode()


def check_arguments(text: str) -> None:
    """Raise ValueError unless the text is a JSON object of finite numbers and valid
    Unicode.
    """
    arguments = from_json(text, allow_inf_nan=False)
    if not isinstance(arguments, dict):
        raise ValueError("a call needs an object of arguments")
    json.dumps(arguments, allow_nan=False)  # 1e999 is read as infinity


@cache
def _compiled(pattern: str) -> Any:
    import regex  # comes with transformers, and finds partial matches

    return regex.compile(pattern, regex.DOTALL)


# ---- thoughts

Marks = tuple[str, str]
"""Opening and closing text of a thought."""

THINKING: Marks = ("<think>", "</think>")


_escape = cache(re.escape)


def opens_thought(prompt: str, marks: Marks) -> bool:
    return prompt.rstrip().endswith(marks[0].rstrip())


def close_thought(prompt: str, marks: Marks) -> str:
    if not opens_thought(prompt, marks):
        return ""
    return f"\n{marks[1]}\n\n" if prompt.endswith("\n") else marks[1]


def drop_marks(text: str, marks: Marks) -> str:
    """Drop the marks of thoughts. Templates write empty thoughts depending on later
    messages.
    """
    begin, end = map(_escape, map(str.strip, marks))
    return re.sub(rf"(?:{begin}|{end})\s*", "", text)


def split_thought(message: Mapping[str, object], marks: Marks) -> tuple[str, str]:
    """Return (thought, rest of the content). The opening mark may be missing."""
    begin, end = marks
    content = str(message.get("content") or "")
    apart = str(message.get("reasoning_content") or "").strip()
    before, found, after = content.partition(end)
    if not found or begin in before.lstrip().removeprefix(begin):
        return apart, content.strip()
    inner = before.strip().removeprefix(begin).strip()
    return apart if inner in ("", apart) else f"{apart}\n{inner}".strip(), after.strip()


# ---- reading

_CONTEXT = 32
"""Characters kept before the place of reading, for patterns that look behind."""
MOST_TRIALS = 32
"""Calls in an open thought that may begin the calls at its end. A model that repeats a
broken call would otherwise cost quadratic time.
"""


@dataclass(eq=False, repr=False)
class AnswerReader:
    """Reads an answer while it grows: its leading `thought`, its `calls`, and its
    `content`, the text outside the calls. They only grow.

    A format reads by a generator that yields to wait for more text. Invariant: the
    result does not depend on the split into feeds. Each character is handled a bounded
    number of times.
    """

    tool_format: ToolFormat
    tools: Tools = ()
    _: KW_ONLY
    name: str = ""
    """For call ids."""
    is_thinking: bool = False
    """A thought is open."""
    splits_thought: bool = False
    """No content has the thought."""
    most_calls: int = sys.maxsize
    """Others stay hidden."""
    num_shown = 0
    """Calls that began in an earlier feed."""
    text = ""
    """Unread text, with some text before it."""
    at = 0
    is_last = False
    is_malformed = False
    _is_cut = False
    _num_new = 0

    def __post_init__(self) -> None:
        functions = [tool["function"] for tool in self.tools]
        self.schemas = {each["name"]: each.get("parameters") for each in functions}
        self.blocks: list[Block] = []
        """In the order in which they were sampled."""
        self.pieces: list[tuple[Block, str]] = []
        """The texts of the blocks as they grow. A call begins with an empty one."""
        self.calls: list[Block] = []
        self.call = Block("call")
        """The last call; it may be hidden."""
        self._space: list[str] = []
        """White space at the end of a text, held until more of the text follows."""
        self._new: list[str] = []
        self._steps: Iterator[None] = self.tool_format.steps(self)

    @property
    def thought(self) -> str:
        return self._said("thought")

    @property
    def content(self) -> str:
        return self._said("text")

    def _said(self, part: Part) -> str:
        return "".join(block.text for block in self.blocks if block.part == part)

    def feed(self, text: str, *, is_last: bool = False) -> None:
        self._new.append(text)
        self._num_new += len(text)
        # Reading a long argument again at each token would take quadratic time.
        if self._num_new <= (len(self.text) - self.at) // 8 and not is_last:
            return
        self._forget(max(self.at - _CONTEXT, 0))
        self.text += "".join(self._new)
        self._new = []
        self._num_new = 0
        self.is_last = is_last
        self.num_shown = len(self.calls)
        try:
            next(self._steps, None)
        except MALFORMED:
            self.is_malformed = True
            # The rest is text, unless a call has begun.
            self._steps = (
                iter(())
                if self.calls
                else self.tool_format.without_tools.read_text(self)
            )
            next(self._steps, None)

    def begin(self, name: str, own_id: str | None = None) -> None:
        self.cut()
        number = len(self.calls)
        id = call_id(self.name, number)
        if own_id and self.is_free(own_id):
            id = own_id
        self.call = Block("call", number, name=name, id=id)
        if number < self.most_calls:
            self.calls.append(self.call)
            self.blocks.append(self.call)
            self.pieces.append((self.call, ""))

    def is_free(self, id: str) -> bool:
        """Return whether an id names no other call of this answer. Clients key results
        by it.
        """
        return all(call.id != id for call in self.calls)

    def grow(self, arguments: str) -> None:
        """Append to the arguments of the last call."""
        self.call.pieces.append(arguments)
        if arguments and self.call in self.calls[-1:]:
            self.pieces.append((self.call, arguments))

    def add(self, part: Part, text: str) -> None:
        """Append a text, but not yet white space at its end."""
        # A stream cannot take text back, and white space before a call is part of the
        # call's form. What follows decides.
        bare = text.rstrip()
        if bare:
            self._show(part, "".join([*self._space, bare]))
            self._space = []
        self._space.append(text[len(bare) :])

    def cut(self) -> None:
        """Something follows that is not text."""
        self._space = []
        self._is_cut = True

    def end(self) -> None:
        """White space at the end of a text that was never cut belongs to it."""
        space = "".join(self._space)
        if space and not self._is_cut:
            self._show("text", space)

    def _show(self, part: Part, text: str) -> None:
        """Append to the last block, or to a new one after a block of another part."""
        if not self.blocks or self.blocks[-1].part != part:
            number = sum(block.part == part for block in self.blocks)
            self.blocks.append(Block(part, number))
        last = self.blocks[-1]
        last.pieces.append(text)
        self.pieces.append((last, text))

    def read(self, pattern: str, into: Part | None = None) -> Steps[Any]:
        """Read a pattern, and return its match; `into` gets the text before it. Return
        None if the text continues differently, or ends before a pattern that may be
        anywhere.

        Example: the pattern `<b>|<` in the text `a <` matches at 2, but `<b>` may be
            there.
        """
        how = "match" if into is None else "search"
        find = getattr(_compiled(pattern), how)
        while True:
            held = None
            if not self.is_last:
                # No text matches this pattern. It matches partially where the first way
                # to match needs more text.
                find_growing = getattr(_compiled(rf"(?>{pattern}).(?!)"), how)
                held = find_growing(self.text, self.at, partial=True)
            # A match that begins here may still grow longer, or into another one. Only
            # more text can decide.
            is_stuck = held is not None and held.start() == self.at
            found = None if is_stuck else find(self.text, self.at)
            is_held = held is not None and (
                found is None or held.start() <= found.start()
            )
            if into is not None:
                # Text before the first possible match can be shown now: no later text
                # makes it part of one.
                next_match = held if is_held else found
                end = next_match.start() if next_match else len(self.text)
                self.add(into, self.text[self.at : end])
                self.at = end
            if not is_held and (found or into is None or self.is_last):
                self.at = found.end() if found else self.at
                return found
            yield

    def need(self, pattern: str) -> Steps[Any]:
        found = yield from self.read(pattern)
        if found is None:
            raise ValueError(f"a call does not continue with {pattern}")
        return found

    def restart(self, after: Part) -> None:
        """What follows is the beginning of a text."""
        self._forget(self.at)
        if after == "thought":
            self._space = []

    def _forget(self, length: int) -> None:
        self.text = self.text[length:]
        self.at -= length


class TrialReader(AnswerReader):
    """Tries whether a text is nothing but calls of offered tools. Feed it once."""

    begun_at = 0
    """Where the head of the last call ends."""

    def __init__(self, tool_format: ToolFormat, tools: Tools) -> None:
        super().__init__(tool_format, tools)
        self._steps = tool_format.read_only_calls(self)

    def begin(self, name: str, own_id: str | None = None) -> None:
        self.begun_at = self.at
        if name not in self.schemas:
            raise ValueError(f"the tool {name} is not offered")
        super().begin(name, own_id)

    def has_failed(self) -> bool:
        try:
            # Only brackets would wait for the end of anything that follows a brace.
            from_json(self.call.text or "{}", allow_inf_nan=False, allow_partial=True)
        except ValueError:
            return True
        return self.is_malformed


Steps: TypeAlias = Generator[None, None, Value]

_JSON_PIECE = re.compile(r'[^"\\{}\[\]]+|\\.|["{}\[\]]', re.DOTALL)
_STRING = r'"(?:id"\s*:\s*"(?P<id>[^"]+)|\w+"\s*:\s*"[^"]*)"'
_NAME = rf'"(?:tool_)?name"\s*:\s*"{_TOOL}"'
_ARGUMENTS = r'"(?:arguments|parameters)"\s*:\s*'
_OTHERS = rf"(?:{_STRING}\s*,\s*)*?"
# Possessive (`++`, `*+`): the engine never tries other lengths of a part. Long nonsense
# of a model would otherwise take exponential time.
_BRACES = r'(?P<braces>\{(?:[^{}"]++|"(?:[^"\\]|\\.)*+"|(?&braces))*+\})'
JSON_HEAD = (
    rf"(?P<object>\{{)\s*{_OTHERS}"
    rf"(?:{_NAME}\s*,\s*{_ARGUMENTS}|{_ARGUMENTS}(?P<arguments>{_BRACES})\s*,\s*{_OTHERS}{_NAME})"
)
"""`{"name": ..., "arguments": `, perhaps with an id; or arguments and then the name."""
_QUOTED = r'"(?:[^"\\]|\\.)*+"|null\b'
"""Arguments as a text of JSON (Granite 4 writes them twice as JSON), or none."""
_NO_ARGUMENTS = (
    r"(?=\s*(?:<\|(?:call|end|return|tool_call_end)\|>|<｜tool▁call▁end｜>))"
)
"""What ends a call of gpt-oss, Kimi or DeepSeek."""
JSON_END = rf"(?:\s*,\s*{_STRING})*\s*\}}"


def read_json(reader: AnswerReader, head: Any) -> Steps[None]:
    """Read JSON arguments as they are sampled, and the rest of the object around them."""
    groups = head.groupdict()
    if groups.get("arguments"):
        reader.grow(head["arguments"])
    elif (yield from reader.read(_NO_ARGUMENTS)):
        reader.grow("{}")
    elif quoted := (yield from reader.read(_QUOTED)):
        reader.grow(from_json(quoted[0]) or "{}")
    else:
        yield from _grow(reader)
    check_arguments(reader.call.text)
    if groups.get("object"):
        end = yield from reader.need(JSON_END)
        # Mistral's and Apriel's models write the id last, and a stream has shown another.
        is_hidden = len(reader.calls) > reader.num_shown
        if end["id"] and is_hidden and reader.is_free(end["id"]):
            reader.call.id = end["id"]


def _grow(reader: AnswerReader) -> Steps[None]:
    """Copy text to the arguments until its brackets are closed."""
    yield from reader.need(r"(?=\{)")
    depth = 0
    is_quoted = False
    while True:
        start = reader.at
        # A backslash at the end of the text matches nothing, and waits for its
        # character.
        for piece in _JSON_PIECE.finditer(reader.text, start):
            reader.at = piece.end()
            if piece[0] == '"':
                is_quoted = not is_quoted
            elif not is_quoted:
                depth += (piece[0] in ("{", "[")) - (piece[0] in ("}", "]"))
            if not depth:
                break
        reader.grow(reader.text[start : reader.at])
        if not depth:
            return
        if reader.is_last:
            raise ValueError("a call is cut")
        yield


def read_tagged(reader: AnswerReader, pattern: str, values: str) -> Steps[None]:
    """Read arguments one by one. Groups: `key`, `value`, and `kind` if the model writes
    the type.
    """
    root = reader.schemas.get(reader.call.name)
    keys: set[str] = set()
    reader.grow("{")
    while found := (yield from reader.read(pattern)):
        key = found["key"]
        # Both would be in the stream already, and JSON readers keep only the last.
        if key in keys:
            raise ValueError("an argument is given twice")
        value = _value(found, values, property_schema(root, key, root), root)
        text = json.dumps({key: value}, ensure_ascii=False)
        check_arguments(text)
        reader.grow((", " if keys else "") + text[1:-1])
        keys.add(key)


# ---- values


def _value(found: Any, values: str, schema: object, root: object) -> object:
    raw = found["value"]
    kind = found.groupdict().get("kind")
    if kind in ("true", "string") and fits(raw, schema, root):
        return raw
    if kind is not None:
        with contextlib.suppress(ValueError):
            return from_json(raw)
    return _CONVERT[values](raw, schema, root)


_GEMMA = re.compile(
    r"""<\|"\|>(?P<text>.*?)<\|"\|>"""
    r"""|(?P<quoted>"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*')(?=\s*(?:[,:}\]]|\Z))"""
    r"""|(?<=[{,])\s*(?P<key>[^\s{}\[\],:]+)(?=\s*:)|(?P<bare>[^\s{}\[\],:][^{}\[\],]*)""",
    re.DOTALL,
)


def from_gemma(text: str, schema: object, root: object) -> object:
    """Parse Gemma 4's values. Models also quote a text like JSON or not at all. Raises
    ValueError. Example: `{k:[1,null,<|"|>x<|"|>,"y"]}`.
    """
    is_inner = text.lstrip()[:1] in ("{", "[")

    def as_json(found: re.Match[str]) -> str:
        own = found["text"] if found["text"] is not None else found["key"]
        if own is not None:
            return json.dumps(own)
        if found["quoted"]:
            return json.dumps(from_python(found["quoted"]))
        bare = found["bare"].strip()
        value = typed(PYTHON_WORDS.get(bare, bare), {} if is_inner else schema, root)
        return json.dumps(bare if isinstance(value, str) else value)

    return json.loads(_GEMMA.sub(as_json, text.strip()))


def from_minimax(text: str, schema: object, root: object) -> object:
    """Parse MiniMax-M3's nested tags. The schema decides between lists and objects, and
    whether nothing is an empty one. Example: `]<]minimax[>[<item>1]<]minimax[>[</item>`
    is [1].
    """
    parts = [(part["key"], part["value"]) for part in _compiled(_NESTED).finditer(text)]
    can_be = partial(fits, schema=schema, root=root, by_kind=True)
    is_list = can_be([])
    is_object = can_be({})
    if not parts and (text.strip() or can_be("") or not (is_list or is_object)):
        return typed(text, schema, root)
    if is_list and not (is_object and {key for key, _ in parts} - {"item"}):
        items = property_schema(schema, None, root)
        return [from_minimax(value, items, root) for _, value in parts]
    made = {
        key: from_minimax(value, property_schema(schema, key, root), root)
        for key, value in parts
    }
    if len(made) < len(parts):
        raise ValueError("an argument is given twice")
    return made


_CONVERT: Mapping[str, Callable[[str, object, object], object]] = {
    "typed": typed,
    "python": from_python,
    "gemma": from_gemma,
    "minimax": from_minimax,
}


# ---- formats


@dataclass(frozen=True, kw_only=True)
class ToolFormat:
    """Patterns of a block of calls: `open`; `entry`, arguments and `tail` of each call,
    with `between` before further calls; `last`. The entry has the group `tool`, and
    `id` if the model writes ids.

    Example: in `<calls>[f(x=1), g()]</calls>` they are `<calls>[`, `f(`, `)`, `, `, and
        `]</calls>`.

    `noise`: pattern of text that is not content, such as heads of channels.
    `has_channels`: thoughts are noise, and templates refuse thoughts sent back.
    """

    name: str = "none"
    open: str = r"(?!)"
    entry: str = ""
    """Empty: `open` has the group."""
    argument: str = ""
    """An argument with its `key` and `value`. Empty: arguments are JSON."""
    values: str = "typed"
    """How values are written: typed (by the tool's schema), python, gemma or minimax.
    """
    tail: str = ""
    between: str = r"(?!)"
    last: str = ""
    noise: str = ""
    has_channels: bool = False
    marks: Sequence[str] = ()
    """Markers that may be special tokens."""
    call: str = ""
    """A call of the tool NAME up to its arguments, or with JSON ARGUMENTS. Empty: no
    call can be forced.
    """
    close: str | None = None
    taught: str = r"(?!)"
    """Pattern of what a prompt with tools says if its template writes no calls."""
    thinking: Marks = THINKING
    refusal: str = ""

    @property
    def opens(self) -> Sequence[str]:
        """Markers of calls and thoughts."""
        return (*self.marks, *self.thinking)

    def parse(self, text: str, tools: Tools = (), **options: Any) -> AnswerReader:
        """Read a whole answer. One with a malformed call is all text. `tools` give
        unquoted arguments their types; `options` go to AnswerReader.
        """
        reader = AnswerReader(self, tools, **options)
        reader.feed(text, is_last=True)
        if reader.is_malformed:
            return self.without_tools.parse(text, **options)
        return reader

    def steps(self, reader: AnswerReader) -> Steps[None]:
        """Read an answer: a thought, then text and calls. Raises MALFORMED errors."""
        if reader.splits_thought or not self.has_channels:
            yield from self._read_thought(reader)
        yield from self.read_text(reader)

    def _read_thought(self, reader: AnswerReader) -> Steps[None]:
        begin, end = map(_escape, self.thinking)
        # A model may close a thought that nobody has opened (MiniMax-M3 does).
        others = "" if reader.is_thinking else f"(?={end})"
        head = rf"\s*(?:{begin}\s*|{others})"
        close = rf"{end}\s*"
        into: Part = "thought"
        if not reader.splits_thought:  # the content has its marks
            head, close, into = f"(?={head})", f"(?<={end})", "text"
        if (yield from reader.read(head)) is None:
            return
        # Calls without a mark are recognized only at the beginning of a text.
        opening = self._opening.replace(r"\A", "(?!)")
        either = f"(?P<closing>{close})|{opening}"
        for _ in range(MOST_TRIALS):
            found = yield from reader.read(either, into)
            if found is None or found["closing"] is not None:
                break
            reader.at = found.start()
            num_thought = yield from self._try_calls(reader)
            if not num_thought:
                break
            reader.add(into, reader.text[reader.at :][:num_thought])
            reader.at += num_thought
        else:
            yield from reader.read(close, into)
        reader.restart(into)

    def _try_calls(self, reader: AnswerReader) -> Steps[int]:
        """Wait until the answer ends or cannot end with the calls that begin here in an
        open thought. Return the number of characters that belong to the thought, 0 if
        the calls count.
        """
        while True:
            text = reader.text[reader.at :]
            before, is_closed, _ = text.partition(self.thinking[1])
            if is_closed:
                return len(before)
            trial = TrialReader(self, reader.tools)
            trial.feed(text, is_last=reader.is_last)
            if trial.has_failed():
                return trial.begun_at
            if reader.is_last:
                return 0
            yield

    def read_only_calls(self, reader: AnswerReader) -> Steps[None]:
        """Read calls to the end of the answer. Raises ValueError if text follows."""
        # noise of channels has thoughts in it
        noise = f"|{self.noise}" if self.noise and not self.has_channels else ""
        head = rf"(?:\s{noise})*?(?:{self._opening}|\Z)"
        while (found := (yield from reader.need(head)))["tool"]:
            yield from self._read_calls(reader, found)

    @property
    def _opening(self) -> str:
        return f"(?:{self.open})(?:{self.entry})"

    def read_text(self, reader: AnswerReader) -> Steps[None]:
        noise = f"|(?P<noise>{self.noise})" if self.noise else ""
        opening = f"{self._opening}{noise}"
        while found := (yield from reader.read(opening, "text")):
            if found.groupdict().get("noise"):
                reader.cut()
            else:
                yield from self._read_calls(reader, found)
        reader.end()

    def _read_calls(self, reader: AnswerReader, head: Any) -> Steps[None]:
        while head is not None:
            groups = head.groupdict()
            reader.begin(head["tool"], groups.get("id"))
            if groups.get("object"):
                yield from read_json(reader, head)
            elif self.argument:
                yield from read_tagged(reader, self.argument, self.values)
                yield from reader.need(self.tail)
                reader.grow("}")
            else:
                yield from read_json(reader, head)
                yield from reader.need(self.tail)
            head = yield from reader.read(f"{self.between}(?:{self.entry})")
        yield from reader.need(self.last)

    def prefill(self, name: str | None) -> str | None:
        """Return the beginning of an answer that forces a call of this or any tool. It
        must not end with a space, part of the next token.
        """
        head = self.call.partition("ARGUMENTS")[0]
        head = head.partition("NAME")[0] if name is None else head.replace("NAME", name)
        return head.rstrip() or None

    def around(self, name: str) -> tuple[str, str] | None:
        """Return the text around a call's JSON arguments."""
        head, found, tail = self.call.partition("ARGUMENTS")
        return (head.replace("NAME", name), tail) if found else None

    @cached_property
    def without_tools(self) -> ToolFormat:
        # Noise, such as the heads of channels, consists of these marks. It must be
        # recognized without tools, too.
        marks = self.marks if self.noise else ()
        return ToolFormat(
            noise=self.noise,
            has_channels=self.has_channels,
            marks=marks,
            thinking=self.thinking,
        )


NO_FORMAT = ToolFormat()

USAGE = "parse(text) -> [(name, arguments), ...] or None"


@dataclass(frozen=True, kw_only=True)
class UserFormat(ToolFormat):
    """User-defined `parse(text)` of a whole answer."""

    function: Callable[[str], Any]

    def read_text(self, reader: AnswerReader) -> Steps[None]:
        # The function gets whole answers only, so content is not streamed.
        while not reader.is_last:
            yield
        try:
            found = self.function(reader.text)
        # By contract a ValueError says that a call is malformed, and deep nesting is
        # the model's doing: the answer is text. Any other error is a bug of the
        # function.
        except (ValueError, RecursionError):
            raise
        except BaseException as error:  # user errors are data
            raise self._misused(raised(error)) from error
        try:
            pairs = [(name, arguments) for name, arguments in found or ()]
        except (TypeError, ValueError):
            raise self._misused(f"returned {found!r:.200}") from None
        # feed() reads the answer again as text.
        if not pairs:
            raise ValueError("there is no call")
        for name, arguments in pairs:
            text = json.dumps(arguments, ensure_ascii=False)
            check_arguments(text)
            if not re.fullmatch(_TOOL, name):
                raise ValueError(f"{name!r:.200} is not the name of a tool")
            reader.begin(name)
            reader.grow(text)

    def _misused(self, what: str) -> RolloutFailure:
        rule = f"it is called as {USAGE}; a ValueError says that a call is malformed"
        return RolloutFailure(f"gateway.tool_format={self.name} {what}", rule=rule)


# ---- families

MINIMAX = "]<]minimax[>["
WORDS = {
    "JSON_HEAD": f"(?:{JSON_HEAD})",
    "TOOL_NAME": _TOOL,
    "MINIMAX_TAG": re.escape(MINIMAX),
}
_NESTED = (
    r"MINIMAX_TAG<(?P<key>[^>/\s]+)>(?P<value>(?:(?!MINIMAX_TAG<).|MINIMAX_TAG<[^>/]+>(?&value)"
    r"MINIMAX_TAG</[^>]+>)*+)MINIMAX_TAG</(?P=key)>"
).replace("MINIMAX_TAG", WORDS["MINIMAX_TAG"])


def _data() -> dict[str, Any]:
    text = Path(__file__).with_suffix(".toml").read_text(encoding="utf-8")
    for word, pattern in WORDS.items():
        text = text.replace(word, pattern)
    return tomllib.loads(text)


_DATA = _data()
FAMILIES = [
    ToolFormat(**family | {"thinking": tuple(family.get("thinking", THINKING))})
    for family in _DATA["family"]
]


# ---- which format a template writes

_QUESTION = {"role": "user", "content": "Question?"}
_THOUGHT = "Some thought."
_SAID = "Some answer."
_CALLS = [(name, tool["arguments"]) for name, tool in _DATA["probe"].items()]
_PROBED = _CALLS[0][0]
_PROBE_TOOLS = [
    {"type": "function", "function": tool["function"]}
    for tool in _DATA["probe"].values()
]
_WAYS: Sequence[Mapping[str, Any]] = (
    {},
    {"as_text": True},
    {"own_id": "functions.{name}:{number}"},
)
"""What templates want a call to be. Kimi's write the id instead of the name."""


@dataclass
class TemplateProbe:
    """What a chat template writes; nothing if it fails."""

    template: str
    why: str = ""
    """Why it failed."""

    def render(
        self,
        *answer: Mapping[str, object],
        tools: Tools | None = None,
        is_open: bool = False,
    ) -> str:
        # Private, but it is the environment in which servers render: with their
        # filters, and sandboxed.
        from transformers.utils.chat_template_utils import _compile_jinja_template

        chat = {
            "messages": [_QUESTION, *answer],
            "tools": tools,
            "add_generation_prompt": is_open,
        }
        try:
            template = _compile_jinja_template(self.template)
            return str(template.render(**chat, bos_token="<bos>", eos_token="<eos>"))
        except Exception as error:  # templates raise what they like
            self.why = f" (it fails with {type(error).__name__}: {error})"[:200]
            return ""

    def answer(self, **message: object) -> str:
        """Return what a model would have sampled, with the end of the turn."""
        whole = self.render({"role": "assistant", **message}, tools=_PROBE_TOOLS)
        prompt = self.render(tools=_PROBE_TOOLS, is_open=True)
        shared = os.path.commonprefix([whole, prompt])
        if shared != prompt:
            shared = re.sub(r"[<\[][^<>\[\]]*\Z", "", shared)  # no half of a mark
        return whole[len(shared) :]

    def called(
        self, num_calls: int, *, as_text: bool = False, own_id: str = "probe000{number}"
    ) -> str:
        """Return an answer of calls, without the end of the turn; empty if the template
        leaves them out.
        """
        calls = []
        for number, (name, arguments) in enumerate(_CALLS[:num_calls]):
            function = {
                "name": name,
                "arguments": json.dumps(arguments) if as_text else arguments,
            }
            call_id = own_id.format(name=name, number=number)
            calls.append({"type": "function", "id": call_id, "function": function})
        text = self.answer(content="", tool_calls=calls)
        _, _, end = self.answer(content=_SAID).partition(_SAID)
        # The end of a turn may differ after calls. The common end of both answers is
        # the end of a turn. It may begin inside a mark, which the next line drops.
        end = os.path.commonprefix([text[::-1], end[::-1]])[::-1]
        end = re.sub(r"\A[^<>]*>", "", end)
        return text.removesuffix(end) if _PROBED in text else ""

    def thinking(self, known: Marks) -> Marks:
        """Return the marks around a thought, `known` if the template writes none."""
        thoughts = dict.fromkeys(
            ("reasoning_content", "thinking", "reasoning"), _THOUGHT
        )
        answer = {"role": "assistant", "content": _SAID, **thoughts}
        before, found, after = self.render(answer).partition(_THOUGHT)
        before = before if found else self.render(is_open=True)
        mark = r"(?:<\|?[^<>\s|]+\|?>|\[[A-Z_]+\])"
        begin = re.search(rf"({mark})\s*\Z", before)
        end = re.match(rf"\s*({mark})", after)
        if before.rstrip().endswith(known[0]) or begin is None or end is None:
            return known
        return (begin[1], end[1]) if "think" in begin[1].lower() else known


def _find_readers(
    probe: TemplateProbe, fitting: Sequence[ToolFormat]
) -> Iterator[ToolFormat]:
    """Yield the formats that read what the template writes, those first that begin a
    forced call like it.
    """
    others: list[ToolFormat] = []
    # some templates write only one call, or fail
    for number, way in itertools.product((2, 1), _WAYS):
        text = probe.called(number, **way)
        # A template without tools: no format is compiled, which takes half a second.
        if not text:
            continue
        for tool_format in fitting:
            calls = [
                (call.name, json.loads(call.text))
                for call in tool_format.parse(text, _PROBE_TOOLS).calls
            ]
            if calls != _CALLS[:number]:
                continue
            # A forced call must begin as the model was trained to begin it.
            if (tool_format.prefill(_PROBED) or "") in text:
                yield tool_format
            others.append(tool_format)
    yield from others


def find_tool_format(name: str, template: str) -> ToolFormat:
    """Return the format `name`; auto: the first that reads a call which the chat
    template writes.

    If no format reads the template's calls, `refusal` says why, for requests with
    tools. Raises ConfigError.
    """
    if ":" in name:
        function = load_function(
            name, "gateway.tool_format", usage=USAGE, arguments=("",)
        )
        return UserFormat(name=name, function=function)
    named = {each.name: each for each in FAMILIES}
    known = ", ".join(named)
    if name not in (*named, "auto", "none"):
        way_out = f"set it to auto, {known}, none, or module:function of a parser of your own."
        raise ConfigError(f"gateway.tool_format={name} is not known", way_out=way_out)
    default = named.get(name, ToolFormat())
    if not template and name in named:
        return default
    fitting = [each for each in FAMILIES if name in ("auto", each.name)]
    probe = TemplateProbe(template)
    tool_format = next(_find_readers(probe, fitting), None)
    prompt = probe.render(tools=_PROBE_TOOLS, is_open=True)
    called = probe.called(1)
    # such templates leave the calls of an answer to the engine
    if tool_format is None and not called:
        taught = (each for each in fitting if re.search(each.taught, prompt))
        tool_format = next(taught, named.get(name))
    refusal = ""
    if _PROBED not in prompt and name != "none":
        refusal = f"the chat template never mentions `tools`, so the model would not see them{probe.why}"
    elif tool_format is None:
        why = f", which writes {called!r:.300}" if called else probe.why
        refusal = f"gateway.tool_format={name} cannot read a tool call of this chat template{why}"
        refusal += f". Set it to {known}, or module:function of a parser"
    if refusal:
        refusal += "; or set model.chat_template to another Jinja file."
    found = tool_format or default
    return replace(found, refusal=refusal, thinking=probe.thinking(found.thinking))
