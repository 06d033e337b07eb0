"""Sleep and wake, of every engine server."""

from __future__ import annotations

import asyncio

from engine_contract import (
    BOTH,
    abort,
    be_awake,
    check_whole,
    chunks_of,
    contract,
    flip_last_bit,
    health,
    prepare,
    push,
    refused,
    said,
    until,
    until_decoding,
    versions_of,
    waits,
)
from engine_kinds import LONG, SLOTS, Server

from asyncrl.engines.engine import EngineClient
from asyncrl.engines.pool import EnginePool
from asyncrl.messages.records import SamplingRequest

pytest_plugins = ["engine_under_test"]


@contract
async def test_sleep_says_how_much_it_freed_and_twice_is_once(server: Server, engine: EngineClient) -> None:
    await be_awake(engine, server)
    assert (await health(engine)).asleep == []
    kv = await engine.sleep(["kv"])
    assert (kv.num_bytes > 0) == server.traits.frees_memory
    assert kv.seconds >= 0.0
    assert (await health(engine)).asleep == ["kv"]
    assert (await engine.sleep(["kv"])).num_bytes == 0
    weights = await engine.sleep(BOTH)
    assert (weights.num_bytes > 0) == server.traits.frees_memory
    assert (await health(engine)).asleep == BOTH
    assert (await engine.wake(["weights"], restore=True)).num_bytes == weights.num_bytes
    assert (await engine.wake(["weights"], restore=True)).num_bytes == 0
    assert (await health(engine)).asleep == ["kv"]
    assert (await engine.wake(["kv"])).num_bytes == kv.num_bytes
    assert (await engine.wake(BOTH)).num_bytes == 0
    assert (await health(engine)).asleep == []


@contract
async def test_after_sleep_and_wake_with_the_same_weights_every_bit_of_the_answers_is_as_before(
    server: Server, engine: EngineClient
) -> None:
    version = await be_awake(engine, server)
    requests = [server.request(max_tokens=100, seed=seed, temperature=0.9) for seed in range(SLOTS + 2)]
    before = await asyncio.gather(*(engine.generate_segment(request) for request in requests))
    for parts in (BOTH[:1], BOTH):
        await engine.sleep(parts)
        await engine.wake(parts, restore=True)
        assert await asyncio.gather(*(engine.generate_segment(request) for request in requests)) == before
    await engine.sleep(BOTH)
    await engine.wake(["weights"])
    await push(engine, server, version + 1)
    await engine.wake(["kv"])
    after = await asyncio.gather(*(engine.generate_segment(request) for request in requests))
    for old, new in zip(before, after, strict=True):
        assert (new.token_ids, new.logprobs) == (old.token_ids, old.logprobs)
        assert versions_of(new) == [version + 1]
    await engine.sleep(["weights"])
    if server.traits.reads_again:
        await refused(engine.wake(["weights"], restore=True), "nowhere")
        assert (await health(engine)).asleep == ["weights"]
    else:
        await engine.wake(["weights"], restore=True)
        assert versions_of(await engine.generate_segment(server.request())) == [version + 1]


@contract
async def test_sleep_aborts_what_runs_and_what_queues_runs_after_the_wake(
    server: Server, engine: EngineClient
) -> None:
    version = await be_awake(engine, server)
    requests = [server.request(max_tokens=LONG, seed=seed) for seed in range(SLOTS)]
    running = [asyncio.create_task(engine.generate_segment(request)) for request in requests]
    await until_decoding(engine, SLOTS)
    queued = asyncio.create_task(engine.generate_segment(server.request(max_tokens=5)))
    await until(engine, lambda now: now.num_queued == 1)
    num_commits = engine.num_commits
    await engine.sleep(BOTH)
    assert engine.num_commits > num_commits, "so that the pool knows why its requests were interrupted"
    for answer in await asyncio.gather(*running):
        check_whole(answer, server)
        assert answer.finish_reason == "abort"
        assert 0 < len(answer.token_ids) < LONG
    late = asyncio.create_task(engine.generate_segment(server.request(max_tokens=6)))
    num_queued = 1 + server.traits.keeps_queue
    await until(engine, lambda now: now.num_queued == num_queued)
    await engine.wake(["weights"], restore=True)
    now = await health(engine)
    assert (now.num_running, now.num_queued, now.asleep) == (0, num_queued, ["kv"])
    await engine.wake(["kv"])
    answers = await asyncio.gather(queued, late)
    assert [len(answer.token_ids) for answer in answers] == [5 * server.traits.keeps_queue, 6]
    assert [versions_of(answer) for answer in answers[-num_queued:]] == [[version]] * num_queued


@contract
async def test_who_waits_at_a_sleeping_server_can_be_aborted_and_can_go_away(
    server: Server, engine: EngineClient
) -> None:
    await be_awake(engine, server)
    await engine.sleep(["kv"])
    waiting = asyncio.create_task(engine.generate_segment(server.request(request_id="waits")))
    await waits(engine, waiting)
    assert await abort(engine, ["waits"]) == ["waits"]
    assert ((await waiting).finish_reason, waiting.result().token_ids) == ("abort", [])
    gone = asyncio.create_task(engine.generate_segment(server.request()))
    await waits(engine, gone)
    gone.cancel()
    await until(engine, lambda now: now.num_queued == 0)
    await engine.wake(["kv"])


@contract
async def test_restore_brings_back_what_served_and_refuses_what_has_changed_meanwhile(
    server: Server, engine: EngineClient
) -> None:
    server.needs(server.traits.reads_files, "it reads no file")
    version = await be_awake(engine, server)
    before = await engine.generate_segment(server.request())
    await engine.sleep(BOTH)
    path = server.folder / f"staged-{version}.safetensors"
    good = path.read_bytes()
    flip_last_bit(path)
    if server.traits.reads_again:
        await refused(engine.wake(["weights"], restore=True), "digest")
        assert (await health(engine)).asleep == BOTH
        await engine.wake(["weights"])
        await refused(engine.wake(["weights"], restore=True), "digest")
        assert (await health(engine)).asleep == ["kv"]
        path.unlink()
        await refused(engine.wake(["weights"], restore=True), "no weights file|cannot read")
        path.write_bytes(good)
    await engine.wake(BOTH, restore=True)
    after = await engine.generate_segment(server.request())
    assert said(after) == said(before)


@contract
async def test_sleep_ends_a_commit_that_waited_for_what_ran(server: Server, engine: EngineClient) -> None:
    server.needs(server.traits.ends_at_once, "its requests end a moment after they were aborted")
    old = await be_awake(engine, server)
    running = asyncio.create_task(engine.generate_segment(server.request(max_tokens=LONG)))
    await until_decoding(engine, 1)
    digest = await prepare(engine, server, old + 1, scale=1.25)
    committing = asyncio.create_task(engine.commit(old + 1, digest, "wait"))
    queued = asyncio.create_task(engine.generate_segment(server.request(max_tokens=5)))
    await until(engine, lambda now: now.num_queued == 1)
    await engine.sleep(BOTH)
    assert (await committing).version == old + 1
    assert versions_of(await running) == [old]
    await engine.wake(BOTH, restore=True)
    assert versions_of(await queued) == [old + 1]


@contract
async def test_a_request_of_the_pool_lives_through_a_whole_turn(server: Server, engine: EngineClient) -> None:
    old = await be_awake(engine, server)
    pool = EnginePool([engine], slots=SLOTS)
    told: list[int] = []
    temperature = 1.0 if server.traits.resumes_draws else 0.0
    request = SamplingRequest(f"turn/{old}", (1, 2, 3), server.traits.waited, temperature=temperature, seed=9)
    running = asyncio.create_task(pool.generate(request, on_tokens=told.extend))
    await until(engine, lambda _: len(told) > 0)
    freed = await engine.sleep(BOTH)
    taken = await engine.wake(["weights"])
    chunks, digest = chunks_of(server, old + 1)
    for chunk in chunks:
        assert await engine.load_chunk(chunk) == chunk.digest
    await engine.commit(old + 1, digest, "abort")
    taken_kv = await engine.wake(["kv"])
    num_taken = taken.num_bytes + taken_kv.num_bytes
    assert num_taken <= freed.num_bytes
    assert (num_taken > 0) == server.traits.frees_memory
    completion = await running
    assert tuple(told) == completion.token_ids
    assert [span.version for span in completion.version_spans] == [old, old + 1]
    alone = await engine.generate_segment(
        server.request(max_tokens=server.traits.waited, seed=9, temperature=temperature)
    )
    assert completion.token_ids == tuple(alone.token_ids), "the same weights before and after"
