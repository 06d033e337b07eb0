"""pydantic-ai: its three kinds of OpenAI and Anthropic models, and its three kinds of
typed output.
"""

import pydantic_ai.models.anthropic
import pydantic_ai.models.openai  # noqa: F401  imported once, not in each fork
from framework_tasks import QUESTION, City
from pydantic_ai import Agent, NativeOutput, PromptedOutput, ToolOutput


def calculator(model):
    calls, agent = [], Agent(model, instructions="Be brief.")

    @agent.tool_plain
    def add(a: int, b: int) -> int:
        """Add two numbers."""
        calls.append((a, b))
        return a + b

    return [agent.run_sync(QUESTION).output, len(calls)]


def tools():
    return calculator("openai-chat:policy")


def responses_tools():
    return calculator("openai-responses:policy")


def anthropic_tools():
    return calculator("anthropic:policy")


def typed(output_type):
    return (
        Agent("openai-chat:policy", output_type=output_type)
        .run_sync("Paris?")
        .output.model_dump()
    )


def tool_output():
    return typed(ToolOutput(City))


def native_output():
    return typed(NativeOutput(City))


def prompted_output():
    return typed(PromptedOutput(City))
