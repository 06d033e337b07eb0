"""The agents under examples/ do what their pages say, and their configs load."""

from __future__ import annotations

import asyncio
import json
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from harness_gateway import need_bubblewrap, open_gateway

from asyncrl.agents import Outcome, Task
from asyncrl.agents.harness import Session, build_harness
from asyncrl.base.user_code import load_object
from asyncrl.config import GeneratorConfig

ROOT = Path(__file__).parents[1]


@pytest.fixture(autouse=True)
def in_the_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "path", [str(ROOT), *sys.path])


def said(text: str | None, tool: str = "", **arguments: Any) -> Any:
    """Make an answer as the openai client returns it, with a call of `tool`."""
    function = SimpleNamespace(name=tool, arguments=json.dumps(arguments))
    calls = [SimpleNamespace(id="call-0", function=function)] if tool else None
    return SimpleNamespace(content=text, tool_calls=calls)


Asked = list[dict[str, Any]]


def run_agent(
    agent: str, question: str, answer: Any, *says: Any, info: Any = None, **args: Any
) -> tuple[Outcome, Asked]:
    """Run the agent on these answers; return its outcome and its calls."""
    answers, asked = iter(says), Asked()

    async def create(**body: Any) -> Any:
        asked.append({**body, "messages": list(body["messages"])})
        message = next(answers)
        reason = "tool_calls" if message.tool_calls else "stop"
        reason = getattr(message, "finish_reason", reason)
        return SimpleNamespace(
            choices=[SimpleNamespace(message=message, finish_reason=reason)]
        )

    completions = SimpleNamespace(completions=SimpleNamespace(create=create))
    session = SimpleNamespace(model="policy", client=SimpleNamespace(chat=completions))
    task = Task(
        "p", ({"role": "user", "content": question},), info or {}, answer=answer
    )
    return asyncio.run(
        load_object(agent, "generator.python")(task, session, **args)
    ), asked


def test_calculator_agent_rewards_call_expression_and_answer() -> None:
    calculate = partial(
        run_agent, "examples.calculator:run", "3+4", {"expression": "3+4", "value": "7"}
    )
    best, asked = calculate(said(None, "calculator", expression="3 + 4"), said("7"))
    assert best.reward == pytest.approx(1.0)
    assert best.metrics == {"tool_calls": 1, "right_expression": 1, "right_answer": 1}
    assert asked[1]["messages"][-1] == {
        "role": "tool",
        "tool_call_id": "call-0",
        "content": "7",
    }
    assert calculate(said(""))[0].reward == 0


def test_lookup_agent_rewards_call_name_and_room() -> None:
    look_up = partial(run_agent, "examples.lookup:run", "b", {"name": "b", "room": "4"})
    best, asked = look_up(said(None, "directory", name="b"), said("4"))
    assert best.reward == pytest.approx(1.0)
    assert asked[1]["messages"][-1]["content"] == "4", "what the directory said"
    call = said(None, "directory", name="b")
    cut, cut_call = said("4"), said(None, "directory", name="b")
    cut.finish_reason = cut_call.finish_reason = "length"
    for answers, reward in (
        # a guess is worth nothing
        ([said(None, "directory", name="c"), said("4")], 0.1),
        ([said("4")], 0.0),
        ([call, cut], 0.7),
        ([cut_call, said("4")], 0.9),
        ([call, call, said("4")], 0.4),  # it asks once
        ([call, said("c")], 0.5),  # short, and the wrong room
    ):
        assert look_up(*answers)[0].reward == pytest.approx(reward)


@pytest.mark.extras
def test_search_agent_rewards_an_exact_match_within_its_searches() -> None:
    question, right = "What is the deepest lake on Earth?", ["Lake Baikal", "Baikal"]
    search = partial(run_agent, "examples.search.agent:run", question, right)
    outcome, asked = search(
        said(None, "search", query="deepest lake"),
        said("<answer>lake Baikal.</answer>"),
    )
    assert outcome.reward == 1
    assert outcome.metrics == {"searches": 1, "found": 1, "answered": 1, "right": 1}
    assert "Baikal" in asked[1]["messages"][-1]["content"]
    once = {"max_searches": 1, "must_search": True}
    outcome, asked = search(
        said(None, "search", query="the"), said("<answer>Baikal</answer>"), **once
    )
    forced = {"type": "function", "function": {"name": "search"}}
    assert [body["tool_choice"] for body in asked] == [forced, "none"]
    assert asked[1]["messages"][-1]["content"] == "No passage found."


def test_shell_agent_makes_two_turns_with_only_curl() -> None:
    async def story() -> tuple[Outcome, list[str]]:
        async with open_gateway() as gateway:
            harness = build_harness(
                GeneratorConfig(command=["examples/shell_agent/agent.sh"]),
                is_worker=False,
            )
            task = Task("p", ({"role": "user", "content": "e 8"},))
            outcome = await harness.run(
                task, Session(f"{gateway.url}/v1", "key-0", "policy")
            )
            engine = gateway.engine
            return outcome, [
                engine.tokenizer.decode(each.prompt_ids.tolist())
                for each in engine.requests
            ]

    outcome, asked = asyncio.run(story())
    first = "user\ne 8assistant\n"
    assert asked == [first, first + "answer 1user\neassistant\n"]
    assert outcome.reward == pytest.approx(0.7 * 2 / 16 + 0.3), (
        "two e in both, the first of the right length"
    )
    assert outcome.metrics == {"first_length": 8, "right_letters": 2}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sort-lines", "word-count"])
def test_only_a_solution_gets_the_reward_of_harbor(name: str) -> None:
    need_bubblewrap()
    folder = ROOT / "examples/harbor/tasks" / name
    solution = (folder / "solution/solve.sh").read_text(encoding="utf-8")
    work = partial(
        run_agent,
        "examples.harbor.agent:run",
        "work",
        None,
        info={"folder": str(folder)},
    )
    outcome, asked = work(said(None, "bash", command=solution), said("Done."))
    assert (outcome.reward, outcome.metrics["calls"]) == (1, 1)
    assert asked[1]["messages"][-1]["content"] == "\n[exit code 0]"
    assert work(said("Done."))[0].reward == 0
