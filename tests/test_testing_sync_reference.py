"""The plain loop against a little bandit whose every draw can be computed by hand."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from asyncrl.messages.records import Batch, Completion, Prompt, VersionSpan
from asyncrl.messages.trainer_calls import TrainResponse
from asyncrl.testing.sync_reference import SyncParts, SyncStep, sync_reference


class Bandit:
    """Samples `weight + seed % 7`, once or twice; training adds the mean reward to the weight."""

    def __init__(self) -> None:
        self.trained_weight, self.served_weight, self.served_version = 0, 0, 0
        self.num_prompts = 0
        self.calls: list[str] = []

    def next_prompt(self) -> Prompt:
        self.num_prompts += 1
        return Prompt(
            prompt_id=f"e0-{self.num_prompts}", messages=({"role": "user", "content": "ab"},), answer=3
        )

    def generate(self, requests: Sequence[tuple[Sequence[int], int]]) -> list[Completion]:
        return [self.sample(seed) for _, seed in requests]

    def sample(self, seed: int) -> Completion:
        self.calls.append(f"generate v{self.served_version}")
        tokens = (self.served_weight + seed % 7,) * (1 + seed % 2)
        spans = (VersionSpan(0, len(tokens), self.served_version),)
        return Completion(tokens, (-0.5,) * len(tokens), spans, "length" if seed % 2 else "stop")

    def train(self, batch: Batch) -> TrainResponse:
        self.calls.append(f"train v{batch.version}")
        self.trained_weight += len(batch.groups)
        return TrainResponse(
            policy_version=batch.version + 1, metrics={"policy/loss": float(self.trained_weight)}
        )

    def load_weights(self, version: int) -> None:
        self.calls.append(f"load v{version}")
        self.served_weight, self.served_version = self.trained_weight, version

    def parts(self) -> SyncParts:
        return SyncParts(
            next_prompt=self.next_prompt,
            encode=lambda messages: [ord(letter) for letter in messages[0]["content"]],
            derive_seed=lambda prompt_id, sample_index: int(prompt_id[3:]) * 10 + sample_index,
            generate=self.generate,
            decode=lambda ids: ",".join(map(str, ids)),
            score=lambda prompt, text: float(text.split(",")[0]) - prompt.answer,
            train=self.train,
            load_weights=self.load_weights,
        )


def play() -> tuple[Bandit, list[SyncStep]]:
    bandit = Bandit()
    return bandit, list(sync_reference(bandit.parts(), num_groups=2, group_size=2, num_steps=2))


def test_every_step_samples_with_the_weights_of_the_step_before() -> None:
    bandit, steps = play()
    assert bandit.calls == [
        *["generate v0"] * 4,
        "train v0",
        "load v1",
        *["generate v1"] * 4,
        "train v1",
        "load v2",
    ]
    first = [(97, 98, 10 % 7), (97, 98, 11 % 7, 11 % 7), (97, 98, 20 % 7), (97, 98, 21 % 7, 21 % 7)]
    assert steps[0].token_ids == first
    assert steps[1].token_ids[0] == (97, 98, 2 + 30 % 7)
    assert steps[1].rewards[0] == 2 + 30 % 7 - 3
    assert [step.metrics["policy/loss"] for step in steps] == [2.0, 4.0]


def test_a_batch_is_what_the_trainer_of_a_real_run_would_be_given() -> None:
    _, steps = play()
    batch = steps[1].batch
    assert (batch.version, batch.min_version, batch.mask_older) == (1, 1, False)
    assert [group.group_id for group in batch.groups] == [2, 3]
    trajectory = batch.groups[0].trajectories[1]
    assert trajectory.token_ids.dtype == np.int32
    assert trajectory.behaviour_logprobs.dtype == np.float32
    assert trajectory.loss_mask.tolist() == [False, False, True, True]
    assert trajectory.behaviour_logprobs.tolist() == [0.0, 0.0, -0.5, -0.5]
    assert trajectory.version_spans == (VersionSpan(2, 4, 1),)
    assert trajectory.is_truncated
    assert trajectory.sample_index == 1
