"""Has one segment sampled by vLLM: sends it, reads its answer or its stream, ends it. Knows one process;
knows no commit's order.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence

from asyncrl.engines.engine import SegmentCheck, engine_error
from asyncrl.engines.vllm.facts import JointWatch, VllmFacts, watch_of
from asyncrl.engines.vllm.segments import Sampled, Segment, generate_body, response_of
from asyncrl.engines.vllm.vllm_process import Process
from asyncrl.engines.vllm.vllm_routes import GENERATE, Generate, Routes
from asyncrl.errors import EngineLost, RequestRefused
from asyncrl.http import CallLost, CallRefused
from asyncrl.messages.engine_calls import GenerateChunk, GenerateResponse

OnChunk = Callable[[GenerateChunk], None]
ASK_AGAIN_S = 0.1
"""An abort that overtook its request finds nothing: it is sent again until the request has ended."""


class Sampler:
    """Samples segments on one process. Life: with its process. Waits: see Process; and for vLLM's answers,
    without a limit of its own.
    """

    def __init__(
        self,
        process: Process,
        routes: Routes,
        facts: VllmFacts,
        decode: Callable[[Sequence[int]], str] | None,
    ) -> None:
        self._process, self._routes, self._facts, self._decode = process, routes, facts, decode

    def __repr__(self) -> str:
        return f"<Sampler on {self._process!r}>"

    async def sample(self, segment: Segment, on_chunk: OnChunk | None) -> GenerateResponse:
        """The segment's answer. Raises RequestRefused, EngineLost or EngineError."""
        process, request = self._process, segment.request
        with process.holding(segment):
            await process.hold(GENERATE, lambda: process.wait_open(segment))
            if segment.is_aborted:
                return GenerateResponse(
                    request_id=request.request_id,
                    token_ids=[],
                    logprobs=[],
                    version_spans=[],
                    finish_reason="abort",
                )
            check = SegmentCheck(process.name, request, oldest=process.version)
            sampled, num_told = await self._ask(segment, check, on_chunk)
            await process.hold(GENERATE, lambda: process.wait_settled(segment))
            answer = response_of(
                process.name,
                segment,
                sampled,
                num_told=num_told,
                version_of=process.version_of,
                is_stale=process.is_stale(segment),
            )
            check.end(answer, newest=process.offered_version)
            return answer

    async def end(self, segments: Sequence[Segment], left: Sequence[str] = ()) -> None:
        """Have these end with what they have; returns once vLLM has answered all of them. `left`: wire ids
        that nobody waits for.

        Raises CallRefused or CallLost.
        """
        wire_ids = [*left, *(segment.wire_id for segment in segments if not segment.answered.is_set())]
        while wire_ids:
            await self._routes.abort(wire_ids)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(ASK_AGAIN_S):
                    for segment in segments:
                        await segment.answered.wait()
            wire_ids = [segment.wire_id for segment in segments if not segment.answered.is_set()]

    async def _ask(
        self, segment: Segment, check: SegmentCheck, on_chunk: OnChunk | None
    ) -> tuple[Sampled, int]:
        """What vLLM answers, and how many of its tokens were told already."""
        process = self._process
        body = generate_body(segment, self._facts, model=process.model)
        watch = watch_of(segment.request, self._decode)
        is_left = False
        try:
            if on_chunk is None and watch is None:
                sampled = Sampled()
                sampled.add(await process.hold(GENERATE, lambda: self._routes.generate(body)))
                return sampled, 0
            return await process.hold(GENERATE, lambda: self._stream(segment, body, check, on_chunk, watch))
        except CallRefused as refusal:
            raise await self._refused(segment, refusal) from refusal
        except CallLost as lost:
            raise engine_error(self._routes.caller, lost, is_told=process.is_given_up) from lost
        except asyncio.CancelledError:
            is_left = (
                True  # vLLM may sample it still: Process.holding keeps its wire id for the abort that follows
            )
            raise
        finally:
            if not is_left:
                segment.answered.set()

    async def _stream(
        self,
        segment: Segment,
        body: Generate,
        check: SegmentCheck,
        on_chunk: OnChunk | None,
        watch: JointWatch | None,
    ) -> tuple[Sampled, int]:
        sampled, num_told, num_wanted = Sampled(), 0, None
        async with contextlib.aclosing(self._routes.stream(body)) as parts:
            async for part in parts:
                num_before = len(sampled.token_ids)
                sampled.add(part)
                if (
                    watch is not None
                    and num_wanted is None
                    and (taken := watch.take(sampled.token_ids[num_before:])) is not None
                ):
                    num_wanted = num_before + taken
                    if (
                        sampled.finish is None
                    ):  # to the end of the stream all the same: it says which weights these tokens were of
                        await self._routes.abort([segment.wire_id])
                is_certain = self._process.is_certain(segment)
                if (
                    on_chunk is not None
                    and sampled.finish is None
                    and num_wanted is None
                    and is_certain
                    and len(sampled.token_ids) > num_told
                ):
                    chunk = GenerateChunk(
                        token_ids=sampled.token_ids[num_told:],
                        logprobs=sampled.logprobs[num_told:],
                        version=segment.version,
                    )
                    check.chunk(chunk, newest=self._process.offered_version)
                    on_chunk(chunk)
                    num_told = len(sampled.token_ids)
        if sampled.finish is None:
            raise CallLost(self._process.name, GENERATE, "the answer broke off before its end")
        if num_wanted is not None:
            sampled.cut(num_wanted, "stop")
        return sampled, num_told

    async def _refused(
        self, segment: Segment, refusal: CallRefused
    ) -> RequestRefused | EngineLost | Exception:
        """A status of 400 and above: of this one request, unless the engine behind the server is dead, or
        nobody may ask it.
        """
        if refusal.status in (401, 403, 404):
            return engine_error(self._routes.caller, refusal)
        if (dead := await self._process.death_of(refusal)) is not None:
            return dead
        request = segment.request
        return RequestRefused(
            f"{self._process.name} answered {refusal.status} to request {request.request_id} "
            f"({len(request.prompt_ids)} prompt tokens, max_tokens={request.max_tokens}): "
            f"{refusal.body.error}",
            rule="vLLM says whether it can serve a request",
            way_out=f"read {self._process.name}'s log."
            if refusal.status >= 500
            else "ask for what the model can do.",
        )
