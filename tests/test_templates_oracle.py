"""Every chat template, with tokenizers of many kinds: a turn's prompt is what transformers makes of the chat.

ASYNCRL_TEMPLATES names a folder of scripts/templates.py for the long test.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from gateway_capture_cases import Play, check_trained, plan
from template_oracle import (
    KINDS,
    STORIES,
    TOOLS,
    WITH_THOUGHTS,
    Expected,
    Kind,
    Oracle,
    Refused,
    collected,
    installed,
    story,
)

from asyncrl.agents.endpoint.tool_formats import find_tool_format
from asyncrl.messages.records import Outcome
from asyncrl.rollouts.tokenizer import HFChatTokenizer

TEMPLATES = installed()
FOLDER = os.environ.get("ASYNCRL_TEMPLATES", "")


class Told:
    """Play a story with the product. `refusal`: why the template ends it, `names`: of its deviations."""

    def __init__(self, oracle: Oracle, product: HFChatTokenizer, title: str, *, keeps: bool = True) -> None:
        self.oracle, self.title, self.keeps = oracle, title, keeps
        self.play = Play(product, find_tool_format("auto", product.template).thinking, keeps)
        self.tools = TOOLS if "call" in title or "results" in title else None
        self.refusal = ""
        self.names: frozenset[str] = frozenset()
        self.faults: list[str] = []
        self.sampled: list[tuple[list[int], list[int]]] = []

    def tell(self) -> None:
        chat: list[dict] = []
        expected: Expected | None = None
        for number, turn in enumerate(story(self.title)):
            chat += turn.new
            ...
