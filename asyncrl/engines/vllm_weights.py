"""Weight transports of one vLLM process, and the commit: pause, load, label, resume, canary."""

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
from asyncrl.engines.vllm_process import Segment, VllmProcess, VllmRequirements
from asyncrl.engines.vllm_routes import GENERATE, Generated, vllm_request
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
_ADAPTER_RULE = "adapters are <module>.lora_A.weight and .lora_B.weight of one rank, and one float32 scale"


class Load:
    """Load of one version into one process.

    stage() returns the digest during generation; load() runs exclusively. Both raise CallRefused,
    CallLost or EngineError. This base class is the colocated push, whose chunks are loaded already.
    """

    model: str | None = None

    def __init__(self, name: str, manifest: ExportResponse) -> None:
        self.name = name
        self.manifest = manifest
        self.version = manifest.version
        self.digest = manifest.digest
        self.canary = manifest.canary

    async def stage(self, process: VllmProcess) -> str:
        return self.digest

    async def load(self, process: VllmProcess) -> None:
        await process.rpc("asyncrl_finish_chunks", {"version": self.version, "digest": self.digest})


def load_of(name: str, manifest: ExportResponse, group: BroadcastGroup | None) -> Load:
    if group is not None and manifest.is_held:
        return BroadcastLoad(name, manifest, group)
    if manifest.kind == "lora":
        return AdapterLoad(name, manifest)
    return FileLoad(name, manifest)


class FileLoad(Load):
    """Transport shm or disk: one file."""

    async def stage(self, process: VllmProcess) -> str:
        """Poll until the file is staged: a blocking call would stop generation."""
        wait_s = _ASK_AGAIN_S
        names = {"version", "path", "digest", "num_tensors", "num_bytes", "kind"}
        request = self.manifest.model_dump(include=names)
        await process.rpc("asyncrl_drop", {})
        while True:
            workers = await process.rpc("asyncrl_stage", request)
            if all(worker.get("state") == "staged" for worker in workers):
                return str(workers[0]["digest"])
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, _ASK_AGAIN_MAX_S)

    async def load(self, process: VllmProcess) -> None:
        await process.rpc("asyncrl_load", {"version": self.version, "digest": self.digest})


class BroadcastLoad(Load):
    """Transport nccl, through vLLM's weight-transfer routes."""

    def __init__(self, name: str, manifest: ExportResponse, group: BroadcastGroup) -> None:
        super().__init__(name, manifest)
        self._group = group

    async def stage(self, process: VllmProcess) -> str:
        """Announce this engine and its workers, which compare the digest later."""
        workers = await process.rpc("asyncrl_facts", {})
        self._group.expect_nowait(self.name, self.version, len(workers))
        return self.digest

    async def load(self, process: VllmProcess) -> None:
        expected = self.manifest.model_dump(include={"version", "digest", "num_tensors", "num_bytes"})

        async def take(member: GroupMember) -> None:
            if member.is_new:
                await process.tell("/init_weight_transfer_engine", {"init_info": member.model_dump()})
            await process.tell("/start_weight_update")
            await process.tell("/update_weights", {"update_info": expected})
            await process.tell("/finish_weight_update", {})

        await self._group.receive(self.name, self.version, take)


class AdapterLoad(Load):
    """Transport lora: adapters as a peft folder."""

    model = ADAPTER

    def __init__(self, name: str, manifest: ExportResponse) -> None:
        super().__init__(name, manifest)
        self._folder = Path(manifest.path).with_name(f"{name}-adapter-{manifest.version}")
        """Folder per version, since vLLM's prefix cache distinguishes adapters by it."""

    async def stage(self, process: VllmProcess) -> str:
        return await asyncio.to_thread(write_adapter_folder, self.name, self.manifest, self._folder)

    async def load(self, process: VllmProcess) -> None:
        adapter = {"lora_name": ADAPTER, "lora_path": str(self._folder), "load_inplace": True}
        await process.tell("/v1/load_lora_adapter", adapter)
        before = process.adapter_folder
        process.adapter_folder = self._folder
        if before not in (None, self._folder):
            await asyncio.to_thread(shutil.rmtree, before, ignore_errors=True)


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
        raise EngineError(name, what, rule=_ADAPTER_RULE, way_out=RESEND) from error
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


class CanaryError(EngineError):
    """An engine computes with other weights than it reported."""


class Commit:
    """Makes one Load the serving weights.

    Life: run() once; for a sleeping engine, check() after waking.
    Waits: for vLLM, limited by the caller; resume has RESUME_LIMIT_S and ignores cancellation.
    Invariant: a paused engine is resumed unless its process was given up. Tokens wait for a good canary;
        otherwise the process is broken.
    """

    def __init__(self, process: VllmProcess, load: Load, needed: VllmRequirements) -> None:
        self._process = process
        self._load = load
        self._needed = needed
        self._label = process.label_of(load.version)
        self._swap_failed = f"failed in a swap from policy_version {process.version} to {load.version}"
        self._pause_s = 0.0
        self._num_interrupted = 0

    async def run(self, interrupt: Interrupt) -> CommitResponse:
        process, load = self._process, self._load
        with self._all_or_broken():
            async with process.calls():
                if process.asleep:
                    await self._load_under_label(interrupt)
                else:
                    await self._swap(interrupt)
                if not process.asleep:
                    await self._check_canary()
                process.version = load.version
                process.digest = load.digest
                process.label = self._label
                process.model = load.model
                if load.canary is None or not process.asleep:
                    process.confirm_nowait()
        return CommitResponse(
            version=load.version,
            digest=load.digest,
            pause_s=self._pause_s,
            num_interrupted=self._num_interrupted,
        )

    async def check(self) -> None:
        with self._all_or_broken():
            async with self._process.calls():
                await self._check_canary()
            self._process.confirm_nowait()

    async def _swap(self, interrupt: Interrupt) -> None:
        process, clock = self._process, asyncio.get_running_loop().time
        num_running = len(process.sent)
        started = clock()
        keeps_kv = interrupt == "keep_kv"
        pause = {"mode": "keep" if keeps_kv else interrupt, "clear_cache": str(not keeps_kv).lower()}
        try:
            await process.tell(f"/pause?{urlencode(pause)}")
            if interrupt == "wait":
                started = clock()
            else:
                most = num_running if interrupt == "abort" else self._needed.slots
                self._num_interrupted = min(num_running, most)
            await process.end(self._not_kept(interrupt))
            await self._load_under_label(interrupt)
        finally:
            _, cancelled = await uncut(self._resume())
            if cancelled is not None:
                raise cancelled
        self._pause_s = clock() - started

    def _not_kept(self, interrupt: Interrupt) -> list[Segment]:
        """Return the segments to end: all with abort; else streams, whose tokens could not be reported
        early, and enough others to leave the canary a slot.
        """
        sent = self._process.sent
        if interrupt == "abort":
            return sent
        kept = [segment for segment in sent if segment.on_chunk is None]
        num_kept = len(kept) if self._load.canary is None else self._needed.slots - 1
        return [segment for segment in sent if segment.on_chunk is not None] + kept[num_kept:]

    async def _load_under_label(self, interrupt: Interrupt) -> None:
        self._process.begin_load_nowait(self._load.version, keeps_kv=interrupt == "keep_kv")
        await self._load.load(self._process)
        await self._process.set_label(self._label)

    async def _resume(self) -> None:
        """Resume, with one retry: vLLM closes the connection after a 500 (uvicorn), losing a /resume sent on
        it.
        """
        process, clock = self._process, asyncio.get_running_loop().time
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
        load, process, limit = self._load, self._process, self._needed.canary_limit
        if load.canary is None:
            return
        fault = await canary_fault(process, load.canary, label=self._label, model=load.model, limit=limit)
        if fault:
            raise CanaryError(
                process.name,
                f"does not compute with policy_version {load.version}, which it reported as loaded: {fault}",
                rule=f"the canary must agree to weight_sync.canary_limit={limit} nats",
                way_out="if model.dtype rounds so much, raise weight_sync.canary_limit; else start again.",
            )

    @contextmanager
    def _all_or_broken(self) -> Iterator[None]:
        """Break the process on an error or cancellation while its weights are unknown."""
        process = self._process
        try:
            yield
        except BaseException as error:
            if process.state == "loading":
                process.break_nowait(self._swap_failed, rule=_RULE)
                if isinstance(error, EngineError) and not isinstance(error, EngineLost | CanaryError):
                    what = f"{self._swap_failed}: {error.fault}"
                    raise EngineLost(process.name, what, rule=_RULE, way_out=error.way_out) from error
            raise


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
    if labels != [label, label]:
        return f"it answers under the label {', '.join(labels) or 'none'} instead of {label}"
    logprobs = choices[0].logprobs
    sampled = [] if logprobs is None else [one.logprob for one in logprobs.content or []]
    if len(sampled) != 1 or not abs(sampled[0] - canary.next_logprob) <= limit:
        shown = ", ".join(f"{logprob:.6f}" for logprob in sampled) or "none"
        return f"the next token has logprob {shown}, the trainer computed {canary.next_logprob:.6f}"
    entries = zip(answers[1].prompt_logprobs or [], canary.token_ids, strict=False)
    found = [entry[token].logprob for entry, token in entries if entry and token in entry]
    if len(found) != len(canary.logprobs):
        return f"{len(found)} logprobs of a prompt with {len(canary.logprobs)}"
    gap = math.fsum(abs(ours - theirs) for ours, theirs in zip(found, canary.logprobs, strict=True))
    if not gap <= limit * len(found):
        return f"logprobs of the prompt differ by {gap / len(found):.6f} on average over {len(found)} tokens"
    return ""
