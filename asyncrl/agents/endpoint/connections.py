"""What a client may do to its connection: be slow, be many, send what is no HTTP. Knows bytes and clocks, no
call and no session.

aiohttp (3.14) closes a connection that is idle, or still within the head of a request, after
`keepalive_timeout` seconds.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections import OrderedDict
from itertools import islice
from typing import Any

from aiohttp import StreamReader, web

from asyncrl.agents.endpoint.refusals import ApiError, internal, invalid, of_status
from asyncrl.waits import Alarm

log = logging.getLogger(__name__)

_LINGERING_S = 5.0
"""How long the rest of a body is read and dropped after the answer, so that the client can read why it was
refused.
"""
_LOOKS_IN_A_GROUP = 32
_MAX_LOOKS = 256
"""So many connections are looked at for one that may be closed, when a new one comes and all places are
taken.
"""


def answer_error(error: ApiError) -> web.Response:
    """An error as a response."""
    return web.Response(
        body=error.json(), status=error.status, headers=error.headers, content_type="application/json"
    )


def belongs_to(request: web.BaseRequest, owner: str | None) -> None:
    """The client of this request has shown a key that is known: its connection is `owner`'s (None: a
    worker's) from here on.
    """
    connection = request.protocol
    if isinstance(connection, Connection):
        connection.crowd.known(connection, owner)


class Crowd:
    """All open connections, and whose they are: a stranger's, by address, until they have shown a key, then
    that key's.

    Life:       enter -> known, when a key is shown -> leave.
    Waits:      none.
    Invariant:  never more than max_connections. Nobody is kept out by those who only sit there: a new
    connection takes the place of one
                of whoever holds most, the oldest that does nothing, and is refused if none is found. Workers
                lose theirs to nobody. What a new connection costs does not grow with their number: at most
                _MAX_LOOKS are looked at, 32 of a group, and those found busy are looked at last from then on.
    """

    def __init__(self, max_connections: int) -> None:
        self.max_connections = max_connections
        self._places: dict[Connection, tuple[str, str] | None] = {}
        self._groups: dict[tuple[str, str], OrderedDict[Connection, None]] = {}
        self._by_size: dict[int, OrderedDict[tuple[str, str], None]] = {}
        """The groups again, by how many connections they have: few sizes, as they add up to max_connections
        at most.
        """

    def __repr__(self) -> str:
        return f"<Crowd {len(self._places)}/{self.max_connections} connections of {len(self._groups)} groups>"

    def enter_nowait(self, connection: Connection, address: str) -> bool:
        """A stranger's; false if there is no room and none can be made."""
        if len(self._places) >= self.max_connections and not self._make_room():
            return False
        self._put(connection, ("address", address))
        return True

    def known(self, connection: Connection, owner: str | None) -> None:
        """It has shown a key. Nothing happens if it has left."""
        place = None if owner is None else ("key", owner)
        if connection in self._places and self._places[connection] != place:
            self.leave(connection)
            self._put(connection, place)

    def leave(self, connection: Connection) -> None:
        """It is closed. Idempotent."""
        place = self._places.pop(connection, None)
        if place is not None:
            group = self._groups[place]
            del group[connection]
            self._resized(place, len(group) + 1)
            if not group:
                del self._groups[place]

    def _put(self, connection: Connection, place: tuple[str, str] | None) -> None:
        self._places[connection] = place
        if place is not None:
            group = self._groups.setdefault(place, OrderedDict())
            group[connection] = None
            self._resized(place, len(group) - 1)

    def _resized(self, place: tuple[str, str], before: int) -> None:
        """The group had `before` connections until now."""
        if before:
            del self._by_size[before][place]
            if not self._by_size[before]:
                del self._by_size[before]
        if now := len(self._groups[place]):
            self._by_size.setdefault(now, OrderedDict())[place] = None

    def _make_room(self) -> bool:
        """Close the first that may be: any of a stranger, for what he asks is refused, and an idle one of a
        key.
        """
        num_looks = 0
        for size in sorted(self._by_size, reverse=True):
            same = self._by_size[size]
            for place in list(islice(same, _MAX_LOOKS)):
                group = self._groups[place]
                for connection in list(islice(group, _LOOKS_IN_A_GROUP)):
                    if place[0] == "address" or connection.is_idle:
                        self.leave(connection)
                        connection.force_close()
                        return True
                    group.move_to_end(connection)
                    num_looks += 1
                    if num_looks == _MAX_LOOKS:
                        return False
                same.move_to_end(place)
        return False


class Connection(web.RequestHandler):
    """One connection, whose client has `slow_s` seconds: for a request's head, for its body, and to take what
    is written to it.

    Life:       open -> closed by the client, by one of the three limits, or by the Crowd.
    Waits:      none of its own.
    Invariant:  a connection that is open for longer than slow_s is sampling, or is being read from and
    written to.
    """

    __slots__ = ("_closing", "_late", "_slow_s", "_stuck", "crowd")

    def __init__(
        self, server: web.Server, *, loop: asyncio.AbstractEventLoop, slow_s: float, crowd: Crowd
    ) -> None:
        super().__init__(
            server,
            loop=loop,
            keepalive_timeout=slow_s,
            access_log=None,  # type: ignore[arg-type]  # keys are in URLs
            auto_decompress=False,
            lingering_time=min(slow_s, _LINGERING_S),
        )
        self._slow_s, self.crowd = slow_s, crowd
        self._late: Alarm | None = None
        self._stuck: Alarm | None = None
        self._closing: Alarm | None = None

    @property
    def is_idle(self) -> bool:
        """Nothing is answered: it waits for a request, or for the rest of a request's head."""
        return self._waiter is not None and not self._waiter.done()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Called by asyncio, once."""
        address = transport.get_extra_info("peername")
        if self.crowd.enter_nowait(self, str(address[0]) if address else ""):
            super().connection_made(transport)
            return
        refusal = TooMany()
        transport.set_protocol(refusal)
        refusal.connection_made(transport)

    def expect_body(self, request: web.BaseRequest) -> None:
        """The head is there: the body has its time from here on. Reading it raises ApiError 408 once that is
        over.
        """
        if not request.content.is_eof():
            self._late = Alarm(self._slow_s, functools.partial(self._body_is_late, request.content))

    def end_body(self) -> None:
        """Whoever answers needs no more of the body. Its clock would hold the request for as long as it
        runs.
        """
        if self._late is not None:
            self._late.cancel()
            self._late = None

    def pause_writing(self) -> None:
        """The client does not take what was written: it has its time, too."""
        super().pause_writing()
        self._stuck = Alarm(self._slow_s, self.abort)

    def resume_writing(self) -> None:
        """It took it."""
        super().resume_writing()
        self._unstick()

    def force_close(self) -> None:
        """Close; what is not taken yet has its time."""
        transport = self.transport
        super().force_close()
        if transport is not None and transport.get_write_buffer_size() and self._closing is None:
            self._closing = Alarm(self._slow_s, transport.abort)

    def abort(self) -> None:
        """Break the connection, with whatever was not sent."""
        if self.transport is not None:
            self.transport.abort()

    def connection_lost(self, exc: BaseException | None) -> None:
        """Called by asyncio, once."""
        self.crowd.leave(self)
        self._unstick()
        self.end_body()
        if self._closing is not None:
            self._closing.cancel()
        super().connection_lost(exc)

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """What no handler has answered: bytes that are no HTTP (400), or a mistake of ours (500)."""
        if isinstance(exc, ApiError):
            return answer_error(exc)
        if isinstance(exc, ConnectionError):
            raise exc  # the client is gone
        if status < 500:
            response = answer_error(
                invalid(f"This is no HTTP request: {message}" if status == 400 else str(message))
            )
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
            content.set_exception(
                of_status(408, f"The body of this request was not there after {self._slow_s} s.")
            )

    def _unstick(self) -> None:
        if self._stuck is not None:
            self._stuck.cancel()
            self._stuck = None


class TooMany(asyncio.Protocol):
    """A connection above the limit: told so, and closed."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Called by asyncio."""
        assert isinstance(transport, asyncio.Transport)
        body = of_status(
            503, "Too many connections are open, and all of them are busy (gateway.max_connections)."
        ).json()
        head = (
            "HTTP/1.1 503 Service Unavailable",
            "Content-Type: application/json",
            f"Content-Length: {len(body)}",
            "Connection: close",
        )
        transport.write("\r\n".join((*head, "", "")).encode() + body)
        transport.close()
