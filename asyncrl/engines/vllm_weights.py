"""Weight loads of one vLLM process, and their commit: pause, load, label, resume, canary."""

from __future__ import annotations

import asyncio
import json
import math
import shutil
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from asyncrl.base.errors import EngineError, EngineLost
from asyncrl.base.waits import uncut
from asyncrl.engines.broadcast import BroadcastGroup
from asyncrl.engines.vllm_process import GENERATE, Generated, VllmProcess, VllmRequirements, vllm_request
from asyncrl.messages.digest import weights_digest
from asyncrl.messages.engine_api import CommitResponse, GroupMember, Interrupt
from asyncrl.messages.trainer_api import Canary, ExportResponse
from asyncrl.weights.tensor_files import (
    RESEND,
    SCALE,
    RawTensor,
    adapted_modules,
    read_tensors,
    safetensors_head,
)

RESUME_LIMIT_S = 10.0
ADAPTER = "policy-adapter"
_ASK_AGAIN_S = 0.01
_ASK_AGAIN_MAX_S = 0.5
_RULE = "once a load has begun, the weights belong to no version until they are loaded and checked"


class CanaryError(EngineError):
    """An engine computes with other weights than it reported."""


class Load:
    """Load of one version into one process. This base class is the colocated push, whose chunks are loaded
    already.

    Life: stage(), during generation -> commit(); for a sleeping engine check() after waking.
    Waits: for vLLM, limited by the caller; resume has RESUME_LIMIT_S and ignores cancellation.
    Invariant: a paused engine is resumed unless its process was given up. Tokens wait for a good canary;
        otherwise the process is broken.
    """

    model: str | None = None

    def __init__(self, process: VllmProcess, needed: VllmRequirements, manifest: ExportResponse) -> None:
        self.process = process
        self.manifest = manifest
        self.version = manifest.version
        self.digest = manifest.digest
        self._needed = needed
        self._label = process.label_of(manifest.version)
        self._pause_s = 0.0
        self._num_interrupted = 0

    async def stage(self) -> str:
        """Return the digest. Raises CallRefused, CallLost or EngineError."""
        return self.digest

    async def load(self) -> None:
        await self.process.rpc("asyncrl_finish_chunks", {"version": self.version, "digest": self.digest})

    async def commit(self, interrupt: Interrupt) -> CommitResponse:
        process = self.process
        with self._all_or_broken():
            async with process.calls():
                if process.asleep:
                    await self._load_under_label(interrupt)
                else:
                    await self._swap(interrupt)
                if not process.asleep:
                    await self._check_canary()
                process.version = self.version
                process.digest = self.digest
                process.label = self._label
                process.model = self.model
                if self.manifest.canary is None or not process.asleep:
                    process.confirm_nowait()
        return CommitResponse(
            version=self.version,
            digest=self.digest,
            pause_s=self._pause_s,
            num_interrupted=self._num_interrupted,
        )

    async def check(self) -> None:
        with self._all_or_broken():
            async with self.process.calls():
                await self._check_canary()
            self.process.confirm_nowait()

    async def _swap(self, interrupt: Interrupt) -> None:
        process, clock = self.process, asyncio.get_running_loop().time
        num_running = len(process.sent)
        started = clock()
        keeps = interrupt in ("keep", "keep_kv")  # vLLM is about to ignore clear_cache here
        pause = {"mode": "keep" if keeps else interrupt, "clear_cache": str(not keeps).lower()}
        try:
            await process.tell(f"/pause?{urlencode(pause)}")
            if interrupt == "wait":
                started = clock()
            else:
                most = num_running if interrupt == "abort" else self._needed.slots
                self._num_interrupted = min(num_running, most)
            sent = process.sent
            if interrupt != "abort":
                # End streams, whose tokens could not be reported early, and leave the canary a slot.
                kept = [segment for segment in sent if segment.on_chunk is None]
                num_kept = len(kept) if self.manifest.canary is None else self._needed.slots - 1
                sent = [segment for segment in sent if segment not in kept[:num_kept]]
            await process.end(sent)
            if interrupt == "keep":
                await process.reset_cache()
            await self._load_under_label(interrupt)
        finally:
            _, cancelled = await uncut(self._resume())
            if cancelled is not None:
                raise cancelled
        self._pause_s = clock() - started

    async def _load_under_label(self, interrupt: Interrupt) -> None:
        self.process.begin_load_nowait(self.version, keeps_kv=interrupt == "keep_kv")
        await self.load()
        await self.process.set_label(self._label)

    async def _resume(self) -> None:
        """Resume, with one retry: vLLM closes the connection after a 500 (uvicorn), losing a /resume sent on
        it.
        """
        process, clock = self.process, asyncio.get_running_loop().time
        until_s = clock() + RESUME_LIMIT_S
        for is_last in (False, True):
            try:
                async with process.calls():
                    return await process.tell("/resume", timeout_s=max(0.1, until_s - clock()))
            except EngineError as error:
                if is_last or process.is_cut or clock() >= until_s:
                    what = f"was paused and could not be resumed: {error.fault}"
                    return process.break_nowait(what, rule="a pause ends with its commit")

    async def _check_canary(self) -> None:
        """Raise CanaryError if the engine's logprobs are not the trainer's."""
        canary, limit = self.manifest.canary, self._needed.canary_limit
        if canary is None:
            return
        fault = await canary_fault(self.process, canary, label=self._label, model=self.model, limit=limit)
        if fault:
            raise CanaryError(
                self.process.name,
                f"does not compute with policy_version {self.version}, which it reported as loaded: {fault}",
                rule=f"the canary must agree to weight_sync.canary_limit={limit} nats",
                way_out="if model.dtype rounds so much, raise weight_sync.canary_limit; else start again.",
            )

    @contextmanager
    def _all_or_broken(self) -> Iterator[None]:
        """Break the process on an error or cancellation while its weights are unknown."""
        process = self.process
        failed = f"failed in a swap from policy_version {process.version} to {self.version}"
        try:
            yield
        except BaseException as error:
            if process.state == "loading":
                process.break_nowait(failed, rule=_RULE)
                if isinstance(error, EngineError) and not isinstance(error, EngineLost | CanaryError):
                    what = f"{failed}: {error.fault}"
                    raise EngineLost(process.name, what, rule=_RULE, way_out=error.way_out) from error
            raise


class FileLoad(Load):
    """Transport shm or disk: one file."""

    async def stage(self) -> str:
        """Poll until the file is staged: a blocking call would stop generation."""
        wait_s = _ASK_AGAIN_S
        names = {"version", "path", "digest", "num_tensors", "num_bytes", "kind"}
        request = self.manifest.model_dump(include=names)
        await self.process.rpc("asyncrl_drop", {})
        while True:
            workers = await self.process.rpc("asyncrl_stage", request)
            if all(worker.get("state") == "staged" for worker in workers):
                return str(workers[0]["digest"])
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, _ASK_AGAIN_MAX_S)

    async def load(self) -> None:
        await self.process.rpc("asyncrl_load", {"version": self.version, "digest": self.digest})


class BroadcastLoad(Load):
    """Transport nccl, through vLLM's weight-transfer routes."""

    group: BroadcastGroup

    async def stage(self) -> str:
        """Announce this engine and its workers, which compare the digest later."""
        workers = await self.process.rpc("asyncrl_facts", {})
        self.group.expect_nowait(self.process.name, self.version, len(workers))
        return self.digest

    async def load(self) -> None:
        process = self.process
        expected = self.manifest.model_dump(include={"version", "digest", "num_tensors", "num_bytes"})

        async def take(member: GroupMember) -> None:
            if member.is_new:
                await process.tell("/init_weight_transfer_engine", {"init_info": member.model_dump()})
            await process.tell("/start_weight_update")
            await process.tell("/update_weights", {"update_info": expected})
            await process.tell("/finish_weight_update", {})

        await self.group.receive(process.name, self.version, take)


class AdapterLoad(Load):
    """Transport lora: adapters as a peft folder."""

    model = ADAPTER

    @property
    def _folder(self) -> Path:
        """Folder per version, since vLLM's prefix cache distinguishes adapters by it."""
        return Path(self.manifest.path).with_name(f"{self.process.name}-adapter-{self.version}")

    async def stage(self) -> str:
        return await asyncio.to_thread(write_adapter_folder, self.process.name, self.manifest, self._folder)

    async def load(self) -> None:
        adapter = {"lora_name": ADAPTER, "lora_path": str(self._folder), "load_inplace": True}
        await self.process.tell("/v1/load_lora_adapter", adapter)
        before = self.process.adapter_folder
        self.process.adapter_folder = self._folder
        if before not in (None, self._folder):
            await asyncio.to_thread(shutil.rmtree, before, ignore_errors=True)


def load_of(
    process: VllmProcess, needed: VllmRequirements, manifest: ExportResponse, group: BroadcastGroup | None
) -> Load:
    if group is not None and manifest.is_held:
        load = BroadcastLoad(process, needed, manifest)
        load.group = group
        return load
    return (AdapterLoad if manifest.kind == "lora" else FileLoad)(process, needed, manifest)


def write_adapter_folder(name: str, manifest: ExportResponse, folder: Path) -> str:
    """Return the digest of the folder's adapters. Raises EngineError."""
    try:
        tensors = read_tensors(Path(manifest.path))
        digest = weights_digest((key, one.dtype, one.shape, one.data) for key, one in tensors.items())
        if digest != manifest.digest:
            announced = f"announced for policy_version {manifest.version} was {manifest.digest}"
            raise ValueError(f"it has digest {digest}, {announced}")
        config = json.dumps(_peft_config(tensors))
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        (folder / "adapter_config.json").write_text(config, encoding="utf-8")
        weights = {f"base_model.model.{key}": one for key, one in tensors.items() if key != SCALE}
        with (folder / "adapter_model.safetensors").open("wb") as file:
            file.write(safetensors_head((key, one.dtype, one.shape) for key, one in weights.items()))
            for one in weights.values():
                file.write(one.data)
    except (OSError, ValueError, KeyError, struct.error) as error:
        what = f"cannot make an adapter of {manifest.path}: {error}"
        rule = "adapters are <module>.lora_A.weight and .lora_B.weight of one rank, and one float32 scale"
        raise EngineError(name, what, rule=rule, way_out=RESEND) from error
    return digest


def _peft_config(tensors: Mapping[str, RawTensor]) -> dict[str, Any]:
    """Raises ValueError or KeyError for invalid adapters."""
    modules = adapted_modules(tensors)
    ranks = {tensors[f"{module}.lora_A.weight"].shape[0] for module in modules}
    ranks |= {tensors[f"{module}.lora_B.weight"].shape[1] for module in modules}
    if len(tensors) != 2 * len(modules) + 1 or len(ranks) != 1 or tensors[SCALE].dtype != "float32":
        raise ValueError(f"{len(tensors)} tensors for adapters of {len(modules)} layers, of ranks {ranks}")
    (rank,) = ranks
    (scale,) = struct.unpack("<f", tensors[SCALE].data)
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "bias": "none",
        "r": rank,
        "lora_alpha": scale * rank,
        "target_modules": sorted({module.rpartition(".")[2] for module in modules}),
    }


async def canary_fault(
    process: VllmProcess, canary: Canary, *, label: str, model: str | None, limit: float
) -> str:
    """Return how vLLM and the trainer differ on the canary, or ''.

    The first probe uses the prefix cache; the second recomputes the prompt.
    """
    answers = []
    for name, probe in {"next": {}, "prompt": {"prompt_logprobs": 0}}.items():
        sampling = {"max_tokens": 1, "temperature": 0.0} | probe
        body = vllm_request(canary.token_ids, f"canary-{label}-{name}", label, model, **sampling)
        answers.append(await process.post(GENERATE, body, Generated))
    choices = [choice for answer in answers for choice in answer.choices]
    labels = [span.version for choice in choices for span in choice.weight_versions or []]
    logprobs = choices[0].logprobs
    sampled = [] if logprobs is None else [one.logprob for one in logprobs.content or []]
    entries = zip(answers[1].prompt_logprobs or [], canary.token_ids, strict=False)
    prompt = [entry[token].logprob for entry, token in entries if entry and token in entry]
    num_tokens = len(canary.logprobs)
    mean_gap = math.inf
    if len(prompt) == num_tokens:
        gaps = (abs(ours - theirs) for ours, theirs in zip(prompt, canary.logprobs, strict=True))
        mean_gap = math.fsum(gaps) / num_tokens
    next_gap = abs(sampled[0] - canary.next_logprob) if len(sampled) == 1 else math.inf
    if labels == [label, label] and next_gap <= limit and mean_gap <= limit:
        return ""
    return (
        f"under the labels {labels} instead of {label}, the next token has logprob {sampled} instead of "
        f"{canary.next_logprob:.6f}, and {len(prompt)} of {num_tokens} logprobs of the prompt differ by "
        f"{mean_gap:.6f} on average"
    )
