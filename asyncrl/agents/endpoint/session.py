"""Sessions of an engine, and their calls: read, prompted, sampled, recorded."""

from __future__ import annotations

import asyncio
import itertools
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from hashlib import blake2b
from typing import TypeVar

from asyncrl.agents.endpoint.answers import Answer, AnswerText
from asyncrl.agents.endpoint.calls import GatewayCall, StoredChat
from asyncrl.agents.endpoint.capture import Capture, PromptPlan
from asyncrl.agents.endpoint.dialects import Dialect, Read
from asyncrl.agents.endpoint.grammars import GrammarChecks, grammar_of, prefill_of
from asyncrl.agents.endpoint.prefix_match import Frame, PromptMatch, Roles
from asyncrl.agents.endpoint.requests import (
    AnyRequest,
    CallRules,
    ChatRequest,
    RequestReader,
    invalid,
    parse_json,
    shown,
    text_joint,
    too_long,
)
from asyncrl.agents.endpoint.sessions import (
    OpenSession,
    Sessions,
    engine_unavailable,
    session_ended,
)
from asyncrl.agents.endpoint.sub_agents import Agent
from asyncrl.agents.endpoint.tool_formats import NO_FORMAT, ToolFormat, opens_thought
from asyncrl.base.errors import ComponentError, RequestRefused, RolloutFailure
from asyncrl.engines.pool import EnginePool
from asyncrl.messages.sampling import SamplingRequest
from asyncrl.messages.worker_api import ChatTokenizer

Value = TypeVar("Value")

LONG_BODY = 2**14
"""Bytes of a body read in a thread: 10 ms."""
LONG_TEXT = 2**14
"""Characters of a text tokenized in a thread: 15 ms."""
MAX_CHARACTERS = 64
"""Most characters per prompt token."""
NUM_ENCODING = 4
"""Texts tokenized at once."""
SeedOf = Callable[[str, int, int, int], int]
"""Seed from (prompt_id, sample_index, attempt, key of the call)."""
OnBroken = Callable[[ComponentError], None]


@dataclass(eq=False, repr=False)
class GatewaySession(OpenSession):
    """A call is read(), gets its prompt(), and is sampled with sample(). Then
    record_nowait() adds it to `capture`, or withdraw_nowait() forgets it.

    Waits: threads, slots and the engine, within in_hand().
    Invariant: the engine gets only checked values. A broken engine goes to the route's
        `on_broken`, its calls get 503; a request that it refuses gets 400.
    """

    _: KW_ONLY
    route: EngineRoute

    def __post_init__(self) -> None:
        super().__post_init__()
        self.sessions.open[self.key] = self
        self.capture = Capture(
            self.route.tokenizer,
            self.route.tool_format.thinking,
            counts=self.route.counts,
            keeps_thoughts=self.limits.thoughts == "keep",
            frames=self.route.frames,
        )

    async def read(self, dialect: Dialect, body: bytes) -> Read:
        """Parse and check a body in its dialect. Raises ApiError."""
        return await _run(
            self.route.rendering,
            lambda: dialect.read(self.route.reader, parse_json(body), self.chats),
            in_thread=len(body) >= LONG_BODY,
        )

    async def count(self, dialect: Dialect, body: bytes) -> int:
        # A count renders and encodes a whole chat, but uses up no call. Free calls have
        # their own limit.
        self.free_call_nowait()
        asked, _ = await self.read(dialect, body)
        assert isinstance(asked, ChatRequest), "only chats are counted"
        role = self.route.rules.role_of(asked.model)
        _, _, num_tokens = await self._matched(asked, len(body), role)
        return num_tokens

    async def prompt(
        self,
        agent: Agent,
        dialect: Dialect,
        asked: AnyRequest,
        num_bytes: int,
    ) -> GatewayCall:
        """Return a call that is ready to sample: its prompt, grammar and seed, and how
        its answer is read. Raises ApiError.
        """
        self.check_limits()
        # Counted before the first await, so that parallel calls cannot pass the limit
        # together.
        self.num_calls += 1  # refusals from here on cost work
        order = self.num_calls
        rules = self.route.rules
        role = rules.role_of(asked.model)
        planned = await self._planned(asked, num_bytes, role)
        # Before _take_number: a refused grammar must not use up a number. Only an
        # existing call is withdrawn.
        grammar = await self._grammar(asked, planned)
        most = self.rules.max_tokens or rules.max_tokens
        room = rules.max_length - planned.whole.length
        max_tokens = min(asked.max_tokens or most, most, room)
        if self.user_key and self.opening is None:
            self.opening = asked.messages
        # A seed follows from the ids of the prompt and the number among equal prompts,
        # not from the order of arrival. So a rollout with parallel calls can be
        # repeated. Agents whose names are the same in each run count for themselves.
        digest = planned.whole.state.digest()
        if agent.is_stable:
            digest += agent.name.encode()
        digest += role.encode()
        number = None if asked.seed is not None else self._take_number(digest)
        key = call_key(
            digest, f"seed {asked.seed}" if number is None else f"number {number}"
        )
        thinking = self._thinking(asked, planned)
        answer = self._answer(dialect, asked, planned, key, thinking)
        return GatewayCall(
            name=f"{dialect.name}-{planned.number}",
            model=role or rules.model_name,
            order=order,
            planned=planned,
            agent=agent,
            key=digest,
            number=number,
            answer=answer,
            request=SamplingRequest(
                # With the attempt: the first request of a retried rollout may reach an
                # engine before it has ended those of the failed attempt.
                request_id=f"{self.rollout_id}/a{self.attempt}/c{planned.number}",
                prompt_ids=planned.prompt_ids,
                max_tokens=max_tokens,
                **(rules.sampling.parameters | asked.sampling),
                stop=_stop_texts(asked, answer),
                seed=self.route.seed_of(
                    self.prompt_id, self.sample_index, self.attempt, key
                ),
                route_key=self.route_key,
                after=self.last_span,
                grammar=grammar,
                top_logprobs=asked.top_logprobs,
                thinking=thinking,
                role=role,
            ),
            # The trainer knows one temperature, and other parameters by the supports
            # that they leave.
            is_trained=asked.sampling.keys() <= rules.replayed,
        )

    async def sample(self, call: GatewayCall) -> None:
        """Sample the answer of a call, and finish it. Raises ApiError."""
        answer = call.answer
        on_tokens = call.feed if answer.is_streamed else None
        try:
            async with self.slots:
                completion = await self.route.engine.generate(
                    call.request, on_tokens=on_tokens, on_spent=self.add_spent_nowait
                )
            self.last_span = (
                completion.tokens.spans[-1] if completion.tokens.spans else None
            )
            answer.finish(completion)
            if answer.has_logprobs:
                await _run(self.route.encoding, answer.build_logprobs, in_thread=True)
        except RequestRefused as refusal:
            raise invalid(f"The engine refused this call: {refusal.why}.") from None
        except RolloutFailure as failure:  # a retry would fail too
            # For example, the user's tool format raised an error.
            self.fail_nowait(failure)
            raise session_ended(self.ended or "") from None
        except ComponentError as error:
            # Before on_broken, which leads to the end of all sessions: later calls with
            # their keys must get 503, not 401.
            self.sessions.end_run_nowait(error.what)
            self.route.on_broken(error)
            raise engine_unavailable(error.what) from None
        finally:
            # After an error, too: the writer of a stream waits for this, and would
            # never end.
            call.is_sampled = True
            call.news.set()
        if not call.is_trained:
            self.route.counts["untrained"] += 1

    def _take_number(self, digest: bytes) -> int:
        taken = self._numbers[digest]
        # The smallest free number: the repetition of a call that was never delivered
        # gets the number that its withdrawal has freed, and so the same seed.
        number = next(number for number in itertools.count() if number not in taken)
        taken.add(number)
        return number

    def withdraw_nowait(self, call: GatewayCall) -> None:
        """Forget a call that was not delivered: the next equal call reuses its seed."""
        self._numbers[call.key].discard(call.number)

    def record_nowait(self, call: GatewayCall, continues: StoredChat | None) -> None:
        """Record an answer just before it is written. Raises ApiError if the session
        ended.
        """
        # The rollout may already be scored. An answer after that would reach the agent,
        # but no trainer.
        if self.ended is not None:
            raise session_ended(self.ended)
        message = call.answer.message
        self.capture.record(
            call.planned,
            call.answer.completion,
            message,
            call.name,
            is_trained=call.is_trained,
            begun_s=call.begun_s,
            agent=call.agent.name,
        )
        if continues is not None:
            self.chats[call.name] = continues._replace(
                messages=[*continues.messages, message]
            )
        # The agent continued after the refused call, for example with a condensed
        # prompt. So the limit did not cut its work, and the rollout is not truncated.
        if call.order > self._overflow_order:
            self.overflow = None

    async def _planned(
        self, asked: AnyRequest, num_bytes: int, role: str
    ) -> PromptPlan:
        match = None
        if isinstance(asked, ChatRequest):
            match, ids, num_tokens = await self._matched(asked, num_bytes, role)
        else:
            prompt = asked.prompt
            ids = (
                await self._encode(prompt, asked, adds_special=True)
                if isinstance(prompt, str)
                else prompt
            )
            num_tokens = len(ids)
        if num_tokens > self.route.rules.max_prompt_tokens:
            raise too_long(
                f"{num_tokens} tokens", self.route.rules.max_prompt_tokens, asked.param
            )
        if not num_tokens:
            raise invalid("prompt has no token.", "prompt")
        # Other calls may have been recorded since the match, which still holds:
        # recorded nodes never change and never leave.
        planned = self.capture.plan(ids, match, role)
        if planned.changed is not None:
            message = asked.messages[planned.changed]
            self.route.reader.log_once(
                f"changed {message['role']}",
                f"messages[{planned.changed}] ({message['role']}) differs from the call before, so this call "
                f"begins a new branch with its whole prompt: {shown(message['content'])}. Keep times and "
                "other changing texts out of it, or put them into the last message",
            )
        return planned

    async def _matched(
        self, asked: ChatRequest, num_bytes: int, role: str
    ) -> tuple[PromptMatch, Sequence[int], int]:
        """Return the match, the ids after its parent, and the number of all ids. Raises
        ApiError.
        """
        most = self.route.rules.max_prompt_tokens
        # Before the chat is rendered, since even empty messages cost time.
        if len(asked.messages) > most:
            raise too_long(
                f"{len(asked.messages)} messages of a token or more", most, asked.param
            )
        match = partial(
            self.capture.match,
            asked.messages,
            asked.shown_tools or None,
            prefill=prefill_of(asked, self.route.tool_format, self.route.tokenizer),
            settings=asked.chat_template_kwargs or None,
            role=role,
        )
        try:
            matched = await _run(
                self.route.rendering, match, in_thread=num_bytes >= LONG_BODY
            )
        except ValueError as error:
            raise invalid(f"{error}.", asked.param) from None
        ids = await self._encode(matched.text, asked, after=matched.neighbor)
        num_before = 0 if matched.parent is None else matched.parent.whole.length
        return matched, ids, num_before + len(ids)

    async def _encode(
        self,
        text: str,
        asked: AnyRequest,
        *,
        after: str = "",
        adds_special: bool = False,
    ) -> Sequence[int]:
        """Return the ids of a text of a prompt. Raises ApiError."""
        most = self.route.rules.max_prompt_tokens
        # A text of megabytes is refused by its length. Tokenizing it would take
        # seconds.
        if len(text) > MAX_CHARACTERS * most:
            raise too_long(f"{len(text)} characters", most, asked.param)
        encode = partial(
            self.route.tokenizer.encode, text, after=after, adds_special=adds_special
        )
        try:
            return await _run(
                self.route.encoding, encode, in_thread=len(text) >= LONG_TEXT
            )
        except ValueError as error:
            raise invalid(f"{error}.", asked.param) from None

    async def _grammar(self, asked: AnyRequest, planned: PromptPlan) -> str | None:
        """Return the grammar of an answer, once it is checked. Raises ApiError."""
        if not isinstance(asked, ChatRequest):
            return None
        grammar = grammar_of(
            asked,
            self.route.tool_format,
            self.route.tokenizer,
            prefill=planned.prefill,
            prompt=planned.text,
        )
        if grammar is not None:
            source = "response_format" if asked.response_format else "tools"
            await self.route.checks.wait_checked(grammar, source)
        return grammar

    def _thinking(
        self, asked: AnyRequest, planned: PromptPlan
    ) -> tuple[str, str] | None:
        """Return the marks between which stop texts do not count."""
        if not isinstance(asked, ChatRequest):
            return None
        marks = self.route.tool_format.thinking
        opening, closing = (mark.strip() for mark in marks)
        # A stop text with the closing mark is meant to end the thought.
        if any(closing in text for text in asked.stop):
            return None
        return ("" if opens_thought(planned.text, marks) else opening), closing

    def _answer(
        self,
        dialect: Dialect,
        asked: AnyRequest,
        planned: PromptPlan,
        key: int,
        thinking: tuple[str, str] | None,
    ) -> Answer:
        """Return the answer of a call, empty: how its text is read, and what of it the
        client gets.
        """
        tool_format = NO_FORMAT
        if isinstance(asked, ChatRequest):
            # Without tools to call, text that looks like a call stays text.
            tool_format = (
                self.route.tool_format
                if asked.callable_tools
                else self.route.tool_format.without_tools
            )
        splits_thoughts = dialect.splits_thoughts
        if splits_thoughts is None:
            splits_thoughts = self.limits.thoughts_field == "reasoning_content"
        shows_special = self.rules.shows_special
        if asked.skip_special_tokens is not None:
            shows_special = not asked.skip_special_tokens
        text = AnswerText(
            self.route.tokenizer,
            asked.stop,
            keep_special=tool_format.opens,
            shows_special=shows_special,
            before=planned.tail,
            thinking=thinking,
        )
        return Answer(
            tokenizer=self.route.tokenizer,
            tool_format=tool_format,
            text=text,
            prefill=planned.prefill,
            options={
                "tools": asked.tools,
                # not the call's number: the next prompt may contain it
                "name": f"call_{key:016x}",
                "is_thinking": opens_thought(
                    planned.text, self.route.tool_format.thinking
                ),
                "splits_thought": splits_thoughts,
                "most_calls": 1 if asked.has_one_call else sys.maxsize,
            },
            has_logprobs=asked.logprobs,
            is_streamed=asked.stream,
        )


@dataclass(eq=False, repr=False)
class EngineRoute:
    """SessionHost of one engine."""

    sessions: Sessions[GatewaySession]
    engine: EnginePool
    tokenizer: ChatTokenizer
    tool_format: ToolFormat
    rules: CallRules
    seed_of: SeedOf
    on_broken: OnBroken
    checks: GrammarChecks = field(default_factory=GrammarChecks)

    def __post_init__(self) -> None:
        self.counts = Counter[str]()
        """Calls by the names of the metrics. untrained: at another temperature than the
        run's, such as greedy ones.
        """
        self.frames: dict[Roles, Frame] = {}
        self.reader = RequestReader(
            self.rules, text_joint(self.tokenizer), self.tokenizer.variables
        )
        self.rendering = asyncio.Lock()
        self.encoding = asyncio.Semaphore(NUM_ENCODING)
        self.open_nowait = partial(GatewaySession, self.sessions, route=self)
        """Open a session; the caller ends it."""


def _stop_texts(asked: AnyRequest, answer: Answer) -> tuple[str, ...]:
    """Return the texts at which the engine stops: also behind the only call. If the
    format has no closing mark, the model continues, and the client gets the first call.
    """
    closing = answer.tool_format.close
    if asked.has_one_call and closing is not None:
        return (*asked.stop, closing)
    return tuple(asked.stop)


async def _run(
    limit: AbstractAsyncContextManager[None],
    function: Callable[[], Value],
    *,
    in_thread: bool,
) -> Value:
    """Run a function; only tokenizing releases the interpreter, so only it runs
    concurrently in threads.
    """
    if not in_thread:
        return function()
    async with limit:
        return await asyncio.to_thread(function)


def call_key(prompt: bytes, source: str) -> int:
    """Return a key for the seed. It never depends on time; equal concurrent calls may
    swap answers.
    """
    digest = blake2b(prompt + source.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
