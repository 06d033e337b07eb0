"""An agent with one tool, a directory: the smallest one that a model with random
weights learns, call by call and answer by answer.

    asyncrl run configs/agent.yaml       # about three minutes on two cores

An agent like any other: the openai client, `tools=`, a loop over `tool_calls`. Nothing
in run() knows of training but its reward. examples/calculator.py is the same for a
pretrained model.
"""

from __future__ import annotations

import json
import random
import re
from typing import Any

from asyncrl.agents import Outcome, Session, Task
from asyncrl.messages.records import Prompt
from asyncrl.tasks import Item

NAMES, ROOMS = "abcdef", "012345"
NOBODY = "-"
"""What the directory says of a name that was not asked for, or is none."""

TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "directory",
            "description": "The room of a person.",
            "parameters": {
                "type": "object",
                "properties": {"name": {"type": "string"}},
                "required": ["name"],
            },
        },
    }
]


async def run(task: Task, session: Session, *, max_turns: int = 3) -> Outcome:
    """Ask until the model answers instead of calling the tool."""
    messages: list[Any] = list(task.messages)
    asked: list[str] = []
    reasons: list[str] = []
    answer = ""
    for _ in range(max_turns):
        completion = await session.client.chat.completions.create(
            model=session.model, messages=messages, tools=TOOLS
        )
        message = completion.choices[0].message
        reasons.append(completion.choices[0].finish_reason)
        messages.append(message)
        if not message.tool_calls:
            answer = message.content or ""
            break
        for call in message.tool_calls:
            asked.append(str(json.loads(call.function.arguments).get("name", "")))
            found = room_of(task, asked[-1])
            messages.append({"role": "tool", "tool_call_id": call.id, "content": found})
    return outcome_of(task, asked, answer, reasons)


def room_of(task: Task, name: str) -> str:
    """Return what the directory says about a name."""
    room: str = task.answer["room"]
    return room if name == task.answer["name"] else NOBODY


def outcome_of(
    task: Task, asked: list[str], answer: str, reasons: list[str]
) -> Outcome:
    """Score a conversation by the names in its calls, its answer, and why its first and
    last turn ended.

    The reward is the sum of six parts, so that the model can learn one after the other:
    a call (0.1), the right name in it (0.2), the end of that call (0.1), an answer
    after one call (0.1), an answer that begins with the right room (0.2), and the right
    room with nothing after it (0.3). A short answer with a wrong room earns nothing:
    paid for it, the model soon gives one room to everybody.
    """
    is_right_name = asked[:1] == [task.answer["name"]]
    has_ended = is_right_name and reasons[0] == "tool_calls"
    # a guess is worth nothing
    has_answered = is_right_name and len(asked) == 1 and bool(answer)
    is_right_room = has_answered and answer[0] == task.answer["room"]
    is_exact = is_right_room and len(answer) == 1 and reasons[-1] == "stop"
    reward = 0.1 * bool(asked) + 0.2 * is_right_name + 0.1 * has_ended
    reward += 0.1 * has_answered + 0.2 * is_right_room + 0.3 * is_exact
    return Outcome(
        reward,
        {
            "tool_calls": len(asked),
            "right_name": float(is_right_name),
            "exact": float(is_exact),
        },
    )


def parse(text: str) -> list[tuple[str, dict[str, str]]] | None:
    """How a model from nothing calls the tool: `?b`. gateway.tool_format of
    configs/agent.yaml; pretrained models have their own.
    """
    found = re.match(rf"\?([{NAMES}{ROOMS}])", text)
    return [("directory", {"name": found[1]})] if found else None


class Directory:
    """`size` questions for the room of a person; who has which room is drawn anew for
    each, so that it cannot be learnt by heart.
    """

    def __init__(self, *, size: int, seed: int) -> None:
        self._size, self._seed = size, seed

    def __len__(self) -> int:
        return self._size

    def prompt(self, index: int) -> Item:
        """Prompt number `index`, e.g. "b"; the room is for the tool and the agent's
        reward alone.
        """
        draw = random.Random(f"directory/{self._seed}/{index}")
        name = draw.choice(NAMES)
        return Item(name, answer={"name": name, "room": draw.choice(ROOMS)})

    def score(self, prompt: Prompt, completion: str) -> float:
        """Without the agent, in an evaluation say: whether the answer is the room."""
        return float(completion == prompt.answer["room"])
