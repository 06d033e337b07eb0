"""A call's path from its body to its sampled answer."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from asyncrl.agents.endpoint.answers import (
    NO_RETRY,
    Answer,
    ApiError,
    GatewayTokenizer,
    invalid,
    too_long,
)
from asyncrl.agents.endpoint.capture import GatewayStats, PromptPlan
from asyncrl.agents.endpoint.dialects.dialect import Dialect
from asyncrl.agents.endpoint.gateway_call import GatewayCall, call_keys
from asyncrl.agents.endpoint.grammars import (
    STRICT_NEEDS,
    GrammarChecks,
    asks_strict_alone,
    grammar_of,
    prefill_of,
)
from asyncrl.agents.endpoint.prefix_match import Prefill, PromptMatch
from asyncrl.agents.endpoint.reasoning import ReasoningSplitter
from asyncrl.agents.endpoint.requests import AnyRequest, CallRules, ChatRequest, RequestReader, parse_json
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


@dataclass(eq=False, repr=False)
class EngineRoute:
    """SessionHost of one engine: plans its sessions' calls and samples them.

    Life: read() checks a body, plan() makes its call, sample() finishes the call's answers.
    Waits: reading and tokenizing in threads, sampling in the session's slots and the engine, all within the
        session's in_hand().
    Invariant: the engine gets only ids, numbers in bounds and stop texts, all checked by RequestReader and
        plan(). A broken engine goes to `on_broken` and its calls get 503; a request that it refuses gets
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
        self.counts = GatewayStats()
        self._reader = RequestReader(self.rules)
        self._rendering = asyncio.Lock()
        self._encoding = asyncio.Semaphore(NUM_ENCODING)
        self.open_nowait = partial(GatewaySession, self.sessions, self)

    async def read(self, session: GatewaySession, dialect: Dialect, body: bytes) -> tuple[AnyRequest, Any]:
        """Return the checked call, and data for its writer. Raises ApiError."""
        with _noting_overflow(session):
            return await self._in_turn(
                lambda: dialect.read(self._reader, parse_json(body), session.kept), len(body)
            )

    async def plan(
        self, session: GatewaySession, dialect: Dialect, asked: AnyRequest, num_bytes: int
    ) -> GatewayCall:
        """Return the call to sample. Raises ApiError."""
        session.check_limits()
        session.num_calls += 1  # later refusals count: they cost work
        order = session.num_calls
        with _noting_overflow(session):
            planned = await self._planned(session, asked, num_bytes)
        prefill = planned.match.prefill if planned.match else ""
        with _noting_overflow(session, planned):
            self._check_length(planned.num_prompt, asked)
        grammar = await self._grammar(asked, planned, prefill)
        if session.is_users and session.opening is None:
            session.opening = asked.messages
        keys, number = call_keys(session.take_number, planned, asked, grammar or "")
        tool_format = ToolFormat()
        if isinstance(asked, ChatRequest):
            tool_format = self.tool_format if asked.tools else self.tool_format.without_tools()
        splits_thoughts = dialect.splits_thoughts
        if splits_thoughts is None:
            splits_thoughts = session.limits.thoughts == "apart"
        answers = [
            Answer(
                index,
                self.tokenizer,
                tool_format,
                asked,
                prefill=prefill,
                name=f"call_{key:016x}",  # not the call's number: it may become part of the next prompt
                thoughts=self._thoughts(planned) if splits_thoughts else None,
                shows_special=session.shows_special,
            )
            for index, key in enumerate(keys)
        ]
        return GatewayCall(
            name=f"{dialect.name}-{planned.number}",
            order=order,
            planned=planned,
            number=number,
            choices=tuple(answers),
            requests=self._requests(session, asked, planned, keys, tool_format, grammar),
            num_prompt_tokens=planned.num_prompt,
            is_streamed=asked.stream,
            is_trained=asked.is_as_configured,
            grammar=grammar,
        )

    def _requests(
        self,
        session: GatewaySession,
        asked: AnyRequest,
        planned: PromptPlan,
        keys: Sequence[int],
        tool_format: ToolFormat,
        grammar: str | None,
    ) -> tuple[SamplingRequest, ...]:
        rules = self.rules
        stop = tuple(asked.stop)
        if asked.has_one_call and tool_format.close is not None:
            stop += (tool_format.close,)
        name = f"{session.rollout_id}/a{session.attempt}/c{planned.number}"
        prompt_ids = planned.prompt_ids
        max_tokens = min(asked.max_tokens or rules.max_tokens, rules.max_tokens)
        spans = () if planned.parent is None else planned.parent.version_spans
        return tuple(
            SamplingRequest(
                request_id=name if index == 0 else f"{name}/{index}",
                prompt_ids=prompt_ids,
                max_tokens=min(max_tokens, rules.max_length - planned.num_prompt),
                temperature=rules.temperature if asked.temperature is None else asked.temperature,
                top_p=rules.top_p if asked.top_p is None else asked.top_p,
                stop=stop,
                seed=self.seed_of(session.prompt_id, session.sample_index, session.attempt, key),
                route_key=session.route_key,
                after=spans[-1] if spans else session.last_span,
                grammar=grammar,
                top_logprobs=asked.top_logprobs,
            )
            for index, key in enumerate(keys)
        )

    async def sample(self, session: GatewaySession, call: GatewayCall) -> None:
        """Sample and finish the answers of a call. Raises ApiError."""
        self.counts.in_flight += 1
        try:
            sampling = [self._sample_answer(session, call, index) for index in range(len(call.choices))]
            for failure in await asyncio.gather(*sampling, return_exceptions=True):
                if failure is not None:
                    raise failure
        except RequestRefused as refusal:
            raise invalid(f"The engine refused this call: {refusal.why}.") from None
        except RolloutFailure as failure:  # from a user tool-call format: a retry would fail too
            session.fail_nowait(failure)
            raise session_ended(session.ended or "") from None
        except RoomError as error:
            self.on_broken(error)
            why = f"The run is ending: {error.what}"
            raise ApiError(
                503, why, type="server_error", code="engine_unavailable", headers=NO_RETRY
            ) from None
        finally:
            call.requests = ()
            call.news.set()
            self.counts.in_flight -= 1
        self.counts.prompt_tokens += call.num_prompt_tokens
        self.counts.completion_tokens += call.num_completion_tokens

    async def _sample_answer(self, session: GatewaySession, call: GatewayCall, index: int) -> None:
        on_tokens = partial(call.feed, index) if call.is_streamed else None
        async with session.slots:
            completion = await self.engine.generate(
                call.requests[index], on_tokens=on_tokens, on_spent=session.spent_nowait
            )
        session.last_span = completion.version_spans[-1] if completion.version_spans else None
        choice = call.choices[index]
        choice.finish(completion)
        if choice.num_logprobs >= LONG_LOGPROBS:
            await _in_thread(self._encoding, lambda: choice.logprobs)

    async def count(self, session: GatewaySession, dialect: Dialect, body: bytes) -> int:
        """Return the number of prompt tokens of a chat. Raises ApiError."""
        session.free_call_nowait()
        asked, _ = await self.read(session, dialect, body)
        return (await self._matched(session, asked, len(body)))[2]

    def _thoughts(self, planned: PromptPlan) -> ReasoningSplitter:
        marks = self.tool_format.thinking
        end = self.tokenizer.decode(planned.added[-NUM_OF_END:].tolist(), skip_special_tokens=False)
        return ReasoningSplitter(marks, is_open=end.rstrip().endswith(marks[0]))

    async def _grammar(self, asked: AnyRequest, planned: PromptPlan, prefill: str) -> str | None:
        """Raises ApiError for unsupported constraints."""
        prompt = planned.match.text if planned.match else ""
        grammar = grammar_of(asked, self.tool_format, self.tokenizer, prefill=prefill, prompt=prompt)
        if grammar is None:
            if asks_strict_alone(asked):
                self._reader.log_once("strict", f"`strict` of tools is not enforced ({STRICT_NEEDS})")
            return None
        has_format = isinstance(asked, ChatRequest) and asked.response_format is not None
        await self.checks.wait_checked(grammar, "response_format" if has_format else "tools")
        return grammar

    async def _planned(self, session: GatewaySession, asked: AnyRequest, num_bytes: int) -> PromptPlan:
        if isinstance(asked, ChatRequest):
            match, ids, _ = await self._matched(session, asked, num_bytes)
            return session.capture.plan(match, ids)
        prompt = asked.prompt
        ids = await self._encode(prompt, asked) if isinstance(prompt, str) else prompt
        self._check_few(ids, asked)
        if not ids:
            raise invalid("prompt has no token.", "prompt")
        return session.capture.plan_ids(ids)

    async def _matched(
        self, session: GatewaySession, asked: AnyRequest, num_bytes: int
    ) -> tuple[PromptMatch, Sequence[int], int]:
        """Return the match of a chat, its new ids, and the number of all its ids. Raises ApiError."""
        assert isinstance(asked, ChatRequest), "texts are not matched"
        prefill = prefill_of(asked, self.tool_format, self.tokenizer)
        try:
            match = await self._in_turn(partial(_match, session, asked, prefill), num_bytes)
        except ValueError as error:  # from the template
            raise invalid(f"{error}.", asked.param) from None
        ids = await self._encode(match.text, asked)
        return match, ids, len(ids) + (match.parent.num_path_ids if match.parent is not None else 0)

    async def _encode(self, text: str, asked: AnyRequest) -> Sequence[int]:
        """Raises ApiError for a text that is too long or invalid Unicode."""
        most = self.rules.max_prompt_tokens
        if len(text) > MAX_CHARACTERS * most:
            why = f"This prompt has {len(text)} characters; rollout.max_prompt_tokens={most} is the most."
            raise too_long(why, asked.param)
        encode = partial(self.tokenizer.encode, text)
        try:
            ids = encode() if len(text) < LONG_TEXT else await _in_thread(self._encoding, encode)
        except ValueError as error:
            raise invalid(f"{error}.", asked.param) from None
        self._check_few(ids, asked)
        return ids

    def _check_few(self, ids: Sequence[int], asked: AnyRequest) -> None:
        """Refuse far too many ids before they are compared with recorded ones. Raises ApiError."""
        if len(ids) > FAR_TOO_MANY * self.rules.max_prompt_tokens:
            self._check_length(len(ids), asked)

    def _check_length(self, num_tokens: int, asked: AnyRequest) -> None:
        """Raises ApiError for a prompt that is too long."""
        most = self.rules.max_prompt_tokens
        if num_tokens > most:
            why = f"This prompt has {num_tokens} tokens; rollout.max_prompt_tokens={most} is the most. "
            raise too_long(f"{why}Shorten the conversation, or raise the limit.", asked.param)

    async def _in_turn(self, function: Callable[[], Value], num_bytes: int) -> Value:
        """Run a reader of a body; a long body is read in a thread, one at a time."""
        return await _in_thread(self._rendering, function) if num_bytes >= LONG_BODY else function()


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


async def _in_thread(limit: AbstractAsyncContextManager[None], function: Callable[[], Value]) -> Value:
    """Run a function in a thread. Reading and rendering run one at a time, so the event loop keeps half of
    the interpreter's time; tokenizing releases the interpreter.
    """
    async with limit:
        return await asyncio.to_thread(function)
