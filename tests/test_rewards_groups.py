"""A reward of the whole group: in every pool, with failures, after a kill, and in
evaluations.
"""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import held_task
import pytest
from costly_cases import slow
from crash_fuzz import differences
from fakes import FakeEngine
from job_runs import run, start, wait_until, write_config
from journal_cases import admit, asked, make_rollout, with_journal
from producer_cases import FakeHost, World, run_harness
from rollout_cases import make_held_out, one_token, single_turn, virtual
from scorer_cases import PROMPT, TOKENIZER, make_scorer

from asyncrl.base.errors import ConfigError, RewardFailure
from asyncrl.config import TaskConfig
from asyncrl.job.check.reward_trial import try_reward
from asyncrl.journal.journal import Journal
from asyncrl.journal.read import group_story, read_resume
from asyncrl.messages.records import (
    Credit,
    GroupId,
    Outcome,
    Prompt,
    Rollout,
    Ticket,
    UnfinishedGroup,
)
from asyncrl.rollouts.rollout import score_group
from asyncrl.tasks import TaskScorer, build_task
from asyncrl.tasks.rewards import UserCodeFailed, as_rewards

TEXTS = ["aa", None, "bbbb", "c"]
SHARES = [2 / 7, 0.0, 4 / 7, 1 / 7]


class Groups:
    """A scorer of whole groups, in place of Scorers; notes what it is asked."""

    def __init__(self, score: Callable[..., Any], **settings: Any) -> None:
        self.asked = list[list[str | None]]()

        async def score_group(prompt: Prompt, completions: list[str | None]) -> Any:
            self.asked.append(list(completions))
            await asyncio.sleep(1.0)
            return score(completions)

        task = SimpleNamespace(score_group=score_group)
        config = TaskConfig(python="x:y", reward_pool="inline", **settings)
        self.scorer = TaskScorer(task, config, TOKENIZER, seed=0)  # type: ignore[arg-type]

    def of(self, prompt: Prompt) -> TaskScorer:
        return self.scorer


def world(groups: Groups, **settings: Any) -> World:
    values = {"group_size": 3, "retries": 0, "num_tickets": 1, "capacity": 3} | settings
    return World(scorer=groups, scorers=groups, **values)


# ---- calls


def test_only_a_number_for_each_completion_is_a_reward_of_a_group() -> None:
    assert as_rewards([1, "x", True], ["a", None, "b"]) == [1.0, 0.0, 1.0]
    first, second = as_rewards([float("nan"), 0.5], ["a", "b"])
    assert (str(first)[:12], second) == ("returned nan", 0.5)
    for value in ([0.5], None, 0.5, "ab", {"a": 1.0, "b": 2.0}):
        with pytest.raises(UserCodeFailed, match="^returned "):
            as_rewards(value, ["a", "b"])


REWARDS = """
    def shares(prompt, completions, answer):
        texts = [text or "" for text in completions]
        return [len(text) / sum(map(len, texts)) for text in texts]
    async def later(prompt, completions, answer):
        return shares(prompt, completions, answer)
    def short(prompt, completions, answer):
        return [1.0]
    def asks(prompt, completions, answer, sampled):
        return []
"""


@pytest.fixture
def rewards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "group_rewards.py").write_text(REWARDS.replace("\n    ", "\n"))
    (tmp_path / "rows.jsonl").write_text('{"prompt": "say x", "answer": "x"}\n')
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    "pool",
    ["inline", "thread", slow("process")],
)
@pytest.mark.asyncio
async def test_group_is_scored_in_every_pool(rewards: Path, pool: Any) -> None:
    for name in ("shares", "later"):
        config = TaskConfig(
            files=["rows.jsonl"], reward=f"group_rewards:{name}", reward_pool=pool
        )
        scorer = TaskScorer(build_task(config, 0), config, TOKENIZER, seed=0)
        async with aclosing(scorer):
            assert scorer.scores_groups
            assert await scorer.score_group(PROMPT, TEXTS) == SHARES
    config = TaskConfig(
        files=["rows.jsonl"], reward="group_rewards:short", reward_pool=pool
    )
    async with aclosing(
        TaskScorer(build_task(config, 0), config, TOKENIZER, seed=0)
    ) as scorer:
        said = "0/7 returned 1 rewards for 4 .*(.|\n)*correct the reward function group_rewards:short"
        with pytest.raises(RewardFailure, match=said):
            await scorer.score_group(PROMPT, TEXTS)


def test_group_reward_is_checked_before_training(rewards: Path) -> None:
    config = TaskConfig(files=["rows.jsonl"], reward="group_rewards:asks")
    with pytest.raises(ConfigError, match=r"score_group\(prompt, completions, answer"):
        build_task(config, 0)
    config = TaskConfig(files=["rows.jsonl"], reward="group_rewards:shares")
    task = build_task(config, 0)
    assert try_reward(task, PROMPT, ["abc", "d"]) == [0.75, 0.25]
    short = build_task(config.model_copy(update={"reward": "group_rewards:short"}), 0)
    failures = try_reward(short, PROMPT, ["abc", "d"])
    assert [type(failure) for failure in failures] == [UserCodeFailed] * 2


def test_single_reward_is_no_reward_of_a_group() -> None:
    def one(prompt: Prompt, completion: str, completions: str = "") -> float:
        return 1.0

    def several(prompt: Prompt, completions: list[str]) -> list[float]:
        return [1.0]

    found = [make_scorer(function).scores_groups for function in (one, several)]
    assert found == [False, True]


# ---- groups


@virtual
async def test_group_is_scored_once_after_its_last_rollout() -> None:
    groups = Groups(lambda texts: [1.0, 2.0, 3.0])
    latencies = iter([1.0, 5.0, 2.0])
    engine = FakeEngine(latency_s=lambda _: next(latencies))
    async with world(groups, engine=engine) as run:
        await asyncio.sleep(4.9)
        assert (run.count("finished"), groups.asked) == (0, [])
        await asyncio.sleep(0.2)
        assert groups.asked == [["zzzz"] * 3]
        await asyncio.sleep(1.0)
        assert run.count("finished") == 3
    (group,) = run.sink.finished
    assert [branch.reward for branch in group.trajectories] == [1.0, 2.0, 3.0]
    assert {branch.unscored for branch in group.trajectories} == {None}
    names = [event[0] for event in run.journal.events]
    assert names[-2:] == ["add_scores", "end_group"]


@virtual
async def test_group_without_its_rewards_does_not_wait_for_teachers() -> None:
    async def annotate(rollout: Rollout, *_: Any) -> Rollout:
        await asyncio.sleep(1)
        return rollout

    groups = Groups(lambda texts: [1.0, 2.0, 3.0])
    async with world(groups, engine=FakeEngine(), judge=annotate) as run:
        await asyncio.sleep(100)
    assert {phase for _, phase in run.sink.phases} == {"scoring"}
    assert len(run.sink.finished) == 1


FAILS = [
    (lambda texts: [1.0], 3, "returned 1 rewards for 3 completions"),
    (lambda texts: texts.clear() or texts, 3, "returned 0 rewards for 3 completions"),
    (lambda texts: {}["no"], 3, "raised KeyError"),
    (lambda texts: [float("inf"), 1.0, 2.0], 1, "returned inf"),
    (lambda texts: [1.0, None, "x"], 2, "returned 'x'"),
]


@pytest.mark.parametrize(("score", "num_failed", "words"), FAILS)
def test_bad_result_costs_rollouts_and_never_the_run(
    score: Callable[..., Any], num_failed: int, words: str
) -> None:
    @virtual
    async def story() -> None:
        async with world(Groups(score), max_failed_groups=9) as run:
            await asyncio.sleep(2.5)
            assert run.count("failed") == num_failed
            assert words in run.producers.last_failure
            assert "x:y" in run.producers.last_failure
            (event,) = run.journal.named("add_scores")
            assert (len(event[2]), len(event[3])) == (3 - num_failed, num_failed)
            assert len(run.sink.finished) == (num_failed == 1)

    story()


@virtual
async def test_group_reward_sees_which_rollouts_failed() -> None:
    groups = Groups(lambda texts: [1.0, 0.0, 3.0])

    def latency_s(request: Any) -> float:
        return 1000.0 if "/r1/" in request.request_id else 1.0

    engine = FakeEngine(latency_s=latency_s)
    async with world(groups, engine=engine, timeout_s=10.0) as run:
        await asyncio.sleep(12.0)
    assert groups.asked == [["zzzz", None, "zzzz"]]
    (group,) = run.sink.finished
    found = [(branch.sample_index, branch.reward) for branch in group.trajectories]
    assert found == [(0, 1.0), (2, 3.0)]


@virtual
async def test_revoked_group_ends_the_call_of_its_reward() -> None:
    groups = Groups(lambda texts: [1.0] * 3)
    async with world(groups) as run:
        await asyncio.sleep(1.5)
        assert len(groups.asked) == 1
        run.producers.on_requeued(GroupId(0), None, "dropped")
        await asyncio.sleep(5.0)
    assert run.journal.named("add_scores") == []
    assert run.sink.finished == []


def test_reward_of_an_agent_wins_over_the_group() -> None:
    host = FakeHost(Outcome(0.5))
    host.scores_groups = True
    host.text_of = lambda sampled: "the answer"  # type: ignore[attr-defined]
    assert run_harness(host)[0].unscored is None
    host = FakeHost(Outcome())
    host.scores_groups = True
    host.text_of = lambda sampled: "the answer"  # type: ignore[attr-defined]
    (branch,) = run_harness(host)
    assert (branch.unscored, branch.reward) == ("the answer", 0.0)


@virtual
async def test_evaluation_scores_the_samples_of_each_prompt() -> None:
    groups = Groups(lambda texts: [1.0] * len(texts) if len(texts) == 2 else [])
    prompts = [Prompt(f"0/{index}", PROMPT.messages) for index in range(3)]
    held_out = make_held_out(
        single_turn(FakeEngine(), groups), prompts, scorers=groups, last=9
    )
    result = await held_out.evaluate(0)
    assert result.metrics()["eval/reward_mean"] == 1.0
    assert groups.asked == [["zzzz"] * 2] * 3
    groups = Groups(lambda texts: [float("nan"), 0.5])
    held_out = make_held_out(
        single_turn(FakeEngine(), groups), prompts, scorers=groups, last=9
    )
    result = await held_out.evaluate(0)
    assert (result.num_failed, result.metrics()["eval/reward_mean"]) == (3, 0.5)


# ---- the journal


@virtual
async def test_last_turn_earns_what_the_group_reward_gives() -> None:
    groups = Groups(lambda texts: [float(len(text)) for text in texts])
    first, other = (
        replace(one_token(0, reward=0.0), branch=branch, credits=(credit,))
        for branch, credit in enumerate((Credit(1, 2, 0.0, 8), Credit(1, 2, 0.0, 3)))
    )
    rollouts = {0: (replace(first, unscored="four"), other)}
    scored = (await score_group(groups.scorer, PROMPT, rollouts, 1))[0]
    assert isinstance(scored, tuple)
    assert [branch.reward for branch in scored] == [4.0, 4.0]
    assert [branch.credits[0].reward for branch in scored] == [4.0, 0.0]


def unscored(group_id: int, index: int) -> Rollout:
    first, *others = make_rollout(group_id, index, version=3 - index)
    text = f"answer {index} \ud800"
    branches = (replace(first, unscored=text), *others)
    return tuple(replace(branch, reward=0.0) for branch in branches)


def test_journal_holds_a_group_unscored_then_scored_whole(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
    rollouts = [unscored(0, index) for index in range(4)]

    async def sampled(journal: Journal) -> None:
        admit(journal, 0)
        for rollout in rollouts[:3]:
            journal.add_rollout_nowait(GroupId(0), rollout)
        journal.add_failure_nowait(GroupId(0), 3, 1, "it timed out")

    async def scored(journal: Journal) -> None:
        done = [
            tuple(replace(branch, reward=2.5, unscored=None) for branch in rollout)
            for rollout in rollouts[:2]
        ]
        journal.add_scores_nowait(GroupId(0), done, {2: "no grade"}, 5.0)

    with_journal(path, sampled)
    before = read_resume(path, 0)
    (group,) = before.running
    assert [group.rollouts[index][0].unscored for index in range(3)] == [
        rollout[0].unscored for rollout in rollouts[:3]
    ]
    with_journal(path, scored)
    after = read_resume(path, 0)
    (group,) = after.running
    rewards = {
        index: {(branch.reward, branch.unscored) for branch in rollout}
        for index, rollout in group.rollouts.items()
    }
    assert rewards == {0: {(2.5, None)}, 1: {(2.5, None)}}
    assert group.failures == {2: (1, "no grade"), 3: (1, "it timed out")}
    story = asked(path, group_story, 0)
    assert (story["reward_mean"], story["oldest_version"]) == (2.5, 2)
    counted = "tokens/generated"
    assert after.counted[counted] == before.counted[counted], "none is lost"
    assert after.counted["rollout/failed"] == 2

    async def without_grades(journal: Journal) -> None:
        journal.add_scores_nowait(
            GroupId(0), [], dict.fromkeys(range(2), "no grade"), -5.0
        )

    with_journal(path, without_grades)
    story = asked(path, group_story, 0)
    assert (story["num_rollouts"], story["oldest_version"]) == (0, None)


def test_late_rewards_of_a_requeued_group_change_nothing(tmp_path: Path) -> None:
    async def story(journal: Journal) -> None:
        admit(journal, 0)
        journal.add_rollout_nowait(GroupId(0), unscored(0, 0))
        journal.end_group_nowait(GroupId(0), "requeued", "dropped")
        journal.add_scores_nowait(GroupId(0), [], {0: "no grade"}, 0.0)

    path = with_journal(tmp_path / "journal.sqlite", story)
    with contextlib.closing(sqlite3.connect(path)) as connection:
        row = connection.execute("SELECT num_rollouts, num_failed FROM groups")
        assert row.fetchone() == (1, 0)


@virtual
async def test_resumed_group_is_scored_only_if_the_journal_lacks_it() -> None:
    def resumed(run: World, rollouts: Sequence[Any]) -> None:
        whole = {branch.sample_index: (branch,) for branch in rollouts}
        ticket = Ticket(GroupId(7), 0)
        run.producers.resume_nowait(UnfinishedGroup(ticket, PROMPT, whole))

    groups = Groups(lambda texts: [1.0, 2.0])
    lacks = [replace(one_token(index, reward=0.0), unscored="q") for index in range(2)]
    for rollouts in (lacks, [one_token(index) for index in range(2)]):
        async with world(groups, group_size=2, num_tickets=0) as run:
            run.journal.states[GroupId(7)] = "running"
            resumed(run, rollouts)
            await asyncio.sleep(1.5)
        (group,) = run.sink.finished
        assert run.engine.requests == []
    assert groups.asked == [["q", "q"]]
    assert [branch.reward for branch in group.trajectories] == [0.5, 0.5]


LESSON = "teacher_logprobs"


def taught_by(told: list[Any], *, fails: float = -1.0) -> Any:
    """Return a group's annotation that notes what it is told, and fails for a reward."""

    async def annotate(
        rollout: Rollout, prompt: Prompt, siblings: Sequence[Rollout]
    ) -> Rollout:
        rewards = [other[0].reward for other in siblings]
        told.append((rollout[0].sample_index, rollout[0].reward, rewards))
        await asyncio.sleep(1.0)
        (branch,) = rollout
        if branch.reward == fails:
            raise RewardFailure("it has nothing to read")
        values = branch.tokens.behaviour_logprobs - 1
        tokens = branch.tokens.with_columns({LESSON: values})
        return (replace(branch, tokens=tokens),)

    return {"annotations": [annotate], "columns": frozenset({LESSON})}


@virtual
async def test_group_is_annotated_after_its_rewards() -> None:
    told = list[Any]()
    groups = Groups(lambda texts: [1.0, 2.0, 3.0])
    async with world(groups, **taught_by(told, fails=2.0)) as run:
        await asyncio.sleep(100)
    assert sorted(told) == [
        (0, 1.0, [2.0, 3.0]),
        (1, 2.0, [1.0, 3.0]),
        (2, 3.0, [1.0, 2.0]),
    ]
    (group,) = run.sink.finished
    assert [branch.reward for branch in group.trajectories] == [1.0, 3.0]
    assert all(LESSON in branch.tokens.columns for branch in group.trajectories)
    assert run.sink.phases[-1][1] == "teaching"
    assert run.count("finished") == 3
    scored, annotated = run.journal.named("add_scores")
    # The sum of rewards: six, less the reward of the rollout that failed.
    assert (scored[-1], annotated[-1]) == (6.0, -2.0)
    assert [*annotated[3]] == [1]


@virtual
async def test_resumed_group_is_annotated_only_if_the_journal_lacks_it() -> None:
    told = list[Any]()
    groups = Groups(lambda texts: [])
    whole = {index: (one_token(index),) for index in range(2)}
    for num_told in (2, 2):
        async with world(groups, group_size=2, num_tickets=0, **taught_by(told)) as run:
            run.journal.states[GroupId(7)] = "running"
            ticket = Ticket(GroupId(7), 0)
            run.producers.resume_nowait(UnfinishedGroup(ticket, PROMPT, whole))
            await asyncio.sleep(1.5)
        (group,) = run.sink.finished
        assert (run.engine.requests, len(told)) == ([], num_told)
        whole = {branch.sample_index: (branch,) for branch in group.trajectories}
    assert run.journal.named("add_scores") == []


@virtual
async def test_revoked_group_ends_its_annotation() -> None:
    told = list[Any]()
    groups = Groups(lambda texts: [1.0, 2.0, 3.0])
    async with world(groups, **taught_by(told)) as run:
        await asyncio.sleep(2.5)
        assert len(told) == 3
        run.producers.on_requeued(GroupId(0), None, "dropped")
        await asyncio.sleep(100)
    assert run.sink.finished == []
    assert len(run.journal.named("add_scores")) == 1


@virtual
async def test_resumed_group_may_be_larger_than_the_new_group_size() -> None:
    groups = Groups(lambda texts: [1.0 * at for at in range(len(texts))])
    whole = {
        index: (replace(one_token(index, reward=0.0), unscored="q"),)
        for index in range(4)
    }
    async with world(groups, group_size=2, num_tickets=0) as run:
        run.journal.states[GroupId(7)] = "running"
        ticket = Ticket(GroupId(7), 0)
        run.producers.resume_nowait(UnfinishedGroup(ticket, PROMPT, whole))
        await asyncio.sleep(1.5)
    (group,) = run.sink.finished
    assert [branch.reward for branch in group.trajectories] == [0.0, 1.0, 2.0, 3.0]


@virtual
async def test_fault_of_a_pool_costs_rollouts_and_never_the_run() -> None:
    groups = Groups(lambda texts: [])

    async def broken(*_: Any) -> Any:
        raise AttributeError("Can't pickle local object")

    groups.scorer.score_group = broken  # type: ignore[method-assign]
    async with world(groups, max_failed_groups=9) as run:
        await asyncio.sleep(2.5)
        assert run.count("failed") == 3
        assert "raised AttributeError: Can't pickle" in run.producers.last_failure


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_run_killed_during_the_reward_of_a_group_ends_like_another(
    tmp_path: Path,
) -> None:
    config = write_config(
        tmp_path,
        task={"python": "held_task:HeldGroups"},
        trainer={"num_steps": 5},
        checkpoint={"every": 2},
    )
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert run(config, whole).returncode == 0
    held_task.hold(killed, 3)
    process = start(config, killed)

    def waits_for_rewards() -> bool:
        with contextlib.suppress(sqlite3.Error):
            path = f"file:{killed / 'journal.sqlite'}?mode=ro"
            with contextlib.closing(sqlite3.connect(path, uri=True)) as connection:
                query = "SELECT count(*) FROM groups WHERE num_rollouts = 4 AND state = 'running'"
                return bool(connection.execute(query).fetchone()[0] == 4)
        return False

    with process:
        wait_until(waits_for_rewards, process)
        process.kill()
        process.communicate()
    held_task.release(killed)
    resumed = run(config, killed)
    assert resumed.returncode == 0, resumed.stderr
    assert differences(whole, killed, of_metrics=False) == []
