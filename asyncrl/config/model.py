"""Sections `model`, `task` and `generator`: what learns, from what, and how a rollout is run."""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import Field, model_validator

from asyncrl.config.base import DType, FrozenConfig


class ScratchConfig(FrozenConfig):
    """A small model with random weights, made at the start of the run (seeded by `seed`)."""

    architecture: dict[str, Any]
    """Keys of a transformers config, `model_type` included; vocab_size and token ids are filled in."""
    characters: str = Field(min_length=2)
    """Alphabet of the character-level tokenizer: one token a character."""


class ModelConfig(FrozenConfig):
    """Which model learns. Give `path` or `scratch`."""

    path: str | None = None
    """Hugging Face folder or hub id of a causal language model with a chat template."""
    scratch: ScratchConfig | None = None
    """Instead of `path`: architecture and alphabet of a model with random weights."""
    dtype: DType = "auto"
    """Type of the weights in engines and trainer (auto = bfloat16 on CUDA, float32 on CPU)."""
    chat_template: str | None = None
    """Jinja file that replaces the tokenizer's chat template (none = the tokenizer's own)."""

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if (self.path is None) == (self.scratch is None):
            raise ValueError("give model.path (a folder or hub id) or model.scratch (a model with random weights), not both")
        return self


class TaskConfig(FrozenConfig):
    """Where prompts come from and what scores the answers. Give one of `python`, `files`, `dataset`, `reasoning_gym`."""

    python: str | None = None
    """`module:Class` of a task of your own; built with `args` and the run's seed."""
    files: list[str] | None = None
    """JSONL or parquet files, one prompt a row."""
    dataset: str | None = None
    """Hugging Face dataset: hub id or folder."""
    split: str = "train"
    """Split of `dataset`."""
    reasoning_gym: str | None = None
    """Name of a reasoning-gym task; `args` are its own settings, `size` the number of prompts."""
    size: int = Field(default=1000, ge=1)
    """Number of prompts that a generated task makes (python and reasoning_gym)."""
    args: dict[str, Any] = {}
    """Settings of the task itself, passed as they are."""
    prompt_column: str = "prompt"
    """Column with the prompt: a text, or a list of chat messages."""
    answer_column: str | None = "answer"
    """Column with the reference answer, handed to the reward function (none = no such column)."""
    reward: str | None = None
    """`module:function` with (prompt, completion, answer) -> float, or `math` for math-verify. Not for python and
    reasoning_gym, which score themselves."""
    system_prompt: str | None = None
    """System message before every prompt (none = no system message)."""
    shuffle: bool = True
    """Seeded shuffle, another one each epoch (false = file order)."""
    reward_pool: Literal["auto", "inline", "thread", "process"] = "auto"
    """Where the reward function runs: inline on the event loop (fast pure functions only), in threads, or in
    processes, which alone can be ended when they hang (auto = process for `math`, thread for all else)."""
    reward_workers: int = Field(default=4, ge=1)
    """Rewards computed at once in `thread` and `process`."""
    reward_timeout_s: float = Field(default=30.0, gt=0)
    """Seconds until a reward counts as a failed rollout (never as a reward of 0)."""

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        sources = {name: value for name in ("python", "files", "dataset", "reasoning_gym") if (value := getattr(self, name)) is not None}
        if len(sources) != 1:
            given = ", ".join(sources) or "none of them"
            raise ValueError(f"give exactly one of python, files, dataset, reasoning_gym (given: {given})")
        scores_itself = "python" in sources or "reasoning_gym" in sources
        if scores_itself and self.reward is not None:
            raise ValueError(f"task.reward={self.reward} is set, but a {next(iter(sources))} task scores itself; remove task.reward")
        if not scores_itself and self.reward is None:
            raise ValueError("task.reward is missing: give module:function, or `math` for answers checked by math-verify")
        return self


class GeneratorConfig(FrozenConfig):
    """How a rollout is run."""

    kind: Literal["single_turn"] = "single_turn"
    """single_turn: one prompt, one completion."""
    stop: list[str] = []
    """Texts that end a completion, beside the model's end-of-turn token."""
