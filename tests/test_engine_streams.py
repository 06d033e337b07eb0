"""Streamed answers between an engine and its clients: errors in their place, and lines however the bytes are
cut.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, cast

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.http import Caller, CallGarbled, CallLost, CallRefused, Refused
from asyncrl.messages.engine_calls import GenerateChunk, GenerateRequest, GenerateResponse, Span
from asyncrl_servers.engine_app import ServedEngine, TokenStream, engine_app

CHUNKS = [
    GenerateChunk(token_ids=[1, 2], logprobs=[-1.0, -2.0], version=0),
    GenerateChunk(token_ids=[3], logprobs=[-0.5], version=1),
]
REST = Span(start=0, end=1, version=1)
LAST = GenerateResponse(
    request_id="r", token_ids=[4], logprobs=[-0.25], version_spans=[REST], finish_reason="abort"
)
LINES = [message.model_dump_json() for message in (*CHUNKS, LAST)]
REQUEST = GenerateRequest(request_id="r", prompt_ids=[1], max_tokens=9, stream=True)
Play = Callable[[TokenStream, "asyncio.Future[GenerateResponse]"], None]


class ScriptedEngine:
    """An engine whose one answer a test writes."""

    def __init__(self, play: Play) -> None:
        self._play = play

    def submit(self, _: GenerateRequest, stream: TokenStream | None) -> asyncio.Future[GenerateResponse]:
        answer: asyncio.Future[GenerateResponse] = asyncio.get_running_loop().create_future()
        assert stream is not None
        self._play(stream, answer)
        return answer


async def post(play: Play) -> tuple[int, list[str]]:
    app = engine_app(cast(ServedEngine, ScriptedEngine(play)))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://engine") as client:
        json = {"content-type": "application/json"}
        answer = await client.post("/generate", content=REQUEST.model_dump_json(), headers=json)
    return answer.status_code, answer.text.splitlines()


def test_an_error_before_the_first_token_has_its_status_and_one_after_it_is_the_last_line() -> None:
    def refuse(_: TokenStream, answer: asyncio.Future[GenerateResponse]) -> None:
        answer.set_exception(Refused(503, "full"))

    def break_off(stream: TokenStream, answer: asyncio.Future[GenerateResponse]) -> None:
        stream.put([(1, -1.0, 0), (2, -2.0, 0)])
        asyncio.get_running_loop().call_later(
            0.01, answer.set_exception, RuntimeError("the engine loop died")
        )

    def finish(stream: TokenStream, answer: asyncio.Future[GenerateResponse]) -> None:
        stream.put([(1, -1.0, 0), (2, -2.0, 0)])
        stream.put([(3, -0.5, 1)])
        spans = [Span(start=0, end=2, version=0), Span(start=2, end=4, version=1)]
        whole = {"token_ids": [1, 2, 3, 4], "logprobs": [-1.0, -2.0, -0.5, -0.25], "version_spans": spans}
        answer.set_result(LAST.model_copy(update=whole))

    async def story() -> None:
        assert await post(refuse) == (503, ['{"error":"full","rule":"","way_out":""}'])
        status, lines = await post(break_off)
        assert (status, lines[0], len(lines)) == (200, LINES[0], 2)
        assert "the engine loop died" in lines[1]
        assert await post(finish) == (200, LINES)

    asyncio.run(story())


@asynccontextmanager
async def answering(
    parts: list[bytes], *, status: str = "200 OK", breaks_off: bool = False
) -> AsyncIterator[Caller]:
    """A caller of a server that answers with these bytes, part by part."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(f"HTTP/1.1 {status}\r\nTransfer-Encoding: chunked\r\n\r\n".encode())
        for part in parts:
            if part:
                writer.write(f"{len(part):x}\r\n".encode() + part + b"\r\n")
                await writer.drain()
        if not breaks_off:
            writer.write(b"0\r\n\r\n")
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    caller = Caller("engine-0", f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", "secret")
    try:
        yield caller
    finally:
        await caller.aclose()
        server.close()
        await server.wait_closed()


async def read(parts: list[bytes], **how: Any) -> list[GenerateChunk | GenerateResponse]:
    async with answering(parts, **how) as caller:
        return [line async for line in caller.stream("/generate", REQUEST, GenerateChunk, GenerateResponse)]


WHOLE = "".join(f"{line}\n" for line in LINES).encode()


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(0, len(WHOLE)), max_size=12).map(sorted))
def test_lines_are_the_same_however_the_bytes_are_cut(cuts: list[int]) -> None:
    edges = [0, *cuts, len(WHOLE)]
    parts = [WHOLE[start:end] for start, end in zip(edges, edges[1:], strict=False)]
    assert asyncio.run(read(parts)) == [*CHUNKS, LAST]


def test_a_line_of_any_length_is_read() -> None:
    big = GenerateChunk(token_ids=list(range(100_000)), logprobs=[-1.0] * 100_000, version=0)
    body = f"{big.model_dump_json()}\n{LAST.model_dump_json()}\n".encode()
    assert asyncio.run(read([body[:70_000], body[70_000:]])) == [big, LAST]


def test_a_stream_that_breaks_off_is_lost_whichever_way_it_ends() -> None:
    with pytest.raises(CallLost, match="broke off before its last line"):
        asyncio.run(read([WHOLE[:30]]))
    with pytest.raises(CallLost, match="gave no answer to /generate"):
        asyncio.run(read([WHOLE[:30]], breaks_off=True))
    assert asyncio.run(read([WHOLE], breaks_off=True)) == [*CHUNKS, LAST], "all was said by then"


def test_a_line_that_is_no_message_is_garbled_and_an_error_is_a_refusal() -> None:
    with pytest.raises(CallGarbled, match="<html>"):
        asyncio.run(read([LINES[0].encode() + b"\n<html>\n"]))
    with pytest.raises(CallRefused, match="answered 500 to /generate: it died"):
        asyncio.run(read([LINES[0].encode() + b'\n{"error": "it died"}\n']))
    with pytest.raises(CallRefused, match="answered 503 to /generate: full"):
        asyncio.run(read([b'{"error": "full"}'], status="503 Service Unavailable"))
    with pytest.raises(CallGarbled, match="status 502"):
        asyncio.run(read([b"<html>"], status="502 Bad Gateway"))
