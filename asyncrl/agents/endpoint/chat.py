"""One call from its checked body to its sampled answer: prompt, budget, seed, the engine. Knows no HTTP and
no group.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b

import numpy as np

from asyncrl.agents.endpoint.calls import AskedAs, Call, Kind
from asyncrl.agents.endpoint.capture import Planned
from asyncrl.agents.endpoint.chat_messages import LONG_BODY, FarTooLong, OneThread
from asyncrl.agents.endpoint.choices import Choice, GatewayTokenizer, TokenNames
from asyncrl.agents.endpoint.refusals import broken, invalid, session_ended, too_long
from asyncrl.agents.endpoint.requests import CallRules, CallShape, ShapeReader
from asyncrl.agents.endpoint.sessions import GatewaySession, check_limits
from asyncrl.agents.endpoint.tool_calls import ToolFormat
from asyncrl.errors import RequestRefused, RolloutFailure, RoomError
from asyncrl.messages.protocols import SamplingEngine
from asyncrl.messages.records import SamplingRequest

SeedOf = Callable[[str, int, int, int], int]
"""Seed of a request from (prompt_id, sample_index, attempt, key of the call)."""


@dataclass(slots=True)
class TokenCounts:
    """Tokens of all calls that were answered; `in_flight` calls are being sampled."""

    in_flight: int = 0
    prompt: int = 0
    completion: int = 0


@dataclass(frozen=True, slots=True)
class Begun:
    """A call that may be sampled: one request to the engine for each of its choices."""

    call: Call
    requests: tuple[SamplingRequest, ...]
    is_streamed: bool


class Sampler:
    """Plans calls and has them sampled, for all sessions.

    Life:       begin() checks and plans, sample() asks the engine; then the call holds its answers, or its
    error. Waits:      begin sleeps in a thread, sample in the engine, both within the session's in_hand().
    Invariant:  what reaches the engine is ids, numbers in bounds and stop texts, all checked by ShapeReader
    and begin(). An engine
                that is broken is told to `on_broken` and answered with 503; one that refuses a request, with
                400. A tool-call format of the user's that goes wrong fails the rollout.
    """

    def __init__(
        self,
        engine: SamplingEngine,
        tokenizer: GatewayTokenizer,
        tool_format: ToolFormat,
        rules: CallRules,
        *,
        seed_of: SeedOf,
        on_broken: Callable[[RoomError], None],
        beside: OneThread,
    ) -> None:
        """`beside`: where long calls are read, rendered and tokenised."""
        self._beside = beside
        self._engine, self._tokenizer, self._tool_format, self._rules = engine, tokenizer, tool_format, rules
        self._seed_of, self._on_broken = seed_of, on_broken
        self._reader, self._token_names = ShapeReader(rules), TokenNames(tokenizer)
        self.counts = TokenCounts()

    async def read(self, kind: Kind, body: bytes) -> CallShape:
        """The checked values of a body. Raises ApiError. Sleeps while a long one is read."""
        read = self._reader.chat if kind == "chat" else self._reader.text
        return read(body) if len(body) < LONG_BODY else await self._beside.run(read, body)

    async def begin(self, session: GatewaySession, kind: Kind, shape: CallShape, asked_as: AskedAs) -> Begun:
        """A new call of the session. Raises ApiError. Sleeps while a long one is rendered and tokenised: one
        at a time for each session.

        From its return on the call's choices count as sampling, until sample() has ended.
        """
        check_limits(session, shape.n)
        session.num_calls += 1  # what is refused from here on was work, too
        prefill = self._prefill(shape)
        planned = await self._plan(session, shape, prefill)
        if session.is_peoples and session.opening is None:
            session.opening = shape.messages or [{"role": "user", "content": shape.prompt_text or ""}]
        budget = self._budget(planned, shape)
        keys = self._keys(session, planned, shape)
        choices = [
            Choice(
                index,
                self._tokenizer,
                stop=shape.stop,
                tool_format=self._tool_format if shape.tools else None,
                prefill=prefill,
                # it may become a part of the next prompt, so it is not of the call's number either
                name=f"call_{key:016x}",
                has_logprobs=shape.logprobs,
                token_names=self._token_names,
            )
            for index, key in enumerate(keys)
        ]
        call = Call(kind, asked_as, planned, choices, created_s=int(time.time()))
        request_id = f"{session.rollout_id}/a{session.attempt}/c{planned.number}"
        requests = tuple(
            SamplingRequest(
                request_id=request_id if index == 0 else f"{request_id}/{index}",
                prompt_ids=planned.prompt_ids,
                max_tokens=budget,
                temperature=self._rules.temperature,
                top_p=self._rules.top_p,
                stop=shape.stop,
                seed=self._seed_of(session.prompt_id, session.sample_index, session.attempt, key),
                route_key=session.route_key,
                after=session.last_span,
            )
            for index, key in enumerate(keys)
        )
        session.calls.add(call)
        session.num_sampling += len(requests)
        return Begun(call, requests, shape.stream)

    async def sample(self, session: GatewaySession, begun: Begun) -> None:
        """Have it sampled; the call's choices, or its error, say what came of it. Only cancellation is
        raised.
        """
        call = begun.call
        self.counts.in_flight += 1
        try:
            if len(begun.requests) == 1:
                await self._sample_choice(
                    session, call, call.choices[0], begun.requests[0], is_streamed=begun.is_streamed
                )
            else:
                pairs = zip(call.choices, begun.requests, strict=True)
                asked = (
                    self._sample_choice(session, call, *pair, is_streamed=begun.is_streamed) for pair in pairs
                )
                failures = [
                    each for each in await asyncio.gather(*asked, return_exceptions=True) if each is not None
                ]
                if failures:
                    raise failures[0]
            self.counts.prompt += call.num_prompt_tokens
            self.counts.completion += call.num_completion_tokens
            call.done_nowait()
        except RequestRefused as refusal:
            call.done_nowait(invalid(f"The engine refused this call: {refusal}"))
        except (
            RolloutFailure
        ) as failure:  # of a tool-call format of the user's: the next answer would be no better
            session.fail_nowait(failure)
            call.done_nowait(session_ended(session.ended or ""))
        except RoomError as error:
            self._on_broken(error)
            call.done_nowait(broken(f"The run is ending: {error.what}"))
        finally:
            if not call.is_done:
                if (
                    session.ended is None
                ):  # not cancelled, so a mistake of ours: whatever the session holds is not to be trusted
                    session.end_nowait(f"the gateway made a mistake in {call.name}; its log says which")
                call.done_nowait(session_ended(session.ended or ""))
            if call.error is not None:
                session.calls.drop(call)
            session.num_sampling -= len(begun.requests)
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
        def told(token_ids: Sequence[int]) -> None:
            choice.feed(token_ids)
            call.news_nowait()

        completion = await self._engine.generate(request, on_tokens=told if is_streamed else None)
        session.last_span = completion.version_spans[-1] if completion.version_spans else None
        choice.finish(completion)

    def _prefill(self, shape: CallShape) -> str:
        """Beginning of the answer that makes it a tool call, where the call wants one."""
        if shape.tool_choice in ("none", "auto"):
            return ""
        named, tool_format = shape.tool_choice.removeprefix("function:"), self._tool_format
        prefill = (
            tool_format.prefill_required()
            if shape.tool_choice == "required"
            else tool_format.prefill_named(named)
        )
        if prefill is None:
            how = f"the tool-call format {tool_format.name} has no beginning that makes an answer such a call"
            raise invalid(f"tool_choice {shape.tool_choice} is refused: {how}.", "tool_choice")
        return prefill

    async def _plan(self, session: GatewaySession, shape: CallShape, prefill: str) -> Planned:
        if shape.tools and self._tool_format.name == "none":
            raise invalid(
                "tools are refused: gateway.tool_format names no format, or its auto found none in the chat "
                "template.",
                "tools",
            )
        param, max_tokens = (
            "messages" if shape.messages is not None else "prompt",
            self._rules.max_prompt_tokens,
        )
        try:
            if shape.messages is not None:
                draft_now = partial(session.capture.draft, shape.messages, shape.tools, prefill=prefill)
                draft = await self._beside.run(draft_now) if shape.is_long else draft_now()
                return session.capture.plan_draft(
                    draft, await self._beside.encode(draft.text, self._tokenizer, max_tokens)
                )
            ids = (
                shape.prompt_ids
                if shape.prompt_text is None
                else await self._beside.encode(shape.prompt_text, self._tokenizer, max_tokens)
            )
            if not ids:
                raise invalid("prompt has no token.", "prompt")
            return session.capture.plan_ids(ids)
        except FarTooLong:
            limit = f"the longest prompt of this run is {max_tokens} tokens (rollout.max_prompt_tokens)"
            raise too_long(f"The text of this call is far too long; {limit}.", param) from None
        except ValueError as error:
            raise invalid(f"{error}.", param) from None

    def _budget(self, planned: Planned, shape: CallShape) -> int:
        """Most tokens to sample. Raises ApiError if the prompt leaves no room."""
        rules, length = self._rules, len(planned.prompt_ids)
        param = "messages" if shape.messages is not None else "prompt"
        if length > rules.max_prompt_tokens:
            raise too_long(
                f"This prompt has {length} tokens; the longest prompt of this run is "
                f"{rules.max_prompt_tokens} tokens "
                "(rollout.max_prompt_tokens). Shorten the conversation, or raise it.",
                param,
            )
        if length >= rules.max_length:
            raise too_long(
                f"This prompt has {length} tokens and leaves no room in the {rules.max_length} of the "
                f"engines.",
                param,
            )
        return min(shape.max_tokens or rules.max_tokens, rules.max_tokens, rules.max_length - length)

    def _keys(self, session: GatewaySession, planned: Planned, shape: CallShape) -> list[int]:
        """One for each choice, which its seed is made of: of what is asked, and how many calls asked the same
        before; never of when.

        Equal calls that run at once may so swap their answers: for their harness they are one and the same.
        """
        digest = blake2b(np.array(planned.prompt_ids, dtype="<i4").tobytes(), digest_size=16).digest()
        if shape.seed is None:
            times = session.times_asked.get(digest, 0)
            session.times_asked[digest] = times + 1
            asked = f"time {times}"
        else:
            asked = f"seed {shape.seed}"
        keys = (
            blake2b(digest + f"/{asked}/{index}".encode(), digest_size=8).digest() for index in range(shape.n)
        )
        return [int.from_bytes(key, "big") >> 1 for key in keys]
