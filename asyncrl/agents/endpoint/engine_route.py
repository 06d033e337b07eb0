"""One call from its checked request to its sampled answer: prompt, budget, seed, the engine."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from hashlib import blake2b
from typing import Any, TypeVar

import numpy as np

from asyncrl.agents.endpoint.answer_text import Choice, GatewayTokenizer, TokenNames
from asyncrl.agents.endpoint.calls import AskedAs, Call, Kind
from asyncrl.agents.endpoint.capture import GatewayStats, Planned
from asyncrl.agents.endpoint.refusals import NO_RETRY, ApiError, invalid, session_ended, too_long
from asyncrl.agents.endpoint.requests import LONG_BODY, CallRequest, CallRules, RequestReader
from asyncrl.agents.endpoint.sessions import GatewaySession, Sessions
from asyncrl.agents.endpoint.tool_calls import ToolFormat
from asyncrl.errors import RequestRefused, RolloutFailure, RoomError
from asyncrl.messages.protocols import ChatRenderer, SamplingEngine
from asyncrl.messages.records import SamplingRequest

Value = TypeVar("Value")

USUAL_CHARACTERS = 6
"""A text with fewer characters a token is tokenised as it is: it fits, or is not much too long."""
LONG_TEXT = 2**14
"""Characters from which on a text is tokenised in a thread: some 15 ms."""
NUM_ENCODING = 4
"""Texts that are tokenised at once: each has a core of its own meanwhile, and memory of many times its
length.
"""
_SLICE = 2**14
_CUT_TOKENS = 16
"""More than what a cut in a text can add to its tokens."""
SeedOf = Callable[[str, int, int, int], int]
"""Seed of a request from (prompt_id, sample_index, attempt, key of the call)."""


class EngineRoute:
    """The SessionHost of one engine: plans its sessions' calls and has them sampled.

    Life:       read() and begin() check and plan a call, sample() asks the engine; then the call holds its
                answers, or its error.
    Waits:      begin sleeps in a thread, sample in the engine, both within the session's in_hand().
    Invariant:  what reaches the engine is ids, numbers in bounds and stop texts, all checked by RequestReader
                and begin(). An engine that is broken is given to `on_broken` and answered with 503; one that
                refuses a request, with 400. A tool-call format of the user's that goes wrong fails the
                rollout.
    """

    def __init__(
        self,
        sessions: Sessions,
        engine: SamplingEngine,
        tokenizer: GatewayTokenizer,
        tool_format: ToolFormat,
        rules: CallRules,
        long_calls: LongCalls,
        *,
        seed_of: SeedOf,
        on_broken: Callable[[RoomError], None],
    ) -> None:
        self._sessions, self._engine, self.tokenizer, self._tool_format = (
            sessions,
            engine,
            tokenizer,
            tool_format,
        )
        self._rules, self._long_calls = rules, long_calls
        self._seed_of, self._on_broken = seed_of, on_broken
        self._reader = RequestReader(rules)
        self._token_names: TokenNames = {}
        self.counts = GatewayStats()

    def open_nowait(
        self, rollout_id: str, *, prompt_id: str, sample_index: int, attempt: int, route_key: str
    ) -> GatewaySession:
        """A new session, to be ended by its owner."""
        return self._sessions.open_nowait(
            rollout_id,
            prompt_id=prompt_id,
            sample_index=sample_index,
            attempt=attempt,
            route_key=route_key,
            route=self,
        )

    async def read(self, kind: Kind, body: bytes) -> CallRequest:
        """The checked values of a body. Raises ApiError. Sleeps while a long one is read."""
        read = self._reader.chat if kind == "chat" else self._reader.text
        return read(body) if len(body) < LONG_BODY else await self._long_calls.run(read, body)

    async def begin(self, session: GatewaySession, kind: Kind, asked: CallRequest, asked_as: AskedAs) -> Call:
        """A new call of the session. Raises ApiError. Sleeps while a long one is rendered and tokenised.

        From its return on the call's choices count as sampling, until sample() has ended.
        """
        session.check_limits(asked.n)
        session.num_calls += 1  # what is refused from here on was work, too
        if asked.tools and self._tool_format.name == "none":
            raise invalid(
                "tools are refused: gateway.tool_format names no format, or its auto found none in the chat "
                "template.",
                "tools",
            )
        prefill = self._prefill(asked)
        planned = await self._plan(session, asked, prefill)
        if session.is_persons and session.opening is None:
            session.opening = asked.messages or [{"role": "user", "content": asked.prompt_text or ""}]
        budget = self._budget(planned, asked)
        keys = self._keys(session, planned, asked)
        choices = [
            Choice(
                index,
                self.tokenizer,
                stop=asked.stop,
                tool_format=self._tool_format if asked.tools else ToolFormat(),
                prefill=prefill,
                # it may become a part of the next prompt, so it is not made of the call's number
                name=f"call_{key:016x}",
                has_logprobs=asked.logprobs,
                token_names=self._token_names,
            )
            for index, key in enumerate(keys)
        ]
        request_id = f"{session.rollout_id}/a{session.attempt}/c{planned.number}"
        requests = [
            SamplingRequest(
                request_id=request_id if index == 0 else f"{request_id}/{index}",
                prompt_ids=planned.prompt_ids,
                max_tokens=budget,
                temperature=self._rules.temperature,
                top_p=self._rules.top_p,
                stop=asked.stop,
                seed=self._seed_of(session.prompt_id, session.sample_index, session.attempt, key),
                route_key=session.route_key,
                after=session.last_span,
            )
            for index, key in enumerate(keys)
        ]
        call = Call(kind, asked_as, planned, choices, requests)
        session.calls.add(call)
        session.num_sampling += len(requests)
        return call

    async def sample(self, session: GatewaySession, call: Call, *, is_streamed: bool) -> None:
        """Have it sampled; the call's choices, or its error, say what came of it. Only cancellation, and a
        mistake of our own, are raised.
        """
        self.counts.in_flight += 1
        try:
            pairs = zip(call.choices, call.requests, strict=True)
            asked = [self._sample_choice(session, call, *pair, is_streamed=is_streamed) for pair in pairs]
            if len(asked) == 1:
                await asked[0]
            else:
                results = await asyncio.gather(*asked, return_exceptions=True)
                if failures := [each for each in results if each is not None]:
                    raise failures[0]
            self.counts.prompt_tokens += call.num_prompt_tokens
            self.counts.completion_tokens += call.num_completion_tokens
            call.done_nowait()
        except RequestRefused as refusal:
            call.done_nowait(invalid(f"The engine refused this call: {refusal}"))
        except RolloutFailure as failure:  # of a tool-call format of the user's: it would fail again
            session.fail_nowait(failure)
            call.done_nowait(session_ended(session.ended or ""))
        except RoomError as error:
            self._on_broken(error)
            why = f"The run is ending: {error.what}"
            call.done_nowait(
                ApiError(503, why, type="server_error", code="engine_unavailable", headers=NO_RETRY)
            )
        finally:
            if not call.is_done:
                # not cancelled by the session's end, so a mistake of ours: what it holds is not to be trusted
                session.end_nowait(f"the gateway made a mistake in {call.name}; its log says which")
                call.done_nowait(session_ended(session.ended or ""))
            if call.error is not None:
                session.calls.drop(call)
            session.num_sampling -= len(call.requests)
            self.counts.in_flight -= 1

    async def _sample_choice(
        self,
        session: GatewaySession,
        call: Call,
        choice: Choice,
        request: SamplingRequest,
        *,
        is_streamed: bool,
    ) -> None:
        def on_tokens(token_ids: Sequence[int]) -> None:
            choice.feed(token_ids)
            call.news_nowait()

        completion = await self._engine.generate(request, on_tokens=on_tokens if is_streamed else None)
        session.last_span = completion.version_spans[-1] if completion.version_spans else None
        choice.finish(completion)

    def _prefill(self, asked: CallRequest) -> str:
        """Beginning of the answer that makes it a tool call, where the call wants one. Raises ApiError."""
        if asked.tool_choice in ("none", "auto"):
            return ""
        required = asked.tool_choice == "required"
        prefill = self._tool_format.prefill(None if required else asked.tool_choice.removeprefix("function:"))
        if prefill is None:
            raise invalid(
                f"tool_choice {asked.tool_choice} is refused: the tool format {self._tool_format.name} has "
                f"no beginning that makes an answer such a call.",
                "tool_choice",
            )
        return prefill

    async def _plan(self, session: GatewaySession, asked: CallRequest, prefill: str) -> Planned:
        max_tokens, capture = self._rules.max_prompt_tokens, session.capture
        try:
            if asked.messages is not None:
                draft_now = partial(capture.draft, asked.messages, asked.tools, prefill=prefill)
                draft = await self._long_calls.run(draft_now) if asked.is_long else draft_now()
                return capture.plan(
                    draft, await self._long_calls.encode(draft.text, self.tokenizer, max_tokens)
                )
            ids = asked.prompt_ids or ()
            if asked.prompt_text is not None:
                ids = await self._long_calls.encode(asked.prompt_text, self.tokenizer, max_tokens)
            if not ids:
                raise invalid("prompt has no token.", "prompt")
            return capture.plan_ids(ids)
        except FarTooLong:
            raise too_long(
                f"The text of this call is far too long; the longest prompt of this run is {max_tokens} "
                f"tokens (rollout.max_prompt_tokens).",
                asked.param,
            ) from None
        except ValueError as error:
            raise invalid(f"{error}.", asked.param) from None

    def _budget(self, planned: Planned, asked: CallRequest) -> int:
        """Most tokens to sample. Raises ApiError if the prompt leaves no room."""
        rules, length = self._rules, len(planned.prompt_ids)
        if length > rules.max_prompt_tokens:
            raise too_long(
                f"This prompt has {length} tokens; the longest prompt of this run is "
                f"{rules.max_prompt_tokens} tokens (rollout.max_prompt_tokens). Shorten the conversation, or "
                f"raise it.",
                asked.param,
            )
        return min(asked.max_tokens or rules.max_tokens, rules.max_tokens, rules.max_length - length)

    def _keys(self, session: GatewaySession, planned: Planned, asked: CallRequest) -> list[int]:
        """One for each choice, which its seed is made of: of what is asked, and how many calls asked the same
        before; never of when.

        Equal calls that run at once may so swap their answers: for their harness they are one and the same.
        """
        digest = blake2b(np.array(planned.prompt_ids, dtype="<i4").tobytes(), digest_size=16).digest()
        if asked.seed is None:
            times = session.times_asked.get(digest, 0)
            session.times_asked[digest] = times + 1
            number = f"time {times}"
        else:
            number = f"seed {asked.seed}"
        keys = (
            blake2b(digest + f"/{number}/{index}".encode(), digest_size=8).digest()
            for index in range(asked.n)
        )
        return [int.from_bytes(key, "big") >> 1 for key in keys]


# ---- long calls cost threads, not the event loop: tokenising a megabyte takes about a second


class LongCalls:
    """Runs plain Python functions beside the event loop one at a time, so that the loop keeps half of the
    interpreter's time. Tokenising releases the interpreter: NUM_ENCODING of it run at once.
    """

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="long calls")
        self._encoding = ThreadPoolExecutor(NUM_ENCODING, thread_name_prefix="long texts")

    async def run(self, function: Callable[..., Value], *args: Any) -> Value:
        """What it returns or raises. Cancelled, it goes on to its end, and the next one waits for that."""
        return await asyncio.get_running_loop().run_in_executor(self._executor, function, *args)

    async def encode(self, text: str, renderer: ChatRenderer, max_tokens: int) -> tuple[int, ...]:
        """encode_bounded(), for a long text in a thread."""
        if len(text) < LONG_TEXT:
            return encode_bounded(text, renderer, max_tokens)
        return await asyncio.get_running_loop().run_in_executor(
            self._encoding, encode_bounded, text, renderer, max_tokens
        )

    def close_nowait(self) -> None:
        """What has not begun never will. Idempotent."""
        for executor in (self._executor, self._encoding):
            executor.shutdown(wait=False, cancel_futures=True)


class FarTooLong(ValueError):  # noqa: N818  what a call holds, and no failure of ours
    """A text has more tokens than a prompt may have; how many is not known."""


def encode_bounded(text: str, renderer: ChatRenderer, max_tokens: int) -> tuple[int, ...]:
    """Token ids of the text. Raises FarTooLong if its first tokens show that it has more than `max_tokens`,
    ValueError for text that is no Unicode.
    """
    num_tokens = 0
    if len(text) > USUAL_CHARACTERS * max_tokens:
        for start in range(0, len(text), _SLICE):
            num_tokens += max(0, len(renderer.encode(text[start : start + _SLICE])) - _CUT_TOKENS)
            if num_tokens > max_tokens:
                raise FarTooLong("the text of this call is far too long")
    return renderer.encode(text)


def fewest_message_tokens(renderer: ChatRenderer) -> int:
    """Tokens by which one more empty message makes a chat longer in this template, the least of the kinds
    that it takes; 1 at least.
    """
    function = {"name": "f", "arguments": {}}
    user, answer = {"role": "user", "content": ""}, {"role": "assistant", "content": ""}
    call = {**answer, "tool_calls": [{"id": "c", "type": "function", "function": function}]}
    result, system = {"role": "tool", "tool_call_id": "c", "content": ""}, {"role": "system", "content": ""}
    kinds: list[tuple[list[Any], list[Any]]] = [
        ([user], [answer, user]),
        ([user], [user]),
        ([user, answer], [answer]),
        ([user, call], [result]),
        ([system], [system]),
        ([user], [call, result]),
    ]
    found = []
    for begin, more in kinds:
        try:
            few, many = (len(renderer.encode(renderer.render([*begin, *more * times]))) for times in (2, 6))
        except ValueError:  # this template does not take such a chat
            continue
        found.append((many - few) // (4 * len(more)))
    return max(1, min(found, default=1))
