"""TRL's side of benchmarks/trainer.py, in its own process: GRPOTrainer.train() as
shipped, its rollouts given.

    python benchmarks/trainer_trl.py CASE.json RESULT.json

Counted are compute_loss and backward of every micro-batch, gradient clipping, and
optimizer.step. Not counted: data loader, rollouts, tokenising, rewards, advantages,
padding, shuffling and splitting into micro-batches, learning-rate schedule, zero_grad,
callbacks and logging. The statistics that compute_loss makes on its way are counted, as
ours are. Two things differ: rollouts are given, and the ratio is taken to given
behaviour logprobs (`old_per_token_logps`, a key which TRL fills itself whenever
rollouts are older than the step) instead of to the current ones. Dataset order is kept.
"""

from __future__ import annotations

import os
import sys
import tempfile
from typing import Any

os.environ["TRANSFORMERS_VERBOSITY"] = "error"
os.environ["HF_HUB_OFFLINE"] = "1"

import pyarrow as pa
import torch
from datasets import Dataset
from trainer_case import (
    CLIP,
    GROUP_SIZE,
    LEARNING_RATE,
    MAX_COMPLETION,
    MAX_GRAD_NORM,
    Case,
    Meter,
    write_result,
)
from trl import GRPOConfig, GRPOTrainer
from trl_meter import AroundOptimizer, Metered

MAX_STEPS = 1000


class Rollouts:
    """The fixed batch in TRL's terms: a list entry a sequence, groups after one
    another.
    """

    def __init__(self, case: Case) -> None:
        header, arrays = case.batch()
        self.prompt_ids = []
        self.completion_ids = []
        self.behaviour = []
        self.rewards = []
        for entry in header.trajectories:
            ids = arrays.ids[entry.start : entry.end]
            mask = arrays.is_sampled[entry.start : entry.end]
            self.prompt_ids.append(ids[~mask].tolist())
            self.completion_ids.append(ids[mask].tolist())
            self.behaviour.append(
                torch.from_numpy(
                    arrays.behaviour_logprobs[entry.start : entry.end][mask]
                )
            )
            self.rewards.append(entry.reward)


class GivenRollouts(Metered, GRPOTrainer):
    """TRL's trainer with a meter around what trains."""

    rollouts: Rollouts

    def _generate(self, prompts: list[Any]) -> tuple[Any, ...]:
        given = self.rollouts
        if len(prompts) != len(given.prompt_ids):
            raise SystemExit(
                f"TRL asked for {len(prompts)} completions, the batch has {len(given.prompt_ids)}"
            )
        texts = ["" for _ in prompts]
        return given.prompt_ids, given.completion_ids, None, texts, None, {}, None, []

    def _generate_and_score_completions(
        self, inputs: list[dict[str, Any]]
    ) -> dict[str, Any]:
        output: dict[str, Any] = super()._generate_and_score_completions(inputs)
        padded = torch.nn.utils.rnn.pad_sequence(
            self.rollouts.behaviour, batch_first=True
        )
        return {
            **output,
            "old_per_token_logps": padded.to(output["completion_ids"].device),
        }

    def _prepare_inputs(self, generation_batch: Any) -> Any:
        inputs = super()._prepare_inputs(generation_batch)
        # From here on, and not from the beginning of training_step, which continues
        # with compute_loss and backward.
        self.meter.start()
        return inputs


def make_config(case: Case, num_sequences: int, folder: str) -> GRPOConfig:
    return GRPOConfig(
        output_dir=folder,
        use_cpu=case.device == "cpu",
        bf16=case.dtype == "bfloat16",
        gradient_checkpointing=False,
        per_device_train_batch_size=case.micro_batch,
        gradient_accumulation_steps=num_sequences // case.micro_batch,
        num_generations=GROUP_SIZE,
        max_completion_length=MAX_COMPLETION,
        num_iterations=1,
        beta=0.0,
        epsilon=CLIP,
        loss_type="dapo",
        scale_rewards="group",
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant",
        max_grad_norm=MAX_GRAD_NORM,
        max_steps=MAX_STEPS,
        shuffle_dataset=False,
        save_strategy="no",
        logging_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )


def main() -> None:
    """Train until the case's seconds are over."""
    case = Case.load(sys.argv[1])
    torch.set_num_threads(case.threads)
    meter, rollouts = Meter(case), Rollouts(case)
    num_sequences = len(rollouts.rewards)
    # With a fingerprint, datasets does not pickle the table, which fails with pyarrow
    # 26 on Python 3.12.
    rows = pa.table(
        {"prompt": [str(index) for index in range(num_sequences // GROUP_SIZE)]}
    )
    with tempfile.TemporaryDirectory() as folder:
        trainer = GivenRollouts(
            model=case.model_path,
            reward_funcs=lambda completions, **_: rollouts.rewards,
            args=make_config(case, num_sequences, folder),
            train_dataset=Dataset(rows, fingerprint="prompts"),
            callbacks=[AroundOptimizer(meter)],
        )
        trainer.rollouts, trainer.meter = rollouts, meter
        meter.mark_loaded()
        trainer.train()
    write_result(
        sys.argv[2], meter, loss=trainer.first_loss, grad_norm=trainer.first_grad_norm
    )


if __name__ == "__main__":
    main()
