"""The client of one vLLM server: our messages as vLLM's own routes, its failures as ours. Knows no other
server, no routing.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path

from asyncrl.engines.vllm.commit import Commit
from asyncrl.engines.vllm.facts import VllmFacts
from asyncrl.engines.vllm.generate import OnChunk, Sampler
from asyncrl.engines.vllm.readiness import make_ready
from asyncrl.engines.vllm.segments import Segment, check_request
from asyncrl.engines.vllm.vllm_process import Process
from asyncrl.engines.vllm.vllm_routes import Routes
from asyncrl.engines.vllm.vllm_weights import (
    AdapterLoad,
    BroadcastLoad,
    ChunkLoad,
    FileLoad,
    Load,
    Meeting,
    one_digest,
)
from asyncrl.errors import EngineError, EngineLost
from asyncrl.http import Caller
from asyncrl.messages.base import EnginePart, Interrupt, Moved
from asyncrl.messages.engine_calls import CommitResponse, EngineHealth, GenerateRequest, GenerateResponse
from asyncrl.messages.trainer_calls import ExportChunkResponse, ExportResponse
from asyncrl.waits import TimeLimit

_TAGS: dict[EnginePart, str] = {"weights": "weights", "kv": "kv_cache"}


class VllmServer:
    """One vLLM server, for the pool (segments), for weight sync and for a handover.

    Life:       made -> ready() -> given up by cut_nowait(), or broken by a commit that failed ->
    renew_nowait(): a new process stands
                behind the same name, to be made ready like the first. Lives as long as its `caller`, which
                the maker closes.
    Waits:      generate_segment sleeps while a commit is under way or parts sleep, then until vLLM answers;
    prepare and commit until vLLM
                has done it. Their limit is the caller's: rollout.timeout_s, weight_sync.timeout_s, and the
                run's heartbeat under both.
    Invariant:  what EngineServer promises. The versions of tokens are those of vLLM's own spans; tokens told
    before their end are told
                while no weights had been loaded since they were asked for. Process and Commit say the rest.

    `canary_limit` in nats; `retries` of a load whose canary fails; `decode` for stop strings that lie over
    the joint of two segments. `mark` tells labels and caches of this run from those of another one that
    pushes to the same server: its tokens are an EngineError.
    """

    def __init__(
        self,
        caller: Caller,
        *,
        facts: VllmFacts,
        policy_version: int = 0,
        decode: Callable[[Sequence[int]], str] | None = None,
        canary_limit: float,
        retries: int = 1,
        chunk_bytes: int = 2**28,
        warn: Callable[[str], None] = lambda _: None,
        mark: str = "",
    ) -> None:
        self._caller, self.facts = caller, facts
        self.meeting: Meeting | None = None
        """Where weights are received, if the trainer sends them; given before the first push."""
        self.name = caller.name
        self.num_commits = 0
        """Swaps begun plus swaps ended plus sleeps: whoever saw it change knows why it was interrupted."""
        self._start_version, self._decode, self._mark = policy_version, decode, mark
        self._canary_limit, self._retries, self._chunk_bytes, self._warn = (
            canary_limit,
            retries,
            chunk_bytes,
            warn,
        )
        self._routes = Routes(caller)
        self._wire_prefix, self._num_segments = uuid.uuid4().hex[:8], 0
        self._was_ready = False
        self._process = Process(self._routes, policy_version, mark)
        self._sampler = Sampler(self._process, self._routes, facts, decode)
        self._staged: Load | None = None
        self._num_chunks, self._chunk_version = 0, -1
        """Of the push that comes chunk by chunk: what is next."""
        self._unchecked: Commit | None = None
        self._adapter_folder: Path | None = None

    def __repr__(self) -> str:
        return f"<VllmServer {self.name} {self._caller.url} v{self.policy_version}>"

    @property
    def policy_version(self) -> int:
        """The version that the server has confirmed last."""
        return self._process.version

    def cut_nowait(self) -> None:
        """Give the process up: every call that waits for it, and every one to come, raises EngineLost.
        Idempotent.
        """
        self._process.cut_nowait()
        self._leave_meeting_nowait()

    def renew_nowait(self) -> None:
        """Another process has taken its place, with the weights of the start: calls pass again."""
        self._process.cut_nowait()
        self._leave_meeting_nowait()
        self._process = Process(self._routes, self._start_version, self._mark)
        self._sampler = Sampler(self._process, self._routes, self.facts, self._decode)
        self._staged = self._unchecked = self._adapter_folder = None
        self._num_chunks = 0

    async def ready(self, timeout_s: float) -> EngineHealth:
        """Return once the server answers, has the settings that the run counts on, and has done slow things
        once.

        Raises ConfigError with the flag to give, EngineError, or EngineLost after `timeout_s`.
        """
        process, limit = self._process, TimeLimit(timeout_s)
        try:
            async with limit:
                is_first = self.facts.starts_fresh and not self._was_ready
                await process.ask(
                    "/health", lambda: make_ready(process, self._routes, self.facts, is_first=is_first)
                )
                self._was_ready = True
                return await self.health(timeout_s=timeout_s)
        except TimeoutError:
            if not limit.expired():
                raise
            raise EngineLost(
                self.name,
                f"({self._caller.url}) was not ready within {timeout_s} s",
                way_out=f"read {self.name}'s log.",
            ) from None

    async def generate_segment(
        self, request: GenerateRequest, *, on_chunk: OnChunk | None = None
    ) -> GenerateResponse:
        """Sample one segment until the end, the budget or an interruption. With `on_chunk`, which is told of
        tokens as they come, the answer has the tokens after those that it was told.

        Raises RequestRefused (data: this request is too long, say), EngineLost if the server is gone, or
        EngineError if it answers something that cannot be.
        """
        check_request(self.name, request, self.facts, self._process.vocab_size)
        if self._process.is_here(request.request_id):
            raise EngineError(
                self.name,
                f"is sampling request {request.request_id} already",
                rule="request ids are unique among requests in flight",
                way_out="wait for its answer, or abort it.",
            )
        self._num_segments += 1
        segment = Segment(
            request, f"{self._wire_prefix}-{self._num_segments}-{request.request_id}", on_chunk is not None
        )
        return await self._sampler.sample(segment, on_chunk)

    async def abort(self, request_ids: list[str] | None, *, timeout_s: float | None = 10.0) -> list[str]:
        """End these requests (None = all) with what they have; returns those that were here, once they have
        ended. Raises EngineError.
        """
        process, limit = self._process, TimeLimit(timeout_s)
        found, left = process.abort_nowait(request_ids)
        sent = [segment for segment in found if segment.is_sent]
        try:
            async with limit:
                await process.ask("/abort_requests", lambda: self._sampler.end(sent, list(left.values())))
        except TimeoutError:
            if not limit.expired():
                raise
            raise EngineLost(
                self.name,
                f"gave no answer to /abort_requests within {timeout_s} s",
                way_out=f"read {self.name}'s log.",
            ) from None
        return [*(segment.request.request_id for segment in found), *left]

    async def health(self, *, timeout_s: float | None = 10.0) -> EngineHealth:
        """How the server does. Raises EngineError if it gives no answer."""
        process, routes = self._process, self._routes

        async def ask() -> tuple[str, dict[str, float]]:
            await routes.is_well(timeout_s=timeout_s)
            return await routes.label(timeout_s=timeout_s), await routes.counts(timeout_s=timeout_s)

        label, counts = await process.ask("/health", ask)
        version = process.version_of(label)
        return EngineHealth(
            name=self.name,
            kind="vllm",
            policy_version=process.version if version is None else version,
            slots=self.facts.slots,
            max_length=self.facts.max_length,
            num_running=int(counts["num_running"]),
            num_queued=int(counts["num_queued"]) + process.num_waiting,
            tokens_generated=int(counts["tokens_generated"]),
            device=self.facts.device,
            decode_s=counts["decode_s"],
            asleep=sorted(process.asleep),
        )

    async def prepare(self, manifest: ExportResponse) -> str:
        """Have the weights staged beside the serving ones; returns the digest of what was read. Raises
        EngineError.
        """
        self._check_weights_awake(f"policy_version {manifest.version} cannot be prepared")
        self._staged = None
        load: Load
        if self.meeting is not None and manifest.is_held:
            load = BroadcastLoad(self.name, manifest, self.meeting)
        elif manifest.kind == "weights":
            load = FileLoad(self.name, manifest, self._chunk_bytes)
        elif self.facts.has_adapters:
            load = AdapterLoad(self.name, manifest, self._adapter_folder)
        else:
            raise EngineError(
                self.name,
                f"is to serve adapters of policy_version {manifest.version}, and takes none",
                rule="vLLM takes adapters only if it was started for them",
                way_out="set weight_sync.transport=lora.",
            )
        digest = await self._process.ask("/collective_rpc", lambda: load.stage(self._routes))
        self._staged = load
        return digest

    async def commit(self, version: int, digest: str, interrupt: Interrupt) -> CommitResponse:
        """Have the prepared weights swapped in; returns what the server says of the swap, once the canary
        agrees. Raises EngineError.
        """
        process, load = self._process, self._staged
        self._check_weights_awake(f"policy_version {version} cannot be committed")
        is_same = version == process.version and digest == process.digest
        if is_same and process.is_settled and process.has_content:
            self._leave_meeting_nowait()
            return CommitResponse(version=version, digest=digest, pause_s=0.0, num_interrupted=0)
        self._num_chunks = 0  # whatever becomes of this commit, a push ends with it
        is_other = version < process.version or (
            version == process.version and process.digest not in ("", digest)
        )
        if (
            load is None
            or (load.version, load.digest) != (version, digest)
            or is_other
            or process.is_committing
        ):
            self._staged = None if isinstance(load, ChunkLoad) else load
            raise self._not_staged(version, digest, load)
        commit = Commit(
            process,
            self._routes,
            self._sampler,
            load,
            slots=self.facts.slots,
            limit=self._canary_limit,
            retries=self._retries,
            warn=self._warn,
        )
        self.num_commits += 1
        process.begin_commit_nowait(version)
        report = None
        try:
            report = await commit.run(interrupt)
        finally:
            self.num_commits += 1
            process.end_commit_nowait()
            if report is None:
                self._leave_meeting_nowait()
        if process is self._process:
            self._staged, self._unchecked = None, None if process.is_settled else commit
            self._adapter_folder = load.folder if isinstance(load, AdapterLoad) else None
        return report

    async def sleep(self, parts: Sequence[EnginePart]) -> Moved:
        """Have what runs aborted and these parts freed. Idempotent. Raises EngineError.

        vLLM puts weights and KV cache to sleep together: what is to stay is woken again. The weights are kept
        on the host, so that they can be woken as they were. Requests that come meanwhile wait here until all
        parts are awake again.
        """
        process, started = self._process, asyncio.get_running_loop().time()
        self.num_commits += 1
        asleep_before = set(process.asleep)
        process.asleep |= set(parts)
        process.has_content = process.has_content and "weights" not in parts
        if process.asleep != asleep_before:
            await self._sleep_and_wake(asleep_before)
        return Moved(
            num_bytes=0, seconds=asyncio.get_running_loop().time() - started
        )  # vLLM does not say how many bytes

    async def wake(self, parts: Sequence[EnginePart], *, restore: bool = False) -> Moved:
        """Have memory taken for these parts again. Idempotent. Raises EngineError.

        vLLM wakes weights with what they were. Without `restore` they are not served all the same, until a
        push is committed.
        """
        process, started = self._process, asyncio.get_running_loop().time()
        if restore and "weights" in parts and not process.has_content:
            if not process.is_settled and self._unchecked is None:
                raise EngineError(
                    self.name,
                    f"cannot restore policy_version {process.version}: others were loaded over "
                    f"it, and it is nowhere else",
                    rule="what is restored is what the weights were when they went to sleep",
                    way_out="push this version again, from chunk 0.",
                )
            process.has_content = True
            process.change_nowait()
        if woken := sorted(process.asleep & set(parts)):
            await process.ask("/wake_up", lambda: self._routes.wake([_TAGS[part] for part in woken]))
            if process.asleep == set(woken) and self._unchecked is not None:
                commit, self._unchecked = self._unchecked, None
                await commit.check()
            process.asleep -= set(woken)
            process.change_nowait()
        return Moved(num_bytes=0, seconds=asyncio.get_running_loop().time() - started)

    async def load_chunk(self, chunk: ExportChunkResponse) -> str:
        """Have one chunk of a push loaded into its woken weights; returns the digest of what was loaded.
        Raises EngineError.
        """
        process = self._process
        what = f"chunk {chunk.index} of policy_version {chunk.version} cannot be loaded"
        self._check_weights_awake(what)
        if process.has_content:
            raise EngineError(
                self.name,
                f"{what} over weights that are served",
                rule="chunks are loaded into weights that slept and woke without restore",
                way_out="sleep and wake the weights first, then send the chunks from 0.",
            )
        if chunk.version < process.version:
            raise EngineError(
                self.name,
                f"{what} after {process.version}",
                rule="versions only grow",
                way_out="push a newer version.",
            )
        here, self._num_chunks, self._staged = self._num_chunks, 0, None
        if chunk.index not in (0, here) or (chunk.index and chunk.version != self._chunk_version):
            lies = f"chunks 0..{here - 1} of policy_version {self._chunk_version}" if here else "nothing"
            raise EngineError(
                self.name,
                f"{what}: loaded is {lies}",
                rule="the chunks of one version come in order",
                way_out="push this version again, from chunk 0.",
            )
        if chunk.index == 0:
            process.begin_load_nowait(keeps_kv=False)
            process.offered_version = max(process.offered_version, chunk.version)
        asked = chunk.model_dump(
            include={"version", "index", "path", "memory", "digest", "num_tensors", "num_bytes", "is_last"}
        )
        digest = one_digest(
            self.name,
            await process.ask("/collective_rpc", lambda: self._routes.rpc("asyncrl_load_chunk", asked)),
        )
        self._chunk_version, self._num_chunks = chunk.version, 0 if chunk.is_last else chunk.index + 1
        if chunk.is_last:
            self._staged = ChunkLoad(self.name, chunk.version, chunk.whole_digest, chunk.canary)
        return digest

    def _leave_meeting_nowait(self) -> None:
        if self.meeting is not None:
            self.meeting.leave_nowait(self.name)

    async def _sleep_and_wake(self, asleep_before: set[EnginePart]) -> None:
        process, routes = self._process, self._routes
        if asleep_before:  # vLLM sleeps as a whole or not at all
            await process.ask(
                "/wake_up", lambda: routes.wake([_TAGS[part] for part in sorted(asleep_before)])
            )
        await process.ask("/sleep", routes.sleep)
        await process.ask("/abort_requests", lambda: self._sampler.end(process.sent))
        if awake := sorted(_TAGS.keys() - process.asleep):
            await process.ask("/wake_up", lambda: routes.wake([_TAGS[part] for part in awake]))

    def _check_weights_awake(self, what: str) -> None:
        if "weights" in self._process.asleep:
            raise EngineError(
                self.name,
                f"{what}: the weights are asleep",
                rule="their memory is not theirs meanwhile",
                way_out="wake them first.",
            )

    def _not_staged(self, version: int, digest: str, load: Load | None) -> EngineError:
        process = self._process
        staged = f"policy_version {load.version} with digest {load.digest}" if load is not None else "nothing"
        busy = ", and another commit is under way" if process.is_committing else ""
        return EngineError(
            self.name,
            f"is to serve policy_version {version} with digest {digest}; staged is {staged}, it serves "
            f"{process.version}{busy}",
            rule="only staged weights can be committed, one commit at a time, and a server's version never "
            "goes back",
            way_out="prepare this version first.",
        )
