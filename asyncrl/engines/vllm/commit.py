"""One commit of staged weights on one vLLM process: pause, load, label, resume, and the canary that says
whether it is true. Knows the order and what a failure at each place means; knows no file.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple
from urllib.parse import urlencode

from asyncrl.engines.vllm.vllm_process import Segment, VllmProcess
from asyncrl.engines.vllm.vllm_routes import GENERATE, Generated, Routes, vllm_request
from asyncrl.engines.vllm.vllm_weights import Load
from asyncrl.errors import EngineError, EngineLost
from asyncrl.messages.base import Interrupt
from asyncrl.messages.engine_calls import CommitResponse
from asyncrl.messages.trainer_calls import Canary
from asyncrl.waits import uncut

RESUME_LIMIT_S = 10.0
_RULE = "once a load has begun, the weights are those of no version until it is done and checked"


class CommitRules(NamedTuple):
    """`slots` of the engine; `limit` of the canary, in nats; `retries` of a load whose canary fails, of which
    `warn` is told.
    """

    slots: int
    limit: float
    retries: int
    warn: Callable[[str], None]


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

    def __init__(self, process: VllmProcess, load: Load, rules: CommitRules) -> None:
        self._process, self._load, self._rules = process, load, rules
        self._num_attempts = 1 + (rules.retries if load.can_repeat and load.canary is not None else 0)
        self._what_failed = f"failed in a swap from policy_version {process.version} to {load.version}"
        self._label = process.label_of(load.version)
        self._is_untrue = False
        self._pause_s, self._num_interrupted = 0.0, 0

    async def run(self, interrupt: Interrupt) -> CommitResponse:
        """Returns once the weights serve, or, in an engine that sleeps, once they lie there. Raises
        EngineError.
        """
        process, load = self._process, self._load
        with self._all_or_broken():
            async with process.calls():
                for attempt in range(self._num_attempts):
                    if attempt:
                        self._label = process.label_of(load.version, attempt)
                        await load.stage(process)
                    await self._swap("abort" if attempt else interrupt)
                    is_check_later = bool(process.asleep) and load.canary is not None
                    if is_check_later or await self._is_true(attempt + 1):
                        process.version, process.digest = load.version, load.digest
                        process.label, process.model = self._label, load.model
                        if not is_check_later:
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
            async with self._process.calls():
                await self._is_true(self._num_attempts)
            self._process.confirm_nowait()

    async def _swap(self, interrupt: Interrupt) -> None:
        process, clock = self._process, asyncio.get_running_loop().time
        if process.asleep:  # nothing runs, and a wake resumes
            await self._load_under_label(interrupt)
            return
        num_running, started = len(process.sent), clock()
        mode, keeps_kv = ("keep", True) if interrupt == "keep_kv" else (interrupt, False)
        pause = {"mode": mode, "clear_cache": str(not keeps_kv).lower()}
        try:
            await process.tell(f"/pause?{urlencode(pause)}")
            if interrupt == "wait":
                started = clock()
            elif interrupt == "abort":
                self._num_interrupted += num_running
            else:
                self._num_interrupted += min(num_running, self._rules.slots)
            await process.end(self._not_kept(interrupt))
            await self._load_under_label(interrupt)
        finally:
            _, cancelled = await uncut(self._resume())
            if cancelled is not None:
                raise cancelled
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
        num_kept = len(kept) if self._load.canary is None else self._rules.slots - 1
        return [segment for segment in sent if segment.is_streamed] + kept[num_kept:]

    async def _load_under_label(self, interrupt: Interrupt) -> None:
        process = self._process
        process.begin_load_nowait(self._load.version, keeps_kv=interrupt == "keep_kv")
        await self._load.load(process)
        await process.set_label(self._label)

    async def _resume(self) -> None:
        """Also after a pause of which nobody knows whether it came: a resume too many does nothing."""
        process = self._process
        try:
            async with process.calls():
                await process.tell("/resume", timeout_s=RESUME_LIMIT_S)
        except EngineError as error:  # a process that was given up is broken already
            what = f"was paused and could not be resumed: {error.fault}"
            process.break_nowait(what, rule="a pause ends with its commit")

    async def _is_true(self, attempt: int) -> bool:
        """Whether the canary agrees. Raises EngineError if it does not, and this was the last attempt."""
        load, process = self._load, self._process
        if load.canary is None:
            return True
        fault = await canary_fault(
            process, load.canary, label=self._label, model=load.model, limit=self._rules.limit
        )
        if not fault:
            return True
        process.distrusted.add(self._label)
        what = (
            f"does not compute with the weights of policy_version {load.version} that it says it loaded: "
            f"{fault}"
        )
        if attempt < self._num_attempts:
            self._rules.warn(
                f"{process.name} {what}; loading them again, {attempt} of {self._num_attempts - 1}"
            )
            return False
        self._is_untrue = True
        raise EngineError(
            process.name,
            f"{what} ({attempt} of {self._num_attempts} attempts)",
            rule=f"the canary must agree to weight_sync.canary_limit={self._rules.limit} nats",
            way_out=f"if that is rounding of model.dtype, set weight_sync.canary_limit above it; else start "
            f"{process.name} again, and the run with its --run-dir.",
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
            what = f"{self._what_failed}: {error.fault}"
            raise EngineLost(process.name, what, rule=_RULE, way_out=error.way_out) from error
        finally:
            if not is_done and not process.is_settled:
                process.break_nowait(self._what_failed, rule=_RULE)


async def canary_fault(routes: Routes, canary: Canary, *, label: str, model: str | None, limit: float) -> str:
    """What vLLM says of the canary that the trainer does not, in words; '' if they agree. Raises CallRefused
    or CallLost.

    The first probe goes the way of every request, through the prefix cache; the second computes the prompt
    anew. One after the other: the second would fill the cache for the first.
    """
    answers = []
    for name, more in {"next": {}, "prompt": {"prompt_logprobs": 0}}.items():
        sampling = {"max_tokens": 1, "temperature": 0.0} | more
        body = vllm_request(canary.token_ids, f"canary-{label}-{name}", label, model, **sampling)
        answers.append(await routes.post(GENERATE, body, Generated))
    choices = [choice for answer in answers for choice in answer.choices]
    labels = [span.version for choice in choices for span in choice.weight_versions or []]
    if labels != [label, label]:
        return f"it answers under the label {', '.join(labels) or 'none'}, and was told {label}"
    logprobs = choices[0].logprobs
    sampled = [] if logprobs is None else [one.logprob for one in logprobs.content or []]
    if len(sampled) != 1 or not abs(sampled[0] - canary.next_logprob) <= limit:
        shown = ", ".join(f"{logprob:.6f}" for logprob in sampled) or "none"
        return f"the next token has logprob {shown}, the trainer says {canary.next_logprob:.6f}"
    entries = zip(answers[1].prompt_logprobs or [], canary.token_ids, strict=False)
    found = [entry[token].logprob for entry, token in entries if entry and token in entry]
    if len(found) != len(canary.logprobs):
        return f"{len(found)} logprobs of a prompt with {len(canary.logprobs)}"
    gap = math.fsum(abs(ours - theirs) for ours, theirs in zip(found, canary.logprobs, strict=True))
    if not gap <= limit * len(found):
        return f"logprobs of the prompt differ by {gap / len(found):.6f} on average over {len(found)} tokens"
    return ""
