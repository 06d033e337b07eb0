"""Calls to a server over real connections: whose fault it is that one fails."""

from __future__ import annotations

import http.server
import socket
import threading
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from asyncrl.base.http import Caller, CallLost
from asyncrl.base.message import ErrorBody

HEALTH = ErrorBody(error="none")
pytestmark = pytest.mark.asyncio


class Well(http.server.BaseHTTPRequestHandler):
    """A server that is well, in a thread of its own; /silent does not answer."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        if self.path == "/silent":
            self.server.is_over.wait()  # type: ignore[attr-defined]
        body = HEALTH.model_dump_json().encode()
        self.wfile.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body))


@pytest_asyncio.fixture
async def caller() -> AsyncIterator[Caller]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Well) as server:
        server.is_over = threading.Event()  # type: ignore[attr-defined]
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        caller = Caller("engine-0", f"http://127.0.0.1:{server.server_port}", "s3cret")
        yield caller
        await caller.aclose()
        server.is_over.set()  # type: ignore[attr-defined]
        server.shutdown()
        thread.join()


async def test_a_server_that_is_silent_or_refuses_is_lost(
    caller: Caller,
) -> None:
    with pytest.raises(CallLost, match=r"no answer within 0\.1 s"):
        await caller.get("/silent", ErrorBody, timeout_s=0.1)
    with socket.create_server(("127.0.0.1", 0)) as free:
        caller.url = f"http://127.0.0.1:{free.getsockname()[1]}"
    with pytest.raises(CallLost, match="ClientConnectorError"):
        await caller.get("/health", ErrorBody, timeout_s=5.0)
