"""Token records survive the journal bit for bit."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from journal_cases import make_rollout, make_trajectory, same_trajectory

from asyncrl.errors import JournalError
from asyncrl.journal.tokens import decode_partial, decode_trajectory, encode_partial, encode_trajectory
from asyncrl.messages.records import PartialCompletion, Trajectory, VersionSpan
from asyncrl.messages.trainer_calls import Credit

PATH = Path("journal.sqlite")
numbers = st.floats(allow_nan=True, allow_infinity=True)
spans = st.lists(st.builds(VersionSpan, *[st.integers(0, 2**40)] * 3, st.integers(-1, 99)), max_size=4)
credits = st.builds(Credit, st.integers(0, 50), st.integers(0, 50), numbers, st.integers(0, 9))


@st.composite
def trajectories(draw: st.DrawFn) -> Trajectory:
    num_tokens = draw(st.integers(0, 50))
    return Trajectory(
        draw(st.integers(0, 100)),
        draw(hnp.arrays(np.int32, num_tokens)),
        draw(hnp.arrays(np.bool_, num_tokens)),
        draw(hnp.arrays(np.uint32, num_tokens)).view(np.float32),  # any bits: every kind of NaN too
        tuple(draw(spans)),
        draw(numbers),
        draw(st.booleans()),
        draw(st.integers(0, 1000)),
        draw(st.dictionaries(st.text(), numbers, max_size=3)),
        draw(st.integers(0, 3)),
        tuple(draw(st.lists(credits, max_size=3))),
    )


@given(trajectories(), st.integers(0, 2**50))
def test_a_trajectory_comes_back_with_every_bit(trajectory: Trajectory, group_id: int) -> None:
    blob = encode_trajectory(group_id, trajectory)
    found = decode_trajectory(blob, group_id, trajectory.sample_index, trajectory.branch, PATH)
    assert same_trajectory(found, trajectory)


@given(
    st.lists(st.tuples(st.integers(0, 2**31 - 1), st.floats(width=32, allow_nan=False)), max_size=50), spans
)
def test_an_unfinished_completion_comes_back_with_every_bit(
    tokens: list[tuple[int, float]], found: list[VersionSpan]
) -> None:
    partial = PartialCompletion(
        tuple(token for token, _ in tokens), tuple(logprob for _, logprob in tokens), tuple(found), 7
    )
    assert repr(decode_partial(encode_partial(3, 1, partial), 3, 1, PATH)) == repr(partial)


@pytest.mark.parametrize(
    "change", [{"token_ids": np.zeros(12, np.int64)}, {"behaviour_logprobs": np.zeros(12, np.float64)}]
)
def test_arrays_of_another_type_are_refused_not_rounded(change: dict[str, Any]) -> None:
    with pytest.raises(AssertionError, match="64 instead of"):
        encode_trajectory(0, replace(make_trajectory(0, 0), **change))


@settings(max_examples=200)
@given(st.data())
def test_a_changed_byte_is_found(data: st.DataObject) -> None:
    blob = encode_trajectory(1, make_trajectory(1, 0))
    at, change = data.draw(st.integers(0, len(blob) - 1)), data.draw(st.integers(1, 255))
    broken = blob[:at] + bytes([blob[at] ^ change]) + blob[at + 1 :]
    with contextlib.suppress(JournalError):  # a bit of zlib's header may mean nothing
        assert same_trajectory(decode_trajectory(broken, 1, 0, 0, PATH), make_trajectory(1, 0))


def test_a_blob_of_another_branch_or_group_is_found() -> None:
    first, second = make_rollout(1, 0)
    with pytest.raises(JournalError, match=r"format and place are \(1, \[1, 0, 1\]\)"):
        decode_trajectory(encode_trajectory(1, second), 1, 0, 0, PATH)
    with pytest.raises(JournalError, match="tokens of g2/r0, branch 1, do not unpack"):
        decode_trajectory(encode_trajectory(1, first), 2, 0, 1, PATH)
