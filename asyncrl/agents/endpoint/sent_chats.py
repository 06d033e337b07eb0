"""Drafts of a session's newest chats. A call that repeats the messages of an earlier call continues from its
draft and renders only the new messages.
"""

from __future__ import annotations

from typing import Any

from pydantic_core import to_json

from asyncrl.agents.endpoint.drafting import Draft
from asyncrl.messages.work import new_hash

MAX_CHATS = 16
"""Drafts of a session that has fewer calls at once: the default of gateway.max_concurrent_calls."""


class SentChats:
    """The newest drafts of one session: as many as it may have calls at once, MAX_CHATS at least."""

    def __init__(self, num_calls: int = 0) -> None:
        self._most = max(MAX_CHATS, num_calls)
        self._drafts: dict[bytes, Draft] = {}

    def find(self, messages: list[Any]) -> Draft | None:
        """Return the draft of the longest chat that `messages` continue; they then share its messages. May
        run in a thread during add().
        """
        keys = _keys(messages)
        for length in range(len(messages) - 1, 0, -1):
            if (draft := self._drafts.get(keys[length - 1])) is not None:
                messages[:length] = draft.messages
                return draft
        return None

    def add(self, draft: Draft) -> None:
        """Keep the draft of a planned call."""
        key = _keys(draft.messages)[-1]
        self._drafts.pop(key, None)
        self._drafts[key] = draft.to_go_on_from()
        if len(self._drafts) > self._most:
            del self._drafts[next(iter(self._drafts))]


def _keys(messages: Any) -> list[bytes]:
    """Hashes of the first message, of the first two, and so on, as JSON, where True is not 1."""
    hashed, keys = new_hash(), []
    for message in messages:
        hashed.update(to_json(message))
        keys.append(hashed.digest())
    return keys
