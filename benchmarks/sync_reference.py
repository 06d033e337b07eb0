"""The plain synchronous RL loop: sample, score, train, load the new weights.

A run with max_staleness=0 must equal it bit for bit, so it shares no code with the
parts under test.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, product

import numpy as np

from asyncrl.messages.records import (
    Batch,
    Completion,
    Group,
    GroupId,
    Prompt,
    Trajectory,
    VersionSpan,
)
from asyncrl.messages.tokens import BEHAVIOUR, Tokens
from asyncrl.messages.trainer_api import TrainResponse


@dataclass(frozen=True, slots=True)
class SyncParts:
    """Plain functions, called one at a time."""

    next_prompt: Callable[[], Prompt]
    encode: Callable[[Sequence[Mapping[str, str]]], Sequence[int]]
    """Token ids of chat messages."""
    derive_seed: Callable[[str, int], int]
    """Seed from (prompt_id, sample_index)."""
    generate: Callable[[Sequence[tuple[Sequence[int], int]]], Sequence[Completion]]
    """Completions of (prompt token ids, seed) with the weights loaded last. A
    deterministic engine gives the same tokens one by one and as a batch.
    """
    decode: Callable[[Sequence[int]], str]
    score: Callable[[Prompt, str], float]
    train: Callable[[Batch], TrainResponse]
    load_weights: Callable[[int], None]
    """Copy the trained weights into the generator, as this policy_version."""


def sync_reference(
    parts: SyncParts,
    *,
    num_groups: int,
    group_size: int,
    num_steps: int,
    part_tokens: int = 0,
) -> Iterator[tuple[Batch, TrainResponse]]:
    """Take `num_steps` optimizer steps, each on `num_groups` prompts with `group_size`
    samples, and yield each batch and response. A batch is trained in parts whose
    `part_tokens` the sizes of the batch before promise (0: whole).

    No errors are caught.
    """
    part_groups = 0
    for version in range(num_steps):
        prompts = [parts.next_prompt() for _ in range(num_groups)]
        prompt_ids = [tuple(parts.encode(prompt.messages)) for prompt in prompts]
        places = product(range(num_groups), range(group_size))
        # In the order in which the asynchronous run admits its groups. Seeds depend on
        # the prompt and the sample, so equal requests give equal tokens.
        requests = [
            (prompt_ids[i], parts.derive_seed(prompts[i].prompt_id, sample))
            for i, sample in places
        ]
        completions = iter(parts.generate(requests))
        groups = []
        for index, (prompt, ids) in enumerate(zip(prompts, prompt_ids, strict=True)):
            trajectories = []
            for sample, completion in enumerate(islice(completions, group_size)):
                sampled = completion.token_ids
                logprobs = np.array(
                    [0.0] * len(ids) + [*completion.behaviour_logprobs], np.float32
                )
                tokens = Tokens(
                    np.array([*ids, *sampled], np.int32),
                    (VersionSpan(len(ids), len(ids) + len(sampled), version),),
                    {BEHAVIOUR: logprobs},
                )
                trajectories.append(
                    Trajectory(
                        sample_index=sample,
                        tokens=tokens,
                        reward=parts.score(prompt, parts.decode(completion.token_ids)),
                        is_truncated=completion.finish_reason == "length",
                    )
                )
            groups.append(
                Group(
                    GroupId(version * num_groups + index), prompt, tuple(trajectories)
                )
            )
        # Every token is of this version: with max_staleness 0 nothing older may be in a
        # batch.
        batch = Batch(version, tuple(groups), version, part_groups=part_groups)
        part_groups = groups_of_part(batch, part_tokens)
        report = parts.train(batch)
        parts.load_weights(report.policy_version)
        yield batch, report


def groups_of_part(batch: Batch, part_tokens: int) -> int:
    if part_tokens == 0:
        return 0
    num_tokens = 0
    for group in batch.groups:
        prompt = {one.tokens.num_context for one in group.trajectories}
        sampled = [one.tokens.num_sampled for one in group.trajectories]
        num_tokens += max(prompt) + sum(sampled)
    mean = num_tokens / len(batch.groups)
    part_groups: int = 2 ** max(0, math.ceil(math.log2(part_tokens / mean)))
    return part_groups if part_groups <= len(batch.groups) / 2 else 0
