"""A task whose rollouts wait for slow tools, simulated by sleeps. Used by async_vs_sync.py."""

from __future__ import annotations

import asyncio
import hashlib
import math
import random

from asyncrl.messages.records import Prompt


class ToolTask:
    """Prompts of a few letters; scoring sleeps as long as a tool would take: lognormal, seeded by prompt and
    completion.
    """

    def __init__(self, *, size: int, seed: int, median_s: float = 0.2, sigma: float = 1.0) -> None:
        self.size, self.seed, self.median_s, self.sigma = size, seed, median_s, sigma

    def __len__(self) -> int:
        """Number of prompts."""
        return self.size

    def prompt(self, index: int) -> str:
        """A few letters that differ from prompt to prompt."""
        return "".join(random.Random(f"{self.seed}/{index}").choices("abcdefgh", k=6))

    async def score(self, prompt: Prompt, completion: str) -> float:
        """Wait for the tool; the reward is the share of letters a to h in the completion."""
        draw = hashlib.sha256(f"{self.seed}/{prompt.prompt_id}/{completion}".encode()).digest()
        normal = random.Random(draw).gauss(0.0, 1.0)
        await asyncio.sleep(self.median_s * math.exp(self.sigma * normal))
        return sum(letter in "abcdefgh" for letter in completion) / max(1, len(completion))
