"""Groups of a killed run go on, and nothing is sampled twice."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from fakes import FakeEngine
from hypothesis import given, settings
from hypothesis import strategies as st
from rollout_cases import one_token, virtual
from test_producers_groups import House

from asyncrl.messages.records import Completion, GroupId, Prompt, Ticket, UnfinishedGroup, VersionSpan
from asyncrl.rollouts.rollout import derive_seed
from asyncrl.testing.virtual_time import all_blocked, run_virtual

PROMPT = Prompt("0/7", ({"role": "user", "content": "q"},))
TICKET = Ticket(GroupId(7), 2)
PARTIAL = Completion((ord("a"), ord("b")), (-1.0, -2.0), (VersionSpan(0, 2, 2),), num_interruptions=1)


def done(index: int) -> Any:
    return (one_token(index, version=2),)


def engine_at(version: int) -> FakeEngine:
    engine = FakeEngine()
    engine.policy_version = version
    return engine


def go_on(unfinished: UnfinishedGroup, check: Callable[[House, FakeEngine], None], **options: Any) -> None:
    """Resume one group, with no leave for others, and let it end."""
    engine = engine_at(2)

    async def story() -> None:
        async with House(num_tickets=0, group_size=4, engine=engine, **options) as house:
            house.journal.admitted_nowait(unfinished.ticket, unfinished.prompt)
            house.producers.resume_nowait(unfinished)
            await asyncio.sleep(3.0)
            check(house, engine)

    run_virtual(story())


@virtual
async def test_resumed_groups_get_slots_first() -> None:
    async with House(num_tickets=5, group_size=4, capacity=2, engine=engine_at(2)) as house:
        house.sink.start_version = 2
        house.journal.admitted_nowait(TICKET, PROMPT)
        house.producers.resume_nowait(UnfinishedGroup(TICKET, PROMPT, {0: done(0)}))
        await all_blocked()
        assert (house.admitted, house.producers.num_sampling) == ([], 2)
        await asyncio.sleep(1.0)
        await all_blocked()
        assert house.admitted == [0]


@settings(max_examples=60, deadline=None)
@given(
    states=st.lists(st.sampled_from(["done", "failed", "partial", "new"]), min_size=4, max_size=4),
    attempt=st.integers(0, 1),
)
def test_resume_samples_only_the_rest_with_its_seeds(states: list[str], attempt: int) -> None:
    def known(name: str, value: Any = None) -> dict[int, Any]:
        return {index: value for index, state in enumerate(states) if state == name}

    def check(house: House, engine: FakeEngine) -> None:
        expected = known("new", 0) | known("partial", attempt)
        assert sorted((request.request_id, request.seed) for request in engine.requests) == sorted(
            (f"g7/r{index}/t0/a{number}", derive_seed(0, "0/7", index, 0, attempt=number))
            for index, number in expected.items()
        )
        assert engine.resumed == {f"g7/r{index}/t0/a{attempt}": PARTIAL for index in known("partial")}
        assert house.journal.named("admitted") == [("admitted", TICKET, PROMPT)], "by the killed run"
        ended = {event[2][0].sample_index for event in house.journal.named("rollout_finished")}
        assert ended == set(expected)
        usable = sorted(known("done") | expected)
        if len(usable) >= 2:
            (group,) = house.sink.finished
            assert [trajectory.sample_index for trajectory in group.trajectories] == usable
            assert all(group.trajectories[usable.index(index)] is done[0] for index, done in rollouts.items())
            assert (house.producers.prompts_out(), house.journal.states) == ([], {GroupId(7): "ready"})
        else:
            assert house.sink.failed == [7]
            aside = [replace(PROMPT, num_requeued=1)]
            assert house.producers.prompts_out() == aside, "set aside until a group has not failed"

    rollouts, failures = {index: done(index) for index in known("done")}, known("failed", (2, "no"))
    partials = known("partial", (attempt, PARTIAL))
    go_on(UnfinishedGroup(TICKET, PROMPT, rollouts, failures, partials), check)
