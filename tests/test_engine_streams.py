"""Streamed answers between an engine and its clients: errors in their place, and lines however the bytes are
cut.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import aclosing
from typing import Any
from unittest.mock import Mock

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.http import Caller, CallGarbled, CallLost, CallRefused
from asyncrl.messages.calls import GenerateChunk, GenerateRequest, GenerateResponse, Span
from asyncrl.serving import Refused
from asyncrl_servers.engine_app import TokenStream, engine_app

CHUNKS = [
    GenerateChunk(token_ids=[1, 2], logprobs=[-1.0, -2.0], version=0),
    GenerateChunk(token_ids=[3], logprobs=[-0.5], version=1),
]
REST = Span(start=0, end=1, version=1)
ENDED: dict[str, Any] = {"version_spans": [REST], "finish_reason": "abort"}
LAST = GenerateResponse(request_id="r", token_ids=[4], logprobs=[-0.25], **ENDED)
LINES = [message.model_dump_json() for message in (*CHUNKS, LAST)]
REQUEST = GenerateRequest(request_id="r", prompt_ids=[1], max_tokens=9, stream=True)
Play = Callable[[TokenStream, "asyncio.Future[GenerateResponse]"], None]


async def post(play: Play) -> tuple[int, list[str]]:
    """What an engine answers that gives its answer by `play`."""
    answer: asyncio.Future[GenerateResponse] = asyncio.get_running_loop().create_future()

    def submit(_: GenerateRequest, stream: TokenStream) -> asyncio.Future[GenerateResponse]:
        play(stream, answer)
        return answer

    app = engine_app(Mock(submit=submit))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://engine") as client:
        response = await client.post("/generate", json=REQUEST.model_dump(mode="json"))
    return response.status_code, response.text.splitlines()


@pytest.mark.asyncio
async def test_an_error_before_the_first_token_has_its_status_and_one_after_it_is_the_last_line() -> None:
    def break_off(stream: TokenStream, answer: asyncio.Future[GenerateResponse]) -> None:
        stream.put([(1, -1.0, 0), (2, -2.0, 0)])
        error = RuntimeError("the engine loop died")
        asyncio.get_running_loop().call_later(0.01, answer.set_exception, error)

    def finish(stream: TokenStream, answer: asyncio.Future[GenerateResponse]) -> None:
        stream.put([(1, -1.0, 0), (2, -2.0, 0)])
        stream.put([(3, -0.5, 1)])
        spans = [Span(start=0, end=2, version=0), Span(start=2, end=4, version=1)]
        whole = {"token_ids": [1, 2, 3, 4], "logprobs": [-1.0, -2.0, -0.5, -0.25], "version_spans": spans}
        answer.set_result(LAST.model_copy(update=whole))

    refused = await post(lambda _, answer: answer.set_exception(Refused(503, "full")))
    assert refused == (503, ['{"error":"full","rule":"","way_out":""}'])
    status, lines = await post(break_off)
    assert (status, lines[0], len(lines)) == (200, LINES[0], 2)
    assert "the engine loop died" in lines[1]
    assert await post(finish) == (200, LINES)


async def read(
    parts: list[bytes], *, status: str = "200 OK", breaks_off: bool = False
) -> list[GenerateChunk | GenerateResponse]:
    """From a server that answers with these bytes, part by part."""

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

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        async with aclosing(Caller("engine-0", url, "secret")) as caller:
            lines = caller.stream("/generate", REQUEST, GenerateChunk, GenerateResponse)
            return [line async for line in lines]


WHOLE = "".join(f"{line}\n" for line in LINES).encode()


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(0, len(WHOLE)), max_size=12).map(sorted))
def test_lines_are_the_same_however_the_bytes_are_cut(cuts: list[int]) -> None:
    edges = [0, *cuts, len(WHOLE)]
    parts = [WHOLE[start:end] for start, end in zip(edges, edges[1:], strict=False)]
    assert asyncio.run(read(parts)) == [*CHUNKS, LAST]


def test_a_line_of_any_length_is_read_and_what_was_all_said_may_break_off() -> None:
    big = GenerateChunk(token_ids=list(range(100_000)), logprobs=[-1.0] * 100_000, version=0)
    body = f"{big.model_dump_json()}\n{LAST.model_dump_json()}\n".encode()
    assert asyncio.run(read([body[:70_000], body[70_000:]], breaks_off=True)) == [big, LAST]


FIRST = LINES[0].encode()


@pytest.mark.parametrize(
    ("error", "said", "body", "how"),
    [
        (CallLost, "broke off before its last line", WHOLE[:30], {}),
        (CallLost, "gave no answer to /generate", WHOLE[:30], {"breaks_off": True}),
        (CallGarbled, "<html>", FIRST + b"\n<html>\n", {}),
        (CallRefused, "answered 500 to /generate: it died", FIRST + b'\n{"error": "it died"}\n', {}),
        (CallRefused, "answered 503 to /generate: full", b'{"error": "full"}', {"status": "503 Full"}),
        (CallGarbled, "status 502", b"<html>", {"status": "502 Bad Gateway"}),
    ],
)
def test_how_a_stream_can_fail(error: type[Exception], said: str, body: bytes, how: dict[str, Any]) -> None:
    """One that breaks off is lost, a line that is no message is garbled, and an error is a refusal."""
    with pytest.raises(error, match=said):
        asyncio.run(read([body], **how))
