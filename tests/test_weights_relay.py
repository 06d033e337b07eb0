"""Weights from node to node: real relays on loopback, each with a folder of its own, under a real Spread."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager, closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from job_runs import wait_until
from network_hosts import reason_for_none
from relay_hosts import relay_network, told

from asyncrl.errors import EngineLost, RoomError, WeightsLost
from asyncrl.http import Caller
from asyncrl.messages.base import SECRET_ENV, RelayHealth
from asyncrl.messages.calls import ExportResponse
from asyncrl.staging import shared_memory_root
from asyncrl.sync.spread import NodeRelay, Spread
from asyncrl.weights import pull, relay
from asyncrl.weights.relay import MIN_PIECE_BYTES, RelaySpec, make_relay

SECRET = "a secret of relays"
NUM_PIECES = 12
SIZE = (NUM_PIECES - 1) * MIN_PIECE_BYTES + 1000
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass
class Node:
    """One relay, and what is asked of it. From piece number `dies_at` on it breaks all connections, or, as it
    `hangs`, keeps them without an answer.
    """

    number: int
    folder: Path
    dies_at: int | None = None
    hangs: bool = False
    root: Path | None = None
    """Where the trainer writes, or evaluation keeps a file, on this node."""
    url: str = ""
    pieces: Counter[str] = field(default_factory=Counter)
    on_piece: Callable[[], Awaitable[object]] | None = None

    @property
    def name(self) -> str:
        return f"node-{self.number}"

    @property
    def num_served(self) -> int:
        return sum(self.pieces.values())

    def files(self) -> list[Path]:
        return sorted(self.folder.iterdir(), key=lambda path: int(path.stem.partition("-")[2]))

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        @web.middleware
        async def watch(request: web.Request, handler: Handler) -> web.StreamResponse:
            if "Range" in request.headers and self.on_piece is not None:
                await self.on_piece()
            await die_if_due()
            answer = await handler(request)
            if "Range" in request.headers and answer.status == 200:
                self.pieces[request.headers["Range"]] += 1
            await die_if_due()  # what waited meanwhile gets no answer either
            return answer

        async def die_if_due() -> None:
            if self.dies_at is None or self.num_served < self.dies_at:
                return
            if self.hangs:
                await asyncio.Event().wait()
            for connection in runner.server.connections if runner.server is not None else ():
                if connection.transport is not None:
                    connection.transport.abort()

        self.folder.mkdir()
        roots = [] if self.root is None else [str(self.root)]
        app = make_relay(RelaySpec(node=self.name, roots=roots), self.folder, SECRET)
        app.middlewares.insert(0, watch)
        runner = web.AppRunner(app, shutdown_timeout=0.01)
        await runner.setup()
        listener = socket.create_server(("127.0.0.1", 0))
        await web.SockSite(runner, listener).start()
        self.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        try:
            yield
        finally:
            await runner.cleanup()


@dataclass
class Cluster:
    """The trainer's folder on node 0, and two engines on each node: engine-1a, engine-1b, ..."""

    nodes: list[Node]
    trainer: Path
    spread: Spread
    engines: list[str]

    def exported(self, version: int = 1, size: int = SIZE) -> ExportResponse:
        path = self.trainer / f"v{version}.safetensors"
        path.write_bytes(os.urandom(size))
        return manifest_of(path, version)

    async def push(self, sent: ExportResponse, *engines: str) -> dict[str, ExportResponse | BaseException]:
        """What each engine is told, all asked at once."""
        names = engines or self.engines
        asked = [self.spread.locate(name, sent, names) for name in names]
        async with asyncio.timeout(60):
            answers = await asyncio.gather(*asked, return_exceptions=True)
        return dict(zip(names, answers, strict=True))


def manifest_of(path: Path, version: int) -> ExportResponse:
    return ExportResponse(
        version=version, path=str(path), digest=f"{version:032x}", num_tensors=1, num_bytes=1
    )


def play(
    story: Callable[[Cluster], Coroutine[Any, Any, None]],
    tmp_path: Path,
    num: int,
    trainer_node: int = 0,
    **faults: dict[str, Any],
) -> None:
    """`faults`: fields of Node by its name, node_1 and so on."""

    async def run() -> None:
        async with AsyncExitStack() as stack:
            trainer = tmp_path / "trainer"
            trainer.mkdir()
            nodes = [Node(k, tmp_path / f"shm-{k}", **faults.get(f"node_{k}", {})) for k in range(num)]
            nodes[trainer_node].root = trainer
            relays = []
            for node in nodes:
                await stack.enter_async_context(node.serving())
                caller = Caller(f"relay-{node.number}", node.url, SECRET)
                stack.push_async_callback(caller.aclose)
                relays.append(NodeRelay(node.name, caller))
            node_of = {f"engine-{k}{letter}": k for k in range(num) for letter in "ab"}
            await story(
                Cluster(
                    nodes, trainer, Spread(relays, node_of, trainer=trainer_node, timeout_s=60), list(node_of)
                )
            )

    asyncio.run(run())


def content(answer: ExportResponse | BaseException) -> bytes:
    if isinstance(answer, BaseException):
        raise answer
    return Path(answer.path).read_bytes()


def flip_bit(path: Path, place: int) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 4
    path.write_bytes(data)


def write_over(path: Path) -> None:
    path.write_bytes(bytes(SIZE))
    os.utime(path, ns=(1, 1))


def test_each_node_pulls_each_piece_once_from_the_one_before_it_whatever_the_number_of_engines(
    tmp_path: Path,
) -> None:
    async def story(cluster: Cluster) -> None:
        sent = cluster.exported()
        told = await cluster.push(sent)
        assert told["engine-0a"] == sent, "on the trainer's node an engine reads what the trainer wrote"
        for name, answer in told.items():
            assert content(answer) == content(sent), name
        assert told["engine-2a"] == told["engine-2b"]
        assert [len(node.files()) for node in cluster.nodes] == [0, 1, 1, 1]
        for node in cluster.nodes[:-1]:
            assert sorted(node.pieces.values()) == [1] * NUM_PIECES, node.name
        assert cluster.nodes[-1].num_served == 0
        await cluster.push(sent)
        assert cluster.nodes[0].num_served == NUM_PIECES, "what is there is not pulled again"

    play(story, tmp_path, 4)


def test_a_node_passes_pieces_on_while_it_still_gets_them(tmp_path: Path) -> None:
    async def story(cluster: Cluster) -> None:
        first, passed_on = cluster.nodes[0], asyncio.Event()

        async def hold_the_rest() -> None:
            if first.num_served >= 3:
                await passed_on.wait()

        async def note() -> None:
            if cluster.nodes[2].num_served:
                passed_on.set()

        first.on_piece, cluster.nodes[2].on_piece = hold_the_rest, note
        sent = cluster.exported()
        told = await cluster.push(sent)
        assert content(told["engine-3a"]) == content(sent)

    play(story, tmp_path, 4)


@pytest.mark.parametrize("hangs", [False, True])
def test_nodes_after_one_that_dies_in_the_middle_go_on_from_the_one_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hangs: bool
) -> None:
    """They keep the pieces that they have; the push goes on without the dead one."""
    monkeypatch.setattr(relay, "WAIT_S", 0.1)
    if hangs:
        monkeypatch.setattr(pull, "SILENT_S", 4.0)
        monkeypatch.setattr("asyncrl.sync.spread.ANSWER_S", 8.0)

    async def story(cluster: Cluster) -> None:
        sent = cluster.exported()
        told = await cluster.push(sent)
        for name in ("engine-2a", "engine-2b", "engine-3a"):
            assert content(told[name]) == content(sent)
        lost = told["engine-1a"]
        assert isinstance(lost, EngineLost), lost
        assert "engine-1a: its node node-1 gets no weights: relay-1 gave no answer to /fetch" in str(lost)
        first, dead, after, last = cluster.nodes
        assert dead.num_served >= 5
        assert first.num_served <= 2 * NUM_PIECES - 3, "node-2 asked for what it did not have"
        assert after.num_served <= NUM_PIECES + pull.WINDOW
        assert last.num_served == 0

    play(story, tmp_path, 4, node_1={"dies_at": 5, "hangs": hangs})


def test_weights_that_are_lost_with_the_trainers_node_are_no_loss_of_engines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is announced already comes from a node that has it, once the trainer is elsewhere."""
    monkeypatch.setattr(relay, "WAIT_S", 0.1)

    async def story(cluster: Cluster) -> None:
        announced = cluster.exported(1, 1000)
        await cluster.push(announced, "engine-1a", "engine-2a")
        first = cluster.nodes[0]
        first.dies_at = first.num_served + 5
        told = await cluster.push(cluster.exported(2), "engine-1a", "engine-2a", "engine-3a")
        assert [type(answer) for answer in told.values()] == [WeightsLost] * 3
        content_of_first = content(announced)
        (cluster.trainer / "v1.safetensors").unlink()
        told = await cluster.push(announced, "engine-3a")
        assert content(told["engine-3a"]) == content_of_first

    play(story, tmp_path, 4)


def test_bytes_that_changed_on_a_node_are_found_by_the_next_one_and_both_are_named(tmp_path: Path) -> None:
    async def story(cluster: Cluster) -> None:
        sent = cluster.exported()
        told = await cluster.push(sent, "engine-1a")
        answer = told["engine-1a"]
        assert isinstance(answer, ExportResponse)
        flip_bit(Path(answer.path), 7 * MIN_PIECE_BYTES + 5)  # in the memory of node-1
        told = await cluster.push(sent, "engine-1a", "engine-2a", "engine-3a")
        for name in ("engine-2a", "engine-3a"):
            assert isinstance(told[name], RoomError), "no node after it takes them"
        error = told["engine-2a"]
        assert not isinstance(error, EngineLost), "a new engine would not help"
        what = (
            f"node-2 got piece 7 of {NUM_PIECES} of the weights {sent.digest} from node-1 3 times with wrong"
        )
        assert what in str(error)
        assert (
            cluster.nodes[1].pieces[f"bytes={7 * MIN_PIECE_BYTES}-{8 * MIN_PIECE_BYTES - 1}"]
            == 2 * pull.TRIES
        )
        assert cluster.nodes[2].files() == []

    play(story, tmp_path, 4)


def test_an_engine_that_comes_later_gets_them_from_a_node_that_has_them(tmp_path: Path) -> None:
    async def story(cluster: Cluster) -> None:
        sent = cluster.exported()
        await cluster.push(sent, "engine-1a")
        told = await cluster.push(sent, "engine-3a")
        assert content(told["engine-3a"]) == content(sent)
        assert [node.num_served for node in cluster.nodes] == [NUM_PIECES, NUM_PIECES, 0, 0]

    play(story, tmp_path, 4)


def test_the_trainer_may_be_on_another_node_than_the_controller_which_reads_what_is_evaluated(
    tmp_path: Path,
) -> None:
    kept = tmp_path / "kept"
    kept.mkdir()

    async def story(cluster: Cluster) -> None:
        sent = cluster.exported()
        told = await cluster.push(sent, "engine-0a", "engine-1a", "engine-2a")
        assert told["engine-1a"] == sent
        assert {content(answer) for answer in told.values()} == {content(sent)}
        assert cluster.nodes[1].num_served == NUM_PIECES
        here = await cluster.spread.here(sent)
        assert Path(here.path).parent == cluster.nodes[0].folder
        os.link(here.path, kept / "eval-1.safetensors")
        later = [cluster.exported(version, 1000) for version in (2, 3)]
        for one in later:
            await cluster.push(one)
        assert not any(path.name.startswith(sent.digest) for path in cluster.nodes[2].files())
        evaluated = sent.model_copy(update={"path": str(kept / "eval-1.safetensors")})
        for engine in ("engine-0a", "engine-1a", "engine-2a"):
            told = await cluster.push(evaluated, engine)
            assert content(told[engine]) == content(sent), engine

    play(story, tmp_path, 3, trainer_node=1, node_0={"root": kept})


def test_a_relay_keeps_the_two_files_that_were_asked_for_last(tmp_path: Path) -> None:
    async def story(cluster: Cluster) -> None:
        sent = [cluster.exported(version, 1000) for version in range(4)]
        for one in sent:
            await cluster.push(one, "engine-1a")
        names = [path.name.partition("-")[0] for path in cluster.nodes[1].files()]
        assert names == [one.digest for one in sent[-2:]]
        told = await cluster.push(sent[0], "engine-1a")
        assert content(told["engine-1a"]) == content(sent[0])
        async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {SECRET}"}) as session:
            async with session.get(cluster.nodes[1].url + "/health") as answer:
                health = RelayHealth.model_validate_json(await answer.read())
        assert health == RelayHealth(node="node-1", num_files=2, num_bytes=2000)

    play(story, tmp_path, 2)


def test_a_node_without_room_is_named_with_the_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def story(cluster: Cluster) -> None:
        path = cluster.trainer / "v7.safetensors"
        with path.open("wb") as file:
            file.truncate(2**43)  # more than any disk of a test has
        told = await cluster.push(manifest_of(path, 7), "engine-1a")
        assert f"node-1 has no room for {2**43} bytes of weights in {tmp_path}/shm-1" in str(
            told["engine-1a"]
        )
        assert "give it more" in str(told["engine-1a"])

        def pwrite(*_: Any) -> int:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(os, "pwrite", pwrite)
        told = await cluster.push(cluster.exported(), "engine-1a")
        assert "node-1 has no room for" in str(told["engine-1a"])
        assert "No space left on device" in str(told["engine-1a"])
        assert not isinstance(told["engine-1a"], EngineLost)
        assert cluster.nodes[1].files() == [], "nothing is left of it"

    play(story, tmp_path, 2)


def test_weights_that_no_node_has_are_an_engine_lost_that_says_who_was_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relay, "WAIT_S", 0.2)

    async def story(cluster: Cluster) -> None:
        gone = manifest_of(cluster.trainer / "v3.safetensors", 3)
        told = await cluster.push(gone, "engine-1a", "engine-2a")
        error = told["engine-2a"]
        assert isinstance(error, EngineLost)
        assert "node-2 gets the weights" in str(error)
        assert f"node-0 ({cluster.nodes[0].url}): status 404" in str(error)
        sent = cluster.exported(3)
        told = await cluster.push(sent, "engine-1a", "engine-2a")
        assert content(told["engine-2a"]) == content(sent), "a failure is not kept"

    play(story, tmp_path, 3)


def test_a_file_that_is_written_over_on_its_way_never_becomes_a_mixture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relay, "WAIT_S", 0.2)

    async def story(cluster: Cluster) -> None:
        first, sent = cluster.nodes[0], cluster.exported()

        async def in_the_middle() -> None:
            if first.num_served >= 5:
                write_over(Path(sent.path))

        first.on_piece = in_the_middle
        told = await cluster.push(sent, "engine-1a")
        assert isinstance(told["engine-1a"], EngineLost)
        assert "was written over" in str(told["engine-1a"])
        assert cluster.nodes[1].files() == []

    play(story, tmp_path, 2)


def test_a_relay_serves_its_own_files_alone_in_whole_pieces_to_those_with_the_secret(tmp_path: Path) -> None:
    async def story(cluster: Cluster) -> None:
        sent = cluster.exported()
        outside = tmp_path / "outside"
        outside.write_text("not of the trainer")
        (cluster.trainer / "link").symlink_to(outside)
        (tmp_path / "trainer-of-another").mkdir()
        near = tmp_path / "trainer-of-another" / "v1"
        near.write_text("whose name begins alike")
        url = f"{cluster.nodes[0].url}/weights/{sent.digest}"
        paths = [outside, cluster.trainer / "link", cluster.trainer / ".." / "outside", near, cluster.trainer]

        async def status(
            headers: dict[str, str], path: object, target: str = url, method: str = "GET"
        ) -> int:
            async with aiohttp.ClientSession() as session:
                async with session.request(
                    method, target, params={"path": str(path)}, headers=headers
                ) as answer:
                    return answer.status

        ours = {"Authorization": f"Bearer {SECRET}"}
        assert await status(ours, sent.path) == 200
        assert [await status(ours, path) for path in paths] == [404] * len(paths)
        for headers in ({}, {"Authorization": "Bearer another"}):
            assert await status(headers, sent.path) == 401
            assert await status(headers, "", cluster.nodes[0].url + "/fetch", "POST") == 401
            assert await status(headers, "", cluster.nodes[0].url + "/health") == 401
        told = await cluster.push(sent, "engine-1a")
        assert isinstance(told["engine-1a"], ExportResponse)
        there = f"{cluster.nodes[1].url}/weights/{sent.digest}"
        for wrong in (
            "bytes=0-",
            "bytes=1-100",
            f"bytes=0-{SIZE}",
            f"bytes={2**60}-{2**60 + 1}",
            "lines=1-2",
        ):
            assert await status({**ours, "Range": wrong}, "", there) == 416, wrong
        assert await status(ours, "", cluster.nodes[1].url + "/weights/..%2f..%2fetc%2fpasswd") == 404
        assert await status(ours, "", cluster.nodes[0].url + "/fetch", "POST") == 422

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(relay, "WAIT_S", 0.1)
        play(story, tmp_path, 2)


def test_the_process_imports_no_torch_holds_a_folder_of_shared_memory_and_leaves_nothing_at_its_end(
    tmp_path: Path,
) -> None:
    spec = tmp_path / "spec.json"
    spec.write_text(RelaySpec(node="node-0").model_dump_json())

    def folders(pid: int) -> list[Path]:
        return list(shared_memory_root().glob(f"asyncrl-{pid}-*"))

    async def health(url: str) -> RelayHealth:
        with_secret = Caller("relay-0", url, SECRET)
        try:
            return await with_secret.get("/health", RelayHealth, timeout_s=60)
        finally:
            await with_secret.aclose()

    for ends in ("SIGTERM", "its parent's end"):
        with closing(socket.create_server(("127.0.0.1", 0))) as listener:
            code = "import runpy, sys; runpy.run_module('asyncrl.weights.relay', run_name='__main__')"
            watched = f"import atexit, sys; atexit.register(lambda: print('torch' in sys.modules)); {code}"
            arguments = ["--spec", str(spec), "--fd", str(listener.fileno())]
            process = subprocess.Popen(
                [sys.executable, "-c", watched, *arguments],
                pass_fds=[listener.fileno()],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            )
            url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        with process:
            assert process.stdin is not None
            process.stdin.write(json.dumps({SECRET_ENV: SECRET}).encode() + b"\n")
            process.stdin.flush()
            assert asyncio.run(health(url)) == RelayHealth(node="node-0", num_files=0, num_bytes=0)
            (folder,) = folders(process.pid)
            assert folder.stat().st_mode & 0o777 == 0o700
            if ends == "SIGTERM":
                process.terminate()
                assert process.stdout is not None
                assert process.stdout.read().decode().split() == ["False"]
            else:
                process.stdin.close()
            process.wait(60)
        assert folders(process.pid) == []


# ---- real processes, on hosts of a network


@pytest.fixture
def needs_hosts() -> None:
    if why := reason_for_none():
        pytest.skip(why)


@pytest.mark.slow
@pytest.mark.usefixtures("needs_hosts")
def test_the_trainers_link_carries_a_file_once_to_three_hosts() -> None:
    data = os.urandom(16 * 2**20)
    with relay_network(4) as relays:
        path = relays.write("v1.safetensors", data)
        before = [host.sent_bytes() for host in relays.hosts]
        answer = relays.push(path, "1", [1, 2, 3])
        assert answer["errors"] == {}
        for number in (1, 2, 3):
            assert relays.read(number, answer["paths"][str(number)]) == data
        sent = [host.sent_bytes() - one for host, one in zip(relays.hosts, before, strict=True)]
        assert all(0.95 < num / len(data) < 1.2 for num in sent[:3]), sent
        assert sent[3] < 0.2 * len(data), "requests and acknowledgements"


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.usefixtures("needs_hosts")
@pytest.mark.parametrize("how", ["killed", "cut off"])
def test_hosts_after_one_that_is_lost_on_the_way_get_the_file_from_the_one_before_it(how: str) -> None:
    data = os.urandom(16 * 2**20)
    with relay_network(4) as relays:
        for host in relays.hosts:
            if not host.shape("tbf", "rate", "8mbit", "burst", "128kb", "latency", "200ms"):
                pytest.skip("this kernel has no tbf, so there is no middle of a push")
        pushing = relays.begin_push(relays.write("v1.safetensors", data), "1", [1, 2, 3])
        lost = relays.hosts[1]
        wait_until(lambda: lost.sent_bytes() > 2**21, pushing)
        if how == "killed":
            lost.kill()
        else:
            lost.link("down")
        for number in (0, 2, 3):
            relays.hosts[number].shape()
        answer = told(pushing)
        assert answer["errors"].keys() == {"1"}
        assert "EngineLost: engine-1: its node node-1 gets no weights" in answer["errors"]["1"]
        for number in (2, 3):
            assert relays.read(number, answer["paths"][str(number)]) == data
        assert relays.hosts[0].sent_bytes() < 2.2 * len(data)
