"""Stories and checks that the contract tests of engine servers share."""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from contract_servers import VOCAB_SIZE, Server, client_of
from safetensors.numpy import save_file
from token_cases import sampled_tokens

from asyncrl.base.errors import EngineError, EngineLost
from asyncrl.engines.engine import EngineClient
from asyncrl.messages.codec import spans_between
from asyncrl.messages.engine_api import EngineHealth, EnginePart
from asyncrl.messages.tokens import SegmentPart
from asyncrl.messages.trainer_api import ExportChunkResponse, ExportResponse
from asyncrl.weights.tensor_files import digest_tensors

BOTH: list[EnginePart] = ["kv", "weights"]
LIMIT_S = 280.0


def run(server: Server, story: Callable[[EngineClient], Awaitable[None]]) -> None:
    """Run the story, abort its leftovers and wake the server for the next one."""

    async def within() -> None:
        async with asyncio.timeout(LIMIT_S), client_of(server) as engine:
            is_told = False
            try:
                await story(engine)
                is_told = True
            finally:
                await abort(engine)
                if not is_told or (await health(engine)).asleep:
                    await be_awake(engine, server)

    server.runner.run(within())


def contract(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """A test that is a story of a server and of a client of it; pytest gives the
    server.
    """

    @functools.wraps(test)
    def told(server: Server, **values: Any) -> None:
        run(server, lambda engine: test(server, engine, **values))

    signature = inspect.signature(test)
    parameters = [one for name, one in signature.parameters.items() if name != "engine"]
    told.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    return told


async def health(engine: EngineClient) -> EngineHealth:
    return await engine.health(timeout_s=60)


async def abort(
    engine: EngineClient, request_ids: list[str] | None = None
) -> list[str]:
    return await engine.abort(request_ids, timeout_s=60)


async def until(
    engine: EngineClient, is_so: Callable[[EngineHealth], bool]
) -> EngineHealth:
    """Ask for its health until it says so; the story's time limit ends it otherwise."""
    while True:
        answer = await health(engine)
        if is_so(answer):
            return answer
        await asyncio.sleep(0.0005)


async def until_decoding(engine: EngineClient, num_running: int) -> None:
    """Wait until n requests run and decoding has continued for a while."""
    before = await until(engine, lambda now: now.num_running == num_running)
    now = await until(
        engine,
        lambda now: now.decode_s > before.decode_s + 0.02 or now.num_running == 0,
    )
    assert now.num_running == num_running, (
        "they ended before the story could interrupt them"
    )


async def prepare(
    engine: EngineClient, server: Server, version: int, scale: float = 1.0
) -> str:
    """Stage the server's weights times `scale`; returns their digest."""
    manifest = staged(server, version, scale)
    assert await engine.prepare(manifest) == manifest.digest
    return manifest.digest


def _write(
    server: Server, name: str, scale: float, names: Sequence[str] | None = None
) -> dict[str, Any]:
    """Write the server's weights times `scale`, or only these names. Return the fields
    of a manifest.
    """
    weights = {
        key: np.ascontiguousarray((server.weights[key] * scale).astype(np.float32))
        for key in names or server.weights
    }
    path = server.folder / f"{name}.safetensors"
    save_file(weights, path)
    digest = digest_tensors(
        {key: torch.from_numpy(array) for key, array in weights.items()}
    )
    sizes = {
        "num_tensors": len(weights),
        "num_bytes": sum(array.nbytes for array in weights.values()),
    }
    return {"path": str(path), "digest": digest, **sizes}


def staged(server: Server, version: int, scale: float = 1.0) -> ExportResponse:
    """The server's weights times `scale` in a file, and what must be in it."""
    return ExportResponse(version=version, **_write(server, f"staged-{version}", scale))


def chunks_of(
    server: Server, version: int, *, scale: float = 1.0
) -> tuple[list[ExportChunkResponse], str]:
    """A push of the server's weights times `scale`, in two files, and the digest of
    all.
    """
    whole = _write(server, "whole", scale)["digest"]
    chunks = []
    for index in range(2):
        part = _write(
            server, f"chunk-{version}-{index}", scale, list(server.weights)[index::2]
        )
        part |= {"version": version, "index": index, "is_last": index == 1}
        chunks.append(
            ExportChunkResponse(**part, **({"whole_digest": whole} if index else {}))
        )
    return chunks, whole


async def load(engine: EngineClient, chunk: ExportChunkResponse) -> None:
    """A chunk that is accepted."""
    assert await engine.load_chunk(chunk) == chunk.digest


async def push(engine: EngineClient, server: Server, version: int, **how: Any) -> None:
    """All chunks and the commit; there is nothing to interrupt."""
    chunks, digest = chunks_of(server, version, **how)
    for chunk in chunks:
        await load(engine, chunk)
    committed = await engine.commit(version, digest, "abort")
    assert (committed.version, committed.digest, committed.num_interrupted) == (
        version,
        digest,
        0,
    )


async def waits(engine: EngineClient, task: asyncio.Task[Any]) -> None:
    """The request is at the server and does not run."""
    await until(engine, lambda now: now.num_queued == 1)
    for _ in range(5):
        now = await health(engine)
        assert (now.num_running, now.num_queued) == (0, 1)
    assert not task.done()


async def be_awake(engine: EngineClient, server: Server) -> int:
    """Wake the server and commit weights of scale 1. Return their version."""
    await engine.wake(BOTH)
    version = engine.policy_version + 1
    await engine.commit(version, await prepare(engine, server, version), "abort")
    return version


async def refused(call: Awaitable[object], match: str | None = None) -> None:
    """The server says no, and lives."""
    with pytest.raises(EngineError, match=match) as refusal:
        await call
    assert not isinstance(refusal.value, EngineLost)


def flip_last_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def check_whole(answer: SegmentPart, server: Server) -> None:
    """One logprob a token, ids that exist, and version spans that cover every token
    once, in order of versions.
    """
    assert len(answer.logprobs) == len(answer.token_ids)
    assert all(0 <= token < VOCAB_SIZE for token in answer.token_ids)
    assert all(
        logprob <= 0.0 and logprob == float(np.float32(logprob))
        for logprob in answer.logprobs
    )
    covered = [
        token for span in answer.sampled.spans for token in range(span.start, span.end)
    ]
    assert covered == list(range(len(answer.token_ids)))
    assert (versions := versions_of(answer)) == sorted(set(versions))


def joined(chunks: list[SegmentPart], last: SegmentPart) -> SegmentPart:
    parts = [*chunks, last]
    token_ids = [token for part in parts for token in part.token_ids]
    logprobs = [logprob for part in parts for logprob in part.logprobs]
    versions = [
        span.version
        for part in parts
        for span in part.sampled.spans
        for _ in range(span.start, span.end)
    ]
    marks = [
        (at, version)
        for at, version in enumerate(versions)
        if at == 0 or versions[at - 1] != version
    ]
    spans = [*spans_between(marks, 0, len(versions))]
    return SegmentPart(sampled_tokens(token_ids, logprobs, spans), last.finish_reason)


def same_part(one: SegmentPart, other: SegmentPart) -> bool:
    values = [
        (part.token_ids, part.logprobs, part.sampled.spans, part.finish_reason)
        for part in (one, other)
    ]
    return values[0] == values[1]


def versions_of(answer: SegmentPart) -> list[int]:
    """The version of each span."""
    return [span.version for span in answer.sampled.spans]
