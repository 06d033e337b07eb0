"""An agent with a shell for tasks in Harbor's format: its commands run in a sandbox,
and once it has ended the task's own tests run there and give the reward.

    asyncrl run examples/harbor/harbor.yaml model.path=...
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any, Literal

from asyncrl.agents import Outcome, Session, Task
from examples.harbor.rooms import ROOMS, Room
from examples.harbor.tasks import HarborTask

SYSTEM = "You work with a shell. Do the task with the tool bash; when it is done, answer without a call."
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "bash",
            "description": "Runs a command; each call is a shell of its own. Says its output and exit code.",
            "parameters": {
                "type": "object",
                "properties": {"command": {"type": "string"}},
                "required": ["command"],
            },
        },
    }
]


async def run(
    task: Task,
    session: Session,
    *,
    room: Literal["bubblewrap", "podman"] = "bubblewrap",
    max_turns: int = 16,
) -> Outcome:
    """Work on the task until the model makes no more call, then run its tests. Raises
    RuntimeError if they write no reward: that is a failed rollout, and not a reward of
    0.
    """
    harbor = HarborTask.read(Path(task.info["folder"]))
    with tempfile.TemporaryDirectory(prefix="asyncrl-harbor-") as folder:
        place: Room = ROOMS[room](harbor, Path(folder))
        try:
            await place.start()
            num_calls = await work(
                task, session, place, harbor.agent_timeout_s, max_turns
            )
            (code, text), reward = await place.verify(harbor.verifier_timeout_s)
        finally:
            await place.close()
    if not reward:
        raise RuntimeError(
            f"{harbor.folder}/tests/test.sh wrote no reward; exit code {code}: {text}"
        )
    rewards = {name: float(value) for name, value in json.loads(reward).items()}
    return Outcome(rewards.pop("reward"), {"calls": num_calls, **rewards})


async def work(
    task: Task, session: Session, place: Room, timeout_s: float, max_turns: int
) -> int:
    """The number of calls that the model made."""
    messages: list[Any] = [{"role": "system", "content": SYSTEM}, *task.messages]
    num_calls = 0
    for _ in range(max_turns):
        completion = await session.client.chat.completions.create(
            model=session.model, messages=messages, tools=TOOLS
        )
        message = completion.choices[0].message
        messages.append(message)
        if not message.tool_calls:
            break
        for call in message.tool_calls:
            num_calls += 1
            try:
                command = str(json.loads(call.function.arguments)["command"])
            except (ValueError, KeyError, TypeError):
                said = "error: give the argument command"
            else:
                code, text = await place.run(["bash", "-c", command], timeout_s)
                said = f"{text}\n[exit code {code}]"
            messages.append({"role": "tool", "tool_call_id": call.id, "content": said})
    return num_calls
