"""Pushes in chunks into weights that slept, of every engine server: what is served, and what is refused."""

from __future__ import annotations

import asyncio
from typing import Any

from engine_contract import (
    BOTH,
    be_awake,
    chunks_of,
    contract,
    health,
    load,
    prepare,
    push,
    refused,
    staged,
    versions_of,
    waits,
)
from engine_kinds import Server

from asyncrl.engines.engine import EngineClient

pytest_plugins = ["engine_under_test"]


@contract
async def test_weights_that_woke_without_content_are_not_served_until_a_push_is_committed(
    server: Server, engine: EngineClient
) -> None:
    old = await be_awake(engine, server)
    await engine.commit(old + 1, await prepare(engine, server, old + 1, scale=1.5), "abort")
    expected = await engine.generate_segment(server.request(max_tokens=60))
    await engine.sleep(BOTH)
    await engine.wake(BOTH)
    waiting = asyncio.create_task(engine.generate_segment(server.request(max_tokens=60)))
    await waits(engine, waiting)
    chunks, digest = chunks_of(server, old + 2, scale=1.5)
    for chunk in chunks:
        await load(engine, chunk)
        await waits(engine, waiting)
    assert engine.policy_version == (await health(engine)).policy_version == old + 1
    committed = await engine.commit(old + 2, digest, "abort")
    assert (committed.digest, committed.num_interrupted) == (digest, 0), (
        "what waits is not interrupted: it never ran"
    )
    answer = await waiting
    assert versions_of(answer) == [old + 2]
    assert (answer.token_ids, answer.logprobs) == (expected.token_ids, expected.logprobs)
    assert (await engine.commit(old + 2, digest, "abort")).num_interrupted == 0, "the same again is no error"


@contract
async def test_a_push_that_is_not_whole_or_out_of_order_is_refused_and_only_a_good_one_is_served(
    server: Server, engine: EngineClient
) -> None:
    old = await be_awake(engine, server)
    await engine.sleep(["weights"])
    await engine.wake(["weights"])
    waiting = asyncio.create_task(engine.generate_segment(server.request(max_tokens=5)))
    (first, last), digest = chunks_of(server, old + 1, scale=1.5)
    await refused(engine.commit(old + 1, digest, "abort"))
    await refused(engine.load_chunk(last))
    await load(engine, first)
    await refused(engine.commit(old + 1, digest, "abort"))
    await refused(engine.load_chunk(last))
    await load(engine, first)
    await refused(engine.load_chunk(last.model_copy(update={"version": old + 2})))
    await waits(engine, waiting)
    await push(engine, server, old + 1, scale=1.5)
    assert versions_of(await waiting) == [old + 1]


@contract
async def test_chunks_that_are_not_what_was_sent_are_refused_and_nothing_of_them_is_served(
    server: Server, engine: EngineClient
) -> None:
    server.needs(server.traits.reads_files, "it reads no file")
    old = await be_awake(engine, server)
    before = await engine.generate_segment(server.request())
    await engine.sleep(["weights"])
    await engine.wake(["weights"])
    (first, last), digest = chunks_of(server, old + 1)
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"digest": "0" * 32}, first.digest),
        ({"num_tensors": 99}, "announced were 99"),
        ({"path": str(server.folder / "nowhere.safetensors")}, "nowhere"),
    ]
    for changes, match in wrong:
        await refused(engine.load_chunk(first.model_copy(update=changes)), match)
        await refused(engine.load_chunk(last), "loaded is nothing")
    await load(engine, first)
    twice = first.model_copy(update={"index": 1, "is_last": True})
    await refused(engine.load_chunk(twice), "came in an earlier chunk")
    await load(engine, first)
    await load(engine, last)
    await refused(engine.commit(old + 1, "0" * 32, "abort"), digest)
    await refused(engine.commit(old + 1, digest, "abort"), "nothing")
    await push(engine, server, old + 1)
    assert (await engine.generate_segment(server.request())).token_ids == before.token_ids


@contract
async def test_nothing_is_written_over_serving_weights_and_nothing_into_sleeping_ones(
    server: Server, engine: EngineClient
) -> None:
    old = await be_awake(engine, server)
    before = await engine.generate_segment(server.request())
    (chunk, *_), digest = chunks_of(server, old + 1, scale=2.0)
    await refused(engine.load_chunk(chunk), "served")
    after = await engine.generate_segment(server.request())
    assert (after.token_ids, after.logprobs) == (before.token_ids, before.logprobs)
    digest = await prepare(engine, server, old + 1)
    await engine.sleep(["weights"])
    await refused(engine.load_chunk(chunk), "asleep")
    await refused(engine.commit(old + 1, digest, "abort"), "asleep")
    await refused(engine.prepare(staged(server, old + 1)), "asleep")
    await engine.wake(["weights"])
    digest = await prepare(engine, server, old + 1)
    await engine.commit(old + 1, digest, "abort")
    answer = await engine.generate_segment(server.request())
    assert versions_of(answer) == [old + 1], "staged weights fill woken ones as well"
    assert (answer.token_ids, answer.logprobs) == (before.token_ids, before.logprobs)


@contract
async def test_the_version_that_served_can_be_pushed_again_into_woken_weights_but_no_older_one(
    server: Server, engine: EngineClient
) -> None:
    server.needs(server.traits.reads_files, "it takes any version")
    version = await be_awake(engine, server)
    before = await engine.generate_segment(server.request())
    await engine.sleep(BOTH)
    await engine.wake(BOTH)
    (older, *_), _ = chunks_of(server, version - 1)
    await refused(engine.load_chunk(older), "cannot be loaded after")
    others, wrong = chunks_of(server, version, scale=3.0)
    for chunk in others:
        await load(engine, chunk)
    await refused(engine.commit(version, wrong, "abort"))
    await push(engine, server, version)
    assert (await engine.generate_segment(server.request())).token_ids == before.token_ids
