"""TRL's side of benchmarks/end_to_end.py: GRPOTrainer as shipped on an asyncrl config's
model, prompts and reward.

    python benchmarks/end_to_end_trl.py CONFIG [key=value ...] --run-dir DIR [--threads
    1] [--micro-batch 64] [--attention sdpa] [--device cuda] [--generation batching]

It writes metrics.jsonl (step, time_s, reward/mean, sample/length_mean; time_s from the
start of train() to the end of the step) as `asyncrl run` does. The same for both: the
model folder, the prompts and their order, the chat template, the reward function,
batch, steps, temperature, most tokens, AdamW's settings, schedule, gradient clipping,
clip range and the mean over the batch's tokens (TRL's loss_type "dapo"). TRL is spared
all that a user may turn off: logging, evaluation, checkpoints, progress bars, gradient
checkpointing, top-k and top-p. One generation a step makes its whole batch. TRL strips
special tokens before it calls a reward function; here the function decodes the ids
itself, so that both systems are rewarded for the same text.

On CUDA, weights and optimizer are float32 and the passes run in bfloat16, as asyncrl's.
`--generation batching` is the continuous batching of transformers; with it, TRL casts
the trained weights to bfloat16.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import time
from pathlib import Path
from typing import Any

os.environ["TRANSFORMERS_VERBOSITY"] = "error"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_DATASETS_DISABLE_PROGRESS_BARS"] = "1"

import pyarrow as pa
import torch
from datasets import Dataset
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from asyncrl.config import RunConfig, load_config
from asyncrl.launch.processes import run_module
from asyncrl.messages.worker_api import answer_text
from asyncrl.rollouts.tokenizer import HFChatTokenizer
from asyncrl.tasks.prompt_source import PromptSource, TaskPrompts
from asyncrl.tasks.sources import build_task
from asyncrl.trainer.model.model_folder import make_model_folder


class StepLog(TrainerCallback):  # type: ignore[misc]
    """A line of metrics.jsonl a step."""

    def __init__(self, path: Path) -> None:
        self.path, self.step_values = path, dict[str, float]()
        self._started_s = 0.0

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        """The clock starts."""
        self._started_s = time.monotonic()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        times = {
            "step": state.global_step,
            "time_s": time.monotonic() - self._started_s,
        }
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(times | self.step_values) + "\n")


def make_config(config: RunConfig, arguments: argparse.Namespace) -> GRPOConfig:
    """The config in TRL's words."""
    trainer, rollout, algorithm = config.trainer, config.rollout, config.algorithm
    num_sequences = trainer.num_groups * rollout.group_size
    is_cuda = arguments.device == "cuda"
    return GRPOConfig(
        output_dir=str(arguments.run_dir / "trl"),
        seed=config.seed,
        use_cpu=not is_cuda,
        bf16=is_cuda,
        use_transformers_continuous_batching=arguments.generation == "batching",
        use_vllm=arguments.generation == "vllm",
        model_init_kwargs={
            "dtype": "float32",
            "attn_implementation": arguments.attention,
        },
        gradient_checkpointing=False,
        per_device_train_batch_size=arguments.micro_batch,
        gradient_accumulation_steps=num_sequences // arguments.micro_batch,
        generation_batch_size=num_sequences,
        num_generations=rollout.group_size,
        max_completion_length=rollout.max_tokens,
        temperature=rollout.temperature,
        num_iterations=1,
        beta=algorithm.kl_coefficient,
        epsilon=algorithm.clip_low,
        epsilon_high=algorithm.clip_high,
        loss_type="dapo",
        scale_rewards="group",
        learning_rate=trainer.learning_rate,
        lr_scheduler_type=trainer.schedule,
        adam_beta1=trainer.betas[0],
        adam_beta2=trainer.betas[1],
        weight_decay=trainer.weight_decay,
        max_grad_norm=trainer.max_grad_norm or 0.0,
        max_steps=trainer.num_steps,
        shuffle_dataset=False,
        dataloader_pin_memory=False,
        save_strategy="no",
        logging_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )


def main() -> None:
    """Train as the config says."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("config", type=Path)
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument(
        "--micro-batch",
        type=int,
        default=64,
        help="sequences in one forward and backward",
    )
    parser.add_argument("--attention", default="sdpa")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument(
        "--generation", choices=["generate", "batching", "vllm"], default="generate"
    )
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    config = load_config(arguments.config, arguments.overrides)
    arguments.run_dir.mkdir(parents=True, exist_ok=True)
    model_path = asyncio.run(make_model_folder(config, arguments.run_dir, run_module))
    task, tokenizer = build_task(config.task, config.seed), HFChatTokenizer(model_path)
    shuffle = config.task.shuffle
    system = config.task.system_prompt
    feed = PromptSource(
        TaskPrompts(task, seed=config.seed, shuffle=shuffle, system_prompt=system)
    )
    prompts = [
        feed.next_nowait()
        for _ in range(config.trainer.num_steps * config.trainer.num_groups)
    ]
    log = StepLog(arguments.run_dir / "metrics.jsonl")

    def reward(
        completions: list[Any],
        completion_ids: list[list[int]],
        index: list[int],
        **_: Any,
    ) -> list[float]:
        scores = [
            float(
                task.score(prompts[at], answer_text(tokenizer, ids, shows_special=True))
            )  # type: ignore[arg-type]
            for at, ids in zip(index, completion_ids, strict=True)
        ]
        lengths = [len(ids) for ids in completion_ids]
        log.step_values = {
            "reward/mean": sum(scores) / len(scores),
            "sample/length_mean": sum(lengths) / len(lengths),
        }
        return scores

    # With a fingerprint, datasets does not pickle the table, which fails with pyarrow
    # 26 on Python 3.12.
    rows = pa.table(
        {
            "prompt": [
                [dict(message) for message in prompt.messages] for prompt in prompts
            ],
            "index": list(range(len(prompts))),
        }
    )
    trainer = GRPOTrainer(
        model=str(model_path),
        reward_funcs=reward,
        args=make_config(config, arguments),
        train_dataset=Dataset(rows, fingerprint="prompts"),
        callbacks=[log],
    )
    if abs(trainer.generation_config.temperature - config.rollout.temperature) > 0:
        raise SystemExit("TRL samples at another temperature than the config says")
    trainer.train()


if __name__ == "__main__":
    main()
