"""Download of weights from the trainer's node to another node, once for all its
engines.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from pathlib import Path

import aiohttp

from asyncrl.base.files import clear_stale_staging, new_staging_dir, remove_staging_dir
from asyncrl.messages.engine_api import FileRequest

NUM_KEPT = 2
RETRY_S = 0.5
SILENT_S = 10.0
"""Silence after which the trainer is lost."""
CHUNK_BYTES = 2**22


class FetchedFiles:
    """A node's files: each is downloaded once, and the newest of each purpose stay."""

    def __init__(self) -> None:
        """Make the folder. Raises ComponentError without space. Blocks."""
        clear_stale_staging()
        self.folder = new_staging_dir()
        self._locks = defaultdict[str, asyncio.Lock](asyncio.Lock)
        self._kept = defaultdict[str, list[Path]](list)

    async def fetch(self, request: FileRequest) -> str:
        """Return the local path. Raises ConnectionError if the trainer's node does not
        send the file, and another OSError if this node cannot keep it.
        """
        # Engines of the node ask at the same time: the first downloads, the others find
        # the file.
        async with self._locks[request.purpose]:
            path = self.folder / f"{request.purpose}-{request.key}.safetensors"
            kept = self._kept[request.purpose]
            if path not in kept:
                # Before the download, so that at most NUM_KEPT files of a purpose are
                # in shared memory. An engine that has mapped a removed file keeps it.
                for old in kept[: len(kept) - NUM_KEPT + 1]:
                    old.unlink(missing_ok=True)
                    kept.remove(old)
                try:
                    await download(request, path)
                except aiohttp.ClientResponseError as error:
                    raise ConnectionError(
                        f"{request.url} answered {error.status} {error.message}"
                    ) from error
                finally:
                    # A failed download must not stay in shared memory.
                    part_of(path).unlink(missing_ok=True)
                kept.append(path)
            return str(path)

    def close(self) -> None:
        remove_staging_dir(self.folder)


def part_of(path: Path) -> Path:
    """Return the name of a file while it is downloaded."""
    return path.with_suffix(".part")


async def download(request: FileRequest, path: Path) -> None:
    """Download a file to `path`. Raises ConnectionError after SILENT_S without data, and
    ClientResponseError.
    """
    clock = asyncio.get_running_loop().time
    part = part_of(path)
    limits = aiohttp.ClientTimeout(
        total=None, sock_connect=SILENT_S / 2, sock_read=SILENT_S
    )
    headers = {
        "Authorization": f"Bearer {request.secret}",
        "Accept-Encoding": "identity",
    }
    heard_s = clock()
    async with aiohttp.ClientSession(
        raise_for_status=True, timeout=limits, headers=headers
    ) as session:
        while True:
            try:
                with part.open("wb") as file:
                    async with session.get(request.url) as answer:
                        async for chunk in answer.content.iter_chunked(CHUNK_BYTES):
                            await asyncio.to_thread(file.write, chunk)
                            heard_s = clock()
                break
            # A broken connection may come back. Only silence for SILENT_S means that
            # the trainer is lost.
            except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError) as error:
                if clock() - heard_s > SILENT_S:
                    raise ConnectionError(
                        f"{request.url} is silent: {error}"
                    ) from error
                await asyncio.sleep(RETRY_S)
    # Only a whole file gets the name that `fetch` returns.
    part.rename(path)
