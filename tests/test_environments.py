"""docs/environments.md: its configs load, have the shown lines, and play."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from agent_cases import text_of
from environment_cases import ROOT, adds, resources
from gateway_cases import ScriptedEngine, gateway_world
from job_runs import environment, read_lines
from openenv_served import Server

from asyncrl.agents import Outcome, Session, Task
from asyncrl.agents.harness import build_harness
from asyncrl.config import GeneratorConfig, load_config
from asyncrl.tasks.sources import build_task

PAGE = (ROOT / "docs/environments.md").read_text(encoding="utf-8")
ROWS = re.findall(
    r"^\| \[.+?\]\(#([\w-]+)\) \| \[(\S+)\]\(\.\./(\S+)\) \|.*\| (.*) \|$", PAGE, re.M
)
"""(anchor, config, its link, tests)."""


def lines_of(anchor: str) -> Any:
    """The config that the section shows."""
    for section in PAGE.split("\n## ")[1:]:
        title = section.partition("\n")[0]
        if title.lower().replace(" ", "-").replace(",", "") == anchor:
            (text,) = re.findall(r"```yaml\n(.*?)```", section, re.S)
            assert len(text.splitlines()) <= 6
            return yaml.safe_load(text)
    raise AssertionError(f"the page has no section {anchor}")


def test_page_has_every_environment() -> None:
    assert [anchor for anchor, *_ in ROWS] == [
        "own-python-function",
        "own-agent",
        "command-in-a-sandbox",
        "verifiers",
        "openenv",
        "textarena",
        "harbor",
        "nemo-gym",
    ]


def is_part(shown: Any, whole: Any) -> bool:
    if isinstance(shown, Mapping):
        return all(is_part(value, whole[name]) for name, value in shown.items())
    return bool(shown == whole)


@pytest.mark.parametrize(("anchor", "name", "link", "tests"), ROWS)
def test_shown_lines_are_those_of_a_config_that_loads(
    anchor: str, name: str, link: str, tests: str
) -> None:
    assert name == link
    shown = lines_of(anchor)
    overrides = []
    if anchor == "command-in-a-sandbox":
        overrides = ["generator.sandbox=bubblewrap"]
    if anchor == "textarena":
        overrides = ["generator.args.frozen=false"]
    config = load_config(ROOT / name, overrides)
    assert is_part(shown, config.model_dump(mode="json"))
    for test in re.findall(r"`(test_\w+\.py)`", tests):
        assert (ROOT / "tests" / test).is_file()


# ---- NeMo Gym


def test_agent_of_nemo_gym_uses_its_tools_and_its_reward() -> None:
    config = load_config(ROOT / "examples/nemo_gym/nemo_gym.yaml")
    item = build_task(config.task, config.seed).prompt(0)
    task = Task("0/0", ({"role": "user", "content": str(item.content)},), item.info)

    async def story(url: str) -> Outcome:
        harness = build_harness(
            GeneratorConfig(python="examples.nemo_gym.agent:run", args={"url": url})
        )
        engine = ScriptedEngine(lambda request: adds(text_of(request)))
        async with gateway_world(engine) as world:
            session = Session(f"{world.url}/v1", world.session.key, "policy")
            async with session.client:
                outcome = await harness.run(task, session)
            # One conversation: its two answers are trained in one branch.
            (branch,) = world.session.rollout(0, outcome, 1.0)
            assert len(branch.calls) == 2
            return outcome  # type: ignore[no-any-return]

    with resources() as (url, seen):
        assert asyncio.run(story(url)) == Outcome(1.0, {"tool_calls": 1})
    assert [path for path, *_ in seen] == ["/seed_session", "/add", "/verify"]
    assert [cookie for *_, cookie in seen] == ["", "session=7", "session=7"]
    kinds = [item["type"] for item in seen[-1][1]["response"]["output"]]
    assert kinds == ["message", "function_call", "function_call_output", "message"]


# ---- OpenEnv


@pytest.mark.slow
@pytest.mark.extras
@pytest.mark.timeout(600)
@pytest.mark.extension("openenv")
def test_run_plays_episodes_of_the_server_of_the_page(tmp_path: Path) -> None:
    page = (ROOT / "docs/openenv.md").read_text(encoding="utf-8")
    (app,) = re.findall(r"^uvicorn (examples\S+) --port 8000", page, re.M)
    server = Server(program=[sys.executable, "-m", "uvicorn", app])
    command = [sys.executable, "-m", "asyncrl", "run", "examples/openenv/learn.yaml"]
    few = ["trainer.num_steps=2", "observe.trackers=[]", "generator.workers=1"]
    place = [f"generator.openenv={server.url}", "--run-dir", str(tmp_path / "run")]
    try:
        server.wait_ready()
        ended = subprocess.run(
            [*command, *few, *place],
            cwd=ROOT,
            env=environment(),
            capture_output=True,
            text=True,
            check=False,
        )
    finally:
        server.kill()
    assert ended.returncode == 0, ended.stderr
    last = read_lines(tmp_path / "run/metrics.jsonl")[-1]
    assert last["task/done"] == 1.0
    assert last["rollout/failed"] == 0
