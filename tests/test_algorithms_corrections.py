"""The corrections and the interpolated proximal policy against numbers worked out by hand, and what holds for
all of them.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from algorithm_cases import SETTINGS, Case, for_any_case, numbered, tokens
from torch import Tensor

from asyncrl.algorithms import corrections
from asyncrl.algorithms.corrections import icepop, m2po, mis, mis_sequence, tis, tis_sequence
from asyncrl.algorithms.losses import interpolate
from asyncrl.algorithms.registry import BUILT_IN_CORRECTIONS, WHOLE_BATCH
from asyncrl.config import AlgorithmConfig

PER_SEQUENCE = [getattr(corrections, name) for name in BUILT_IN_CORRECTIONS if name not in WHOLE_BATCH]


def call(correction: Any, case: Case, settings: AlgorithmConfig = SETTINGS) -> Tensor:
    weight_M = correction(case.anchor_M - case.behaviour_M, case.advantage_M, case.sequence_M, settings)
    assert isinstance(weight_M, Tensor)
    return weight_M


def test_m2po_masks_the_largest_log_ratios_until_the_mean_square_of_the_rest_is_small_enough() -> None:
    # log ratios 0.1, 0.2, 0.3, 0.5 have squares 0.01, 0.04, 0.09, 0.25: means 0.01, 0.025, 0.0467, 0.0975
    log_weight_M = tokens(0.5, 0.1, 0.3, 0.2)
    weight_M = m2po(log_weight_M, tokens(1, 1, 1, 1), numbered(2, 2), SETTINGS)
    assert weight_M.tolist() == [0, 1, 0, 1]
    settings = AlgorithmConfig(m2_limit=0.1)
    assert m2po(log_weight_M, tokens(1, 1, 1, 1), numbered(2, 2), settings).tolist() == [1, 1, 1, 1]


def test_m2po_counts_and_masks_only_tokens_that_went_where_their_advantage_pushes() -> None:
    # The first two went too far; the next two are brought back by their step; no step is taken on the last.
    log_weight_M, advantage_M = tokens(3, -3, -3, 3, 3), tokens(1, -2, 1, -2, 0)
    assert m2po(log_weight_M, advantage_M, numbered(5), SETTINGS).tolist() == [0, 0, 1, 1, 1]


@for_any_case()
def test_m2po_leaves_a_mean_square_within_the_limit_and_masks_no_token_that_could_stay(case: Case) -> None:
    weight_M = call(m2po, case)
    log_weight_M = (case.anchor_M - case.behaviour_M).double()
    counted_M = log_weight_M.sign() * case.advantage_M.sign() > 0
    kept_M, masked_M = (
        log_weight_M[counted_M & (weight_M == 1)].square(),
        log_weight_M[counted_M & (weight_M == 0)].square(),
    )
    assert len(kept_M) + len(masked_M) == counted_M.sum()
    assert (weight_M[~counted_M] == 1).all()
    assert len(kept_M) == 0 or kept_M.mean() <= SETTINGS.m2_limit + 1e-9
    if len(masked_M):
        one_more_M = torch.cat([kept_M, masked_M.min()[None]])
        assert one_more_M.mean() > SETTINGS.m2_limit - 1e-9
        assert len(kept_M) == 0 or kept_M.max() <= masked_M.min()


@pytest.mark.parametrize("correction", [tis, tis_sequence, mis, mis_sequence, icepop, m2po])
@for_any_case()
def test_where_proximal_and_behaviour_policy_are_equal_every_weight_is_one(
    correction: Any, case: Case
) -> None:
    weight_M = correction(torch.zeros_like(case.behaviour_M), case.advantage_M, case.sequence_M, SETTINGS)
    assert weight_M.tolist() == [1.0] * len(case.behaviour_M)


@pytest.mark.parametrize("correction", PER_SEQUENCE)
@for_any_case(min_sequences=2, spread=0.75)
def test_a_batch_cut_between_sequences_has_the_same_weights(correction: Any, case: Case) -> None:
    cut = case.num_sequences // 2
    parts = [case.part(0, cut), case.part(cut, case.num_sequences)]
    assert torch.equal(torch.cat([call(correction, part) for part in parts]), call(correction, case))


@pytest.mark.parametrize("correction", [tis, tis_sequence, mis, mis_sequence, icepop, m2po])
def test_extreme_ratios_stay_finite(correction: Any) -> None:
    weight_M = correction(tokens(1000.0, -1000.0, 0.0), tokens(1, 1, 1), numbered(1, 1, 1), SETTINGS)
    assert weight_M.dtype == torch.float32
    assert torch.isfinite(weight_M).all()


def test_the_interpolated_proximal_policy_moves_from_behaviour_to_current_with_the_age_of_the_token() -> None:
    behaviour_M, current_M = tokens(-4, -4, -4, -4), tokens(-2, -2, -2, -2).requires_grad_()
    proximal_M = interpolate(behaviour_M, current_M, torch.tensor([0, 1, 2, 4], dtype=torch.int32))
    assert proximal_M.tolist() == [-2.0, -4.0, -3.0, -2.5]
    assert not proximal_M.requires_grad
