"""The lookup agent with openai-agents. Only the client differs from an agent that calls
a vendor.

pip install -e '.[train,frameworks]'
asyncrl run configs/agent.yaml generator.python=examples.openai_agents_lookup:run
"""

from __future__ import annotations

from agents import (
    Agent,
    MaxTurnsExceeded,
    OpenAIChatCompletionsModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI

from asyncrl.agents import Outcome, Session, Task
from examples.lookup import outcome_of, room_of

set_tracing_disabled(True)  # traces go to OpenAI


async def run(task: Task, session: Session, *, max_turns: int = 3) -> Outcome:
    """Let the agent look up a room. examples/lookup.py pays it."""
    asked: list[str] = []

    @function_tool
    def directory(name: str) -> str:
        """Return the room of a person."""
        asked.append(name)
        return room_of(task, name)

    answer = ""
    async with AsyncOpenAI(
        base_url=session.base_url, api_key=session.api_key
    ) as client:
        model = OpenAIChatCompletionsModel(session.model, client)
        agent = Agent(name="agent", model=model, tools=[directory])
        try:
            result = await Runner.run(
                agent, task.messages[-1]["content"], max_turns=max_turns
            )
            answer = result.final_output
        except MaxTurnsExceeded:
            pass  # the model's failure: a reward, not a failed rollout
    return outcome_of(task, asked, answer, ["tool_calls", "stop"])
