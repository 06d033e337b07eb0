"""How a relay (relay.py) pulls a file of weights from other nodes: piece by piece, each compared with its
digest, from one source after the other where one is lost.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import aiohttp
import xxhash

from asyncrl.messages.base import FetchRequest, StoredFile, WeightSource
from asyncrl.serving import Refused

log = logging.getLogger("asyncrl.weights.pull")

WINDOW = 2
"""Pieces that are on their way at once, so that a link does not wait for a request."""
TRIES = 3
"""Times that a piece is asked for whose bytes are wrong."""
CONNECT_S, SILENT_S = 5.0, 10.0
"""A node that takes longer to be reached, or sends nothing for so long, is given up for the next source."""
PIECE_DIGEST = "X-Piece-Digest"


class SourceGone(Exception):  # noqa: N818  the next source is asked
    """A node does not answer, or does not have the file."""


class Fetched:
    """A file of weights that comes piece by piece. `digests`: of its pieces, '' for one that is not there."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.stored: StoredFile | None = None
        self.digests: list[str] = []
        self.failure: Refused | None = None
        self.work: asyncio.Future[None] | None = None

    @property
    def is_whole(self) -> bool:
        """All pieces are there, and right."""
        return self.stored is not None and all(self.digests)

    @property
    def num_bytes(self) -> int:
        """That are there."""
        if self.stored is None:
            return 0
        ends = (self.stored.piece(index) for index, digest in enumerate(self.digests) if digest)
        return sum(end - start for start, end in ends)

    def take_room(self, stored: StoredFile, node: str) -> None:
        """Make the file, of its whole size. Raises Refused. Blocks."""
        space = os.statvfs(self.path.parent)
        free = space.f_bavail * space.f_frsize
        if free < stored.num_bytes:
            raise no_room(node, self.path, stored.num_bytes, f"{free} bytes are free")
        with self.path.open("xb") as file:
            file.truncate(stored.num_bytes)
        self.stored, self.digests = stored, [""] * stored.num_pieces

    def keep(self, index: int, data: bytes, told: str, node: str) -> str:
        """The xxh3_128 of a piece, which is written if that is what was told. Raises Refused. Blocks."""
        assert self.stored is not None, "its size is known"
        start, end = self.stored.piece(index)
        found = xxhash.xxh3_128_hexdigest(data)
        if found != told or len(data) != end - start:
            return f"{found} of {len(data)} bytes"
        try:
            file = os.open(self.path, os.O_WRONLY | os.O_CLOEXEC)
            try:
                while data:
                    num_written = os.pwrite(file, data, start)
                    start, data = start + num_written, data[num_written:]
            finally:
                os.close(file)
        except OSError as error:
            raise no_room(node, self.path, self.stored.num_bytes, str(error)) from error
        return found


class Puller:
    """Pulls files into this node, with the secret that all relays of a run share. `on_change` is called when
    the size of a file is known, for each piece, and at the end.
    """

    def __init__(self, node: str, secret: str, on_change: Callable[[], None]) -> None:
        self.node, self._tell = node, on_change
        self._headers = {"Authorization": f"Bearer {secret}", "Accept-Encoding": "identity"}
        self._session: aiohttp.ClientSession | None = None

    async def fetch(self, file: Fetched, request: FetchRequest) -> None:
        """Returns when it is whole, or has failed and says why."""
        whys = list[str]()
        try:
            for source in request.sources:
                try:
                    return await self._pull(file, source, request)
                except (SourceGone, aiohttp.ClientError, TimeoutError, ConnectionError) as error:
                    whys.append(f"{source.node} ({source.url}): {str(error) or type(error).__name__}")
                    log.warning("weights %s: %s; on to the next source", request.digest, whys[-1])
            what = f"{self.node} gets the weights {request.digest} from no node: {'; '.join(whys)}"
            rule = "weights come from the nodes before it, or from the trainer's"
            raise Refused(502, what, rule=rule, way_out="see that the nodes reach each other.")
        except Refused as refusal:
            file.failure = refusal
        finally:
            if not file.is_whole:
                file.path.unlink(missing_ok=True)
            self._tell()

    async def _pull(self, file: Fetched, source: WeightSource, request: FetchRequest) -> None:
        """Get from this source what is not there yet."""
        text, _ = await self._ask(file, source, request)
        stored = StoredFile.model_validate_json(text)
        if file.stored is None:
            file.take_room(stored, self.node)  # a name and a size: nothing is written
            self._tell()
        elif file.stored != stored:
            what = f"{source.node} has weights {request.digest} as {stored}, others as {file.stored}"
            raise SourceGone(what)
        missing = (index for index, digest in enumerate(file.digests) if not digest)
        pulls = [
            asyncio.ensure_future(self._pull_some(file, source, request, missing)) for _ in range(WINDOW)
        ]
        try:
            await asyncio.gather(*pulls)
        finally:
            for pull in pulls:
                pull.cancel()
            await asyncio.gather(*pulls, return_exceptions=True)

    async def _pull_some(
        self, file: Fetched, source: WeightSource, request: FetchRequest, missing: Iterator[int]
    ) -> None:
        assert file.stored is not None, "its size is known"
        for index in missing:
            for _ in range(TRIES):
                data, told = await self._ask(file, source, request, file.stored.piece(index))
                found = await asyncio.to_thread(file.keep, index, data, told, self.node)
                if found == told:
                    break
                what = f"piece {index} of {file.stored.num_pieces} of the weights {request.digest}"
                log.warning("%s from %s: %s, not %s", what, source.node, found, told)
            else:
                rule = f"its xxh3_128 is {told} where it was checked last, and {found} where it arrived"
                way_out = f"check memory and network of {source.node} and {self.node}, or do without one."
                what = f"{self.node} got {what} from {source.node} {TRIES} times with wrong bytes"
                raise Refused(409, what, rule=rule, way_out=way_out)
            file.digests[index] = told
            self._tell()

    async def _ask(
        self, file: Fetched, source: WeightSource, request: FetchRequest, piece: tuple[int, int] | None = None
    ) -> tuple[bytes, str]:
        """The StoredFile as JSON, or the bytes of a piece and the digest that it goes with. Raises SourceGone
        and what aiohttp raises.
        """
        if self._session is None:
            limits = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S, sock_read=SILENT_S)
            connector = aiohttp.TCPConnector(limit=0)
            self._session = aiohttp.ClientSession(timeout=limits, connector=connector, headers=self._headers)
        headers = {} if piece is None else {"Range": f"bytes={piece[0]}-{piece[1] - 1}"}
        url, query = f"{source.url}/weights/{request.digest}", {"path": request.path}
        if piece is not None and file.stored is not None:
            query["written_ns"] = str(file.stored.written_ns)
        while True:
            async with self._session.get(url, params=query, headers=headers) as answer:
                data = await answer.read()
                if answer.status >= 400:
                    raise SourceGone(f"status {answer.status}: {data[:300].decode(errors='replace')}")
                if answer.status != 202:
                    return data, answer.headers.get(PIECE_DIGEST, "")

    async def aclose(self) -> None:
        """Close the connections."""
        if self._session is not None:
            await self._session.close()


def no_room(node: str, path: Path, num_bytes: int, why: str) -> Refused:
    """The refusal of a node that cannot take a file."""
    return Refused(
        507,
        f"{node} has no room for {num_bytes} bytes of weights in {path.parent}: {why}",
        rule="the shared memory of each node holds two files of them: what engines read, and what is next",
        way_out="give it more (a container has a setting for /dev/shm), or weight_sync.transport=disk.",
    )


def digest_of(path: Path, start: int, end: int) -> str:
    """xxh3_128 of these bytes. Blocks."""
    with path.open("rb") as file:
        return xxhash.xxh3_128_hexdigest(os.pread(file.fileno(), end - start, start))
