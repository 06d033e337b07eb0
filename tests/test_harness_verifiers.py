"""Environments of the verifiers package over a real gateway and a scripted engine."""

from __future__ import annotations

import asyncio
import itertools
import logging
import re
import shutil
import sys
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import pytest
from agent_cases import EXAMPLE, last_turn, text_of, tool_call
from gateway_cases import ScriptedEngine, World, gateway_world, in_loop
from verifiers_alone import task_of

from asyncrl.agents import Outcome, Session, Task
from asyncrl.agents.endpoint.session import GatewaySession
from asyncrl.agents.harness import build_harness
from asyncrl.base.errors import ConfigError, RolloutFailure
from asyncrl.config import GeneratorConfig
from asyncrl.extensions.verifiers.verifiers_harness import (
    VerifiersHarness,
    load_taskset,
)
from asyncrl.messages.records import RewardPart, Rollout
from asyncrl.rollouts.rollout import earning, own_reward

pytestmark = [pytest.mark.extras, pytest.mark.extension("verifiers")]
GUESSING = "guessing_env_for_test"
LOCAL = {"agent": {"runtime": {"type": "subprocess"}}}


@pytest.fixture(autouse=True)
def in_the_examples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(EXAMPLE)
    monkeypatch.setattr(sys, "path", [*sys.path])
    started().clear()


def started() -> list[str]:
    """Return the list of the environment's starts and stops."""
    # costs seconds, which only the process of these tests pays
    import guessing_env_for_test

    return guessing_env_for_test.started


def harness_of(name: str, args: Mapping[str, Any]) -> VerifiersHarness:
    harness = build_harness(GeneratorConfig(verifiers=name, args=dict(args)))
    assert isinstance(harness, VerifiersHarness)
    return harness


async def run(
    world: World,
    harness: VerifiersHarness,
    task: Task,
    session: GatewaySession | None = None,
) -> Outcome:
    return await harness.run(
        task,
        Session(
            f"{world.url}/v1",
            (session or world.session).key,
            "policy",
            roles=world.gateway._route.rules.roles,
        ),
    )


Played = tuple[Outcome, Rollout, list[str]]


def play(
    name: str,
    index: int,
    answer: Callable[[str], str],
    args: Mapping[str, Any] = LOCAL,
    **gateway: Any,
) -> Played:
    """Return the outcome of a task, its rollout and the prompts that the engine saw.
    `answer` maps a prompt to a text.
    """

    async def story() -> Played:
        engine = ScriptedEngine(lambda request: answer(text_of(request)))
        async with gateway_world(engine, **gateway) as world:
            outcome = await run(
                world, harness_of(name, args), task_of(name, args, index)
            )
            rollout = earning(
                partial(world.session.rollout, 0, outcome), own_reward(outcome) or 0.0
            )
            return outcome, rollout, [text_of(each) for each in engine.requests]

    return asyncio.run(story())


def use_the_calculator(prompt: str) -> str:
    role, text = last_turn(prompt)
    expression = text.removeprefix("What is ").removesuffix("?")
    return (
        f"It is {text}"
        if role == "tool"
        else tool_call("calculate", expression=expression)
    )


def guess_upwards(prompt: str) -> str:
    return str(prompt.count("<|start|>assistant") - 1)


def test_tool_environment_records_every_turn(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        outcome, rollout, prompts = play("calculator_env", 0, use_the_calculator)
    loggers = ("verifiers", "httpx", "aiohttp")
    assert not [each for each in caplog.records if each.name.startswith(loggers)], (
        "they would show the key"
    )
    assert outcome.reward == {
        "correct": RewardPart(1.0),
        "asked": RewardPart(1.0, 0.1),
    }
    assert (rollout[0].reward, rollout[0].parts) == (1.1, outcome.reward)
    assert outcome.metrics == {"num_calls": 1.0}
    assert len(prompts) == 2
    assert "['calculate']" in prompts[0]
    (branch,) = rollout
    sampled = ScriptedEngine().tokenizer.decode(
        branch.token_ids[branch.loss_mask].tolist()
    )
    assert re.fullmatch(r"Let me see\. <tool_call>(.|\n)*It is -?\d+", sampled)


@in_loop
async def test_rollouts_share_servers_that_end_with_the_last() -> None:
    async with gateway_world(
        ScriptedEngine(lambda request: guess_upwards(text_of(request)))
    ) as world:
        harness = harness_of(GUESSING, {})
        sessions = [world.open(f"g0/r{index}") for index in range(6)]
        tasks = [task_of(GUESSING, {}, index) for index in range(6)]
        runs = [
            run(world, harness, *each) for each in zip(tasks, sessions, strict=True)
        ]
        outcomes = await asyncio.gather(*runs)
        assert [own_reward(one) for one in outcomes] == [{"found": RewardPart(1.0)}] * 6
        sampled = [
            session.rollout(0, Outcome(), 0.0)[0].num_sampled for session in sessions
        ]
        assert sampled == [2, 4, 6, 8, 10, 12]
        assert started() == ["start", "stop"]
        await run(world, harness, tasks[0])
        assert started() == ["start", "stop"] * 2


@in_loop
async def test_a_cancelled_rollout_leaves_nothing_behind() -> None:
    engine = ScriptedEngine(gate=asyncio.Event())
    async with gateway_world(engine) as world:
        harness = harness_of(GUESSING, {})
        running = asyncio.create_task(run(world, harness, task_of(GUESSING, {}, 3)))
        await engine.started.wait()
        assert harness.num_users == 1
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert harness.num_users == 0
        assert started() == ["start", "stop"]
        from verifiers.v1.runtimes.base import _LIVE

        assert all(runtime.stopped for runtime in _LIVE)
        left = asyncio.all_tasks() - {asyncio.current_task()}
        assert all(
            re.search("run_asgi|endpoint/session", repr(task)) for task in left
        ), "of the gateway"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("dialect", ["chat", "messages", "responses"])
def test_programs_of_every_dialect_are_recorded(dialect: str, stream: bool) -> None:
    harness = {"id": GUESSING, "dialect": dialect, "stream": stream}
    args = {"agent": {"harness": harness, "runtime": {"type": "subprocess"}}}
    outcome, rollout, prompts = play(GUESSING, 2, guess_upwards, args)
    assert outcome == Outcome({"found": RewardPart(1.0)}, {"guesses": 3.0})
    assert len(prompts) == 3
    (branch,) = rollout
    sampled = branch.token_ids[branch.loss_mask].tolist()
    text = ScriptedEngine().tokenizer.decode(sampled, skip_special_tokens=False)
    assert text == "0<|end|>1<|end|>2<|end|>"


@pytest.mark.parametrize("program", ["null", "bash"])
def test_the_librarys_own_programs_are_recorded(program: str) -> None:
    if shutil.which("uv") is None:
        pytest.skip("pip install uv")
    args = {"agent": {"harness": {"id": program}, "runtime": {"type": "subprocess"}}}
    outcome, rollout, _ = play("letters_env_for_test", 0, lambda _: "aab", args)
    assert rollout[0].reward == pytest.approx(2 / 3)
    assert [branch.num_sampled for branch in rollout] == [4]


def test_environment_failure_hides_the_key() -> None:
    guess = (GUESSING, guess_upwards, {})
    calculate = ("calculator_env", use_the_calculator, LOCAL)
    for (name, answer, args), index, most, said in (
        (guess, 7, 2000, r"run\(\): RuntimeError: seven is out"),
        (guess, 8, 2000, "ZeroDivisionError: no reward for 8"),
        (calculate, 0, 8, "upstream 400: .*context_length_exceeded"),
    ):
        with pytest.raises(RolloutFailure, match=said) as failure:
            play(name, index, answer, args, max_prompt_tokens=most)
        assert "/s/" not in str(failure.value)
    assert started() == ["start", "stop"] * 2


def test_untrainable_episode_fails() -> None:
    with pytest.raises(RolloutFailure, match="not one sampled token to train on"):
        play(GUESSING, 2, guess_upwards, {"freeze": True})


DUEL = "duel_env_for_test"
BOTH = dict.fromkeys(("first", "second"), LOCAL["agent"])


def name_your_role(prompt: str) -> str:
    return "f" * prompt.count("first") + "s" * prompt.count("second")


def test_several_trained_agents_have_their_own_rewards() -> None:
    outcome, rollout, prompts = play(DUEL, 0, name_your_role, BOTH)
    assert len(prompts) == 4, "two turns of each"
    assert outcome.reward is None
    assert sorted(outcome.turn_rewards.values()) == [0.25, 1.0]
    assert outcome.metrics == {
        "first/reward/points": 1.0,
        "second/reward/points": 0.25,
    }
    decode = ScriptedEngine().tokenizer.decode
    rewards = {}
    for branch in rollout:
        ids = branch.token_ids[branch.loss_mask].tolist()
        rewards[decode(ids)[0]] = {credit.reward for credit in branch.credits}
        (role,) = {credit.state for credit in branch.credits}
        assert role.startswith(decode(ids)[0]), "not the id of the agent's trace"
        assert len(branch.credits) == 2
    assert rewards == {"f": {1.0}, "s": {0.25}}


def test_each_agent_plays_with_the_policy_of_its_role() -> None:
    roles = ("first", "second")
    _, rollout, _ = play(DUEL, 0, name_your_role, BOTH, roles=roles)
    decode = ScriptedEngine().tokenizer.decode
    for branch in rollout:
        ids = branch.token_ids[branch.loss_mask].tolist()
        assert branch.role.startswith(decode(ids)[0])
    assert {branch.role for branch in rollout} == {*roles}


def test_agent_without_a_role_is_refused() -> None:
    with pytest.raises(ConfigError, match="agent second of .* has no role among first"):
        play(DUEL, 0, name_your_role, BOTH, roles=("first",))


def test_agent_with_trainable_false_plays_without_a_loss() -> None:
    outcome, rollout, prompts = play(DUEL, 0, name_your_role, BOTH | {"freeze": True})
    assert len(prompts) == 4, "two turns of each"
    assert [*outcome.turn_rewards.values()] == [1.0]
    assert outcome.metrics["second/reward/points"] == 0.25
    (branch,) = rollout
    ids = branch.token_ids[branch.loss_mask].tolist()
    assert {*ScriptedEngine().tokenizer.decode(ids)} == {"f"}
    assert {credit.reward for credit in branch.credits} == {1.0}


LETTERS = "letters_env_for_test"


def test_each_attempt_of_best_of_n_is_trained_with_its_own_reward() -> None:
    says = itertools.cycle(["aa", "ab", "bb"])
    args = LOCAL | {"id": "best-of-n", "n": 3}
    outcome, rollout, prompts = play(LETTERS, 0, lambda _: next(says), args)
    assert len(prompts) == 3
    assert sorted(outcome.turn_rewards.values()) == [0.0, 0.5, 1.0]
    assert outcome.metrics == {
        "agent/reward/share": 0.5,
        "agent/is_b": 0.0,
        "agent/best": pytest.approx(1 / 3),
        "agent/pass_at_n": 1.0,
    }
    credits = [credit for branch in rollout for credit in branch.credits]
    assert sorted(credit.reward for credit in credits) == [0.0, 0.5, 1.0]
    assert {credit.state for credit in credits} == {"agent"}, "one role"


def test_policy_serves_a_simulated_user() -> None:
    async def story() -> tuple[Outcome, Rollout, int]:
        ours = ScriptedEngine(lambda _: "ab")
        asks = iter(["say a", "again", "###DONE###"])
        user = ScriptedEngine(lambda _: next(asks))
        async with gateway_world(ours) as world, gateway_world(user) as other:
            address = f"{other.url}/s/{other.session.key}/v1"
            seat = {**LOCAL["agent"], "harness": {"id": LETTERS}}
            client = {"type": "eval", "base_url": address}
            args = {
                "id": "user-sim",
                "assistant": seat,
                "user": seat | {"client": client, "model": "v"},
            }
            harness = harness_of(LETTERS, args)
            outcome = await run(world, harness, task_of(LETTERS, args, 0))
            rollout = earning(
                partial(world.session.rollout, 0, outcome), own_reward(outcome) or 0.0
            )
            return outcome, rollout, len(user.requests)

    outcome, rollout, num_asked = asyncio.run(story())
    assert (rollout[0].reward, outcome.turn_rewards, num_asked) == (0.5, {}, 3)
    assert outcome.metrics["user_turns"] == 3.0
    assert [branch.num_sampled for branch in rollout] == [6], "two answers of three"


@pytest.mark.parametrize(("override", "top_p"), [("honour", 0.5), ("use_config", 1.0)])
@in_loop
async def test_sampling_settings_of_an_agent_are_those_of_its_calls(
    override: str, top_p: float
) -> None:
    engine = ScriptedEngine(lambda _: "aaa")
    async with gateway_world(engine, on_sampling_override=override) as world:
        seat = LOCAL["agent"] | {"sampling": {"top_p": 0.5, "max_tokens": 2}}
        harness = harness_of(LETTERS, {"agent": seat})
        await run(world, harness, task_of(LETTERS, {"agent": seat}, 0))
    (request,) = engine.requests
    assert (request.top_p, request.max_tokens) == (top_p, 2)


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("no_such_env_here", {}, "No module named 'no_such_env_here'"),
    (
        "calculator-env",
        {"taskset": {"num_taskss": 3}},
        "taskset.num_taskss Extra inputs are not",
    ),
    (
        "calculator_env",
        {"agent": {"model": "gpt-9"}},
        "no client of their own: agent (model=gpt-9)",
    ),
    (
        "calculator_env",
        {"agent": {"retries": {"max_retries": 2}}},
        "generator.args has agent.retries",
    ),
    (
        GUESSING,
        {"judge": {"client": None, "model": "m"}},
        "client of their own: agent (model=None), judge (model=m)",
    ),
    ("agents_for_test", {}, "exports a Taskset in __all__"),
]


def test_untrainable_environment_is_refused_first() -> None:
    loads = (harness_of, partial(load_taskset, fields={}))
    for load, (name, args, said) in itertools.product(loads, REFUSED):
        with pytest.raises(ConfigError, match=re.escape(said)):
            load(name, args)
