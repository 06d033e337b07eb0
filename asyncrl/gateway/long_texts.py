"""Calls that are long: what they cost is spent in threads, and texts far too long are found without tokenising them whole.

Tokenising a megabyte takes about a second, a few thousand tokens take milliseconds; so do a chat of 30,000 small messages and one of
hundred. Knows no messages and no template.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from asyncrl.types import ChatRenderer

Value = TypeVar("Value")

USUAL_CHARACTERS = 6
"""Texts with fewer characters a token than this are tokenised as they are: most of them fit, and the others are not much too long."""

LONG_BODY = 2**14
"""Bytes from which on a body is read, and its chat rendered, in a thread: 500 of the smallest messages, some 10 ms."""

LONG_TEXT = 2**14
"""Characters from which on a text is tokenised in a thread: some 15 ms, in which no other call would move."""

_SLICE = 2**14
_CUT_TOKENS = 16
"""More than what a cut in a text can add to its tokens."""


NUM_ENCODING = 4
"""Texts that are tokenised at once: each has a core of its own meanwhile, and memory of many times its length."""


class OneThread:
    """Runs functions of Python alone beside the event loop, one at a time, so that the loop keeps half of the interpreter's time.

    Tokenising leaves the interpreter alone: NUM_ENCODING of it run at once.
    Life: made -> run() and encode(), any number of them, first come first served -> close_nowait(): what has not begun never will.
    """

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="long calls")
        self._encoding = ThreadPoolExecutor(NUM_ENCODING, thread_name_prefix="long texts")

    async def run(self, function: Callable[..., Value], *args: Any) -> Value:
        """What it returns or raises. Cancelled, it goes on to its end, and the next one waits for that."""
        return await asyncio.get_running_loop().run_in_executor(self._executor, function, *args)

    async def encode(self, text: str, renderer: ChatRenderer, max_tokens: int | None) -> tuple[int, ...]:
        """encode_bounded(), which for a long text runs in a thread: the loop goes on meanwhile."""
        if len(text) < LONG_TEXT:
            return encode_bounded(text, renderer, max_tokens)
        return await asyncio.get_running_loop().run_in_executor(self._encoding, encode_bounded, text, renderer, max_tokens)

    def close_nowait(self) -> None:
        """Idempotent."""
        for executor in (self._executor, self._encoding):
            executor.shutdown(wait=False, cancel_futures=True)


class FarTooLong(ValueError):  # noqa: N818  what a call holds, and no failure of ours
    """A text has more tokens than a prompt may have; how many is not known."""


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
