"""What the trainer refuses and what it masks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from trainer_cases import changed, make_batch

from asyncrl.http import Refused
from asyncrl.messages.trainer_calls import BatchArrays, BatchHeader
from asyncrl.trainer.batch_checks import check_batch, loss_tokens


def at(array: np.ndarray, index: int, value: object) -> np.ndarray:
    result = array.copy()
    result[index] = value
    return result


def with_trajectory(header: BatchHeader, index: int, **values: Any) -> BatchHeader:
    trajectories = list(header.trajectories)
    trajectories[index] = trajectories[index].model_copy(update=values)
    return header.model_copy(update={"trajectories": trajectories})


def refusal(header: BatchHeader, arrays: BatchArrays, policy_version: int = 0) -> Refused:
    with pytest.raises(Refused) as caught:
        check_batch(header, arrays, policy_version, vocab_size=52)
    return caught.value


def test_a_whole_batch_passes() -> None:
    header, arrays = make_batch()
    check_batch(header, arrays, 0, 52)
    assert np.array_equal(loss_tokens(header, arrays), arrays.loss_mask)


def test_a_batch_for_another_version_is_refused_with_both_values() -> None:
    header, arrays = make_batch(version=3)
    error = refusal(header, arrays, policy_version=5)
    assert error.status == 409
    assert "batch 3 came while the trainer is at policy_version 5" in error.body.error


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"token_ids": lambda a: at(a.token_ids, 7, 52)}, "token id 52 of g10/r0, position 7"),
        ({"token_ids": lambda a: at(a.token_ids, 0, -1)}, "token id -1 of g10/r0, position 0"),
        ({"token_ids": lambda a: a.token_ids.astype(np.int64)}, "token_ids is int64"),
        (
            {"behaviour_logprobs": lambda a: at(a.behaviour_logprobs, 6, np.nan)},
            "behaviour_logprob nan of g10/r0, position 6",
        ),
        (
            {"behaviour_logprobs": lambda a: at(a.behaviour_logprobs, 5, 0.5)},
            "behaviour_logprob 0.5 of g10/r0, position 5",
        ),
        ({"versions": lambda a: at(a.versions, 5, 1)}, "version 1 of g10/r0, position 5"),
        ({"versions": lambda a: at(a.versions, 5, -1)}, "version -1 of g10/r0, position 5"),
        ({"versions": lambda a: a.versions[:-1]}, "versions is int32"),
        (
            {"loss_mask": lambda a: at(a.loss_mask, 0, True), "versions": lambda a: at(a.versions, 0, 0)},
            "sampled first token",
        ),
    ],
)
def test_a_wrong_array_is_refused_with_the_place_and_the_value(values: dict[str, Any], message: str) -> None:
    header, arrays = make_batch()
    error = refusal(header, changed(arrays, **{name: change(arrays) for name, change in values.items()}))
    assert error.status == 422
    assert message in error.body.error


@pytest.mark.parametrize(
    ("index", "values", "message"),
    [
        (1, {"start": 3}, "g10/r1 has tokens [3"),
        (1, {"sample_index": 0}, "g10/r0, branch 0, comes after sample 0"),
        (1, {"reward": float("inf")}, "g10/r1 has reward inf"),
        (1, {"group_index": 1}, "g10/r2 has group_index 0 after group 1"),
        (1, {"group_id": 99}, "g99/r1 has group_index 0 after group 0"),
        (4, {"group_index": 0}, "g11/r1 has group_index 0 after group 1"),
    ],
)
def test_a_wrong_structure_is_refused_with_the_trajectory(
    index: int, values: dict[str, Any], message: str
) -> None:
    header, arrays = make_batch()
    error = refusal(with_trajectory(header, index, **values), arrays)
    assert error.status == 422
    assert message in error.body.error


def test_a_missing_last_trajectory_and_an_empty_batch_are_refused() -> None:
    header, arrays = make_batch()
    assert (
        "5 trajectories of groups [10, 11] cover"
        in refusal(header.model_copy(update={"trajectories": header.trajectories[:-1]}), arrays).body.error
    )
    nothing = BatchArrays(**{name: array[:0] for name, array in dict(arrays).items()})
    assert "0 trajectories" in refusal(header.model_copy(update={"trajectories": []}), nothing).body.error


def test_an_old_token_is_refused_with_the_worst_ones_values_unless_it_may_be_masked() -> None:
    header, arrays = make_batch(version=7, min_version=5)
    second = header.trajectories[1].start + 5
    arrays = changed(arrays, versions=at(at(arrays.versions, 5, 4), second, 2))
    with pytest.raises(Refused) as caught:
        loss_tokens(header, arrays)
    assert caught.value.status == 409
    assert (
        "g10/r1, position 5 was sampled at version 2, and 2 tokens are older than min_version 5 in batch 7"
        in caught.value.body.error
    )
    kept = loss_tokens(header.model_copy(update={"mask_older": True}), arrays)
    assert np.flatnonzero(arrays.loss_mask & ~kept).tolist() == [5, second]


def test_a_batch_without_a_token_left_is_refused() -> None:
    header, arrays = make_batch(version=3, min_version=3, mask_older=True)
    with pytest.raises(Refused, match="no token that carries loss"):
        loss_tokens(header, changed(arrays, versions=np.where(arrays.loss_mask, 1, -1).astype(np.int32)))
