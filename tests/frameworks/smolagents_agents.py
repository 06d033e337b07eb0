"""smolagents: agents that write code, and that call tools."""

from framework_tasks import QUESTION
from smolagents import CodeAgent, LiteLLMModel, OpenAIModel, ToolCallingAgent, tool


def calculator(kind, model, **more):
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

    agent = kind(tools=[add], model=model, max_steps=4, verbosity_level=0, **more)
    return [str(agent.run(QUESTION)), len(calls)]


def code():
    return calculator(CodeAgent, OpenAIModel(model_id="policy"))


def litellm_code():
    return calculator(CodeAgent, LiteLLMModel(model_id="openai/policy"))


def structured_code():
    return calculator(CodeAgent, OpenAIModel(model_id="policy"), use_structured_outputs_internally=True)


def tools():
    return calculator(ToolCallingAgent, OpenAIModel(model_id="policy"))
