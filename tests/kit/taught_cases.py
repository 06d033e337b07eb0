"""A taught run, and checks of its journal."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from token_cases import trajectory_of

from asyncrl.extensions.scoring.teacher import Scoring
from asyncrl.journal.read import read_batch, reading
from asyncrl.messages.records import Prompt, Rollout, Trajectory, VersionSpan
from asyncrl.messages.tokens import (
    DISTILL_IDS,
    DISTILL_LOGPROBS,
    SUPPORT,
    TEACHER,
    Ragged,
    Tokens,
)

VOCABULARY = 52
SCORING = {
    "top_k": 0,
    "num_ids": 2**31,
    "scores": lambda _: True,
    "prompts": None,
    "notes_version": False,
}
QUESTION = Prompt("sums/e0/0", ({"role": "user", "content": "1+2"},))


def make_scoring(temperature: float = 1.0, **given: Any) -> Scoring:
    """Make the scoring of a teacher of all tasks."""
    return Scoring(temperature=temperature, **SCORING | given)


def make_branch(num_tokens: int, sampled: list[slice], seed: int = 0) -> Trajectory:
    """Make random tokens and mark these as sampled."""
    mask = np.zeros(num_tokens, np.bool_)
    for part in sampled:
        mask[part] = True
    ids = (
        np.random.default_rng(seed).integers(0, VOCABULARY, num_tokens).astype(np.int32)
    )
    spans = tuple(VersionSpan(part.start, part.stop, 0) for part in sampled)
    return trajectory_of(0, ids, mask, np.where(mask, -1, 0), spans)


def cut_at(branch: Trajectory, place: int) -> Trajectory:
    """Draw this token from a support: itself."""
    lists = [[] for _ in branch.token_ids]
    lists[place] = [int(branch.token_ids[place])]
    columns = {SUPPORT: Ragged.of(lists, "<i4")}
    return replace(branch, tokens=branch.tokens.with_columns(columns))


ROLLOUTS: list[Rollout] = [
    (make_branch(6, [slice(3, 6)]),),
    (cut_at(make_branch(9, [slice(3, 8)], seed=4), 5),),
    (make_branch(300, [slice(1, 300)], seed=1),),
    (
        make_branch(40, [slice(5, 9), slice(20, 33)], seed=2),
        make_branch(12, [slice(11, 12)], seed=3),
    ),
    # Its second branch has only untrained calls, such as greedy ones.
    (make_branch(20, [slice(5, 9)], seed=5), make_branch(8, [], seed=6)),
]


def taught(tokens: Tokens) -> np.ndarray:
    values: np.ndarray = tokens.columns[TEACHER]
    return values


def plain_logprobs(model: Any, branch: Trajectory, temperature: float) -> np.ndarray:
    """Return the logprobs of all tokens but the first by one forward."""
    ids = torch.from_numpy(branch.token_ids.astype(np.int64))
    with torch.no_grad():
        logits = model(input_ids=ids[None]).logits[0, :-1] / temperature
    return torch.log_softmax(logits, -1).gather(1, ids[1:, None])[:, 0].numpy()


def check_tops(
    model: Any,
    branch: Trajectory,
    temperature: float,
    has_term: np.ndarray,
    top_k: int = 4,
) -> None:
    ids, logprobs = (
        branch.tokens.column(name) for name in (DISTILL_IDS, DISTILL_LOGPROBS)
    )
    if not has_term.any():
        assert not len(ids.values)
        return
    tokens = torch.from_numpy(branch.token_ids.astype(np.int64))
    with torch.no_grad():
        logits = model(input_ids=tokens[None]).logits[0, :-1] / temperature
    top = torch.log_softmax(logits, -1)[has_term[1:]].topk(top_k)
    assert ids.sizes.tolist() == (top_k * has_term).tolist()
    assert ids.values.tolist() == top.indices.flatten().tolist()
    np.testing.assert_allclose(logprobs.values, top.values.flatten(), atol=1e-4)


def check_journal(run_dir: Path, models: dict[str, Any], top_k: int) -> Counter[str]:
    """Compare what the first two batches are taught with the model of each task; return
    the tokens of each task.
    """
    with reading(run_dir / "journal.sqlite") as connection:
        groups = [read_batch(connection, version).groups for version in range(2)]
    num_scored = Counter[str]()
    for group in itertools.chain.from_iterable(groups):
        model = models[group.prompt.task]
        for branch in group.trajectories:
            mask = branch.loss_mask
            expected = plain_logprobs(model, branch, 1.0)[mask[1:]]
            np.testing.assert_allclose(taught(branch.tokens)[mask], expected, atol=1e-4)
            check_tops(model, branch, 1.0, mask, top_k)
            num_scored[group.prompt.task] += int(mask.sum())
    return num_scored
