"""What a client may do to its connection: be slow, be many, send what is no HTTP. Knows bytes and clocks, no call and no session.

aiohttp (3.14) closes a connection that is idle, or still within the head of a request, after `keepalive_timeout` seconds.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from aiohttp import StreamReader, web

from asyncrl.gateway.errors import ApiError, internal, invalid, of_status

log = logging.getLogger(__name__)

_LINGERING_S = 5.0
"""How long the rest of a body is read and dropped after the answer, so that the client can read why it was refused."""


def answer_error(error: ApiError) -> web.Response:
    """An error as a response."""
    return web.Response(body=error.json(), status=error.status, headers=error.headers, content_type="application/json")


class Connection(web.RequestHandler):
    """One connection, whose client has `slow_s` seconds: for a request's head, for its body, and to take what is written to it.

    Life:       open -> closed by the client, or by one of the three limits.
    Waits:      none of its own.
    Invariant:  a connection that is open for longer than slow_s is sampling, or is being read from and written to.
    """

    __slots__ = ("_late", "_slow_s", "_stuck")

    def __init__(self, server: web.Server, *, loop: asyncio.AbstractEventLoop, slow_s: float) -> None:
        super().__init__(
            server,
            loop=loop,
            keepalive_timeout=slow_s,
            access_log=None,  # type: ignore[arg-type]  # keys are in URLs
            auto_decompress=False,
            lingering_time=min(slow_s, _LINGERING_S),
        )
        self._slow_s = slow_s
        self._late: asyncio.TimerHandle | None = None
        self._stuck: asyncio.TimerHandle | None = None

    def expect_body(self, request: web.BaseRequest) -> None:
        """The head is there: the body has its time from here on. Reading it raises ApiError 408 once that is over."""
        if not request.content.is_eof():
            self._late = self._loop.call_later(self._slow_s, self._body_is_late, request.content)

    def end_body(self) -> None:
        """Whoever answers needs no more of the body. Its clock would hold the request for as long as it runs."""
        if self._late is not None:
            self._late.cancel()
            self._late = None

    def pause_writing(self) -> None:
        """The client does not take what was written: it has its time, too."""
        super().pause_writing()
        self._stuck = self._loop.call_later(self._slow_s, self.abort)

    def resume_writing(self) -> None:
        """It took it."""
        super().resume_writing()
        self._unstick()

    def force_close(self) -> None:
        """Close; what is not taken yet has its time."""
        transport = self.transport
        super().force_close()
        if transport is not None and transport.get_write_buffer_size():
            self._loop.call_later(self._slow_s, transport.abort)

    def abort(self) -> None:
        """Break the connection, with whatever was not sent."""
        if self.transport is not None:
            self.transport.abort()

    def connection_lost(self, exc: BaseException | None) -> None:
        """Called by asyncio, once."""
        self._unstick()
        super().connection_lost(exc)

    def handle_error(
        self, request: web.BaseRequest, status: int = 500, exc: BaseException | None = None, message: str | None = None
    ) -> web.StreamResponse:
        """What no handler has answered: bytes that are no HTTP (400), or a mistake of ours (500)."""
        if isinstance(exc, ApiError):
            return answer_error(exc)
        if isinstance(exc, ConnectionError):
            raise exc  # the client is gone
        if status < 500:
            response = answer_error(invalid(f"This is no HTTP request: {message}" if status == 400 else str(message)))
        else:
            log.error("gateway: a call failed by a mistake of ours", exc_info=exc)
            if request.writer.output_size > 0:
                raise ConnectionError("the answer has begun")
            response = answer_error(internal())
        response.force_close()
        return response

    def log_exception(self, *args: Any, **kw: Any) -> None:
        """Called by aiohttp when it closes a connection for an error."""
        if not isinstance(kw.get("exc_info"), (ApiError, web.RequestPayloadError)):
            super().log_exception(*args, **kw)

    def _body_is_late(self, content: StreamReader) -> None:
        if not content.is_eof() and content.exception() is None:
            content.set_exception(of_status(408, f"The body of this request was not there after {self._slow_s} s."))

    def _unstick(self) -> None:
        if self._stuck is not None:
            self._stuck.cancel()
            self._stuck = None


class TooMany(asyncio.Protocol):
    """A connection above the limit: told so, and closed."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Called by asyncio."""
        assert isinstance(transport, asyncio.Transport)
        body = of_status(503, "Too many connections are open (gateway.max_connections).").json()
        head = ("HTTP/1.1 503 Service Unavailable", "Content-Type: application/json", f"Content-Length: {len(body)}", "Connection: close")
        transport.write("\r\n".join((*head, "", "")).encode() + body)
        transport.close()
