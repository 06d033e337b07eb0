"""Calls that wait their turn: in the order in which they came, whatever leaves the line."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

from gateway_cases import in_virtual_time
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.agents.endpoint.calls.gateway_call import GRACE_S, GatewayCall, Room
from asyncrl.agents.endpoint.forms.chat import ChatForm
from asyncrl.testing.virtual_time import all_blocked, run_virtual

MOST = 4
calls = st.tuples(st.integers(0, 5), st.integers(1, MOST), st.integers(1, 5), st.none() | st.integers(0, 6))
"""(when it comes, its answers, how long it samples, when its client leaves)."""


@given(st.lists(calls, max_size=12))
def test_calls_are_let_in_in_order_each_once_and_never_more_than_there_is_room(
    plan: list[tuple[int, int, int, int | None]],
) -> None:
    room, came, entered, left = Room(MOST), list[int](), list[int](), set[int]()
    held = dict[int, int]()

    async def call(index: int, come_s: int, number: int, sample_s: int) -> None:
        await asyncio.sleep(come_s + index / 100)
        came.append(index)
        async with room.places(number):
            entered.append(index)
            held[index] = number
            assert sum(held.values()) <= MOST
            try:
                await asyncio.sleep(sample_s)
            finally:
                del held[index]

    async def story() -> None:
        tasks = [asyncio.ensure_future(call(i, *each[:3])) for i, each in enumerate(plan)]
        for i, (*_, leave_s) in enumerate(plan):
            if leave_s is not None:
                left.add(i)
                asyncio.get_running_loop().call_later(leave_s, tasks[i].cancel)
        await asyncio.gather(*tasks, return_exceptions=True)  # a DeadlockError if one waits for ever
        assert (room.num_waiting, room._free._value) == (0, MOST)

    run_virtual(story())
    assert entered == [index for index in came if index in set(entered)], "none is passed"
    assert set(range(len(plan))) - left <= set(entered), "who stays gets in"


@in_virtual_time
async def test_a_place_that_is_given_to_a_call_in_the_moment_of_its_end_goes_to_the_next() -> None:
    room, order = Room(1), list[str]()

    async def call(name: str, until: asyncio.Event) -> None:
        async with room.places(1):
            order.append(name)
            await until.wait()

    go, never = asyncio.Event(), asyncio.Event()
    first, second, third = (
        asyncio.ensure_future(call(name, event))
        for name, event in (("first", go), ("second", never), ("third", go))
    )
    await all_blocked()
    go.set()
    await asyncio.sleep(0)  # the first one ends: the place is the second one's, which has not run yet
    second.cancel()
    await asyncio.gather(first, third)
    assert (order, room._free._value) == (["first", "third"], 1)


@in_virtual_time
async def test_a_call_that_all_clients_have_left_has_a_second_in_which_a_retry_may_come() -> None:
    planned: Any = SimpleNamespace(num_prompt=1, number=0)
    call, is_first_there = GatewayCall(ChatForm(), b"", planned, {}), True
    given_up: list[float] = []
    loop = asyncio.get_running_loop()
    call.give_up = lambda: given_up.append(loop.time())
    with call.attended(lambda: is_first_there):
        await asyncio.sleep(10)
        is_first_there = False
        call.left_nowait()
        await asyncio.sleep(0.9)
        with call.attended(lambda: True):
            await asyncio.sleep(10)
            assert not given_up
    left_s = loop.time()
    await asyncio.sleep(10)
    assert given_up == [left_s + GRACE_S]
    call.done_nowait()
    with call.attended(lambda: False):
        await asyncio.sleep(10)
    assert len(given_up) == 1, "what is sampled is kept"
