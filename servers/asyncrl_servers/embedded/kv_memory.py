"""What an embedded engine server is started with, and whether it fits into memory."""

from __future__ import annotations

import ctypes
from typing import Literal

import psutil
import torch
from pydantic import BaseModel, ConfigDict, Field

from asyncrl.http import fail


class EmbeddedSpec(BaseModel):
    """The spec file of `python -m asyncrl_servers.embedded`: one JSON object, unknown keys refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())

    name: str
    """Name of this server in logs and errors, like engine-0."""
    model_path: str
    """Hugging Face folder with config, weights and (for stop strings) tokenizer."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Type of the weights. A run writes that of its trainer; auto (bfloat16 on CUDA, float32 on a CPU) is for
    a server alone.
    """
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto = CUDA where there is a device, else CPU."""
    slots: int = Field(ge=1)
    """Sequences decoded at once."""
    max_length: int = Field(ge=2)
    """Most tokens of prompt and completion together."""
    threads: int = Field(default=1, ge=1)
    """CPU threads of torch."""
    deterministic: bool = True
    """A request's tokens depend on its prompt, seed and weights alone. Checked at start."""
    start_version: int = Field(default=0, ge=0)
    """policy_version of the weights in model_path."""
    has_adapters: bool = False
    """Adapters will be published (weight_sync.transport=lora): memory for the weights under them is counted
    at start.
    """
    max_queued: int = Field(default=100_000, ge=1)
    """Requests that may wait for a slot; one more is refused with 503."""


def available_bytes(device: torch.device) -> int:
    """Free memory of the device (of the machine, for CPU)."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return int(psutil.virtual_memory().available)


def give_back(device: torch.device) -> None:
    """Have freed memory leave this process: allocators keep it for themselves otherwise."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
    elif (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:  # glibc alone has it
        trim(0)


def check_memory(
    spec: EmbeddedSpec, *, slot_bytes: int, vocab_size: int, staged_bytes: int, free: int
) -> None:
    """End the process if the KV cache, the staged weights and the largest temporaries do not fit into `free`
    bytes; the way out names the number of slots that fits.
    """
    # Of a slot in float32: the logits after its prompt, and the logits of a step with their logprobs,
    # exponentials and a float64 sum.
    slot_bytes += 7 * 4 * vocab_size
    needed, fitting = staged_bytes + spec.slots * slot_bytes, (free - staged_bytes) // slot_bytes
    if spec.slots <= fitting:
        return
    way_out = "lower rollout.max_tokens + rollout.max_prompt_tokens, use a smaller model, or free memory."
    fail(
        f"{spec.name}: {spec.slots} slots of {spec.max_length} tokens need {_show(needed)} beside the "
        f"weights ({_show(slot_bytes)} a slot, {_show(staged_bytes)} for staged weights), {_show(free)} are "
        f"free",
        rule="all memory is reserved at start, so that it cannot run out later",
        way_out=f"set rollout.slots={fitting} or less, or {way_out}" if fitting >= 1 else way_out,
    )


def _show(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.1f} MiB"
