"""anthropic: /v1/messages, as its documentation has it."""

from anthropic import Anthropic, beta_tool

QUESTION = "What is 1 + 2, and 3 + 4, and their sum?"
ADD = {
    "name": "add",
    "description": "Add two numbers.",
    "input_schema": {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
        "required": ["a", "b"],
    },
}
CITY = {
    "name": "city",
    "description": "A city.",
    "input_schema": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 12},
            "people": {"type": "integer", "minimum": 0, "maximum": 99},
        },
        "required": ["name", "people"],
    },
}


def loop(ask, **more):
    messages, calls = [{"role": "user", "content": QUESTION}], 0
    while True:
        answer = ask(model="policy", max_tokens=2000, messages=messages, tools=[ADD], **more)
        messages.append({"role": "assistant", "content": answer.content})
        results = []
        for block in answer.content:
            if block.type == "tool_use":
                total, calls = str(block.input["a"] + block.input["b"]), calls + 1
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
        messages=[{"role": "user", "content": QUESTION}],
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
        messages=[{"role": "user", "content": "Paris?"}],
        tools=[CITY],
        tool_choice={"type": "tool", "name": "city"},
    )
    return next(block.input for block in answer.content if block.type == "tool_use")
