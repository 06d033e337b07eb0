"""The spec of a trainer worker: the controller writes it, the worker reads it at its start. Imports no
torch.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from asyncrl.config import AlgorithmConfig, TrainerConfig
from asyncrl.config.sections import Device, DType, FrozenConfig
from asyncrl.messages.base import TransportName


class TrainerSpec(FrozenConfig):
    """Everything one trainer worker needs."""

    model_path: str
    """Hugging Face folder or hub id."""
    dtype: DType = "auto"
    """Type of the exported weights and of the forward pass; master weights are always float32."""
    device: Device = "auto"
    """auto = CUDA where there is a device, else CPU."""
    seed: int = Field(default=0, ge=0)
    """Seed of whatever a model or a loss of the user's own draws, and of new adapters; the rest draws
    nothing.
    """
    threads: int = Field(default=1, ge=1)
    """CPU threads of each rank. Results on the CPU are bit-identical for the same number."""
    rank: int = Field(default=0, ge=0)
    """Number of this worker among trainer.world_size."""
    trainer: TrainerConfig = TrainerConfig()
    """The section of the config."""
    algorithm: AlgorithmConfig = AlgorithmConfig()
    """The section of the config: what a step minimises."""
    temperature: float = Field(default=1.0, gt=0)
    """Sampling temperature: logprobs are those of logits / temperature."""
    max_tokens: int = Field(default=256, ge=1)
    """rollout.max_tokens: the longest completion."""
    transport: TransportName = "shm"
    """What /export writes: all weights, or the adapters alone (lora). nccl: it holds a copy for /broadcast
    instead.
    """
    is_file_wanted: bool = False
    """With transport=nccl: write the file too, for the eval engine."""
    chunk_bytes: int = Field(default=2**28, ge=1)
    """weight_sync.chunk_bytes: what /export_chunk writes at once."""
    chunks: Literal["file", "memory"] = "file"
    """Where /export_chunk puts a chunk: a safetensors file, or memory that the engines open too
    (asyncrl/weights/ipc.py), on the device of rank 0: embedded engines do, and vLLM with transport=ipc."""
    canary_tokens: int = Field(default=0, ge=0)
    """Tokens of the text whose logprobs go with each export, 2 or more (0 = none); the engines need space for
    one more.
    """
    measures_gap: bool = True
    """Compare the engines' logprobs of fresh tokens with the trainer's; false where the engines have no
    model.
    """
    staging_dir: Path
    """Folder of the exports, in shared memory; made with mode 0700, and removed at the worker's end."""
    record_path: Path
    """trained.jsonl: one line a batch, see asyncrl/trainer/record.py."""
    failed_dir: Path
    """Where a batch that gives NaN is saved for inspection."""
    chat_template: Path | None = None
    """Jinja file that replaces the tokenizer's own template in saved folders."""

    @property
    def offload_dir(self) -> Path:
        """Folder in the run directory whose disk takes what is offloaded from a trainer on the CPU."""
        return self.failed_dir.parent / "offload"

    @property
    def steps_per_batch(self) -> int:
        """Optimizer steps that one batch is good for."""
        return self.trainer.mini_batches * self.trainer.epochs
