"""What runs a rollout that talks to the model itself, in a worker's process. Knows the gateway's address; no
token, no group, no run.
"""

from asyncrl.agents.harness import Harness, Session, Task
from asyncrl.messages.records import Outcome

__all__ = ["Harness", "Outcome", "Session", "Task"]
