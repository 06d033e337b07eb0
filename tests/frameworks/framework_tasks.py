"""Tasks of all scripts: two sums by tool calls, and a typed city."""

import json

from pydantic import BaseModel, Field

QUESTION = "What is 1 + 2, and 3 + 4, and their sum?"
ASKED = [{"role": "user", "content": QUESTION}]
PARIS = [{"role": "user", "content": "Paris?"}]
NUMBER = {"type": "integer"}
PARAMETERS = {
    "type": "object",
    "properties": {"a": NUMBER, "b": NUMBER},
    "required": ["a", "b"],
}
ADD = {"name": "add", "description": "Add two numbers.", "parameters": PARAMETERS}


class City(BaseModel):
    """A city."""

    name: str = Field(max_length=12)
    people: int = Field(ge=0, le=99)


def add_up(calls, a, b, is_long=False):
    """Return the sum, or 5,000 characters that fill the context."""
    calls.append((a, b))
    return "7" * 5000 if is_long else str(a + b)


def chat_loop(ask, is_long=False):
    """Call tools until the model answers; return the answer and the number of calls."""
    messages, calls = [*ASKED], []
    while True:
        message = ask(messages=messages, tools=[{"type": "function", "function": ADD}])
        messages.append(message)
        if not message.tool_calls:
            return [message.content, len(calls)]
        for call in message.tool_calls:
            total = add_up(
                calls, **json.loads(call.function.arguments), is_long=is_long
            )
            messages.append(
                {
                    "role": "tool",
                    "tool_call_id": call.id,
                    "name": "add",
                    "content": total,
                }
            )
