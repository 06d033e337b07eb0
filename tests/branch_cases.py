"""Rollouts with several turns and branches, and their loss in plain words."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from asyncrl.messages.records import Credit
from asyncrl.messages.trainer_api import BatchArrays, BatchHeader, TrajectoryHeader

VOCAB = range(6, 52)


@dataclass
class Branch:
    """Tokens, which of them were sampled here, and (start, end, reward, unit) of its credits."""

    token_ids: list[int]
    mask: list[bool]
    credits: list[tuple[int, int, float, int]] = field(default_factory=list)

    def turn(self, rng: np.random.Generator, num_others: int, num_sampled: int) -> None:
        """Append tokens of the harness, then sampled ones."""
        self.token_ids += rng.choice(VOCAB, num_others + num_sampled).tolist()
        self.mask += [False] * num_others + [True] * num_sampled

    def fork(self, end: int) -> Branch:
        """Return a branch that begins with the first tokens as context."""
        return Branch(self.token_ids[:end], [False] * end)

    @property
    def turns(self) -> list[tuple[int, int]]:
        """[start, end) of each stretch of sampled tokens."""
        edges = np.flatnonzero(np.diff([False, *self.mask, False]))
        return [(int(start), int(end)) for start, end in edges.reshape(-1, 2)]


def make_rollout(rng: np.random.Generator, prompt: list[int], *, credit: str) -> list[Branch]:
    """One to three branches of one to three turns each. `credit`: "none", "turn" or "branch"."""
    main = Branch([*prompt], [False] * len(prompt))
    main.turn(rng, 1, int(rng.integers(1, 6)))
    branches = [main]
    for _ in range(int(rng.integers(0, 3))):
        main.turn(rng, int(rng.integers(1, 5)), int(rng.integers(1, 6)))
    for _ in range(int(rng.integers(0, 3))):
        if rng.random() < 0.7:
            other = main.fork(int(rng.integers(2, len(main.token_ids))))
        else:
            other = Branch(rng.choice(VOCAB, 4).tolist(), [False] * 4)
        for _ in range(int(rng.integers(1, 3))):
            other.turn(rng, int(rng.integers(1, 5)), int(rng.integers(1, 6)))
        branches.append(other)
    unit = 0
    for number, branch in enumerate(branches):
        reward = round(float(rng.random()), 3)
        for start, end in branch.turns if credit != "none" else []:
            if credit == "turn":
                branch.credits.append((start, end, round(float(rng.random()), 3), unit))
                unit += 1
            else:
                branch.credits.append((start, end, reward, 7 - number))
    return branches


def make_branch_batch(
    seed: int,
    *,
    credits: tuple[str, ...] = ("none", "turn", "branch"),
    num_groups: int = 3,
    group_size: int = 3,
    version: int = 0,
    **header: Any,
) -> tuple[BatchHeader, BatchArrays]:
    """Make groups of such rollouts and draw how each earns credit."""
    rng = np.random.default_rng(seed)
    entries, ids, mask = list[TrajectoryHeader](), list[int](), list[bool]()
    for group in range(num_groups):
        prompt = rng.choice(VOCAB, 12).tolist()
        for sample in range(group_size):
            reward = float(sample == 0) + round(float(rng.random()), 3)
            for number, branch in enumerate(make_rollout(rng, prompt, credit=str(rng.choice(credits)))):
                credits_of = [Credit(*each) for each in branch.credits]
                where = {
                    "group_index": group,
                    "group_id": 10 + group,
                    "prompt_id": f"p{group}",
                    "branch": number,
                }
                where |= {"start": len(ids), "end": len(ids) + len(branch.token_ids), "sample_index": sample}
                entries.append(TrajectoryHeader(reward=reward, credits=credits_of, **where))
                ids += branch.token_ids
                mask += branch.mask
    sampled = np.array(mask)
    arrays = BatchArrays(
        token_ids=np.array(ids, np.int32),
        loss_mask=sampled,
        behaviour_logprobs=np.where(sampled, rng.normal(-4.0, 0.3, len(ids)), 0).astype(np.float32),
        versions=np.where(sampled, version, -1).astype(np.int32),
    )
    fields = {"version": version, "min_version": version, "mask_older": False, "trajectories": entries}
    return BatchHeader(**{**fields, **header}), arrays


Key = tuple[int, int, int | None]


def plain_units(header: BatchHeader) -> dict[Key, tuple[float, list[int]]]:
    """(group, sample, unit) -> its reward, and the places of all its tokens."""
    units: dict[Key, tuple[float, list[int]]] = {}
    for entry in header.trajectories:
        sample = entry.group_id, entry.sample_index
        for credit in entry.credits:
            unit = units.setdefault((*sample, credit.unit), (credit.reward, []))
            unit[1].extend(range(entry.start + credit.start, entry.start + credit.end))
        if not entry.credits:
            units.setdefault((*sample, None), (entry.reward, []))[1].extend(range(entry.start, entry.end))
    return units


def plain_advantages(
    header: BatchHeader, num_tokens: int, penalty: Callable[[list[int]], float] = lambda places: 0.0
) -> np.ndarray:
    """GRPO over the units of each group; `penalty` of a unit's places lowers its reward."""
    units = {key: (reward - penalty(places), places) for key, (reward, places) in plain_units(header).items()}
    advantages = np.zeros(num_tokens)
    for group_id in {key[0] for key in units}:
        rewards = np.array([reward for key, (reward, _) in units.items() if key[0] == group_id])
        for key, (reward, places) in units.items():
            if key[0] == group_id:
                advantages[places] = (reward - rewards.mean()) / (rewards.std() + 1e-4)
    return advantages


def plain_loss(
    model: Any, header: BatchHeader, arrays: BatchArrays, advantages: np.ndarray, *, aggregate: str
) -> torch.Tensor:
    """PPO's clipped loss, clip range 0.2, over one plain forward a branch."""
    losses = []
    for entry in header.trajectories:
        part = slice(entry.start + 1, entry.end)
        ids = torch.from_numpy(arrays.token_ids[entry.start : entry.end].astype(np.int64))
        logprobs = torch.log_softmax(model(input_ids=ids[None]).logits[0, :-1], -1)
        current = logprobs.gather(-1, ids[1:, None])[:, 0]
        ratio = (current - torch.from_numpy(arrays.behaviour_logprobs[part])).exp()
        advantage = torch.from_numpy(advantages[part]).float()
        token_losses = -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
        losses.append(token_losses[torch.from_numpy(arrays.loss_mask[part])])
    if aggregate == "sequence":
        return torch.stack([one.mean() for one in losses]).mean()
    return torch.cat(losses).mean()
