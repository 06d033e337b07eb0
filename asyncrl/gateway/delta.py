"""What a chat's template writes after a recorded answer: the text to be encoded behind the recorded ids. Knows no tree, no ids.

Recorded ids are never made from text again. So the template's text of a longer chat has to be cut where the recorded ones end:
- The template writes what was asked and answered, to the letter: its text begins with theirs, and what follows is new.
- It writes something else (it strips reasoning or white space, renders a tool call its own way, says the date): the answer is
  replaced by a sentinel, and what follows the sentinel is new. The recorded ids stand for what came before it.
- It refuses the sentinel, or swallows it: nobody knows where to cut.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from asyncrl.types import ChatRenderer

SENTINEL = f"asyncrl{secrets.token_hex(16)}"
"""Stands in for an answer. Letters and digits that no template gives a meaning, and that no harness can guess."""

Chat = tuple[Sequence[Mapping[str, Any]], Sequence[Mapping[str, Any]] | None]
"""Messages and tools."""


@dataclass(frozen=True, slots=True)
class Asked:
    """A text that a prompt's ids spell: kept as its length and hash, for a session holds many that begin alike."""

    num_chars: int
    digest: bytes

    @classmethod
    def of(cls, text: str) -> Asked:
        """Raises ValueError if the text is no Unicode."""
        return cls(len(text), _digest(text))

    def begins(self, text: str) -> bool:
        """Whether `text` begins with this one."""
        return len(text) >= self.num_chars and _digest(text[: self.num_chars]) == self.digest


@dataclass(frozen=True, slots=True)
class Rest:
    """`text` follows the recorded ids. `asked`: the text of the whole, if that is what the template writes; else None."""

    text: str
    asked: Asked | None


def find_rest(
    renderer: ChatRenderer, chat: Chat, *, answer_index: int, asked: Asked | None, sampled_ids: Sequence[int], prefill: str
) -> Rest | None:
    """What follows the recorded answer `chat[0][answer_index]`, generation prompt and prefill included; None: cannot be known.

    `asked`: the text that its prompt spells, None if that is not what the template writes: then it never will again, and a
    render is saved. Raises ValueError if the template refuses the chat.
    """
    if asked is not None and (rest := _to_the_letter(renderer, chat, asked, sampled_ids, prefill)) is not None:
        return rest
    text = _after_sentinel(renderer, chat, answer_index)
    if text is None:
        return None
    return Rest(_without_end(renderer, text, sampled_ids) + prefill, asked=None)


def _to_the_letter(renderer: ChatRenderer, chat: Chat, asked: Asked, sampled_ids: Sequence[int], prefill: str) -> Rest | None:
    messages, tools = chat
    text = renderer.render(messages, tools=tools) + prefill
    sampled = renderer.decode(sampled_ids, skip_special_tokens=False)
    if not text.startswith(sampled, asked.num_chars) or not asked.begins(text):
        return None
    return Rest(text[asked.num_chars + len(sampled) :], Asked.of(text))


def _after_sentinel(renderer: ChatRenderer, chat: Chat, answer_index: int) -> str | None:
    messages, tools = chat
    stand_in = {"role": "assistant", "content": SENTINEL}
    try:
        text = renderer.render([*messages[:answer_index], stand_in, *messages[answer_index + 1 :]], tools=tools)
    except ValueError:
        return None
    parts = text.split(SENTINEL)
    return parts[1] if len(parts) == 2 else None


def _without_end(renderer: ChatRenderer, text: str, sampled_ids: Sequence[int]) -> str:
    """`text` without the end of the turn, if that was sampled."""
    if not sampled_ids or sampled_ids[-1] not in renderer.end_ids:
        return text
    end = renderer.decode(sampled_ids[-1:], skip_special_tokens=False)
    before, found, after = text.partition(end)
    return after if found and not before.strip() else text


def _digest(text: str) -> bytes:
    return blake2b(text.encode(), digest_size=16).digest()
