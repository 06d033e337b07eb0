"""What a trainer worker is told at its start. Knows no torch: the controller writes it, the worker reads it."""

from __future__ import annotations

from pathlib import Path
from typing import Self

from pydantic import Field, model_validator

from asyncrl.config import TrainerConfig
from asyncrl.config.base import Device, DType, FrozenConfig


class TrainerSpec(FrozenConfig):
    """Everything one trainer worker needs. `loss` and `advantage` are `module:function`."""

    model_path: str
    """Hugging Face folder or hub id."""
    dtype: DType = "auto"
    """Type of the exported weights and of the forward pass; master weights are always float32."""
    device: Device = "auto"
    """auto = CUDA where there is a device, else CPU."""
    seed: int = Field(default=0, ge=0)
    """Seed of whatever a model or a loss of the user's own draws; the built-in ones draw nothing."""
    threads: int = Field(default=1, ge=1)
    """CPU threads. Results on the CPU are bit-identical for the same number."""
    trainer: TrainerConfig = TrainerConfig()
    """The section of the config."""
    num_steps: int | None = None
    """The run's number of steps; if given it must be trainer.num_steps."""
    temperature: float = Field(default=1.0, gt=0)
    """Sampling temperature: logprobs are those of logits / temperature."""
    loss: str
    """`module:function` with the signature of asyncrl.algorithms.losses."""
    advantage: str
    """`module:function` with the signature of asyncrl.algorithms.advantages."""
    clip_low: float = Field(default=0.2, gt=0, lt=1)
    """Passed to the loss."""
    clip_high: float = Field(default=0.2, gt=0)
    """Passed to the loss."""
    importance_cap: float = Field(default=2.0, gt=0)
    """Passed to the loss."""
    staging_dir: Path
    """Folder of the exports, in shared memory; made with mode 0700, and removed at the worker's end."""
    record_path: Path
    """trained.jsonl: one line a step, see asyncrl/trainer/record.py."""
    record_digest: bool = False
    """Write the digest of the weights after each step into the record (a full pass over the weights)."""
    failed_dir: Path
    """Where a batch that gives NaN is saved for inspection."""
    chat_template: Path | None = None
    """Jinja file that replaces the tokenizer's own template in saved folders."""

    @model_validator(mode="after")
    def _one_number_of_steps(self) -> Self:
        if self.num_steps not in (None, self.trainer.num_steps):
            raise ValueError(f"num_steps={self.num_steps} is not trainer.num_steps={self.trainer.num_steps}")
        return self

    @model_validator(mode="after")
    def _functions_are_named(self) -> Self:
        for key in ("loss", "advantage"):
            module, _, function = getattr(self, key).partition(":")
            if not module or not function:
                raise ValueError(f"{key}={getattr(self, key)!r} is not module:function")
        return self
