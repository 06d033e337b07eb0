"""A verifiers environment: sums too long for the head, and a calculator. Needs no
network, no sandbox and no uv.

`generator: {verifiers: calculator_env}` where this file is in the working directory, or
installed (`pip install -e .`). It is one module with the three parts that the library
looks for: a Taskset, the Task with its rewards, and here also a Harness, the program
that talks to the model. This one runs inside the worker; the library's own programs
(bash, null) are started as processes, and need uv.
"""

import ast
import json
import operator
import random

import verifiers.v1 as vf
from openai import AsyncOpenAI

__all__ = ["CalculatorHarness", "CalculatorTaskset"]

OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}

TOOL = {
    "type": "function",
    "function": {
        "name": "calculate",
        "description": "The value of an expression of whole numbers with +, - and *.",
        "parameters": {
            "type": "object",
            "properties": {"expression": {"type": "string"}},
            "required": ["expression"],
        },
    },
}


def calculate(expression: str) -> int:
    """The value. Raises ValueError for all but whole numbers, +, -, * and brackets."""

    def value(node: ast.AST) -> int:
        if (
            isinstance(node, ast.Constant)
            and type(node.value) is int
            and abs(node.value) < 10**12
        ):
            return node.value
        if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
            return OPERATORS[type(node.op)](value(node.left), value(node.right))
        raise ValueError("only whole numbers, +, - and *")

    try:
        return value(ast.parse(expression[:200], mode="eval").body)
    except SyntaxError as error:
        raise ValueError(f"no expression: {error.msg}") from error


class CalculatorData(vf.TaskData):
    """One sum. What stands here goes into the prompt of a run, and comes back to the
    worker that plays it.
    """

    answer: int


class CalculatorTask(vf.Task[CalculatorData]):
    """The rewards: mostly the answer, a little for having asked the calculator."""

    @vf.reward(weight=1.0)
    async def correct(self, trace: vf.Trace) -> float:
        """1 if the last number of the last message is the answer."""
        words = trace.last_reply.replace(",", "").replace(".", " ").split()
        return float(bool(words) and words[-1] == str(self.data.answer))

    @vf.reward(weight=0.1)
    async def asked(self, trace: vf.Trace) -> float:
        """1 if the calculator was called."""
        return float(bool(trace.tool_messages))

    @vf.metric
    async def num_calls(self, trace: vf.Trace) -> float:
        """Calls of the calculator."""
        return float(len(trace.tool_messages))


class CalculatorConfig(vf.TasksetConfig):
    """Settings: `generator.args.taskset`."""

    num_tasks: int = 200
    num_terms: int = 3
    seed: int = 0


class CalculatorTaskset(vf.Taskset[CalculatorTask, CalculatorConfig]):
    """`num_tasks` sums of `num_terms` numbers of two to four digits; the same ones each
    time, so that a run can be resumed.
    """

    def load(self) -> list[CalculatorTask]:
        """All of them."""
        draw = random.Random(self.config.seed)
        tasks = []
        for _ in range(self.config.num_tasks):
            terms = [str(draw.randint(10, 9999)) for _ in range(self.config.num_terms)]
            signs = [draw.choice("+-*") for _ in terms[1:]] + [""]
            expression = " ".join(
                f"{term} {sign}".strip()
                for term, sign in zip(terms, signs, strict=True)
            )
            data = CalculatorData(
                system_prompt="Use the calculator. End with the number alone.",
                prompt=f"What is {expression}?",
                answer=calculate(expression),
            )
            tasks.append(CalculatorTask(data, self.config.task))
        return tasks


class CalculatorHarnessConfig(vf.HarnessConfig):
    """Settings: `generator.args.agent.harness`, beside `id`."""

    max_turns: int = 4


class CalculatorHarness(vf.Harness[CalculatorHarnessConfig]):
    """Asks the model, answers its tool calls, until it has no more of them or
    `max_turns` is reached.
    """

    APPENDS_SYSTEM_PROMPT = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self, ctx, trace, runtime, endpoint, secret, mcp_urls, data
    ) -> vf.ProgramResult:  # type: ignore[no-untyped-def]
        """One conversation, in this very process: every call of the model goes to
        `endpoint`.
        """
        system, prompt = self.resolve_text_prompt(data)
        messages = [
            {"role": "system", "content": system},
            {"role": "user", "content": prompt},
        ]
        async with AsyncOpenAI(
            base_url=endpoint, api_key=secret, timeout=None
        ) as client:
            for _ in range(self.config.max_turns):
                completion = await client.chat.completions.create(
                    model=ctx.model, messages=messages, tools=[TOOL]
                )
                message = completion.choices[0].message
                messages.append(message.model_dump(exclude_none=True))
                if not message.tool_calls:
                    break
                for call in message.tool_calls:
                    messages.append(
                        {
                            "role": "tool",
                            "tool_call_id": call.id,
                            "content": self._result(call.function.arguments),
                        }
                    )
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")

    def _result(self, arguments: str) -> str:
        try:
            return str(calculate(json.loads(arguments)["expression"]))
        except (ValueError, KeyError, TypeError) as error:
            return f"error: {error}"
