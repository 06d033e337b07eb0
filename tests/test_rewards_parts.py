"""Several rewards: their sum and GDPO's advantages, where parts come from, and a run that
is killed with them.
"""

from __future__ import annotations

import asyncio
import json
import math
from contextlib import aclosing
from dataclasses import replace
from itertools import count
from pathlib import Path
from statistics import fmean, stdev, variance
from typing import Any

import held_task
import pytest
import torch
from buffer_groups import make_buffer, make_group
from costly_cases import slow
from crash_fuzz import differences
from fakes import FakeScorer
from gateway_capture_cases import conversation
from hypothesis import assume, given
from hypothesis import strategies as st
from job_runs import read_lines, run, start, wait_for_steps, write_config
from journal_cases import make_batch
from producer_cases import FakeHost, World, run_harness
from rollout_cases import one_token, virtual
from scorer_cases import PROMPT, TOKENIZER, make_scorer, sampled

from asyncrl.base.errors import ConfigError, RewardFailure, TaskError
from asyncrl.config import AlgorithmConfig, TaskConfig
from asyncrl.job.check.reward_trial import try_reward
from asyncrl.journal.schema import decode_trajectory, encode_trajectory
from asyncrl.messages.records import (
    Batch,
    Credit,
    Group,
    GroupId,
    Outcome,
    RewardPart,
    total,
)
from asyncrl.messages.trainer_api import pack_batch, unpack_batch
from asyncrl.observe.show import render_inspect as inspect
from asyncrl.rollouts.evaluation import EvalResult
from asyncrl.rollouts.rollout import weighted_outcome, with_outcome
from asyncrl.tasks import TaskScorer, build_task
from asyncrl.tasks.rewards import (
    UserCodeFailed,
    as_reward,
    weighted,
)
from asyncrl.trainer.loss.objective import Compare, Unit, find_units
from asyncrl.trainer.trainer_client import pack_groups
from examples.harbor.trial import parts_of

GDPO = {"rewards": "normalize_then_sum", "advantage": "grpo_sample"}
TRL = (1e-4, lambda values: 1 / (stdev(values) + 1e-4))
VERL = (1e-6, lambda values: (variance(values) + 1e-8) ** -0.5)
"""Epsilon of a group, and the factor of a batch: GRPOTrainer of TRL 1.16, and
compute_gdpo_outcome_advantage with masked_whiten of verl 0.9, for answers of one token.
"""
Row = dict[str, float | None]
Groups = list[list[Row]]


def advantages(
    groups: Groups, weights: dict[str, float], **algorithm: Any
) -> list[float]:
    """What the trainer computes for rollouts with these parts."""
    units = []
    for number, rows in enumerate(groups):
        for sample, row in enumerate(rows):
            parts = weighted(as_reward(row), weights)
            assert not isinstance(parts, float)
            units.append(
                Unit(total(parts), number, sample, -1, "", "", parts),
            )
    reward_B = torch.tensor([unit.reward for unit in units], dtype=torch.float64)
    compare = Compare(AlgorithmConfig(**algorithm))
    return [float(value) for value in compare(units, reward_B)]


def plain_gdpo(
    groups: Groups, weights: dict[str, float], epsilon: float, factor: Any
) -> list[float]:
    sums = []
    for rows in groups:
        for row in rows:
            found = 0.0
            for name, value in row.items():
                others = [each[name] for each in rows]
                those = [each for each in others if each is not None]
                if value is not None and len(those) > 1:
                    scale = weights.get(name, 1.0) / (stdev(those) + epsilon)
                    found += scale * (value - fmean(those))
            sums.append(found)
    by = factor(sums)
    return [(each - fmean(sums)) * by for each in sums]


def draw_groups(value: st.SearchStrategy[Any]) -> st.SearchStrategy[Groups]:
    rows = st.fixed_dictionaries({"exact": value, "form": value, "short": value})
    # A reward needs a part that applies.
    whole = rows.filter(lambda row: any(each is not None for each in row.values()))
    return st.lists(st.lists(whole, min_size=2, max_size=5), min_size=2, max_size=4)


WEIGHTS = st.fixed_dictionaries(
    {name: st.sampled_from([0.0, 0.2, 1.0, -3.0]) for name in ("exact", "form")}
)


# ---- advantages


@given(draw_groups(st.sampled_from([None, 0.0, 0.1, 0.5, 1.0, 2.0])), WEIGHTS)
def test_gdpo_is_the_formula_of_trl(groups: Groups, weights: dict[str, float]) -> None:
    expected = plain_gdpo(groups, weights, *TRL)
    assert advantages(groups, weights, **GDPO) == pytest.approx(expected, abs=1e-6)


@given(draw_groups(st.integers(-9, 9).map(float)), WEIGHTS)
def test_gdpo_is_the_formula_of_verl(groups: Groups, weights: dict[str, float]) -> None:
    """Its epsilons are others. Against deviations of a million none of them counts."""
    large = [
        [{n: 1e6 * (v or 0) for n, v in row.items()} for row in rows] for rows in groups
    ]
    of_million = {"short": 1e6} | {name: 1e6 * one for name, one in weights.items()}
    sums = plain_gdpo(large, of_million, VERL[0], lambda _: 1.0)
    # Parts that cancel leave only the epsilons, which the last division makes large.
    assume(stdev(sums) > 1e3)
    expected = plain_gdpo(large, of_million, *VERL)
    ours = advantages(large, of_million, **GDPO)
    assert ours == pytest.approx(expected, abs=1e-6)


@given(draw_groups(st.sampled_from([0.0, 0.3, 1.0])))
def test_names_and_their_order_change_no_bit(groups: Groups) -> None:
    turned = [[dict(reversed(row.items())) for row in rows] for rows in groups]
    for algorithm in (GDPO, {}):
        ours = advantages(groups, {}, **algorithm)
        assert advantages(turned, {}, **algorithm) == ours


def test_gdpo_tells_apart_what_the_sum_does_not() -> None:
    """The paper's figure 2: in both groups of two, the sum gives -1 and 1."""
    groups: Groups = [
        [{"easy": 0.0, "hard": 0.0}, {"easy": 1.0, "hard": 0.0}],
        [{"easy": 0.0, "hard": 0.0}, {"easy": 1.0, "hard": 1.0}],
    ]
    one, two = advantages(groups, {})[1::2]
    assert one == pytest.approx(two, abs=1e-3)
    one, two = advantages(groups, {}, **GDPO)[1::2]
    assert two == pytest.approx(2 * one, rel=1e-3)


@given(
    st.lists(
        st.lists(st.floats(-1e6, 1e6), min_size=2, max_size=4), min_size=1, max_size=4
    ),
    st.sampled_from(["grpo", "grpo_sample", "lite_ppo", "rloo", "reinforce_pp"]),
)
def test_one_part_has_the_bits_of_a_number(
    groups: list[list[float]], advantage: str
) -> None:
    rows: Groups = [[{"only": reward} for reward in rewards] for rewards in groups]
    ours = advantages(rows, {}, advantage=advantage)
    numbers = [reward for rewards in groups for reward in rewards]
    place = count()
    units = [
        Unit(numbers[next(place)], number, sample, -1, "", "")
        for number, rewards in enumerate(groups)
        for sample, _ in enumerate(rewards)
    ]
    compare = Compare(AlgorithmConfig(advantage=advantage))
    reward_B = torch.tensor(numbers, dtype=torch.float64)
    assert ours == compare(units, reward_B).tolist()


def test_rollout_that_a_limit_cut_has_zero_in_each_part() -> None:
    rows = [{"a": 1.0, "b": 0.5}, {"a": 0.0, "b": 1.0}, {"a": 0.0, "b": 0.0}]
    expected = advantages([rows], {"b": 2.0}, **GDPO)  # type: ignore[list-item]
    units = [
        Unit(0.0, 0, n, -1, "", "", weighted(as_reward(row), {"b": 2.0}))  # type: ignore[arg-type]
        for n, row in enumerate(rows)
    ]
    units[2] = units[2]._replace(parts={})
    compare = Compare(AlgorithmConfig(**GDPO))  # type: ignore[arg-type]
    given = compare(units, torch.zeros(3, dtype=torch.float64))
    assert given.tolist() == expected
    # Samples with one number each have one part.
    units = [unit._replace(parts={}, reward=float(at)) for at, unit in enumerate(units)]
    (low, middle, high) = compare(units, torch.zeros(3, dtype=torch.float64)).tolist()
    assert (low, middle) == (-high, 0.0)


def test_trainer_gets_the_parts_of_each_trajectory() -> None:
    batch = make_batch(0, 3, 4)
    header, _ = unpack_batch(pack_batch(*pack_groups(batch)))
    given = [one.parts for group in batch.groups for one in group.trajectories]
    assert [dict(one.parts) for one in header.trajectories] == given
    assert {value for parts in given for value, _ in parts.values()} == {1.0, None}


# ---- what a reward may be


def test_reward_is_the_weighted_sum_of_its_parts() -> None:
    parts = weighted(as_reward({"a": 1, "b": True, "c": None}), {"a": 0.5, "c": 3.0})
    assert parts == {
        "a": RewardPart(1.0, 0.5),
        "b": RewardPart(1.0, 1.0),
        "c": RewardPart(None, 3.0),
    }
    assert (total(parts), total(0.25), weighted(0.25, {})) == (1.5, 0.25, 0.25)
    tenths = {str(at): RewardPart(0.1) for at in range(10)}
    assert total(tenths) == 1.0, "in any order the same bits"


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ({}, "of which no part is a number"),
        ({"a": None}, "of which no part is a number"),
        ({"a": "x"}, "returned for its part a 'x' .str., not a number"),
        ({"a": math.nan}, "returned for its part a nan; rewards are finite"),
        (
            {"a": RewardPart(1.0, "x")},
            "returned for its part a 'x' .str., not a number",
        ),  # type: ignore[arg-type]
        ({"a": RewardPart(1.0, math.inf)}, "returned for its part a inf; rewards are"),
        ({"a": {"b": 1.0}}, "part a .*not a number"),
        ({1: 1.0}, "the names of parts are texts"),
        ({"": 1.0}, "the names of parts are texts"),
        ({"a": 1.0}, "the parts a; task.reward_weights names b"),
        (1.0, "returned one number; task.reward_weights names b"),
        ({"b": 1e18}, "returned 2e.18; rewards are finite, and 1e.18 at most"),
    ],
)
def test_wrong_parts_are_named(value: Any, said: str) -> None:
    with pytest.raises(UserCodeFailed, match=said):
        weighted(as_reward(value), {"b": 2.0})


@pytest.mark.asyncio
async def test_scorer_weighs_parts_and_fails_what_lacks_them() -> None:
    rewards: list[Any] = [{"a": 1.0, "b": 2.0}, {"b": 1.0}, 0.5]
    scorer = make_scorer(lambda *_: rewards.pop(0), reward_weights={"a": 0.5})
    async with aclosing(scorer):
        found = await scorer.score(PROMPT, sampled("x"))
        assert found == {"a": RewardPart(1.0, 0.5), "b": RewardPart(2.0)}
        for said in ("the parts b", "one number"):
            with pytest.raises(RewardFailure, match=f"{said}; task.reward_weights"):
                await scorer.score(PROMPT, sampled("x"))

    def group(prompt: Any, completions: list[str | None]) -> list[Any]:
        return [{"a": 1.0}, {"b": 1.0}, 7.0]

    async with aclosing(make_scorer(group, reward_weights={"a": 3.0})) as scorer:
        first, second, third = await scorer.score_group(PROMPT, ["x", "y", None])
    assert (first, third) == ({"a": RewardPart(1.0, 3.0)}, 0.0)
    assert isinstance(second, RewardFailure)


FUNCTIONS = """
def exact(prompt, completion, answer):
    prompt.info["seen"] = prompt.info.get("seen", 0) + 1
    return float(completion == answer) + prompt.info["seen"] - 1
async def short(prompt, completion, answer):
    return 1 / len(completion)
def sure(prompt, completion, answer, sampled):
    prompt.info["seen"] = 100
    return sampled.behaviour_logprobs[0]
def group(prompt, completions, answer):
    return [0.0 for _ in completions]
def nested(prompt, completion, answer):
    return {"deep": 1.0}
"""


@pytest.fixture
def rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "part_rewards.py").write_text(FUNCTIONS)
    (tmp_path / "rows.jsonl").write_text('{"prompt": "say x", "answer": "x"}\n')
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def listed(*names: str, **more: Any) -> TaskConfig:
    reward = [name if name == "math" else f"part_rewards:{name}" for name in names]
    given = {"files": ["rows.jsonl"], "reward": reward, **more}
    return TaskConfig.model_validate(given)


@pytest.mark.parametrize("pool", ["inline", "thread", slow("process")])
@pytest.mark.asyncio
async def test_listed_functions_are_parts_in_every_pool(rows: Path, pool: Any) -> None:
    weights = {"short": 0.5}
    config = listed("short", "sure", "exact", reward_pool=pool, reward_weights=weights)
    scorer = TaskScorer(build_task(config, 0), config, TOKENIZER, seed=0)
    async with aclosing(scorer):
        found = await scorer.score(PROMPT, sampled("x"))
    # Each got a prompt of its own.
    assert found == {
        "exact": RewardPart(1.0),
        "short": RewardPart(1.0, 0.5),
        "sure": RewardPart(-0.5),
    }


@pytest.mark.asyncio
async def test_failures_of_listed_functions_name_the_part(rows: Path) -> None:
    config = listed("exact", "nested", "short", reward_pool="inline")
    task = build_task(config, 0)
    async with aclosing(TaskScorer(task, config, TOKENIZER, seed=0)) as scorer:
        with pytest.raises(
            RewardFailure, match=r"part nested .*(.|\n)*exact, part_rew"
        ):
            await scorer.score(PROMPT, sampled("x"))
    with pytest.raises(ConfigError, match="group'. has a function that takes the c"):
        build_task(listed("exact", "group"), 0)
    config = listed("exact", "short", reward_pool="inline")
    (found,) = try_reward(build_task(config, 0), PROMPT, ["x"], {"exact": 2.0})
    assert found == {"exact": RewardPart(1.0, 2.0), "short": RewardPart(1.0)}
    (failure,) = try_reward(build_task(config, 0), PROMPT, ["x"], {"exakt": 2.0})
    assert "task.reward_weights names exakt" in str(failure)


# ---- harnesses, and rewards that are posted later


def test_harness_gives_parts_with_weights_of_its_own_or_of_the_task() -> None:
    given = {"tests": 1.0, "style": RewardPart(0.5, 4.0), "speed": None}
    host = FakeHost(Outcome(given))
    host.weights = {"tests": 0.25}
    (branch,) = run_harness(host)
    assert branch.reward == 0.25 + 2.0
    assert branch.parts["style"] == RewardPart(0.5, 4.0)
    assert branch.parts["tests"] == RewardPart(1.0, 0.25)
    host = FakeHost(Outcome({"test": 1.0}))
    host.weights = {"tests": 0.25}
    failed = run_harness(host)
    said = (
        "its harness or a post returned the parts test; task.reward_weights names tests"
    )
    assert said in str(failed.failure)


TURNS = {
    "chatcmpl-0": {"tool": 1.0, "style": None},
    "chatcmpl-1": {"tool": 0.0, "style": 0.5},
}
WRONG_TURNS: list[tuple[Any, dict[str, float], str]] = [
    ({"a": {"tool": 1.0}, "b": {"style": 1.0}}, {}, "with other parts: style and tool"),
    ({"a": {"tool": 1.0}, "b": 1.0}, {}, "with other parts: none and tool"),
    ({"a": {"style": 1.0}}, {"tool": 0.5}, "task.reward_weights names tool"),
]


def test_turns_earn_parts_and_the_rollout_their_means() -> None:
    host = FakeHost(Outcome(turn_rewards=TURNS))
    host.weights = {"tool": 0.25}
    (branch,) = run_harness(host)
    assert branch.parts == {"tool": RewardPart(0.5, 0.25), "style": RewardPart(0.5)}
    assert branch.reward == 0.625
    plain = FakeHost(Outcome(turn_rewards={"a": 1.0, "b": 0.0}))
    plain.weights = {"tool": 0.25}
    (branch,) = run_harness(plain)
    assert (branch.reward, branch.parts) == (0.5, {})


@pytest.mark.parametrize(("turns", "weights", "said"), WRONG_TURNS)
def test_turns_with_other_parts_fail_the_rollout(
    turns: Any, weights: dict[str, float], said: str
) -> None:
    host = FakeHost(Outcome(turn_rewards=turns))
    host.weights = weights
    assert said in str(run_harness(host).failure)


@pytest.mark.parametrize("later", [False, True])
def test_parts_of_turns_reach_the_trainer_and_gdpo(later: bool) -> None:
    """In one group, the turns of two rollouts are four samples."""
    given = [[(1.0, 0.2), (0.0, 0.8)], [(1.0, 0.6), (1.0, 0.1)]]
    branches = []
    for sample, turns in enumerate(given):
        capture = conversation(*(True for _ in turns)).capture
        rewards = {
            f"chatcmpl-{number}": {"exact": exact, "form": form}
            for number, (exact, form) in enumerate(turns)
        }
        outcome = Outcome(turn_rewards=rewards)
        known = weighted_outcome(outcome, {"form": 0.5})
        (branch,) = capture.rollout(sample, known, 0.0)
        if later:
            (bare,) = capture.rollout(sample, Outcome(), 0.0)
            unpaid = (replace(bare, awaits="digest"),)
            (paid,) = with_outcome(unpaid, outcome, {"form": 0.5})
            assert paid.credits == branch.credits
            branch = paid
        blob = encode_trajectory(0, branch)
        again = decode_trajectory(blob, 0, sample, 0)
        assert again.credits == branch.credits
        branches.append(again)
    group = Group(GroupId(0), PROMPT, tuple(branches))
    header, arrays = pack_groups(Batch(0, (group,), 0))
    header, arrays = unpack_batch(pack_batch(header, arrays))
    units, _ = find_units(header, len(arrays))
    reward_B = torch.tensor([unit.reward for unit in units], dtype=torch.float64)
    found = Compare(AlgorithmConfig(**GDPO))(units, reward_B).tolist()  # type: ignore[arg-type]
    rows: Groups = [
        [{"exact": exact, "form": form} for turns in given for exact, form in turns]
    ]
    assert found == pytest.approx(plain_gdpo(rows, {"form": 0.5}, *TRL), abs=1e-6)


def test_filter_compares_the_parts_of_turns() -> None:
    """The means of both rollouts are equal, and their turns are not."""
    buffer = make_buffer(filter="equal_rewards", compares_parts=True)
    buffer.admit_nowait()
    group = make_group(0, [0], [0], rewards=[0.5, 0.5])
    rows = [{"exact": 1.0, "form": 0.0}, {"exact": 0.0, "form": 1.0}]
    credits = tuple(
        Credit(place, place + 1, 0.0, place).paid(as_reward(row))
        for place, row in enumerate(rows)
    )
    branches = [replace(one, credits=credits) for one in group.trajectories]
    group = replace(group, trajectories=tuple(branches))
    assert buffer.finish_nowait(group) == "ready"


def test_results_of_harbor_are_parts_beside_the_reward() -> None:
    assert parts_of({"reward": 0.5}) == 0.5
    beside = parts_of({"reward": 1.0, "style": 0.5})
    assert beside == {"reward": RewardPart(1.0), "style": RewardPart(0.5, 0.0)}
    assert total(weighted(as_reward(beside), {})) == 1.0
    assert total(weighted(as_reward(beside), {"style": 0.5})) == 1.25
    assert parts_of({"a": 1.0, "b": 0.5}) == {
        "a": RewardPart(1.0),
        "b": RewardPart(0.5),
    }


def test_posted_parts_are_the_reward() -> None:
    waits = (replace(one_token(0, reward=0.0), awaits="digest"),)
    given = Outcome({"thumb": 1.0, "tone": 0.5})
    (branch,) = with_outcome(waits, given, {"tone": 2.0})
    assert (branch.reward, branch.awaits) == (2.0, None)
    assert branch.parts == {"thumb": RewardPart(1.0), "tone": RewardPart(0.5, 2.0)}
    with pytest.raises(RewardFailure, match="the parts thumb, tone; task.reward_wei"):
        with_outcome(waits, given, {"tune": 2.0})


def test_evaluation_means_parts_over_samples_to_which_they_apply() -> None:
    given: list[Row] = [{"a": 1.0, "b": None}, {"a": 0.0, "b": 0.5}]
    rollouts = [(replace(one_token(0), parts=as_reward(row)),) for row in given]
    metrics = EvalResult(3, [("0/1", rollout) for rollout in rollouts]).metrics()
    assert (metrics["eval/part/a"], metrics["eval/part/b"]) == (0.5, 0.5)


# ---- groups


@virtual
async def test_group_whose_rollouts_name_other_parts_fails_with_them() -> None:
    calls = count()

    def forgets(prompt: Any, text: str) -> Any:
        if next(calls) % 2:
            return {"exact": RewardPart(1.0)}
        return {"exact": RewardPart(0.0), "form": RewardPart(0.5)}

    scorer: Any = FakeScorer(forgets)
    with pytest.raises(ExceptionGroup) as ended:
        async with World(scorer=scorer, scorers=scorer, max_failed_groups=2):
            await asyncio.sleep(60)
    (error,) = ended.value.exceptions
    assert isinstance(error, TaskError)
    assert "rollouts without the parts of the reward form" in str(error)
    assert "None is for one that does not apply" in str(error)


def with_parts(group: Any, *rows: Row) -> Any:
    branches = []
    for one, row in zip(group.trajectories, rows, strict=True):
        parts: Any = as_reward(row) if row else {}
        branches.append(replace(one, parts=parts, reward=total(parts) if row else 0.0))
    return replace(group, trajectories=tuple(branches))


@pytest.mark.parametrize(
    ("rows", "by_sum", "by_parts", "by_exact"),
    [
        # Equal sums of unequal parts teach nothing as a sum.
        (({"exact": 1, "form": 0}, {"exact": 0, "form": 1}), True, False, False),
        (({"exact": 1, "form": 0}, {"exact": 1, "form": 1}), False, False, True),
        (({"exact": 1, "form": 0}, {"exact": 1, "form": 0}), True, True, True),
        (({"exact": None, "form": 0}, {"exact": 1, "form": 1}), False, False, True),
        # A limit cut the second.
        (({"exact": 1, "form": 0}, {}), False, False, False),
        (({"exact": 0, "form": 1}, {}), False, False, True),
    ],
)
def test_filter_compares_what_the_trainer_does_or_one_part(
    rows: tuple[Row, Row], by_sum: bool, by_parts: bool, by_exact: bool
) -> None:
    for filter_by, compares_parts, is_filtered in (
        ("equal_rewards", False, by_sum),
        ("equal_rewards", True, by_parts),
        ({"part": "exact"}, False, by_exact),
    ):
        buffer = make_buffer(filter=filter_by, compares_parts=compares_parts)
        buffer.admit_nowait()
        group = with_parts(make_group(0, [0], [0], rewards=[0.0, 0.0]), *rows)
        expected = "filtered" if is_filtered else "ready"
        assert buffer.finish_nowait(group) == expected, filter_by


def test_filter_by_an_unknown_part_ends_the_run_with_the_names() -> None:
    buffer = make_buffer(filter={"part": "exakt"})
    buffer.admit_nowait()
    group = with_parts(
        make_group(0, [0], [0], rewards=[0.0, 0.0]),
        {"exact": 1, "form": 0},
        {"exact": 1, "form": 1},
    )
    with pytest.raises(TaskError, match="no part exakt, but .'exact', 'form'"):
        buffer.finish_nowait(group)


# ---- runs

HELD = "held_task:HeldLetters"
SECTIONS: dict[str, Any] = {
    "task": {
        "python": "held_task:HeldParts",
        "size": 200,
        "reward_weights": {"letters": 1.0, "digits": 0.5},
    },
    "buffer": {"max_staleness": 0, "filter": {"part": "letters"}},
    "algorithm": {"rewards": "normalize_then_sum"},
    "checkpoint": {"every": 2},
}


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_killed_run_with_group_rewards_of_parts_ends_like_another(
    tmp_path: Path,
) -> None:
    """Parts × rewards of a group × a filter by one part × a kill during the rewards."""
    config = write_config(tmp_path, **SECTIONS, trainer={"num_steps": 5})
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    ended = run(config, whole)
    assert ended.returncode == 0, ended.stderr
    held_task.hold(killed, 3)
    process = start(config, killed)
    with process:
        wait_for_steps(killed, 3, process)
        process.kill()
        process.communicate()
    held_task.release(killed)
    resumed = run(config, killed)
    assert resumed.returncode == 0, resumed.stderr
    assert differences(whole, killed, of_metrics=False) == []
    for folder in (whole, killed):
        lines = read_lines(folder / "metrics.jsonl")
        for line in lines:
            letters, digits = (
                line[f"reward/part/{name}"] for name in ("letters", "digits")
            )
            first = line["reward/mean"] - letters - 0.5 * digits
            assert 0 < first < 0.1 == line["reward/part/first"]
    samples = read_lines(killed / "samples.jsonl")
    assert {*samples[0]["rewards"]} <= {"letters", "digits", "first"}
    text = inspect(killed, samples=True)
    assert "letters " in text
    (story,) = [json.loads(inspect(killed, group=0, as_json=True))["story"]]
    for rollout in story["rollouts"]:
        values = rollout["rewards"]
        expected = values["letters"] + 0.5 * values["digits"] + values.get("first", 0)
        assert rollout["reward"] == pytest.approx(expected)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_streamed_steps_sum_parts_to_the_same_bits(tmp_path: Path) -> None:
    """And one part of weight 1 is the run of a plain number. (GDPO's batches are whole.)"""
    task = {"python": "held_task:PartLetters", "size": 200}
    config = write_config(tmp_path, task=task, trainer={"num_steps": 4})
    streamed, *others = (tmp_path / name for name in ("auto", "off", "number"))
    changes = ("trainer.stream=auto", "trainer.stream=off", f"task.python={HELD}")
    for folder, change in zip((streamed, *others), changes, strict=True):
        ended = run(config, folder, change)
        assert ended.returncode == 0, ended.stderr
    for other in others:
        assert differences(streamed, other, of_metrics=False) == []
