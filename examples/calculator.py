r"""An agent with one tool, a calculator, for any model that writes tool calls; lookup.py is what a model from
nothing can learn.

    asyncrl run configs/smollm2.yaml eval=none rollout.max_prompt_tokens=512 rollout.max_tokens=32 \
        'task={python: examples.calculator:Sums, args: {question: "What is {}? Use the calculator."}}' \
        generator.python=examples.calculator:run generator.give_answer=true \
        model.chat_template=examples/hermes.jinja

An agent like any other: the openai client, `tools=`, a loop over `tool_calls`. Nothing in run() knows of
training but its reward. A model whose own template knows tools needs no other one.
"""

from __future__ import annotations

import ast
import json
import math
import operator
import random
import re
from collections import Counter
from collections.abc import Callable
from typing import Any

from asyncrl.agents import Outcome, Session, Task
from asyncrl.messages.records import Prompt
from asyncrl.tasks import Item

TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "calculator",
            "description": "Evaluates an arithmetic expression.",
            "parameters": {
                "type": "object",
                "properties": {"expression": {"type": "string"}},
                "required": ["expression"],
            },
        },
    }
]

OPERATORS: dict[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
MAX_EXPRESSION = 100
"""Characters. Bounds depth and size, for there is no power: what a model writes is
calculated by us.
"""


async def run(
    task: Task, session: Session, *, max_turns: int = 2, must_call: bool = False
) -> Outcome:
    """Ask until the model answers instead of calling the tool; its answer is the first
    number in what it says. `must_call`: the first turn is a call, whatever a model that
    was never taught to would rather do.

    The reward has three parts, each of which can be learnt without the others, and what
    is partly right is partly rewarded: 0.1 for a call, 0.7 for the expression that was
    asked for, 0.2 for an answer that is the tool's. With all three the answer is right.
    """
    messages: list[Any] = list(task.messages)
    expression = result = answer = ""
    num_calls = 0
    for turn in range(max_turns):
        choice: Any = (
            {"type": "function", "function": {"name": "calculator"}}
            if must_call and turn == 0
            else "auto"
        )
        completion = await session.client.chat.completions.create(
            model=session.model, messages=messages, tools=TOOLS, tool_choice=choice
        )
        message = completion.choices[0].message
        messages.append(message)
        if not message.tool_calls:
            answer = first_number(message.content or "")
            break
        for call in message.tool_calls:
            expression = expression_of(call.function.name, call.function.arguments)
            result = calculate(expression)
            messages.append(
                {"role": "tool", "tool_call_id": call.id, "content": result}
            )
            num_calls += 1
    reward = 0.1 * bool(num_calls) + 0.7 * likeness(
        expression, task.answer["expression"]
    )
    if num_calls and result != "error":
        reward += 0.2 * likeness(answer, result)
    return Outcome(
        reward,
        {
            "tool_calls": num_calls,
            "right_expression": float(expression == task.answer["expression"]),
            "right_answer": float(num_calls > 0 and answer == task.answer["value"]),
        },
    )


def expression_of(name: str, arguments: str) -> str:
    """The expression of a call, without spaces; empty if it is no call of the
    calculator.
    """
    expression = json.loads(arguments).get("expression")
    return (
        expression.replace(" ", "")
        if name == "calculator" and isinstance(expression, str)
        else ""
    )


def calculate(expression: str) -> str:
    """The value as text, or `error`."""
    try:
        if len(expression) > MAX_EXPRESSION:
            return "error"
        value = _value(ast.parse(expression, mode="eval").body)
        return f"{value:.10g}" if math.isfinite(value) else "error"
    except (SyntaxError, ValueError, ArithmeticError, MemoryError, RecursionError):
        return "error"


def _value(node: ast.expr) -> float:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return float(node.value)
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        return OPERATORS[type(node.op)](_value(node.left), _value(node.right))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_value(node.operand)
    raise ValueError("not an arithmetic expression")


def first_number(text: str) -> str:
    """The first number of a text; empty if it has none."""
    found = re.search(r"-?\d+(\.\d+)?", text)
    return found[0] if found else ""


def likeness(said: str, right: str) -> float:
    """0 .. 1, a sum of parts that can be learnt one by one: the right characters, in
    the right places, as many as there should be.
    """
    if not said:
        return 0.0
    shared = sum((Counter(said) & Counter(right)).values()) / len(said)
    in_place = sum(
        ours == theirs for ours, theirs in zip(said, right, strict=False)
    ) / len(right)
    closeness = min(len(said), len(right)) / max(len(said), len(right))
    return 0.1 * shared + 0.4 * in_place + 0.2 * closeness + 0.3 * (said == right)


class Sums:
    """`size` calculations with two numbers up to `largest`; `question` is what the
    model is asked, with {} for the expression.
    """

    def __init__(
        self,
        *,
        size: int,
        seed: int,
        largest: int = 9,
        operators: str = "+-*",
        question: str = "{}",
    ) -> None:
        if question.count("{}") != 1 or not set(operators) <= set("+-*"):
            raise ValueError(
                f"question={question!r}, operators={operators!r}: one {{}} in the question, operators of + - *"  # noqa: E501
            )
        self._size = size
        self._seed = seed
        self._largest = largest
        self._operators = operators
        self._question = question

    def __len__(self) -> int:
        return self._size

    def prompt(self, index: int) -> Item:
        """Prompt number `index`, e.g. 6*7; what is right is for the agent's reward
        alone.
        """
        draw = random.Random(f"sums/{self._seed}/{index}")
        left, right = draw.randint(1, self._largest), draw.randint(1, self._largest)
        expression = f"{left}{draw.choice(self._operators)}{right}"
        return Item(
            self._question.format(expression),
            answer={"expression": expression, "value": calculate(expression)},
        )

    def score(self, prompt: Prompt, completion: str) -> float:
        """Without the agent, in an evaluation say: what the answer alone is worth."""
        return likeness(first_number(completion), prompt.answer["value"])
