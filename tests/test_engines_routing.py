"""Which server takes a request."""

from __future__ import annotations

from contextlib import ExitStack
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.engines.pool import Router


@pytest.mark.parametrize(
    ("num_servers", "slots", "keys", "expected"),
    [
        (2, 3, "ababa", [0, 1, 0, 1, 0]),  # together while there is a free slot
        (2, 2, "aaaa", [0, 0, 1, 1]),  # they move on together
        (3, 4, "a-aa    +  ", [0, 1, 1, 2, 2, 1, 2, 0, 0]),  # -, +: server 0 goes down, and comes back
    ],
)
def test_requests_of_a_group_go_to_one_server_while_it_is_up_and_has_a_free_slot(
    num_servers: int, slots: int, keys: str, expected: list[int]
) -> None:
    router, taken = Router(num_servers, slots), list[int]()
    with ExitStack() as requests:
        for key in keys:
            if key == "-":
                router.up.discard(0)
            elif key == "+":
                router.up.add(0)
            else:
                taken.append(requests.enter_context(router.take(key.strip())))
    assert taken == expected


def test_a_later_turn_says_itself_where_the_one_before_was() -> None:
    router = Router(3, slots=2)
    with ExitStack() as requests:
        taken = [requests.enter_context(router.take(key, near=2)) for key in ("a", "b", "c")]
        assert taken == [2, 2, 0], "where the turn before was, until that server is full"
        router.up.discard(1)
        assert requests.enter_context(router.take("d", near=1)) == 0, "it is down"


@given(
    st.lists(
        st.tuples(st.sampled_from(["take", "take", "leave", "down", "up"]), st.integers(0, 3)), max_size=60
    ),
    st.integers(1, 4),
    st.integers(1, 4),
    st.randoms(use_true_random=False),
)
def test_a_request_queues_only_when_no_server_has_a_free_slot(
    steps: list[tuple[str, int]], num_servers: int, slots: int, random: Random
) -> None:
    router = Router(num_servers, slots)
    open_requests: list[tuple[ExitStack, str, int]] = []

    def take(key: str) -> None:
        had_room = min(router.load[index] for index in router.up) < slots
        stack = ExitStack()
        index = stack.enter_context(router.take(key))
        assert index in router.up
        assert router.load[index] <= slots or not had_room
        open_requests.append((stack, key, index))
        assert sum(router.load) == len(open_requests)

    for what, number in steps:
        if what == "take":
            take(f"{number}" if number else "")
        elif what == "leave" and open_requests:
            open_requests.pop(number % len(open_requests))[0].close()
        elif what == "down" and len(router.up) > 1:
            router.up.discard(number % num_servers)
        elif what == "up":
            router.up.add(number % num_servers)
        if not router.up:
            router.up.add(0)
    num_moves = 0
    for entry in random.sample(
        open_requests, len(open_requests)
    ):  # a publish interrupts every segment, in any order
        if router.has_to_move(entry[2]):
            open_requests.remove(entry)
            entry[0].close()
            take(entry[1])
            num_moves += 1
    loads = [router.load[index] for index in router.up]
    assert max(loads) <= slots or min(loads) >= slots, "nothing queues beside a free slot"
    assert not any(router.has_to_move(index) for _, _, index in open_requests), "and nothing moves twice"
    assert num_moves <= len(open_requests)
    for stack, _, _ in open_requests:
        stack.close()
    assert not any(router.load)
    assert not router._keys
