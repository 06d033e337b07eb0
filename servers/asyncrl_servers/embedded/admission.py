"""Gives queued requests their rows and prefills their prompts, each different one once. Knows rows and the runner; decides nothing."""

from __future__ import annotations

import torch
from torch import Tensor

from asyncrl_servers.embedded.runner import Runner
from asyncrl_servers.embedded.sequence import RunningRows, Sequence


def admit(runner: Runner, rows: RunningRows, sequences: list[Sequence], version: int) -> Tensor:
    """Rows for `sequences`, which run under `version` from here on; returns the logits [N, V] after their prompts."""
    first = rows.n
    leaders: dict[tuple[int, ...], int] = {}
    jobs: list[tuple[int, tuple[int, ...]]] = []
    logits: list[Tensor | None] = [None] * len(sequences)
    followers: list[tuple[int, int]] = []
    # Longest first, as `segments` wants the rows.
    for index, sequence in enumerate(sorted(sequences, key=lambda sequence: -len(sequence.prompt_ids))):
        sequence.marks.append((0, version))
        row, prompt_ids = rows.add(sequence), sequence.prompt_ids
        if prompt_ids in leaders:
            followers.append((index, leaders[prompt_ids]))
        elif (remembered := runner.recall(row, prompt_ids)) is not None:
            logits[index] = remembered
        else:
            leaders[prompt_ids] = index
            jobs.append((row, prompt_ids))
    if jobs:
        for (row, prompt_ids), logits_V in zip(jobs, runner.prefill(jobs), strict=True):
            logits[row - first] = logits_V
            if rows.sequences[row].request.num_resumed == 0:
                runner.remember(row, prompt_ids, logits_V)
    for index, leader in followers:
        length = len(rows.sequences[first + leader].prompt_ids)
        runner.cache.copy_slot(first + leader, first + index, length)
        logits[index] = logits[leader]
    return torch.stack([one for one in logits if one is not None])
