"""Batches whose groups share prefixes, and one plain forward a sequence to compare with."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st

from asyncrl.messages.trainer_calls import BatchArrays, BatchHeader, TrajectoryHeader

Rows = list[list[tuple[list[int], list[bool]]]]
"""Groups of sequences: (token ids, which of them carry loss). No first token does."""


def batch_of(groups: Rows) -> tuple[BatchHeader, BatchArrays]:
    trajectories, ids, mask = [], list[int](), list[bool]()
    for group, rows in enumerate(groups):
        for sample, (token_ids, has_loss) in enumerate(rows):
            start = len(ids)
            ids += token_ids
            mask += has_loss
            trajectories.append(
                TrajectoryHeader(
                    group_index=group,
                    group_id=group,
                    sample_index=sample,
                    prompt_id=f"p{group}",
                    start=start,
                    end=len(ids),
                    reward=0.0,
                )
            )
    loss_mask = np.array(mask)
    return BatchHeader(version=0, min_version=0, mask_older=False, trajectories=trajectories), BatchArrays(
        token_ids=np.array(ids, dtype=np.int32),
        loss_mask=loss_mask,
        behaviour_logprobs=np.zeros(len(ids), np.float32),
        versions=np.where(loss_mask, 0, -1).astype(np.int32),
    )


def random_groups(sizes: list[list[int]], *, prompt: int = 20, vocab: int = 52, seed: int = 0) -> Rows:
    """One group an entry: a shared prompt and completions of the given lengths, all of whose tokens carry
    loss.
    """
    rng = np.random.default_rng(seed)
    groups = []
    for lengths in sizes:
        head = rng.integers(0, vocab, prompt).tolist()
        groups.append(
            [(head + rng.integers(0, vocab, n).tolist(), [False] * prompt + [True] * n) for n in lengths]
        )
    return groups


def naive(model: Any, header: BatchHeader, arrays: BatchArrays, temperature: float = 1.0) -> torch.Tensor:
    """Logprobs of all loss tokens in the batch's order, with gradient: one forward a sequence, the whole
    softmax.
    """
    parts = []
    for entry in header.trajectories:
        ids = torch.from_numpy(arrays.token_ids[entry.start : entry.end].astype(np.int64))
        mask = torch.from_numpy(arrays.loss_mask[entry.start + 1 : entry.end])
        logits = (
            model(input_ids=ids[None], attention_mask=torch.ones_like(ids[None])).logits[0, :-1].float()
            / temperature
        )
        parts.append(torch.log_softmax(logits, -1).gather(-1, ids[1:, None])[:, 0][mask])
    return torch.cat(parts)


@st.composite
def trees(draw: st.DrawFn, vocab: int = 52) -> Rows:
    """Random groups whose sequences leave a common trunk anywhere, with loss on any tokens but the first, or
    on none.
    """
    groups: Rows = []
    for _ in range(draw(st.integers(1, 3))):
        rng = np.random.default_rng(draw(st.integers(0, 2**16)))
        trunk = rng.integers(0, vocab, 40).tolist()
        rows = []
        for _ in range(draw(st.integers(1, 4))):
            stem, own = draw(st.integers(1, 40)), draw(st.integers(0, 30))
            ids = trunk[:stem] + rng.integers(0, vocab, own).tolist()
            start = draw(st.integers(1, len(ids)))
            has_loss = (np.arange(len(ids)) >= start) & (
                rng.random(len(ids)) < draw(st.sampled_from([0.3, 1.0]))
            )
            rows.append((ids, has_loss.tolist()))
        groups.append(
            [rows[0]] * len(rows) if draw(st.booleans()) else rows
        )  # a policy that has learnt its task says the same again
    return groups
