"""Which server takes a request."""

from __future__ import annotations

from contextlib import ExitStack

from hypothesis import given
from hypothesis import strategies as st

from asyncrl.engines.routing import Router


def test_a_groups_requests_go_to_one_server_while_it_has_a_free_slot() -> None:
    router = Router(2, slots=3)
    with ExitStack() as requests:
        taken = [requests.enter_context(router.take(key)) for key in ("a", "b", "a", "b", "a")]
    assert taken == [0, 1, 0, 1, 0]


def test_a_group_moves_on_together_when_its_server_is_full() -> None:
    router = Router(2, slots=2)
    with ExitStack() as requests:
        taken = [requests.enter_context(router.take("a")) for _ in range(4)]
    assert taken == [0, 0, 1, 1]


def test_a_group_leaves_a_server_that_is_down_and_nothing_goes_there_until_it_is_up() -> None:
    router = Router(3, slots=4)
    with ExitStack() as requests:
        taken = [requests.enter_context(router.take("a"))]
        router.up.discard(0)
        taken += [requests.enter_context(router.take(key)) for key in ("a", "a", "", "", "", "")]
        assert taken == [0, 1, 1, 2, 2, 1, 2]
        router.up.add(0)
        assert [requests.enter_context(router.take("")) for _ in range(2)] == [0, 0]


def test_a_key_is_forgotten_with_its_last_request() -> None:
    router = Router(2, slots=2)
    with router.take("a"), router.take("a"):
        pass
    with router.take("other"):
        with router.take("a") as index:
            assert index == 1, "the key is unknown again, so the least loaded server takes it"
    assert repr(router) == "<Router load [0, 0] of 2, 0 keys>"


@given(st.lists(st.tuples(st.integers(0, 3), st.booleans()), max_size=60), st.integers(1, 4), st.integers(1, 4))
def test_a_request_queues_only_when_no_server_has_a_free_slot(steps: list[tuple[int, bool]], num_servers: int, slots: int) -> None:
    router = Router(num_servers, slots)
    open_requests: list[ExitStack] = []
    for key, is_leaving in steps:
        if is_leaving and open_requests:
            open_requests.pop(key % len(open_requests)).close()
            continue
        had_room = min(router.load) < slots
        stack = ExitStack()
        index = stack.enter_context(router.take(f"{key}" if key else ""))
        assert router.load[index] <= slots or not had_room
        open_requests.append(stack)
        assert sum(router.load) == len(open_requests)
    for stack in open_requests:
        stack.close()
    assert not any(router.load)
    assert "0 keys" in repr(router)
