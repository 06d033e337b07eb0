"""The contract of every engine server: sleep, wake and pushes in chunks."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from contract_servers import SLOTS, Server
from engine_contract import (
    BOTH,
    abort,
    be_awake,
    check_whole,
    chunks_of,
    contract,
    health,
    load,
    prepare,
    push,
    refused,
    until,
    until_decoding,
    versions_of,
    waits,
)

from asyncrl.engines.engine import EngineClient

pytest_plugins = ["engine_under_test"]
# one process imports the modules that they fork
pytestmark = pytest.mark.xdist_group("forks")


@contract
async def test_after_sleep_wake_and_push_every_bit_is_as_before(
    server: Server, engine: EngineClient
) -> None:
    version = await be_awake(engine, server)
    requests = [
        server.request(max_tokens=100, seed=seed, temperature=0.9)
        for seed in range(SLOTS + 2)
    ]
    before = await asyncio.gather(
        *(engine.generate_segment(request) for request in requests)
    )
    for pushed in (version, version + 1):
        slept = await engine.sleep()
        assert (slept.num_bytes > 0) == server.traits.frees_memory
        assert ((await engine.sleep()).num_bytes, (await health(engine)).asleep) == (
            0,
            BOTH,
        )
        weights = await engine.wake(["weights"])
        assert (
            (await engine.wake(["weights"])).num_bytes,
            (await health(engine)).asleep,
        ) == (0, ["kv"])
        await push(engine, server, pushed)
        assert (
            await engine.wake(["kv"])
        ).num_bytes + weights.num_bytes == slept.num_bytes
        after = await asyncio.gather(
            *(engine.generate_segment(request) for request in requests)
        )
        for old, new in zip(before, after, strict=True):
            assert (new.token_ids, new.logprobs) == (old.token_ids, old.logprobs)
            assert versions_of(new) == [pushed]


@contract
async def test_sleep_aborts_running_and_keeps_queued_requests(
    server: Server, engine: EngineClient
) -> None:
    version = await be_awake(engine, server)
    requests = [
        server.request(max_tokens=server.traits.long, seed=seed)
        for seed in range(SLOTS)
    ]
    running = [
        asyncio.create_task(engine.generate_segment(request)) for request in requests
    ]
    await until_decoding(engine, SLOTS)
    queued = asyncio.create_task(engine.generate_segment(server.request(max_tokens=5)))
    await until(engine, lambda now: now.num_queued == 1)
    await engine.sleep()
    for answer in await asyncio.gather(*running):
        check_whole(answer, server)
        assert answer.finish_reason == "abort"
        assert 0 < len(answer.token_ids) < server.traits.long
    late = asyncio.create_task(engine.generate_segment(server.request(max_tokens=6)))
    ended = asyncio.create_task(
        engine.generate_segment(server.request(request_id="ended"))
    )
    gone = asyncio.create_task(engine.generate_segment(server.request()))
    num_queued = 1 + server.traits.keeps_queue
    await until(engine, lambda now: now.num_queued == num_queued + 2)
    assert await abort(engine, ["ended"]) == ["ended"]
    assert ((await ended).finish_reason, ended.result().token_ids) == ("abort", [])
    gone.cancel()
    await until(engine, lambda now: now.num_queued == num_queued)
    await engine.wake(["weights"])
    await push(engine, server, version)
    now = await health(engine)
    assert (now.num_running, now.num_queued, now.asleep) == (0, num_queued, ["kv"])
    await engine.wake(["kv"])
    answers = await asyncio.gather(queued, late)
    assert [len(answer.token_ids) for answer in answers] == [
        5 * server.traits.keeps_queue,
        6,
    ]
    assert [versions_of(answer) for answer in answers[-num_queued:]] == [
        [version]
    ] * num_queued


@contract
async def test_only_a_whole_push_in_order_is_served(
    server: Server, engine: EngineClient
) -> None:
    if not server.traits.has_weights:
        pytest.skip("it believes the announcement")
    old = await be_awake(engine, server) + 1
    await engine.commit(old, await prepare(engine, server, old, scale=1.5), "abort")
    expected = await engine.generate_segment(server.request(max_tokens=60))
    await engine.sleep()
    await engine.wake(BOTH)
    waiting = asyncio.create_task(
        engine.generate_segment(server.request(max_tokens=60))
    )
    (first, last), digest = chunks_of(server, old + 1, scale=1.5)
    await refused(engine.commit(old + 1, digest, "abort"))
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"digest": "0" * 32}, first.digest),
        ({"num_tensors": 99}, "announced were 99"),
        ({"path": str(server.folder / "nowhere.safetensors")}, "nowhere"),
    ]
    for changes, match in wrong:
        await refused(engine.load_chunk(first.model_copy(update=changes)), match)
        await refused(engine.load_chunk(last), "loaded are 0")
    await load(engine, first)
    await refused(engine.commit(old + 1, digest, "abort"))
    await load(engine, first)
    await refused(engine.load_chunk(last.model_copy(update={"version": old + 2})))
    for committed in ("0" * 32, digest):
        for chunk in (first, last):
            await load(engine, chunk)
            await waits(engine, waiting)
        if committed != digest:
            await refused(engine.commit(old + 1, committed, "abort"), digest)
    assert engine.policy_version == (await health(engine)).policy_version == old
    answered = await engine.commit(old + 1, digest, "abort")
    assert (answered.digest, answered.num_interrupted) == (digest, 0), (
        "what waits never ran"
    )
    answer = await waiting
    assert versions_of(answer) == [old + 1]
    assert (answer.token_ids, answer.logprobs) == (
        expected.token_ids,
        expected.logprobs,
    )
    assert (await engine.commit(old + 1, digest, "abort")).num_interrupted == 0, (
        "the same again is no error"
    )
