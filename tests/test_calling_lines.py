"""Lines of a streamed answer over HTTP, as vLLM's routes give them, however the bytes
are cut.
"""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.base.errors import ErrorBody
from asyncrl.base.http import Caller, CallGarbled, CallLost, CallRefused

LINES = [b"data: one", b"", b"data: " + b"x" * 70_000, b"data: [DONE]"]
WHOLE = b"".join(line + b"\n" for line in LINES)


async def read(
    parts: list[bytes], *, status: str = "200 OK", breaks_off: bool = False
) -> list[bytes]:
    """Return the lines of a server that answers with these bytes, part by part."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(
            f"HTTP/1.1 {status}\r\nTransfer-Encoding: chunked\r\n\r\n".encode()
        )
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
            return [
                line
                async for line in caller.lines("/generate", ErrorBody(error="asked"))
            ]


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(0, len(WHOLE)), max_size=12).map(sorted))
def test_lines_are_the_same_however_the_bytes_are_cut(cuts: list[int]) -> None:
    edges = [0, *cuts, len(WHOLE)]
    parts = [WHOLE[start:end] for start, end in zip(edges, edges[1:], strict=False)]
    assert asyncio.run(read(parts)) == LINES


@pytest.mark.parametrize(
    ("error", "body", "how"),
    [
        (CallLost, WHOLE[:30], {"breaks_off": True}),
        (CallRefused, b'{"error": "full"}', {"status": "503 Full"}),
        (CallGarbled, b"<html>", {"status": "502 Bad Gateway"}),
    ],
)
def test_how_a_stream_can_fail(
    error: type[Exception], body: bytes, how: dict[str, Any]
) -> None:
    with pytest.raises(error):
        asyncio.run(read([body], **how))
