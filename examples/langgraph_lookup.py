"""The lookup agent as a graph of LangGraph.

pip install -e '.[train,frameworks]'
asyncrl run configs/agent.yaml generator.python=examples.langgraph_lookup:run
"""

from __future__ import annotations

from langchain.agents import create_agent
from langchain_core.messages import AIMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.errors import GraphRecursionError

from asyncrl.agents import Outcome, Session, Task
from examples.lookup import outcome_of, room_of


async def run(task: Task, session: Session, *, max_turns: int = 3) -> Outcome:
    """Let the graph look up a room. examples/lookup.py pays it."""
    asked: list[str] = []

    @tool
    def directory(name: str) -> str:
        """Return the room of a person."""
        asked.append(name)
        return room_of(task, name)

    model = ChatOpenAI(
        model=session.model, base_url=session.base_url, api_key=session.api_key
    )
    graph = create_agent(model, tools=[directory])
    answers: list[AIMessage] = []
    try:
        # a turn has two nodes: the model and its tools
        limit = {"recursion_limit": 2 * max_turns}
        state = await graph.ainvoke({"messages": list(task.messages)}, limit)
        answers = [
            message for message in state["messages"] if isinstance(message, AIMessage)
        ]
    except GraphRecursionError:
        pass  # the model's failure: a reward, not a failed rollout
    reasons = [message.response_metadata["finish_reason"] for message in answers] or [
        "length"
    ]
    return outcome_of(task, asked, answers[-1].text if answers else "", reasons)
