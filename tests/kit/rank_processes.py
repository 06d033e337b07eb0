"""The real processes of a trainer with several ranks, over HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from forked_processes import popen
from pydantic import BaseModel
from trainer_cases import make_spec

from asyncrl.base.http import SECRET_ENV, Caller
from asyncrl.messages.trainer_api import (
    BatchHeader,
    BeginExportRequest,
    ExportResponse,
    StateRequest,
    Tokens,
    TrainerHealth,
    TrainResponse,
    pack_batch,
)

T = TypeVar("T")
Answer = TypeVar("Answer", bound=BaseModel)
TIMEOUT_S = 120.0


@dataclass
class Group:
    """The processes of one trainer, rank 0 first."""

    processes: list[subprocess.Popen[bytes]]
    urls: list[str]
    folder: Path

    def ask(self, call: Callable[[Caller], Awaitable[T]], rank: int = 0) -> T:
        async def story() -> T:
            caller = Caller(f"trainer-{rank}", self.urls[rank], "s3cret")
            try:
                return await call(caller)
            finally:
                await caller.aclose()

        return asyncio.run(story())

    def post(self, path: str, body: BaseModel | bytes, answer: type[Answer]) -> Answer:
        return self.ask(
            lambda caller: caller.post(path, body, answer, timeout_s=TIMEOUT_S)
        )

    def train(self, header: BatchHeader, arrays: Tokens) -> TrainResponse:
        return self.post("/train", pack_batch(header, arrays), TrainResponse)

    def begin_export(self) -> int:
        request = BeginExportRequest(above=-1)
        return self.post("/begin_export", request, TrainerHealth).policy_version

    def export(self) -> ExportResponse:
        return self.post("/export", b"", ExportResponse)

    def save(self, path: Path) -> TrainerHealth:
        return self.post("/save", StateRequest(path=path), TrainerHealth)

    def health(self, rank: int = 0) -> TrainerHealth:
        return self.ask(
            lambda caller: caller.get("/health", TrainerHealth, timeout_s=TIMEOUT_S),
            rank,
        )

    def log(self, rank: int = 0) -> str:
        return (self.folder / f"log-{rank}").read_text()


def save_state(group: Group, path: Path) -> None:
    """Begin a save and wait for the end."""
    group.post("/begin_save_state", StateRequest(path=str(path)), TrainerHealth)
    group.post("/wait_save_state", b"", TrainerHealth)


@contextlib.contextmanager
def running(
    model_dir: Path,
    folder: Path,
    world_size: int = 2,
    *,
    trainer: dict[str, Any] | None = None,
    **values: Any,
) -> Iterator[Group]:
    """Start the ranks of one trainer, and kill them at the end."""
    folder.mkdir(exist_ok=True)
    processes, urls = [], []
    for rank in range(world_size):
        settings = {"world_size": world_size, **(trainer or {})}
        spec = make_spec(
            model_dir,
            folder,
            trainer=settings,
            rank=rank,
            **values,
        )
        (folder / f"spec-{rank}.json").write_text(
            spec.model_dump_json(), encoding="utf-8"
        )
        with socket.create_server((spec.address, 0)) as listener:
            descriptor, (host, port) = listener.fileno(), listener.getsockname()
            urls.append(f"http://{host}:{port}")
            arguments = (
                f"--spec {folder / f'spec-{rank}.json'} --fd {descriptor}".split()
            )
            command = [
                sys.executable,
                "-m",
                "asyncrl.trainer.ranks.rank_process",
                *arguments,
            ]
            environment = {
                SECRET_ENV: "s3cret",
                "PYTHONPATH": str(folder),
                "OMP_NUM_THREADS": "1",
            }
            with (folder / f"log-{rank}").open("wb") as log:
                files = {
                    "stdin": subprocess.PIPE,
                    "stdout": log,
                    "stderr": log,
                    "pass_fds": [descriptor],
                }
                processes.append(popen(command, env=os.environ | environment, **files))
    try:
        yield Group(processes, urls, folder)
    finally:
        for process in processes:
            process.kill()
            process.wait()
            if process.stdin is not None:
                process.stdin.close()
