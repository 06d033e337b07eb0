"""Harnesses, which run rollouts in a worker process. A harness sees the gateway's address and a task."""

from asyncrl.agents.harness import Harness, Session, Task
from asyncrl.messages.records import Outcome

__all__ = ["Harness", "Outcome", "Session", "Task"]
