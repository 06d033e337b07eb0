"""What docs/generators.md and docs/gateway.md show is what runs."""

from __future__ import annotations

import asyncio
import json
import re
import shlex
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from asyncrl.agents import Outcome, Task
from asyncrl.agents.endpoint import requests as shapes
from asyncrl.agents.endpoint.answers import ApiError
from asyncrl.agents.endpoint.forms.anthropic_written import ERROR_TYPES
from asyncrl.agents.endpoint.requests import CallRules, RequestReader
from asyncrl.cli import app
from asyncrl.config import GatewayConfig, RunConfig
from asyncrl.messages.work import MAX_WAIT_S
from asyncrl.observe.metrics import gauge_of

ROOT = Path(__file__).parents[1]
PAGES = {name: (ROOT / f"docs/{name}.md").read_text(encoding="utf-8") for name in ("generators", "gateway")}
BASE: dict[str, Any] = {"model": {"path": "x"}, "task": {"files": ["x.jsonl"], "reward": "math"}}


def blocks(page: str, language: str) -> list[str]:
    found = re.findall(r"```(\w*)\n(.*?)```", PAGES[page], flags=re.DOTALL)
    return [text for kind, text in found if kind == language]


@pytest.mark.parametrize(("page", "text"), [(page, text) for page in PAGES for text in blocks(page, "yaml")])
def test_every_config_on_the_pages_is_a_config(page: str, text: str) -> None:
    RunConfig.model_validate({**BASE, **yaml.safe_load(text)})


def test_the_settings_of_the_gateways_page_are_the_defaults() -> None:
    shown = yaml.safe_load(blocks("gateway", "yaml")[0])["gateway"]
    read = {key: None if value == "none" else value for key, value in shown.items()}
    assert read == GatewayConfig().model_dump()


def test_an_agent_of_the_pages_that_reads_the_answer_is_given_it() -> None:
    """Of all pages: those that name `my_agent:run`, too, which is the pages' own."""
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))):
        for section in re.split(r"^## ", page.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]:
            code = "".join(re.findall(r"```\w*\n(.*?)```", section, flags=re.DOTALL))
            reads_it = "task.answer" in code or "my_agent:run" in code
            assert not reads_it or "give_answer: true" in code, f"{page.name}: {section.splitlines()[0]}"


def test_the_pages_python_runs_and_its_agent_asks_again_until_it_is_right() -> None:
    page: dict[str, Any]
    for text in reversed(blocks("generators", "python")):
        page = {"__name__": "page"}
        exec(compile(text, "docs/generators.md", "exec"), page)
    answers = iter(["41", "it is 42"])

    async def create(**body: Any) -> Any:
        return SimpleNamespace(choices=[SimpleNamespace(message=SimpleNamespace(content=next(answers)))])

    chat = SimpleNamespace(completions=SimpleNamespace(create=create))
    session = SimpleNamespace(model="policy", client=SimpleNamespace(chat=chat))
    task = Task("p", ({"role": "user", "content": "6*7?"},), answer=42)
    assert asyncio.run(page["run"](task, session)) == Outcome(1.0, {"turns": 2})


def test_the_commands_of_the_page_are_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[dict[str, Any]] = []
    monkeypatch.setattr("asyncrl.agents.worker.run_worker", lambda url, **more: started.append(more) or 0)
    lines = [line for text in blocks("generators", "") for line in text.splitlines()]
    for line in lines:
        assert line.startswith("ASYNCRL_WORKER_KEY=... asyncrl work ")
        result = CliRunner().invoke(app, shlex.split(line)[2:])
        assert result.exit_code == 0, result.output
    assert [bool(each["harness"]["python"]) for each in started] == [True, False]
    for config in re.findall(r"`asyncrl run (\S+)`", PAGES["generators"]):
        assert (ROOT / config).exists(), config


def test_the_metrics_of_the_page_are_metrics() -> None:
    for name in re.findall(r"`((?:gateway|harness|rollout|sample)/\w+)`", PAGES["generators"]):
        assert gauge_of(name) is not None, name


def names(first: str, column: int = 0) -> set[str]:
    """In a column of the table on the gateway's page whose first cell begins so."""
    lines = PAGES["gateway"].splitlines()
    start = next(index for index, line in enumerate(lines) if line.startswith(f"| {first}")) + 2
    end = next(index for index in range(start, len(lines)) if not lines[index].startswith("|"))
    return set(re.findall(r"`(\w+)`", " ".join(line.split("|")[column + 1] for line in lines[start:end])))


def read(**more: Any) -> None:
    body = {"messages": [{"role": "user", "content": "a"}], **more}
    RequestReader(CallRules("m", 1.0, 1.0, 8, 64, 72, 100)).chat(json.dumps(body).encode())


def test_the_page_names_every_parameter_and_says_what_becomes_of_it() -> None:
    assert names("parameter") == set(shapes.ChatRequest.model_fields) | set(shapes.TextRequest.model_fields)
    assert names("ignored") == shapes.IGNORED
    for name in shapes.IGNORED:
        read(**{name: "x"})
    assert names("refused") == set(shapes.REFUSED)
    for name in shapes.REFUSED:
        with pytest.raises(ApiError) as caught:
            read(**{name: [{"x": 1}]})
        assert (caught.value.status, caught.value.error["param"]) == (400, name)


def test_the_page_names_every_error_code() -> None:
    source = "".join(path.read_text() for path in (ROOT / "asyncrl" / "agents" / "endpoint").rglob("*.py"))
    codes = set(re.findall(r'(?:(?:code|NOT_KEPT) ?=|\d:) ?"(\w+)"', source))
    named = names("status", 1)
    assert named <= codes
    assert codes - named <= set(ERROR_TYPES.values()), "those are of Anthropic's form"


def test_the_bounds_on_the_page_are_those_of_the_code() -> None:
    assert f"up to {shapes.MAX_STOPS} texts" in PAGES["gateway"]
    assert f"up to {shapes.MAX_CHOICES} answers" in PAGES["gateway"]
    assert f"polls of {MAX_WAIT_S:.0f} s" in PAGES["gateway"]
