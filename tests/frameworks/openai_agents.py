"""openai-agents: its Responses model, which is its default, and its chat model."""

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    Runner,
    function_tool,
)
from framework_tasks import QUESTION, City
from openai import AsyncOpenAI


def calculator(**more):
    calls = []

    @function_tool
    def add(a: int, b: int) -> int:
        """Add two numbers."""
        calls.append((a, b))
        return a + b

    agent = Agent(name="calculator", instructions="Be brief.", tools=[add], **more)
    return [Runner.run_sync(agent, QUESTION).final_output, len(calls)]


def chat_model():
    return OpenAIChatCompletionsModel(model="policy", openai_client=AsyncOpenAI())


def tools():
    return calculator(model="policy")


def one_call_at_a_time():
    return calculator(
        model="policy", model_settings=ModelSettings(parallel_tool_calls=False)
    )


def chat_tools():
    return calculator(model=chat_model())


def output_type():
    agent = Agent(
        name="geographer", instructions="Be brief.", model="policy", output_type=City
    )
    return Runner.run_sync(agent, "Paris?").final_output.model_dump()


def chat_output_type():
    agent = Agent(
        name="geographer",
        instructions="Be brief.",
        model=chat_model(),
        output_type=City,
    )
    return Runner.run_sync(agent, "Paris?").final_output.model_dump()
