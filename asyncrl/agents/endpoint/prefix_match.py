"""Find the recorded completion that a chat continues. Pure.

A prompt that begins with recorded text keeps the recorded ids (extended). An edited history starts a branch.

Many templates strip thoughts or reformat calls. Then the text after the last recorded answer is taken from a
trial render with a placeholder for the answer (realigned). It must contain every later message.
"""

from __future__ import annotations

import contextlib
import json
import math
import secrets
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from asyncrl.agents.endpoint.tool_formats import Marks, close_thought, split_thought
from asyncrl.messages.work import ChatTokenizer, new_hash

if TYPE_CHECKING:
    from asyncrl.agents.endpoint.capture import ChatNode

Message = Mapping[str, Any]
Messages = Sequence[Message]

How = Literal["new", "extended", "realigned", "edited"]
"""Origin of a prompt. edited starts a branch: the last answer was edited, or the text cannot be cut after it.
"""


@dataclass(frozen=True, slots=True, eq=False)
class Prefix:
    """Length and running hash of a text or of ids, int32 [T]."""

    length: int = 0
    state: blake2b = field(default_factory=new_hash)

    @property
    def place(self) -> tuple[int, bytes]:
        return self.length, self.state.digest()

    def then(self, more: str | npt.NDArray[np.int32]) -> Prefix:
        state = self.state.copy()
        state.update(more.encode() if isinstance(more, str) else more.astype("<i4").tobytes())
        return Prefix(self.length + len(more), state)


@dataclass(frozen=True, slots=True, eq=False)
class PromptMatch:
    """The ids of `parent`, then `text`, which ends with `prefill`. `whole`: of all text."""

    text: str
    how: How
    parent: ChatNode | None
    chain: Chain
    num_messages: int
    prefill: str
    whole: Prefix | None


# ---- chats as hashes

_to_json = json.JSONEncoder(sort_keys=True, separators=(",", ":")).encode


class Chain:
    """Hash of a chat, message by message. `recorded`: answers count as they were delivered."""

    def __init__(self, messages: Messages, tools: Messages | None, marks: Marks, recorded: Recorded) -> None:
        self.marks = marks
        self._state = new_hash(_to_json(tools or None).encode())
        self.answers: list[tuple[int, bytes]] = []
        """(index of an answer, key of the chat through it)."""
        for index, message in enumerate(messages):
            key = self.key_with(message)
            if message.get("role") == "assistant":
                self.answers.append((index, key))
                key = recorded.delivered_key(key)
            self._state = new_hash(key)

    def key_with(self, message: Message) -> bytes:
        state = self._state.copy()
        state.update(_canonical(message, self.marks))
        return state.digest()


def _canonical(message: Message, marks: Marks) -> bytes:
    """Serialize a message without None fields, key order, JSON spacing, outer white space, and an answer's
    name and place of the thought: harnesses change them.
    """
    fields = {name: value for name, value in message.items() if value is not None}
    if fields.get("role") == "assistant":
        answer = {**message, "content": fields.pop("unjoined_content", message.get("content"))}
        fields["reasoning_content"], fields["content"] = split_thought(answer, marks)
        fields.pop("name", None)
    if calls := fields.get("tool_calls"):
        fields["tool_calls"] = [_tool_call(call) for call in calls]
    return _to_json(fields).encode()


def _tool_call(call: Mapping[str, Any]) -> list[Any]:
    """Return a call with the numbers that a JavaScript client would send back: 1 for 1.0, 0 for -0.0,
    9007199254740992 for 2**53 + 1, null for 1e999.
    """
    arguments = call["function"]["arguments"]
    text = arguments if isinstance(arguments, str) else _to_json(arguments)
    parsed = json.loads(text, parse_int=_number, parse_float=_number, parse_constant=_number)
    return [call["id"], call["function"]["name"], parsed]


def _number(text: str) -> float | None:
    number = float(text) + 0.0
    return number if math.isfinite(number) else None


def answer_forms(message: Message, sampled: str, marks: Marks) -> Iterator[Message]:
    """Yield the forms that may return: as delivered, with the hidden stop text, each without its thought."""
    forms = [message]
    if not message.get("tool_calls"):
        forms.append({**message, "content": sampled, "reasoning_content": None})
    for form in forms:
        yield form
        yield {**form, "content": split_thought(form, marks)[1], "reasoning_content": None}


class Recorded:
    """A session's completions by chat, text and ids. Reads may run in a thread in parallel with add()."""

    def __init__(self) -> None:
        self._nodes: dict[Hashable, ChatNode] = {}
        self._lengths: dict[type, set[int]] = {str: set(), np.ndarray: set()}

    def add(self, node: ChatNode, keys: Iterable[bytes]) -> None:
        """`keys`: forms of its chat."""
        places: list[Hashable] = [*keys, node.whole.place]
        self._lengths[np.ndarray].add(node.whole.length)
        if node.text is not None:
            places.append(node.text.place)
            self._lengths[str].add(node.text.length)
        for place in places:
            known = self._nodes.get(place)
            if known is None or _rank(node, place) < _rank(known, place):
                self._nodes[place] = node

    def delivered_key(self, key: bytes) -> bytes:
        return self._nodes[key].key if key in self._nodes else key

    def last_answer(self, chain: Chain) -> tuple[int, ChatNode | None]:
        """Return (index, completion), or (-1, None)."""
        for index, key in reversed(chain.answers):
            if key in self._nodes:
                return index, self._nodes[key]
        return -1, None

    def longest(self, whole: str | npt.NDArray[np.int32]) -> ChatNode | None:
        prefix = Prefix()
        found: ChatNode | None = None
        for length in sorted(length for length in tuple(self._lengths[type(whole)]) if length <= len(whole)):
            prefix = prefix.then(whole[prefix.length : length])
            found = self._nodes.get(prefix.place, found)
        return found


def _rank(node: ChatNode, place: Hashable) -> tuple[Any, ...]:
    """Rank completions of one place; the order of arrival does not count."""
    return node.key != place, node.content


# ---- the match

SENTINEL = f"asyncrl{secrets.token_hex(16)}"
"""Replaces an answer in a trial render; not guessable."""


@dataclass(frozen=True, slots=True, eq=False)
class ChatMatcher:
    tokenizer: ChatTokenizer
    render: Callable[[Messages], str]
    recorded: Recorded
    messages: Messages
    prefill: str
    chain: Chain

    def match(self) -> PromptMatch:
        """Raises ValueError if the template refuses the chat or omits a message."""
        at, answer = self.recorded.last_answer(self.chain)
        try:
            text = self._begun(self.render(self.messages))
        except ValueError:
            found = self._realigned(at, answer)
            if found is None:
                raise
            return found
        node = self.recorded.longest(text)
        found = None
        if node is not None and node.text is not None:
            rest = text[node.text.length :]
            found = self._match("extended", node, node.num_messages, rest, node.text.then(rest))
        if found is None or (node is not None and node.num_messages <= at):
            found = self._realigned(at, answer) or found
        found = found or self._match("edited", None, 0, text, Prefix().then(text))
        if found is None:
            index = left_out(self.messages, text)
            what = f"the chat template leaves out what messages[{index}] says"
            rule = f"it has no place there for role {self.messages[index or 0]['role']}"
            raise ValueError(f"{what}: {rule}; send no such message, or set another model.chat_template")
        return found

    def _match(
        self, how: How, parent: ChatNode | None, num_covered: int, text: str, whole: Prefix | None
    ) -> PromptMatch | None:
        """Return the match if the text has every message after the first `num_covered`."""
        if left_out(self.messages, text, num_covered) is not None:
            return None
        if self.chain.answers and self.chain.answers[-1][0] >= num_covered:
            how = "edited"
        return PromptMatch(text, how, parent, self.chain, len(self.messages), self.prefill, whole)

    def _realigned(self, at: int, answer: ChatNode | None) -> PromptMatch | None:
        for rest in self._cuts(at, answer) if answer is not None else ():
            if found := self._match("realigned", answer, at + 1, self._begun(rest), None):
                return found
        return None

    def _begun(self, prompt: str) -> str:
        return prompt + close_thought(prompt, self.chain.marks) + self.prefill if self.prefill else prompt

    def _cuts(self, at: int, answer: ChatNode) -> Iterator[str]:
        """Yield texts after the recorded answer messages[at], best first.

        The answer's calls stay, since a template may need them for results.
        """
        last = [token for token in answer.sampled_ids[-1:].tolist() if token in self.tokenizer.end_ids]
        end = self.tokenizer.decode(last, skip_special_tokens=False)
        calls = self.messages[at].get("tool_calls")
        if calls and end:
            _, found, rest = self._after(at, _with_calls(calls)).partition(end)
            if found:
                yield rest
        if after := self._after(at, {"role": "assistant", "content": SENTINEL}):
            between, found, rest = after.partition(end) if end else (after, "", "")
            yield rest if found and not between.strip() else after

    def _after(self, at: int, stand_in: Message) -> str:
        """Return the text after the placeholder of messages[at]; empty if the template refuses."""
        shown = [*self.messages[:at], stand_in, *self.messages[at + 1 :]]
        single = [
            {**each, "tool_calls": each["tool_calls"][:1]} if each.get("tool_calls") else each
            for each in shown
        ]
        for chat in (shown, single):
            with contextlib.suppress(ValueError):
                _, found, after = self.render(chat).rpartition(SENTINEL)
                return after if found else ""
        return ""


def _with_calls(calls: Sequence[Mapping[str, Any]]) -> Message:
    """Return the placeholder for an answer with calls. It has no content, which a template may write after
    them or their results.
    """
    arguments = {"x": SENTINEL}
    swapped = [{**call, "function": {**call["function"], "arguments": arguments}} for call in calls]
    return {"role": "assistant", "content": "", "tool_calls": swapped}


def left_out(messages: Messages, text: str, start: int = 0) -> int | None:
    """Return the index of the first message from `start` on that is missing from the text, answers aside.

    White space, case and JSON escapes do not count.
    """
    squeezed = _squeezed(text)
    at = 0
    for index, message in enumerate(messages):
        if index < start or message["role"] == "assistant":
            continue
        said = str(message.get("content") or "")
        ways = (said, json.dumps(said, ensure_ascii=False)[1:-1], json.dumps(said)[1:-1])
        places = (squeezed.find(_squeezed(way), begin) for begin in (at, 0) for way in ways)
        place = next((place for place in places if place >= 0), None)
        if place is None:
            return index
        at = max(at, place)
    return None


def _squeezed(text: str) -> str:
    return "".join(text.split()).casefold()
