"""The agents under examples/ do what their pages say: their tools, their rewards, and that their configs are
configs.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from harness_gateway import open_gateway
from jinja2.sandbox import ImmutableSandboxedEnvironment

from asyncrl.agents import Outcome, Task
from asyncrl.agents.command import CommandHarness
from asyncrl.agents.endpoint.tool_calls import find_tool_format
from asyncrl.agents.harness import HarnessSpec, Session, build_harness
from asyncrl.config import load_config
from asyncrl.messages.records import Prompt
from asyncrl.tasks import Feed, build_task
from asyncrl.user_code import load_object

ROOT = Path(__file__).parents[1]
CONFIGS = ("configs/agent.yaml", "examples/search/search.yaml", "examples/shell_agent/shell_agent.yaml")


@pytest.fixture(autouse=True)
def in_the_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "path", [str(ROOT), *sys.path])


def said(text: str | None = None, *calls: tuple[str, dict[str, Any]]) -> Any:
    """An answer of the model, as the openai client has it."""
    tool_calls = [
        SimpleNamespace(
            id=f"call-{index}", function=SimpleNamespace(name=name, arguments=json.dumps(arguments))
        )
        for index, (name, arguments) in enumerate(calls)
    ]
    return SimpleNamespace(content=text, tool_calls=tool_calls or None)


class ScriptedSession:
    """A session whose model says what the test has written down; it keeps what it was asked."""

    model = "policy"

    def __init__(self, answers: Sequence[Any]) -> None:
        self._answers: Iterator[Any] = iter(answers)
        self.asked: list[dict[str, Any]] = []
        self.client = SimpleNamespace(chat=SimpleNamespace(completions=SimpleNamespace(create=self._create)))

    async def _create(self, **body: Any) -> Any:
        self.asked.append({**body, "messages": list(body["messages"])})
        return SimpleNamespace(choices=[SimpleNamespace(message=next(self._answers))])


def run_agent(agent: str, task: Task, *answers: Any, **args: Any) -> tuple[Outcome, ScriptedSession]:
    session = ScriptedSession(answers)
    return asyncio.run(load_object(agent, "generator.python")(task, session, **args)), session


def calculate(task: Task, *answers: Any) -> tuple[Outcome, ScriptedSession]:
    return run_agent("examples.calculator:run", task, *answers)


SUM = Task("p", ({"role": "user", "content": "3+4"},), answer={"expression": "3+4", "value": "7"})


def test_the_calculator_agent_rewards_a_call_an_expression_and_an_answer() -> None:
    best, session = calculate(SUM, said(None, ("calculator", {"expression": "3 + 4"})), said("7"))
    assert best.reward == pytest.approx(1.0)
    assert best.metrics == {"tool_calls": 1, "right_expression": 1, "right_answer": 1}
    assert session.asked[1]["messages"][-1] == {"role": "tool", "tool_call_id": "call-0", "content": "7"}
    assert session.asked[0]["tool_choice"] == "auto"
    wrong, _ = calculate(SUM, said(None, ("calculator", {"expression": "9"})), said("9"))
    only_called, _ = calculate(SUM, said(None, ("other", {})), said(""))
    silent, _ = calculate(SUM, said(""))
    assert best.reward > wrong.reward > only_called.reward > silent.reward == 0  # type: ignore[operator]
    assert wrong.metrics["right_answer"] == 0


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("3+4", "7"),
        ("7/2", "3.5"),
        ("-(2-5)*3", "9"),
        ("1/0", "error"),
        ("2**9", "error"),
        ("__import__('os')", "error"),
        ("", "error"),
        ("9" * 400, "error"),
        ("(" * 90, "error"),
        ("1e999", "error"),
        ("\x00", "error"),
    ],
)
def test_the_calculator_calculates_and_nothing_else(expression: str, value: str) -> None:
    assert load_object("examples.calculator:calculate", "test")(expression) == value


def test_the_lookup_agent_rewards_a_call_the_right_name_and_the_right_room() -> None:
    task = Task("p", ({"role": "user", "content": "b"},), answer={"name": "b", "room": "4"})
    best, session = run_agent(
        "examples.lookup:run", task, said(None, ("directory", {"name": "b"})), said("4")
    )
    assert best.reward == pytest.approx(1.0)
    assert session.asked[1]["messages"][-1]["content"] == "4", "what the directory said"
    wrong, session = run_agent(
        "examples.lookup:run", task, said(None, ("directory", {"name": "c"})), said("4")
    )
    assert wrong.reward == pytest.approx(0.2), "a guess is worth nothing"
    assert run_agent("examples.lookup:run", task, said("4"))[0].reward == 0


def test_the_lookup_agents_own_tool_format_reads_its_calls() -> None:
    own = find_tool_format("examples.lookup:parse", "")
    assert [json.loads(call.arguments) for call in own.parse("?b1").tool_calls] == [{"name": "b"}]
    assert own.parse("b1").tool_calls == ()


QUESTION = Task(
    "p",
    ({"role": "user", "content": "What is the deepest lake on Earth?"},),
    answer=["Lake Baikal", "Baikal"],
)


def search(*answers: Any, **args: Any) -> tuple[Outcome, ScriptedSession]:
    pytest.importorskip("bm25s")
    return run_agent("examples.search.agent:run", QUESTION, *answers, **args)


def test_the_search_agent_finds_passages_and_rewards_an_exact_match() -> None:
    outcome, session = search(
        said(None, ("search", {"query": "deepest lake"})), said("It is <answer>lake Baikal.</answer>")
    )
    assert outcome.reward == 1
    assert outcome.metrics == {"searches": 1, "found": 1, "answered": 1, "right": 1}
    assert "Baikal" in session.asked[1]["messages"][-1]["content"]


def test_the_search_agent_ends_after_its_searches() -> None:
    call = said(None, ("search", {"query": "the"}))
    outcome, session = search(call, said("<answer>Baikal</answer>"), max_searches=1, must_search=True)
    assert [asked["tool_choice"] for asked in session.asked] == [
        {"type": "function", "function": {"name": "search"}},
        "none",
    ]
    assert session.asked[1]["messages"][-1]["content"] == "No passage found."
    assert outcome.reward == 1


def test_every_question_of_the_search_agent_is_answered_by_a_passage() -> None:
    agent = load_object("examples.search.agent:mentions", "test")
    corpus = (ROOT / "examples/search/corpus.jsonl").read_text(encoding="utf-8")
    for line in (ROOT / "examples/search/questions.jsonl").read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        assert any(
            agent(json.loads(passage)["title"] + " " + json.loads(passage)["text"], right)
            for passage in corpus.splitlines()
            for right in row["answer"]
        ), row


def test_the_shell_agent_makes_two_turns_with_curl_alone() -> None:
    async def story() -> tuple[Outcome, list[Any]]:
        async with open_gateway() as gateway:
            harness = CommandHarness(["examples/shell_agent/agent.sh"], {}, max_output_bytes=2**16)
            task = Task("p", ({"role": "user", "content": "e 8"},))
            outcome = await harness.run(task, Session(f"{gateway.url}/v1", "key", "policy"))
            return outcome, [body["messages"] for _, body in gateway.calls]

    outcome, asked = asyncio.run(story())
    assert asked[0] == [{"role": "user", "content": "e 8"}]
    assert asked[1] == [
        *asked[0],
        {"role": "assistant", "content": "answer 1"},
        {"role": "user", "content": "e"},
    ]
    assert outcome.reward == pytest.approx(
        0.7 * 2 / 16 + 0.3
    )  # two e in "answer 1" and "answer 2", the first of the right length
    assert outcome.metrics == {"first_length": 8, "right_letters": 2}


def test_the_chat_template_of_the_examples_shows_the_tools_and_reads_the_calls_back() -> None:
    text = (ROOT / "examples/hermes.jinja").read_text(encoding="utf-8")
    assert find_tool_format("auto", text).name == "hermes"
    tools = load_object("examples.search.agent:TOOLS", "test")
    call = {"type": "function", "id": "c", "function": {"name": "search", "arguments": {"query": "deep"}}}
    chat = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "How deep?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "1,642 metres"},
    ]
    jinja = ImmutableSandboxedEnvironment()
    jinja.filters["tojson"] = json.dumps  # as transformers has it
    shown = jinja.from_string(text).render(messages=chat, tools=tools, add_generation_prompt=True)
    system, user, assistant, tool, generation = shown.split("<|im_start|>")[1:]
    assert system.startswith("system\nBe brief.\n")
    assert '{"name": "search", "arguments": {"query": "..."}}' in system
    assert user == "user\nHow deep?<|im_end|>\n"
    (read_back,) = find_tool_format("hermes", text).parse(assistant).tool_calls
    assert (read_back.name, json.loads(read_back.arguments)) == ("search", {"query": "deep"})
    assert "1,642 metres" in tool
    assert generation == "assistant\n"


@pytest.mark.parametrize("name", CONFIGS)
def test_the_agents_configs_load_and_their_prompts_fit(name: str) -> None:
    config = load_config(ROOT / name)
    feed = Feed(build_task(config.task, config.seed), seed=config.seed, shuffle=True)
    prompts: list[Prompt] = [feed.next_nowait() for _ in range(100)]
    texts = [prompt.messages[-1]["content"] for prompt in prompts]
    if config.model.scratch is not None:
        assert set("".join(texts)) <= set(config.model.scratch.characters)
    assert (ROOT / (config.model.chat_template or "examples/hermes.jinja")).exists()
    if config.generator.python is not None:
        build_harness(HarnessSpec(python=config.generator.python, args=config.generator.args))
        code = (
            (ROOT / config.generator.python.partition(":")[0].replace(".", "/"))
            .with_suffix(".py")
            .read_text(encoding="utf-8")
        )
        assert config.generator.give_answer == ("task.answer" in code), (
            "an agent is given what it reads, and no more"
        )
    else:
        assert all(os.access(ROOT / part, os.X_OK) for part in config.generator.command or [])
