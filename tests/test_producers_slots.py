"""Places in the engines: how many, and who is next."""

from __future__ import annotations

import asyncio

from asyncrl.rollouts.rollout import Slots
from asyncrl.testing.virtual_time import all_blocked, run_virtual


def test_the_next_place_goes_to_the_smallest_order_and_never_to_one_too_many() -> None:
    async def story() -> None:
        slots = Slots(2)
        for name, order in (("a", 5), ("b", 5), ("late", 4), ("early", 1), ("gone", 0)):
            slots.ask_nowait(name, (order,))
        assert repr(slots) == "<Slots 2/2 held, 3 wait>"
        slots.give_back_nowait("gone")
        slots.give_back_nowait("a")
        await slots.wait("early")
        waiting = asyncio.create_task(slots.wait("late"), name="late")
        await all_blocked()
        assert (slots.num_held, slots.num_waiting, waiting.done()) == (2, 1, False)
        slots.give_back_nowait("early")
        await waiting
        spare = asyncio.create_task(slots.wait_spare(), name="spare")
        await all_blocked()
        assert not spare.done()
        slots.give_back_nowait("b")
        await spare

    run_virtual(story())


def test_who_gives_up_waiting_may_ask_again_and_who_is_cancelled_keeps_no_place() -> None:
    async def story() -> None:
        slots = Slots(1)
        slots.ask_nowait("a", (0,))
        for _ in range(3):
            slots.ask_nowait("b", (1,))
            slots.give_back_nowait("b")
        slots.ask_nowait("b", (1,))
        waiting = asyncio.create_task(slots.wait("b"), name="b")
        await all_blocked()
        waiting.cancel()
        slots.give_back_nowait("a")  # before the cancelled one has ended, which gives back what it was given
        assert slots.num_held == 1
        slots.give_back_nowait("b")
        assert (slots.num_held, slots.num_waiting) == (0, 0)

    run_virtual(story())
