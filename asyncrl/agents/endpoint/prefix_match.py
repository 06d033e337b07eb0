"""What a chat goes on from: when two chats are the same, and where the template's text is cut behind
recorded ids.
"""

from __future__ import annotations

import contextlib
import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from asyncrl.messages.protocols import ChatRenderer

Messages = Sequence[Mapping[str, Any]]

_to_json = json.JSONEncoder(sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode


class Chain:
    """The hash of a chat, message after message: equal for two chats if and only if they are the same in
    canonical form.
    """

    __slots__ = ("_state", "answers")

    def __init__(self, messages: Messages, tools: Messages | None) -> None:
        self._state = blake2b(_to_json(tools or None).encode(), digest_size=16)
        self.answers: list[tuple[int, bytes]] = []
        """(index of an assistant message, key of the chat up to and with it), in order."""
        for index, message in enumerate(messages):
            self._state.update(canonical(message))
            if message.get("role") == "assistant":
                self.answers.append((index, self._state.digest()))

    def key_with(self, answer: Mapping[str, Any]) -> bytes:
        """Key of this chat with one more message."""
        state = self._state.copy()
        state.update(canonical(answer))
        return state.digest()


def canonical(message: Mapping[str, Any]) -> bytes:
    """The message as one JSON object. A harness sends its history back as its own library wrote it, so these
    do not count: fields that are None or an empty list, the order of keys, the JSON spacing of tool
    arguments, text content in parts, white space around an assistant's content.
    """
    fields = {name: value for name, value in message.items() if value is not None and value != []}
    content = fields.get("content")
    if isinstance(content, list) and all(_is_text(part) for part in content):
        content = "".join(str(part.get("text") or "") for part in content)
    if fields.get("role") == "assistant" and isinstance(content, str):
        content = content.strip() or None
    fields["content"] = content  # None is the same as none
    if isinstance(calls := fields.get("tool_calls"), list):
        fields["tool_calls"] = [_tool_call(call) for call in calls]
    return _to_json(fields).encode()


def _is_text(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type") == "text"


def _tool_call(call: Any) -> Any:
    """A function call by id, name and arguments: `type` goes without saying, and `index` is of a stream's
    deltas alone.
    """
    if not isinstance(call, Mapping) or not isinstance(function := call.get("function"), Mapping):
        return call
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        with contextlib.suppress(ValueError, RecursionError):
            arguments = json.loads(arguments)
    return [call.get("id"), function.get("name"), arguments]


# Recorded ids are never made from text again: the template's text of a longer chat is cut where they end.
# - Its text begins with what was asked and sampled, to the letter: what follows is new.
# - It writes the history otherwise (strips reasoning, renders a tool call its own way, says the date): the
#   answer is replaced by a sentinel, and what follows the sentinel is new.
# - It refuses the sentinel, or swallows it: there is no place to cut.


SENTINEL = f"asyncrl{secrets.token_hex(16)}"
"""Stands in for an answer: letters and digits that no template gives a meaning, and no harness can guess."""


@dataclass(frozen=True, slots=True)
class PromptText:
    """The text that a prompt's ids spell, as its length and hash: a session holds many that begin alike."""

    num_chars: int
    digest: bytes

    @classmethod
    def of(cls, text: str) -> PromptText:
        """Raises ValueError if the text is no Unicode."""
        return cls(len(text), blake2b(text.encode(), digest_size=16).digest())

    def begins(self, text: str) -> bool:
        """Whether `text` begins with this one."""
        return len(text) >= self.num_chars and PromptText.of(text[: self.num_chars]) == self


@dataclass(frozen=True, slots=True)
class Continuation:
    """`text` follows the recorded ids. `whole`: all of the text, if the template writes it so."""

    text: str
    whole: PromptText | None


def find_continuation(
    renderer: ChatRenderer,
    messages: Messages,
    tools: Messages | None,
    *,
    answer_index: int,
    asked: PromptText | None,
    sampled_ids: Sequence[int],
    prefill: str,
) -> Continuation | None:
    """What follows the recorded answer `messages[answer_index]`, generation prompt and prefill included;
    None: there is no place to cut.

    `asked`: the text that its prompt spells, None if that is not what the template writes: then it never will
    again, and a render is saved. Raises ValueError if the template refuses the chat.
    """
    if asked is not None:
        text = renderer.render(messages, tools=tools) + prefill
        sampled = renderer.decode(sampled_ids, skip_special_tokens=False)
        if text.startswith(sampled, asked.num_chars) and asked.begins(text):
            return Continuation(text[asked.num_chars + len(sampled) :], PromptText.of(text))
    stand_in = {"role": "assistant", "content": SENTINEL}
    shown = [*messages[:answer_index], stand_in, *messages[answer_index + 1 :]]
    try:
        parts = renderer.render(shown, tools=tools).split(SENTINEL)
    except ValueError:
        return None
    if len(parts) != 2:
        return None
    return Continuation(_without_end(renderer, parts[1], sampled_ids) + prefill, None)


def _without_end(renderer: ChatRenderer, text: str, sampled_ids: Sequence[int]) -> str:
    """`text` without the end of the turn, if that was sampled."""
    if not sampled_ids or sampled_ids[-1] not in renderer.end_ids:
        return text
    end = renderer.decode(sampled_ids[-1:], skip_special_tokens=False)
    before, found, after = text.partition(end)
    return after if found and not before.strip() else text
