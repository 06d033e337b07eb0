"""Calls of one harness that run at once arrive and end in any order: the rollout is the same, to the last
number of its units.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import blake2b
from random import Random
from typing import Any

import numpy as np
import pytest
from gateway_capture_cases import END, CharRenderer, Habit, Message, assistant, plan, user
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.agents.endpoint.capture import Capture, GatewayStats, Planned
from asyncrl.messages.records import Completion, Outcome, Rollout, VersionSpan


@dataclass(frozen=True)
class Ask:
    """A call, and those that the harness makes with its answer. `anew`: it begins a history of its own with
    the answer in it.
    """

    text: str
    anew: bool
    then: tuple[Ask, ...] = ()


def asks(then: st.SearchStrategy[tuple[Ask, ...]]) -> st.SearchStrategy[tuple[Ask, ...]]:
    return st.lists(
        st.builds(Ask, st.sampled_from(["x", "y"]), st.booleans(), then), min_size=1, max_size=3
    ).map(tuple)


TREES = st.recursive(st.just(()), asks, max_leaves=12)


def digest(ids: tuple[int, ...]) -> bytes:
    return blake2b(np.array(ids).tobytes(), digest_size=4).digest()


def sample(prompt_ids: tuple[int, ...], engine: int) -> Completion:
    """A model that says the same to the same prompt under the same version, whichever engine is free."""
    said = digest(prompt_ids)
    ids = (*map(ord, "ab|c"[said[0] % 4] * (said[1] % 3)), ord(END))
    logprobs = tuple(-1.0 - said[2] - index for index in range(len(ids)))
    return Completion(
        ids, logprobs, (VersionSpan(0, len(ids), said[3] % 3, engine),), "stop", num_interruptions=said[3] % 2
    )


def play(tree: tuple[Ask, ...], habit: Habit, order: Random) -> Rollout:
    """Plan what can be planned and answer what was planned, one at a time, as `order` has it."""
    renderer = CharRenderer(habit)
    capture = Capture(renderer, GatewayStats())
    rewards: dict[str, float] = {}
    ready: list[tuple[Ask, list[Message]]] = [(ask, [user(ask.text)]) for ask in tree]
    asked: list[tuple[Ask, list[Message], Planned]] = []
    while ready or asked:
        if ready and (not asked or order.random() < 0.5):
            ask, messages = ready.pop(order.randrange(len(ready)))
            asked.append((ask, messages, plan(capture, messages, None)))
            continue
        ask, messages, planned = asked.pop(order.randrange(len(asked)))
        completion, name = sample(planned.prompt_ids, order.randrange(2)), f"chatcmpl-{planned.number}"
        text = renderer.decode(completion.token_ids)
        capture.record(planned, completion, assistant(text), name)
        rewards[name] = digest((*planned.prompt_ids, *completion.token_ids))[0] / 256
        for each in ask.then:
            begin = [user(text)] if each.anew else [*messages, assistant(text)]
            ready.append((each, [*begin, user(each.text)]))
    return capture.rollout(0, Outcome(turn_rewards=rewards), 0.0)


def values(rollout: Rollout) -> Iterator[Any]:
    for branch in rollout:
        yield (
            branch.token_ids.tolist(),
            branch.loss_mask.tolist(),
            branch.behaviour_logprobs.tolist(),
            [(span.start, span.end, span.version) for span in branch.version_spans],
        )
        yield branch.credits, branch.num_interruptions, branch.is_truncated, branch.branch


@pytest.mark.parametrize("habit", ["plain", "strips"])
@settings(deadline=None, max_examples=100)
@given(
    tree=TREES.filter(bool),
    orders=st.tuples(st.randoms(use_true_random=False), st.randoms(use_true_random=False)),
)
def test_the_order_in_which_calls_arrive_and_end_changes_nothing(
    habit: Habit, tree: tuple[Ask, ...], orders: tuple[Random, Random]
) -> None:
    one, other = (list(values(play(tree, habit, order))) for order in orders)
    assert one == other
