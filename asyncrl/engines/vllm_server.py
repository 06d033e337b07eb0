"""Client of one vLLM server."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from urllib.parse import urlencode

from asyncrl.base.errors import EngineError
from asyncrl.base.http import Caller
from asyncrl.base.waits import within
from asyncrl.engines.broadcast import BroadcastGroup
from asyncrl.engines.link import OnChunk, OnInterrupted
from asyncrl.engines.vllm_process import LabelInfo, Segment, Text, VllmProcess, VllmRequirements, make_ready
from asyncrl.engines.vllm_sampling import check_request, sample
from asyncrl.engines.vllm_weights import Load, load_of
from asyncrl.messages.engine_api import (
    CommitResponse,
    EngineHealth,
    EnginePart,
    GenerateRequest,
    GenerateResponse,
    Interrupt,
    LoadChunkRequest,
    TransferStats,
)
from asyncrl.messages.stop_watch import Decode
from asyncrl.messages.trainer_api import ExportChunkResponse, ExportResponse

_TAGS: dict[EnginePart, str] = {"weights": "weights", "kv": "kv_cache"}


class VllmServer:
    """EngineClient of a vLLM server. See VllmProcess and Load.

    Life: made -> ready() -> disconnect_nowait(), or broken by a failed commit -> reset_nowait() ->
        ready().
    Waits: generate_segment sleeps during commits and sleeps; the caller sets limits.
    Invariant: as for EngineServer; versions come from vLLM's spans.

    `decode`: for stop strings across two segments. `mark`: in all labels; other runs' tokens raise
    EngineError.
    """

    def __init__(
        self,
        caller: Caller,
        needed: VllmRequirements,
        *,
        policy_version: int = 0,
        decode: Decode | None = None,
        mark: str = "",
        broadcast_group: BroadcastGroup | None = None,
    ) -> None:
        self._caller = caller
        self.name = caller.name
        self.needed = needed
        self._start_version = policy_version
        self._decode = decode
        self._mark = mark
        self._group = broadcast_group
        self._begin_nowait()

    def _begin_nowait(self) -> None:
        self._process = VllmProcess(self._caller, self._start_version, self._mark)
        self._staged: Load | None = None
        self._num_chunks = 0
        self._unchecked: Load | None = None

    @property
    def policy_version(self) -> int:
        return self._process.version

    def disconnect_nowait(self) -> None:
        self._process.disconnect_nowait()
        self._leave_group_nowait()

    def reset_nowait(self) -> None:
        self.disconnect_nowait()
        self._begin_nowait()

    async def ready(self, timeout_s: float) -> EngineHealth:
        """Wait until the server is configured and warmed up. Raises ConfigError, EngineError, or
        EngineLost after `timeout_s`.
        """
        async with self._within(timeout_s, "was not ready"):
            await make_ready(self._process, self.needed)
        return await self.health(timeout_s=timeout_s)

    async def generate_segment(
        self, request: GenerateRequest, *, on_chunk: OnChunk = None, on_interrupted: OnInterrupted = None
    ) -> GenerateResponse:
        """Sample a segment. vLLM cannot hold an interrupted request and answers with its tokens."""
        process = self._process
        check_request(process, request, self.needed)
        if process.segments([request.request_id]):
            what = f"is sampling request {request.request_id} already"
            raise EngineError(self.name, what, rule="request ids are unique among requests in flight")
        wire_id = f"{uuid.uuid4().hex[:12]}-{request.request_id}"
        return await sample(process, Segment(request, wire_id, on_chunk), self.needed, self._decode)

    async def abort(self, request_ids: list[str] | None, *, timeout_s: float | None = 10.0) -> list[str]:
        process = self._process
        segments = process.segments(request_ids)
        for segment in segments:
            segment.is_aborted = True
        process.change_nowait()
        async with self._within(timeout_s, "gave no answer to /abort_requests"):
            await process.end([segment for segment in segments if segment.is_sent])
        return [segment.request.request_id for segment in segments]

    async def health(self, *, timeout_s: float | None = 10.0) -> EngineHealth:
        process = self._process
        async with process.calls():
            await process.get("/health", Text, timeout_s)
            label = (await process.get("/weight_info", LabelInfo, timeout_s)).weight_version
            counts = await process.counts(timeout_s=timeout_s)
        return EngineHealth(
            name=self.name,
            kind="vllm",
            policy_version=process.version_of(label),
            slots=self.needed.slots,
            max_length=self.needed.max_length,
            num_running=int(counts["num_running"]),
            num_queued=int(counts["num_queued"]) + process.num_waiting,
            tokens_generated=int(counts["tokens_generated"]),
            device=self.needed.device,
            decode_s=counts["decode_s"],
            tokens_prefilled=int(counts["tokens_prompted"] - counts["tokens_cached"]),
            asleep=sorted(process.asleep),
        )

    async def prepare(self, manifest: ExportResponse) -> str:
        self._check_weights_awake(f"policy_version {manifest.version} cannot be prepared")
        self._staged = None
        load = load_of(self._process, self.needed, manifest, self._group)
        async with self._process.calls():
            digest = await load.stage()
        self._staged = load
        return digest

    async def commit(self, version: int, digest: str, interrupt: Interrupt) -> CommitResponse:
        """Return once the canary agrees, or a sleeping engine has the weights."""
        process, load = self._process, self._staged
        self._check_weights_awake(f"policy_version {version} cannot be committed")
        self._num_chunks = 0
        if (version, digest) == (process.version, process.digest) and process.state == "serving":
            self._leave_group_nowait()
            return CommitResponse(version=version, digest=digest, pause_s=0.0, num_interrupted=0)
        is_staged = load is not None and (load.version, load.digest) == (version, digest)
        is_other = version == process.version and process.digest not in ("", digest)
        if (
            load is None
            or not is_staged
            or is_other
            or version < process.version
            or process.state == "paused"
        ):
            staged = "nothing" if load is None else f"policy_version {load.version} with digest {load.digest}"
            if type(load) is Load:
                self._staged = None  # a push in chunks starts again
            raise EngineError(
                self.name,
                f"cannot serve policy_version {version} with digest {digest}: staged is {staged}, it serves "
                f"{process.version} ({process.state})",
                rule="staged weights are committed, one version at a time, and no older one",
                way_out="prepare this version first.",
            )
        if process.state == "serving":
            process.state = "paused"
        try:
            report = await load.commit(interrupt)
        except BaseException:
            self._leave_group_nowait()
            raise
        finally:
            if process.state == "paused":
                process.state = "serving"
            process.change_nowait()
        if process is self._process:
            self._staged = None
            self._unchecked = load if process.state == "loading" else None
        return report

    async def sleep(self, parts: Sequence[EnginePart]) -> TransferStats:
        """Put parts to sleep. vLLM sleeps as a whole; other parts are woken again.

        Weights are dropped (level 2): level 1 leaves a copy in pinned host memory that vLLM never frees
        (vLLM #16663); it is used if only the KV cache sleeps. With `stays` vLLM pauses instead and clears
        its prefix cache.
        """
        process, started = self._process, asyncio.get_running_loop().time()
        asleep_before = set(process.asleep)
        process.asleep |= set(parts)
        if "weights" in parts:
            process.state = "asleep"
            self._unchecked = None
        if process.asleep != asleep_before:
            async with process.calls():
                if self.needed.stays:
                    await process.tell("/pause?mode=abort&clear_cache=true")
                    await process.end(process.sent)
                else:
                    await self._wake(asleep_before)
                    await process.tell(f"/sleep?level={2 if 'weights' in process.asleep else 1}&mode=abort")
                    await process.end(process.sent)
                    await self._wake(_TAGS.keys() - process.asleep)
        return TransferStats(num_bytes=0, seconds=asyncio.get_running_loop().time() - started)

    async def wake(self, parts: Sequence[EnginePart]) -> TransferStats:
        process, started = self._process, asyncio.get_running_loop().time()
        if woken := process.asleep & set(parts):
            async with process.calls():
                if not self.needed.stays:
                    await self._wake(woken)
                elif woken == process.asleep:
                    await process.tell("/resume")
            if process.asleep == woken and self._unchecked is not None:
                load, self._unchecked = self._unchecked, None
                await load.check()
            process.asleep -= woken
            process.change_nowait()
        return TransferStats(num_bytes=0, seconds=asyncio.get_running_loop().time() - started)

    async def load_chunk(self, chunk: ExportChunkResponse) -> str:
        process, num_loaded = self._process, self._num_chunks
        what = f"chunk {chunk.index} of policy_version {chunk.version} cannot be loaded"
        self._check_weights_awake(what)
        self._num_chunks = 0
        is_next = chunk.index in (0, num_loaded) and chunk.version >= process.version
        if process.state in ("serving", "paused") or not is_next:
            loaded = f"chunks 0..{num_loaded - 1}" if num_loaded else "nothing"
            raise EngineError(
                self.name,
                f"{what}: loaded is {loaded}, it serves {process.version} ({process.state})",
                rule="chunks come in order, of no older version, into weights that have slept",
                way_out="sleep and wake the weights, then push from chunk 0.",
            )
        self._staged = None
        if chunk.index == 0:
            process.begin_load_nowait(chunk.version)
        request = LoadChunkRequest.model_validate(chunk, from_attributes=True).model_dump()
        async with process.calls():
            workers = await process.rpc("asyncrl_load_chunk", request)
        if chunk.is_last:
            whole = chunk.model_dump(include={"version", "path", "num_tensors", "num_bytes", "canary"})
            self._staged = Load(process, self.needed, ExportResponse(**whole, digest=chunk.whole_digest))
        else:
            self._num_chunks = chunk.index + 1
        return str(workers[0]["digest"])

    async def _wake(self, parts: Iterable[EnginePart]) -> None:
        """After level 1 the weights are copied back."""
        if tags := sorted(_TAGS[part] for part in parts):
            await self._process.tell(f"/wake_up?{urlencode([('tags', tag) for tag in tags])}")

    @asynccontextmanager
    async def _within(self, timeout_s: float | None, what: str) -> AsyncIterator[None]:
        """Raise EngineLost if the calls in the block take longer."""
        process, what = self._process, f"({self._caller.url}) {what} within {timeout_s} s"
        async with within(timeout_s, lambda: process.lost(what)), process.calls():
            yield

    def _leave_group_nowait(self) -> None:
        if self._group is not None:
            self._group.leave_nowait(self.name)

    def _check_weights_awake(self, what: str) -> None:
        if "weights" in self._process.asleep:
            rule = "the memory of sleeping weights is in use by the trainer"
            what = f"{what}: the weights are asleep"
            raise EngineError(self.name, what, rule=rule, way_out="wake them first.")
