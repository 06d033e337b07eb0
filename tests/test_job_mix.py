"""Two environments in one run, each with its own program, limits and advantages."""

from __future__ import annotations

import asyncio
import json
import string
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from gateway_cases import gateway_world, in_loop
from harness_gateway import make_work, open_gateway, working
from job_runs import ROOT, read_lines, run, variant, write_config
from producer_cases import HARNESS_PROMPT
from rollout_cases import one_token, virtual
from trainer_cases import batch_of, make_spec

from asyncrl.base.errors import ConfigError
from asyncrl.config import AlgorithmConfig, RunConfig
from asyncrl.job.check.config_check import validate
from asyncrl.journal.read import read_batch, reading
from asyncrl.messages.records import GroupId, SessionRules, Trajectory, task_of
from asyncrl.rollouts.rollout import (
    ByTask,
    FailedRollout,
    RolloutAttempt,
    RolloutRunner,
    Slots,
)
from asyncrl.trainer.loss.objective import BatchNumbers, Objective

MIX = ROOT / "examples" / "mix.yaml"
AGENT = {"name": "a", "python": "x:A", "generator": {"python": "x:run"}}
PLAIN = {"name": "b", "python": "x:B"}


def mixed(agent: dict[str, Any], plain: dict[str, Any], **sections: Any) -> RunConfig:
    tasks = [AGENT | agent, PLAIN | plain]
    return RunConfig.model_validate({"model": {"path": "m"}, "task": tasks, **sections})


# ---- settings


def test_task_without_its_own_settings_has_those_of_the_run() -> None:
    run = {"command": ["./agent.sh"], "workers": 3}
    config = mixed({}, {}, generator=run, algorithm={"advantage": "rloo"})
    assert config.generators["b"] == config.generator
    assert config.harnesses == [config.generator, config.generators["a"]]
    assert config.algorithms == {}, "so all samples of a batch are compared"
    config = mixed(
        {"algorithm": {"turn_discount": 0.9}}, {}, algorithm={"advantage": "rloo"}
    )
    found = [each.turn_discount for each in config.algorithms.values()]
    assert found == [0.9, None]
    config = mixed({}, {"algorithm": {"weight": 2.0}})
    assert set(config.algorithms) == {"a", "b"}


def test_evaluation_without_its_own_program_has_that_of_the_run() -> None:
    own = {
        "of_run": {},
        "alone": {"generator": {}},
        "agent": {"generator": {"python": "x:run"}},
    }
    evals = [
        {"name": name, "task": {"python": "x:A", **one}} for name, one in own.items()
    ]
    config = mixed({}, {}, generator={"command": ["./agent.sh"]}, eval=evals)
    assert [each.called for each in config.eval_generators.values()] == [
        "command ./agent.sh",
        "one completion",
        "python x:run",
    ]
    assert config.harnesses == [config.generator, config.generators["a"]]
    config = mixed({"generator": {}}, {}, eval=evals[1:])
    assert config.harnesses == [config.eval_generators["agent"]]
    assert not config.trains_agent


@pytest.mark.parametrize(
    ("advantage", "message"),
    [
        ("grop", "algorithm.advantage=grop is not known"),
        ("asyncrl.algorithms.advantages:gae", r"cannot be called as advantage\(reward"),
    ],
)
def test_advantages_of_tasks_are_checked_before_a_run(
    advantage: str, message: str
) -> None:
    values = yaml.safe_load(MIX.read_text())
    values["task"][1]["algorithm"] = {"advantage": advantage}
    with pytest.raises(ConfigError, match=message):
        validate(RunConfig.model_validate(values))


@pytest.mark.extras
@pytest.mark.extension("verifiers")
def test_each_task_has_its_own_verifiers_environment() -> None:
    values = yaml.safe_load(MIX.read_text())
    environments = ("guessing_env_for_test", "letters_env_for_test")
    values["model"]["scratch"]["characters"] = string.printable[:95]
    values["task"] = [
        {"name": name, "verifiers": True, "generator": {"verifiers": environment}}
        for name, environment in zip("ab", environments, strict=True)
    ]
    found = validate(RunConfig.model_validate(values), reads_all=True)
    lines = "\n".join(found.lines)
    assert "task.a: verifiers GuessingTaskset" in lines
    assert "task.b: verifiers LettersTaskset" in lines
    assert all(f"verifiers {environment}" in lines for environment in environments)
    assert set(found.tasks) == {"a", "b"}


# ---- programs and limits


class Slow:
    """A generator that takes a second."""

    def __init__(self, name: str) -> None:
        self.name = name

    async def sample(self, attempt: RolloutAttempt) -> Any:
        await asyncio.sleep(1.0)

        async def score() -> tuple[Trajectory, ...]:
            trajectory = one_token(0, reward=1.0)
            return (replace(trajectory, metrics={self.name: 1.0}),)

        return score


@virtual
async def test_prompts_have_the_generator_and_the_timeout_of_their_task() -> None:
    generator = ByTask({"quick": Slow("first"), "late": Slow("second")})  # type: ignore[dict-item]
    runner = RolloutRunner(
        generator, timeout_s=10.0, retries=0, task_timeouts_s={"late": 0.5}
    )
    found = []
    for name in ("quick", "late"):
        prompt = replace(HARNESS_PROMPT, prompt_id=f"{name}/0/1")
        attempt = RolloutAttempt("g0/r0", GroupId(0), prompt, 0)
        found.append(await runner.run(attempt, slots=Slots(1), order=()))
    quick, late = found
    assert quick[0].metrics == {"first": 1.0}
    assert isinstance(late, FailedRollout)
    assert "rollout.timeout_s=0.5" in str(late.failure)


class Named:
    def __init__(self, reward: float) -> None:
        self.reward = reward

    async def run(self, task: Any, session: Any) -> float:
        return self.reward


@in_loop
async def test_a_worker_runs_the_harness_of_the_item() -> None:
    async with open_gateway(num_harnesses=2) as gateway:
        async with working(gateway, Named(0.25), Named(0.75)):
            for place, reward in enumerate((0.25, 0.75)):
                work = replace(make_work(place), harness=place)
                outcome = await gateway.queue.run(work, started=lambda: None)
                assert outcome.reward == reward


@in_loop
async def test_sessions_have_the_limits_of_their_task() -> None:
    async with gateway_world() as world:
        rules = SessionRules(max_tokens=2, max_calls=1)
        about: Any = {"prompt_id": "p", "sample_index": 0, "attempt": 0}
        session = world.gateway.open_nowait(
            "g1/r0", route_key="g1/r0", rules=rules, **about
        )
        body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 9}
        headers = {"Authorization": f"Bearer {session.key}"}
        status, _ = await world.post(body, headers=headers)
        assert status == 200
        assert world.engine.requests[-1].max_tokens == 2
        status, answer = await world.post(body, headers=headers)
        assert status == 429
        assert "max_calls=1" in str(answer)
        await world.post(body)
        assert world.engine.requests[-1].max_tokens == 9


# ---- advantages


def test_samples_are_compared_within_their_task() -> None:
    row = ([0, 1], [False, True])
    header, arrays = batch_of([[row] * 2, [row] * 2, [row] * 2])
    names = ["a/0/1", "a/0/1", "b/0/1", "b/0/1", "a/0/2", "a/0/2"]
    rewards = [1.0, 0.0, 8.0, 2.0, 3.0, 1.0]
    entries = [
        entry.model_copy(update={"prompt_id": name, "reward": reward})
        for entry, name, reward in zip(header.trajectories, names, rewards, strict=True)
    ]
    header = header.model_copy(update={"trajectories": entries})
    algorithms = {
        "a": AlgorithmConfig(advantage="reinforce_pp"),
        "b": AlgorithmConfig(advantage="rloo"),
    }
    spec = make_spec(
        Path(), Path(), algorithms=algorithms, weights={"a": 1.0, "b": 0.5}
    )
    objective = Objective(spec)
    advantage_N = objective.advantages(BatchNumbers(header, arrays, arrays.is_sampled))
    found = advantage_N[arrays.is_sampled]
    of_a = np.array([1.0, 0.0, 3.0, 1.0])
    expected = (of_a - of_a.mean()) / of_a.std()
    assert found[[0, 1, 4, 5]] == pytest.approx(expected, abs=1e-3)
    assert found[[2, 3]] == pytest.approx([3.0, -3.0])


# ---- a run

HELD_OUT = {"python": "asyncrl.tasks.toy:Letters", "size": 8}
LOOKUP = {
    "python": "examples.lookup:Directory",
    "size": 8,
    "generator": {"python": "examples.lookup:run", "give_answer": True},
    "limits": {"max_tokens": 3, "max_calls": 3},
}
EVALS = [
    {"name": name, "task": task, "num_prompts": 8, "engine": "rollout", **more}
    for name, task, more in (
        ("alone", HELD_OUT, {"temperature": 1.0, "top_k": 4}),
        ("short", HELD_OUT | {"limits": {"max_tokens": 2}}, {}),
        ("agent", LOOKUP, {}),
    )
]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_two_environments_train_in_one_run_that_resumes_exactly(tmp_path: Path) -> None:
    few = {
        "trainer": {"num_steps": 4, "num_groups": 4, "threads": 1},
        "buffer": {"max_staleness": 0},
        "rollout": {"group_size": 4, "slots": 16, "threads": 1},
        "checkpoint": {"every": 1},
        "journal": {"keep": "all"},
        "observe": {"console": "plain", "trackers": []},
    }
    evaluated = f"eval={json.dumps(EVALS)}"
    config = variant(MIX, tmp_path, **few)
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    checked = run(config, whole, evaluated)
    assert checked.returncode == 0, checked.stderr
    for more in (["trainer.num_steps=2"], ["--allow-change", "trainer.num_steps"]):
        ended = run(config, parts, evaluated, *more)
        assert ended.returncode == 0, ended.stderr
    of_whole, of_parts = (
        [
            {
                name: value
                for name, value in line.items()
                if name.startswith(("policy/loss", "reward/", "task/"))
            }
            for line in read_lines(folder / "metrics.jsonl")
        ]
        for folder in (whole, parts)
    )
    assert of_whole == of_parts
    assert {"reward/mean/lookup", "reward/mean/letters", "task/tool_calls"} <= set(
        of_whole[-1]
    )
    with reading(whole / "journal.sqlite") as connection:
        groups = [
            group for step in range(4) for group in read_batch(connection, step).groups
        ]
    lengths: dict[str, int] = {}
    for group in groups:
        task = task_of(group.prompt.prompt_id)
        for branch in group.trajectories:
            # Only the agent's rollouts have turns, in credits.
            assert bool(branch.credits) == (task == "lookup")
            spans = [each.end - each.start for each in branch.tokens.spans]
            lengths[task] = max(lengths.get(task, 0), *spans)
    assert lengths["lookup"] <= 3 < lengths["letters"]
    newest = {
        line["name"]: line
        for line in read_lines(whole / "eval.jsonl")
        if line["policy_version"] == 4
    }
    assert newest["alone"]["eval/length_mean"] > 2
    assert newest["short"]["eval/length_mean"] <= 2
    has_tools = {
        name for name, line in newest.items() if "eval/task/tool_calls" in line
    }
    assert has_tools == {"agent"}
    assert all(line["eval/failed"] == 0 for line in newest.values())
    assert json.loads((whole / "summary.json").read_text())["policy_version"] == 4


@pytest.mark.slow
def test_single_evaluation_with_a_name_is_scored(tmp_path: Path) -> None:
    held_out = {"python": "asyncrl.tasks.toy:Letters", "size": 64}
    config = write_config(
        tmp_path,
        eval={"engine": "rollout", "name": "held", "task": held_out},
        trainer={"num_steps": 1},
    )
    ended = run(config, tmp_path / "run")
    assert ended.returncode == 0, ended.stderr
    lines = read_lines(tmp_path / "run" / "eval.jsonl")
    assert {line["eval/failed"] for line in lines} == {0}
    assert all("eval/reward_mean" in line for line in lines)
