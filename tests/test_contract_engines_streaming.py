"""The contract of every engine server: a streamed answer equals a whole one."""

from __future__ import annotations

import asyncio

import pytest
from contract_servers import LONG, SLOTS, Server
from engine_contract import check_whole, contract, prepare, until, versions_of

from asyncrl.engines.engine import EngineClient
from asyncrl.messages.codec import spans_of
from asyncrl.messages.engine_api import GenerateResponse, Interrupt
from asyncrl.messages.records import VersionSpan

pytest_plugins = ["engine_under_test"]


def joined(chunks: list[GenerateResponse], last: GenerateResponse) -> GenerateResponse:
    parts = [*chunks, last]
    token_ids = [token for part in parts for token in part.token_ids]
    logprobs = [logprob for part in parts for logprob in part.logprobs]
    versions = [
        span.version for part in parts for span in part.version_spans for _ in range(span.start, span.end)
    ]
    marks = [(at, version) for at, version in enumerate(versions) if at == 0 or versions[at - 1] != version]
    spans = [VersionSpan(*span) for span in spans_of(marks, 0, len(versions))]
    return last.model_copy(update={"token_ids": token_ids, "logprobs": logprobs, "version_spans": spans})


@contract
async def test_a_streamed_answer_is_bit_for_bit_the_other(server: Server, engine: EngineClient) -> None:
    settings = [(1, 1.0, 1.0), (2, 0.7, 1.0), (41, 0.0, 1.0)]
    settings += [(300, 1.0, 1.0), (310, 1.0, 0.9), (400, 1.3, 1.0)]
    requests = [
        server.request(max_tokens=tokens, seed=tokens, temperature=temperature, top_p=top_p)
        for tokens, temperature, top_p in settings
    ]
    whole = await asyncio.gather(*(engine.generate_segment(request) for request in requests))
    came: list[list[GenerateResponse]] = [[] for _ in requests]
    streams = (
        engine.generate_segment(one, on_chunk=to.append) for one, to in zip(requests, came, strict=True)
    )
    for expected, chunks, last in zip(whole, came, await asyncio.gather(*streams), strict=True):
        check_whole(last, server)
        assert joined(chunks, last) == expected
        assert last.token_ids, "the token that ends an answer comes with its finish_reason"
    few = 5 if server.kind == "fake" else 1  # other kinds sample by the clock
    assert all(len(chunks) > few for chunks in came[3:])


@pytest.mark.parametrize("interrupt", ["abort", "keep", "keep_kv", "wait"])
@contract
async def test_a_publish_in_mid_stream(server: Server, engine: EngineClient, interrupt: Interrupt) -> None:
    max_tokens = server.traits.waited if interrupt == "wait" else LONG
    goes_on = interrupt.startswith("keep") and server.traits.keeps_streams
    for _ in range(5):  # a server may be done before a process that gets no core asks for the commit
        old = engine.policy_version
        answers = await _answers_over_a_commit(server, engine, interrupt, max_tokens)
        too_late = [answer.finish_reason == "length" and versions_of(answer) == [old] for answer in answers]
        if interrupt == "wait" or not any(too_late):
            break
    for answer in answers:
        check_whole(answer, server)
        assert versions_of(answer) == ([old, old + 1] if goes_on else [old])
        assert (len(answer.token_ids) == max_tokens) == (goes_on or interrupt == "wait")
        assert answer.finish_reason == ("length" if goes_on or interrupt == "wait" else "abort")


async def _answers_over_a_commit(
    server: Server, engine: EngineClient, interrupt: Interrupt, max_tokens: int
) -> list[GenerateResponse]:
    """Run SLOTS streams, commit a version after each has sent tokens, and return the answers."""
    old = engine.policy_version
    digest = await prepare(engine, server, old + 1, scale=1.25)
    came: list[list[GenerateResponse]] = [[] for _ in range(SLOTS)]
    requests = [server.request(max_tokens=max_tokens, seed=seed) for seed in range(SLOTS)]
    tasks = [
        asyncio.create_task(engine.generate_segment(request, on_chunk=chunks.append))
        for request, chunks in zip(requests, came, strict=True)
    ]
    await until(engine, lambda _: all(came))
    await engine.commit(old + 1, digest, interrupt)
    return [joined(chunks, await task) for task, chunks in zip(tasks, came, strict=True)]
