"""Harnesses: each runs a rollout, which calls the model itself, in a worker process. A harness sees the
gateway's address and a task, but no token ids, groups or run.
"""

from asyncrl.agents.harness import Harness, Session, Task
from asyncrl.messages.records import Outcome

__all__ = ["Harness", "Outcome", "Session", "Task"]
