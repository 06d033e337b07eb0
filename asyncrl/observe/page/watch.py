"""`asyncrl watch`: the page of runs, live. Reads alone; serves GET alone; on another address than the
loopback one only to who has its key.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import ipaddress
import json
import secrets
import signal
import socket
import time
import webbrowser
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from aiohttp import web

from asyncrl import __version__
from asyncrl.errors import AsyncrlError, ConfigError
from asyncrl.observe.page.render import PageReader, render
from asyncrl.observe.page.shape import Page
from asyncrl.observe.status import CONFIG_FILE, judge_state, read_status
from asyncrl.user_code import end_what_is_left

POLL_S = 1.0
READ_SHARE = 0.2
"""Of its time, at most, for reading: after a long reading it looks at the files later."""
MAX_BEHIND = 8
"""Events that a listener may not have taken yet; with more it is dropped, and asks anew."""
SIGN_OF_LIFE_S = 15.0
MAX_LISTENERS = 256
_SUFFIXES = {".json", ".jsonl", ".yaml"}
_HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "frame-ancestors 'none'",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


def change_of(old: Any, new: Any) -> list[Any] | None:
    """How `new` differs from `old`, as static/live.js applies it; None if it does not.

    ["=", new]: another value. ["{", changes by key, keys that are gone]: an object. ["@", changes by index]:
    a few objects. ["[", left out at the front, kept after them, added at the end]: a list, or a window of one
    that grows.
    """
    if old == new:
        return None
    if isinstance(old, dict) and isinstance(new, dict):
        changes = {
            key: change_of(old[key], value) if key in old else ["=", value] for key, value in new.items()
        }
        return [
            "{",
            {key: each for key, each in changes.items() if each},
            [key for key in old if key not in new],
        ]
    if not (isinstance(old, list) and isinstance(new, list) and old and new):
        return ["=", new]
    if len(old) == len(new) <= 16 and all(isinstance(each, dict) for each in [*old, *new]):
        told = {index: change_of(*both) for index, both in enumerate(zip(old, new, strict=True))}
        return ["@", {index: each for index, each in told.items() if each}]
    left_out = old.index(new[0]) if new[0] in old else len(old)
    kept = 0
    for before, now in zip(old[left_out:], new, strict=False):
        if before != now:
            break
        kept += 1
    return ["[", left_out, kept, new[kept:]] if kept else ["=", new]


def event(name: str, told: Any) -> bytes:
    """A server-sent event, its data as one line of JSON."""
    return f"event: {name}\ndata: {json.dumps(told, allow_nan=False)}\n\n".encode()


class LivePage:
    """The page of these runs, and who listens to its changes.

    Life:      run() reads while there is a listener, when a file of a run has changed; refresh() at once.
    Invariant: a listener gets the changes since the page that it has, all and in order, or is dropped: `page`
               is replaced and told in one piece, between two awaits.
    """

    def __init__(
        self,
        run_dirs: Sequence[Path],
        *,
        read: Callable[[Sequence[Path]], Page] | None = None,
        poll_s: float = POLL_S,
    ) -> None:
        self.run_dirs, self._poll_s = list(run_dirs), poll_s
        self._read = read or PageReader().read
        self.page = Page(asyncrl=__version__, made_s=time.time(), is_live=True, runs=[], differences=[])
        self.notes, self.num_read = list[str](), 0
        self._of_dirs: list[Path] = []
        self._seen: object = None
        self._listeners: dict[asyncio.Queue[bytes], Callable[[], None]] = {}
        self._heard, self._reading = asyncio.Event(), asyncio.Lock()

    async def refresh(self) -> float:
        """Read what has changed, and tell it. Returns the seconds that it took."""
        async with self._reading:
            began_s, seen = time.monotonic(), await asyncio.to_thread(self._look)
            if seen != self._seen:
                page, of_dirs, notes, changes = await asyncio.to_thread(self._make)
                self._tell(changes + ([event("notes", notes)] if notes != self.notes else []))
                self.page, self._of_dirs, self.notes, self._seen = page, of_dirs, notes, seen
                self.num_read += 1
            return time.monotonic() - began_s

    async def run(self) -> None:
        """Until it is cancelled."""
        while True:
            await self._heard.wait()
            took_s = await self.refresh()
            await asyncio.sleep(max(self._poll_s, took_s / READ_SHARE))

    def listen(self, since_s: float, drop: Callable[[], None]) -> asyncio.Queue[bytes]:
        """Events from now on; the whole page first, unless the one made at `since_s` is there already. `drop`
        is called when more than MAX_BEHIND of them wait.
        """
        queue: asyncio.Queue[bytes] = asyncio.Queue(MAX_BEHIND + 2)
        if since_s != self.page["made_s"]:
            queue.put_nowait(event("page", self.page))
        queue.put_nowait(event("notes", self.notes))
        self._listeners[queue] = drop
        self._heard.set()
        return queue

    def leave(self, queue: asyncio.Queue[bytes]) -> None:
        """It listens no more; idempotent."""
        self._listeners.pop(queue, None)
        if not self._listeners:
            self._heard.clear()

    @property
    def is_full(self) -> bool:
        """There are MAX_LISTENERS."""
        return len(self._listeners) >= MAX_LISTENERS

    def drop_all(self) -> None:
        """The end."""
        for queue, drop in list(self._listeners.items()):
            self.leave(queue)
            drop()

    def _tell(self, events: list[bytes]) -> None:
        for queue, drop in list(self._listeners.items()):
            if queue.qsize() + len(events) > queue.maxsize:
                self.leave(queue)
                drop()
                continue
            for each in events:
                queue.put_nowait(each)

    def _look(self) -> object:
        """What changes when a run does: sizes and times of its files, and whether it lives."""
        return [(judge_state(read_status(folder, []), folder)[0], _files(folder)) for folder in self.run_dirs]

    def _make(self) -> tuple[Page, list[Path], list[str], list[bytes]]:
        """The page with what can be read, the directories of its runs, what to say, the events. A run that
        has been deleted stays as it was.
        """
        old, notes = dict(zip(self._of_dirs, self.page["runs"], strict=True)), list[str]()
        there = [folder for folder in self.run_dirs if (folder / CONFIG_FILE).is_file()]
        try:
            page = self._read(there) if there else self.page
        except (AsyncrlError, OSError) as error:
            return self.page, self._of_dirs, [f"What is shown is not the newest: {error}"], []
        new = dict(zip(there, page["runs"], strict=True)) if there else {}
        for folder in self.run_dirs:
            if folder in new:
                continue
            if folder in old:
                notes.append(f"{folder} was deleted or moved: what is shown is what was there last.")
            else:
                notes.append(
                    f"{folder} has no {CONFIG_FILE} yet: the page shows the run as soon as it begins."
                )
        if not there:
            return self.page, self._of_dirs, notes, []
        dirs = [folder for folder in self.run_dirs if folder in new or folder in old]
        page["runs"] = [new.get(folder) or old[folder] for folder in dirs]
        if dirs != there:
            page["differences"] = self.page["differences"]  # of as many runs
        if dirs != self._of_dirs:
            return page, dirs, notes, [event("page", page)]
        return page, dirs, notes, [event("change", change_of(self.page, page))]


def _files(folder: Path) -> list[tuple[str, int, int]]:
    try:
        found = [path for path in folder.iterdir() if path.suffix in _SUFFIXES]
        stats = [(path.name, path.stat()) for path in sorted(found)]
    except OSError:  # not there; or replaced in between, and seen anew the next time
        return []
    return [(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats]


def make_watch_app(live: LivePage, key: str | None) -> web.Application:
    """The page at /, its changes at /events. With a `key`, for who has it: in the address once, then in a
    cookie, or as a bearer. Without, for callers that name this machine as their host: a page of another site
    whose name is made to mean 127.0.0.1 is refused.
    """

    @web.middleware
    async def guard(request: web.Request, handler: Any) -> web.StreamResponse:
        if key is None:
            try:
                host = urlsplit(f"//{request.host}").hostname or ""
            except ValueError:  # "[::1"
                host = ""
            if not is_local(host):
                text = f"{request.host} is not this machine: use 127.0.0.1 or localhost\n"
                raise web.HTTPForbidden(text=text)
        else:
            cookie = f"asyncrl-watch-{request.url.port}"
            bearer = request.headers.get("Authorization", "").removeprefix("Bearer ")
            given = request.query.get("key") or request.cookies.get(cookie) or bearer
            if not hmac.compare_digest(given.encode(errors="replace"), key.encode()):
                raise web.HTTPUnauthorized(
                    text="wrong or missing key: use the address that the command printed\n"
                )
            if "key" in request.query:
                found = web.HTTPSeeOther(request.path)
                found.set_cookie(cookie, key, httponly=True, samesite="Strict", path="/")
                raise found
        answer: web.StreamResponse = await handler(request)
        return answer

    async def page(_: web.Request) -> web.Response:
        await live.refresh()
        shown = live.page
        return web.Response(text=await asyncio.to_thread(render, shown), content_type="text/html")

    async def events(request: web.Request) -> web.StreamResponse:
        try:
            since_s = float(request.query.get("since", "0"))
        except ValueError:
            raise web.HTTPBadRequest(text="since is no number\n") from None
        if live.is_full:
            raise web.HTTPServiceUnavailable(text=f"{MAX_LISTENERS} pages are open already\n")
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await live.refresh()
        transport = request.transport
        queue = live.listen(since_s, transport.abort if transport else lambda: None)
        try:
            while True:
                told = b": still here\n\n"
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(SIGN_OF_LIFE_S):
                        told = await queue.get()
                await response.write(told)  # waits while the reader does not take it; then its queue fills
        except ConnectionError:
            return response
        finally:
            live.leave(queue)

    async def add_headers(_: web.Request, response: web.StreamResponse) -> None:
        response.headers.update(_HEADERS)

    app = web.Application(middlewares=[guard])
    app.on_response_prepare.append(add_headers)
    app.router.add_get("/", page, allow_head=False)
    app.router.add_get("/events", events, allow_head=False)
    return app


def is_local(host: str) -> bool:
    """Whether it is a name or an address of the loopback interface."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def watch(
    run_dirs: Sequence[Path], host: str, port: int, *, opens: bool, say: Callable[[str], None] = print
) -> int:
    """Serve the page of these runs until Ctrl-C or SIGTERM, which end it at once; returns 0.

    Raises ConfigError if it cannot listen there.
    """
    asyncio.run(end_what_is_left(_serve(run_dirs, host, port, opens, say)))
    return 0


async def _serve(
    run_dirs: Sequence[Path], host: str, port: int, opens: bool, say: Callable[[str], None]
) -> None:
    loop, ended = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, ended.set)
    live, key = LivePage(run_dirs), None if is_local(host) else secrets.token_urlsafe(24)
    runner = web.AppRunner(
        make_watch_app(live, key), handler_cancellation=True, access_log=None, shutdown_timeout=0
    )
    await runner.setup()
    try:
        await web.TCPSite(runner, host, port).start()
    except OSError as error:
        await runner.cleanup()
        way_out = "leave out --port for a free one; --host is an address of this machine."
        raise ConfigError(f"cannot listen on {host}:{port} ({error.strerror})", way_out=way_out) from error
    url = _url(host, runner.addresses[0][1], key)
    for folder in run_dirs:
        if not (folder / CONFIG_FILE).is_file():
            say(f"{folder} is no run yet; the page waits for it")
    say(f"{url}  (Ctrl-C ends it; the run goes on)")
    if key:
        say("Whoever has this address can read these runs, and the connection is not encrypted.")
    try:
        async with asyncio.TaskGroup() as tasks:
            reading = tasks.create_task(live.run(), name="watch")
            if opens:
                await asyncio.to_thread(webbrowser.open, url)
            await ended.wait()
            reading.cancel()
    finally:
        live.drop_all()
        await runner.cleanup()


def _url(host: str, port: int, key: str | None) -> str:
    if host in ("0.0.0.0", "::"):
        host = socket.gethostname()
    return f"http://{f'[{host}]' if ':' in host else host}:{port}/{f'?key={key}' if key else ''}"
