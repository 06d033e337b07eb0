"""vLLM's routes on the virtual clock: requests on their way, slots, pauses, labels, a
prefix cache, and every fault at a given moment; and what the tests of a VllmServer over
it share.

A token's logprob says which weights computed it and over whose KV cache: see
FakeVllm._decode.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import io
import json
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qs, urlsplit

import numpy as np
import pytest
from fake_server import FakeServer
from pydantic import BaseModel

from asyncrl.base.errors import EngineLost
from asyncrl.base.http import Answer, CallGarbled, CallLost
from asyncrl.extensions.vllm.vllm_process import (
    GENERATE,
    GRAMMARS,
    Json,
    VllmRequirements,
)
from asyncrl.extensions.vllm.vllm_server import VllmServer
from asyncrl.messages.engine_api import Interrupt
from asyncrl.messages.records import Completion
from asyncrl.messages.sampling import SamplingRequest
from asyncrl.messages.tokens import SegmentPart
from asyncrl.messages.trainer_api import Canary, ExportResponse

DECODE_S, TRANSIT_S = 0.01, 0.004
VOCABULARY = 50
SLOTS = 4
DROPPED = -99.0
"""Weights after a sleep of level 2."""
MODES: list[Interrupt] = ["abort", "keep", "keep_kv", "wait"]
PROMPT = (1, 2, 3)
MODEL: dict[str, Any] = {
    "model": "/model",
    "dtype": "torch.float32",
    "max_model_len": 1000,
}
MODEL["logprobs_mode"] = "processed_logprobs"
ENV: dict[str, Any] = {}


@dataclass
class Run:
    """A request: on its way, waiting, running, ended. `kv`: weights that filled its KV
    cache, once it ran.
    """

    body: dict[str, Any]
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    spans: list[dict[str, Any]] = field(default_factory=list)
    kv: Any = None
    must_recompute: bool = False
    finish: str | None = None


class FakeVllm(FakeServer):
    """A vLLM server with the routes that VllmServer calls. Requests decode in their own
    calls, at DECODE_S per token.
    """

    def __init__(self) -> None:
        super().__init__("engine-0")
        self.calls: list[str] = []
        self.hooks: dict[str, Callable[[], Awaitable[None]]] = {}
        """Awaited once per route, after the route took effect and before it answers."""
        self.refused_routes: dict[str, tuple[int, str]] = {}
        """A status and vLLM's text per route."""
        self.wrong_loads: list[float] = []
        """Weights that the next loads bring instead of the right ones."""
        self.num_surplus = 0
        """Logprobs without a token, in each answer or chunk."""
        self.transit_s = TRANSIT_S
        self.rejects_paused = False
        """Behave like vLLM 0.33; vLLM 0.32 holds a request that arrives during a pause.
        """
        self.reports_experts = False
        self.staged: dict[str, Any] = {}
        self._boot()

    def _boot(self) -> None:
        self.weights, self.label = 0.0, "default"
        self.pause: str | None = None
        self.cache: dict[Any, float] = {}
        self.runs: dict[str, Run] = {}
        self._changed = asyncio.Event()

    def die(self) -> None:
        super().die()
        self._change()

    def restart(self) -> None:
        """A new process, with the weights and the label of the start."""
        super().restart()
        self._boot()

    @property
    def num_running(self) -> int:
        return sum(
            run.kv is not None and run.finish is None for run in self.runs.values()
        )

    async def get(
        self, path: str, answer: type[Answer], *, timeout_s: float | None
    ) -> Answer:
        return await self.post(path, None, answer, timeout_s=timeout_s)

    async def read(
        self, method: str, path: str, body: Any, timeout_s: float | None
    ) -> bytes:
        await self.post(path, body, Json, timeout_s=timeout_s)
        return b""

    async def lines(self, path: str, body: BaseModel) -> AsyncGenerator[bytes, None]:
        num_told = 0
        async with contextlib.aclosing(
            self._sample(body.model_dump(mode="json"))
        ) as steps:
            async for run in steps:
                yield b"data: " + json.dumps(self._generated(run, num_told)).encode()
                yield b""
                num_told = len(run.tokens)
        yield b"data: [DONE]"

    async def _handle(self, path: str, body: Any) -> dict[str, Any]:
        self.calls.append(path)
        sent = {} if body is None else body.model_dump(mode="json")
        route = sent.get("method", urlsplit(path).path)
        self._check(route, path)
        if route == GENERATE:
            async with contextlib.aclosing(self._sample(sent)) as steps:
                *_, run = [step async for step in steps]
            answer = self._generated(run)
            if "prompt_logprobs" in sent["sampling_params"]:
                # a prompt that is scored is computed again
                told = {"logprob": -(1 + self.weights) / 100}
                answer["prompt_logprobs"] = [
                    None,
                    *({str(token): told} for token in sent["token_ids"][1:]),
                ]
            return answer
        query = {
            name: values[-1] for name, values in parse_qs(urlsplit(path).query).items()
        }
        result = await self._control(route, sent, query)
        if hook := self.hooks.pop(route, None):
            await hook()
        self._check(route, path)
        return result or {}

    async def _control(
        self, route: str, sent: dict[str, Any], query: dict[str, str]
    ) -> Any:
        match route:
            case "/pause":
                await self._pause(query["mode"])
                if query["clear_cache"] == "true" and query["mode"] != "keep":
                    self._clear_cache()
            case "/reset_prefix_cache":
                self._clear_cache()
                return {"success": True}
            case "/sleep":
                if query["level"] == "2":
                    self.weights = DROPPED
                await self._pause("abort")
                self._clear_cache()
            case "/resume" | "/wake_up":
                self.pause = None
                self._change()
            case "/abort_requests":
                self._abort(
                    {
                        name.removeprefix("generate-tokens-")
                        for name in sent["request_ids"]
                    }
                )
            case "/update_weight_version":
                self.label = sent["new_version"]
            case "/weight_info":
                return {"weight_version": self.label}
            case "/server_info":
                config = {
                    "model_config": MODEL,
                    "scheduler_config": {"max_num_seqs": SLOTS},
                    "cache_config": {"kv_cache_size_tokens": None},
                }
                config["structured_outputs_config"] = {
                    "reasoning_parser_plugin": GRAMMARS
                }
                return {"vllm_config": config, "vllm_env": ENV}
            case "asyncrl_facts":
                return {"results": [{"vocab_size": 2**20}]}
            case "asyncrl_stage" | "asyncrl_load_chunk":
                self.staged = json.loads(sent["args"][0])
                return {
                    "results": [{"state": "staged", "digest": self.staged["digest"]}]
                }
            case "asyncrl_load" | "asyncrl_finish_chunks":
                assert self.pause is not None or route != "asyncrl_load", (
                    "a load while something may run"
                )
                self.weights = (
                    self.wrong_loads.pop(0)
                    if self.wrong_loads
                    else float(self.staged["version"])
                )
                return {"results": [{}]}
        return None

    def _abort(self, names: set[str]) -> None:
        for name in names & self.runs.keys():
            self.runs[name].finish = self.runs[name].finish or "abort"
        self._change()

    def _clear_cache(self) -> None:
        self.cache.clear()
        for run in self.runs.values():
            run.must_recompute = True

    async def _pause(self, mode: str) -> None:
        self.pause = mode
        self._abort(set(self.runs) if mode == "abort" else set())
        while mode == "wait" and self.num_running:
            await self._changed.wait()

    async def _sample(self, body: dict[str, Any]) -> AsyncGenerator[Run, None]:
        """Yield each token, then the end."""
        process = self.has_ended
        await asyncio.sleep(self.transit_s)
        self._check(GENERATE, GENERATE)
        if self.rejects_paused and self.pause in ("abort", "wait"):
            self._refuse(
                GENERATE, 503, "Generation is paused. Please retry after it resumes."
            )
        run = self.runs[body["request_id"]] = Run(body)
        try:
            while run.finish is None and not process.is_set():
                is_full = self.pause is not None or self.num_running >= SLOTS
                if self.pause == "keep" or (run.kv is None and is_full):
                    await self._changed.wait()
                    continue
                self._start(run)
                await asyncio.sleep(DECODE_S)
                if (
                    run.finish is None
                    and self.pause != "keep"
                    and not run.must_recompute
                ):
                    self._decode(run)
                    if run.finish is None:
                        yield run
            if process.is_set():
                raise CallLost(self.name, GENERATE, "the connection broke")
            yield run
        finally:
            self.runs.pop(body["request_id"], None)
            self._change()

    def _start(self, run: Run) -> None:
        if run.kv is None:
            key = run.body["cache_salt"], tuple(run.body["token_ids"])
            run.kv = self.cache.setdefault(key, self.weights)
        elif run.must_recompute:
            run.kv = self.weights
        run.must_recompute = False

    def _decode(self, run: Run) -> None:
        """The logprob, of weights w over the cache of weights k: -(1 + w + 10 (w - k))
        / 100.
        """
        if not run.spans or run.spans[-1]["version"] != self.label:
            run.spans.append({"version": self.label, "start": len(run.tokens)})
        logprob = -(1 + self.weights + 10 * (self.weights - run.kv)) / 100
        run.logprobs.append(logprob)
        run.tokens.append((len(run.body["token_ids"]) + len(run.tokens)) % VOCABULARY)
        run.spans[-1]["end"] = len(run.tokens)
        if len(run.tokens) == run.body["sampling_params"]["max_tokens"]:
            run.finish = "length"

    def _generated(self, run: Run, from_token: int = 0) -> dict[str, Any]:
        logprobs = [*run.logprobs[from_token:], *[-1.0] * self.num_surplus]
        choice = {
            "token_ids": run.tokens[from_token:],
            "logprobs": {"content": [{"logprob": one} for one in logprobs]},
            "finish_reason": run.finish,
            "weight_versions": run.spans if run.finish else None,
        }
        if run.finish and self.reports_experts:
            num_read = len(run.body["token_ids"]) + len(run.tokens) - 1
            # One layer: token t goes to the experts t and t + 1.
            read = np.arange(num_read, dtype=np.uint16)[:, None, None] + [0, 1]
            data = io.BytesIO()
            np.save(data, read.astype(np.uint16))
            choice["routed_experts"] = base64.b64encode(data.getvalue()).decode()
        return {"choices": [choice]}

    def _check(self, route: str, path: str) -> None:
        if route in self.refused_routes:
            self._refuse(path, *self.refused_routes[route])

    def _refuse(self, path: str, status: int, words: str) -> None:
        text = json.dumps({"error": {"message": words, "code": status}}).encode()
        raise CallGarbled(self.name, path, f"status {status}", status=status, text=text)

    def _change(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


def server_over(fake: FakeVllm, *, mark: str = "") -> VllmServer:
    return VllmServer(
        fake,
        VllmRequirements(
            "/model", "float32", SLOTS, 1000, (), canary_limit=1e-3, mark=mark
        ),
    )


async def ready_server() -> tuple[FakeVllm, VllmServer]:
    fake = FakeVllm()
    server = server_over(fake)
    await server.ready(10.0)
    return fake, server


def manifest(version: int) -> ExportResponse:
    logprob = -(1 + version) / 100
    canary = Canary(
        token_ids=[7, 8, 9, 10], logprobs=[logprob] * 3, next_logprob=logprob
    )
    return ExportResponse(
        version=version,
        path="/dev/shm/w",
        digest=f"d{version}",
        num_tensors=2,
        num_bytes=8,
        canary=canary,
    )


async def publish(
    server: VllmServer, version: int, interrupt: Interrupt = "abort", **changes: Any
) -> Any:
    await server.prepare(manifest(version).model_copy(update=changes))
    return await server.commit(version, f"d{version}", interrupt)


def request(
    name: str = "a", *, max_tokens: int = 20, prompt: tuple[int, ...] = PROMPT
) -> SamplingRequest:
    return SamplingRequest(
        request_id=name, prompt_ids=list(prompt), max_tokens=max_tokens
    )


def check_logprobs(completion: Completion | SegmentPart) -> None:
    """Each token is said to be of the version whose weights sampled it, over its own KV
    cache.
    """
    logprobs = (
        completion.behaviour_logprobs
        if isinstance(completion, Completion)
        else completion.logprobs
    )
    for span in completion.sampled.spans:
        expected = float(np.float32(-(1 + span.version) / 100))
        assert list(logprobs[span.start : span.end]) == [expected] * (
            span.end - span.start
        )


async def lost(call: Coroutine[Any, Any, object]) -> EngineLost:
    with pytest.raises(EngineLost) as caught:
        await call
    return caught.value


def versions(answer: SegmentPart | Completion) -> list[int]:
    return [span.version for span in answer.sampled.spans]
