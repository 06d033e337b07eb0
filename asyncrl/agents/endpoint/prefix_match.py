"""Find the recorded completion that a chat continues. Pure.

A prompt that begins with recorded text keeps the recorded ids (extended). An edited history starts a branch.

Many templates strip thoughts or reformat calls. Then the text after the last recorded answer is taken from a
trial render with a placeholder for the answer (realigned). It must contain every later message.
"""

from __future__ import annotations

import contextlib
import json
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Literal

from asyncrl.agents.endpoint.reasoning import Marks, close_thought, split_thought
from asyncrl.messages.work import ChatRenderer, new_hash

if TYPE_CHECKING:
    from asyncrl.agents.endpoint.capture import ChatNode

Message = Mapping[str, Any]
Messages = Sequence[Message]

How = Literal["new", "extended", "realigned", "edited"]
"""Origin of a prompt. edited starts a branch: the last answer was edited, or the text cannot be cut after it.
"""

Prefill = Callable[[str], str]


def no_prefill(prompt: str) -> str:
    return ""


@dataclass(frozen=True, slots=True, eq=False)
class TextHash:
    """Length and running hash of a text."""

    num_chars: int = 0
    state: blake2b = field(default_factory=new_hash)

    @property
    def place(self) -> tuple[int, bytes]:
        return self.num_chars, self.state.digest()

    def then(self, text: str) -> TextHash:
        state = self.state.copy()
        state.update(text.encode())
        return TextHash(self.num_chars + len(text), state)


@dataclass(frozen=True, slots=True, eq=False)
class PromptMatch:
    """The ids of `parent`, then `text`, which ends with `prefill`. `text_hash`: of all text."""

    text: str
    how: How
    parent: ChatNode | None
    chain: Chain
    num_messages: int
    prefill: str
    text_hash: TextHash | None


# ---- chats as hashes

_to_json = json.JSONEncoder(sort_keys=True, separators=(",", ":")).encode


class Chain:
    """Hash of a chat, message by message. `settled` maps forms of recorded answers to the delivered form."""

    def __init__(
        self,
        messages: Messages,
        tools: Messages | None,
        marks: Marks,
        settled: Callable[[bytes], bytes | None] = lambda key: None,
    ) -> None:
        self._marks = marks
        self._state = new_hash(_to_json(tools or None).encode())
        self.answers: list[tuple[int, bytes]] = []
        """(index of an answer, key of the chat through it)."""
        for index, message in enumerate(messages):
            if message.get("role") != "assistant":
                self._state.update(_canonical(message, marks))
                continue
            key = self.key_with({**message, "name": None})  # no recorded answer has a name
            recorded = settled(key)
            if recorded is None and "name" in message:
                key = self.key_with(message)
            self.answers.append((index, key))
            self._state = new_hash(recorded or key)

    def key_with(self, answer: Message) -> bytes:
        state = self._state.copy()
        state.update(_canonical(answer, self._marks))
        return state.digest()


def _canonical(message: Message, marks: Marks) -> bytes:
    """Serialize a message without None fields, key order, JSON spacing, outer white space, and the place of
    the thought: harnesses change them.
    """
    fields = {name: value for name, value in message.items() if value is not None}
    if fields.get("role") == "assistant":
        thought, fields["content"] = split_thought(message, marks)
        fields.pop("reasoning_content", None)
        if thought:
            fields["reasoning_content"] = thought
    if calls := fields.get("tool_calls"):
        fields["tool_calls"] = [_tool_call(call) for call in calls]
    return _to_json(fields).encode()


def _tool_call(call: Mapping[str, Any]) -> list[Any]:
    arguments = call["function"]["arguments"]
    parsed = json.loads(arguments) if isinstance(arguments, str) else arguments
    return [call["id"], call["function"]["name"], parsed]


def answer_forms(message: Message, sampled: str, marks: Marks) -> Iterator[Message]:
    """Yield the forms that may return: as delivered, with the hidden stop text, each without its thought."""
    forms = [message]
    if not message.get("tool_calls"):
        forms.append({**message, "content": sampled, "reasoning_content": None})
    for form in forms:
        yield form
        thought, content = split_thought(form, marks)
        if thought:
            yield {**form, "content": content, "reasoning_content": None}


class Recorded:
    """A session's completions by chat and by text. Reads may run in a thread in parallel with add()."""

    def __init__(self) -> None:
        self._by_chat: dict[bytes, ChatNode] = {}
        self._settled: dict[bytes, bytes] = {}
        self._by_text: dict[tuple[int, bytes], ChatNode] = {}

    def add(self, node: ChatNode, keys: Iterable[bytes]) -> None:
        """`keys`: forms of its chat, the delivered form first."""
        for key in keys:
            if _rank(node, key) < _rank(self._by_chat.get(key), key):
                self._by_chat[key] = node
            self._settled.setdefault(key, node.key)
        self._settled[node.key] = node.key
        if node.text is not None and _rank(node) < _rank(self._by_text.get(node.text.place)):
            self._by_text[node.text.place] = node

    def settled(self, key: bytes) -> bytes | None:
        return self._settled.get(key)

    def last_answer(self, chain: Chain) -> tuple[int, ChatNode | None]:
        """Return (index, completion), or (-1, None)."""
        for index, key in reversed(chain.answers):
            if key in self._by_chat:
                return index, self._by_chat[key]
        return -1, None

    def longest(self, text: str) -> ChatNode | None:
        hashed = new_hash()
        found: ChatNode | None = None
        at = 0
        for length in sorted({length for length, _ in tuple(self._by_text) if length <= len(text)}):
            hashed.update(text[at:length].encode())
            at = length
            found = self._by_text.get((length, hashed.digest()), found)
        return found


def _rank(node: ChatNode | None, key: bytes | None = None) -> tuple[Any, ...]:
    return (2,) if node is None else (key is not None and node.key != key, node.order[1], node.content)


# ---- the match


@dataclass(frozen=True, slots=True, eq=False)
class ChatMatcher:
    renderer: ChatRenderer
    recorded: Recorded
    marks: Marks
    messages: Messages
    tools: Messages | None
    settings: Mapping[str, Any] | None
    prefill: Prefill
    chain: Chain

    def match(self) -> PromptMatch:
        """Raises ValueError if the template refuses the chat or omits a message."""
        at, known = self.recorded.last_answer(self.chain)
        try:
            text = self._render(self.messages)
        except ValueError:
            found = self._realigned(at, known)
            if found is None:
                raise
            return found
        whole = text + self._begun(text)
        node = self.recorded.longest(whole)
        found = None
        if node is not None and node.text is not None:
            rest = whole[node.text.num_chars :]
            if self._has_all(node.num_messages, rest):
                how = self._how("extended", node.num_messages)
                found = self._match(rest, how, node, self.prefill(text), node.text.then(rest))
        if found is None or (node is not None and node.num_messages <= at):
            found = self._realigned(at, known) or found
        if found is not None:
            return found
        index = left_out(self.messages, text, self.marks)
        if index is not None:
            what = f"the chat template leaves out what messages[{index}] says"
            rule = f"it has no place there for role {self.messages[index]['role']}"
            raise ValueError(f"{what}: {rule}; send no such message, or set another model.chat_template")
        return self._match(whole, "edited", None, self.prefill(text), TextHash().then(whole))

    def _realigned(self, at: int, node: ChatNode | None) -> PromptMatch | None:
        for rest in self._cuts(at, node) if node is not None else ():
            if self._has_all(at + 1, rest):
                how = self._how("realigned", at + 1)
                return self._match(rest + self._begun(rest), how, node, self.prefill(rest), None)
        return None

    def _how(self, how: How, num_covered: int) -> How:
        """Return `how` if the recorded ids contain the last answer."""
        last = self.chain.answers[-1][0] if self.chain.answers else -1
        return how if last < num_covered else "edited"

    def _match(
        self, text: str, how: How, parent: ChatNode | None, prefill: str, text_hash: TextHash | None
    ) -> PromptMatch:
        return PromptMatch(text, how, parent, self.chain, len(self.messages), prefill, text_hash)

    def _begun(self, prompt: str) -> str:
        prefill = self.prefill(prompt)
        return prefill and close_thought(prompt, self.marks) + prefill

    def _has_all(self, num_covered: int, text: str) -> bool:
        said = [message for message in self.messages[num_covered:] if message["role"] != "assistant"]
        return left_out(said, text, self.marks) is None

    def _render(self, messages: Messages) -> str:
        return self.renderer.render(messages, tools=self.tools, settings=self.settings)

    def _cuts(self, at: int, node: ChatNode) -> Iterator[str]:
        """Yield texts after the recorded answer messages[at], best first.

        The answer's calls stay, since a template may need them for results.
        """
        ids = node.sampled_ids.tolist()
        is_ended = bool(ids) and ids[-1] in self.renderer.end_ids
        end = self.renderer.decode(ids[-1:], skip_special_tokens=False) if is_ended else ""
        if calls := self.messages[at].get("tool_calls"):
            behind = self._after(str(NUMBER), at, stand_in(calls))
            if end and end in behind:
                yield behind.partition(end)[2]
            sampled = self.renderer.decode(ids, skip_special_tokens=False).removesuffix(end)
            closed = _closing(sampled, behind)
            if closed:
                yield behind[closed:]
        if after := self._after(SENTINEL, at, stand_in()):
            between, found, rest = after.partition(end) if end else ("", "", "")
            yield rest if found and not between.strip() else after

    def _after(self, placeholder: str, at: int, answer: Message) -> str:
        """Return the text after the placeholder at messages[at]; empty if the template refuses."""
        shown = [*self.messages[:at], answer, *self.messages[at + 1 :]]
        single = [
            {**each, "tool_calls": each["tool_calls"][:1]} if each.get("tool_calls") else each
            for each in shown
        ]
        for chat in (shown, single):
            with contextlib.suppress(ValueError):
                _, found, after = self._render(chat).rpartition(placeholder)
                return after if found else ""
        return ""


SENTINEL = f"asyncrl{secrets.token_hex(16)}"
"""Replaces an answer in a trial render; not guessable."""
NUMBER = 10**17 + secrets.randbelow(9 * 10**17)
"""Replaces arguments in a trial render."""


def stand_in(calls: Sequence[Mapping[str, Any]] = ()) -> Message:
    """Return the placeholder for an answer with these calls; then without content, which a template may write
    after them or their results.
    """
    if not calls:
        return {"role": "assistant", "content": SENTINEL}
    arguments = {SENTINEL[:12]: NUMBER}
    swapped = [
        {**call, "function": {"name": call["function"]["name"], "arguments": arguments}} for call in calls
    ]
    return {"role": "assistant", "content": "", "tool_calls": swapped}


MAX_CLOSING = 200


def _closing(sampled: str, behind: str) -> int:
    squeezed = "".join(sampled[-2 * MAX_CLOSING :].split())
    for length in range(min(len(behind), MAX_CLOSING), 0, -1):
        head = behind[:length]
        if not head[-1].isspace() and squeezed.endswith("".join(head.split())):
            return length
    return 0


# ---- messages that a template omits


def left_out(messages: Messages, text: str, marks: Marks) -> int | None:
    """Return the index of the first message missing from the text. White space, case and JSON escapes do not
    count; of an answer, only the last line or the calls' names.
    """
    squeezed = _squeezed(text) if messages else ""
    at = 0
    for index, message in enumerate(messages):
        for said in _sayings(message, marks):
            ways = (said, json.dumps(said, ensure_ascii=False)[1:-1], json.dumps(said)[1:-1])
            places = (squeezed.find(_squeezed(way), start) for start in (at, 0) for way in ways)
            found = next((place for place in places if place >= 0), None)
            if found is None:
                return index
            at = max(at, found)
    return None


def _sayings(message: Message, marks: Marks) -> Sequence[str]:
    if message["role"] != "assistant":
        return [str(message.get("content") or "")]
    if calls := message.get("tool_calls"):
        return [call["function"]["name"] for call in calls]
    return str(message.get("content") or "").rpartition(marks[1])[2].strip().splitlines()[-1:]


def _squeezed(text: str) -> str:
    return "".join(text.split()).casefold()
