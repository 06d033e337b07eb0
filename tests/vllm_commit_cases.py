"""A VllmServer over the scripted vLLM: what the tests of its commits and of their faults share."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any

import pytest
from fake_vllm import FakeVllm

from asyncrl.engines.vllm.facts import VllmFacts
from asyncrl.engines.vllm.vllm_server import VllmServer
from asyncrl.errors import EngineLost
from asyncrl.messages.base import Interrupt
from asyncrl.messages.engine_calls import CommitResponse, GenerateRequest, GenerateResponse
from asyncrl.messages.records import Completion
from asyncrl.messages.trainer_calls import Canary, ExportResponse

SLOTS = 4
MODES: list[Interrupt] = ["abort", "keep", "keep_kv", "wait"]
PROMPT = (1, 2, 3)


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
