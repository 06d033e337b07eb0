"""Reading, planning and sampling of calls."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from functools import partial
from hashlib import blake2b
from typing import TypeVar

from asyncrl.agents.endpoint.answers import Answer, GatewayTokenizer
from asyncrl.agents.endpoint.capture import ChatNode, GatewayStats, PromptPlan
from asyncrl.agents.endpoint.dialects import Dialect, Read
from asyncrl.agents.endpoint.grammars import GrammarChecks, grammar_of, prefill_of
from asyncrl.agents.endpoint.prefix_match import PromptMatch
from asyncrl.agents.endpoint.reasoning import ReasoningSplitter, opens_thought
from asyncrl.agents.endpoint.requests import (
    NO_RETRY,
    AnyRequest,
    ApiError,
    CallRules,
    ChatRequest,
    PromptTooLongError,
    RequestReader,
    invalid,
    parse_json,
)
from asyncrl.agents.endpoint.sessions import GatewayCall, GatewaySession, Sessions, session_ended
from asyncrl.agents.endpoint.tool_formats import ToolFormat
from asyncrl.base.errors import RequestRefused, RolloutFailure, RoomError
from asyncrl.engines.pool import EnginePool
from asyncrl.messages.records import SamplingRequest

log = logging.getLogger(__name__)

Value = TypeVar("Value")

LONG_BODY = 2**14
"""Bytes of a body read in a thread: 10 ms."""
LONG_TEXT = 2**14
"""Characters of a text tokenized in a thread: 15 ms."""
LONG_LOGPROBS = 2**6
"""Tokens whose logprobs are built in a thread: up to 20 alternatives each, 10 ms."""
NUM_ENCODING = 4
"""Texts tokenized at once."""
MAX_CHARACTERS = 64
"""Most characters per prompt token."""
SeedOf = Callable[[str, int, int, int], int]
"""Seed from (prompt_id, sample_index, attempt, key of the call)."""
OnBroken = Callable[[RoomError], None]


@dataclass(eq=False, repr=False)
class EngineRoute:
    """SessionHost of one engine.

    Waits: threads, slots and the engine, within the session's in_hand().
    Invariant: the engine gets only checked values. A broken engine goes to `on_broken`, its calls get 503; a
        request that it refuses gets 400.
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

    async def read(self, session: GatewaySession, dialect: Dialect, body: bytes) -> Read:
        """Raises ApiError."""
        return await self._in_turn(
            lambda: dialect.read(self._reader, parse_json(body), session.kept), len(body)
        )

    async def plan(
        self, session: GatewaySession, dialect: Dialect, asked: AnyRequest, num_bytes: int
    ) -> GatewayCall:
        """Raises ApiError."""
        session.check_limits()
        session.num_calls += 1  # refusals from here on cost work
        order = session.num_calls
        planned = await self._planned(session, asked, num_bytes)
        prefill = planned.match.prefill if planned.match else ""
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
        marks = self.tool_format.thinking
        is_open = planned.match is not None and opens_thought(planned.match.text, marks)
        stop = tuple(asked.stop)
        if asked.has_one_call and tool_format.close is not None:
            stop += (tool_format.close,)
        rules = self.rules
        room = rules.max_length - planned.num_prompt
        spans = () if planned.parent is None else planned.parent.version_spans
        request_id = f"{session.rollout_id}/a{session.attempt}/c{planned.number}"
        prompt_ids = planned.prompt_ids
        answers: list[Answer] = []
        requests: list[SamplingRequest] = []
        for index, key in enumerate(keys):
            answers.append(
                Answer(
                    index,
                    self.tokenizer,
                    tool_format,
                    asked,
                    prefill=prefill,
                    name=f"call_{key:016x}",  # not the call's number: the next prompt may contain it
                    thoughts=ReasoningSplitter(marks, is_open=is_open) if splits_thoughts else None,
                    shows_special=session.shows_special,
                )
            )
            requests.append(
                SamplingRequest(
                    request_id=request_id if index == 0 else f"{request_id}/{index}",
                    prompt_ids=prompt_ids,
                    max_tokens=min(asked.max_tokens or rules.max_tokens, rules.max_tokens, room),
                    temperature=rules.temperature if asked.temperature is None else asked.temperature,
                    top_p=rules.top_p if asked.top_p is None else asked.top_p,
                    stop=stop,
                    seed=self.seed_of(session.prompt_id, session.sample_index, session.attempt, key),
                    route_key=session.route_key,
                    after=spans[-1] if spans else session.last_span,
                    grammar=grammar,
                    top_logprobs=asked.top_logprobs,
                )
            )
        return GatewayCall(
            name=f"{dialect.name}-{planned.number}",
            order=order,
            planned=planned,
            number=number,
            choices=tuple(answers),
            requests=tuple(requests),
            num_prompt_tokens=planned.num_prompt,
            is_streamed=asked.stream,
            is_trained=asked.temperature is None and asked.top_p is None,
            grammar=grammar,
        )

    async def sample(self, session: GatewaySession, call: GatewayCall) -> None:
        """Raises ApiError."""
        self.counts.in_flight += 1
        try:
            sampling = [self._sample_answer(session, call, index) for index in range(len(call.choices))]
            for failure in await asyncio.gather(*sampling, return_exceptions=True):
                if failure is not None:
                    raise failure
        except RequestRefused as refusal:
            raise invalid(f"The engine refused this call: {refusal.why}.") from None
        except RolloutFailure as failure:  # a retry would fail too
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
        if choice.has_logprobs and choice.num_tokens >= LONG_LOGPROBS:
            await _in_thread(self._encoding, lambda: choice.logprobs)

    async def count(self, session: GatewaySession, dialect: Dialect, body: bytes) -> int:
        session.free_call_nowait()
        asked, _ = await self.read(session, dialect, body)
        assert isinstance(asked, ChatRequest), "only chats are counted"
        match, ids = await self._matched(session, asked, len(body))
        return _num_ids(match, ids)

    async def _grammar(self, asked: AnyRequest, planned: PromptPlan, prefill: str) -> str | None:
        prompt = planned.match.text if planned.match else ""
        grammar = grammar_of(asked, self.tool_format, self.tokenizer, prefill=prefill, prompt=prompt)
        if grammar is not None:
            has_format = isinstance(asked, ChatRequest) and asked.response_format is not None
            await self.checks.wait_checked(grammar, "response_format" if has_format else "tools")
        return grammar

    async def _planned(self, session: GatewaySession, asked: AnyRequest, num_bytes: int) -> PromptPlan:
        if isinstance(asked, ChatRequest):
            match, ids = await self._matched(session, asked, num_bytes)
            self._check_length(_num_ids(match, ids), asked, match.parent)
            return session.capture.plan(match, ids)
        prompt = asked.prompt
        ids = await self._encode(prompt, asked) if isinstance(prompt, str) else prompt
        self._check_length(len(ids), asked)
        if not ids:
            raise invalid("prompt has no token.", "prompt")
        return session.capture.plan_ids(ids)

    async def _matched(
        self, session: GatewaySession, asked: ChatRequest, num_bytes: int
    ) -> tuple[PromptMatch, Sequence[int]]:
        """Raises ApiError."""
        prefill = prefill_of(asked, self.tool_format, self.tokenizer)
        match = partial(
            session.capture.match,
            asked.messages,
            asked.tools or None,
            prefill=prefill,
            settings=asked.chat_template_kwargs or None,
        )
        try:
            matched = await self._in_turn(match, num_bytes)
        except ValueError as error:
            raise invalid(f"{error}.", asked.param) from None
        return matched, await self._encode(matched.text, asked)

    async def _encode(self, text: str, asked: AnyRequest) -> Sequence[int]:
        """Raises ApiError."""
        most = self.rules.max_prompt_tokens
        if len(text) > MAX_CHARACTERS * most:
            why = f"This prompt has {len(text)} characters; rollout.max_prompt_tokens={most} is the most."
            raise PromptTooLongError(why, asked.param)
        encode = partial(self.tokenizer.encode, text)
        try:
            return encode() if len(text) < LONG_TEXT else await _in_thread(self._encoding, encode)
        except ValueError as error:
            raise invalid(f"{error}.", asked.param) from None

    def _check_length(self, num_tokens: int, asked: AnyRequest, parent: ChatNode | None = None) -> None:
        most = self.rules.max_prompt_tokens
        if num_tokens > most:
            why = f"This prompt has {num_tokens} tokens; rollout.max_prompt_tokens={most} is the most. "
            raise PromptTooLongError(f"{why}Shorten it, or raise the limit.", asked.param, parent)

    async def _in_turn(self, function: Callable[[], Value], num_bytes: int) -> Value:
        return await _in_thread(self._rendering, function) if num_bytes >= LONG_BODY else function()


def _num_ids(match: PromptMatch, ids: Sequence[int]) -> int:
    return len(ids) + (match.parent.num_path_ids if match.parent is not None else 0)


async def _in_thread(limit: AbstractAsyncContextManager[None], function: Callable[[], Value]) -> Value:
    """Run a function in a thread; only tokenizing releases the interpreter, so only it runs concurrently."""
    async with limit:
        return await asyncio.to_thread(function)


def call_keys(
    take_number: Callable[[bytes], int], planned: PromptPlan, asked: AnyRequest, grammar: str
) -> tuple[list[int], tuple[bytes, int] | None]:
    """Return (seed keys, source). They never depend on time; equal concurrent calls may swap answers."""
    digest = planned.prompt_hash.digest()
    if shape := asked.shape() + grammar.encode():
        digest = blake2b(digest + shape, digest_size=16).digest()
    number = None if asked.seed is not None else (digest, take_number(digest))
    source = f"seed {asked.seed}" if number is None else f"time {number[1]}"
    contents = [digest + f"/{source}/{index}".encode() for index in range(asked.n)]
    keys = [int.from_bytes(blake2b(each, digest_size=8).digest(), "big") >> 1 for each in contents]
    return keys, number
