"""inspect-ai: an evaluation with a tool, and another with a response schema."""

import json
import tempfile

import acp  # noqa: F401  imported here, not again in each play
import anthropic  # noqa: F401
import openai  # noqa: F401
from framework_tasks import QUESTION, City
from inspect_ai import Task, eval
from inspect_ai.dataset import Sample
from inspect_ai.model import GenerateConfig, ResponseSchema, get_model
from inspect_ai.solver import generate, use_tools
from inspect_ai.tool import tool
from inspect_ai.util import json_schema


@tool
def add():
    async def execute(a: int, b: int):
        """Add two numbers.

        Args:
            a: The first.
            b: The second.
        """
        return a + b

    return execute


def evaluate(question, solver, model, **config):
    with tempfile.TemporaryDirectory() as folder:
        task = Task(
            dataset=[Sample(question)], solver=solver, config=GenerateConfig(**config)
        )
        (log,) = eval(
            task, model=model, display="none", log_dir=folder, fail_on_error=True
        )
        if log.error is not None:
            raise RuntimeError(log.error.traceback)
        return log.samples[0]


def calculator(model):
    sample = evaluate(QUESTION, [use_tools(add()), generate()], model)
    return [
        sample.output.completion,
        sum(message.role == "tool" for message in sample.messages),
    ]


def tools():
    return calculator(get_model("openai/policy", responses_api=False))


def responses_tools():
    return calculator(get_model("openai/policy", responses_api=True))


def anthropic_tools():
    return calculator("anthropic/policy")


def response_schema():
    schema = ResponseSchema(name="city", json_schema=json_schema(City))
    model = get_model("openai/policy", responses_api=False)
    return json.loads(
        evaluate("Paris?", generate(), model, response_schema=schema).output.completion
    )
