"""Token records survive the journal bit for bit; what JSON cannot hold is said, not bent."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from journal_cases import make_partial, make_rollout, make_trajectory, same_trajectory

from asyncrl.errors import JournalError
from asyncrl.journal.tokens import (
    decode_partial,
    decode_prompt,
    decode_trajectory,
    encode_partial,
    encode_prompt,
    encode_trajectory,
)
from asyncrl.messages.records import GroupId, PartialCompletion, Prompt, Ticket, Trajectory, VersionSpan
from asyncrl.messages.trainer_calls import Credit

PATH = Path("journal.sqlite")
numbers = st.floats(allow_nan=True, allow_infinity=True)
spans = st.lists(st.builds(VersionSpan, *[st.integers(0, 2**40)] * 3, st.integers(-1, 99)), max_size=4).map(
    tuple
)


@st.composite
def trajectories(draw: st.DrawFn) -> Trajectory:
    num_tokens = draw(st.integers(0, 50))
    return Trajectory(
        draw(st.integers(0, 100)),
        draw(hnp.arrays(np.int32, num_tokens)),
        draw(hnp.arrays(np.bool_, num_tokens)),
        draw(hnp.arrays(np.uint32, num_tokens)).view(np.float32),  # any bits: every kind of NaN too
        draw(spans),
        draw(numbers),
        draw(st.booleans()),
        draw(st.integers(0, 1000)),
        draw(st.dictionaries(st.text(), numbers, max_size=3)),
        draw(st.integers(0, 3)),
        draw(
            st.lists(
                st.builds(Credit, st.integers(0, 50), st.integers(0, 50), numbers, st.integers(0, 9)),
                max_size=3,
            ).map(tuple)
        ),
    )


@given(trajectories(), st.integers(0, 2**50))
def test_a_trajectory_comes_back_with_every_bit(trajectory: Trajectory, group_id: int) -> None:
    blob = encode_trajectory(group_id, trajectory)
    assert same_trajectory(
        decode_trajectory(blob, group_id, trajectory.sample_index, trajectory.branch, PATH), trajectory
    )


@given(
    st.lists(st.tuples(st.integers(0, 2**31 - 1), st.floats(width=32, allow_nan=False)), max_size=50),
    spans,
    st.integers(0, 9),
)
def test_an_unfinished_completion_comes_back_with_every_bit(
    tokens: list[tuple[int, float]], found: Any, interruptions: int
) -> None:
    partial = PartialCompletion(
        tuple(t for t, _ in tokens), tuple(p for _, p in tokens), found, interruptions
    )
    assert repr(decode_partial(encode_partial(3, 1, partial), 3, 1, PATH)) == repr(partial)


plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text() | st.integers() | st.tuples(st.integers()), inner, max_size=3)
    ),
    max_leaves=10,
)


@given(plain, st.dictionaries(st.text() | st.just("__asyncrl__"), plain, max_size=3), st.text())
def test_a_prompt_comes_back_with_the_types_of_its_answer(
    answer: Any, info: dict[str, Any], words: str
) -> None:
    ticket, prompt = Ticket(GroupId(3), 2), Prompt("0/1", ({"role": "user", "content": words},), answer, info)
    found, is_whole = decode_prompt(encode_prompt(ticket, prompt), ticket, "0/1", PATH)
    assert is_whole
    assert repr(found) == repr(prompt)


ENDLESS: list[object] = []
ENDLESS.append(ENDLESS)


@pytest.mark.parametrize("answer", [{1, 2}, b"bytes", np.float32(1.5), [math.inf, {"a": len}], ENDLESS])
def test_an_answer_that_json_cannot_hold_makes_a_prompt_that_says_it_is_not_whole(answer: object) -> None:
    ticket, prompt = Ticket(GroupId(3), 2), Prompt("0/1", ({"role": "user", "content": "?"},), answer)
    found, is_whole = decode_prompt(encode_prompt(ticket, prompt), ticket, "0/1", PATH)
    assert not is_whole
    assert found == Prompt("0/1", prompt.messages)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"token_ids": np.zeros(12, np.int64)}, r"token_ids of int64 \[12\]"),
        ({"loss_mask": np.zeros(11, np.bool_)}, r"loss_mask of bool \[11\]"),
    ],
)
def test_arrays_of_another_type_are_refused_not_rounded(change: dict[str, Any], why: str) -> None:
    with pytest.raises(JournalError, match=why):
        encode_trajectory(0, replace(make_trajectory(0, 0), **change))


@settings(max_examples=300)
@given(st.data())
def test_a_changed_byte_is_found(data: st.DataObject) -> None:
    which, blob = data.draw(
        st.sampled_from(
            [
                ("trajectory", encode_trajectory(1, make_trajectory(1, 0))),
                ("partial", encode_partial(1, 0, make_partial(20))),
                (
                    "prompt",
                    encode_prompt(
                        Ticket(GroupId(1), 0), Prompt("0/1", ({"role": "user", "content": "?"},), 3)
                    ),
                ),
            ]
        )
    )
    at, change = data.draw(st.integers(0, len(blob) - 1)), data.draw(st.integers(1, 255))
    broken = blob[:at] + bytes([blob[at] ^ change]) + blob[at + 1 :]
    try:
        if which == "trajectory":
            assert same_trajectory(decode_trajectory(broken, 1, 0, 0, PATH), make_trajectory(1, 0)), (
                "a bit of zlib's header may mean nothing"
            )
        elif which == "partial":
            assert decode_partial(broken, 1, 0, PATH) == make_partial(20)
        else:
            assert decode_prompt(broken, Ticket(GroupId(1), 0), "0/1", PATH)[0].answer == 3
    except JournalError:
        pass


def test_a_blob_of_another_branch_is_found() -> None:
    first, second = make_rollout(1, 0)
    with pytest.raises(JournalError, match=r"it is of \[1, 0, 1\], and lies at \[1, 0\]"):
        decode_trajectory(encode_trajectory(1, second), 1, 0, 0, PATH)
    with pytest.raises(JournalError, match=r"tokens of g2/r0, branch 1, do not unpack \(it is of \[1, 0\]"):
        decode_trajectory(encode_trajectory(1, first), 2, 0, 1, PATH)
