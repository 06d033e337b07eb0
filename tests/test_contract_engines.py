"""The contract of every engine server: samples, logprobs, aborts, versions, swaps and
errors.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from contract_servers import LONG, SLOTS, VOCAB_SIZE, Server, another_client
from engine_contract import (
    abort,
    check_whole,
    contract,
    flip_last_bit,
    health,
    joined,
    prepare,
    refused,
    same_part,
    staged,
    until,
    until_decoding,
    versions_of,
)

from asyncrl.base.errors import RequestRefused
from asyncrl.engines.engine import EngineClient
from asyncrl.messages.engine_api import Interrupt
from asyncrl.messages.tokens import SegmentPart

pytest_plugins = ["engine_under_test"]
# one process imports the modules that they fork
pytestmark = pytest.mark.xdist_group("forks")


@contract
async def test_an_answer_is_whole_and_its_seed_decides_it(
    server: Server, engine: EngineClient
) -> None:
    budgets = (1, 2, 17, 60, 3, 8)
    requests = [
        server.request(max_tokens=budget, seed=budget, temperature=0.8)
        for budget in budgets
    ]
    answers = await asyncio.gather(
        *(engine.generate_segment(request) for request in requests)
    )
    for request, answer in zip(requests, answers, strict=True):
        check_whole(answer, server)
        assert answer.finish_reason == "length"
        assert len(answer.token_ids) == request.max_tokens
        assert versions_of(answer) == [engine.policy_version]
    first, again, other = [
        await engine.generate_segment(server.request(seed=seed))
        for seed in (11, 11, 12)
    ]
    assert (first.token_ids, first.logprobs) == (again.token_ids, again.logprobs)
    assert first.token_ids != other.token_ids, "20 draws from 50 tokens"


@contract
async def test_a_streamed_answer_is_bit_for_bit_the_other(
    server: Server, engine: EngineClient
) -> None:
    # A cut of 0.9999999 keeps the whole vocabulary.
    settings = [(1, 1.0, 1.0), (6, 1.0, 0.9999999), (2, 0.7, 1.0), (41, 0.0, 1.0)]
    settings += [(300, 1.0, 1.0), (310, 1.0, 0.9), (400, 1.3, 1.0)]
    requests = [
        server.request(
            max_tokens=tokens, seed=tokens, temperature=temperature, top_p=top_p
        )
        for tokens, temperature, top_p in settings
    ]
    whole = await asyncio.gather(
        *(engine.generate_segment(request) for request in requests)
    )
    came: list[list[SegmentPart]] = [[] for _ in requests]
    streams = (
        engine.generate_segment(one, on_chunk=to.append)
        for one, to in zip(requests, came, strict=True)
    )
    for expected, chunks, last in zip(
        whole, came, await asyncio.gather(*streams), strict=True
    ):
        check_whole(last, server)
        assert same_part(joined(chunks, last), expected)
        assert last.token_ids, (
            "the token that ends an answer comes with its finish_reason"
        )
    assert all(len(chunks) > 1 for chunks in came[4:])


@contract
async def test_a_request_that_cannot_be_served_is_refused(
    server: Server, engine: EngineClient
) -> None:
    most = server.traits.max_length
    too_long = {"prompt_ids": [1] * 10, "max_tokens": most - 9}
    unknown = [
        ({"prompt_ids": [1, token_id]}, str(token_id))
        for token_id in (-1, VOCAB_SIZE, 2**40)
    ]
    for fields, says in [(too_long, str(most + 1)), *unknown]:
        with pytest.raises(RequestRefused) as refusal:
            await engine.generate_segment(server.request(**fields))
        assert says in refusal.value.what
    fitting = server.request(prompt_ids=[1] * (most - 2), max_tokens=2)
    assert (await engine.generate_segment(fitting)).finish_reason == "length"


@contract
async def test_abort_ends_the_named_and_frees_their_slots(
    server: Server, engine: EngineClient
) -> None:
    requests = [server.request(max_tokens=LONG, seed=seed) for seed in range(SLOTS)]
    tasks = [
        asyncio.create_task(engine.generate_segment(request)) for request in requests
    ]
    await until_decoding(engine, SLOTS)
    waiting = asyncio.create_task(engine.generate_segment(server.request(max_tokens=5)))
    hopeless = asyncio.create_task(
        engine.generate_segment(server.request(request_id="hopeless"))
    )
    await until(engine, lambda now: now.num_queued == 2)
    assert await abort(engine, ["hopeless"]) == ["hopeless"]
    assert ((await hopeless).token_ids, (await hopeless).finish_reason) == ([], "abort")
    assert await abort(engine, [requests[1].request_id, "nobody"]) == [
        requests[1].request_id
    ]
    aborted = await tasks[1]
    check_whole(aborted, server)
    assert aborted.finish_reason == "abort"
    assert 0 < len(aborted.token_ids) < LONG
    assert len((await waiting).token_ids) == 5
    assert [task.done() for task in tasks] == [False, True, False, False]
    assert set(await abort(engine)) == {
        requests[index].request_id for index in (0, 2, 3)
    }
    await asyncio.gather(*tasks)
    again = await engine.generate_segment(
        server.request(max_tokens=len(aborted.token_ids), seed=1)
    )
    assert (aborted.token_ids, aborted.logprobs) == (again.token_ids, again.logprobs)


@pytest.mark.parametrize("on_chunk", [None, lambda _: None], ids=["whole", "streamed"])
@contract
async def test_a_client_that_leaves_frees_a_slot(
    server: Server, engine: EngineClient, on_chunk: Any
) -> None:
    async with another_client(server, engine) as leaver:
        request = server.request(max_tokens=LONG)
        task = asyncio.create_task(leaver.generate_segment(request, on_chunk=on_chunk))
        await until(engine, lambda now: now.num_running == 1)
        task.cancel()
        await asyncio.wait([task])
    await until(engine, lambda now: now.num_running == 0)


@pytest.mark.parametrize("interrupt", ["abort", "keep", "keep_kv", "wait"])
@contract
async def test_a_commit_between_tokens(
    server: Server, engine: EngineClient, interrupt: Interrupt
) -> None:
    old = engine.policy_version
    max_tokens = server.traits.waited if interrupt == "wait" else server.traits.kept
    chunks: list[list[SegmentPart]] = [[] for _ in range(SLOTS)]
    tasks = []
    for seed in range(SLOTS):  # every second one is streamed
        on_chunk = chunks[seed].append if seed % 2 else None
        request = server.request(max_tokens=max_tokens, seed=seed)
        tasks.append(
            asyncio.create_task(engine.generate_segment(request, on_chunk=on_chunk))
        )
    await until_decoding(engine, SLOTS)
    queued = asyncio.create_task(engine.generate_segment(server.request(max_tokens=5)))
    await until(engine, lambda now: now.num_queued == 1 and all(chunks[1::2]))
    digest = await prepare(engine, server, old + 1, scale=1.25)
    swapped = await engine.commit(old + 1, digest, interrupt)
    assert (swapped.version, swapped.digest) == (old + 1, digest)
    assert swapped.pause_s >= 0.0
    assert engine.policy_version == (await health(engine)).policy_version == old + 1
    num_aborted = SLOTS + server.traits.aborts_queued
    expected = {"abort": num_aborted, "keep": SLOTS, "keep_kv": SLOTS, "wait": 0}
    assert swapped.num_interrupted == expected[interrupt]
    for seed, task in enumerate(tasks):
        answer = joined(chunks[seed], await task)
        check_whole(answer, server)
        is_ended = interrupt == "abort" or (
            interrupt.startswith("keep")
            and seed % 2 == 1
            and not server.traits.keeps_streams
        )
        is_kept = interrupt.startswith("keep") and not is_ended
        assert versions_of(answer) == ([old, old + 1] if is_kept else [old])
        assert answer.finish_reason == ("abort" if is_ended else "length")
        assert (len(answer.token_ids) == max_tokens) == (not is_ended)
    is_aborted = interrupt == "abort" and server.traits.aborts_queued
    assert versions_of(await queued) == ([] if is_aborted else [old + 1])
    assert versions_of(await engine.generate_segment(server.request())) == [old + 1]


@contract
async def test_a_commit_of_other_or_older_weights_is_refused(
    server: Server, engine: EngineClient
) -> None:
    old = engine.policy_version
    digest = await prepare(engine, server, old + 1)
    await engine.commit(old + 1, digest, "abort")
    assert (await engine.commit(old + 1, digest, "abort")).num_interrupted == 0, (
        "the same again is no error"
    )
    before = await engine.generate_segment(server.request())
    await prepare(engine, server, old + 2, scale=2.0)
    for version, wrong in ((old + 1, "other"), (old, digest), (old + 2, "0123abcd")):
        await refused(engine.commit(version, wrong, "abort"), wrong)
    if server.traits.has_weights:
        manifest = staged(server, old + 2)
        flip_last_bit(Path(manifest.path))
        await refused(
            engine.prepare(manifest), f"digest [0-9a-f]{{32}}.* {manifest.digest}"
        )
        await refused(engine.commit(old + 2, manifest.digest, "abort"), "nothing")
        missing = manifest.model_copy(
            update={"path": str(server.folder / "nowhere.safetensors")}
        )
        await refused(engine.prepare(missing), "nowhere")
    after = await engine.generate_segment(server.request())
    assert (after.token_ids, after.logprobs) == (before.token_ids, before.logprobs)
    assert engine.policy_version == (await health(engine)).policy_version == old + 1
