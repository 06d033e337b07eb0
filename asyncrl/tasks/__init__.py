"""Prompts and rewards."""

from asyncrl.tasks.feed import Feed
from asyncrl.tasks.from_config import build_task
from asyncrl.tasks.scorer import TaskScorer
from asyncrl.tasks.task import Item, PromptTask

__all__ = ["Feed", "Item", "PromptTask", "TaskScorer", "build_task"]
