"""A node downloads each exported file once, whatever happens to the connection."""
# ruff: noqa: ASYNC240  small files of a test

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from asyncrl.base.errors import EngineLost, NodeLost, RoomError, WeightsLost
from asyncrl.base.http import Caller, CallLost
from asyncrl.launch import ray_host
from asyncrl.launch.ray_host import NUM_KEPT, FetchedFiles
from asyncrl.messages.engine_api import FileRequest
from asyncrl.messages.trainer_api import ExportResponse
from asyncrl.sync.push import NodeFiles

SECRET = "a secret of this run"
SIZE = 3_000_001


class TrainerNode:
    """Serves one folder as the trainer does. Each of the first `breaks` downloads ends after a third."""

    def __init__(self, folder: Path, *, breaks: int = 0) -> None:
        self.folder, self.breaks, self.num_requests = folder, breaks, 0
        self.hangs = False
        self.url = ""

    async def staged(self, request: web.Request) -> web.StreamResponse:
        if request.headers["Authorization"] != f"Bearer {SECRET}":
            raise web.HTTPUnauthorized
        if self.hangs:
            await asyncio.Event().wait()
        self.num_requests += 1
        path = self.folder / request.match_info["name"]
        if self.num_requests > self.breaks:
            return web.FileResponse(path)
        answer = web.StreamResponse()
        answer.content_length = SIZE
        await answer.prepare(request)
        await answer.write(path.read_bytes()[: SIZE // 3])
        assert request.transport is not None
        request.transport.close()
        return answer

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        app = web.Application()
        app.router.add_get("/staged/{name}", self.staged)
        async with TestServer(app) as server:
            self.url = str(server.make_url("")).rstrip("/")
            yield

    def request(self, name: str, purpose: str = "rollout", *, secret: str = SECRET) -> FileRequest:
        return FileRequest.model_validate(
            {"url": f"{self.url}/staged/{name}", "secret": secret, "key": name, "purpose": purpose}
        )


def with_files(
    folder: Path, story: Callable[[TrainerNode, FetchedFiles], Awaitable[None]], *, breaks: int = 0
) -> TrainerNode:
    folder.mkdir(exist_ok=True)
    trainer, files = TrainerNode(folder, breaks=breaks), FetchedFiles()

    async def run() -> None:
        async with trainer.serving():
            await story(trainer, files)

    try:
        asyncio.run(run())
    finally:
        files.close()
    assert not files.folder.exists()
    return trainer


def test_engines_of_a_node_share_one_download(tmp_path: Path) -> None:
    async def story(trainer: TrainerNode, files: FetchedFiles) -> None:
        kept = list[str]()
        for version in range(4):
            name = f"v{version}"
            (trainer.folder / name).write_bytes(os.urandom(1000))
            paths = await asyncio.gather(*(files.fetch(trainer.request(name)) for _ in range(5)))
            assert {Path(path).read_bytes() for path in paths} == {(trainer.folder / name).read_bytes()}
            kept.append(paths[0])
        held = await files.fetch(trainer.request("v0", "evaluation"))
        assert [Path(path).exists() for path in kept] == [False] * (4 - NUM_KEPT) + [True] * NUM_KEPT
        assert {str(path) for path in files.folder.glob("*.*")} == {*kept[-NUM_KEPT:], held}

    assert with_files(tmp_path / "staged", story).num_requests == 5


def test_broken_download_is_repeated(tmp_path: Path) -> None:
    async def story(trainer: TrainerNode, files: FetchedFiles) -> None:
        (trainer.folder / "v1").write_bytes(os.urandom(SIZE))
        path = Path(await files.fetch(trainer.request("v1")))
        assert path.read_bytes() == (trainer.folder / "v1").read_bytes()

    assert with_files(tmp_path / "staged", story, breaks=2).num_requests == 3


def test_refusal_and_silence_are_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_host, "SILENT_S", 0.5)

    async def story(trainer: TrainerNode, files: FetchedFiles) -> None:
        (trainer.folder / "v1").write_bytes(b"weights")
        with pytest.raises(OSError, match="/staged/v2 answered 404"):
            await files.fetch(trainer.request("v2"))
        with pytest.raises(OSError, match="/staged/v1 answered 401"):
            await files.fetch(trainer.request("v1", secret="wrong"))
        trainer.hangs = True
        with pytest.raises(ConnectionError, match="is silent"):
            await files.fetch(trainer.request("v1"))
        trainer.hangs = False
        assert Path(await files.fetch(trainer.request("v1"))).read_bytes() == b"weights"

    with_files(tmp_path / "staged", story)


# ---- for each engine of a run


SENT = ExportResponse(
    version=1, num_tensors=1, num_bytes=7, path="/dev/shm/trainer/v1.safetensors", digest="0123"
)


class FakeTrainer(Caller):
    """Rank 0: answers /health, or is gone."""

    answers = True

    async def get(self, path: str, answer: Any, *, timeout_s: float | None) -> Any:
        if not self.answers:
            raise CallLost(self.name, path, "it is gone")


def located(engine: str, error: Exception | None = None, *, answers: bool = True) -> tuple[str, list[int]]:
    """Return the path for the engine, and the nodes that were asked for the file."""
    asked = list[int]()
    trainer = FakeTrainer("trainer-0", "http://10.0.0.1:80", SECRET)
    trainer.answers = answers

    async def fetch(node: int, request: FileRequest, timeout_s: float) -> str:
        assert (request.url, request.secret) == (f"{trainer.url}/staged/v1.safetensors", SECRET)
        asked.append(node)
        if error is not None:
            raise error
        return f"on node {node}"

    files = NodeFiles(fetch, trainer, {"engine-0": 0, "engine-1": 1}, trainer_node=0, timeout_s=5.0)
    return asyncio.run(files.locate(engine, SENT)).path, asked


def test_only_engines_of_other_nodes_read_a_download() -> None:
    assert located("engine-0") == (SENT.path, [])
    assert located("engine-1") == ("on node 1", [1])


@pytest.mark.parametrize(
    ("error", "answers", "raised"),
    [
        (NodeLost("n1", "the node is gone", rule="", way_out=""), True, EngineLost),
        (RoomError("n1", "no space left on device"), True, RoomError),
        (RoomError("n1", "is silent"), False, WeightsLost),
    ],
)
def test_failed_download_names_the_lost_part(
    error: Exception, answers: bool, raised: type[Exception]
) -> None:
    with pytest.raises(raised) as caught:
        located("engine-1", error, answers=answers)
    assert type(caught.value) is raised
