"""Streamed answers: sampled tokens on their way to one client each, as lines of JSON. Knows messages and
asyncio; knows no engine.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import TypeAlias

import anyio
from fastapi.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from asyncrl.messages.engine_calls import GenerateChunk, GenerateResponse
from asyncrl_servers.checks import refusal_of

Told: TypeAlias = "tuple[list[int], list[float], int]"
"""Token ids, their logprobs, and the policy_version that all of them were sampled under."""


class TokenStream:
    """Tokens of one request between the engine that samples them and the answer that sends them.

    Life:       made in the event loop of the client's connection, which alone calls it -> put() by put() ->
    closed. Waits:      wait_changed sleeps until there are tokens to take, or close_nowait() was called.
    Invariant:  what was put is taken once, in order. It holds no more than its request's max_tokens, however
    slow the client is.
    """

    __slots__ = ("_changed", "_told", "loop")

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self._told: list[Told] = []
        self._changed = asyncio.Event()

    def put(self, told: Told) -> None:
        """More tokens. Other threads go through hand_over."""
        self._told.append(told)
        self._changed.set()

    def close_nowait(self, _: object = None) -> None:
        """The response is there: nothing is put any more."""
        self._changed.set()

    async def wait_changed(self) -> None:
        """Sleep until put or close_nowait."""
        await self._changed.wait()
        self._changed.clear()

    def take_nowait(self) -> list[GenerateChunk]:
        """What was put since the last time, as few chunks as its versions allow."""
        chunks: list[Told] = []
        for token_ids, logprobs, version in self._told:
            if chunks and chunks[-1][2] == version:
                chunks[-1][0].extend(token_ids)
                chunks[-1][1].extend(logprobs)
            else:
                chunks.append((token_ids, logprobs, version))
        self._told = []
        return [
            GenerateChunk(token_ids=ids, logprobs=logprobs, version=version)
            for ids, logprobs, version in chunks
        ]


def hand_over(told: Iterable[tuple[TokenStream, Told]]) -> None:
    """Put tokens from another thread: one wake-up of the event loop for all streams together."""
    by_loop: dict[asyncio.AbstractEventLoop, list[tuple[TokenStream, Told]]] = {}
    for stream, tokens in told:
        by_loop.setdefault(stream.loop, []).append((stream, tokens))
    for loop, part in by_loop.items():
        with suppress(RuntimeError):  # the loop is closed: the server ends, and nobody listens
            loop.call_soon_threadsafe(_put_all, part)


def _put_all(told: list[tuple[TokenStream, Told]]) -> None:
    for stream, tokens in told:
        stream.put(tokens)


class StreamedAnswer(Response):
    """The answer to one /generate with `stream`: a line a GenerateChunk, and last the GenerateResponse, or an
    ErrorBody.

    Nothing is sent before the first token, so that a refusal still has its own status. `abort` is called if
    the client goes away.
    """

    def __init__(
        self, stream: TokenStream, answer: asyncio.Future[GenerateResponse], abort: Callable[[], object]
    ) -> None:
        super().__init__(media_type="application/x-ndjson")
        del self.headers["content-length"]
        self._stream, self._answer, self._abort = stream, answer, abort
        answer.add_done_callback(stream.close_nowait)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it line by line."""

        async def abort_when_gone() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass
            self._abort()

        async with anyio.create_task_group() as group:
            group.start_soon(abort_when_gone)
            await self._send(scope, receive, send)
            group.cancel_scope.cancel()

    async def _send(self, scope: Scope, receive: Receive, send: Send) -> None:
        has_begun = False
        while True:
            await self._stream.wait_changed()
            is_last = self._answer.done()
            lines = [chunk.model_dump_json() for chunk in self._stream.take_nowait()]
            if is_last:
                error = self._answer.exception()
                if error is not None and not (has_begun or lines):
                    refusal = refusal_of(error)
                    await JSONResponse(refusal.body.model_dump(), status_code=refusal.status)(
                        scope, receive, send
                    )
                    return
                last = self._answer.result() if error is None else refusal_of(error).body
                lines.append(last.model_dump_json())
            if lines and not has_begun:
                await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
                has_begun = True
            if lines:
                body = "".join(f"{line}\n" for line in lines).encode()
                await send({"type": "http.response.body", "body": body, "more_body": not is_last})
            if is_last:
                return
