"""When two chats are the same: a canonical form of messages and tools, and a hash chain over them. Knows no tokens, no template.

A harness sends its history back as its own library wrote it. These do not count: fields that are None or an empty list, the
order of keys, the JSON spacing of tool arguments, text content in parts, white space around an assistant's content.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any

_to_json = json.JSONEncoder(sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode


class Chain:
    """The hash of a chat, message after message: equal for two chats if and only if they are the same in canonical form."""

    __slots__ = ("_state", "answers")

    def __init__(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None) -> None:
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
    """The message as one JSON object. Any message has one: what is no Unicode, or no JSON, stays as it is written."""
    fields = {name: value for name, value in message.items() if value is not None and value != []}
    is_answer = fields.get("role") == "assistant"
    if "content" in fields:
        content = _joined(fields["content"])
        if is_answer and isinstance(content, str):
            content = content.strip()
        fields["content"] = content
        if is_answer and content == "":
            del fields["content"]
    if isinstance(calls := fields.get("tool_calls"), list):
        fields["tool_calls"] = [_tool_call(call) for call in calls]
    return _to_json(fields).encode()


def _joined(content: Any) -> Any:
    if isinstance(content, list) and all(isinstance(part, Mapping) and part.get("type") == "text" for part in content):
        return "".join(str(part.get("text") or "") for part in content)
    return content


def _tool_call(call: Any) -> Any:
    """A function call by id, name and arguments: `type` goes without saying, and `index` is of a stream's deltas alone."""
    if not isinstance(call, Mapping) or not isinstance(function := call.get("function"), Mapping):
        return call
    return [call.get("id"), function.get("name"), _arguments(function.get("arguments"))]


def _arguments(arguments: Any) -> Any:
    if not isinstance(arguments, str):
        return arguments
    try:
        return json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
