"""A call's path from its body to its sampled answer."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from typing import TypeVar

from asyncrl.agents.endpoint.answers import (
    NO_RETRY,
    Answer,
    ApiError,
    GatewayTokenizer,
    invalid,
    too_long,
)
from asyncrl.agents.endpoint.calls.gateway_call import GatewayCall, call_keys, client_gone
from asyncrl.agents.endpoint.capture import GatewayStats, PromptPlan
from asyncrl.agents.endpoint.forms.chat import Form
from asyncrl.agents.endpoint.grammars import (
    STRICT_NEEDS,
    GrammarChecks,
    asks_strict_alone,
    grammar_of,
    prefill_of,
)
from asyncrl.agents.endpoint.prefix_match import Prefill, PromptMatch
from asyncrl.agents.endpoint.reasoning import ReasoningSplitter
from asyncrl.agents.endpoint.requests import AnyRequest, CallRules, ChatRequest, RequestReader
from asyncrl.agents.endpoint.sessions import GatewaySession, Sessions, session_ended
from asyncrl.agents.endpoint.tool_formats import ToolFormat
from asyncrl.base.errors import RequestRefused, RolloutFailure, RoomError
from asyncrl.engines.pool import EnginePool
from asyncrl.messages.records import SamplingRequest

log = logging.getLogger(__name__)

Value = TypeVar("Value")

LONG_BODY = 2**14
"""Bytes of a body that is read and rendered in a thread: 500 minimal messages, 10 ms."""
LONG_TEXT = 2**14
"""Characters of a text that is tokenized in a thread: some 15 ms."""
LONG_LOGPROBS = 2**10
"""Logprobs of an answer that are built in a thread: some 10 ms."""
NUM_ENCODING = 4
"""Texts tokenized at once. Each takes a core, and much memory."""
MAX_CHARACTERS = 64
"""Most characters per token of the longest prompt, checked before tokenization."""
FAR_TOO_MANY = 4
"""Multiple of the longest prompt, checked before the parent's lookup."""
NUM_OF_END = 32
"""Last prompt tokens checked for an open thought."""
TOO_LONG = too_long("", "").error["code"]
SeedOf = Callable[[str, int, int, int], int]
"""Seed of a request from (prompt_id, sample_index, attempt, key of the call)."""
OnBroken = Callable[[RoomError], None]


@dataclass(frozen=True, slots=True, eq=False)
class Sent:
    """A received call, with the digest of its request."""

    form: Form
    body: bytes
    digest: bytes
    _: KW_ONLY
    is_retry: bool


@dataclass(eq=False, repr=False)
class EngineRoute:
    """SessionHost of one engine: plans its sessions' calls and samples them.

    Life: begin() checks and plans a call, sample() runs it; then the call holds its answers or its error.
    Waits: begin in a thread, sample in the session's room and the engine, both within in_hand(). A call that
        all clients have left ends after GRACE_S.
    Invariant: the engine gets only ids, numbers in bounds and stop texts, all checked by RequestReader and
        begin(). A broken engine goes to `on_broken` and its calls get 503; a request that it refuses gets
        400. A failing user tool-call format fails the rollout.
    """

    sessions: Sessions
    engine: EnginePool
    tokenizer: GatewayTokenizer
    tool_format: ToolFormat
    rules: CallRules
    seed_of: SeedOf
    on_broken: OnBroken
    checks: GrammarChecks = field(default_factory=GrammarChecks)

    def __post_init__(self) -> None:
        self.counts, self._reader = GatewayStats(), RequestReader(self.rules)
        self._has_warned = False
        self._rendering, self._encoding = asyncio.Lock(), asyncio.Semaphore(NUM_ENCODING)
        self.open_nowait = partial(GatewaySession, self.sessions, self)

    async def begin(self, session: GatewaySession, sent: Sent) -> tuple[GatewayCall, AnyRequest, bool]:
        """Return (call, parsed request, whether the call is new). Raises ApiError."""
        with _noting_overflow(session):
            asked = await self.in_turn(partial(sent.form.read, self._reader, sent.body), len(sent.body))
        async with session.beginning:
            call = session.find_call(sent.digest, is_retry=sent.is_retry)
            if call is not None:
                return call, asked, False
            call = await self._new_call(session, sent, asked)
        session.calls.setdefault(sent.digest, []).append(call)
        return call, asked, True

    async def _new_call(self, session: GatewaySession, sent: Sent, asked: AnyRequest) -> GatewayCall:
        session.check_limits(asked.n)
        session.num_calls += 1  # later refusals count: they cost work
        tool_format = ToolFormat()
        if isinstance(asked, ChatRequest):
            tool_format = self.tool_format if asked.tools else self.tool_format.without_tools()
        with _noting_overflow(session):
            planned = await self._plan(session, asked, len(sent.body))
        prefill = planned.match.prefill if planned.match else ""
        with _noting_overflow(session, planned):
            budget = self._budget(planned, asked)
        grammar = await self._grammar(asked, planned, prefill)
        if session.is_users and session.opening is None:
            session.opening = asked.messages
        keys, time_asked = call_keys(session.number_of, planned, asked, grammar or "")
        stop = tuple(asked.stop)
        if asked.has_one_call and tool_format.close is not None:
            stop += (tool_format.close,)
        request_id = f"{session.rollout_id}/a{session.attempt}/c{planned.number}"
        prompt_ids, parent = planned.prompt_ids, planned.parent
        spans = () if parent is None else parent.version_spans
        sampled = {}
        for index, key in enumerate(keys):
            # not the call's number: the name may become part of the next prompt
            name = f"call_{key:016x}"
            thoughts = self._thoughts(planned) if sent.form.is_apart(session.limits.thoughts) else None
            answer = Answer(
                index,
                self.tokenizer,
                tool_format,
                asked,
                prefill=prefill,
                name=name,
                thoughts=thoughts,
                shows_special=session.shows_special,
            )
            sampled[answer] = SamplingRequest(
                request_id=request_id if index == 0 else f"{request_id}/{index}",
                prompt_ids=prompt_ids,
                max_tokens=budget,
                temperature=self.rules.temperature if asked.temperature is None else asked.temperature,
                top_p=self.rules.top_p if asked.top_p is None else asked.top_p,
                stop=stop,
                seed=self.seed_of(session.prompt_id, session.sample_index, session.attempt, key),
                route_key=session.route_key,
                after=spans[-1] if spans else session.last_span,
                grammar=grammar,
                top_logprobs=asked.num_top_logprobs,
            )
        call = GatewayCall(sent.form, sent.digest, planned, sampled)
        call.is_streamed, call.order, call.time_asked = asked.stream, session.num_calls, time_asked
        call.is_trained = asked.is_as_configured
        return call

    async def sample(self, session: GatewaySession, call: GatewayCall) -> None:
        """Sample the call; the result goes to its choices or its error. Raises only on cancellation and
        internal errors.
        """
        self.counts.in_flight += 1
        try:
            async with asyncio.timeout(None) as scope:
                call.give_up = partial(_give_up, session, call, scope)
                async with session.room.places(len(call.choices)):
                    await self._sample_all(session, call)
        except TimeoutError:
            if not call.is_done:  # else it was given up
                raise
        except RequestRefused as refusal:
            call.done_nowait(invalid(f"The engine refused this call: {refusal.why}."))
        except RolloutFailure as failure:  # from a user tool-call format: a retry would fail too
            session.fail_nowait(failure)
            call.done_nowait(session_ended(session.ended or ""))
        except RoomError as error:
            self.on_broken(error)
            why = f"The run is ending: {error.what}"
            call.done_nowait(
                ApiError(503, why, type="server_error", code="engine_unavailable", headers=NO_RETRY)
            )
        finally:
            if not call.is_done:
                # not cancelled by the session's end, so an internal error: the session's data is not reliable
                why = f"the gateway made a mistake in {call.name}; its log says which"
                session.fail_nowait(RolloutFailure(why))
                call.done_nowait(session_ended(session.ended or ""))
            if call.error is None:
                session.keep_nowait(call)
            else:
                session.forget_nowait(call)
            self.counts.in_flight -= 1

    async def _sample_all(self, session: GatewaySession, call: GatewayCall) -> None:
        indices = range(len(call.requests))
        asked = [self._sample_answer(session, call, each) for each in indices]
        for failure in await asyncio.gather(*asked, return_exceptions=True):
            if failure is not None:
                raise failure
        self.counts.prompt_tokens += call.num_prompt_tokens
        self.counts.completion_tokens += call.num_completion_tokens
        call.done_nowait()

    async def _sample_answer(self, session: GatewaySession, call: GatewayCall, index: int) -> None:
        on_tokens = partial(call.feed, index) if call.is_streamed else None
        completion = await self.engine.generate(
            call.requests[index], on_tokens=on_tokens, on_spent=session.spent_nowait
        )
        session.last_span = completion.version_spans[-1] if completion.version_spans else None
        choice = call.choices[index]
        choice.finish(completion)
        if choice.num_logprobs >= LONG_LOGPROBS:
            await _beside(self._encoding, lambda: choice.logprobs)

    async def in_turn(self, function: Callable[[], Value], num_bytes: int) -> Value:
        """Run a reader of a body; a long body is read in a thread, one at a time."""
        return await _beside(self._rendering, function) if num_bytes >= LONG_BODY else function()

    async def count(self, session: GatewaySession, body: bytes) -> int:
        """Raises ApiError."""
        session.count_nowait()
        asked = await self.in_turn(partial(self._reader.chat, body), len(body))
        prefill = prefill_of(asked, self.tool_format, self.tokenizer)
        try:
            match = await self.in_turn(partial(_match, session, asked, prefill), len(body))
            ids = await self._encode(match.text, asked)
        except ValueError as error:
            raise invalid(f"{error}.", asked.param) from None
        return len(ids) + (match.parent.num_path_ids if match.parent is not None else 0)

    def _thoughts(self, planned: PromptPlan) -> ReasoningSplitter:
        marks = self.tool_format.thinking
        end = self.tokenizer.decode(planned.added[-NUM_OF_END:].tolist(), skip_special_tokens=False)
        return ReasoningSplitter(marks, is_open=end.rstrip().endswith(marks[0]))

    async def _grammar(self, asked: AnyRequest, planned: PromptPlan, prefill: str) -> str | None:
        """Raises ApiError for unsupported constraints."""
        prompt = planned.match.text if planned.match else ""
        found = grammar_of(asked, self.tool_format, self.tokenizer, prefill=prefill, prompt=prompt)
        if found is None:
            if asks_strict_alone(asked) and not self._has_warned:
                self._has_warned = True
                log.warning("gateway: `strict` of tools is not enforced (%s)", STRICT_NEEDS)
            return None
        has_format = isinstance(asked, ChatRequest) and asked.response_format is not None
        await self.checks.wait_checked(found, "response_format" if has_format else "tools")
        return found

    async def _plan(self, session: GatewaySession, asked: AnyRequest, num_bytes: int) -> PromptPlan:
        capture = session.capture
        prefill = prefill_of(asked, self.tool_format, self.tokenizer)
        try:
            if isinstance(asked, ChatRequest):
                match = await self.in_turn(partial(_match, session, asked, prefill), num_bytes)
                return capture.plan(match, await self._encode(match.text, asked))
            prompt = asked.prompt
            ids = await self._encode(prompt, asked) if isinstance(prompt, str) else self._few(prompt, asked)
            if not ids:
                raise invalid("prompt has no token.", "prompt")
            return capture.plan_ids(ids)
        except ValueError as error:  # template error or invalid Unicode
            raise invalid(f"{error}.", asked.param) from None

    async def _encode(self, text: str, asked: AnyRequest) -> Sequence[int]:
        most = self.rules.max_prompt_tokens
        if len(text) > MAX_CHARACTERS * most:
            why = f"This prompt has {len(text)} characters; rollout.max_prompt_tokens={most} is the most."
            raise too_long(why, asked.param)
        if len(text) < LONG_TEXT:
            return self.tokenizer.encode(text)
        return self._few(await _beside(self._encoding, partial(self.tokenizer.encode, text)), asked)

    def _few(self, ids: Sequence[int], asked: AnyRequest) -> Sequence[int]:
        """Raises ApiError for far too many."""
        if len(ids) > FAR_TOO_MANY * (most := self.rules.max_prompt_tokens):
            why = f"This prompt has {len(ids)} tokens; rollout.max_prompt_tokens={most} is the most."
            raise too_long(why, asked.param)
        return ids

    def _budget(self, planned: PromptPlan, asked: AnyRequest) -> int:
        """Raises ApiError if the prompt is too long."""
        rules, length = self.rules, planned.num_prompt
        if length > rules.max_prompt_tokens:
            why = f"This prompt has {length} tokens; rollout.max_prompt_tokens={rules.max_prompt_tokens} is "
            raise too_long(f"{why}the most. Shorten the conversation, or raise it.", asked.param)
        return min(asked.max_tokens or rules.max_tokens, rules.max_tokens, rules.max_length - length)


def _match(session: GatewaySession, asked: ChatRequest, prefill: Prefill) -> PromptMatch:
    """Raises ValueError if the template refuses the chat."""
    settings = asked.chat_template_kwargs or None
    return session.capture.match(asked.messages, asked.tools or None, prefill=prefill, settings=settings)


@contextmanager
def _noting_overflow(session: GatewaySession, planned: PromptPlan | None = None) -> Iterator[None]:
    try:
        yield
    except ApiError as error:
        if error.error["code"] == TOO_LONG:
            session.overflowed_nowait(str(error), None if planned is None else planned.parent)
        raise


def _give_up(session: GatewaySession, call: GatewayCall, scope: asyncio.Timeout) -> None:
    call.done_nowait(client_gone())
    session.forget_nowait(call)
    scope.reschedule(0.0)


async def _beside(limit: AbstractAsyncContextManager[None], function: Callable[[], Value]) -> Value:
    """Run a function in a thread. Reading and rendering run one at a time, so the event loop keeps half of
    the interpreter's time; tokenizing releases the interpreter.
    """
    async with limit:
        return await asyncio.to_thread(function)
