"""Adds up what an engine server needs and refuses what cannot fit, with the numbers. Knows sizes; runs
nothing.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import psutil
import torch
from pydantic import BaseModel, ConfigDict, Field

from asyncrl.http import fail
from asyncrl_servers.embedded.kv_attention import CacheShape, padded_length

# What the parent tells an embedded engine server at its start. Knows no torch.


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


REMEMBERED_SLOTS = 4
"""The prompt cache may take as much as this many full slots."""


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
        return
    # glibc keeps what is freed inside its heaps; other C libraries have no malloc_trim, and give large blocks
    # back by themselves.
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes beside the serving weights: KV cache, prompt cache, staged weights, and the largest
    temporaries.
    """

    kv_cache: int
    prompt_cache: int
    staging: int
    temporaries: int

    @property
    def total(self) -> int:
        """All of it."""
        return self.kv_cache + self.prompt_cache + self.staging + self.temporaries

    def __str__(self) -> str:
        return (
            f"KV cache {_show(self.kv_cache)}, remembered prompts {_show(self.prompt_cache)}, "
            f"staged weights {_show(self.staging)}, temporaries {_show(self.temporaries)}"
        )


def plan_memory(
    slots: int, max_length: int, shape: CacheShape, itemsize: int, vocab_size: int, weight_bytes: int
) -> MemoryPlan:
    """What an engine of `slots` sequences of `max_length` tokens needs beside its weights."""
    slot = shape.bytes_per_token(itemsize) * padded_length(max_length)
    logits_row = 4 * vocab_size
    # float32 logits, their logprobs and exponentials, and a float64 sum, at once for all rows.
    temporaries = slots * logits_row * 6
    return MemoryPlan(slot * slots, REMEMBERED_SLOTS * (slot + logits_row), weight_bytes, temporaries)


def check_load(spec: EmbeddedSpec, path: Path, device: torch.device) -> None:
    """Refuse weights that are larger than the memory that is free, before they are read."""
    weights = sum(file.stat().st_size for file in path.glob("*.safetensors"))
    free = available_bytes(device)
    if weights > free:
        fail(
            f"{spec.name}: the weights in {path} take {_show(weights)}, {_show(free)} are free on {device}",
            way_out="use a smaller model, another device (placement.rollout), or free memory.",
        )


def check_memory(
    spec: EmbeddedSpec, shape: CacheShape, itemsize: int, vocab_size: int, weight_bytes: int, free: int
) -> MemoryPlan:
    """The plan, if it fits into `free` bytes; else end the process with the numbers and the nearest setting
    that fits.
    """

    def plan(slots: int) -> MemoryPlan:
        return plan_memory(slots, spec.max_length, shape, itemsize, vocab_size, weight_bytes)

    wanted = plan(spec.slots)
    if wanted.total <= free:
        return wanted
    fixed = plan(0).total
    per_slot = plan(1).total - fixed
    fitting = (free - fixed) // per_slot
    if fitting >= 1:
        way_out = (
            f"set rollout.slots={fitting} or less (now {spec.slots}), or lower rollout.max_tokens + "
            f"rollout.max_prompt_tokens."
        )
    else:
        way_out = "lower rollout.max_tokens + rollout.max_prompt_tokens, use a smaller model, or free memory."
    fail(
        f"{spec.name}: {spec.slots} slots of {spec.max_length} tokens need {_show(wanted.total)} beside the "
        f"weights ({wanted}), "
        f"{_show(free)} are free",
        rule=f"memory is set aside at start ({_show(per_slot)} a slot, {_show(fixed)} whatever the slots), "
        f"never run out of later",
        way_out=way_out,
    )


def _show(num_bytes: int) -> str:
    if num_bytes >= 2**30:
        return f"{num_bytes / 2**30:.2f} GiB"
    return f"{num_bytes / 2**20:.1f} MiB"
