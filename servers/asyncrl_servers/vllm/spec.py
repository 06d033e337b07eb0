"""What the parent tells a vLLM server at its start. Knows no vLLM and no torch."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

WORKER_EXTENSION = "asyncrl_servers.vllm.worker.WeightLoader"


class VllmSpec(BaseModel):
    """The spec file of `python -m asyncrl_servers.vllm`: one JSON object, unknown keys refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())

    name: str
    """Name of this server in logs and errors, like engine-0."""
    model_path: str
    """Hugging Face folder with config, weights and tokenizer. Without a tokenizer there are no stop strings."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Type of the weights. A run writes that of its trainer; auto (bfloat16 on CUDA, float32 on a CPU) is for a server alone."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """What vLLM must be built for (auto = whatever it is built for)."""
    max_length: int = Field(ge=2)
    """Most tokens of prompt and completion together."""
    slots: int = Field(ge=1)
    """Sequences decoded at once."""
    threads: int = Field(default=1, ge=1)
    """CPU threads of each worker; on CPU alone."""
    deterministic: bool = True
    """On CUDA: batch-invariant kernels. On CPU nothing is needed."""
    seed: int = 0
    """Seed of requests that have none."""
    has_adapters: bool = False
    """Adapters will be loaded (publisher.transport=lora)."""
    lora_rank: int = Field(default=16, ge=1)
    """Largest rank of an adapter."""
    tensor_parallel: int = Field(default=1, ge=1)
    """Devices that share one model."""
    transport: Literal["shm", "disk", "lora", "nccl", "ipc"] = "shm"
    """How weights come: through the worker extension (shm, disk), as adapters (lora), or from the trainer's device: chunks (ipc),
    through the extension too, or a broadcast (nccl), through vLLM's own transfer."""
    kv_cache_bytes: int | None = Field(default=None, ge=1)
    """Memory for the KV cache (none = enough for all slots on CPU; what vLLM's own rule leaves over on CUDA)."""
    args: dict[str, Any] = {}
    """vLLM's own arguments by name."""
    worker_extension: str = WORKER_EXTENSION
    """For tests, which plant faults in a subclass."""
