"""smolagents: agents that write code."""

import litellm  # noqa: F401  imported once, not in each fork
from framework_tasks import QUESTION
from smolagents import CodeAgent, LiteLLMModel, OpenAIModel, tool


def calculator(model):
    calls = []

    @tool
    def add(a: int, b: int) -> int:
        """Add two numbers.

        Args:
            a: The first.
            b: The second.
        """
        calls.append((a, b))
        return a + b

    agent = CodeAgent(tools=[add], model=model, max_steps=4, verbosity_level=0)
    return [str(agent.run(QUESTION)), len(calls)]


def code():
    return calculator(OpenAIModel(model_id="policy"))


def litellm_code():
    return calculator(LiteLLMModel(model_id="openai/policy"))
