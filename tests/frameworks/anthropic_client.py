"""anthropic: /v1/messages, as its documentation has it."""

from anthropic import Anthropic, beta_tool
from framework_tasks import ASKED, PARAMETERS, PARIS, City, add_of

ADD_TOOL = {"name": "add", "description": "Add two numbers.", "input_schema": PARAMETERS}
CITY_TOOL = {"name": "city", "description": "A city.", "input_schema": City.model_json_schema()}


def loop(ask, **more):
    messages, calls = [*ASKED], 0
    while True:
        answer = ask(model="policy", max_tokens=2000, messages=messages, tools=[ADD_TOOL], **more)
        messages.append({"role": "assistant", "content": answer.content})
        results = []
        for block in answer.content:
            if block.type == "tool_use":
                calls += 1
                total = add_of(block.input)
                results.append({"type": "tool_result", "tool_use_id": block.id, "content": total})
        if not results:
            return ["".join(block.text for block in answer.content if block.type == "text"), calls]
        messages.append({"role": "user", "content": results})


def tools():
    return loop(Anthropic().messages.create, system="Be brief.")


def streamed_tools():
    client = Anthropic()

    def ask(**given):
        with client.messages.stream(**given) as stream:
            return stream.get_final_message()

    return loop(ask)


def thinking():
    return loop(Anthropic().messages.create, thinking={"type": "enabled", "budget_tokens": 1024})


def tool_runner(*, stream=False):
    calls = []

    @beta_tool
    def add(a: int, b: int) -> str:
        """Add two numbers.

        Args:
            a: One.
            b: The other.
        """
        calls.append((a, b))
        return str(a + b)

    runner = Anthropic().beta.messages.tool_runner(
        model="policy",
        max_tokens=2000,
        system="Be brief.",
        messages=ASKED,
        tools=[add],
        stream=stream,
    )
    if stream:
        *_, answer = (turn.get_final_message() for turn in runner)
    else:
        answer = runner.until_done()
    return ["".join(block.text for block in answer.content if block.type == "text"), len(calls)]


def streamed_tool_runner():
    return tool_runner(stream=True)


def forced_tool():
    answer = Anthropic().messages.create(
        model="policy",
        max_tokens=1000,
        messages=PARIS,
        tools=[CITY_TOOL],
        tool_choice={"type": "tool", "name": "city"},
    )
    return next(block.input for block in answer.content if block.type == "tool_use")
