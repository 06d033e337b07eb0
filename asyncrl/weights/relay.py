"""`python -m asyncrl.weights.relay --spec FILE --fd N`: transport stream. One process on each node brings
weights from the trainer's node into the shared memory of its own. Imports no torch.

The controller asks each relay for a file by the digest of its weights (POST /fetch). A relay pulls it piece
by piece (pull.py) from the node before it, while that one still gets it, and serves each piece that it has
(GET /weights/DIGEST, with a Range). So nodes form a chain, in which a link carries each byte once in and once
out. On the trainer's node pieces come from the trainer's own file. In a tree of fan-out 2 a link would carry
each byte twice, to save hops that take the time of a piece each.

A piece goes with its xxh3_128, computed on the trainer's node as it is read. Each relay compares it before it
keeps the piece and passes it on, so the hop where bytes changed is named. What engines have loaded in the end
is compared by the digest of the weights (asyncrl/sync/push.py). Both are against faults, not against an
attacker: every route asks for the secret of the run.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from aiohttp import web

from asyncrl.errors import RoomError
from asyncrl.messages.base import (
    SECRET_ENV,
    FetchRequest,
    FetchResponse,
    Message,
    RelayHealth,
    StoredFile,
)
from asyncrl.serving import (
    Refused,
    add_route,
    child_arguments,
    die_with_parent,
    fail,
    json_answer,
    make_app,
    secret_of,
    serve,
)
from asyncrl.staging import clear_own_staging, clear_stale_staging, new_staging_dir, remove_staging_dir
from asyncrl.weights.pull import PIECE_DIGEST, Fetched, Puller, digest_of

KEPT = 2
"""Files that a relay keeps, as the trainer does: what engines read, and what comes next."""
NUM_PIECES, MIN_PIECE_BYTES, MAX_PIECE_BYTES = 96, 2**18, 2**23
"""A file is cut into so many pieces, within these sizes. Each node of a chain is a piece behind the one
before it."""
WAIT_S = 2.0
"""Longest wait before an answer, which says then that the relay is there and the piece is not."""


class RelaySpec(Message):
    """The spec file of a relay. `node`: its name for people. `roots`: folders of this node whose files it
    serves, beside what it has fetched: where the trainer writes.
    """

    node: str
    roots: list[str] = []


class Relay:
    """What one node has of the weights, and what it pulls.

    Life: of a file: asked for -> its size is known, room is taken -> pieces come, from one source after the
        other where one is lost; those that are there stay -> whole, until KEPT newer ones were asked for. Or
        it fails, with why, and may be asked for anew.
    Waits: a request at most WAIT_S; a pull for the source, which answers every WAIT_S if it lives, SILENT_S
        at most. How long a file may take is a matter of who asks for it.
    Invariant: a piece is served only after its bytes were compared with the digest that it goes on with, and
        a path is told only when all of them are there.
    """

    def __init__(self, spec: RelaySpec, folder: Path, secret: str) -> None:
        self.node, self._folder = spec.node, folder
        self._roots = [Path(root).resolve() for root in spec.roots]
        self._puller = Puller(self.node, secret, self._tell)
        self._fetched: dict[str, Fetched] = {}
        """By digest, in the order in which they were asked for."""
        self._names = itertools.count()
        self._changed = asyncio.Event()

    async def health(self) -> RelayHealth:
        """That it lives, and what it has."""
        files = self._fetched.values()
        return RelayHealth(
            node=self.node, num_files=len(files), num_bytes=sum(file.num_bytes for file in files)
        )

    async def fetch(self, request: FetchRequest) -> FetchResponse:
        """Begin to pull this file, or go on; answers when it is whole, or after WAIT_S. What lies at its path
        here is not pulled. Raises Refused.
        """
        if (own := self._own(request.path)) is not None:
            return FetchResponse(path=str(own), num_bytes=own.stat().st_size)
        file = self._fetched.pop(request.digest, None)
        if file is None:
            file = Fetched(self._folder / f"{request.digest}-{next(self._names)}.safetensors")
            file.work = asyncio.ensure_future(self._puller.fetch(file, request))
        self._fetched[request.digest] = file  # the newest
        for digest in list(self._fetched)[:-KEPT]:
            self._drop(digest)
        self._tell()
        work = file.work
        assert work is not None, "begun above"
        await self._until(work.done)
        if work.done():
            if not file.is_whole and self._fetched.get(request.digest) is file:
                self._drop(request.digest)  # the next request begins anew
            if file.failure is not None:
                raise file.failure
            if work.cancelled():
                raise Refused(409, f"{self.node} was asked for {KEPT} newer files meanwhile")
            work.result()
        return FetchResponse(path=str(file.path) if file.is_whole else "", num_bytes=file.num_bytes)

    async def stored(self, request: web.Request) -> web.StreamResponse:
        """GET /weights/DIGEST: the StoredFile; with a Range that is one piece, its bytes. 202: not yet here.
        Raises Refused (404): nothing is known of it.
        """
        digest, own = request.match_info["digest"], self._own(request.query.get("path", ""))
        file = self._fetched.get(digest)
        if own is not None and (file is None or not file.is_whole):
            stored = stored_file(own)
            if "Range" not in request.headers:
                return json_answer(stored)
            if request.query.get("written_ns") != str(stored.written_ns):
                raise Refused(404, f"{own} was written over, it has no weights {digest} any more")
            start, end = stored.piece(_index_of(request, stored))
            told = await asyncio.to_thread(digest_of, own, start, end)
            return web.FileResponse(own, headers={PIECE_DIGEST: told})
        if not await self._until(lambda: digest in self._fetched):
            raise Refused(404, f"{self.node} has no weights {digest}, and was not asked to fetch them")
        file = self._fetched[digest]
        if not await self._until(lambda: file.stored is not None or self._is_gone(file)):
            return web.Response(status=202)
        if self._is_gone(file) or file.stored is None:
            raise Refused(404, f"{self.node} has no weights {digest} any more")
        if "Range" not in request.headers:
            return json_answer(file.stored)
        index = _index_of(request, file.stored)
        if not await self._until(lambda: bool(file.digests[index]) or self._is_gone(file)):
            return web.Response(status=202)
        if self._is_gone(file):
            raise Refused(404, f"{self.node} has no weights {digest} any more")
        return web.FileResponse(file.path, headers={PIECE_DIGEST: file.digests[index]})

    async def aclose(self) -> None:
        """End all pulls."""
        works = [file.work for file in self._fetched.values() if file.work is not None]
        for digest in list(self._fetched):
            self._drop(digest)
        await asyncio.gather(*works, return_exceptions=True)
        await self._puller.aclose()

    def _own(self, path: str) -> Path | None:
        """The file at `path`, if it lies in a folder that is served."""
        found = Path(path).resolve()
        is_served = any(found.is_relative_to(root) for root in self._roots)
        return found if is_served and found.is_file() else None

    def _is_gone(self, file: Fetched) -> bool:
        return file.failure is not None or file not in self._fetched.values()

    def _drop(self, digest: str) -> None:
        file = self._fetched.pop(digest)
        if file.work is not None:
            file.work.cancel()
        file.path.unlink(missing_ok=True)
        self._tell()

    def _tell(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def _until(self, is_so: Callable[[], bool]) -> bool:
        """Whether it is so within WAIT_S."""
        with suppress(TimeoutError):
            async with asyncio.timeout(WAIT_S):
                while not is_so():
                    await self._changed.wait()
        return is_so()


def stored_file(path: Path) -> StoredFile:
    """How a file is cut into pieces."""
    info = path.stat()
    piece_bytes = min(max(-(-info.st_size // NUM_PIECES), MIN_PIECE_BYTES), MAX_PIECE_BYTES)
    return StoredFile(num_bytes=info.st_size, written_ns=info.st_mtime_ns, piece_bytes=piece_bytes)


def _index_of(request: web.Request, stored: StoredFile) -> int:
    """The piece that the Range names. Raises Refused."""
    with suppress(ValueError):
        asked = request.http_range
        index = (asked.start or 0) // stored.piece_bytes
        if 0 <= index < stored.num_pieces and (asked.start, asked.stop) == stored.piece(index):
            return index
    what = f"Range {request.headers['Range']} is no piece of a file of {stored.num_bytes} bytes"
    raise Refused(416, what, rule=f"a piece has {stored.piece_bytes} bytes, the last one what is left")


def make_relay(spec: RelaySpec, folder: Path, secret: str) -> web.Application:
    """Its routes. `folder`: where it puts what it fetches."""
    relay, app = Relay(spec, folder, secret), make_app(secret)
    add_route(app, "GET", "/health", relay.health)
    add_route(app, "POST", "/fetch", relay.fetch)
    app.router.add_get("/weights/{digest}", relay.stored)

    async def close(_: web.Application) -> None:
        await relay.aclose()

    app.on_cleanup.append(close)
    return app


def main() -> None:
    """Serve until SIGTERM or the parent's end."""
    text, fd = child_arguments()
    spec = RelaySpec.model_validate_json(text)
    die_with_parent(clear_own_staging)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    clear_stale_staging()
    try:
        folder = new_staging_dir()
    except RoomError as error:
        fail(f"{spec.node}: {error.fault}", way_out=error.way_out)
    try:
        serve(make_relay(spec, folder, secret_of(SECRET_ENV)), fd)
    finally:
        remove_staging_dir(folder)


if __name__ == "__main__":
    main()
