"""Calls to a server over real connections: whose fault it is that one fails."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import http.server
import os
import re
import resource
import socket
import threading
import time
from collections.abc import AsyncIterator, Iterator

import pytest
import pytest_asyncio

from asyncrl.errors import ConnectionShortage
from asyncrl.http import Caller, CallLost
from asyncrl.messages.base import ErrorBody

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


async def test_a_server_is_lost_that_is_silent_or_refuses_and_not_while_our_own_loop_is_blocked(
    caller: Caller,
) -> None:
    asking = asyncio.ensure_future(caller.get("/health", ErrorBody, timeout_s=1.0))
    await asyncio.sleep(0)
    time.sleep(1.3)  # noqa: ASYNC251  this is the fault
    assert await asking == HEALTH
    with pytest.raises(CallLost, match=r"no answer within 0\.1 s"):
        await caller.get("/silent", ErrorBody, timeout_s=0.1)
    with socket.create_server(("127.0.0.1", 0)) as free:
        caller.url = f"http://127.0.0.1:{free.getsockname()[1]}"
    with pytest.raises(CallLost, match="ClientConnectorError"):
        await caller.get("/health", ErrorBody, timeout_s=5.0)


@contextlib.contextmanager
def no_descriptor_left() -> Iterator[None]:
    """As many descriptors as are open, and no more."""
    gc.collect()  # what other tests have left behind would give its descriptors back meanwhile
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with open("/dev/null", "rb") as highest:  # noqa: PTH123
        resource.setrlimit(resource.RLIMIT_NOFILE, (highest.fileno() + 1, hard))
    holders = []
    with contextlib.suppress(OSError):
        while True:
            holders.append(os.dup(0))
    try:
        yield
    finally:
        for holder in holders:
            os.close(holder)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def test_a_call_waits_for_a_descriptor_of_our_own_and_its_server_is_not_lost(
    caller: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("asyncrl.http.RETRY_S", 0.01)
    noted = asyncio.Event()
    monkeypatch.setattr(caller, "_warn_of_shortage", lambda _: noted.set())
    with no_descriptor_left():
        asking = asyncio.ensure_future(caller.get("/health", ErrorBody, timeout_s=None))
        await noted.wait()
        assert not asking.done()
    assert await asking == HEALTH


@pytest.mark.parametrize(("short_s", "timeout_s"), [(0.05, None), (60.0, 1.0)])
async def test_a_call_that_finds_no_descriptor_names_this_process_and_its_limit(
    caller: Caller, monkeypatch: pytest.MonkeyPatch, short_s: float, timeout_s: float | None
) -> None:
    monkeypatch.setattr("asyncrl.http.RETRY_S", 0.01)
    caller.short_s = short_s
    with no_descriptor_left(), pytest.raises(ConnectionShortage) as caught:
        await caller.get("/health", ErrorBody, timeout_s=timeout_s)
    assert "cannot open a connection to engine-0, which may be well: Too many open files" in caught.value.what
    assert re.search(r"all its \d+ descriptors open \(RLIMIT_NOFILE; \d+ is ", caught.value.rule)
    assert "rollout.slots" in caught.value.way_out
