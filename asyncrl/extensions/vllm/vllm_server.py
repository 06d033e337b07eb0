"""Client of one vLLM server: how the weights of each transport get into it, and the
canary that proves it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from urllib.parse import urlencode

import numpy as np

from asyncrl.base.errors import EngineError, EngineLost
from asyncrl.base.http import Caller
from asyncrl.base.waits import clock, shielded, within
from asyncrl.engines.broadcast import BroadcastGroup
from asyncrl.engines.engine import EngineClient, reading
from asyncrl.engines.link import OnChunk, OnInterrupted
from asyncrl.extensions.vllm.vllm_process import (
    GENERATE,
    Generated,
    ProcessState,
    ServedAdapter,
    VllmProcess,
    VllmRequirements,
    WorkerAnswer,
    lora_name,
    make_ready,
    vllm_request,
)
from asyncrl.extensions.vllm.vllm_sampling import Segment, check_request
from asyncrl.messages import engine_api as api
from asyncrl.messages.sampling import SamplingRequest
from asyncrl.messages.tokens import SegmentPart
from asyncrl.messages.trainer_api import Canary, ExportChunkResponse, ExportResponse

NOISE_FACTOR, OUTLIER_FACTOR = 3.0, 64.0
"""weight_sync.canary_limit=auto: multiples of the trainer's rounding noise, for the
median, and for the mean and the next token, which a rounded expert choice can move far.
Over 400 sound versions of three models, the median was at most 1.44 times the noise,
and the next token 19 times.
"""
LEAST_LIMIT = 1e-3
"""In nats. In float32 vLLM's mean differs by up to 3e-5."""
CANARY_TOKENS = 160
"""Longer than vLLM's CPU block, so that its prefix cache takes part."""
RESUME_LIMIT_S = 10.0
_ASK_AGAIN_S = 0.01
_ASK_AGAIN_MAX_S = 0.5
_TAGS: dict[api.EnginePart, str] = {"weights": "weights", "kv": "kv_cache"}
_RULE = "its weights belong to no version"


class CanaryError(EngineError):
    """An engine computes with other weights than it reported."""


class Load:
    """Load of one version into one process: stage() during generation, then load().
    Transports shm, disk and stream: one file. ipc: the trainer's memory, which is
    hashed in place and copied by load().
    """

    def __init__(self, process: VllmProcess, manifest: ExportResponse) -> None:
        self.process = process
        self.manifest = manifest
        self.adapter = manifest.adapter
        self.version = manifest.version
        self.digest = manifest.digest
        self.staged = WorkerAnswer()

    @property
    def model(self) -> str | None:
        """VLLM's name of the model that serves afterwards; None: the base model."""
        return lora_name(self.adapter) if self.process.has_adapters else None

    async def stage(self) -> str:
        """Return the digest. Poll: a blocking call would stop generation."""
        wait_s = _ASK_AGAIN_S
        names = {
            "adapter",
            "version",
            "path",
            "digest",
            "num_tensors",
            "num_bytes",
            "memory",
        }
        request = self.manifest.model_dump(include=names)
        is_new = True
        while True:
            workers = await self.process.rpc("stage", is_new=is_new, **request)
            # Later calls only ask for the state; with is_new the workers would begin
            # again.
            is_new = False
            # Each worker reads and hashes the whole file, so any of them can answer for
            # all.
            if all(worker["state"] == "staged" for worker in workers):
                self.staged = workers[0]
                return str(self.staged["digest"])
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, _ASK_AGAIN_MAX_S)

    async def load(self) -> None:
        await self.put()
        if self.process.has_adapters:
            # Each worker has written the same adapter.
            await self.process.load_adapter(self.adapter, self.staged["folder"])

    async def put(self) -> None:
        """Bring the weights into the model, or adapters into the folder of `staged`."""
        if not self.process.has_adapters:
            await self.process.rpc("load", version=self.version, digest=self.digest)


class ChunksLoad(Load):
    """A colocated push, whose chunks are loaded already."""

    async def put(self) -> None:
        whole = self.manifest.model_dump(include={"adapter", "version", "digest"})
        workers = await self.process.rpc("finish_chunks", **whole)
        self.staged = workers[0]


class BroadcastLoad(Load):
    """Transport nccl."""

    group: BroadcastGroup

    async def stage(self) -> str:
        """Announce this engine and its workers, which compare the digest later."""
        self.group.expect_nowait(
            self.process.name, self.version, self.process.num_workers
        )
        return self.digest

    async def put(self) -> None:
        announced = self.manifest.model_dump(
            include={"adapter", "version", "digest", "num_tensors", "num_bytes"}
        )

        async def take(member: api.GroupMember) -> None:
            workers = await self.process.rpc(
                "receive", path="", member=member.model_dump(), **announced
            )
            self.staged = workers[0]

        await self.group.receive(self.process.name, self.version, take)


def load_of(
    process: VllmProcess, manifest: ExportResponse, group: BroadcastGroup | None
) -> Load:
    if group is not None and manifest.is_held:
        load = BroadcastLoad(process, manifest)
        load.group = group
        return load
    return Load(process, manifest)


async def check_canary(load: Load, limit: float | None) -> None:
    """Raise CanaryError if vLLM's logprobs are not the trainer's.

    The first probe uses the prefix cache; the second recomputes the prompt.
    """
    canary = load.manifest.canary
    if canary is None:
        return
    process, version = load.process, load.version
    label = process.label_of(version)
    # One after the other: the second would fill the prefix cache for the first.
    choices = []
    for name, probe in {"next": {}, "prompt": {"prompt_logprobs": 0}}.items():
        sampling = {"max_tokens": 1, "temperature": 0.0} | probe
        body = vllm_request(
            canary.token_ids, f"canary-{label}-{name}", label, load.model, **sampling
        )
        answer = await process.post(GENERATE, body, Generated)
        choices += answer.choices
    labels = [
        span.version for choice in choices for span in choice.weight_versions or []
    ]
    sampled = choices[0].logprobs
    assert sampled is not None, "requested with logprobs"
    assert sampled.content, "one token was requested"
    next_gap = abs(sampled.content[0].logprob - canary.next_logprob)
    # `answer` is the last probe's, which asked for prompt logprobs. The first token has
    # no entry, because nothing predicts it.
    scored = zip(answer.prompt_logprobs or [], canary.token_ids, strict=True)
    prompt = [entry[token].logprob for entry, token in scored if entry is not None]
    gaps = np.abs(np.subtract(prompt, canary.logprobs))
    prompt_gap, median = float(gaps.mean()), float(np.median(gaps))
    most, median_most = canary_limits(canary, limit)
    is_near = next_gap <= most and prompt_gap <= most and median <= median_most
    # vLLM's labels are those of the run's own adapter.
    is_mislabelled = not load.adapter and labels != [label, label]
    # `not` a comparison with <=: NaN agrees with nothing.
    if is_mislabelled or not is_near:
        what = f"does not compute with policy_version {version}: labels {labels}, not {label}; "
        what += f"the next token's logprob differs by {next_gap:.6f}, the prompt's by "
        what += f"{prompt_gap:.6f} on average"
        rule = f"the limit is {most:.6f} nats, and {median_most:.6f} for the median, which is {median:.6f} "
        rule += f"(weight_sync.canary_limit={limit or 'auto'}; rounding alone: {canary.noise:.6f})"
        way_out = "if model.dtype rounds so much, raise weight_sync.canary_limit; else start again."
        raise CanaryError(process.name, what, rule=rule, way_out=way_out)


def canary_limits(canary: Canary, limit: float | None) -> list[float]:
    """Return the limits of the mean and the next token, and of the median, in nats.
    `limit`: of the user, for all.
    """
    factors = OUTLIER_FACTOR, NOISE_FACTOR
    return [limit or max(LEAST_LIMIT, factor * canary.noise) for factor in factors]


class VllmServer(EngineClient):
    """EngineClient of a vLLM server. See VllmProcess.

    Life: made -> ready() -> disconnect_nowait(), or broken by a failed commit -> reset_nowait() ->
        ready().
    Waits: generate_segment sleeps during commits and sleeps; the caller sets limits. Resuming has
        RESUME_LIMIT_S and ignores cancellation.
    Invariant: as for EngineServer; versions come from vLLM's spans. A paused engine is resumed unless its
        process was given up. Tokens wait for a good canary; otherwise the process is broken.

    """

    def __init__(
        self,
        caller: Caller,
        needed: VllmRequirements,
        *,
        policy_version: int = 0,
        broadcast_group: BroadcastGroup | None = None,
    ) -> None:
        self.needed = needed
        super().__init__(
            caller, policy_version=policy_version, broadcast_group=broadcast_group
        )

    def _begin_nowait(self) -> None:
        self._scope = self._process = VllmProcess(
            self._caller, self._start_version, self.needed.mark
        )
        self._unchecked: dict[str, Load] = {}
        """By adapter."""

    async def ready(self, timeout_s: float) -> api.EngineHealth:
        """Wait until the server is configured and warmed up. Raises ConfigError,
        EngineError, or EngineLost after `timeout_s`.
        """
        async with self._within(timeout_s, "was not ready"):
            await make_ready(self._process, self.needed)
        return await self.health(timeout_s=timeout_s)

    async def generate_segment(
        self,
        request: SamplingRequest,
        *,
        on_chunk: OnChunk = None,
        on_interrupted: OnInterrupted = None,
    ) -> SegmentPart:
        """Sample a segment. vLLM cannot hold an interrupted request and answers with
        its tokens.
        """
        check_request(self._process, request, self.needed)
        return await Segment(self._process, request, self.needed, on_chunk).sample()

    async def abort(
        self, request_ids: list[str] | None, *, timeout_s: float | None = 10.0
    ) -> list[str]:
        process = self._process
        segments = [
            segment
            for segment in process.segments.values()
            if request_ids is None or segment.request.request_id in request_ids
        ]
        for segment in segments:
            # Segments in wait_open end too, without having been sent.
            segment.is_aborted = True
        process.changed.notify()
        async with self._within(timeout_s, "gave no answer to /abort_requests"):
            await process.end([segment for segment in segments if segment.is_sent])
        return [segment.request.request_id for segment in segments]

    async def health(self, *, timeout_s: float | None = 10.0) -> api.EngineHealth:
        process = self._process
        async with process.calls():
            await process.read("/health", timeout_s)
            # vLLM's own label, not our record of it: this shows an external server that
            # another run has pushed to.
            label = await process.served_label(timeout_s)
            counts = await process.counts(timeout_s=timeout_s)
        num_waiting = sum(not segment.is_sent for segment in process.segments.values())
        return api.EngineHealth(
            policy_version=process.version_of(label),
            num_running=int(counts["num_running"]),
            num_queued=int(counts["num_queued"]) + num_waiting,
            tokens_generated=int(counts["tokens_generated"]),
            decode_s=counts["decode_s"],
            kv_fraction=counts["kv_fraction"],
            kv_tokens=process.kv_tokens,
            num_preempted=process.num_preempted(counts),
            asleep=sorted(process.asleep),
        )

    async def prepare(self, manifest: ExportResponse) -> str:
        served = self._adapter(manifest.adapter)
        # If staging fails, a commit must not find the version before.
        served.staged = None
        load = load_of(self._process, manifest, self._group)
        with reading(manifest):
            async with self._process.calls():
                digest = await load.stage()
        served.staged = load
        return digest

    async def load_chunk(self, chunk: ExportChunkResponse) -> str:
        process = self._process
        served = self._adapter(chunk.adapter)
        served.staged = None
        # A chunk overwrites weights at once, so from the first one on they belong to no
        # version.
        process.begin_load_nowait(chunk.adapter)
        request = api.LoadChunkRequest.model_validate(
            chunk, from_attributes=True
        ).model_dump()
        async with process.calls():
            workers = await process.rpc("load_chunk", **request)
        if chunk.is_last:
            names = {"adapter", "version", "path", "num_tensors", "num_bytes", "canary"}
            whole = chunk.model_dump(include=names)
            served.staged = ChunksLoad(
                process, ExportResponse(**whole, digest=chunk.whole_digest)
            )
        return str(workers[0]["digest"])

    async def commit(
        self, version: int, digest: str, interrupt: api.Interrupt, adapter: str = ""
    ) -> api.CommitResponse:
        """Return once the canary agrees, or a sleeping engine has the weights."""
        process = self._process
        served = self._adapter(adapter)
        load, served.staged = served.staged, None
        answer = api.CommitResponse(
            version=version, digest=digest, pause_s=0.0, num_interrupted=0
        )
        if (version, digest) == (
            process.versions.get(adapter),
            served.digest,
        ) and process.state is ProcessState.SERVING:
            # A repeated push of what this engine serves already. It has announced
            # itself in prepare and will not receive, so the others must not wait for
            # it.
            self._leave_group_nowait()
            return answer
        if load is None or (load.version, load.digest) != (version, digest):
            staged = (
                "nothing"
                if load is None
                else f"policy_version {load.version} with digest {load.digest}"
            )
            what = f"cannot serve policy_version {version} with digest {digest}: staged is {staged}"
            raise EngineError(
                self.name,
                what,
                rule="staged weights are committed, one version at a time",
            )
        served.is_open = False
        try:
            with self._all_or_broken(process, version):
                async with process.calls():
                    if process.asleep:
                        # The KV cache may still be asleep, so the canary cannot run.
                        # wake() runs it before the first request.
                        await self._load(process, load)
                        self._unchecked[adapter] = load
                    else:
                        answer = await self._swap(process, load, interrupt)
                        await self._confirm(process, load)
        finally:
            served.is_open = True
            process.changed.notify()
        return answer

    async def open_adapter(self, request: api.OpenAdapterRequest) -> api.OpenAdapters:
        process, name = self._process, request.adapter
        opened = process.adapters
        num, rank = (process.lora[key] for key in ("max_loras", "max_lora_rank"))
        if name in opened or len(opened) >= num or request.rank > rank:
            what = f"cannot open adapter {name!r} of rank {request.rank}: open are {[*opened]}"
            rule = f"names differ, and this server has max_loras={num} and max_lora_rank={rank}"
            way_out = "drop one, choose a smaller rank, or set rollout.engine=embedded."
            raise EngineError(self.name, what, rule=rule, way_out=way_out)
        opened[name] = ServedAdapter(request.scale)
        async with process.calls():
            await process.tell_adapters()
        return api.OpenAdapters(names=[*opened])

    async def drop_adapter(self, adapter: str) -> api.OpenAdapters:
        process = self._process
        folder = self._adapter(adapter).folder
        del process.adapters[adapter]
        process.versions.pop(adapter, None)
        self._unchecked.pop(adapter, None)
        requests = [one.request for one in process.segments.values()]
        await self.abort([one.request_id for one in requests if one.adapter == adapter])
        async with process.calls():
            if folder:
                await process.tell(
                    "/v1/unload_lora_adapter", {"lora_name": lora_name(adapter)}
                )
            await process.tell_adapters()
        return api.OpenAdapters(names=[*process.adapters])

    def _adapter(self, name: str) -> ServedAdapter:
        """Raises EngineError for an adapter that is not open."""
        if name not in self._process.adapters:
            said = self._process.missing(name)
            raise EngineError(self.name, said.error, way_out=said.way_out)
        return self._process.adapters[name]

    async def sleep(self) -> api.TransferStats:
        """Sleep at level 2: level 1 leaves a copy of the weights in pinned host memory
        that vLLM never frees (vLLM #16663). But no push of adapters brings the base
        weights, so they need level 1, which keeps adapters too. With `stays` vLLM pauses
        instead and clears its prefix cache.
        """
        process, started = self._process, clock()
        asleep_before = set(process.asleep)
        process.asleep = {*_TAGS}
        # Before the first call: no segment is sent from now on.
        process.state = ProcessState.ASLEEP
        self._unchecked.clear()
        if process.asleep != asleep_before or not process.is_sleep_sure:
            process.is_sleep_sure = False
            async with process.calls():
                if self.needed.stays:
                    await process.tell("/pause?mode=abort&clear_cache=true")
                else:
                    await self._wake(asleep_before)  # vLLM sleeps as a whole
                    level = 1 if process.has_adapters else 2
                    await process.tell(f"/sleep?level={level}&mode=abort")
                # A request that reached vLLM after the sleep's own abort is ended too:
                # none may stay in a server without weights.
                await process.end(process.sent)
            process.is_sleep_sure = True
        return api.TransferStats(num_bytes=0, seconds=clock() - started)

    async def wake(self, parts: Sequence[api.EnginePart]) -> api.TransferStats:
        process, started = self._process, clock()
        if woken := process.asleep & set(parts):
            async with process.calls():
                if not self.needed.stays:
                    await self._wake(woken)
                # With `stays` there is nothing to allocate, only a pause to end, once
                # every part may be used.
                elif woken == process.asleep:
                    await process.tell("/resume")
            while woken == process.asleep and self._unchecked:
                load = self._unchecked.pop(min(self._unchecked))
                with self._all_or_broken(process, load.version):
                    async with process.calls():
                        await self._confirm(process, load)
            # After the canary: a segment may be sent as soon as nothing sleeps.
            process.asleep -= woken
            process.changed.notify()
        return api.TransferStats(num_bytes=0, seconds=clock() - started)

    async def _swap(
        self, process: VllmProcess, load: Load, interrupt: api.Interrupt
    ) -> api.CommitResponse:
        # With others vLLM does not pause, and their requests run on.
        is_alone = len(process.adapters) == 1
        if interrupt == "keep_kv" and not is_alone:
            what = f"cannot keep the KV cache of adapter {load.adapter!r} in a swap"
            rule = "vLLM keeps it only while no other adapter is open"
            way_out = "set weight_sync.interrupt=abort."
            raise EngineError(self.name, what, rule=rule, way_out=way_out)
        if interrupt == "keep" and not is_alone:
            # A new request reads its tokens with the new weights, as a kept one does.
            interrupt = "abort"
        # vLLM is about to ignore clear_cache here
        keeps = interrupt in ("keep", "keep_kv")
        pause = {
            "mode": "keep" if keeps else interrupt,
            "clear_cache": str(not keeps).lower(),
        }
        running = process.sent_to(load.adapter)
        num_running = len(running)
        num_interrupted = {"abort": num_running, "wait": 0}.get(
            interrupt, min(num_running, self.needed.slots)
        )
        started = clock()
        try:
            if is_alone:
                await process.tell(f"/pause?{urlencode(pause)}")
            elif interrupt == "wait":
                for segment in running:
                    await segment.answered.wait()
            # The requests that vLLM finished before it paused were served, not held up.
            if interrupt == "wait":
                started = clock()
            running = process.sent_to(load.adapter)
            # End streams, whose tokens could not be reported early, and leave the
            # canary a slot. Requests from before the first adapter would continue
            # without it. Of a request that it reads again, vLLM reports the experts of
            # the first reading; of a new request, those of its own.
            is_other_model = process.has_adapters and not process.adapters[""].folder
            has_new_experts = interrupt == "keep" and self.needed.returns_routing
            kept = (
                []
                if interrupt == "abort" or is_other_model or has_new_experts
                else [one for one in running if one.on_chunk is None]
            )
            if load.manifest.canary is not None:
                kept = kept[: self.needed.slots - 1]
            await process.end([segment for segment in running if segment not in kept])
            if interrupt == "keep":
                await process.reset_cache()
            await self._load(process, load)
        finally:
            # Also after an error or a cancellation: a server that stays paused answers
            # nothing, and an external one would stay so after this run.
            if is_alone:
                _, cancelled = await shielded(self._resume(process))
                if cancelled is not None:
                    raise cancelled
        return api.CommitResponse(
            version=load.version,
            digest=load.digest,
            pause_s=clock() - started,
            num_interrupted=num_interrupted,
        )

    async def _load(self, process: VllmProcess, load: Load) -> None:
        # Before the first byte: an answer that arrives during the load must not be
        # trusted.
        process.begin_load_nowait(load.adapter)
        await load.load()
        if not load.adapter:
            await process.set_label(process.label_of(load.version))

    async def _resume(self, process: VllmProcess) -> None:
        """Resume, with one retry: vLLM closes the connection after a 500 (uvicorn),
        losing a /resume sent on it.
        """
        for is_last in (False, True):
            try:
                async with process.calls():
                    return await process.tell("/resume", timeout_s=RESUME_LIMIT_S)
            except EngineError as error:
                if is_last:
                    what = f"was paused and could not be resumed: {error.fault}"
                    process.break_nowait(what)

    async def _confirm(self, process: VllmProcess, load: Load) -> None:
        # The server samples already (its canary is a request too), but new segments
        # wait and finished ones are held back until this returns.
        await check_canary(load, self.needed.canary_limit)
        served = self._adapter(load.adapter)
        process.versions[load.adapter] = load.version
        served.digest = load.digest
        served.folder = load.staged.get("folder", "")
        if not load.adapter:
            process.confirm_nowait()

    @contextmanager
    def _all_or_broken(self, process: VllmProcess, version: int) -> Iterator[None]:
        """Break the process on an error or cancellation while its weights are unknown."""
        failed = f"failed in a swap from policy_version {process.version} to {version}: {_RULE}"
        try:
            yield
        except BaseException as error:
            # A supervisor may have replaced the process during the commit. Its
            # successor may be in the group already, and stays.
            if process is self._process:
                self._leave_group_nowait()
            if process.state is ProcessState.LOADING:
                process.break_nowait(failed)
                # Workers' errors become a loss: a new process gets whole weights. A
                # failed canary does not: a restart would load the same weights and
                # disagree again.
                if isinstance(error, EngineError) and not isinstance(
                    error, EngineLost | CanaryError
                ):
                    raise process.lost(f"{failed}: {error.fault}") from error
            raise

    async def _wake(self, parts: Iterable[api.EnginePart]) -> None:
        """After level 1 the weights are copied back."""
        if tags := sorted(_TAGS[part] for part in parts):
            await self._process.tell(
                f"/wake_up?{urlencode([('tags', tag) for tag in tags])}"
            )

    @asynccontextmanager
    async def _within(self, timeout_s: float | None, what: str) -> AsyncIterator[None]:
        """Raise EngineLost if the calls in the block take longer."""
        process = self._process
        what = f"({self._caller.url}) {what} within {timeout_s} s"
        async with within(timeout_s, lambda: process.lost(what)), process.calls():
            yield
