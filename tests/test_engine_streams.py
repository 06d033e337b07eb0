"""Streams between an engine's thread and its clients: few wake-ups, errors in their place, and lines however
the bytes are cut.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import pytest
from engine_in_process import make_qwen3, make_request, make_spec
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.http import Caller, CallGarbled, CallLost, CallRefused, Refused
from asyncrl.messages.engine_calls import GenerateChunk, GenerateRequest, GenerateResponse
from asyncrl_servers.embedded import decode_loop as embedded_engine
from asyncrl_servers.embedded.build_engine import build_engine
from asyncrl_servers.engine_app import Engine, engine_app
from asyncrl_servers.streaming import TokenStream

CHUNKS = [
    GenerateChunk(token_ids=[1, 2], logprobs=[-1.0, -2.0], version=0),
    GenerateChunk(token_ids=[3], logprobs=[-0.5], version=1),
]
LAST = GenerateResponse(request_id="r", token_ids=[], logprobs=[], version_spans=[], finish_reason="abort")
LINES = [*(message.model_dump_json() for message in (*CHUNKS, LAST))]


# ---- out of the model's thread


def test_all_streams_together_wake_the_event_loop_at_most_once_a_decode_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embedded_engine, "TELL_S", 0.0)
    engine = build_engine(make_spec(make_qwen3(tmp_path / "model", num_hidden_layers=1)))

    async def story() -> None:
        loop = asyncio.get_running_loop()
        wakes: list[object] = []

        class Counting:
            def call_soon_threadsafe(self, *given: Any) -> None:
                wakes.append(given)
                loop.call_soon_threadsafe(*given)

        counting = cast(asyncio.AbstractEventLoop, Counting())
        streams = [TokenStream() for _ in range(3)]
        for stream in streams:
            stream.loop = counting
        answers = [
            engine.submit(make_request(f"r{index}", max_tokens=30), stream)
            for index, stream in enumerate(streams)
        ]
        plain = engine.submit(make_request("plain", max_tokens=30))
        for turn in range(1, 10):
            engine.turn()
            assert len(wakes) == turn
        while not plain.done():
            engine.turn()
        await asyncio.sleep(0)
        for stream, answer in zip(streams, answers, strict=True):
            told = stream.take_nowait()
            assert [chunk.version for chunk in told] == [0], (
                "neighbours of one version are one chunk by the time they are taken"
            )
            last = answer.result(timeout=0)
            assert told[0].token_ids + last.token_ids == plain.result(timeout=0).token_ids
            assert told[0].logprobs + last.logprobs == plain.result(timeout=0).logprobs
            assert len(last.token_ids) == 1
        num_wakes = len(wakes)
        engine.submit(make_request("alone", max_tokens=5))
        for _ in range(6):
            engine.turn()
        assert len(wakes) == num_wakes, "who does not stream costs nothing"

    asyncio.run(story())


# ---- into the answer


class ScriptedEngine:
    """An engine whose one answer a test writes."""

    def __init__(self, play: Callable[[TokenStream, asyncio.Future[GenerateResponse]], None]) -> None:
        self._play = play
        self.aborted: list[list[str] | None] = []

    def submit(
        self, request: GenerateRequest, stream: TokenStream | None = None
    ) -> asyncio.Future[GenerateResponse]:
        answer: asyncio.Future[GenerateResponse] = asyncio.get_running_loop().create_future()
        assert stream is not None
        self._play(stream, answer)
        return answer

    def abort(self, request_ids: list[str] | None) -> None:
        self.aborted.append(request_ids)


async def post(
    play: Callable[[TokenStream, asyncio.Future[GenerateResponse]], None],
) -> tuple[int, list[str]]:
    import httpx

    app = engine_app(cast(Engine, ScriptedEngine(play)))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://engine") as client:
        body = GenerateRequest(request_id="r", prompt_ids=[1], max_tokens=9, stream=True)
        answer = await client.post(
            "/generate", content=body.model_dump_json(), headers={"content-type": "application/json"}
        )
    return answer.status_code, answer.text.splitlines()


def test_an_error_before_the_first_token_has_its_status_and_one_after_it_is_the_last_line() -> None:
    def refuse(_: TokenStream, answer: asyncio.Future[GenerateResponse]) -> None:
        answer.set_exception(Refused(503, "full"))

    def break_off(stream: TokenStream, answer: asyncio.Future[GenerateResponse]) -> None:
        stream.put(([1, 2], [-1.0, -2.0], 0))
        asyncio.get_running_loop().call_later(
            0.01, answer.set_exception, RuntimeError("the engine loop died")
        )

    def finish(stream: TokenStream, answer: asyncio.Future[GenerateResponse]) -> None:
        stream.put(([1], [-1.0], 0))
        stream.put(([2], [-2.0], 0))
        stream.put(([3], [-0.5], 1))
        answer.set_result(LAST)

    async def story() -> None:
        assert await post(refuse) == (503, ['{"error":"full","rule":"","way_out":""}'])
        status, lines = await post(break_off)
        assert (status, lines[0]) == (200, LINES[0])
        assert "the engine loop died" in lines[1]
        assert len(lines) == 2
        assert await post(finish) == (200, LINES)

    asyncio.run(story())


# ---- and out of the bytes


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
        request = GenerateRequest(request_id="r", prompt_ids=[1], max_tokens=9, stream=True)
        return [line async for line in caller.stream("/generate", request, GenerateChunk, GenerateResponse)]


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
