"""Agents that `asyncrl serve` and evaluations run in the tests, over the openai client. Named as
module:function.
"""

from __future__ import annotations

from typing import Any

from asyncrl.agents import Outcome, Session, Task


async def two_turns(task: Task, session: Session) -> Outcome:
    """The reward is the share of the letter a in both answers; the second question goes on from the first
    answer.
    """
    messages: list[Any] = list(task.messages)
    said = ""
    for _ in range(2):
        answer = await session.client.chat.completions.create(model=session.model, messages=messages)
        text = answer.choices[0].message.content or ""
        said += text
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "a 2"}]
    return Outcome(said.count("a") / max(1, len(said)), {"turns": 2.0})
