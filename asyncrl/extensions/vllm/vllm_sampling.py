"""Sample one segment with vLLM."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import io
import math
import uuid
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from asyncrl.base.errors import EngineError, EngineLost, ErrorBody, RequestRefused
from asyncrl.base.http import CallLost, CallRefused
from asyncrl.engines.engine import refused
from asyncrl.engines.link import OnChunk, SegmentCheck
from asyncrl.engines.openai_scope import ASK_AGAIN_S
from asyncrl.extensions.vllm.vllm_process import (
    GENERATE,
    Finish,
    Generated,
    LabelSpan,
    TopLogprob,
    VllmProcess,
    VllmRequirements,
    lora_name,
    vllm_request,
)
from asyncrl.messages.codec import request_fault
from asyncrl.messages.records import VersionSpan
from asyncrl.messages.sampling import SamplingRequest, StopWatch
from asyncrl.messages.tokens import (
    BEHAVIOUR,
    NO_EXPERT,
    ROUTING,
    SUPPORT,
    TOP_IDS,
    TOP_LOGPROBS,
    Ragged,
    SegmentPart,
    Tokens,
    Values,
)

_NO_LOGPROB = -9999.0
_MIN_TEMPERATURE = 0.01
_PAUSED = 503
"""Status of a request that reaches a paused vLLM 0.33; vLLM 0.32 holds it until the
resume.
"""


def check_request(
    process: VllmProcess, request: SamplingRequest, requirements: VllmRequirements
) -> None:
    """Raise RequestRefused for a request that vLLM would change, or that would end its
    engine (invalid ids).
    """
    fault = request_fault(request, requirements.max_length, process.vocab_size)
    if 0.0 < request.temperature < _MIN_TEMPERATURE:
        fault = fault or ErrorBody(
            error=f"temperature {request.temperature}",
            rule=f"vLLM samples at {_MIN_TEMPERATURE} instead of less",
            way_out=f"set rollout.temperature or eval.temperature to {_MIN_TEMPERATURE} or more.",
        )
    if fault:
        what = f"{process.name} refused request {request.request_id}: {fault.error}"
        raise RequestRefused(
            what, why=fault.error, rule=fault.rule, way_out=fault.way_out
        )


@dataclass(eq=False, repr=False)
class Segment:
    """A request to vLLM and the tokens of its answer.

    Life: waiting -> sent -> answered; or aborted. `is_certain` until a load begins.
    Invariant: sent once, under one version and its label. on_chunk has got `_num_told`
        tokens, all before any load. `_labels` come with the end and cover all tokens.
    """

    process: VllmProcess
    request: SamplingRequest
    requirements: VllmRequirements
    on_chunk: OnChunk
    is_sent = False
    is_aborted = False
    is_certain = True
    _num_told = 0

    def __post_init__(self) -> None:
        request = self.request
        # The pool sends a request again under the same name, and the abort of an
        # earlier segment must not end this one.
        self.wire_id = f"{uuid.uuid4().hex[:12]}-{request.request_id}"
        self.answered = asyncio.Event()
        self._watch = joint_watch(request, self.requirements)
        self._token_ids: list[int] = []
        self._logprobs: list[float] = []
        self._top: list[list[tuple[int, float]]] = []
        self._has_supports = request.is_cut and self.requirements.returns_supports
        self._supports: list[list[int]] = []
        self._finish: Finish | None = None
        self._labels: list[LabelSpan] | None = None
        self._routed: str | None = None

    async def sample(self) -> SegmentPart:
        """Return the end of the segment. If it was aborted before it was sent, it has no
        tokens. Raises RequestRefused, EngineLost or EngineError.
        """
        process = self.process
        async with process.calls():
            process.segments[self.wire_id] = self
            try:
                # Registered before the wait: abort() finds segments that were never
                # sent.
                await process.wait_open(self)
                if not self.is_sent:
                    return self._part([], "abort")
                # Read in the same step in which wait_open let it pass, so version and
                # label of the body belong together.
                adapter = self.request.adapter
                if adapter not in process.versions:
                    missing = process.missing(adapter)
                    raise CallRefused(process.name, GENERATE, 404, missing)
                self._version = process.versions[adapter]
                self._folder = process.adapters[adapter].folder
                self._check = SegmentCheck(
                    process.name,
                    self.request,
                    oldest=self._version,
                    has_supports=self._has_supports,
                )
                try:
                    await self._ask()
                except CallRefused as refusal:
                    if refusal.status != 404 or not self._folder:
                        raise
                    # Another client has unloaded the adapter.
                    await process.load_adapter(adapter, self._folder)
                    await self._ask()
                # A commit waits for this in end(). It must come before wait_settled,
                # which waits for that commit.
                self.answered.set()
                await process.wait_settled(self)
                return self._response()
            except CallRefused as refusal:
                if refusal.status == _PAUSED and not self._token_ids:
                    # Sent before /pause, it arrived after. The pool sends it again, but
                    # not at once: another client may have paused this server for long.
                    await asyncio.sleep(ASK_AGAIN_S)
                    return self._part([], "abort")
                error = await process.error_of(refusal)
                # Errors of the server, not of this request.
                if refusal.status == 404 and self.request.adapter:
                    process.versions.pop(self.request.adapter, None)
                elif isinstance(error, EngineLost) or refusal.status in (401, 403, 404):
                    raise error from refusal
                raise refused(process.name, self.request, refusal) from refusal
            finally:
                del process.segments[self.wire_id]
                # On every way out: a commit must not wait for a segment that is gone.
                self.answered.set()

    async def _ask(self) -> None:
        """Read the whole answer, or a stream to its end, which has the weight labels."""
        process, watch, request = self.process, self._watch, self.request
        if self.on_chunk is None and watch is None:
            self._add(await process.post(GENERATE, self._body(), Generated))
            return
        num_wanted: int | None = None
        async with contextlib.aclosing(process.stream(self._body())) as parts:
            async for part in parts:
                num_before = len(self._token_ids)
                self._add(part)
                # Without a thought only the first tokens can complete a string that
                # began in an earlier segment; vLLM finds the others itself.
                if watch is not None and num_wanted is None:
                    end = len(self._token_ids)
                    # past its window no stop string reaches back
                    if request.thinking is None:
                        end = min(end, watch.window)
                    for at in range(num_before, end):
                        if watch.is_complete(self._token_ids[at]):
                            num_wanted = at + 1
                            break
                    if num_wanted is not None and self._finish is None:
                        # The stream is still read to its end: only its last part has
                        # the labels.
                        await process.abort([self.wire_id])
                # After a load has begun the tokens wait for the end, whose labels say
                # which weights sampled them.
                if self._finish is None and num_wanted is None and self.is_certain:
                    self._tell()
        if self._finish is None:
            raise CallLost(
                process.name, GENERATE, "the answer broke off before its end"
            )
        if num_wanted is not None:
            # vLLM sampled on until the abort arrived.
            self._cut(num_wanted, "stop")

    def _body(self) -> dict[str, object]:
        """Return the body. vLLM restarts its random stream per request, so the seed (63
        bits) depends on the segment's position.
        """
        request, requirements = self.request, self.requirements
        # With only the seed, every segment would draw the same numbers as the first.
        place = f"{request.seed}|{len(request.prompt_ids)}".encode()
        special = requirements.special_ids
        # vLLM would also stop inside a thought, so stop strings after a thought are
        # only watched for.
        stop = [text for text in request.stop if text and request.thinking is None]
        sampling: dict[str, object] = {
            **request.parameters,
            "max_tokens": request.max_tokens,
            "seed": int.from_bytes(hashlib.sha256(place).digest()[:8], "big") >> 1,
            "stop": stop,
            "stop_token_ids": [
                *(() if request.ignore_eos else requirements.end_ids),
                *request.stop_ids,
                *(special[text] for text in stop if text in special),
            ],
            "detokenize": bool(stop),
            "logprobs": request.top_logprobs + 1 if request.top_logprobs else 0,
        }
        if request.grammar is not None:
            sampling["structured_outputs"] = {"grammar": request.grammar}
        if request.num_resumed:
            # They are part of the prompt for vLLM, but of the answer for its grammar
            # and its penalties.
            sampling["extra_args"] = {"num_resumed": request.num_resumed}
        label = self.process.label_of(self._version)
        model = lora_name(request.adapter) if self._folder else None
        return vllm_request(ids_of(request), self.wire_id, label, model, **sampling)

    def _add(self, part: Generated) -> None:
        for choice in part.choices:
            content = [] if choice.logprobs is None else choice.logprobs.content or []
            self._token_ids += choice.token_ids or []
            self._logprobs += [
                # vLLM writes this value for NaN too. NaN fails SegmentCheck; a logprob
                # of -9999 would be trained on.
                math.nan if one.logprob <= _NO_LOGPROB else one.logprob
                for one in content
            ]
            if self._has_supports:
                # vLLM lists all ids of a whole vocabulary, so an empty list is a missing
                # one, and the count below finds it.
                self._supports += filter(None, choice.sampling_mask or [])
            if num_top := self.request.top_logprobs:
                self._top += [_likeliest(one.top_logprobs, num_top) for one in content]
            self._finish = choice.finish_reason or self._finish
            self._labels = choice.weight_versions or self._labels
            self._routed = choice.routed_experts or self._routed
        num_tokens = len(self._token_ids)
        num_top = len(self._top) if self.request.top_logprobs else num_tokens
        num_supports = len(self._supports) if self._has_supports else num_tokens
        # Here, not at the end: chunks pair tokens and logprobs by position.
        if not len(self._logprobs) == num_top == num_supports == num_tokens:
            raise EngineError(
                self.process.name,
                f"answered request {self.request.request_id} with {num_tokens} tokens, {len(self._logprobs)} "
                f"logprobs, {num_top} lists of alternatives and {num_supports} supports",
                rule="each token has one logprob, and one support if top_p, top_k or min_p cut",
                way_out="use vLLM 0.32 or 0.33.",
            )

    def _tell(self) -> None:
        num_tokens = len(self._token_ids)
        if self.on_chunk is not None and num_tokens > self._num_told:
            # Labels come only with the end, but nothing was loaded since it was sent:
            # is_certain.
            chunk = self._part([VersionSpan(0, num_tokens, self._version)], None)
            self._check.accept(chunk, newest=self._version)
            self.on_chunk(chunk)
            self._num_told = num_tokens

    def _part(self, spans: Sequence[VersionSpan], finish: Finish | None) -> SegmentPart:
        """Return the tokens that on_chunk did not get. The experts come with the end
        and cover the prompt, so then the whole text is told again.
        """
        told = self._num_told
        new = self._tokens(told, len(self._token_ids), spans)
        experts = self._experts() if finish else None
        if experts is None:
            return SegmentPart(new, finish)
        prompt = Tokens(np.asarray(self.request.prompt_ids, np.int32))
        whole = Tokens.join([prompt, self._tokens(0, told).as_context(), new])
        return SegmentPart(whole.with_columns({ROUTING: experts}), finish)

    def _tokens(
        self, start: int, end: int, spans: Sequence[VersionSpan] = ()
    ) -> Tokens:
        """Return sampled tokens [start, end); `spans` count from the first token of the
        answer.
        """
        logprobs = np.array(self._logprobs[start:end], np.float32)
        columns: dict[str, Values] = {BEHAVIOUR: logprobs}
        if self.request.top_logprobs:
            top = self._top[start:end]
            columns[TOP_IDS] = Ragged.of(
                [[token for token, _ in one] for one in top], "<i4"
            )
            columns[TOP_LOGPROBS] = Ragged.of(
                [[value for _, value in one] for one in top], "<f4"
            )
        if self._has_supports:
            columns[SUPPORT] = Ragged.of(self._supports[start:end], "<i4")
        moved = [
            VersionSpan(max(0, span.start - start), span.end - start, span.version)
            for span in spans
            if span.end > start
        ]
        return Tokens(
            np.array(self._token_ids[start:end], np.int32), tuple(moved), columns
        )

    def _cut(self, num_tokens: int, finish: Finish) -> None:
        del (
            self._token_ids[num_tokens:],
            self._logprobs[num_tokens:],
            self._top[num_tokens:],
            self._supports[num_tokens:],
        )
        self._finish = finish

    def _response(self) -> SegmentPart:
        """Return the tokens not reported yet. Raises EngineError."""
        spans: list[VersionSpan] = []
        if self.request.adapter:
            # vLLM's labels are those of the run's own. Another adapter is not loaded
            # before its requests have ended.
            known = self.process.label_of(self._version)
            end = len(self._token_ids)
            self._labels = [LabelSpan(version=known, start=0, end=end)]
        for label in self._labels or []:
            # labels also cover tokens cut after a stop string
            end = min(label.end, len(self._token_ids))
            if label.start < end:
                spans.append(
                    VersionSpan(
                        label.start, end, self.process.version_of(label.version)
                    )
                )
        is_labelled = bool(spans) or not self._token_ids
        if (
            self._finish is None
            or not is_labelled
            or any(span.version < 0 for span in spans)
        ):
            labels = [
                (label.start, label.end, label.version) for label in self._labels or []
            ]
            what = f"answered request {self.request.request_id} with finish_reason {self._finish}, "
            what += f"{len(self._token_ids)} tokens and labels {labels}"
            rule = "vLLM reports an answer's end and the label of each token; one run sets the labels"
            way_out = "use vLLM 0.32 or 0.33, and give each run its own servers."
            raise EngineError(self.process.name, what, rule=rule, way_out=way_out)
        answer = self._part(spans, self._finish)
        newest = max(self._version, self.process.version)
        self._check.accept(answer, newest=newest)
        return answer

    def _experts(self) -> npt.NDArray[np.uint16] | None:
        """Return ROUTING of the prompt and all sampled tokens."""
        num_tokens = len(self._token_ids)
        if not self.requirements.returns_routing or not num_tokens:
            return None
        assert self._routed is not None, "the server has --enable-return-routed-experts"
        num_read = len(self.request.prompt_ids) + num_tokens - 1
        # vLLM has read tokens after a stop string, which were cut.
        read = decode_experts(self._routed)[:num_read]
        if len(read) != num_read:
            raise EngineError(
                self.process.name,
                f"answered request {self.request.request_id} with the experts of {len(read)} of {num_read} "
                "read tokens",
                rule="algorithm.router_replay needs the experts of every token that is read",
                way_out="use vLLM 0.32 or 0.33, or set algorithm.router_replay=false.",
            )
        # A token's experts are recorded with the next token, whose sampling they belong
        # to. Nothing was read before the first one.
        unknown = np.full((1, read.shape[1]), NO_EXPERT, np.uint16)
        return np.concatenate([unknown, read])


def ids_of(request: SamplingRequest) -> list[int]:
    found: list[int] = np.asarray(request.prompt_ids).tolist()
    return found


def _likeliest(top: Sequence[TopLogprob], num: int) -> list[tuple[int, float]]:
    """Return the likeliest tokens, without impossible ones."""
    found = sorted(
        (one for one in top if one.rank is not None and one.rank <= num),
        key=lambda one: one.rank or 0,
    )
    return [
        (one.token_id, one.logprob) for one in found[:num] if one.logprob > _NO_LOGPROB
    ]


def decode_experts(encoded: str) -> npt.NDArray[np.uint16]:
    """Decode routed_experts to [T, E] for layers with a router; vLLM writes zeros for
    the others.
    """
    experts = np.load(io.BytesIO(base64.b64decode(encoded)), allow_pickle=False)
    # A router never picks an expert twice, and a layer without one has k zeros. This
    # needs k of 2 or more.
    is_routed = [len(set(row)) == len(row) for row in experts[0].tolist()]
    found: npt.NDArray[np.uint16] = (
        experts[:, is_routed].reshape(len(experts), -1).astype("<u2")
    )
    return found


def joint_watch(
    request: SamplingRequest, requirements: VllmRequirements
) -> StopWatch | None:
    """Watch for what vLLM does not find: stop strings across segments, and those after
    a thought.
    """
    decode = requirements.decode
    special = requirements.special_ids
    thinking = request.thinking
    # A first segment without a thought needs no watch: vLLM sees all its text.
    if decode is None or not any(request.stop) or not (request.num_resumed or thinking):
        return None
    resumed_ids = ids_of(request)[len(request.prompt_ids) - request.num_resumed :]
    stop_ids = [special[text] for text in request.stop if text in special]
    return StopWatch(request.stop, decode, resumed_ids, stop_ids, thinking)
