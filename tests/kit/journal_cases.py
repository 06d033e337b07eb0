"""Groups by hand for the journal's tests, told as producers tell them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
from token_cases import completion_of, masked_tokens, same_tokens

from asyncrl.journal.journal import Journal
from asyncrl.journal.read import ResumeState, reading
from asyncrl.messages.records import (
    Batch,
    Completion,
    Credit,
    Group,
    GroupId,
    PolicyCall,
    Prompt,
    RewardPart,
    Rollout,
    Ticket,
    Trajectory,
    VersionSpan,
)
from asyncrl.messages.tokens import ROUTING, TEACHER

RUN_ID = "a run"


def open_journal(path: Path) -> Journal:
    return Journal(path, run_id=RUN_ID)


def make_prompt(group_id: int) -> Prompt:
    return Prompt(
        f"0/{group_id}", ({"role": "user", "content": f"Question {group_id}"},)
    )


def make_trajectory(
    group_id: int, sample_index: int, num_tokens: int = 12, version: int = 0
) -> Trajectory:
    """Two prompt tokens, then sampled ones of `version`; all numbers follow from the
    ids.
    """
    draw = np.random.default_rng([group_id, sample_index])
    mask = np.arange(num_tokens) >= 2
    logprobs = np.where(mask, -draw.exponential(size=num_tokens), 0).astype(np.float32)
    ids = draw.integers(0, 50_000, num_tokens)
    is_taught = (group_id + sample_index) % 2 == 1
    taught = (
        {TEACHER: np.where(mask, 2 * logprobs, 0).astype(np.float32)}
        if is_taught
        else {}
    )
    tokens = masked_tokens(
        ids, mask, logprobs, [VersionSpan(2, num_tokens, version)], **taught
    )
    return Trajectory(
        sample_index,
        tokens,
        reward=float(draw.random()),
        metrics={"turns": 1.0},
        parts={"exact": RewardPart(1.0), "form": RewardPart(None, 0.1 + sample_index)},
        calls=(
            PolicyCall(
                2,
                num_tokens,
                "chatcmpl-0",
                1.5,
                2.25,
                "tool_calls",
                (("c1", "add"),),
                "searcher",
            ),
        ),
    )


def make_rollout(
    group_id: int, sample_index: int, *, has_credits: bool = False, **options: Any
) -> Rollout:
    """Two branches of different tokens and one reward."""
    branches = []
    for number in range(2):
        branch = make_trajectory(group_id, 100 * number + sample_index, **options)
        branch = replace(
            branch, sample_index=sample_index, branch=number, reward=0.25 + sample_index
        )
        credits = (
            Credit(start, start + 5, number + start / 10, 2 * number + start // 7)
            for start in (2, 7)
        )
        branches.append(replace(branch, credits=tuple(credits) if has_credits else ()))
    return tuple(branches)


def make_group(group_id: int, **options: Any) -> Group:
    trajectories = tuple(
        make_trajectory(group_id, index, **options) for index in range(2)
    )
    return Group(GroupId(group_id), make_prompt(group_id), trajectories)


def make_batch(version: int, *group_ids: int, **options: Any) -> Batch:
    groups = tuple(make_group(group_id, **options) for group_id in group_ids)
    return Batch(
        version,
        groups,
        min_version=max(0, version - 1),
        part_groups=2**version,
        next_part_groups=2 * 2**version,
    )


def make_partial(num_tokens: int) -> Completion:
    """A prompt of 3 tokens and 2 experts a token."""
    logprobs = np.linspace(-1, -2, num_tokens, dtype=np.float32).tolist()
    partial = completion_of(
        range(num_tokens), logprobs, num_interruptions=1, prompt=(7, 8, 9)
    )
    routing = np.arange(2 * (3 + num_tokens), dtype="<u2").reshape(-1, 2)
    return replace(partial, tokens=partial.tokens.with_columns({ROUTING: routing}))


def admit(journal: Journal, group_id: int, start_version: int = 0) -> None:
    journal.add_admission_nowait(
        Ticket(GroupId(group_id), start_version), make_prompt(group_id)
    )


def tell_ready(journal: Journal, *group_ids: int, **options: Any) -> None:
    """Report the whole life of groups up to ready."""
    for group_id in group_ids:
        admit(journal, group_id)
        for trajectory in make_group(group_id, **options).trajectories:
            journal.add_rollout_nowait(GroupId(group_id), (trajectory,))
        journal.end_group_nowait(GroupId(group_id), "ready", "")


async def tell_a_run(journal: Journal) -> None:
    """Groups 0 and 1 make batch 0, 2 and 3 batch 1; 4 failed, 5 was dropped and its
    prompt runs as 6.
    """
    tell_ready(journal, 0, 1, 2, 3)
    admit(journal, 4)
    journal.add_segment_nowait(GroupId(4), 0, 0, make_partial(7))
    journal.add_lost_tokens_nowait(GroupId(4), 0, 0)
    journal.add_segment_nowait(GroupId(4), 0, 1, make_partial(5))
    journal.add_failure_nowait(GroupId(4), 0, 2, "timed out")
    journal.end_group_nowait(GroupId(4), "failed", "too few usable rollouts")
    admit(journal, 5)
    journal.add_segment_nowait(GroupId(5), 0, 0, make_partial(3))
    journal.add_rollout_nowait(GroupId(5), (make_trajectory(5, 1),))
    journal.end_group_nowait(GroupId(5), "requeued", "dropped", requeued=1)
    await journal.add_batch(make_batch(0, 0, 1))
    journal.add_training_nowait(0, {"policy/loss": 0.25})
    journal.add_push_nowait(1, "digest")
    await journal.add_batch(
        replace(make_batch(1, 2, 3), min_version=1, mask_older=True)
    )
    journal.add_admission_nowait(Ticket(GroupId(6), 1), make_prompt(5))
    journal.add_segment_nowait(GroupId(6), 1, 0, make_partial(4))
    journal.add_event_nowait("restored", {"version": 1, "who": "run"})
    journal.add_event_nowait("engine_restarted", {"name": "engine-0", "after_s": 1.5})
    await journal.flush()


def same_trajectory(one: Trajectory, other: Trajectory) -> bool:
    """Equal to the last bit."""

    def plain(trajectory: Trajectory) -> list[str]:  # repr: NaN is itself
        names = [field.name for field in fields(Trajectory) if field.name != "tokens"]
        return [repr(getattr(trajectory, name)) for name in names]

    return same_tokens(one.tokens, other.tokens) and plain(one) == plain(other)


def same_partial(one: Completion, other: Completion) -> bool:
    plain = [
        (each.num_prompt, each.finish_reason, each.num_interruptions)
        for each in (one, other)
    ]
    return same_tokens(one.tokens, other.tokens) and plain[0] == plain[1]


def same_group(one: Group, other: Group) -> bool:
    """Same prompt, same trajectories in the same order."""
    return (one.group_id, one.prompt.prompt_id) == (
        other.group_id,
        other.prompt.prompt_id,
    ) and all(
        same_trajectory(a, b)
        for a, b in zip(one.trajectories, other.trajectories, strict=True)
    )


def load_batches(state: ResumeState) -> list[Batch]:
    """Load the batches that the trainer repeats."""
    return [
        state.load_batch(version)
        for version in range(state.checkpoint_version, state.next_version)
    ]


def asked(path: Path, story: Callable[..., Any], *which: int) -> Any:
    """Return one story of a group, a batch or the run."""
    with reading(path) as connection:
        return story(connection, *which)


def with_journal(path: Path, story: Callable[[Journal], Awaitable[None]]) -> Path:
    """Play a story with an open journal, then close it."""

    async def play() -> None:
        journal = open_journal(path)
        try:
            await story(journal)
        finally:
            await journal.aclose()

    asyncio.run(play())
    return path
