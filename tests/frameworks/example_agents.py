"""The agents of examples/ that are written with frameworks."""

import asyncio
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from asyncrl.agents import Session, Task
from examples import langgraph_lookup, openai_agents_lookup


def look_up(run):
    task = Task(
        "p", ({"role": "user", "content": "b"},), answer={"name": "b", "room": "4"}
    )
    session = Session(
        os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"], "policy"
    )
    outcome = asyncio.run(run(task, session))
    return ["", outcome.reward]


def openai_agents():
    return look_up(openai_agents_lookup.run)


def langgraph():
    return look_up(langgraph_lookup.run)
