"""What a session has sent: a call whose body begins as an earlier one's did is read from where that one
ended.

A harness sends its whole history with each call, mostly in the same bytes. They are compared by their hash,
and neither parsed nor checked a second time.
"""

from __future__ import annotations

import json
import re
from collections import deque
from dataclasses import dataclass, replace
from hashlib import blake2b

from pydantic_core import from_json

from asyncrl.agents.endpoint.drafting import Draft
from asyncrl.messages.work import new_hash

MAX_CHATS = 16
"""Chats of a session that its next calls may go on from, if it has no more calls at once: as many as the
default of gateway.max_concurrent_calls.
"""

_MESSAGES = re.compile(rb'"messages"[ \t\r\n]*:[ \t\r\n]*\[')
"""In a JSON text, where it may also be the end of a longer key: in_body() asks what was found."""
_COMMA = re.compile(rb"[ \t\r\n]*,")
_SPACE = b" \t\r\n"
_DECODER = json.JSONDecoder()


@dataclass(frozen=True, slots=True)
class Place:
    """Where the messages lie in a body: the first byte after their [, and the first one after the last."""

    start: int
    end: int

    @classmethod
    def in_body(cls, body: bytes) -> Place | None:
        """`body` is a JSON object. None if its messages cannot be told apart from the rest."""
        found = _MESSAGES.search(body)
        if found is None:
            return None
        start = found.end()
        try:
            if from_json(body[:start] + b"]}").get("messages") != []:
                return None
            # one character a byte, so that the decoder counts bytes
            _, length = _DECODER.raw_decode(body[start - 1 :].decode("latin-1"))
            end = start - 1 + length - 1
            is_named_twice = "messages" in from_json(b'{"":[' + body[end:])
        except (ValueError, RecursionError):
            return None
        return None if is_named_twice else cls(start, len(body[:end].rstrip(_SPACE)))


@dataclass(frozen=True, slots=True, eq=False)
class SentChat:
    """A chat that was sent: the first `num_bytes` of its body, up to the last message, and their hash.
    `head`: those before the first message. `draft`: what it was read as.
    """

    num_bytes: int
    hashed: blake2b
    head: bytes
    draft: Draft

    def shorter(self, body: bytes) -> bytes:
        """`body`, which begins as this one did, without the messages of this one."""
        comma = _COMMA.match(body, self.num_bytes)
        assert comma is not None, "find() has seen it"
        return self.head + body[comma.end() :]


class SentChats:
    """The newest ones of one session: as many as it may have calls at once, MAX_CHATS at least."""

    def __init__(self, num_calls: int = 0) -> None:
        self._chats: deque[SentChat] = deque(maxlen=max(MAX_CHATS, num_calls))

    def find(self, body: bytes) -> tuple[bytes, SentChat | None]:
        """(hash of the body, the longest chat that it goes on from)."""
        view, found, start, hashed = memoryview(body), None, 0, new_hash()
        for chat in sorted(self._chats, key=lambda chat: chat.num_bytes):
            if chat.num_bytes >= len(body):
                break
            hashed.update(view[start : chat.num_bytes])
            start = chat.num_bytes
            if hashed.digest() == chat.hashed.digest() and _COMMA.match(body, start):
                found = chat
        hashed.update(view[start:])
        return hashed.digest(), found

    def add(self, body: bytes, before: SentChat | None, place: Place, draft: Draft) -> None:
        """A call with this body was planned as `draft`. `before`: what find() said."""
        start, hashed = (before.num_bytes, before.hashed.copy()) if before else (0, new_hash())
        hashed.update(memoryview(body)[start : place.end])
        self._chats.append(SentChat(place.end, hashed, body[: place.start], replace(draft, text="")))
