"""OpenEnv servers over a real gateway and a scripted engine."""

from __future__ import annotations

import asyncio
import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Literal

import pydantic
import pytest
from agent_cases import last_turn, text_of, tool_call
from framework_venv import framework
from gateway_cases import ScriptedEngine, gateway_world
from openenv_served import Server
from pydantic import Field

from asyncrl.agents import Harness, Outcome, Session, Task
from asyncrl.agents.harness import build_harness
from asyncrl.base.errors import ConfigError, RolloutFailure
from asyncrl.base.failures import FailureKind
from asyncrl.config import GeneratorConfig
from asyncrl.extensions.openenv.openenv_harness import OpenEnvHarness, Shape

pytestmark = [
    pytest.mark.extension("openenv"),
    pytest.mark.extras,
    pytest.mark.timeout(600),
]
ROOT = Path(__file__).parents[1]
TASK = Task("0/7", ({"role": "user", "content": "Count."},))


@pytest.fixture(scope="module")
def servers() -> Iterator[dict[str, Server]]:
    started = {
        "text": Server("text"),
        "tools": Server("tools"),
        "one place": Server("text", num_places=1),
    }
    try:
        yield {name: server.wait_ready() for name, server in started.items()}
    finally:
        for server in started.values():
            server.kill()


def play(
    url: str,
    answer: Callable[[str], str],
    task: Task = TASK,
    num_rollouts: int = 1,
    gateway: Mapping[str, Any] = {},
    seen: list[Mapping[str, str]] | None = None,
    **args: Any,
) -> list[tuple[Outcome, list[str]]]:
    """Return the outcome of each rollout without its states, which are added to `seen`,
    and the prompts that the engine saw.
    """
    harness = build_harness(GeneratorConfig(openenv=url, args=args))
    return play_with(harness, answer, task, num_rollouts, gateway, seen)


def play_with(
    harness: Harness,
    answer: Callable[[str], str],
    task: Task = TASK,
    num_rollouts: int = 1,
    gateway: Mapping[str, Any] = {},
    seen: list[Mapping[str, str]] | None = None,
) -> list[tuple[Outcome, list[str]]]:
    seen = [] if seen is None else seen

    async def one() -> tuple[Outcome, list[str]]:
        engine = ScriptedEngine(lambda request: answer(text_of(request)))
        async with gateway_world(engine, **gateway) as world:
            session = Session(f"{world.url}/v1", world.session.key, "policy")
            async with session.client:
                outcome = await harness.run(task, session)
            world.session.rollout(0, outcome, outcome.reward or 0.0)
            world.session.rollout(0, outcome, outcome.reward or 0.0, by_turn=True)
            seen.append(outcome.turn_states)
            outcome = replace(outcome, turn_states={})
            return outcome, [text_of(each) for each in engine.requests]

    async def all_at_once() -> list[tuple[Outcome, list[str]]]:
        return await asyncio.gather(*(one() for _ in range(num_rollouts)))

    return asyncio.run(all_at_once())


def longer(prompt: str) -> str:
    return "ab" if "Count" in last_turn(prompt)[1] else "abcd"


def test_episode_of_texts_shows_observations_and_adds_rewards(
    servers: dict[str, Server],
) -> None:
    ((outcome, prompts),) = play(servers["text"].url, longer)
    assert outcome == Outcome(10.0, {"turns": 3.0, "done": 1.0})
    first, second, third = (last_turn(prompt) for prompt in prompts)
    assert first[0] == second[0] == third[0] == "user"
    begin, start = first[1].split("\n\n")
    seed = json.loads(start)["said"].removeprefix("start ")
    assert begin == "Count."
    assert int(seed) > 0
    # Without done, reward and metadata.
    assert json.loads(second[1]) == {"said": "ab", "left": 2}
    assert json.loads(third[1]) == {"said": "ab abcd", "left": 1}


def test_rollouts_of_a_group_begin_alike_and_have_environments_of_their_own(
    servers: dict[str, Server],
) -> None:
    played = play(servers["text"].url, longer, num_rollouts=4, observation="said")
    assert {outcome.reward for outcome, _ in played} == {10.0}
    assert len({tuple(prompts) for _, prompts in played}) == 1
    evaluated = Task("0/7", TASK.messages, info={"episode": "1073741824/7"})
    for other in (Task("0/8", TASK.messages), evaluated):
        ((_, prompts),) = play(servers["text"].url, longer, other, observation="said")
        assert prompts[0] != played[0][1][0]


def too_long(prompt: str) -> str:
    return "ab" if "Count" in last_turn(prompt)[1] else "x" * 60


BY_TURN = {"chatcmpl-0": 2.0, "chatcmpl-1": 4.0, "chatcmpl-2": 4.0}


@pytest.mark.parametrize(
    ("answer", "settings", "reward", "num_turns", "is_done", "by_turn"),
    [
        (longer, {"rewards": "last"}, 4.0, 3, True, {}),
        (longer, {"rewards": "turns"}, None, 3, True, BY_TURN),
        (longer, {"max_turns": 2}, 6.0, 2, False, {}),
        (longer, {"gateway": {"max_calls": 2}}, 6.0, 2, False, {}),
        (too_long, {}, 2.0, 2, True, {}),  # the action breaks a rule
        (lambda _: "missing", {"without_reward": -1.0}, -1.0, 1, True, {}),
    ],
)
def test_episode_ends_with_its_rewards(
    servers: dict[str, Server],
    answer: Callable[[str], str],
    settings: dict[str, Any],
    reward: float | None,
    num_turns: int,
    is_done: bool,
    by_turn: dict[str, float],
) -> None:
    ((outcome, _),) = play(servers["text"].url, answer, **settings)
    metrics = {"turns": float(num_turns), "done": float(is_done)}
    assert outcome == Outcome(reward, metrics, by_turn)


def test_state_of_a_turn_is_what_the_environment_said(
    servers: dict[str, Server],
) -> None:
    seen: list[Mapping[str, str]] = []
    answers = iter(["ab", "abcd", "ab", "ab", "ab", "abcd"])
    for _ in range(2):
        play(servers["text"].url, lambda _: next(answers), seen=seen)
    first, second = (
        [states[f"chatcmpl-{turn}"] for turn in range(3)] for states in seen
    )
    assert first[0] == second[0]
    assert first[1] == second[1]
    assert first[2] != second[2], "the texts before differ"
    assert len({*first}) == 3


def test_reset_gets_the_arguments_of_the_config_and_of_the_prompt(
    servers: dict[str, Server],
) -> None:
    task = Task("0/7", TASK.messages, info={"reset": {"seed": 5}})
    ((_, prompts),) = play(
        servers["text"].url, longer, task, observation="said", reset={"word": "go"}
    )
    assert last_turn(prompts[0])[1] == "Count.\n\ngo 5"


def test_environment_of_tools_gets_calls_and_shows_results(
    servers: dict[str, Server],
) -> None:
    def answer(prompt: str) -> str:
        role, text = last_turn(prompt)
        return (
            tool_call("add", first=1, second=4)
            if role == "user"
            else tool_call("add", first=2, second=int(text))
        )

    ((outcome, prompts),) = play(servers["tools"].url, answer)
    assert outcome == Outcome(1.0, {"turns": 2.0, "done": 1.0})
    assert prompts[0].startswith("<|start|>tools\n['add']")
    assert last_turn(prompts[1]) == ("tool", "5")


def test_answer_without_a_call_ends_an_episode_of_tools(
    servers: dict[str, Server],
) -> None:
    def silent(**args: Any) -> float | None:
        ((outcome, _),) = play(servers["tools"].url, lambda _: "I do not know.", **args)
        assert outcome.metrics == {"turns": 1.0, "done": 1.0}
        return outcome.reward

    # A failure would hide such answers from training.
    assert silent() == 0.0
    assert silent(without_reward=-1.0) == -1.0
    assert silent(without_reward=None) is None


def test_tool_that_times_out_fails_the_rollout(servers: dict[str, Server]) -> None:
    with pytest.raises(RolloutFailure, match="step failed.*30 s are over"):
        play(servers["tools"].url, lambda _: tool_call("add", first=9, second=1))


class Direction(StrEnum):
    UP = "up"
    DOWN = "down"


def shape(field: Any, action: str | None) -> Shape:
    """Return how actions of OpenEnv with a required `field` look."""
    from openenv.core.env_server import Action

    model = pydantic.create_model("Act", __base__=Action, field=(field, ...))
    config = GeneratorConfig(openenv="http://x", args={"action": action})
    schema = model.model_json_schema()
    name = OpenEnvHarness(config)._field_of(schema, schema["properties"])
    return Shape(name, schema)


@pytest.mark.parametrize(
    ("field", "answers"),
    [
        (str, {"3": "3", " a\n": " a\n", "": ""}),
        (Annotated[str, Field(max_length=3)], {"abc": "abc", "abcd": None}),
        (int, {"3": 3, " 3\n": 3, "three": None, "3.5": None, "[" * 10**5: None}),
        (Annotated[int, Field(ge=0, le=6)], {"6": 6, "7": None}),
        (float, {"0.5": 0.5, "": None}),
        (bool, {"true": True, "1": None}),
        (Direction, {"up": "up", " down\n": "down", "left": None}),
        (Literal[1, "a"], {"1": 1, "a": "a", "2": None}),
        (int | None, {"3": 3}),
        (Any, {"x": "x"}),
        (list[int], ConfigError),
        (dict[str, int], ConfigError),
    ],
)
def test_answer_fills_the_only_required_field_of_an_action(
    field: Any, answers: Any
) -> None:
    """pydantic itself takes each action that the harness sends."""
    if answers is ConfigError:
        for action in (None, "field"):
            with pytest.raises(ConfigError, match="a text, number, boolean or choice"):
                shape(field, action)
        return
    act = shape(field, None)
    model = pydantic.create_model("Act", field=(field, ...))
    for text, value in answers.items():
        action = act.action_of(text)
        assert action == (None if value is None else {"field": value})
        if action is not None:
            model.model_validate(action)


def test_server_that_restarts_costs_only_the_open_episode() -> None:
    server = Server("text").wait_ready()
    try:
        with pytest.raises(RolloutFailure, match="step failed: ConnectionClosed"):
            play(server.url, lambda _: "exit")
        assert server.process.wait(timeout=30) == 3
        server.start()
        # At once: the harness waits until the server is back.
        ((outcome, _),) = play(server.url, longer, connect_s=500)
        assert outcome.reward == 10.0
    finally:
        server.kill()


def test_rollouts_wait_for_a_free_place(servers: dict[str, Server]) -> None:
    played = play(servers["one place"].url, longer, num_rollouts=3)
    assert [outcome.reward for outcome, _ in played] == [10.0] * 3


def test_server_that_stays_away_fails_the_rollout() -> None:
    with pytest.raises(RolloutFailure, match="reset failed: ConnectionError") as gone:
        play("http://127.0.0.1:9", longer, connect_s=0.1)
    assert gone.value.kind == FailureKind.ENVIRONMENT


def test_check_names_how_actions_look_or_that_no_server_answers(
    servers: dict[str, Server],
) -> None:
    def said(url: str) -> str:
        return OpenEnvHarness(GeneratorConfig(openenv=url)).check_server()

    assert said(servers["text"].url).endswith("takes texts, as text")
    assert said(servers["tools"].url).endswith("takes calls of tools")
    with pytest.raises(ConfigError, match="does not answer GET /schema"):
        said("http://127.0.0.1:9")


@pytest.mark.parametrize(
    ("args", "says"),
    [
        ({"action": "loudness"}, "actions have the fields metadata, text, loudness"),
        ({"observation": "seen"}, "an observation has the fields .*said, left"),
    ],
)
def test_fields_that_do_not_fit_are_named(
    servers: dict[str, Server], args: dict[str, str], says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        play(servers["text"].url, longer, **args)


@pytest.mark.parametrize(
    ("url", "args", "says"),
    [
        ("localhost:8000", {}, "is not the address of a server"),
        ("echo_env", {}, "does not start the servers .* start the server"),
        ("http://localhost:8000", {"max_turns": 0}, "max_turns .*greater than"),
        ("http://localhost:8000", {"turns": 3}, "its keys are action, observation"),
    ],
)
def test_wrong_settings_are_refused_at_the_start(
    url: str, args: dict[str, Any], says: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        build_harness(GeneratorConfig(openenv=url, args=args))
    error = refused.value
    assert re.search(says, f"{error.what} {error.rule} {error.way_out}")


def test_openenvs_own_harness_samples_from_the_endpoint(
    servers: dict[str, Server],
) -> None:
    def answer(prompt: str) -> str:
        role, _ = last_turn(prompt)
        return (
            tool_call("add", first=1, second=4)
            if role == "user"
            else tool_call("add", first=2, second=4)
        )

    program = ["examples/openenv/own_harness.py", servers["tools"].url]
    agent = GeneratorConfig(
        command=[sys.executable, *program],
        env={"PYTHONPATH": str(framework("openenv"))},
    )
    harness = build_harness(agent, is_worker=False)
    ((outcome, prompts),) = play_with(harness, answer)
    assert outcome == Outcome(1.0, {"turns": 2.0, "tool_calls": 2.0})
    assert prompts[0].startswith("<|start|>tools\n['add']")
    assert last_turn(prompts[1])[0] == "tool"
