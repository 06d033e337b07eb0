"""A gateway on a real port with a scripted engine, a byte tokenizer, and helpers that
call it.
"""

from __future__ import annotations

import asyncio
import functools
import re
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import aiohttp
import openai
from starlette.routing import BaseRoute
from token_cases import completion_of

from asyncrl.agents.endpoint.gateway import Gateway
from asyncrl.agents.endpoint.requests import CallRules
from asyncrl.agents.endpoint.session import GatewaySession
from asyncrl.agents.endpoint.tool_formats import find_tool_format
from asyncrl.base.errors import ComponentError
from asyncrl.config import GatewayConfig
from asyncrl.messages.records import Completion, Outcome, VersionSpan
from asyncrl.messages.sampling import SamplingRequest
from asyncrl.testing.virtual_time import run_virtual

if TYPE_CHECKING:
    import anthropic

HI: list[Any] = [{"role": "user", "content": "Hi"}]
START, END, NAMES = 256, 257, {256: "<|start|>", 257: "<|end|>"}


Test = Callable[..., Coroutine[Any, Any, None]]


def _run_by(runner: Callable[[Any], Any]) -> Callable[[Test], Callable[..., None]]:
    def decorate(test: Test) -> Callable[..., None]:
        return functools.wraps(test)(lambda **fixtures: runner(test(**fixtures)))

    return decorate


in_loop, in_virtual_time = _run_by(asyncio.run), _run_by(run_virtual)
"""Run an async test in a new event loop, or on a virtual clock."""


class ByteTokenizer:
    """Has a token per byte of UTF-8, plus two special tokens. Template:
    <|start|>ROLE\\nCONTENT<|end|>.
    """

    end_ids = frozenset({END})
    text_ids = frozenset(range(256))
    special_ids = frozenset(NAMES)
    byte_ids: frozenset[int] = frozenset()
    variables = frozenset({"enable_thinking"})
    closing = call_closing = "<|end|>"

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Any = None,
        settings: Any = None,
        is_open: bool = True,
    ) -> str:
        parts = (
            [f"<|start|>tools\n{[tool['function']['name'] for tool in tools]}<|end|>"]
            if tools
            else []
        )
        for message in messages:
            functions = [call["function"] for call in message.get("tool_calls") or ()]
            calls = "".join(
                f"<tool_call>\n{function}\n</tool_call>" for function in functions
            )
            parts.append(
                f"<|start|>{message['role']}\n{message.get('content') or ''}{calls}<|end|>"
            )
        return "".join(parts) + "<|start|>assistant\n" * is_open

    def encode(
        self, text: str, *, after: str = "", adds_special: bool = False
    ) -> tuple[int, ...]:
        ids: list[int] = []
        for part in re.split(r"(<\|start\|>|<\|end\|>)", text):
            ids += (
                [START if part == "<|start|>" else END]
                if part in NAMES.values()
                else part.encode()
            )
        return tuple(ids)

    def decode(
        self, token_ids: Sequence[int], *, skip_special_tokens: bool = True
    ) -> str:
        data = b"".join(
            bytes([token])
            if token < 256
            else b""
            if skip_special_tokens
            else NAMES[token].encode()
            for token in token_ids
        )
        return data.decode(errors="replace")


@dataclass(eq=False)
class ScriptedEngine:
    """Replacement of an EnginePool that samples `answer(request)`, three tokens at a
    time, with a weight push in the middle of each answer. With `gate`, an answer stops
    in its middle until the gate is set.
    """

    answer: Callable[[SamplingRequest], str] = lambda _: "Hello there."
    gate: asyncio.Event | None = None
    error: Exception | None = None
    tokenizer: Any = field(default_factory=ByteTokenizer)
    end: int = END
    requests: list[SamplingRequest] = field(default_factory=list)
    sampled: list[tuple[int, ...]] = field(default_factory=list)
    cancelled: list[str] = field(default_factory=list)
    started: asyncio.Event = field(default_factory=asyncio.Event)

    async def generate(
        self,
        request: SamplingRequest,
        *,
        on_tokens: Callable[[Sequence[int]], None] | None = None,
        on_spent: Callable[[int], None] = lambda num: None,
        **_: Any,
    ) -> Completion:
        self.requests.append(request)
        self.started.set()
        if self.error is not None:
            raise self.error
        ids = self._until_stop(request)[: request.max_tokens]
        self.sampled.append(ids)
        half = len(ids) // 2
        try:
            for start in range(0, len(ids), 3):
                await asyncio.sleep(0)
                if self.gate is not None and start >= half:
                    await self.gate.wait()
                if on_tokens is not None:
                    on_tokens(ids[start : start + 3])
                on_spent(len(ids[start : start + 3]))
        except asyncio.CancelledError:
            self.cancelled.append(request.request_id)
            raise
        cuts = ((0, half, 4, 3), (half, len(ids), 5, 3))
        spans = tuple(VersionSpan(*each) for each in cuts if each[0] < each[1])
        reason = (
            "stop" if ids[-1] == self.end or len(ids) < request.max_tokens else "length"
        )
        logprobs = [-0.5 - i / 1024 for i in range(len(ids))]
        return completion_of(ids, logprobs, spans, reason, 1, prompt=request.prompt_ids)

    def _until_stop(self, request: SamplingRequest) -> tuple[int, ...]:
        text = self.answer(request)
        ends = [text.index(stop) + len(stop) for stop in request.stop if stop in text]
        if ends:
            return tuple(self.tokenizer.encode(text[: min(ends)]))
        return (*self.tokenizer.encode(text), self.end)


RULES = CallRules(
    "policy", max_tokens=400, max_prompt_tokens=2000, max_length=2400, vocab_size=258
)


@dataclass
class World:
    gateway: Gateway
    engine: Any
    url: str
    http: aiohttp.ClientSession
    broken: list[ComponentError]
    session: GatewaySession = field(init=False)

    def __post_init__(self) -> None:
        self.session = self.open("g0/r0")

    @property
    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.session.key}"}

    def open(self, name: str = "g0/r1") -> GatewaySession:
        return self.gateway.open_nowait(
            name, prompt_id="p7", sample_index=0, attempt=0, route_key=name
        )

    async def post(
        self, body: Any, *, path: str = "/v1/chat/completions", **kwargs: Any
    ) -> tuple[int, Any]:
        """Return (status, JSON) of one call; `body` may be bytes."""
        headers = self.headers | kwargs.pop("headers", {})
        content = {"data": body} if isinstance(body, bytes) else {"json": body}
        async with self.http.post(
            self.url + path, headers=headers, **content, **kwargs
        ) as response:
            assert response.content_type == "application/json", await response.text()
            return response.status, await response.json()

    async def ask(self, text: str = "Hi", **more: Any) -> tuple[int, Any]:
        return await self.post(
            {"model": "m", "messages": [{"role": "user", "content": text}], **more}
        )

    async def ask_other(self, session: GatewaySession | None = None) -> tuple[int, Any]:
        """Call with the key of another session; None opens one."""
        key = {"Authorization": f"Bearer {(session or self.open()).key}"}
        return await self.post({"messages": HI}, headers=key)


async def until(condition: Callable[[], bool]) -> None:
    """Poll until the condition holds. Sockets do not report that the gateway has seen a
    disconnect.
    """
    while not condition():  # noqa: ASYNC110
        await asyncio.sleep(0.001)


def num_calls(world: World, kind: str) -> float:
    """Return a count of calls. edited: with a history, and without a recorded answer
    that they continue.
    """
    return world.gateway.gauges()[f"gateway/{kind}"]


def make_gateway(
    engine: Any,
    broken: list[ComponentError],
    *,
    tokenizer: Any = None,
    tool_format: str = "hermes",
    template: str = "",
    extra_routes: Sequence[BaseRoute] = (),
    **config: Any,
) -> Gateway:
    rules = {
        name: config.pop(name)
        for name in list(config)
        if name in CallRules.__dataclass_fields__
    }
    return Gateway(
        engine,
        tokenizer or engine.tokenizer,
        find_tool_format(tool_format, template),
        replace(RULES, **rules),
        GatewayConfig(**config),
        seed_of=lambda prompt_id, sample_index, attempt, call_key: call_key,
        on_broken=broken.append,
        extra_routes=extra_routes,
    )


@asynccontextmanager
async def gateway_world(engine: Any = None, **config: Any) -> AsyncIterator[World]:
    """Open a gateway. `config`: settings of the gateway, CallRules or make_gateway."""
    engine, broken = engine or ScriptedEngine(), list[ComponentError]()
    gateway = make_gateway(engine, broken, **config)
    url = await gateway.start()
    async with aiohttp.ClientSession() as http:
        try:
            yield World(gateway, engine, url, http, broken)
        finally:
            await gateway.aclose()


@dataclass
class Talk:
    """The official clients of one session."""

    world: World
    gpt: openai.AsyncOpenAI
    claude: anthropic.AsyncAnthropic

    async def chat(self, messages: Any = HI, **more: Any) -> Any:
        return await self.gpt.chat.completions.create(
            model="m", messages=messages, **more
        )

    async def respond(
        self, given: Any = "Hi", *, streamed: bool = False, **more: Any
    ) -> Any:
        if not streamed:
            return await self.gpt.responses.create(model="m", input=given, **more)
        async with self.gpt.responses.stream(model="m", input=given, **more) as stream:
            return await stream.get_final_response()

    async def message(
        self, messages: Any = HI, *, streamed: bool = False, **more: Any
    ) -> Any:
        given = {"model": "m", "max_tokens": 200, "messages": messages, **more}
        if not streamed:
            return await self.claude.messages.create(**given)
        async with self.claude.messages.stream(**given) as stream:
            return await stream.get_final_message()

    def prompts(self) -> list[str]:
        """Return the text of each prompt that reached the engine."""
        engine = self.world.engine
        prompts = [each.prompt_ids.tolist() for each in engine.requests]
        return [
            engine.tokenizer.decode(each, skip_special_tokens=False) for each in prompts
        ]

    def is_one_branch_of(self, *answers: str) -> bool:
        (trajectory,) = self.world.session.rollout(0, Outcome(), 1.0)
        num_sampled = sum(len(each.encode()) + 1 for each in answers)
        return (
            num_calls(self.world, "edited") == 0
            and trajectory.loss_mask.sum() == num_sampled
        )


@asynccontextmanager
async def talking(
    *answers: str, engine: Any = None, **config: Any
) -> AsyncIterator[Talk]:
    """Open a gateway whose model gives these answers, the last one from then on."""
    import anthropic  # costs seconds

    left = list(answers or ["Hello there."])
    engine = engine or ScriptedEngine(
        lambda _: left.pop(0) if len(left) > 1 else left[0]
    )
    async with gateway_world(engine, **config) as world:
        given: Any = {"api_key": world.session.key, "max_retries": 0}
        async with (
            openai.AsyncOpenAI(base_url=world.url + "/v1", **given) as gpt,
            anthropic.AsyncAnthropic(base_url=world.url, **given) as claude,
        ):
            yield Talk(world, gpt, claude)
