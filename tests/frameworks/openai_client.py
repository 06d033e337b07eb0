"""openai: chat completions and responses, as its documentation has them."""

import json

from framework_tasks import ADD, ASKED, PARIS, City, add_of, chat_loop
from openai import OpenAI, pydantic_function_tool


def tools():
    client = OpenAI()

    def ask(**given):
        return client.chat.completions.create(model="policy", **given).choices[0].message

    return chat_loop(ask)


def streamed_tools():
    client = OpenAI()

    def ask(**given):
        with client.chat.completions.stream(model="policy", **given) as stream:
            return stream.get_final_completion().choices[0].message

    return chat_loop(ask, kept=lambda message: message.model_dump())


def responses_tools():
    client, items, calls, previous = OpenAI(), ASKED, 0, None
    while True:
        answer = client.responses.create(
            model="policy", input=items, tools=[{"type": "function", **ADD}], previous_response_id=previous
        )
        items, previous = [], answer.id
        for item in answer.output:
            if item.type == "function_call":
                calls += 1
                total = add_of(json.loads(item.arguments))
                items.append({"type": "function_call_output", "call_id": item.call_id, "output": total})
        if not items:
            return [answer.output_text, calls]


def parse():
    answer = OpenAI().chat.completions.parse(model="policy", messages=PARIS, response_format=City)
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
        messages=PARIS,
        tools=[pydantic_function_tool(City)],
        tool_choice="required",
        parallel_tool_calls=False,
    )
    (call,) = answer.choices[0].message.tool_calls
    return call.function.parsed_arguments.model_dump()


def responses_parse():
    answer = OpenAI().responses.parse(model="policy", input="Paris?", text_format=City)
    return answer.output_parsed.model_dump()
