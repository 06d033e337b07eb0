"""openai: chat completions and responses, as its documentation has them."""

import json

from openai import OpenAI, pydantic_function_tool
from pydantic import BaseModel, Field

QUESTION = "What is 1 + 2, and 3 + 4, and their sum?"
PARAMETERS = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
    "required": ["a", "b"],
}
ADD = {"name": "add", "description": "Add two numbers.", "parameters": PARAMETERS}


class City(BaseModel):
    """A city."""

    name: str = Field(max_length=12)
    people: int = Field(ge=0, le=99)


def tools():
    client, messages, calls = OpenAI(), [{"role": "user", "content": QUESTION}], 0
    while True:
        answer = client.chat.completions.create(
            model="policy", messages=messages, tools=[{"type": "function", "function": ADD}]
        )
        message = answer.choices[0].message
        messages.append(message)
        if not message.tool_calls:
            return [message.content, calls]
        for call in message.tool_calls:
            arguments, calls = json.loads(call.function.arguments), calls + 1
            messages.append(
                {"role": "tool", "tool_call_id": call.id, "content": str(arguments["a"] + arguments["b"])}
            )


def streamed_tools():
    client, messages, calls = OpenAI(), [{"role": "user", "content": QUESTION}], 0
    while True:
        with client.chat.completions.stream(
            model="policy", messages=messages, tools=[{"type": "function", "function": ADD}]
        ) as stream:
            message = stream.get_final_completion().choices[0].message
        messages.append(message.model_dump())
        if not message.tool_calls:
            return [message.content, calls]
        for call in message.tool_calls:
            arguments, calls = json.loads(call.function.arguments), calls + 1
            messages.append(
                {"role": "tool", "tool_call_id": call.id, "content": str(arguments["a"] + arguments["b"])}
            )


def responses_tools():
    client, items, calls, previous = OpenAI(), [{"role": "user", "content": QUESTION}], 0, None
    while True:
        answer = client.responses.create(
            model="policy", input=items, tools=[{"type": "function", **ADD}], previous_response_id=previous
        )
        items, previous = [], answer.id
        for item in answer.output:
            if item.type == "function_call":
                arguments, calls = json.loads(item.arguments), calls + 1
                total = str(arguments["a"] + arguments["b"])
                items.append({"type": "function_call_output", "call_id": item.call_id, "output": total})
        if not items:
            return [answer.output_text, calls]


def parse():
    answer = OpenAI().chat.completions.parse(
        model="policy", messages=[{"role": "user", "content": "Paris?"}], response_format=City
    )
    return answer.choices[0].message.parsed.model_dump()


def json_object():
    answer = OpenAI().chat.completions.create(
        model="policy",
        messages=[{"role": "user", "content": "Paris, as JSON?"}],
        response_format={"type": "json_object"},
    )
    return json.loads(answer.choices[0].message.content)


def strict_tool():
    answer = OpenAI().chat.completions.parse(
        model="policy",
        messages=[{"role": "user", "content": "Paris?"}],
        tools=[pydantic_function_tool(City)],
        tool_choice="required",
        parallel_tool_calls=False,
    )
    (call,) = answer.choices[0].message.tool_calls
    return call.function.parsed_arguments.model_dump()


def responses_parse():
    answer = OpenAI().responses.parse(model="policy", input="Paris?", text_format=City)
    return answer.output_parsed.model_dump()
