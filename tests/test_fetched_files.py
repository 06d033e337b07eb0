"""A node downloads each exported file once, also over a bad connection."""
# ruff: noqa: ASYNC240  small files of a test

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from concurrent.futures import Future
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from launch_cases import machine

from asyncrl.base.errors import ComponentError, EngineLost, NodeLost, WeightsLost
from asyncrl.base.http import Caller
from asyncrl.launch.machine import Node
from asyncrl.messages.engine_api import FileRequest
from asyncrl.messages.trainer_api import ExportResponse
from asyncrl.sync.push import NodeFiles
from asyncrl.weights import download
from asyncrl.weights.download import NUM_KEPT, FetchedFiles

SECRET = "a secret of this run"
SIZE = 3_000_001


class TrainerNode:
    """Serves one folder as the trainer does. Each of the first `breaks` downloads ends
    after a third.
    """

    def __init__(self, folder: Path, *, breaks: int = 0) -> None:
        self.folder, self.breaks, self.num_requests = folder, breaks, 0
        self.hangs = False
        self.url = ""

    async def staged(self, request: web.Request) -> web.StreamResponse:
        assert request.headers["Authorization"] == f"Bearer {SECRET}"
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
    async def fetching(self) -> AsyncIterator[FetchedFiles]:
        app = web.Application()
        app.router.add_get("/staged/{name}", self.staged)
        files = FetchedFiles()
        try:
            async with TestServer(app) as server:
                self.url = str(server.make_url("")).rstrip("/")
                yield files
        finally:
            files.close()
        assert not files.folder.exists()

    def request(self, name: str, purpose: Any = "rollout") -> FileRequest:
        return FileRequest(
            url=f"{self.url}/staged/{name}", secret=SECRET, key=name, purpose=purpose
        )


def test_engines_of_a_node_share_one_download(tmp_path: Path) -> None:
    async def story() -> None:
        trainer = TrainerNode(tmp_path)
        async with trainer.fetching() as files:
            kept = list[str]()
            for version in range(4):
                name = f"v{version}"
                (tmp_path / name).write_bytes(os.urandom(1000))
                paths = await asyncio.gather(
                    *(files.fetch(trainer.request(name)) for _ in range(5))
                )
                assert {Path(path).read_bytes() for path in paths} == {
                    (tmp_path / name).read_bytes()
                }
                kept.append(paths[0])
            held = await files.fetch(trainer.request("v0", "evaluation"))
            assert {str(path) for path in files.folder.glob("*.*")} == {
                *kept[-NUM_KEPT:],
                held,
            }
        assert trainer.num_requests == 5

    asyncio.run(story())


def test_broken_download_is_repeated_and_a_lost_one_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(download, "SILENT_S", 2.0)
    monkeypatch.setattr(download, "RETRY_S", 0.01)

    async def story() -> None:
        trainer = TrainerNode(tmp_path, breaks=2)
        (tmp_path / "v1").write_bytes(os.urandom(SIZE))
        async with trainer.fetching() as files:
            path = Path(await files.fetch(trainer.request("v1")))
            assert path.read_bytes() == (tmp_path / "v1").read_bytes()
            assert trainer.num_requests == 3
            with pytest.raises(ConnectionError, match="/staged/v2 answered 404"):
                await files.fetch(trainer.request("v2"))
            trainer.hangs = True
            with pytest.raises(ConnectionError, match="is silent"):
                await files.fetch(trainer.request("v2"))
            assert [*files.folder.glob("*.*")] == [path]

    asyncio.run(story())


# ---- for each engine of a run


SENT = ExportResponse(
    version=1,
    num_tensors=1,
    num_bytes=7,
    path="/dev/shm/trainer/v1.safetensors",
    digest="0123",
)


class FakeActor:
    """A node's actor in Ray, whose fetch() raises `error` there."""

    def __init__(self, error: Exception) -> None:
        from ray.exceptions import RayTaskError

        raised = RayTaskError("fetch", f"Traceback\n{error!r}", error)
        self._error = raised.as_instanceof_cause()

    def _answer(self, outcome: Any) -> Any:
        answer = Future[Any]()
        if isinstance(outcome, Exception):
            answer.set_exception(outcome)
        else:
            answer.set_result(outcome)
        return SimpleNamespace(remote=lambda *_: SimpleNamespace(future=lambda: answer))

    def __getattr__(self, method: str) -> Any:
        return self._answer(self._error if method == "fetch" else None)


@pytest.mark.extras
@pytest.mark.extension("ray")
@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (ConnectionError("v1 is silent"), WeightsLost),
        (OSError(28, "No space left on device"), ComponentError),
    ],
)
def test_node_says_whether_the_weights_are_lost(
    error: Exception, outcome: type[ComponentError]
) -> None:
    from asyncrl.extensions.ray.ray_launcher import RayNode

    async def story() -> None:
        node = RayNode(Node("n1", "10.0.0.2", machine(0)), lambda: FakeActor(error), {})
        await node.open()
        request = FileRequest(url="v1", secret=SECRET, key="v1", purpose="rollout")
        with pytest.raises(ComponentError, match="fetch failed") as caught:
            await node.fetch(request, 5.0)
        assert type(caught.value) is outcome

    asyncio.run(story())


@pytest.mark.parametrize(
    ("engine", "error", "outcome", "asked"),
    [
        ("engine-0", None, SENT.path, []),
        ("engine-1", None, "on node 1", [1]),
        ("engine-1", NodeLost("n1", "the node is gone"), EngineLost, [1]),
        ("engine-1", ComponentError("n1", "its disk is full"), EngineLost, [1]),
        ("engine-1", WeightsLost("n1", "is silent"), WeightsLost, [1]),
    ],
)
def test_engines_of_other_nodes_read_a_download(
    engine: str, error: ComponentError | None, outcome: Any, asked: list[int]
) -> None:
    nodes = list[int]()
    trainer = Caller("trainer-0", "http://10.0.0.1:80", SECRET)

    async def fetch(node: int, request: FileRequest, timeout_s: float) -> str:
        assert (request.url, request.secret) == (
            f"{trainer.url}/staged/v1.safetensors",
            SECRET,
        )
        nodes.append(node)
        if error is not None:
            raise error
        return f"on node {node}"

    files = NodeFiles(
        fetch, trainer, {"engine-0": 0, "engine-1": 1}, trainer_node=0, timeout_s=5.0
    )
    try:
        found: object = asyncio.run(files.locate(engine, SENT)).path
    except ComponentError as raised:
        found = type(raised)
    assert (found, nodes) == (outcome, asked)
