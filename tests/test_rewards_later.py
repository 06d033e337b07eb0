"""Rewards that programs post for finished rollouts, hours later."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fakes import FakeSource, MemoryJournal
from job_runs import ROOT, read_lines, start, variant, wait_until, write_config
from journal_cases import admit, make_rollout, with_journal
from late_cases import Desk, watched
from producer_cases import FakeHost
from rollout_cases import FakeSink, make_producers, one_token, virtual

from asyncrl.base.errors import ConfigError, RewardFailure, RolloutFailure
from asyncrl.base.failures import FailureKind
from asyncrl.base.http import Refused
from asyncrl.base.waits import open_waits
from asyncrl.buffer.buffer import Buffer
from asyncrl.config import BufferConfig, GeneratorConfig, load_config
from asyncrl.job.serve import serve_gateway
from asyncrl.journal.journal import Journal
from asyncrl.journal.read import read_resume
from asyncrl.messages.records import (
    Credit,
    GroupId,
    Outcome,
    PolicyCall,
    Prompt,
    RewardPart,
    Ticket,
    UnfinishedGroup,
    Work,
)
from asyncrl.observe.watchdog import Reported
from asyncrl.rollouts.late_rewards import LateRewards
from asyncrl.rollouts.producers import Producers
from asyncrl.rollouts.rollout import HarnessGenerator
from asyncrl.testing.virtual_time import all_blocked
from examples import thumbs

HOUR_S = 3600.0


class Application:
    """Producers whose agents end without a reward, and a program that posts rewards by
    the route of the work queue.
    """

    def __init__(self, *, sink: Any = None, **settings: Any) -> None:
        self.tasks = asyncio.TaskGroup()
        self.sink = sink or FakeSink(settings.pop("num_tickets", 1))
        self.journal = MemoryJournal()
        timeout_s = settings.pop("outcome_timeout_s", 24 * HOUR_S)
        self.late = LateRewards(self.journal, timeout_s=timeout_s)  # type: ignore[arg-type]
        self.late.is_open = True
        harness = GeneratorConfig(remote=True, outcomes="later")
        self.desk = Desk(harnesses=[harness], late=self.late)
        self.host = FakeHost(
            Outcome(metrics={"turns": 2.0}), **settings.pop("host", {})
        )
        generator = HarnessGenerator(self.host, self.host, self.host, late=self.late)  # type: ignore[arg-type]
        values = {"group_size": 3, "capacity": 3, "timeout_s": 10.0} | settings
        self.producers: Producers = make_producers(
            self.sink,
            self.tasks.create_task,
            generator,
            source=FakeSource(),
            journal=self.journal,
            late=self.late,
            **values,
        )

    @property
    def keys(self) -> list[str]:
        return [work.outcome_key or "" for work in self.host.works]

    async def post(self, key: str, reward: float = 1.0) -> tuple[int, str]:
        return await self.post_body(key, {"reward": reward})

    async def post_body(self, key: str, body: Any) -> tuple[int, str]:
        content = json.dumps(body).encode()
        status, answer = await self.desk.call("/v1/outcome", content, key)
        if status == 400:
            return status, answer["message"]
        return status, getattr(answer, "error", "")


@contextlib.asynccontextmanager
async def application(**settings: Any) -> AsyncIterator[Application]:
    app = Application(**settings)
    async with app.tasks:
        running = app.tasks.create_task(app.producers.run(), name="producers")
        yield app
        running.cancel()
        await app.producers.aclose()


# ---- rollouts that wait


@virtual
async def test_rollouts_wait_for_hours_without_a_slot_or_a_limit() -> None:
    async with application(num_tickets=2) as app:
        await asyncio.sleep(5 * HOUR_S)  # rollout.timeout_s is 10
        # The second group was sampled although the first holds its admission.
        assert len(app.keys) == 6
        assert app.late.gauges() == {"reward/awaited": 6, "reward/posted": 0}
        assert app.sink.finished == []
        waits = [str(wait) for wait, _ in open_waits()]
        assert "rewards to be posted" in waits
        for reward, key in enumerate(app.keys[:3]):
            assert await app.post(key, reward) == (200, "")
        await all_blocked()
        (group,) = app.sink.finished
        found = [(one.reward, one.awaits, one.metrics) for one in group.trajectories]
        assert found == [(reward, None, {"turns": 2.0}) for reward in (0, 1, 2)]
        assert app.late.gauges() == {"reward/awaited": 3, "reward/posted": 3}
    # Each reward is in the journal before its group has ended.
    events = [event[0] for event in app.journal.events]
    assert events.index("end_group") > events.index("add_scores")
    assert events.count("add_scores") == 3


@virtual
async def test_reward_posted_before_the_end_is_journaled_with_it() -> None:
    async with application(group_size=1, host={"run_s": 5.0}) as app:
        await asyncio.sleep(1.0)
        assert await app.post(app.keys[0], 0.5) == (200, "")
        assert await app.post(app.keys[0], 0.5) == (200, "")
        status, error = await app.post(app.keys[0], 0.25)
        assert (status, "has the reward 0.5 already" in error) == (409, True)
        await asyncio.sleep(5.0)
        (group,) = app.sink.finished
        assert [branch.reward for branch in group.trajectories] == [0.5]
        assert app.journal.named("add_scores") == []
        ((_, _, rollout),) = app.journal.named("add_rollout")
        assert (rollout[0].reward, rollout[0].awaits) == (0.5, None)
        assert await app.post(app.keys[0], 0.5) == (200, "")


def of_an_agent(index: int, outcome: Outcome, reward: float, **_: Any) -> Any:
    """One trained answer of searcher; FakeHost.untrained has another one."""
    call = PolicyCall(1, 2, "chatcmpl-0", 0.0, 0.0, "stop", agent="searcher")
    return (replace(one_token(index, reward=reward), calls=(call,)),)


TURNS = {"turn_rewards": {"chatcmpl-0": 0.5, "chatcmpl-1": 1.0}}
AGENTS = {"turn_rewards": {"searcher": 0.5, "main": 1.0}, "roles": {"main": "main"}}


@virtual
async def test_rewards_of_turns_may_be_posted_later() -> None:
    async with application(group_size=3) as app:
        app.host.rollout = of_an_agent  # type: ignore[method-assign]
        app.host.untrained = (("chatcmpl-1", ""),)
        await asyncio.sleep(HOUR_S)
        wrong = {"turn_rewards": {"chatcmpl-1": 1.0}}
        status, error = await app.post_body(app.keys[0], wrong)
        assert (status, "this rollout has ['chatcmpl-0', 'chatcmpl-1']" in error) == (
            400,
            True,
        )
        assert await app.post_body(app.keys[0], TURNS) == (200, "")
        assert await app.post_body(app.keys[0], TURNS) == (200, "")
        status, error = await app.post(app.keys[0], 0.75)
        assert (status, "'chatcmpl-1': 1.0} already, and 0.75 is" in error) == (
            409,
            True,
        )
        assert await app.post_body(app.keys[1], AGENTS) == (200, "")
        assert await app.post(app.keys[2], 0.25) == (200, "")
        await all_blocked()
        (group,) = app.sink.finished
    assert [branch.reward for branch in group.trajectories] == [0.75, 0.75, 0.25]
    assert [branch.credits for branch in group.trajectories] == [
        (Credit(1, 2, 0.5, 0),),
        (Credit(1, 2, 0.5, 0, "searcher"),),
        (),
    ]
    assert {branch.untrained for branch in group.trajectories} == {()}


@virtual
async def test_early_rewards_of_other_turns_fail_their_rollout() -> None:
    async with application(group_size=2, host={"run_s": 5.0}) as app:
        app.host.rollout = of_an_agent  # type: ignore[method-assign]
        await asyncio.sleep(1.0)
        wrong = {"turn_rewards": {"chatcmpl-7": 1.0}}
        assert await app.post_body(app.keys[0], wrong) == (200, "")
        assert await app.post(app.keys[1]) == (200, "")
        await asyncio.sleep(5.0)
        assert "[corrupt_result]" in app.producers.last_failure
        assert app.sink.failed == [0]


@virtual
async def test_rollout_that_a_limit_cut_keeps_the_reward_that_it_has() -> None:
    limits = {"overflow": "gateway.max_calls=1", "run_s": 5.0}
    async with application(group_size=2, host=limits) as app:
        app.host._outcome = RolloutFailure("it broke", kind=FailureKind.AGENT_CRASH)
        await asyncio.sleep(1.0)
        assert await app.post(app.keys[0], 0.5) == (200, "")
        await asyncio.sleep(5.0)
        (group,) = app.sink.finished
        assert [branch.reward for branch in group.trajectories] == [0.5, 0.0]
        assert await app.post(app.keys[0], 0.5) == (200, "")
        status, error = await app.post(app.keys[1], 0.5)
        assert (status, "a limit cut it, and its reward is 0" in error) == (410, True)


@virtual
async def test_group_that_its_last_rollout_leaves_too_small_ends() -> None:
    async with application(group_size=2, capacity=2) as app:

        async def run(work: Work, *, started: Callable[[], None]) -> Outcome:
            app.host.works.append(work)
            started()
            await asyncio.sleep(1.0 + work.sample_index)
            if work.sample_index == 0:
                raise RolloutFailure("it broke")
            return Outcome()

        app.host.run = run  # type: ignore[method-assign]
        await asyncio.sleep(HOUR_S)
        assert len(app.sink.failed) == 1
        assert app.sink.finished == []
        status, error = await app.post(app.keys[1])
        assert (status, "needs no reward any more" in error) == (410, True)


@virtual
async def test_repeated_post_is_accepted_and_another_reward_refused() -> None:
    async with application() as app:
        await asyncio.sleep(HOUR_S)
        first = app.keys[0]
        # At the same time: neither is answered before the journal has the reward.
        statuses = await asyncio.gather(*(app.post(first) for _ in range(3)))
        assert statuses == [(200, "")] * 3
        assert await app.post(first) == (200, "")
        status, error = await app.post(first, 0.0)
        assert (status, error.startswith("g0/r0 has the reward 1.0")) == (409, True)
        assert app.late.gauges()["reward/posted"] == 1


@virtual
async def test_parts_may_be_posted_later_and_again() -> None:
    parts = {"thumb": 1.0, "tone": [0.5, 4.0], "speed": None}
    others = ({"thumb": 1.0, "tone": [0.5, 2.0], "speed": None}, {"thumb": 1.0}, 3.0)
    async with application() as app:
        await asyncio.sleep(HOUR_S)
        first, *rest = app.keys[:3]
        assert await app.post_body(first, {"reward": {}}) != (200, "")
        for _ in range(2):  # the second is compared with the journal
            assert await app.post_body(first, {"reward": parts}) == (200, "")
        for other in others:
            assert (await app.post_body(first, {"reward": other}))[0] == 409
        for key in rest:
            assert await app.post_body(key, {"reward": parts}) == (200, "")
        await all_blocked()
        (group,) = app.sink.finished
        assert [one.reward for one in group.trajectories] == [3.0] * 3
        assert group.trajectories[0].parts == {
            "thumb": RewardPart(1.0),
            "tone": RewardPart(0.5, 4.0),
            "speed": RewardPart(None),
        }


@virtual
async def test_post_waits_for_the_journal() -> None:
    async with application() as app:
        await asyncio.sleep(1.0)
        written = asyncio.Event()
        app.journal.flush = written.wait  # type: ignore[assignment, method-assign]
        posting = [asyncio.create_task(app.post(app.keys[0])) for _ in range(2)]
        await asyncio.sleep(HOUR_S)
        assert not any(task.done() for task in posting)
        written.set()
        assert [await task for task in posting] == [(200, "")] * 2


@virtual
async def test_unknown_key_and_wrong_body_are_refused_with_the_reason() -> None:
    async with application() as app:
        await asyncio.sleep(1.0)
        status, error = await app.post("0" * 48)
        assert (status, error) == (404, "no rollout of this run has this key")
        for body, said in (
            ({}, "it has a `reward` or `turn_rewards`"),
            ({"metrics": {"a": 1}}, "it has a `reward` or `turn_rewards`"),
            ({"reward": 1, "turn_rewards": {"a": 1}}, "its rewards name ['a']"),
            ({"reward": 1, "turn_states": {"a": "b"}}, "the program returns"),
        ):
            status, answer = await app.desk.call(
                "/v1/outcome", json.dumps(body).encode(), app.keys[0]
            )
            assert status == 400
            assert said in answer["message"]
        assert (await app.post(app.keys[0], float("nan")))[0] == 400
        app.late.is_open = False  # it starts, or ends
        status, error = await app.post(app.keys[0])
        assert (status, error) == (503, "the run is starting or ending")
        app.late.is_open = True
        assert await app.post(app.keys[0]) == (200, "")


@virtual
async def test_run_that_ends_refuses_a_post_as_unavailable() -> None:
    async with application() as app:
        await asyncio.sleep(1.0)
        app.journal.flush = asyncio.Event().wait  # type: ignore[assignment, method-assign]
        posting = asyncio.create_task(app.post(app.keys[0]))
        await all_blocked()
        app.late.is_open = False
        await app.producers.aclose()
        del app.journal.flush
        await all_blocked()
    # The journal has taken the reward, so a repetition is accepted.
    assert await posting == (200, "")
    with pytest.raises(Refused) as refused:
        await app.late.post(app.keys[1], Outcome(1.0))
    assert refused.value.status == 503


@virtual
async def test_missing_reward_fails_its_rollout_by_kind() -> None:
    async with application(outcome_timeout_s=2 * HOUR_S, num_tickets=2) as app:
        await asyncio.sleep(HOUR_S)
        for key in app.keys[:2]:
            await app.post(key, 1.0)
        await asyncio.sleep(2 * HOUR_S)
        # The first group trains without its third rollout, the second has failed.
        (group,) = app.sink.finished
        found = [(branch.sample_index, branch.reward) for branch in group.trajectories]
        assert found == [(0, 1.0), (1, 1.0)]
        assert app.sink.failed == [1]
        said = app.producers.last_failure
        assert said.startswith("[reward_missing] g")
        assert "no reward within generator.outcome_timeout_s=7200 s" in said
        gauges = app.producers.gauges()
        # Of two missing rewards, the second group has too few rollouts left.
        assert gauges["rollout/failed"] == 3
        assert gauges["failure/infrastructure"] == 0
        status, error = await app.post(app.keys[2])
        assert (status, "g0/r2 needs no reward any more: it has failed" in error) == (
            410,
            True,
        )


@virtual
async def test_requeued_group_needs_no_rewards() -> None:
    async with application() as app:
        await asyncio.sleep(HOUR_S)
        assert await app.post(app.keys[0]) == (200, "")
        app.producers.on_requeued(GroupId(0), None, "dropped")
        assert await app.post(app.keys[0]) == (200, ""), "it was accepted before"
        status, error = await app.post(app.keys[1])
        why = "g0/r1 needs no reward any more: its group was requeued (dropped)"
        assert (status, error) == (410, why)
        assert app.late.num_awaited == 0


@virtual
async def test_failed_attempt_has_another_key() -> None:
    async with application(group_size=1, retries=1, host={"run_s": 20.0}) as app:
        await asyncio.sleep(15.0)
        # The first attempt had 10 s; what is posted for it does not count for a retry.
        assert [work.attempt for work in app.host.works] == [0]
        status, error = await app.post(app.keys[0])
        assert (status, "g0/r0 needs no reward any more" in error) == (410, True)


@virtual
async def test_masked_group_is_given_up_while_it_waits() -> None:
    buffer = Buffer(
        BufferConfig(max_staleness=1, look_ahead=1),
        num_groups=1,
        num_batches=9,
    )
    async with application(sink=buffer, group_size=1) as app:
        app.host.rollout = lambda index, outcome, reward, **_: (  # type: ignore[method-assign]
            one_token(index, version=buffer.rule.served, reward=reward),
        )
        await asyncio.sleep(HOUR_S)
        assert len(app.keys) == 2, "(look_ahead + 1) * num_groups are admitted"
        assert buffer.rule.waits_for == "rewards"
        for version in range(2):
            # Always the newest answer: the first is never rated.
            assert await app.post(app.keys[-1]) == (200, "")
            await all_blocked()
            batch = await buffer.wait_batch()
            assert batch.version == version
            buffer.set_served_nowait(version + 1)
            await asyncio.sleep(HOUR_S)
        status, error = await app.post(app.keys[0])
        assert (status, "requeued (all_masked)" in error) == (410, True)


# ---- resumes


@virtual
async def test_resume_does_not_renew_the_time_of_a_masked_group() -> None:
    buffer = Buffer(
        BufferConfig(max_staleness=2, look_ahead=2, on_overdue="mask"),
        num_groups=1,
        num_batches=9,
    )
    tickets = [Ticket(GroupId(group_id), 0) for group_id in (0, 1)]
    # Batches 0 to 2 were taken with other groups. These two have tokens of versions 0
    # and 1, so batch 3 may still mask the first token of the second group.
    buffer.restore_nowait(3, 9, tickets, [])
    async with application(sink=buffer, group_size=1) as app:
        app.host.rollout = lambda index, outcome, reward, **_: (  # type: ignore[method-assign]
            one_token(index, version=buffer.rule.served, reward=reward),
        )
        keys = list[str]()
        for version, ticket in enumerate(tickets):
            key, digest = app.late.expect_nowait(f"g{ticket.group_id}/r0")
            keys.append(key)
            app.journal.states[ticket.group_id] = "running"
            waits = replace(one_token(0, version=version), awaits=digest)
            prompt = Prompt(f"p{version}", ())
            app.producers.resume_nowait(UnfinishedGroup(ticket, prompt, {0: (waits,)}))
        status, error = await app.post(keys[0])
        assert (status, "requeued (all_masked)" in error) == (410, True)
        assert buffer.rule._last_use[tickets[1].group_id] == 3
        assert await app.post(keys[1]) == (200, "")
        await all_blocked()
        (group,) = (await buffer.wait_batch()).groups
        assert group.group_id == tickets[1].group_id


@virtual
async def test_resumed_group_awaits_only_what_the_journal_lacks() -> None:
    async with application(num_tickets=0, group_size=2) as app:
        key, digest = app.late.expect_nowait("g7/r1")
        app.late = app.producers.late = LateRewards(app.journal, timeout_s=9.0)  # type: ignore[arg-type]
        app.desk.queue.late = app.late
        waits = replace(one_token(1, reward=0.0), awaits=digest)
        whole = {0: (one_token(0),), 1: (waits,)}
        app.journal.states[GroupId(7)] = "running"
        ticket, prompt = Ticket(GroupId(7), 0), Prompt("p", ())
        assert (await app.post(key))[0] == 503, "its rollout is not read yet"
        app.producers.resume_nowait(UnfinishedGroup(ticket, prompt, whole))
        app.late.is_open = True
        await asyncio.sleep(8.0)
        assert await app.post(key, 0.25) == (200, "")
        await all_blocked()
        (group,) = app.sink.finished
        assert [branch.reward for branch in group.trajectories] == [0.5, 0.25]
        assert app.host.works == [], "nothing is sampled again"


def test_journal_keeps_what_waits_and_what_was_posted(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
    keys = dict[int, str]()

    def awaited(index: int, digest: str) -> Any:
        first, *others = make_rollout(0, index)
        return (replace(first, reward=0.0, awaits=digest), *others)

    async def before(journal: Journal) -> None:
        late = LateRewards(journal, timeout_s=60.0)
        late.is_open = True
        admit(journal, 0)
        for index in range(2):
            keys[index], digest = late.expect_nowait(f"g0/r{index}")
            journal.add_rollout_nowait(GroupId(0), awaited(index, digest))
        digest = digest_of(late, "g0/r0")
        late.await_nowait("g0/r0", digest, lambda _: None)
        posting = asyncio.create_task(late.post(keys[0], Outcome(0.75)))
        assert await late.wait("g0/r0", digest) == Outcome(0.75)
        await late.settle(digest)
        await posting

    async def after(journal: Journal) -> None:
        late = LateRewards(journal, timeout_s=60.0)
        late.is_open = True
        await late.post(keys[0], Outcome(0.75))
        with pytest.raises(Refused, match=r"g0/r0 has the reward 0\.75 already"):
            await late.post(keys[0], Outcome(0.5))
        (group,) = read_resume(path, 0).running
        digests = [group.rollouts[index][0].awaits for index in range(2)]
        assert keys[1] not in digests, "a reader of the journal cannot post"
        limit = LateRewards(journal, timeout_s=0.01)
        limit.await_nowait("g0/r1", digests[1] or "", lambda _: None)
        with pytest.raises(RewardFailure, match="got no reward within"):
            await limit.wait("g0/r1", digests[1] or "")
        late.expect_nowait("g0/r2")
        late.withdraw_nowait("g0/r2", "its group was requeued")
        await journal.flush()
        assert read_resume(path, 0).counted["reward/posted"] == 1

    with_journal(path, before)
    with_journal(path, after)


def digest_of(late: LateRewards, rollout_id: str) -> str:
    return late._digests[rollout_id]


# ---- settings, and what is shown


def test_tried_rollouts_refuse_later_rewards_before_a_start(tmp_path: Path) -> None:
    generator = {"python": "a:b", "outcomes": "later"}
    rows = {"python": None, "files": ["a.jsonl"]}
    path = write_config(tmp_path, generator=generator, task=rows)
    with pytest.raises(ConfigError, match="outcomes=later with --rollouts"):
        serve_gateway(load_config(path), tmp_path / "run", name="x", num_tried=1)
    assert not (tmp_path / "run").exists()


def test_watchdog_names_the_rewards_and_restarts_nothing(tmp_path: Path) -> None:
    awaited = "16 rollouts wait for a reward from outside (/v1/outcome)"
    told, notes = watched(
        tmp_path / "controller.log",
        200.0,
        on_stuck="restart",
        report=lambda _: Reported({"steps": 3.0}, awaited=awaited),
    )
    assert all(
        text.startswith("nothing has moved for") and awaited in text for _, text in told
    )
    assert told
    assert "restart" not in [what for what, _ in notes]


# ---- the recipe of docs/rewards.md, in a real run


def free_port() -> int:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        port: int = bound.getsockname()[1]
    return port


def rows_of(path: Path) -> list[tuple[str, ...]]:
    with thumbs.opened(str(path)) as answers:
        return answers.execute("SELECT * FROM answers").fetchall()


def is_good(question: str, text: str) -> bool:
    """The application's user likes the letter of the question."""
    return question[:1] in text


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_killed_run_awaits_thumbs_and_trains_on_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(thumbs, "PAUSE_S", 0.2)
    path = tmp_path / "thumbs.sqlite"
    config = variant(
        ROOT / "examples" / "thumbs.yaml",
        tmp_path,
        generator={"args": {"path": str(path)}},
        gateway={"port": free_port()},
        rollout={"threads": 1},
        buffer={"max_staleness": 0},
        trainer={"num_steps": 3, "threads": 1},
        observe={"console": "plain", "trackers": []},
    )
    run_dir = tmp_path / "run"
    status = run_dir / "status.json"

    def awaited() -> int:
        if not status.exists():
            return 0
        return int(json.loads(status.read_text()).get("rewards_awaited") or 0)

    process = start(config, run_dir)
    wait_until(lambda: awaited() == 16, process)
    first = rows_of(path)
    assert len(first) == 16
    process.kill()
    process.communicate()
    # A thumb during the downtime is repeated until the resumed run takes it.
    (key, url, question, text, _), *_ = first
    said = list[str]()
    early = threading.Thread(
        target=lambda: said.append(
            thumbs.post(url, key, float(is_good(question, text)))
        )
    )
    early.start()
    status.unlink()
    process = start(config, run_dir)
    wait_until(lambda: said == ["accepted"] and awaited() == 15, process)
    early.join()
    assert rows_of(path) == first, "no rollout is repeated"

    def has_rated_all() -> bool:
        thumbs.rate(str(path), is_good)
        return process.poll() is not None

    wait_until(has_rated_all, process)
    _, stderr = process.communicate()
    assert process.returncode == 0, stderr
    rows = rows_of(path)
    assert [row[4] for row in rows] == ["accepted"] * 48
    trained = [
        trajectory["reward"]
        for line in read_lines(run_dir / "trained.jsonl")
        for trajectory in line["trajectories"]
    ]
    given = [float(is_good(question, text)) for _, _, question, text, _ in rows]
    assert sorted(trained) == sorted(given)
    last = read_lines(run_dir / "metrics.jsonl")[-1]
    assert (last["reward/posted"], last["rollout/failed"]) == (48, 0)
