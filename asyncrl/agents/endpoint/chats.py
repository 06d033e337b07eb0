"""Text and hash of a chat, to find the common beginning of two chats."""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from asyncrl.messages.work import new_hash

Message = Mapping[str, Any]
Messages = Sequence[Message]

THINKING = ("<think>", "</think>")
"""Texts around a thought. A template may write the first into the prompt."""


def opens_thought(prompt: str, thinking: tuple[str, str]) -> bool:
    """Return whether the prompt ends inside an open thought."""
    return prompt.rstrip().endswith(thinking[0].rstrip())


def close_thought(prompt: str, thinking: tuple[str, str]) -> str:
    """Return the text that closes the prompt's open thought, as templates write an empty one."""
    if not opens_thought(prompt, thinking):
        return ""
    return f"\n{thinking[1]}\n\n" if prompt.endswith("\n") else thinking[1]


@dataclass(frozen=True, slots=True, eq=False)
class PromptText:
    """Length and hash of a prompt's text, in place of the text."""

    num_chars: int
    hashed: blake2b

    @property
    def place(self) -> tuple[int, bytes]:
        return self.num_chars, self.hashed.digest()

    @classmethod
    def of(cls, text: str) -> PromptText:
        """Raises ValueError for invalid Unicode."""
        return cls(len(text), new_hash(text.encode()))

    def then(self, text: str) -> PromptText:
        hashed = self.hashed.copy()
        hashed.update(text.encode())
        return PromptText(self.num_chars + len(text), hashed)


@dataclass(frozen=True, slots=True, eq=False)
class RecordedChat:
    """A chat with its answer: number of messages, key in a Chain, and length and hash of the text (None if
    the template writes another).
    """

    num_messages: int
    key: bytes
    text: tuple[int, bytes] | None


Settle = Callable[[bytes], bytes | None]
"""Maps any key of a recorded chat to the key of its delivered form."""


class Chain:
    """Hash of a chat, message by message.

    Equal if and only if the canonical forms are equal, or contain the same recorded answers in different
    forms (mapped by `settle`).
    """

    def __init__(
        self,
        messages: Messages,
        tools: Messages | None,
        thinking: tuple[str, str] = THINKING,
        settle: Settle = lambda key: None,
    ) -> None:
        self._thinking = thinking
        self._state = new_hash(_to_json(tools or None).encode())
        self.answers: list[tuple[int, bytes]] = []
        """(index of an assistant message, key of the chat through it), in order."""
        for index, message in enumerate(messages):
            if message.get("role") != "assistant":
                self._state.update(canonical(message, thinking))
                continue
            key = self.key_with({**message, "name": None})  # no recorded answer has a name
            settled = settle(key)
            if settled is None and "name" in message:
                key = self.key_with(message)
            self.answers.append((index, key))
            self._state = new_hash(settled or key)

    def key_with(self, answer: Message) -> bytes:
        state = self._state.copy()
        state.update(canonical(answer, self._thinking))
        return state.digest()


def answer_forms(message: Message, sampled: str, thinking: tuple[str, str]) -> list[Message]:
    """Return the other forms that a harness may send back: with the hidden stop text, and each without its
    thought.
    """
    forms = [message]
    if not message.get("tool_calls"):
        rest = {name: value for name, value in message.items() if name != "reasoning_content"}
        forms.append({**rest, "content": sampled})
    found: list[Message] = forms[1:]
    for form in forms:
        thought, content = split_thought(form, thinking)
        if thought:
            rest = {name: value for name, value in form.items() if name != "reasoning_content"}
            found.append({**rest, "content": content})
    return found


def split_thought(message: Message, thinking: tuple[str, str]) -> tuple[str, str]:
    """Return (thought, rest of the content), stripped. A thought in the content may lack its opening mark."""
    begin, end = thinking
    content, apart = str(message.get("content") or ""), str(message.get("reasoning_content") or "").strip()
    before, found, after = content.partition(end)
    if not found or begin in before.lstrip().removeprefix(begin):
        return apart, content.strip()
    inner = before.strip().removeprefix(begin).strip()
    return apart if inner in ("", apart) else f"{apart}\n{inner}".strip(), after.strip()


_to_json = json.JSONEncoder(sort_keys=True, separators=(",", ":")).encode


def canonical(message: Message, thinking: tuple[str, str] = THINKING) -> bytes:
    """Serialize a message to canonical JSON.

    Harnesses rewrite their history, so these do not count: None fields, key order, JSON spacing of tool
    arguments, white space around an assistant's content and thought, and the place of the thought.
    """
    fields = {name: value for name, value in message.items() if value is not None}
    if fields.get("role") == "assistant":
        thought, fields["content"] = split_thought(message, thinking)
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


# ---- position of an answer in the text


SENTINEL = f"asyncrl{secrets.token_hex(16)}"
"""Replaces an answer in a trial render. Random, so that no template treats it specially and no harness can
guess it.
"""
NUMBER = 10**17 + secrets.randbelow(9 * 10**17)
"""Replaces arguments in a trial render; the text after the last one closes the call."""


def stand_in(calls: Sequence[Mapping[str, Any]] = ()) -> Message:
    """Return the placeholder for an answer, or for one with these calls. With calls it has no content, which
    a template may write after them, or even after their results.
    """
    swapped = []
    for call in calls:
        function = {"name": call["function"]["name"], "arguments": {SENTINEL[:12]: NUMBER}}
        swapped.append({**call, "function": function})
    if swapped:
        return {"role": "assistant", "content": "", "tool_calls": swapped}
    return {"role": "assistant", "content": SENTINEL}


# ---- messages that a template omits


def left_out(messages: Messages, text: str, thinking: tuple[str, str] = THINKING) -> int | None:
    """Return the index of the first message missing from the text, or None.

    Of answers, only the last line or the calls' names must be present: templates omit thoughts, and content
    next to a call. White space, case and JSON escapes do not count.
    """
    at, squeezed = 0, ""
    for index, message in enumerate(messages):
        for said in filter(None, map(str.strip, _sayings(message, thinking))):
            ways = dict.fromkeys((said, _escaped(said), _escaped(said, ensure_ascii=True)))
            spans = [(at + NEAR, at), (len(text), at), (len(text), 0)]  # usually the next one
            places = (text.find(way, start, end + len(way)) for end, start in spans for way in ways)
            found = next((place for place in places if place >= 0), None)
            squeezed = squeezed or (_squeezed(text) if found is None else "")
            if found is None and _squeezed(said) not in squeezed:
                return index
            at = max(at, found or 0)
    return None


NEAR = 2**12
"""Characters of the first search window, so that search time is linear."""


def _sayings(message: Message, thinking: tuple[str, str]) -> Sequence[str]:
    if message["role"] != "assistant":
        return [str(message.get("content") or "")]
    if calls := message.get("tool_calls"):
        return [call["function"]["name"] for call in calls]
    return str(message.get("content") or "").rpartition(thinking[1])[2].strip().splitlines()[-1:]


def _escaped(text: str, *, ensure_ascii: bool = False) -> str:
    return json.dumps(text, ensure_ascii=ensure_ascii)[1:-1]


def _squeezed(text: str) -> str:
    return "".join(text.split()).casefold()
