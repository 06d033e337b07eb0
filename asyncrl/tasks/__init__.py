"""Prompts and rewards."""

from asyncrl.tasks.prompt_source import PromptSource, TaskPrompts
from asyncrl.tasks.scorer import TaskScorer
from asyncrl.tasks.sources import build_task
from asyncrl.tasks.task import Item, PromptTask

__all__ = [
    "Item",
    "PromptSource",
    "PromptTask",
    "TaskPrompts",
    "TaskScorer",
    "build_task",
]
