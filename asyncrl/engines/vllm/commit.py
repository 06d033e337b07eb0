"""One commit of staged weights on one vLLM process: pause, load, label, resume, and the canary that says
whether it is true.

Knows the order and what a failure at each place means; knows no file and no route's path.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager

from asyncrl.engines.vllm.generate import Sampler
from asyncrl.engines.vllm.readiness import canary_fault
from asyncrl.engines.vllm.segments import Segment
from asyncrl.engines.vllm.vllm_process import Process
from asyncrl.engines.vllm.vllm_routes import PauseMode, Routes
from asyncrl.engines.vllm.vllm_weights import Load
from asyncrl.errors import EngineError, EngineLost
from asyncrl.http import CallLost, CallRefused
from asyncrl.messages.base import Interrupt
from asyncrl.messages.engine_calls import CommitResponse
from asyncrl.waits import uncut

RESUME_LIMIT_S = 10.0
_MODES: dict[Interrupt, PauseMode] = {"abort": "abort", "keep": "keep", "keep_kv": "keep", "wait": "wait"}
_RULE = "once a load has begun, the weights are those of no version until it is done and checked"
_READ_LOG = "read its log for why, then start it again."


class Commit:
    """Makes one Load the serving weights of a process.

    Life:       run() once; for an engine that sleeps, check() once it is awake. An attempt whose canary fails
                is followed by another, under a label of its own.
    Waits:      for vLLM: as long as its caller lets it, but for resume, which has RESUME_LIMIT_S and is not
                cut short by a cancellation.
    Invariant:  a paused engine is resumed, whatever happens, unless its process was given up. From the first
                byte that is loaded to the canary's answer no token leaves; if that answer never comes, or is
                no, the process is broken: what it holds is no version.
    """

    def __init__(
        self,
        process: Process,
        routes: Routes,
        sampler: Sampler,
        load: Load,
        *,
        slots: int,
        limit: float,
        retries: int,
        warn: Callable[[str], None],
    ) -> None:
        self._process, self._routes, self._sampler, self._load = process, routes, sampler, load
        self._slots, self._limit, self._warn = slots, limit, warn
        self._num_attempts = 1 + (retries if load.can_repeat and load.canary is not None else 0)
        self._label = process.label_of(load.version)
        self._from, self._is_untrue = process.version, False
        self._pause_s, self._num_interrupted = 0.0, 0

    async def run(self, interrupt: Interrupt) -> CommitResponse:
        """Returns once the weights serve, or, in an engine that sleeps, once they lie there. Raises
        EngineError.
        """
        process, load = self._process, self._load
        with self._all_or_broken():
            for attempt in range(self._num_attempts):
                if attempt:
                    self._label = process.label_of(load.version, attempt)
                    await process.ask("/collective_rpc", lambda: load.stage(self._routes))
                await self._swap("abort" if attempt else interrupt)
                if process.asleep and load.canary is not None:
                    process.serve_nowait(load.version, self._label, load.digest, load.model)
                    break  # check() is for later
                if await self._is_true(attempt + 1):
                    process.serve_nowait(load.version, self._label, load.digest, load.model)
                    process.confirm_nowait()
                    break
        return CommitResponse(
            version=load.version,
            digest=load.digest,
            pause_s=self._pause_s,
            num_interrupted=self._num_interrupted,
        )

    async def check(self) -> None:
        """What run() left open, now that the engine is awake. Raises EngineError."""
        with self._all_or_broken():
            await self._is_true(self._num_attempts)
            self._process.confirm_nowait()

    async def _swap(self, interrupt: Interrupt) -> None:
        process, clock = self._process, asyncio.get_running_loop().time
        if process.asleep:  # nothing runs, and a wake resumes
            await self._load_under_label(interrupt)
            return
        running = process.sent
        started = clock()
        async with self._paused(interrupt):
            if interrupt == "wait":
                started = clock()
            else:
                self._num_interrupted += (
                    len(running) if interrupt == "abort" else min(len(running), self._slots)
                )
            await process.ask("/abort_requests", lambda: self._sampler.end(self._not_kept(interrupt)))
            await self._load_under_label(interrupt)
        self._pause_s += clock() - started

    def _not_kept(self, interrupt: Interrupt) -> list[Segment]:
        """Segments that end here: with abort all, those too that reached vLLM after the pause; else streams,
        whose next tokens could not be told before their end, and as many others as leave a slot for the
        canary.
        """
        sent = self._process.sent
        if interrupt == "abort":
            return sent
        kept = [segment for segment in sent if not segment.is_streamed]
        num_kept = len(kept) if self._load.canary is None else min(len(kept), self._slots - 1)
        return [segment for segment in sent if segment.is_streamed] + kept[num_kept:]

    async def _load_under_label(self, interrupt: Interrupt) -> None:
        process = self._process
        process.begin_load_nowait(keeps_kv=interrupt == "keep_kv")
        await process.ask("/collective_rpc", lambda: self._load.load(self._routes))
        await process.ask("/update_weight_version", lambda: self._routes.set_label(self._label))

    @asynccontextmanager
    async def _paused(self, interrupt: Interrupt) -> AsyncIterator[None]:
        try:
            await self._process.ask(
                "/pause", lambda: self._routes.pause(_MODES[interrupt], clear_cache=interrupt != "keep_kv")
            )
            yield
        finally:
            _, cancelled = await uncut(self._resume())
            if cancelled is not None:
                raise cancelled

    async def _resume(self) -> None:
        """Also after a pause of which nobody knows whether it came: a resume too many does nothing."""
        process = self._process
        if process.line.is_cut:
            return
        try:
            await process.hold("/resume", lambda: self._routes.resume(timeout_s=RESUME_LIMIT_S))
        except EngineLost:
            return  # who waits for it learns that at its next call
        except (CallLost, CallRefused) as failure:
            process.break_nowait(
                f"was paused and could not be resumed: {failure}",
                rule="a pause ends with its commit",
                way_out=_READ_LOG,
            )

    async def _is_true(self, attempt: int) -> bool:
        """Whether the canary agrees. Raises EngineError if it does not, and this was the last attempt."""
        load, process = self._load, self._process
        if load.canary is None:
            return True
        canary, request_id = load.canary, f"canary-{self._label}"
        fault = await process.ask(
            "the canary",
            lambda: canary_fault(
                self._routes,
                canary,
                label=self._label,
                model=load.model,
                limit=self._limit,
                request_id=request_id,
            ),
        )
        if not fault:
            return True
        process.distrust_nowait(self._label)
        what = (
            f"does not compute with the weights of policy_version {load.version} that it says it loaded: "
            f"{fault}"
        )
        if attempt < self._num_attempts:
            self._warn(f"{process.name} {what}; loading them again, {attempt} of {self._num_attempts - 1}")
            return False
        self._is_untrue = True
        raise EngineError(
            process.name,
            f"{what} ({attempt} of {self._num_attempts} attempts)",
            rule=f"a version is announced only when the canary agrees to "
            f"weight_sync.canary_limit={self._limit} nats",
            way_out=f"if the numbers are as far apart as rounding of model.dtype makes them, set "
            f"weight_sync.canary_limit above them; else "
            f"start {process.name} again, and the run with its --run-dir; if it repeats, report it with "
            f"{process.name}'s log.",
        )

    @contextmanager
    def _all_or_broken(self) -> Iterator[None]:
        """Left while nobody knows what the weights are, by an error or a cancellation: the process is
        broken.
        """
        process, is_done = self._process, False
        try:
            yield
            is_done = True
        except EngineError as error:
            if process.is_settled or self._is_untrue or isinstance(error, EngineLost):
                raise
            raise EngineLost(
                process.name,
                f"{self._what_failed}: {error.what}",
                rule=_RULE,
                way_out=error.way_out or _READ_LOG,
            ) from error
        finally:
            if not is_done and not process.is_settled:
                process.break_nowait(self._what_failed, rule=_RULE, way_out=_READ_LOG)

    @property
    def _what_failed(self) -> str:
        return f"failed in a swap from policy_version {self._from} to {self._load.version}"
