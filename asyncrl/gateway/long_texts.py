"""Texts that are far too long for a prompt, found without tokenising them whole. Knows no messages and no template.

Tokenising a megabyte takes about a second, a few thousand tokens take milliseconds. What is long is tokenised in a thread.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from asyncrl.types import ChatRenderer

USUAL_CHARACTERS = 6
"""Texts with fewer characters a token than this are tokenised as they are: most of them fit, and the others are not much too long."""

LONG_TEXT = 2**14
"""Characters from which on a text is tokenised in a thread: some 15 ms, in which no other call would move."""

_SLICE = 2**14
_CUT_TOKENS = 16
"""More than what a cut in a text can add to its tokens."""


class FarTooLong(ValueError):  # noqa: N818  what a call holds, and no failure of ours
    """A text has more tokens than a prompt may have; how many is not known."""


async def encode_beside(text: str, renderer: ChatRenderer, max_tokens: int | None) -> tuple[int, ...]:
    """encode_bounded(), which for a long text runs in a thread: the loop goes on meanwhile."""
    if len(text) < LONG_TEXT:
        return encode_bounded(text, renderer, max_tokens)
    return await asyncio.to_thread(encode_bounded, text, renderer, max_tokens)


def encode_bounded(text: str, renderer: ChatRenderer, max_tokens: int | None) -> tuple[int, ...]:
    """Token ids of the text. Raises FarTooLong, or ValueError for text that is no Unicode."""
    if max_tokens is not None and is_far_too_long([text], renderer, max_tokens):
        raise FarTooLong("the text of this call is far too long")
    return renderer.encode(text)


def is_far_too_long(texts: Sequence[str], renderer: ChatRenderer, max_tokens: int) -> bool:
    """Whether the texts have more than max_tokens tokens, as far as that can be told by their first ones.

    Never true for texts that fit; not true for every text that does not. Raises ValueError for text that is no Unicode.
    """
    if sum(map(len, texts)) <= USUAL_CHARACTERS * max_tokens:
        return False
    num_tokens = 0
    for text in texts:
        for start in range(0, len(text), _SLICE):
            num_tokens += max(0, len(renderer.encode(text[start : start + _SLICE])) - _CUT_TOKENS)
            if num_tokens > max_tokens:
                return True
    return False
