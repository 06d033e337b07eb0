"""Long calls cost threads, not the event loop; texts far too long are found without tokenising them whole.

Tokenising a megabyte takes about a second; rendering 30,000 small messages some 100 ms.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from asyncrl.messages.protocols import ChatRenderer

Value = TypeVar("Value")

USUAL_CHARACTERS = 6
"""A text with fewer characters a token is tokenised as it is: it fits, or is not much too long."""
LONG_BODY = 2**14
"""Bytes from which on a body is read, and its chat rendered, in a thread: 500 of the smallest messages, 10
ms.
"""
LONG_TEXT = 2**14
"""Characters from which on a text is tokenised in a thread: some 15 ms."""
NUM_ENCODING = 4
"""Texts that are tokenised at once: each has a core of its own meanwhile, and memory of many times its
length.
"""
_SLICE = 2**14
_CUT_TOKENS = 16
"""More than what a cut in a text can add to its tokens."""


class LongCalls:
    """Runs plain Python functions beside the event loop one at a time, so that the loop keeps half of the
    interpreter's time. Tokenising releases the interpreter: NUM_ENCODING of it run at once.
    """

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="long calls")
        self._encoding = ThreadPoolExecutor(NUM_ENCODING, thread_name_prefix="long texts")

    async def run(self, function: Callable[..., Value], *args: Any) -> Value:
        """What it returns or raises. Cancelled, it goes on to its end, and the next one waits for that."""
        return await asyncio.get_running_loop().run_in_executor(self._executor, function, *args)

    async def encode(self, text: str, renderer: ChatRenderer, max_tokens: int) -> tuple[int, ...]:
        """encode_bounded(), for a long text in a thread."""
        if len(text) < LONG_TEXT:
            return encode_bounded(text, renderer, max_tokens)
        return await asyncio.get_running_loop().run_in_executor(
            self._encoding, encode_bounded, text, renderer, max_tokens
        )

    def close_nowait(self) -> None:
        """What has not begun never will. Idempotent."""
        for executor in (self._executor, self._encoding):
            executor.shutdown(wait=False, cancel_futures=True)


class FarTooLong(ValueError):  # noqa: N818  what a call holds, and no failure of ours
    """A text has more tokens than a prompt may have; how many is not known."""


def encode_bounded(text: str, renderer: ChatRenderer, max_tokens: int) -> tuple[int, ...]:
    """Token ids of the text. Raises FarTooLong if its first tokens show that it has more than `max_tokens`,
    ValueError for text that is no Unicode.
    """
    num_tokens = 0
    if len(text) > USUAL_CHARACTERS * max_tokens:
        for start in range(0, len(text), _SLICE):
            num_tokens += max(0, len(renderer.encode(text[start : start + _SLICE])) - _CUT_TOKENS)
            if num_tokens > max_tokens:
                raise FarTooLong("the text of this call is far too long")
    return renderer.encode(text)


def fewest_message_tokens(renderer: ChatRenderer) -> int:
    """Tokens by which one more empty message makes a chat longer in this template, the least of the kinds
    that it takes; 1 at least.
    """
    function = {"name": "f", "arguments": {}}
    user, answer = {"role": "user", "content": ""}, {"role": "assistant", "content": ""}
    call = {**answer, "tool_calls": [{"id": "c", "type": "function", "function": function}]}
    result, system = {"role": "tool", "tool_call_id": "c", "content": ""}, {"role": "system", "content": ""}
    kinds: list[tuple[list[Any], list[Any]]] = [
        ([user], [answer, user]),
        ([user], [user]),
        ([user, answer], [answer]),
        ([user, call], [result]),
        ([system], [system]),
        ([user], [call, result]),
    ]
    found = []
    for begin, more in kinds:
        try:
            few, many = (len(renderer.encode(renderer.render([*begin, *more * times]))) for times in (2, 6))
        except ValueError:  # this template does not take such a chat
            continue
        found.append((many - few) // (4 * len(more)))
    return max(1, min(found, default=1))
