"""Groups that ran when their run was killed: what is finished stays, what was begun goes on, nothing is
sampled twice.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st
from test_producers_groups import House, play

from asyncrl.messages.records import (
    Completion,
    GroupId,
    PartialCompletion,
    Prompt,
    Rollout,
    Ticket,
    UnfinishedGroup,
    VersionSpan,
)
from asyncrl.rollouts.generators import make_trajectory
from asyncrl.rollouts.rollout import derive_seed
from asyncrl.testing.fakes import FakeEngine, FakeScorer
from asyncrl.testing.virtual_time import all_blocked

PROMPT = Prompt("0/7", ({"role": "user", "content": "q"},))
TICKET = Ticket(GroupId(7), 2)
PARTIAL = PartialCompletion((ord("a"), ord("b")), (-1.0, -2.0), (VersionSpan(0, 2, 2),), 1)


def done(index: int, *, version: int = 2) -> Rollout:
    return (
        make_trajectory(
            index, (ord("q"),), Completion((ord("z"),), (-1.0,), (VersionSpan(0, 1, version),), "stop"), 0.5
        ),
    )


def engine_at(version: int) -> FakeEngine:
    engine = FakeEngine()
    engine.policy_version = version
    return engine


def go_on(unfinished: UnfinishedGroup, check: Callable[[House], Awaitable[None]], **options: object) -> None:
    """Resume one group, with no leave for others."""

    async def story(tasks: asyncio.TaskGroup) -> House:
        house = House(tasks, num_tickets=0, group_size=4, **{"engine": engine_at(2), **options})  # type: ignore[arg-type]
        house.journal.admitted_nowait(unfinished.ticket, unfinished.prompt)
        house.producers.resume_nowait(unfinished)
        await check(house)
        return house

    play(story)


def test_finished_rollouts_are_not_sampled_again_and_the_others_get_the_seeds_that_they_had() -> None:
    async def check(house: House) -> None:
        await all_blocked()
        assert house.count("inflight") == 2
        await asyncio.sleep(1.0)
        await all_blocked()
        assert isinstance(house.engine, FakeEngine)
        assert [request.request_id for request in house.engine.requests] == ["g7/r1/t0/a0", "g7/r3/t0/a0"]
        assert [request.seed for request in house.engine.requests] == [
            derive_seed(0, "0/7", index, 0) for index in (1, 3)
        ]
        assert house.engine.resumed == {}
        (group,) = house.sink.finished
        assert [trajectory.sample_index for trajectory in group.trajectories] == [0, 1, 2, 3]
        assert [
            trajectory is first[index][0]
            for index, trajectory in enumerate(group.trajectories)
            if index in first
        ] == [True, True]
        assert house.journal.named("admitted") == [("admitted", TICKET, PROMPT)], (
            "it was admitted once, by the killed run"
        )
        assert [event[2][0].sample_index for event in house.journal.named("rollout_finished")] == [1, 3]
        assert house.journal.states[GroupId(7)] == "ready"

    first = {0: done(0), 2: done(2)}
    go_on(UnfinishedGroup(TICKET, PROMPT, first), check)


def test_a_rollout_goes_on_from_its_tokens_in_the_very_attempt_that_it_was_in() -> None:
    async def check(house: House) -> None:
        await all_blocked()
        assert isinstance(house.engine, FakeEngine)
        (request,) = house.engine.requests
        assert request.request_id == "g7/r1/t0/a2"
        assert request.seed == derive_seed(0, "0/7", 1, 0, attempt=2)
        assert house.engine.resumed == {"g7/r1/t0/a2": PARTIAL}

    first = {0: done(0), 2: done(2), 3: done(3)}
    go_on(UnfinishedGroup(TICKET, PROMPT, first, partials={1: (2, PARTIAL)}), check, retries=2)


def test_an_attempt_beyond_retries_that_were_lowered_is_the_last_one() -> None:
    async def check(house: House) -> None:
        await asyncio.sleep(3.0)
        assert isinstance(house.engine, FakeEngine)
        assert len(house.engine.requests) == 1
        assert [event[1:4] for event in house.journal.named("rollout_failed")] == [(7, 1, 3)]

    first = {0: done(0), 2: done(2), 3: done(3)}
    scorer = FakeScorer(lambda *_: "no")
    go_on(UnfinishedGroup(TICKET, PROMPT, first, partials={1: (2, PARTIAL)}), check, scorer=scorer, retries=1)


def test_a_group_whose_last_rollout_had_ended_is_finished_at_once() -> None:
    async def check(house: House) -> None:
        (group,) = house.sink.finished
        assert [trajectory.sample_index for trajectory in group.trajectories] == [0, 1, 3]
        assert house.journal.states[GroupId(7)] == "ready"
        assert house.producers.prompts_out() == []
        await all_blocked()
        assert isinstance(house.engine, FakeEngine)
        assert house.engine.requests == []

    go_on(
        UnfinishedGroup(
            TICKET, PROMPT, {index: done(index) for index in (0, 1, 3)}, {2: (3, "it timed out")}
        ),
        check,
    )


def test_rollouts_beyond_a_group_size_that_was_lowered_stay_and_no_more_are_sampled_than_it_asks_for() -> (
    None
):
    async def check(house: House) -> None:
        await asyncio.sleep(2.0)
        assert isinstance(house.engine, FakeEngine)
        assert [request.request_id for request in house.engine.requests] == [
            "g7/r1/t0/a0",
            "g7/r2/t0/a0",
            "g7/r3/t0/a0",
        ]
        (group,) = house.sink.finished
        assert [trajectory.sample_index for trajectory in group.trajectories] == [0, 1, 2, 3, 5, 6]
        assert house.journal.states[GroupId(7)] == "ready"
        assert house.producers.prompts_out() == []

    go_on(
        UnfinishedGroup(
            TICKET, PROMPT, {index: done(index) for index in (0, 5, 6)}, {7: (3, "no")}, {4: (0, PARTIAL)}
        ),
        check,
    )


def test_a_prompt_that_can_never_be_sampled_is_given_up_after_a_kill_too() -> None:
    async def check(house: House) -> None:
        assert house.count("given_up") == 1
        assert house.producers.prompts_out() == []
        assert [event[4] for event in house.journal.named("group_ended")] == [None]

    go_on(UnfinishedGroup(TICKET, PROMPT, {}, dict.fromkeys(range(4), (0, "prompt p7 has 50 tokens"))), check)


def test_rollouts_of_resumed_groups_have_slots_before_any_new_group_starts() -> None:
    async def story(tasks: asyncio.TaskGroup) -> House:
        house = House(tasks, num_tickets=5, group_size=4, capacity=2, engine=engine_at(2))
        house.sink.start_version = 2
        house.journal.admitted_nowait(TICKET, PROMPT)
        house.producers.resume_nowait(UnfinishedGroup(TICKET, PROMPT, {0: done(0)}))
        await all_blocked()
        assert (house.admitted, house.producers.num_sampling) == ([], 2)
        await asyncio.sleep(1.0)
        await all_blocked()
        assert house.admitted == [0]
        return house

    play(story)


@settings(max_examples=60, deadline=None)
@given(
    states=st.lists(st.sampled_from(["done", "failed", "partial", "new"]), min_size=4, max_size=4),
    attempt=st.integers(0, 1),
)
def test_whatever_was_known_each_rollout_ends_once(states: list[str], attempt: int) -> None:
    indices = {
        name: [index for index, state in enumerate(states) if state == name]
        for name in ("done", "failed", "partial", "new")
    }

    async def check(house: House) -> None:
        await asyncio.sleep(2.0)
        assert isinstance(house.engine, FakeEngine)
        sampled = [request.request_id for request in house.engine.requests]
        expected = dict.fromkeys(indices["new"], 0) | dict.fromkeys(indices["partial"], attempt)
        assert sorted(sampled) == sorted(f"g7/r{index}/t0/a{number}" for index, number in expected.items())
        usable = sorted(indices["done"] + list(expected))
        if len(usable) >= 2:
            (group,) = house.sink.finished
            assert [trajectory.sample_index for trajectory in group.trajectories] == usable
            assert house.producers.prompts_out() == []
        else:
            assert list(house.sink.failed) == [7]
            assert house.producers.prompts_out() == [replace(PROMPT, num_handed_back=1)], (
                "set aside until a group has not failed"
            )

    unfinished = UnfinishedGroup(
        TICKET,
        PROMPT,
        {index: done(index) for index in indices["done"]},
        dict.fromkeys(indices["failed"], (2, "no")),
        dict.fromkeys(indices["partial"], (attempt, PARTIAL)),
    )
    go_on(unfinished, check)
