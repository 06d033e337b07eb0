"""The pure parts of the pool: checks of segments, partial tokens and routing."""

from __future__ import annotations

from contextlib import ExitStack
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from segment_cases import chunk, make_request, rest, spans
from token_cases import completion_of, sampled_tokens

from asyncrl.base.errors import EngineError
from asyncrl.engines.link import SegmentCheck
from asyncrl.engines.pool import Charge, Router, SegmentJoin
from asyncrl.messages.records import Completion, VersionSpan
from asyncrl.messages.sampling import SamplingRequest
from asyncrl.messages.tokens import SUPPORT, Ragged, SegmentPart

PARTIAL = completion_of(
    (11, 12, 13),
    [-1.0, -2.0, -3.0],
    [VersionSpan(0, 2, 4), VersionSpan(2, 3, 5)],
    num_interruptions=2,
)


def check(*parts: SegmentPart) -> None:
    """A request of three tokens to a server that had confirmed version 2, and was
    offered 3.
    """
    request = SamplingRequest(request_id="r0", prompt_ids=[5, 6], max_tokens=3)
    checked = SegmentCheck("engine-0", request, oldest=2)
    for part in parts:
        checked.accept(part, newest=3)


def test_an_answer_that_can_be_passes() -> None:
    check(rest("length", 7, 8, 0, version_spans=spans((0, 1, 2), (1, 3, 3))))
    check(rest("abort"))
    check(chunk(7), chunk(8, version=3), rest("stop", 9, version=3))


@pytest.mark.parametrize(
    "parts",
    [
        [rest("length", 7, 8, 9, logprobs=[-1.0])],
        [rest("stop")],
        [rest("stop", 7, token_ids=[-1])],
        [rest("stop", 7, logprobs=[float("nan")])],
        [rest("stop", 7, logprobs=[0.0011])],
        [rest("length", 7, 8, 9, version_spans=spans((0, 2, 2)))],
        [rest("length", 7, 8, 9, version_spans=spans((0, 2, 2), (1, 3, 3)))],
        [rest("length", 7, 8, 9, version_spans=spans((0, 1, 3), (1, 3, 2)))],
        [rest("stop", 7, version=1)],
        [rest("stop", 7, version=4)],
        [chunk(7, 8), chunk(9)],
        [rest("length", 7, 8, 9, 10)],
        [chunk(7), rest("length", 8)],
    ],
)
def test_impossible_answer_is_an_engine_error(parts: list[Any]) -> None:
    with pytest.raises(EngineError, match="engine-0: answered request r0 "):
        check(*parts)


@pytest.mark.parametrize(
    ("lists", "said"),
    [
        (None, "2 tokens without supports"),
        ([[7, 9], [7, 9]], "token 8, which is not among the 2 ids of its support"),
        ([[6, 7], [8]], ""),
        ([[6, 7], []], ""),  # the whole vocabulary
    ],
)
def test_a_cut_request_needs_the_support_of_each_token(
    lists: list[list[int]] | None, said: str
) -> None:
    request = SamplingRequest("r0", [5, 6], 2, top_p=0.9)
    tokens = sampled_tokens([7, 8], [-1.0, -2.0], spans((0, 2, 2)))
    if lists is not None:
        tokens = tokens.with_columns({SUPPORT: Ragged.of(lists, "<i4")})
    checked = SegmentCheck("engine-0", request, oldest=2)
    answer = SegmentPart(tokens, "length")
    if not said:
        checked.accept(answer, newest=2)
        return
    with pytest.raises(EngineError, match=said):
        checked.accept(answer, newest=2)


def test_partial_tokens_are_told_after_each_interruption() -> None:
    told: list[Completion] = []
    join = SegmentJoin(make_request(8), PARTIAL, told.append)
    for segment in (
        rest("abort", 14, version=5),
        rest("abort"),
        rest("abort", 15, 16, version=6),
    ):
        join.add(segment)
    sampled = (11, 12, 13, 14, 15, 16)  # an empty segment adds nothing
    assert [partial.token_ids for partial in told] == [sampled[:4], sampled]
    assert told[1].sampled.spans == (
        VersionSpan(0, 2, 4),
        VersionSpan(2, 4, 5),
        VersionSpan(4, 6, 6),
    )
    assert [partial.num_interruptions for partial in told] == [4, 6]
    join.add(rest("abort", 17, 18))
    assert (join.is_finished, len(told)) == (True, 2), (
        "an interruption right at the end of the budget"
    )
    for max_tokens in (3, 2):
        # which has used the budget, or a larger one
        whole = SegmentJoin(make_request(max_tokens), PARTIAL)
        assert whole.is_finished
        assert (whole.completion().finish_reason, whole.completion().token_ids) == (
            "length",
            (11, 12, 13),
        )


def test_group_requests_share_a_server_with_free_slots() -> None:
    router = Router(2, 2)
    with ExitStack() as requests:
        taken = [requests.enter_context(router.take(key)).index for key in "abaa"]
    assert taken == [0, 1, 0, 1], "together while there is a free slot"


STEPS = st.tuples(
    st.sampled_from(["take", "take", "leave", "down", "up"]), st.integers(0, 3)
)


@given(
    st.lists(STEPS, max_size=60),
    st.integers(1, 4),
    st.integers(1, 4),
    st.randoms(use_true_random=False),
)
def test_request_queues_only_without_a_free_slot(
    steps: list[tuple[str, int]], num_servers: int, slots: int, random: Random
) -> None:
    router = Router(num_servers, slots)
    open_requests: list[tuple[ExitStack, Charge]] = []

    def take(key: str) -> None:
        had_room = min(router.load[index] for index in router.up) < slots
        stack = ExitStack()
        seat = stack.enter_context(router.take(key))
        assert seat.index in router.up
        assert router.load[seat.index] <= slots or not had_room
        open_requests.append((stack, seat))
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
        router.up = router.up or {0}
    # A publish interrupts all segments; moved ones are routed again after all were
    # asked.
    num_free = sum(max(0, slots - router.load[index]) for index in router.up)
    num_on_down = sum(
        router.load[index] for index in range(num_servers) if index not in router.up
    )
    moved = [
        entry
        for entry in random.sample(open_requests, len(open_requests))
        if router.moves(entry[1])
    ]
    assert sum(router.load) == len(open_requests)
    assert len(moved) <= num_free + num_on_down, "one free slot moves one request"
    for entry in moved:
        open_requests.remove(entry)
        entry[0].close()
        take(entry[1].route_key)
    loads = [router.load[index] for index in router.up]
    assert max(loads) <= slots or min(loads) >= slots
    assert not any(router.moves(seat) for _, seat in open_requests), (
        "and nothing moves twice"
    )
    for stack, _ in open_requests:
        stack.close()
    assert not any(router.load)
    assert not router._keys
