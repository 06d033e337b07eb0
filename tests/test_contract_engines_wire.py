"""What our own engine servers say on the wire: statuses, the secret, specs, and their end. Behind an
EngineClient none of it shows.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from engine_contract import chunks_of, flip_last_bit, generate, staged
from engine_kinds import LONG, MAX_LENGTH, OURS, VOCAB_SIZE, Server, caller_of, server_of, spec_of
from engine_processes import SECRET, engine_process

from asyncrl.http import Caller, CallLost, CallRefused
from asyncrl.messages.base import ErrorBody, Moved, find_fatal
from asyncrl.messages.engine_calls import (
    AbortRequest,
    AbortResponse,
    CommitRequest,
    CommitResponse,
    EngineHealth,
    GenerateChunk,
    GenerateRequest,
    GenerateResponse,
    LoadChunkRequest,
    LoadChunkResponse,
    PrepareRequest,
    PrepareResponse,
    SleepRequest,
    WakeRequest,
)
from asyncrl.testing.fake_engine import FakeEngineServer
from asyncrl.testing.virtual_time import run_virtual

pytest_plugins = ["engine_under_test"]
of_ours = pytest.mark.parametrize("server", OURS, indirect=True)


def run(server: Server, story: Callable[[Caller], Awaitable[None]]) -> None:
    """Tell the story to a Caller of the server."""

    async def within() -> None:
        caller = caller_of(server)
        async with asyncio.timeout(120):
            try:
                await story(caller)
            finally:
                await abort_all(caller)
                await caller.aclose()

    (run_virtual if server.runner is None else server.runner.run)(within())


async def abort_all(caller: Caller) -> None:
    await caller.post("/abort", AbortRequest(), AbortResponse, timeout_s=60)


async def one_runs(caller: Caller) -> int:
    """Wait for a request that runs; returns the version that serves."""
    while (now := await caller.get("/health", EngineHealth, timeout_s=60)).num_running == 0:
        if isinstance(caller, FakeEngineServer):
            await asyncio.sleep(caller.decode_s / 2)
    return now.policy_version


async def stream(caller: Caller, request: GenerateRequest) -> GenerateResponse:
    """The last line of a streamed answer."""
    streamed = request.model_copy(update={"stream": True})
    async with contextlib.aclosing(
        caller.stream("/generate", streamed, GenerateChunk, GenerateResponse)
    ) as lines:
        return [line async for line in lines if isinstance(line, GenerateResponse)][0]


async def refusal(status: int, call: Awaitable[object]) -> ErrorBody:
    with pytest.raises(CallRefused) as refused:
        await call
    assert refused.value.status == status
    return refused.value.body


@of_ours
def test_without_the_secret_nothing_is_answered(server: Server) -> None:
    async def story(_: Caller) -> None:
        stranger = Caller("stranger", server.child.url, "a guess")
        try:
            await refusal(401, generate(stranger, server.request()))
        finally:
            await stranger.aclose()

    run(server, story)


@of_ours
def test_a_request_that_can_never_run_is_answered_400_with_the_rule_and_the_way_out(server: Server) -> None:
    async def story(caller: Caller) -> None:
        too_long = await refusal(
            400, generate(caller, server.request(prompt_ids=[1] * 10, max_tokens=MAX_LENGTH - 9))
        )
        assert too_long.way_out
        unknown = await refusal(400, generate(caller, server.request(prompt_ids=[1, VOCAB_SIZE])))
        assert f"0..{VOCAB_SIZE - 1}" in unknown.rule
        resumed = await refusal(400, generate(caller, server.request(num_resumed=4)))
        assert "num_resumed=4 of 3" in resumed.error

    run(server, story)


@of_ours
def test_what_does_not_go_with_what_is_there_is_answered_409(server: Server) -> None:
    async def story(caller: Caller) -> None:
        first = asyncio.create_task(generate(caller, server.request(request_id="twice", max_tokens=LONG)))
        old = await one_runs(caller)
        assert (
            "here already" in (await refusal(409, generate(caller, server.request(request_id="twice")))).error
        )
        await abort_all(caller)
        await first
        manifest = staged(server, old + 1)
        prepare = PrepareRequest(
            version=old + 1,
            path=manifest.path,
            digest=manifest.digest,
            num_tensors=manifest.num_tensors,
            num_bytes=manifest.num_bytes,
        )
        assert await caller.post("/prepare", prepare, PrepareResponse, timeout_s=60) == PrepareResponse(
            version=old + 1, digest=manifest.digest
        )
        for version, digest in ((old + 1, "0123abcd"), (old + 2, manifest.digest)):
            commit = CommitRequest(version=version, digest=digest)
            body = await refusal(409, caller.post("/commit", commit, CommitResponse, timeout_s=60))
            assert digest in body.error
            assert body.way_out
        flip_last_bit(Path(manifest.path))
        assert (
            manifest.digest
            in (await refusal(409, caller.post("/prepare", prepare, PrepareResponse, timeout_s=60))).error
        )
        missing = prepare.model_copy(update={"path": str(server.folder / "nowhere.safetensors")})
        assert (
            "nowhere"
            in (await refusal(400, caller.post("/prepare", missing, PrepareResponse, timeout_s=60))).error
        )

    run(server, story)


@of_ours
def test_a_chunk_that_cannot_come_is_answered_409_and_one_that_cannot_be_read_400(server: Server) -> None:
    async def story(caller: Caller) -> None:
        health = await caller.get("/health", EngineHealth, timeout_s=60)
        (first, last), digest = chunks_of(server, health.policy_version + 1)

        async def load(chunk: LoadChunkRequest) -> LoadChunkResponse:
            return await caller.post("/load_chunk", chunk, LoadChunkResponse, timeout_s=60)

        chunks = [
            LoadChunkRequest(**chunk.model_dump(include=set(LoadChunkRequest.model_fields)))
            for chunk in (first, last)
        ]
        await refusal(409, load(chunks[0]))
        await caller.post("/sleep", SleepRequest(parts=["weights"]), Moved, timeout_s=60)
        await refusal(409, load(chunks[0]))
        await caller.post("/wake", WakeRequest(parts=["weights"]), Moved, timeout_s=60)
        await refusal(409, load(chunks[1]))
        await refusal(409, load(chunks[0].model_copy(update={"digest": "0" * 32})))
        await refusal(
            400, load(chunks[0].model_copy(update={"path": str(server.folder / "nowhere.safetensors")}))
        )
        commit = CommitRequest(version=first.version, digest=digest)
        await refusal(409, caller.post("/commit", commit, CommitResponse, timeout_s=60))
        for chunk in chunks:
            assert await load(chunk) == LoadChunkResponse(
                version=chunk.version, index=chunk.index, digest=chunk.digest
            )
        await caller.post("/commit", commit, CommitResponse, timeout_s=60)
        await caller.post("/sleep", SleepRequest(parts=["weights"]), Moved, timeout_s=60)
        await refusal(
            409, caller.post("/wake", WakeRequest(parts=["weights"], restore=True), Moved, timeout_s=60)
        )
        await caller.post("/wake", WakeRequest(parts=["weights"]), Moved, timeout_s=60)
        for chunk in chunks:
            await load(chunk)
        await caller.post("/commit", commit, CommitResponse, timeout_s=60)

    run(server, story)


@pytest.mark.parametrize("server", [*OURS, "fake"], indirect=True)
def test_a_request_that_is_refused_has_its_status_although_it_asked_for_a_stream(server: Server) -> None:
    async def story(caller: Caller) -> None:
        await refusal(400, stream(caller, server.request(prompt_ids=[1] * 10, max_tokens=MAX_LENGTH)))
        first = asyncio.create_task(generate(caller, server.request(request_id="twice", max_tokens=LONG)))
        await one_runs(caller)
        twice = await refusal(
            400 if server.kind == "fake" else 409, stream(caller, server.request(request_id="twice"))
        )
        assert "twice" in twice.error
        await abort_all(caller)
        assert (await first).finish_reason == "abort"

    run(server, story)


@pytest.mark.parametrize("kind", OURS)
def test_the_server_ends_when_its_parent_is_gone_whatever_runs(kind: str, tmp_path: Path) -> None:
    with engine_process(kind, spec_of(kind, tmp_path), tmp_path) as child:
        server = server_of(kind, child, tmp_path)

        async def story() -> None:
            caller = Caller(kind, child.url, SECRET)
            try:
                task = asyncio.create_task(generate(caller, server.request(max_tokens=LONG)))
                await one_runs(caller)
                assert child.process.stdin is not None
                child.process.stdin.close()
                with pytest.raises(CallLost):
                    await task
            finally:
                await caller.aclose()

        asyncio.run(story())
        assert child.process.wait(timeout=60) == 3


@pytest.mark.parametrize("kind", OURS)
def test_an_unknown_key_in_the_spec_ends_the_server_with_its_name(kind: str, tmp_path: Path) -> None:
    with engine_process(kind, spec_of(kind, tmp_path, sluts=3), tmp_path) as child:
        assert child.process.wait(timeout=60) == 1
        fatal = find_fatal(child.read_log())
        assert fatal is not None
        assert "sluts" in fatal.error
        assert json.loads((tmp_path / "spec.json").read_text())["sluts"] == 3
