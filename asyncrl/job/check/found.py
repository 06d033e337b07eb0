"""What a check has found."""

from __future__ import annotations

from dataclasses import dataclass, field

from asyncrl.messages.records import Prompt
from asyncrl.rollouts.tokenizer import HFChatTokenizer
from asyncrl.tasks.sources import EvalTask
from asyncrl.tasks.task import PromptTask


@dataclass(slots=True, eq=False)
class Found:
    """Lines to print, notes to warn of, loaded tasks, and the first prompt of each."""

    lines: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    tasks: dict[str, PromptTask] = field(default_factory=dict)
    evals: dict[str, EvalTask] = field(default_factory=dict)
    prompts: dict[str, Prompt] = field(default_factory=dict)
    tokenizer: HFChatTokenizer | None = None
