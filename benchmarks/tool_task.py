"""A task whose rollouts wait for slow tools, simulated by sleeps. Used by
async_vs_sync.py.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import random

from asyncrl.messages.records import Prompt

MEDIAN_S = 0.2


class ToolTask:
    """Prompts of six letters. Scoring sleeps for a lognormal time, seeded by prompt and
    completion.
    """

    def __init__(self, *, size: int, seed: int) -> None:
        self.size = size
        self.seed = seed

    def __len__(self) -> int:
        return self.size

    def prompt(self, index: int) -> str:
        return "".join(random.Random(f"{self.seed}/{index}").choices("abcdefgh", k=6))

    async def score(self, prompt: Prompt, completion: str) -> float:
        """Wait for the tool; the reward is the share of letters a to h in the
        completion.
        """
        draw = hashlib.sha256(
            f"{self.seed}/{prompt.prompt_id}/{completion}".encode()
        ).digest()
        normal = random.Random(draw).gauss(0.0, 1.0)
        await asyncio.sleep(MEDIAN_S * math.exp(normal))
        return sum(letter in "abcdefgh" for letter in completion) / max(
            1, len(completion)
        )
