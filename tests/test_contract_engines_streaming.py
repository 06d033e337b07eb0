"""Streamed answers, of every engine server: what is told in chunks and what comes last are the answer that is
not streamed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from engine_contract import abort, check_whole, contract, prepare, until, versions_of
from engine_kinds import LONG, MAX_LENGTH, SLOTS, Server, another_client

from asyncrl.engines.engine import EngineClient
from asyncrl.engines.pool import EnginePool
from asyncrl.errors import EngineError, RequestRefused
from asyncrl.messages.base import Interrupt
from asyncrl.messages.engine_calls import GenerateChunk, GenerateRequest, GenerateResponse
from asyncrl.messages.records import SamplingRequest
from asyncrl_servers.checks import spans_of

pytest_plugins = ["engine_under_test"]


async def stream(
    engine: EngineClient, request: GenerateRequest, on_chunk: Callable[[GenerateChunk], None] = lambda _: None
) -> tuple[list[GenerateChunk], GenerateResponse]:
    """The chunks of a streamed answer, and what came last."""
    chunks: list[GenerateChunk] = []

    def told(chunk: GenerateChunk) -> None:
        chunks.append(chunk)
        on_chunk(chunk)

    return chunks, await engine.generate_segment(request, on_chunk=told)


def joined(chunks: list[GenerateChunk], last: GenerateResponse) -> GenerateResponse:
    token_ids = [token for chunk in chunks for token in chunk.token_ids] + last.token_ids
    logprobs = [logprob for chunk in chunks for logprob in chunk.logprobs] + last.logprobs
    versions = [chunk.version for chunk in chunks for _ in chunk.token_ids]
    versions += [span.version for span in last.version_spans for _ in range(span.start, span.end)]
    marks = [(at, version) for at, version in enumerate(versions) if at == 0 or versions[at - 1] != version]
    spans = spans_of(marks, len(versions))
    return last.model_copy(update={"token_ids": token_ids, "logprobs": logprobs, "version_spans": spans})


@contract
async def test_chunks_and_what_comes_last_are_bit_for_bit_the_answer_that_is_not_streamed(
    server: Server, engine: EngineClient
) -> None:
    settings = [
        (1, 1.0, 1.0),
        (2, 0.7, 1.0),
        (41, 0.0, 1.0),
        (300, 1.0, 1.0),
        (310, 1.0, 0.9),
        (400, 1.3, 1.0),
    ]
    requests = [
        server.request(max_tokens=tokens, seed=tokens, temperature=temperature, top_p=top_p)
        for tokens, temperature, top_p in settings
    ]
    whole = await asyncio.gather(*(engine.generate_segment(request) for request in requests))
    streamed = await asyncio.gather(*(stream(engine, request) for request in requests))
    for expected, (chunks, last) in zip(whole, streamed, strict=True):
        check_whole(last, server)
        assert joined(chunks, last) == expected
        assert last.token_ids, "the token that ends an answer comes with its finish_reason"
    assert all(len(chunks) > 5 for chunks, _ in streamed[3:])


@pytest.mark.parametrize("interrupt", ["abort", "keep", "keep_kv", "wait"])
@contract
async def test_a_publish_in_mid_stream_changes_the_version_once(
    server: Server, engine: EngineClient, interrupt: Interrupt
) -> None:
    old = engine.policy_version
    max_tokens = server.traits.waited if interrupt == "wait" else LONG
    digest = await prepare(engine, server, old + 1, scale=1.25)
    came = [asyncio.Event() for _ in range(SLOTS)]
    requests = [server.request(max_tokens=max_tokens, seed=seed) for seed in range(SLOTS)]
    tasks = [
        asyncio.create_task(stream(engine, request, lambda _, one=one: one.set()))
        for request, one in zip(requests, came, strict=True)
    ]
    for one in came:
        await one.wait()
    await engine.commit(old + 1, digest, interrupt)
    goes_on = interrupt.startswith("keep") and server.traits.keeps_streams
    for task in tasks:
        chunks, last = await task
        answer = joined(chunks, last)
        check_whole(answer, server)
        assert versions_of(answer) == ([old, old + 1] if goes_on else [old])
        assert chunks
        assert (len(answer.token_ids) == max_tokens) == (goes_on or interrupt == "wait")
        assert answer.finish_reason == ("length" if goes_on or interrupt == "wait" else "abort")


@pytest.mark.parametrize("interrupt", ["abort", "keep"])
@contract
async def test_a_request_that_publishes_interrupt_goes_on_and_each_token_is_told_once(
    server: Server, engine: EngineClient, interrupt: Interrupt
) -> None:
    old = engine.policy_version + 1
    await engine.commit(old, await prepare(engine, server, old), "abort")
    pool = EnginePool([engine], slots=SLOTS)
    temperature = 1.0 if server.traits.resumes_draws else 0.0
    request = SamplingRequest(f"told/{old}", (1, 2, 3), server.traits.waited, temperature=temperature, seed=3)
    told: list[int] = []
    running = asyncio.create_task(pool.generate(request, on_tokens=told.extend))
    for version in (old + 1, old + 2):
        num_told = len(told)
        await until(engine, lambda _, n=num_told: len(told) > n)  # type: ignore[misc]
        digest = await prepare(engine, server, version)
        await engine.commit(version, digest, interrupt)
    completion = await running
    assert tuple(told) == completion.token_ids
    assert len(told) == server.traits.waited
    assert [span.version for span in completion.version_spans] == [old, old + 1, old + 2]
    assert pool.stats().tokens == server.traits.waited
    whole = await engine.generate_segment(
        server.request(max_tokens=server.traits.waited, seed=3, temperature=temperature)
    )
    assert completion.token_ids == tuple(whole.token_ids), "the same weights under each version"


@contract
async def test_a_request_that_is_refused_is_so_although_it_asked_for_a_stream(
    server: Server, engine: EngineClient
) -> None:
    with pytest.raises(RequestRefused, match=str(MAX_LENGTH)):
        await stream(engine, server.request(prompt_ids=[1] * 10, max_tokens=MAX_LENGTH))
    came = asyncio.Event()
    long = server.request(request_id="twice", max_tokens=LONG)
    first = asyncio.create_task(stream(engine, long, lambda _: came.set()))
    await came.wait()
    with pytest.raises((EngineError, RequestRefused), match="twice"):
        await stream(engine, server.request(request_id="twice"))
    await abort(engine, ["twice"])
    assert (await first)[1].finish_reason == "abort"


@contract
async def test_a_client_that_goes_away_in_mid_stream_frees_its_slot(
    server: Server, engine: EngineClient
) -> None:
    came = asyncio.Event()
    async with another_client(server, engine) as leaver:
        task = asyncio.create_task(stream(leaver, server.request(max_tokens=LONG), lambda _: came.set()))
        await came.wait()
        task.cancel()
        await asyncio.wait([task])
        await until(engine, lambda now: now.num_running == 0)
