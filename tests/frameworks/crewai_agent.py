"""crewai: an agent with its own OpenAI client. After an overflow it asks for a summary."""

import os

from crewai import LLM, Agent
from crewai.tools import tool
from crewai.utilities.exceptions.context_window_exceeding_exception import (
    LLMContextLengthExceededError,
)
from framework_tasks import QUESTION, add_up


def calculate(is_long):
    calls = []

    @tool
    def add(a: int, b: int) -> str:
        """Add two numbers."""
        return add_up(calls, a, b, is_long)

    llm = LLM("openai/policy", base_url=os.environ["OPENAI_BASE_URL"])
    agent = Agent(
        role="calculator",
        goal="Add numbers.",
        backstory="You are brief.",
        llm=llm,
        tools=[add],
    )
    return [agent.kickoff(QUESTION).raw, len(calls)]


def tools():
    return calculate(is_long=False)


def overflow():
    """The summary's prompt is too long as well."""
    try:
        return calculate(is_long=True)
    except LLMContextLengthExceededError as error:
        return [type(error).__name__]
