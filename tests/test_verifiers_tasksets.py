"""Task sets that ship with verifiers, unmodified, each in a separate process."""

from __future__ import annotations

import asyncio
import importlib
import itertools
import json
import os
import pkgutil
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from agent_cases import last_turn, text_of
from environment_cases import ROOT, adds, resources
from framework_venv import framework
from gateway_cases import ScriptedEngine, gateway_world
from openenv_served import Server

from asyncrl.agents import Outcome
from asyncrl.messages.records import Rollout

pytestmark = [
    pytest.mark.extension("verifiers"),
    pytest.mark.extras,
    pytest.mark.timeout(600),
]
KIT = Path(__file__).parent / "kit"
PAGE = (ROOT / "docs/verifiers.md").read_text(encoding="utf-8")
PLAYER = {
    "harness": {"id": "guessing_env_for_test"},
    "runtime": {"type": "subprocess"},
}


def play(
    name: str,
    args: Mapping[str, Any],
    answer: Callable[[str], str],
    *,
    packages: Sequence[Path] = (),
    **variables: str,
) -> tuple[Outcome, Rollout, list[str]]:
    """Return the outcome, the rollout, and the prompts that the engine saw."""

    async def story() -> tuple[Outcome, Rollout, list[str]]:
        engine = ScriptedEngine(lambda request: answer(text_of(request)))
        async with gateway_world(engine) as world:
            spec = {
                "name": name,
                "args": args,
                "url": f"{world.url}/v1",
                "key": world.session.key,
            }
            others = os.environ.get("PYTHONPATH", "")
            path = os.pathsep.join([*map(str, packages), str(KIT), others])
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                str(KIT / "verifiers_alone.py"),
                json.dumps(spec),
                env={**os.environ, "PYTHONPATH": path, **variables},
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
            )
            said, errors = await process.communicate()
            assert process.returncode == 0, errors.decode()
            outcome = Outcome(**json.loads(said.splitlines()[-1]))
            rollout = world.session.rollout(0, outcome, outcome.reward or 0.0)
            return outcome, rollout, [text_of(each) for each in engine.requests]

    return asyncio.run(story())


@pytest.mark.parametrize(
    ("title", "group"),
    [
        ("harness of verifiers 0.4", "harnesses"),
        ("task set", "tasksets"),
        ("environment", "envs"),
    ],
)
def test_page_says_of_each_part_of_the_library_how_it_was_run(
    title: str, group: str
) -> None:
    table = PAGE.partition(f"| {title} | |\n| --- | --- |\n")[2].partition("\n\n")[0]
    shown = {
        name: text
        for names, text in re.findall(r"^\| (.*?) \| (.*) \|$", table, re.M)
        for name in re.findall(r"`(\w+)`", names)
    }
    package = importlib.import_module(f"verifiers.v1.{group}")
    modules = pkgutil.iter_modules(package.__path__)
    found = {module.name for module in modules if module.ispkg} - {"utils"}
    assert shown.keys() == found
    if group == "harnesses":
        from verifiers.v1.utils.loaders import harness_class

        for name in found:
            needs = harness_class(name).NEEDS_CONTAINER
            assert ("container runtime" in shown[name]) == needs


def test_textarena_game_of_the_library_is_played(tmp_path: Path) -> None:
    # The game's word list, which the library would download.
    words = tmp_path / "corpora" / "words"
    words.mkdir(parents=True)
    for name in ("en", "en-basic"):
        (words / name).write_text("house\n")
    letters = itertools.cycle("hxouse")
    args = {"taskset": {"game": "Hangman-v0"}, "player": PLAYER}
    # nltk refuses to download through a proxy, so the result needs no network.
    outcome, rollout, prompts = play(
        "textarena",
        args,
        lambda _: f"[{next(letters).upper()}]",
        packages=[framework("textarena")],
        NLTK_DATA=str(tmp_path),
        https_proxy="http://127.0.0.1:9",
    )
    assert outcome.reward == 1.0
    assert len(prompts) == 6
    assert last_turn(prompts[-1])[1].split()[-5:] == ["H", "O", "U", "S", "_"]
    assert len(rollout) == 1


def test_openenv_server_is_played_by_the_library() -> None:
    server = Server("text").wait_ready()
    try:
        taskset = {"base_url": server.url, "resets": [{"seed": 7}]}
        outcome, rollout, prompts = play(
            "openenv",
            {"taskset": taskset, "player": PLAYER},
            lambda prompt: "a" * prompt.count("<|start|>"),
            packages=[framework("openenv")],
        )
    finally:
        server.kill()
    assert len(prompts) == 3
    assert "start 7" in prompts[0]
    lengths = [prompt.count("<|start|>") for prompt in prompts]
    assert outcome.reward == sum(lengths)
    assert len(rollout) == 1


def test_nemo_gym_server_is_played_by_the_library() -> None:
    """The package with the servers is not in the index; the routes are NeMo Gym's."""
    path = os.pathsep.join([os.environ["PATH"], str(framework("bin"))])

    with resources() as (url, seen):
        dataset = ROOT / "examples" / "nemo_gym" / "rows.jsonl"
        taskset = {"dataset": str(dataset), "task": {"resources_url": url}}
        agent = {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}}
        args = {"taskset": taskset, "agent": agent}
        outcome, rollout, _ = play("nemo_gym", args, adds, PATH=path)
    assert outcome.reward == 1.0
    assert [path for path, *_ in seen] == ["/seed_session", "/add", "/verify"]
    assert len(rollout) == 1
