"""Threads that long texts are tokenised in."""

from __future__ import annotations

import asyncio
import threading

from asyncrl.agents.endpoint.long_calls import LONG_TEXT, NUM_ENCODING, LongCalls


class Tokenizer:
    """Waits in its thread until so many are in theirs, and knows how many were at most."""

    def __init__(self) -> None:
        self.gate = threading.Barrier(NUM_ENCODING)
        self.num_running = self.peak = 0
        self._lock = threading.Lock()

    def encode(self, text: str) -> tuple[int, ...]:
        with self._lock:
            self.num_running += 1
            self.peak = max(self.peak, self.num_running)
        self.gate.wait()
        with self._lock:
            self.num_running -= 1
        return (len(text),)


def test_long_texts_of_many_calls_are_tokenised_by_few_threads() -> None:
    async def story() -> None:
        tokenizer, beside = Tokenizer(), LongCalls()
        texts = ["x" * LONG_TEXT] * (10 * NUM_ENCODING)
        await asyncio.gather(*(beside.encode(text, tokenizer, LONG_TEXT) for text in texts))  # type: ignore[arg-type]
        beside.close_nowait()
        assert tokenizer.peak == NUM_ENCODING

    asyncio.run(story())
