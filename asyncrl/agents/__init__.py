"""Harnesses, which run rollouts in a worker process."""

from asyncrl.agents.harness import Harness, Session, Task
from asyncrl.messages.records import Outcome, RewardPart

__all__ = ["Harness", "Outcome", "RewardPart", "Session", "Task"]
