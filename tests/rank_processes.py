"""The real processes of a trainer with several ranks, over HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import socket
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from forked_processes import popen
from network_hosts import Host
from pydantic import BaseModel
from trainer_cases import make_spec

from asyncrl.http import Caller
from asyncrl.messages.base import SECRET_ENV
from asyncrl.messages.calls import (
    BatchArrays,
    BatchHeader,
    ExportResponse,
    SaveRequest,
    StateRequest,
    TrainerHealth,
    TrainResponse,
    pack_batch,
)

T = TypeVar("T")
Answer = TypeVar("Answer", bound=BaseModel)
TIMEOUT_S = 120.0
STORE_PORT = 29500
"""On hosts of a network, where nothing else listens."""


@dataclass
class Group:
    """The processes of one trainer, rank 0 first."""

    processes: list[subprocess.Popen[bytes]]
    urls: list[str]
    folder: Path
    hosts: Sequence[Host] = ()
    """Where they are, if not all on this one."""

    def ask(self, call: Callable[[Caller], Awaitable[T]], rank: int = 0) -> T:
        async def story() -> T:
            caller = Caller(f"trainer-{rank}", self.urls[rank], "s3cret")
            try:
                return await call(caller)
            finally:
                await caller.aclose()

        return self.hosts[rank].inside(lambda: asyncio.run(story())) if self.hosts else asyncio.run(story())

    def post(self, path: str, body: BaseModel | bytes, answer: type[Answer]) -> Answer:
        return self.ask(lambda caller: caller.post(path, body, answer, timeout_s=TIMEOUT_S))

    def train(self, header: BatchHeader, arrays: BatchArrays) -> TrainResponse:
        return self.train_body(pack_batch(header, arrays))

    def train_body(self, body: bytes) -> TrainResponse:
        return self.post("/train", body, TrainResponse)

    def begin_export(self) -> int:
        return self.post("/begin_export", b"", TrainerHealth).policy_version

    def export(self) -> ExportResponse:
        return self.post("/export", b"", ExportResponse)

    def save(self, path: Path, *, merged: bool = True) -> TrainerHealth:
        return self.post("/save", SaveRequest(path=str(path), merged=merged), TrainerHealth)

    def health(self, rank: int = 0) -> TrainerHealth:
        return self.ask(lambda caller: caller.get("/health", TrainerHealth, timeout_s=TIMEOUT_S), rank)

    def log(self, rank: int = 0) -> str:
        return (self.folder / f"log-{rank}").read_text()


def save_state(group: Group, path: Path) -> None:
    """Begin, and wait until it is written."""
    group.post("/begin_save_state", StateRequest(path=str(path)), TrainerHealth)
    group.post("/wait_save_state", b"", TrainerHealth)


@contextlib.contextmanager
def running(
    model_dir: Path,
    folder: Path,
    world_size: int = 2,
    *,
    trainer: dict[str, Any] | None = None,
    hosts: Sequence[Host] = (),
    hide: Sequence[Path] = (),
    **values: Any,
) -> Iterator[Group]:
    """The ranks of one trainer, one on each of `hosts` if there are any, each with folders of its own in the
    place of those to `hide`; killed at the end if they still run.
    """
    folder.mkdir(exist_ok=True)
    processes, urls = [], []
    for rank in range(world_size):
        place = dict[str, Any]()
        if hosts:
            store = f"{hosts[0].address}:{STORE_PORT}"
            place = {"store": store, "address": hosts[rank].address, "local_rank": 0}
            place["staging_dir"] = str(folder / f"staging-{rank}")
        settings = {"world_size": world_size, **(trainer or {})}
        spec = make_spec(model_dir, folder, trainer=settings, rank=rank, **{**place, **values})
        (folder / f"spec-{rank}.json").write_text(spec.model_dump_json(), encoding="utf-8")
        with _listen(spec.address, hosts[rank] if hosts else None) as listener:
            descriptor, (host, port) = listener.fileno(), listener.getsockname()
            urls.append(f"http://{host}:{port}")
            arguments = f"--spec {folder / f'spec-{rank}.json'} --fd {descriptor}".split()
            command = [sys.executable, "-m", "asyncrl.trainer.rank_process", *arguments]
            environment = {SECRET_ENV: "s3cret", "PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"}
            start = functools.partial(hosts[rank].start, hide=hide) if hosts else popen
            with (folder / f"log-{rank}").open("wb") as log:
                files = {"stdin": subprocess.PIPE, "stdout": log, "stderr": log, "pass_fds": [descriptor]}
                processes.append(start(command, env=os.environ | environment, **files))
    try:
        yield Group(processes, urls, folder, hosts)
    finally:
        for process in processes:
            process.kill()
            process.wait()
            if process.stdin is not None:
                process.stdin.close()


def _listen(address: str, host: Host | None) -> socket.socket:
    def listen() -> socket.socket:
        return socket.create_server((address, 0))

    return listen() if host is None else host.inside(listen)
