"""How the weights of each transport get into vLLM, and the canary that proves it."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np

from asyncrl.base.errors import EngineError
from asyncrl.engines.broadcast import BroadcastGroup
from asyncrl.engines.vllm_process import GENERATE, Generated, VllmProcess, vllm_request
from asyncrl.messages.engine_api import GroupMember
from asyncrl.messages.trainer_api import ExportResponse

ADAPTER = "policy-adapter"
_ASK_AGAIN_S = 0.01
_ASK_AGAIN_MAX_S = 0.5


class CanaryError(EngineError):
    """An engine computes with other weights than it reported."""


class Load:
    """Load of one version into one process: stage() during generation, then load(). Transports shm, disk and
    stream: one file.
    """

    model: str | None = None
    """vLLM's name of what serves afterwards; None: the base model."""

    def __init__(self, process: VllmProcess, manifest: ExportResponse) -> None:
        self.process = process
        self.manifest = manifest
        self.version = manifest.version
        self.digest = manifest.digest
        self.staged: dict[str, Any] = {}

    async def stage(self) -> str:
        """Return the digest. Poll: a blocking call would stop generation."""
        wait_s = _ASK_AGAIN_S
        names = {"version", "path", "digest", "num_tensors", "num_bytes", "kind"}
        request = self.manifest.model_dump(include=names)
        is_new = True
        while True:
            workers = await self.process.rpc("stage", is_new=is_new, **request)
            is_new = False
            if all(worker["state"] == "staged" for worker in workers):
                self.staged = workers[0]
                return str(self.staged["digest"])
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, _ASK_AGAIN_MAX_S)

    async def load(self) -> None:
        await self.process.rpc("load", version=self.version, digest=self.digest)


class ChunksLoad(Load):
    """A colocated push, whose chunks are loaded already."""

    async def load(self) -> None:
        await self.process.rpc("finish_chunks", version=self.version, digest=self.digest)


class BroadcastLoad(Load):
    """Transport nccl."""

    group: BroadcastGroup

    async def stage(self) -> str:
        """Announce this engine and its workers, which compare the digest later."""
        self.group.expect_nowait(self.process.name, self.version, self.process.num_workers)
        return self.digest

    async def load(self) -> None:
        announced = self.manifest.model_dump(include={"version", "digest", "num_tensors", "num_bytes"})

        async def take(member: GroupMember) -> None:
            await self.process.rpc("receive", path="", member=member.model_dump(), **announced)

        await self.group.receive(self.process.name, self.version, take)


class AdapterLoad(Load):
    """Transport lora: a peft folder per version, by which vLLM's prefix cache tells adapters apart."""

    model = ADAPTER

    async def load(self) -> None:
        adapter = {"lora_name": ADAPTER, "lora_path": self.staged["folder"], "load_inplace": True}
        await self.process.tell("/v1/load_lora_adapter", adapter)


def load_of(process: VllmProcess, manifest: ExportResponse, group: BroadcastGroup | None) -> Load:
    if group is not None and manifest.is_held:
        load = BroadcastLoad(process, manifest)
        load.group = group
        return load
    return (AdapterLoad if manifest.kind == "lora" else Load)(process, manifest)


async def check_canary(load: Load, limit: float) -> None:
    """Raise CanaryError if vLLM's logprobs are not the trainer's.

    The first probe uses the prefix cache; the second recomputes the prompt.
    """
    canary = load.manifest.canary
    if canary is None:
        return
    process, version = load.process, load.version
    label = process.label_of(version)
    choices = []
    for name, probe in {"next": {}, "prompt": {"prompt_logprobs": 0}}.items():
        sampling = {"max_tokens": 1, "temperature": 0.0} | probe
        body = vllm_request(canary.token_ids, f"canary-{label}-{name}", label, load.model, **sampling)
        answer = await process.post(GENERATE, body, Generated)
        choices += answer.choices
    labels = [span.version for choice in choices for span in choice.weight_versions or []]
    sampled = choices[0].logprobs
    assert sampled is not None, "requested with logprobs"
    assert sampled.content, "one token was requested"
    next_gap = abs(sampled.content[0].logprob - canary.next_logprob)
    scored = zip(answer.prompt_logprobs or [], canary.token_ids, strict=True)
    prompt = [entry[token].logprob for entry, token in scored if entry is not None]
    prompt_gap = float(np.abs(np.subtract(prompt, canary.logprobs)).mean())
    if labels != [label, label] or not next_gap <= limit or not prompt_gap <= limit:
        what = (
            f"does not compute with policy_version {version}: labels {labels}, not {label}; the next token's "
        )
        what += f"logprob differs by {next_gap:.6f}, the prompt's by {prompt_gap:.6f} on average"
        rule = f"the canary must agree to weight_sync.canary_limit={limit} nats"
        way_out = "if model.dtype rounds so much, raise weight_sync.canary_limit; else start again."
        raise CanaryError(process.name, what, rule=rule, way_out=way_out)
