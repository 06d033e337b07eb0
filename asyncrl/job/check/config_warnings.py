"""Warnings of `asyncrl check`: every value is valid, and the run would still train
badly.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from itertools import islice

from asyncrl.algorithms.registry import AGE_AT_NO_PRICE, slow_with_age
from asyncrl.config import RunConfig
from asyncrl.config.trainer_config import TrainerConfig
from asyncrl.messages.records import Prompt
from asyncrl.tasks.prompt_source import TaskPrompts
from asyncrl.tasks.task import PromptTask, RowTask

LOWEST_LORA_RATE, HIGHEST_RATE = 1e-5, 1e-2
"""docs/faq.md: adapters hardly move below, and no model of the recipes survived above."""
MOST_TRIED = 20
"""Rows on which a reward is tried."""


def find_warnings(
    trainer: TrainerConfig,
    num_rows: int | None,
    trained: Collection[str],
    held_out: Mapping[str, str],
) -> Iterator[str]:
    """`num_rows`: prompts or demonstrations, if known. `trained`: digests of rows;
    `held_out`: digests of evaluations, by key.
    """
    rate = f"trainer.learning_rate={trainer.learning_rate:g}"
    if not trainer.adapters and trainer.learning_rate > HIGHEST_RATE:
        yield f"{rate} probably destroys the model: set it to {HIGHEST_RATE:g} or less"
    if trainer.adapters and trainer.learning_rate < LOWEST_LORA_RATE:
        yield f"{rate} hardly moves LoRA adapters: set it to {LOWEST_LORA_RATE:g} or more"
    num_steps = trainer.num_steps * trainer.mini_batches * trainer.epochs
    if trainer.warmup_steps > num_steps:
        yield (
            f"trainer.warmup_steps={trainer.warmup_steps} is above the {num_steps} steps of the run, so the "
            "rate never reaches trainer.learning_rate: lower it"
        )
    if num_rows is not None and trainer.num_groups > num_rows:
        yield f"trainer.num_groups={trainer.num_groups}: a step repeats some of the {num_rows} rows"
    for key, digest in held_out.items():
        if digest in trained:
            yield f"{key}: its rows are also trained, so it measures memory; hold rows out"


def warn_of_age(config: RunConfig) -> Iterator[str]:
    """Yield a warning if tokens will be older than the loss learns from at full speed."""
    ahead = config.buffer.look_ahead
    loss = slow_with_age(config)
    if ahead != "auto" and ahead > AGE_AT_NO_PRICE and loss:
        yield (
            f"buffer.look_ahead={ahead} makes tokens about {ahead} versions old, and algorithm.loss={loss} "
            "learns slowly from such tokens (docs/results/staleness.md): set algorithm.loss=age_clip, or "
            "buffer.look_ahead=auto"
        )


def repeats_of(tasks: Mapping[str, PromptTask]) -> Iterator[str]:
    """Yield a warning for each task in which most rows repeat the prompt of another."""
    for key, task in tasks.items():
        if isinstance(task, RowTask) and 2 * task.num_prompts < len(task):
            num = task.num_prompts
            yield f"{key}: its {len(task)} rows have {num} different prompts: remove repeated rows"


def digests_of(tasks: Mapping[str, PromptTask]) -> dict[str, str]:
    return {
        key: task.digest for key, task in tasks.items() if isinstance(task, RowTask)
    }


def tried_prompts(task: PromptTask) -> Iterator[Prompt]:
    """Yield up to MOST_TRIED rows, beginning with a row for each type of answer."""
    if not isinstance(task, RowTask):
        return
    last_first = reversed(range(len(task)))
    firsts = {type(task.prompt(index).answer): index for index in last_first}
    indices = dict.fromkeys([*firsts.values(), *range(len(task))])
    made = TaskPrompts(task, seed=0, shuffle=False)
    for index in islice(indices, MOST_TRIED):
        yield made.make(0, index)
