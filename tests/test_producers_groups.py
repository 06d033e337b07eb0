"""Groups from admission to the buffer, and the prompts of failed groups."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import cycle
from typing import Any

import pytest
from fakes import FakeEngine, FakeScorer
from hypothesis import given, settings
from hypothesis import strategies as st
from producer_cases import World
from rollout_cases import one_token, virtual
from token_cases import completion_of

from asyncrl.base.errors import TaskError
from asyncrl.messages.records import (
    GroupId,
    Prompt,
    Rollout,
    Ticket,
    UnfinishedGroup,
    VersionSpan,
)
from asyncrl.messages.sampling import SamplingRequest
from asyncrl.rollouts.rollout import derive_seed
from asyncrl.testing.virtual_time import all_blocked, run_virtual

ALONE: dict[str, Any] = {"group_size": 1, "retries": 0}


@virtual
async def test_ticket_is_requested_only_for_free_slots() -> None:
    async with World(num_tickets=0, capacity=2) as world:
        await all_blocked()
        world.sink.allow(1)
        await all_blocked()
        world.sink.allow(1)
        world.sink.start_version = 1
        await asyncio.sleep(0.5)
        assert world.admitted == [0], (
            "leave was given, but its ticket would be stamped too early"
        )
        world.sink.start_version = world.engine.policy_version = 2
        await asyncio.sleep(0.5)
        await all_blocked()
        assert [ticket.start_version for ticket in world.sink.admitted] == [0, 2]


@virtual
async def test_groups_of_a_turn_are_admitted_before_the_first_request() -> None:
    num_admitted = set[int]()

    def note(request: SamplingRequest) -> float:
        num_admitted.add(len(world.sink.admitted))
        return 1.0

    engine = FakeEngine(latency_s=note)
    async with World(
        engine=engine, num_tickets=20, group_size=16, capacity=1000
    ) as world:
        await asyncio.sleep(0.5)
    assert num_admitted == {8, 16, 20}, "turns of 128 rollouts"


@virtual
async def test_group_with_its_rewards_waits_for_teachers() -> None:
    seen = list[list[str]]()

    async def annotate(rollout: Rollout, *_: Any) -> Rollout:
        await asyncio.sleep(1)
        seen.append([phase for _, phase in world.sink.phases])
        return rollout

    async with World(num_tickets=1, group_size=2, judge=annotate) as world:
        await asyncio.sleep(100)
    # The second rollout still lacks its reward when the first one has it.
    assert seen == [["scoring", "scoring", "teaching"]] * 2
    assert len(world.sink.finished) == 1


@virtual
async def test_failed_prompt_returns_at_a_later_version() -> None:
    fails, engine = {"p0", "p1"}, FakeEngine()
    scorer = FakeScorer(
        lambda prompt, _: "the judge is down" if prompt.prompt_id in fails else 1.0
    )
    async with World(
        engine=engine, scorer=scorer, num_tickets=4, capacity=1, **ALONE
    ) as world:
        await asyncio.sleep(1.5)
        assert world.sink.failed == [0]
        await asyncio.sleep(3.0)
        fails.clear()
        assert world.trained == ["p2", "p3"]
        assert not world.source.requeued, (
            "a group of the same version gets a new prompt"
        )
        assert [prompt.prompt_id for prompt in world.producers.prompts_out()] == [
            "p0",
            "p1",
        ]
        world.sink.start_version = engine.policy_version = 1
        world.sink.allow(2)
        await asyncio.sleep(2.5)
        again = [
            (prompt.prompt_id, prompt.num_requeued) for prompt in world.source.requeued
        ]
        assert again == [("p0", 1), ("p1", 1)]
        assert sorted(world.trained) == ["p0", "p1", "p2", "p3"]
        assert len({request.seed for request in engine.requests}) == 6
        assert (world.requeued, world.count("given_up")) == ([1, 1], 0)


@virtual
async def test_prompt_that_always_fails_is_given_up() -> None:
    engine = FakeEngine()
    scorer = FakeScorer(lambda prompt, _: "no" if prompt.prompt_id == "p0" else 1.0)
    async with World(
        engine=engine, scorer=scorer, num_tickets=2, max_requeues=2, **ALONE
    ) as world:
        for version in range(1, 6):
            await asyncio.sleep(10.0)
            world.sink.start_version = engine.policy_version = version
            world.sink.allow(2)
        await asyncio.sleep(10.0)
        assert world.requeued == [1, 2, None], (
            "its returns; it is given up at the third failure"
        )


@pytest.mark.parametrize(
    ("prompt_id", "content", "why"),
    [
        (
            "long",
            "a prompt of more tokens than sixteen",
            "prompt long has 36 tokens; 1 to rollout.max_prompt_tokens=16 are",
        ),
        (
            "odd",
            "\0",
            "the chat template refuses prompt odd: no zero bytes.\n",
        ),
    ],
)
@virtual
async def test_impossible_prompt_is_given_up_without_a_try(
    prompt_id: str, content: str, why: str
) -> None:
    async with World(num_tickets=0, retries=2) as world:
        messages = ({"role": "user", "content": content},)
        world.source.front.append(Prompt(prompt_id, messages))
        world.sink.allow(2)
        await asyncio.sleep(5.0)
        tries = [event[2:4] for event in world.journal.named("add_failure")]
        assert tries == [(0, 0), (1, 0)], "no attempt was made"
        why = f"r1 cannot be sampled: [prompt] {why}"
        assert why in world.journal.named("end_group")[0][3], "and it is never cut"
        assert [
            world.count(name) for name in ("failed_groups", "given_up", "retried")
        ] == [1, 1, 0]


@virtual
async def test_too_many_failed_groups_end_the_run() -> None:
    scorer = FakeScorer(
        lambda prompt, _: f"0 / 0 at {prompt.prompt_id}\n  Way out: no."
    )
    with pytest.raises(ExceptionGroup) as caught:
        async with World(scorer=scorer, capacity=2, max_failed_groups=3) as world:
            await asyncio.sleep(60.0)
    said = r"producers: 3 groups in a row .* at p2; rollout.max_failed_groups=3.*\n  Way out: no.$"
    assert caught.group_contains(TaskError, match=said)
    assert world.requeued == [1, 1, 1], (
        "an outage costs no prompt: a resume has all three"
    )


@given(
    latencies=st.lists(st.floats(0.1, 30.0) | st.just(1000.0), min_size=8, max_size=8),
    is_unscored=st.lists(st.booleans(), min_size=1, max_size=8),
    drops=st.lists(st.floats(0.5, 60.0), max_size=4),
    group_size=st.integers(1, 3),
    capacity=st.integers(1, 7),
)
@virtual
async def test_every_ticket_is_answered_once_within_capacity(
    latencies: list[float],
    is_unscored: list[bool],
    drops: list[float],
    group_size: int,
    capacity: int,
) -> None:
    scores = cycle(is_unscored)

    def latency_s(request: SamplingRequest) -> float:
        group, rollout, *_ = request.request_id.split("/")
        return latencies[(int(group[1:]) * 3 + int(rollout[1:])) % 8]

    engine = FakeEngine(latency_s=latency_s)
    scorer = FakeScorer(
        lambda *_: "the judge is down" if next(scores) else 1.0, latency_s=3.0
    )
    limits = {
        "group_size": group_size,
        "capacity": capacity,
        "max_failed_groups": 99,
        "timeout_s": 20.0,
    }
    async with World(engine=engine, scorer=scorer, num_tickets=10, **limits) as world:
        dropped: list[GroupId] = []

        def answered() -> list[GroupId]:
            return [
                *(group.group_id for group in world.sink.finished),
                *world.sink.failed,
                *dropped,
            ]

        for at_s in sorted(drops):
            await asyncio.sleep(max(0.0, at_s - asyncio.get_running_loop().time()))
            if running := sorted({*world.admitted} - {*answered()}):
                world.producers.on_requeued(running[0], None, "overdue")
                dropped.append(running[0])
                world.sink.allow(1)
        await asyncio.sleep(2000.0)
        assert sorted(answered()) == world.admitted == list(range(10 + len(dropped)))
        assert engine.peak_running <= capacity
        assert len({request.seed for request in engine.requests}) == len(
            engine.requests
        )
        finished = world.trained
        assert len(set(finished)) == len(finished), "no prompt is trained on twice"
        tried = Counter(
            prompt.prompt_id for _, _, prompt in world.journal.named("add_admission")
        )
        assert max(tried.values()) <= 4
        waiting = {
            prompt.prompt_id
            for prompt in (*world.producers.prompts_out(), *world.source.front)
        }
        ended = len(finished) + len(waiting) + world.count("given_up")
        assert len(tried) == ended, "each is trained on, comes again or is given up"


# ---- groups of a killed run

PROMPT = Prompt("0/7", ({"role": "user", "content": "q"},))
TICKET = Ticket(GroupId(7), 2)
PARTIAL = completion_of(
    [97, 98], [-1.0, -2.0], [VersionSpan(0, 2, 2)], num_interruptions=1
)


def done(index: int) -> Any:
    return (one_token(index, version=2),)


def engine_at(version: int) -> FakeEngine:
    engine = FakeEngine()
    engine.policy_version = version
    return engine


def go_on(
    unfinished: UnfinishedGroup,
    check: Callable[[World, FakeEngine], None],
    **options: Any,
) -> None:
    """Resume one group, with no leave for others, and let it end."""
    engine = engine_at(2)

    async def story() -> None:
        async with World(
            num_tickets=0, group_size=4, engine=engine, **options
        ) as world:
            world.journal.add_admission_nowait(unfinished.ticket, unfinished.prompt)
            world.producers.resume_nowait(unfinished)
            await asyncio.sleep(3.0)
            check(world, engine)

    run_virtual(story())


@virtual
async def test_resumed_groups_get_slots_first() -> None:
    async with World(
        num_tickets=5, group_size=4, capacity=2, engine=engine_at(2)
    ) as world:
        world.sink.start_version = 2
        world.journal.add_admission_nowait(TICKET, PROMPT)
        world.producers.resume_nowait(UnfinishedGroup(TICKET, PROMPT, {0: done(0)}))
        await all_blocked()
        assert (world.admitted, world.producers.slots.num_held) == ([], 2)
        await asyncio.sleep(1.0)
        await all_blocked()
        assert world.admitted == [0]


@settings(max_examples=60, deadline=None)
@given(
    states=st.lists(
        st.sampled_from(["done", "failed", "partial", "new"]), min_size=4, max_size=4
    ),
    attempt=st.integers(0, 1),
)
def test_resume_samples_only_the_rest_with_its_seeds(
    states: list[str], attempt: int
) -> None:
    def known(name: str, value: Any = None) -> dict[int, Any]:
        return {index: value for index, state in enumerate(states) if state == name}

    def check(world: World, engine: FakeEngine) -> None:
        expected = known("new", 0) | known("partial", attempt)
        assert sorted(
            (request.request_id, request.seed) for request in engine.requests
        ) == sorted(
            (
                f"g7/r{index}/t0/a{number}",
                derive_seed(0, "0/7", index, 0, attempt=number),
            )
            for index, number in expected.items()
        )
        assert engine.resumed == {
            f"g7/r{index}/t0/a{attempt}": PARTIAL for index in known("partial")
        }
        assert world.journal.named("add_admission") == [
            ("add_admission", TICKET, PROMPT)
        ], "by the killed run"
        ended = {
            event[2][0].sample_index for event in world.journal.named("add_rollout")
        }
        assert ended == set(expected)
        usable = sorted(known("done") | expected)
        if len(usable) >= 2:
            (group,) = world.sink.finished
            assert [
                trajectory.sample_index for trajectory in group.trajectories
            ] == usable
            assert all(
                group.trajectories[usable.index(index)] is done[0]
                for index, done in rollouts.items()
            )
            assert (world.producers.prompts_out(), world.journal.states) == (
                [],
                {GroupId(7): "ready"},
            )
        else:
            assert world.sink.failed == [7]
            aside = [replace(PROMPT, num_requeued=1)]
            assert world.producers.prompts_out() == aside, (
                "set aside until a group has not failed"
            )

    rollouts, failures = (
        {index: done(index) for index in known("done")},
        known("failed", (2, "no")),
    )
    partials = known("partial", (attempt, PARTIAL))
    go_on(UnfinishedGroup(TICKET, PROMPT, rollouts, failures, partials), check)
