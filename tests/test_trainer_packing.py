"""How a batch is cut into micro-batches: every loss token once, shared prefixes once, nothing that cannot
matter.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from trainer_cases import Rows, batch_of, random_groups, trees

from asyncrl.messages.trainer_calls import BatchArrays, BatchHeader
from asyncrl.trainer.model import packing
from asyncrl.trainer.model.packing import MicroBatch, pack

CPU = torch.device("cpu")


def packed(groups: Rows, max_tokens: int = 10**6) -> tuple[BatchHeader, BatchArrays, list[MicroBatch]]:
    header, arrays = batch_of(groups)
    return header, arrays, pack(header, arrays, arrays.loss_mask, max_tokens, CPU)


@settings(max_examples=60, deadline=None)
@given(trees(), st.integers(1, 120))
def test_every_loss_token_is_there_once_with_its_own_context(groups: Rows, max_tokens: int) -> None:
    header, arrays, micros = packed(groups, max_tokens)
    source = np.concatenate([micro.source_M for micro in micros]) if micros else np.array([], np.int64)
    assert source.tolist() == np.flatnonzero(arrays.loss_mask).tolist(), "in the batch's order, each once"
    for micro in micros:
        sequence_M, predict_M = micro.sequence_M.numpy(), micro.predict_M.numpy()
        assert np.unique(sequence_M).tolist() == list(range(len(micro.trajectory_S)))
        assert (np.diff(sequence_M) >= 0).all()
        assert micro.target_M.tolist() == arrays.token_ids[micro.source_M].tolist()
        for index, (prefix_start, prefix, own_start, own) in enumerate(micro.layout.rows):
            entry = header.trajectories[micro.trajectory_S[index]]
            places = [*range(prefix_start, prefix_start + prefix), *range(own_start, own_start + own)]
            ids = arrays.token_ids[entry.start : entry.start + prefix + own]
            assert micro.token_ids_N[places].tolist() == ids.tolist()
            assert micro.position_N[places].tolist() == list(range(prefix + own))
            offset = micro.source_M[sequence_M == index] - entry.start
            assert [places[before] for before in offset - 1] == predict_M[sequence_M == index].tolist()
            assert prefix + own == offset[-1], "read up to the last loss token and no further"


@settings(max_examples=60, deadline=None)
@given(trees(), st.integers(1, 120))
def test_a_layout_covers_the_packed_tokens_without_gaps(groups: Rows, max_tokens: int) -> None:
    for micro in packed(groups, max_tokens)[2]:
        layout = micro.layout
        assert layout.num_tokens == len(micro.token_ids_N) == len(micro.position_N)
        for part in layout.passes:
            for place, lengths in ((part.queries, part.query_lengths), (part.keys, part.key_lengths)):
                assert place.stop - place.start == sum(lengths)
                assert min(lengths) > 0, "a kernel may break on a sequence of none"
        assert layout.longest == max(prefix + own for _, prefix, _, own in layout.rows)
        assert layout.num_tokens <= max_tokens or len(micro.trajectory_S) == 1


@pytest.mark.parametrize(
    ("groups", "max_tokens", "num_tokens", "families"),
    [
        (random_groups([[5, 9, 3, 7]], prompt=30), 10**6, [30 + 4 + 8 + 2 + 6], [[(30, 20)]]),
        (random_groups([[11] * 5], prompt=20), 40, [40, 40, 30], [[(20, 20)], [(20, 20)], []]),
        (random_groups([[50, 3], [3]], prompt=20), 30, [69, 22, 22], [[], [], []]),
    ],
    ids=["shared once", "cut in two", "longer than the limit"],
)
def test_a_prompt_is_there_once_in_each_micro_batch_that_has_several_of_its_group(
    groups: Rows, max_tokens: int, num_tokens: list[int], families: list[list[tuple[int, int]]]
) -> None:
    layouts = [micro.layout for micro in packed(groups, max_tokens)[2]]
    assert [layout.num_tokens for layout in layouts] == num_tokens
    for layout, expected in zip(layouts, families, strict=True):
        lengths = [(part.key_lengths, part.query_lengths) for part in layout.passes[1:]]
        assert lengths == [((prefix,), (own,)) for prefix, own in expected]


def test_on_a_cpu_a_micro_batch_is_no_larger_than_its_caches_like(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(packing.MOST_TOKENS, "cpu", 30)
    micros = packed(random_groups([[9], [9], [9]], prompt=7))[2]
    assert [micro.layout.num_tokens for micro in micros] == [30, 15]


def test_sequences_without_loss_are_left_out_and_a_batch_of_them_is_empty() -> None:
    silent = ([1, 2, 3], [False] * 3)
    _, _, (micro,) = packed([[silent, ([1, 2, 3, 4], [False, False, True, False])], [silent]])
    assert micro.trajectory_S.tolist() == [1]
    assert micro.layout.num_tokens == 2
    assert packed([[silent]])[2] == []
