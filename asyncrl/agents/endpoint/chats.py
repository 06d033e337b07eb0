"""A chat as text and as a hash: what two chats have in common, message after message."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any

from asyncrl.messages.work import Rendered, new_hash

Message = Mapping[str, Any]
Messages = Sequence[Message]

SENTINEL = f"asyncrl{secrets.token_hex(16)}"
"""Replaces an answer in a trial render: letters and digits that no template treats specially and no harness
can guess.
"""


@dataclass(frozen=True, slots=True)
class PromptText:
    """The text that a prompt's ids spell, as its length and hash: a session holds many that begin alike."""

    num_chars: int
    digest: bytes

    @classmethod
    def of(cls, whole: Rendered, prefill: str = "") -> PromptText:
        """All of the chat, and the prefill. Raises ValueError if the text is no Unicode."""
        num_chars = whole.num_before + len(whole.text)
        found = whole.hash_of(num_chars)
        assert found is not None, "all of it is more than a part"
        found.update(prefill.encode())
        return cls(num_chars + len(prefill), found.digest())

    def begins(self, whole: Rendered, prefill: str) -> bool:
        """Whether chat and prefill begin with this one, which is not shorter than whole.num_before."""
        found = whole.hash_of(self.num_chars)
        if found is None:
            return False
        found.update(prefill[: max(0, self.num_chars - whole.num_before - len(whole.text))].encode())
        return found.digest() == self.digest


class Chain:
    """The hash of a chat, message after message: equal for two chats if and only if they are the same in
    canonical form.
    """

    def __init__(self, messages: Messages, tools: Messages | None) -> None:
        self._state = new_hash(_to_json(tools or None).encode())
        self.answers: list[tuple[int, bytes]] = []
        """(index of an assistant message, key of the chat up to and with it), in order."""
        self._add(enumerate(messages))

    def _add(self, messages: Iterable[tuple[int, Message]]) -> None:
        for index, message in messages:
            self._state.update(canonical(message))
            if message.get("role") == "assistant":
                self.answers.append((index, self._state.digest()))

    def after(self, known: Messages, messages: Messages) -> Chain:
        """That of `messages`, which begin with the `known` ones of this chain."""
        chain = copy(self)
        chain._state, chain.answers = self._state.copy(), list(self.answers)
        chain._add(enumerate(messages[len(known) :], len(known)))
        return chain

    def key_with(self, answer: Message) -> bytes:
        """Key of this chat with one more message."""
        state = self._state.copy()
        state.update(canonical(answer))
        return state.digest()


_to_json = json.JSONEncoder(sort_keys=True, separators=(",", ":")).encode


def canonical(message: Message) -> bytes:
    """The message, as requests.py reads one or as an answer was given, as one JSON object. A harness sends
    its history back as its own library wrote it, so these do not count: fields that are None, the order of
    keys, the JSON spacing of tool arguments, white space around an assistant's content.
    """
    fields = {name: value for name, value in message.items() if value is not None}
    if fields.get("role") == "assistant":
        fields["content"] = fields.get("content", "").strip()
    if calls := fields.get("tool_calls"):
        fields["tool_calls"] = [_tool_call(call) for call in calls]
    return _to_json(fields).encode()


def _tool_call(call: Mapping[str, Any]) -> list[Any]:
    """A function call by id, name and arguments, which are text in an answer."""
    arguments = call["function"]["arguments"]
    parsed = json.loads(arguments) if isinstance(arguments, str) else arguments
    return [call["id"], call["function"]["name"], parsed]
