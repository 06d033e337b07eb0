"""litellm, as most harnesses use it: whole messages go back as it made them."""

import json

import litellm
from pydantic import BaseModel, Field

QUESTION = "What is 1 + 2, and 3 + 4, and their sum?"
ADD = {
    "name": "add",
    "description": "Add two numbers.",
    "parameters": {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
        "required": ["a", "b"],
    },
}


class City(BaseModel):
    """A city."""

    name: str = Field(max_length=12)
    people: int = Field(ge=0, le=99)


def loop(kept, model="openai/policy"):
    messages, calls = [{"role": "user", "content": QUESTION}], 0
    while True:
        answer = litellm.completion(
            model=model, messages=messages, tools=[{"type": "function", "function": ADD}]
        )
        message = answer.choices[0].message
        messages.append(kept(message))
        if not message.tool_calls:
            return [message.content, calls]
        for call in message.tool_calls:
            arguments, calls = json.loads(call.function.arguments), calls + 1
            total = str(arguments["a"] + arguments["b"])
            messages.append({"role": "tool", "tool_call_id": call.id, "name": "add", "content": total})


def tools():
    return loop(lambda message: message)


def dumped_tools():
    return loop(lambda message: message.model_dump())


def parse():
    answer = litellm.completion(
        model="openai/policy", messages=[{"role": "user", "content": "Paris?"}], response_format=City
    )
    return json.loads(answer.choices[0].message.content)
