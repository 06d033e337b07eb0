"""What runs a rollout that talks to the model itself, in a worker's process. It knows the gateway's address;
it never sees token ids, groups or the run.
"""

from asyncrl.agents.harness import Harness, Session, Task
from asyncrl.messages.records import Outcome

__all__ = ["Harness", "Outcome", "Session", "Task"]
