"""A chat as text and as a hash: what two chats have in common, message after message."""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from asyncrl.messages.work import new_hash

Message = Mapping[str, Any]
Messages = Sequence[Message]

THINKING = ("<think>", "</think>")
"""The texts around a thought. A template may write the first of them into the prompt."""


def opens_thought(prompt: str, thinking: tuple[str, str]) -> bool:
    """Whether the prompt ends with a thought that it has begun, so that the answer goes on inside it."""
    return prompt.rstrip().endswith(thinking[0].rstrip())


def close_thought(prompt: str, thinking: tuple[str, str]) -> str:
    """What ends the thought that the prompt has begun, written as templates write one with nothing in it."""
    if not opens_thought(prompt, thinking):
        return ""
    return f"\n{thinking[1]}\n\n" if prompt.endswith("\n") else thinking[1]


@dataclass(frozen=True, slots=True, eq=False)
class PromptText:
    """The text that ids spell, as its length and hash: a session holds many that begin alike."""

    num_chars: int
    hashed: blake2b

    @property
    def place(self) -> tuple[int, bytes]:
        """To be compared."""
        return self.num_chars, self.hashed.digest()

    @classmethod
    def of(cls, text: str) -> PromptText:
        """Return the length and hash of a text. Raises ValueError if it is no valid Unicode."""
        return cls(len(text), new_hash(text.encode()))

    def then(self, text: str) -> PromptText:
        """With this text behind it."""
        hashed = self.hashed.copy()
        hashed.update(text.encode())
        return PromptText(self.num_chars + len(text), hashed)


@dataclass(frozen=True, slots=True, eq=False)
class RecordedChat:
    """A chat with its answer, which a later one may begin with: the number of its messages, their key in a
    Chain, and length and hash of the text that its ids spell, None where the template would write another.
    """

    num_messages: int
    key: bytes
    text: tuple[int, bytes] | None


Settle = Callable[[bytes], bytes | None]
"""The key of a recorded chat as it was given, by any key of it."""


class Chain:
    """The hash of a chat, message after message: equal for two chats if and only if they are the same in
    canonical form, or have the same recorded answers in different forms (`settle` tells).
    """

    def __init__(
        self,
        messages: Messages,
        tools: Messages | None,
        thinking: tuple[str, str] = THINKING,
        settle: Settle = lambda key: None,
    ) -> None:
        self._thinking, self._settle = thinking, settle
        self._state = new_hash(_to_json(tools or None).encode())
        self.answers: list[tuple[int, bytes]] = []
        """(index of an assistant message, key of the chat up to and with it), in order."""
        self._add(enumerate(messages))

    def _add(self, messages: Iterable[tuple[int, Message]]) -> None:
        for index, message in messages:
            if message.get("role") != "assistant":
                self._state.update(canonical(message, self._thinking))
                continue
            key = self.key_with({**message, "name": None})  # no recorded answer has a name
            settled = self._settle(key)
            if settled is None and "name" in message:
                key = self.key_with(message)
            self.answers.append((index, key))
            self._state = new_hash(settled or key)

    def key_with(self, answer: Message) -> bytes:
        """Key of this chat with one more message."""
        state = self._state.copy()
        state.update(canonical(answer, self._thinking))
        return state.digest()


def answer_forms(message: Message, sampled: str, thinking: tuple[str, str]) -> list[Message]:
    """The other forms in which a harness may send an answer back: with the stop text that was sampled and not
    shown, and each of them without its thought.
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
    """(thought, the rest of the content) of an answer, without the white space around them. The thought is in
    `reasoning_content`, or in the content, where it may lack its beginning.
    """
    begin, end = thinking
    content, apart = str(message.get("content") or ""), str(message.get("reasoning_content") or "").strip()
    before, found, after = content.partition(end)
    if not found or begin in before.lstrip().removeprefix(begin):
        return apart, content.strip()
    inner = before.strip().removeprefix(begin).strip()
    return apart if inner in ("", apart) else f"{apart}\n{inner}".strip(), after.strip()


_to_json = json.JSONEncoder(sort_keys=True, separators=(",", ":")).encode


def canonical(message: Message, thinking: tuple[str, str] = THINKING) -> bytes:
    """The message, as requests.py reads one or as an answer was given, as one JSON object. A harness sends
    its history back as its own library wrote it, so these do not count: fields that are None, the order of
    keys, the JSON spacing of tool arguments, white space around an assistant's content and thought, and
    whether that thought is in the content or beside it.
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
    """A function call by id, name and arguments, which are text in an answer."""
    arguments = call["function"]["arguments"]
    parsed = json.loads(arguments) if isinstance(arguments, str) else arguments
    return [call["id"], call["function"]["name"], parsed]


# ---- an answer's place in the text


SENTINEL = f"asyncrl{secrets.token_hex(16)}"
"""Replaces an answer in a trial render: letters and digits that no template treats specially and no harness
can guess.
"""
NUMBER = 10**17 + secrets.randbelow(9 * 10**17)
"""Replaces the arguments of its calls: what comes behind the last one closes the call."""


def stand_in(calls: Sequence[Mapping[str, Any]] = ()) -> Message:
    """The message that replaces an answer, or one with these calls. Those keep their names and ids, and have
    no content beside them: a template may write it behind them, even behind their results.
    """
    swapped = []
    for call in calls:
        function = {"name": call["function"]["name"], "arguments": {SENTINEL[:12]: NUMBER}}
        swapped.append({**call, "function": function})
    if swapped:
        return {"role": "assistant", "content": "", "tool_calls": swapped}
    return {"role": "assistant", "content": SENTINEL}


# ---- what a template leaves out


def left_out(messages: Messages, text: str, thinking: tuple[str, str] = THINKING) -> int | None:
    """Index of the first message that says something which the text does not; None if all is there.

    Of an answer, its last line is looked for, or the names of its calls: templates leave out thoughts, each
    its own way, and what stands beside a call. White space, capitals and JSON escapes do not count.
    """
    at, squeezed = 0, ""
    for index, message in enumerate(messages):
        for said in filter(None, map(str.strip, _sayings(message, thinking))):
            ways = dict.fromkeys((said, _escaped(said), _escaped(said, ensure_ascii=True)))
            spans = [(at + NEAR, at), (len(text), at), (len(text), 0)]  # mostly it is the next one
            places = (text.find(way, start, end + len(way)) for end, start in spans for way in ways)
            found = next((place for place in places if place >= 0), None)
            squeezed = squeezed or (_squeezed(text) if found is None else "")
            if found is None and _squeezed(said) not in squeezed:
                return index
            at = max(at, found or 0)
    return None


NEAR = 2**12
"""Characters in which a message is looked for at first, so that many of them cost no more than the text."""


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
