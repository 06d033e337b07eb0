"""Tasks of all scripts: two sums by tool calls, and a typed city."""

import json

from pydantic import BaseModel, Field

QUESTION = "What is 1 + 2, and 3 + 4, and their sum?"
ASKED = [{"role": "user", "content": QUESTION}]
PARIS = [{"role": "user", "content": "Paris?"}]
NUMBER = {"type": "integer"}
PARAMETERS = {"type": "object", "properties": {"a": NUMBER, "b": NUMBER}, "required": ["a", "b"]}
ADD = {"name": "add", "description": "Add two numbers.", "parameters": PARAMETERS}


class City(BaseModel):
    """A city."""

    name: str = Field(max_length=12)
    people: int = Field(ge=0, le=99)


def add_of(arguments):
    return str(arguments["a"] + arguments["b"])


def chat_loop(ask):
    """Call tools until the model answers; return the answer and the number of calls."""
    messages, calls = [*ASKED], 0
    while True:
        message = ask(messages=messages, tools=[{"type": "function", "function": ADD}])
        messages.append(message)
        if not message.tool_calls:
            return [message.content, calls]
        for call in message.tool_calls:
            calls += 1
            total = add_of(json.loads(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "name": "add", "content": total})
