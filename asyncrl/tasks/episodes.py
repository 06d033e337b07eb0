"""Task of an environment that says itself what to do: OpenEnv, for example."""

from __future__ import annotations

from dataclasses import dataclass

from asyncrl.messages.records import Prompt
from asyncrl.tasks.task import Item


@dataclass(frozen=True, kw_only=True)
class Episodes:
    """`size` prompts of one text, an instruction before the environment's first words.
    They differ in their seeds.
    """

    size: int
    seed: int
    instruction: str = ""

    def __len__(self) -> int:
        return self.size

    def prompt(self, index: int) -> Item:
        # The seed of the data, so that another run has other episodes.
        # A prompt may not be empty. The harness strips the white space before what the
        # environment says.
        return Item(self.instruction or " ", info={"episode": f"{self.seed}/{index}"})

    def score(self, prompt: Prompt, completion: str) -> float:
        raise ValueError(
            "the environment gave no reward; asyncrl.tasks.episodes:Episodes has none of its own"
        )
