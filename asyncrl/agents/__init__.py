"""Harnesses, which run a rollout that talks to the model itself, in the process of a worker. They get the
gateway's address and a task, and see no token ids, no groups and no run.
"""

from asyncrl.agents.harness import Harness, Session, Task
from asyncrl.messages.records import Outcome

__all__ = ["Harness", "Outcome", "Session", "Task"]
