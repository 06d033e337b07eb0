"""vLLM's routes on the virtual clock: requests on their way, slots, pauses, labels, a prefix cache, and every
fault at a given moment; and what the tests of a VllmServer over it share.

A token's logprob says which weights computed it and over whose KV cache: see FakeVllm.logprob.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from pydantic import BaseModel

from asyncrl.engines.pool import EnginePool
from asyncrl.engines.vllm.facts import VllmFacts
from asyncrl.engines.vllm.vllm_server import VllmServer
from asyncrl.errors import EngineLost
from asyncrl.http import Answer, Caller, CallGarbled, CallLost
from asyncrl.messages.base import Interrupt
from asyncrl.messages.engine_calls import CommitResponse, GenerateRequest, GenerateResponse
from asyncrl.messages.records import Completion, SamplingRequest
from asyncrl.messages.trainer_calls import Canary, ExportResponse
from asyncrl.testing.virtual_time import run_virtual

DECODE_S, TRANSIT_S = 0.01, 0.004
VOCABULARY = 50
SLOTS = 4
MODES: list[Interrupt] = ["abort", "keep", "keep_kv", "wait"]
PROMPT = (1, 2, 3)


@dataclass
class Run:
    """A request: on its way, waiting, running, ended. `kv`: weights that filled its KV cache, once it ran."""

    body: dict[str, Any]
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    labels: list[tuple[str, int]] = field(default_factory=list)
    kv: float | None = None
    must_recompute: bool = False
    num_cached: int = 0
    num_told: int = 0
    finish: str | None = None


class FakeVllm(Caller):
    """One vLLM server, as VllmServer calls it.

    Life: serves -> dies or freezes; restart() puts a new process in its place.
    Waits: requests decode in their own calls, DECODE_S a token.
    """

    def __init__(self, *, slots: int = 4) -> None:
        super().__init__("engine-0", "fake://engine-0", "")
        self.slots = slots
        self.calls: list[str] = []
        self.hooks: dict[str, Callable[[], Awaitable[None]]] = {}
        """By route: awaited once, after the route took effect and before it answers."""
        self.before: dict[str, Callable[[], Awaitable[None]]] = {}
        """The same, before it takes effect."""
        self.refused: dict[str, tuple[int, str]] = {}
        """By route: a status and vLLM's words."""
        self.wrong_loads: list[float] = []
        """Weights that the next loads bring instead of the right ones."""
        self.ignored: set[str] = set()
        """Routes that answer and do nothing."""
        self.ignores_salt = self.keeps_cache = self.gives_nan = False
        self.transit_s = TRANSIT_S
        model = {"model": "/model", "dtype": "torch.float32", "max_model_len": 1000}
        self.settings: dict[str, Any] = {
            "model_config": model | {"logprobs_mode": "processed_logprobs"},
            "scheduler_config": {"max_num_seqs": slots},
            "lora_config": None,
        }
        self.staged: dict[str, Any] = {}
        self.restart()

    def restart(self) -> None:
        """A new process, with the weights and the label of the start."""
        self.weights, self.label = 0.0, "default"
        self.pause: str | None = None
        self.is_dead = self.is_frozen = False
        self.cache: dict[Any, float] = {}
        self.runs: dict[str, Run] = {}
        self.max_running = 0
        self._changed = asyncio.Event()

    def die(self) -> None:
        """Every call breaks off; those to come are refused."""
        self.is_dead = True
        self._change()

    def freeze(self) -> None:
        """Nothing is answered any more; connections stay."""
        self.is_frozen = True

    @property
    def num_running(self) -> int:
        return sum(run.kv is not None and run.finish is None for run in self.runs.values())

    def logprob(self, run: Run) -> float:
        """Of weights w over the cache of weights k: -(1 + w + 10 (w - k)) / 100."""
        assert run.kv is not None
        return -(1 + self.weights + 10 * (self.weights - run.kv)) / 100

    async def get(self, path: str, answer: type[Answer], *, timeout_s: float | None) -> Answer:
        return await self._call(path, None, answer, timeout_s)

    async def post(
        self, path: str, body: BaseModel | bytes | None, answer: type[Answer], *, timeout_s: float | None
    ) -> Answer:
        assert not isinstance(body, bytes)
        return await self._call(path, body, answer, timeout_s)

    async def _call(self, path: str, body: Any, answer: type[Answer], timeout_s: float | None) -> Answer:  # type: ignore[override]
        try:
            async with asyncio.timeout(timeout_s):
                text = await self._answer(path, body)
        except TimeoutError:
            raise CallLost(self.name, path, f"no answer within {timeout_s} s") from None
        return answer.model_validate_json(text)

    async def lines(self, path: str, body: BaseModel) -> AsyncGenerator[bytes, None]:
        self._record(path)
        async with contextlib.aclosing(self._sample(json.loads(body.model_dump_json()))) as steps:
            async for run in steps:
                yield b"data: " + json.dumps({"choices": [self._choice(run, run.num_told)]}).encode()
                yield b""
                run.num_told = len(run.tokens)
        yield b"data: " + json.dumps({"choices": [], "usage": self._usage(run)}).encode()
        yield b"data: [DONE]"

    async def _answer(self, path: str, body: BaseModel | None) -> str:
        sent = {} if body is None else json.loads(body.model_dump_json())
        route = self._record(sent.get("method", path))
        if hook := self.before.pop(route, None):
            await hook()
        query = {name: values[-1] for name, values in parse_qs(urlsplit(path).query).items()}
        if route == "/inference/v1/generate":
            async with contextlib.aclosing(self._sample(sent)) as steps:
                *_, run = [step async for step in steps]
            answer: Any = {"choices": [self._choice(run)], "usage": self._usage(run)}
            if "prompt_logprobs" in sent["sampling_params"]:
                told = {"logprob": -(1 + self.weights) / 100}  # a prompt that is scored is computed anew
                answer["prompt_logprobs"] = [None, *({str(token): told} for token in sent["token_ids"][1:])]
            return json.dumps(answer)
        await self._alive(route)
        result = None if route in self.ignored else await self._control(route, sent, query)
        if hook := self.hooks.pop(route, None):
            await hook()
        await self._alive(route)
        return json.dumps({} if result is None else result)

    async def _control(self, route: str, sent: dict[str, Any], query: dict[str, str]) -> Any:
        match route:
            case "/pause":
                await self._pause(query["mode"], query["clear_cache"] == "true" and not self.keeps_cache)
            case "/resume":
                self.pause = None
                self._change()
            case "/abort_requests":
                for name in sent["request_ids"]:
                    if run := self.runs.get(name.removeprefix("generate-tokens-")):
                        run.finish = run.finish or "abort"
                self._change()
            case "/update_weight_version":
                self.label = sent["new_version"]
            case "/weight_info":
                return {"weight_version": self.label}
            case "/server_info":
                return {"vllm_config": self.settings, "vllm_env": {"VLLM_HTTP_TIMEOUT_KEEP_ALIVE": 3600}}
            case "asyncrl_facts":
                return {"results": [{"extension": 1, "ok": True, "vocab_size": 2**20}]}
            case "asyncrl_drop":
                return {"results": [{"ok": True}]}
            case "asyncrl_stage":
                self.staged = json.loads(sent["args"][0])
                return {"results": [{"ok": True, "state": "staged", "digest": self.staged["digest"]}]}
            case "asyncrl_load" | "asyncrl_finish_chunks":
                assert self.pause is not None or route != "asyncrl_load", "a load while something may run"
                self.weights = self.wrong_loads.pop(0) if self.wrong_loads else float(self.staged["version"])
                return {"results": [{"ok": True}]}
            case "asyncrl_load_chunk":
                chunk = json.loads(sent["args"][0])
                self.staged = {"version": chunk["version"]}
                return {"results": [{"ok": True, "digest": chunk["digest"]}]}
            case "/sleep":
                await self._pause("abort", True)
            case "/wake_up":
                self.pause = None
                self._change()
        return None

    async def _pause(self, mode: str, clear_cache: bool) -> None:
        if mode == "abort":
            for run in self.runs.values():
                run.finish = run.finish or "abort"
        self.pause = mode
        self._change()
        while mode == "wait" and self.num_running:
            await self._changed.wait()
        if clear_cache:
            self.cache.clear()
            for run in self.runs.values():
                run.must_recompute = True

    async def _sample(self, body: dict[str, Any]) -> AsyncGenerator[Run, None]:
        """One yield a token, and one for the end."""
        route = "/inference/v1/generate"
        await asyncio.sleep(self.transit_s)
        await self._alive(route)
        run = self.runs[body["request_id"]] = Run(body)
        try:
            while run.finish is None:
                if self._must_wait(run):
                    await self._changed.wait()
                    continue
                self._start(run)
                await asyncio.sleep(DECODE_S)
                await self._alive(route)
                if run.finish is None and self.pause != "keep" and not run.must_recompute:
                    self._decode(run)
                    if run.finish is None:
                        yield run
            await self._alive(route)
            yield run
        finally:
            del self.runs[body["request_id"]]
            self._change()

    def _must_wait(self, run: Run) -> bool:
        if self.is_dead:
            raise CallLost(self.name, "/inference/v1/generate", "the connection broke")
        is_new = run.kv is None
        return (
            self.is_frozen
            or self.pause == "keep"
            or (is_new and (self.pause is not None or self.num_running >= self.slots))
        )

    def _start(self, run: Run) -> None:
        if run.kv is None:
            salt = None if self.ignores_salt else run.body["cache_salt"]
            key = salt, tuple(run.body["token_ids"])
            run.kv = self.cache.get(key, self.weights)
            run.num_cached = len(run.body["token_ids"]) if key in self.cache else 0
            self.cache[key] = run.kv
        elif run.must_recompute:
            run.kv = self.weights
        run.must_recompute = False
        self.max_running = max(self.max_running, self.num_running)

    def _decode(self, run: Run) -> None:
        if not run.labels or run.labels[-1][0] != self.label:
            run.labels.append((self.label, len(run.tokens)))
        run.logprobs.append(-9999.0 if self.gives_nan else self.logprob(run))
        run.tokens.append((len(run.body["token_ids"]) + len(run.tokens)) % VOCABULARY)
        if len(run.tokens) == run.body["sampling_params"]["max_tokens"]:
            run.finish = "length"

    def _usage(self, run: Run) -> dict[str, Any]:
        return {"prompt_tokens_details": {"cached_tokens": run.num_cached}}

    def _choice(self, run: Run, from_token: int = 0) -> dict[str, Any]:
        ends = [start for _, start in run.labels[1:]] + [len(run.tokens)]
        spans = [
            {"version": label, "start": start, "end": end}
            for (label, start), end in zip(run.labels, ends, strict=False)
        ]
        return {
            "token_ids": run.tokens[from_token:],
            "logprobs": {"content": [{"logprob": one} for one in run.logprobs[from_token:]]},
            "finish_reason": run.finish,
            "weight_versions": spans if run.finish else None,
        }

    async def _alive(self, route: str) -> None:
        if self.is_frozen:
            await asyncio.Event().wait()
        if self.is_dead:
            raise CallLost(self.name, route, "the connection broke")
        if route in self.refused:
            status, words = self.refused[route]
            text = json.dumps({"error": {"message": words, "code": status}}).encode()
            raise CallGarbled(self.name, route, f"status {status}", status=status, text=text)

    def _record(self, path: str) -> str:
        route = urlsplit(path).path
        self.calls.append(path)
        return route

    def _change(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


def server_over(
    fake: FakeVllm,
    *,
    retries: int = 1,
    warnings: list[str] | None = None,
    mark: str = "",
    starts_fresh: bool = True,
) -> VllmServer:
    facts = VllmFacts("/model", "float32", fake.slots, 1000, (), False, "cpu", starts_fresh=starts_fresh)
    warn = (lambda _: None) if warnings is None else warnings.append
    return VllmServer(fake, facts=facts, canary_limit=1e-3, retries=retries, warn=warn, mark=mark)


def manifest(version: int, *, has_canary: bool = True) -> ExportResponse:
    logprob = -(1 + version) / 100
    canary = Canary(token_ids=[7, 8, 9, 10], logprobs=[logprob] * 3, next_logprob=logprob)
    return ExportResponse(
        version=version,
        path=f"/dev/shm/w{version}",
        digest=f"d{version}",
        num_tensors=2,
        num_bytes=8,
        canary=canary if has_canary else None,
    )


async def publish(
    server: VllmServer, version: int, interrupt: Interrupt = "abort", *, has_canary: bool = True
) -> CommitResponse:
    what = manifest(version, has_canary=has_canary)
    await server.prepare(what)
    return await server.commit(version, what.digest, interrupt)


def request(name: str = "a", *, max_tokens: int = 20, prompt: tuple[int, ...] = PROMPT) -> GenerateRequest:
    return GenerateRequest(request_id=name, prompt_ids=list(prompt), max_tokens=max_tokens)


def check_logprobs(completion: Completion | GenerateResponse) -> None:
    """Each token is said to be of the version whose weights sampled it, over its own KV cache."""
    logprobs = completion.behaviour_logprobs if isinstance(completion, Completion) else completion.logprobs
    for span in completion.version_spans:
        assert list(logprobs[span.start : span.end]) == [-(1 + span.version) / 100] * (span.end - span.start)


async def lost(call: Coroutine[Any, Any, object]) -> EngineLost:
    with pytest.raises(EngineLost) as caught:
        await call
    return caught.value


Story = Callable[[FakeVllm, VllmServer], Any]


def play(story: Story, **values: Any) -> Any:
    """On a server that is ready."""

    async def ready_and_play() -> Any:
        fake = FakeVllm()
        server = server_over(fake, **values)
        await server.ready(10.0)
        return await story(fake, server)

    return run_virtual(ready_and_play())


def versions(answer: GenerateResponse | Completion) -> list[int]:
    return [span.version for span in answer.version_spans]


def some(
    tasks: asyncio.TaskGroup, pool: EnginePool, count: int, max_tokens: int
) -> list[asyncio.Task[Completion]]:
    asked = [SamplingRequest(f"{index}", PROMPT, max_tokens, 1.0, seed=index) for index in range(count)]
    return [tasks.create_task(pool.generate(one)) for one in asked]


def check_all(running: list[asyncio.Task[Completion]], max_tokens: int) -> None:
    for task in running:
        assert len(task.result().token_ids) == max_tokens
        check_logprobs(task.result())
