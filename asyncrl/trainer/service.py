"""The trainer's endpoints over one TrainStep. Knows HTTP; what a step is, it leaves to step.py.

Life:       one thread loads the model and owns torch; all requests but /health run on it in the order in
            which they arrive. /health is answered by the event loop, during a step too.
Waits:      a request waits for those before it; the client waits for its answer.
Ranks:      every rank answers /health. Rank 0 alone takes requests, and sends each as a command to the torch
            threads of the others, which call the same method of their TrainStep. A refusal that all ranks
            come to alike is rank 0's to answer. Any other error ends the process of its rank, with the reason
            as its last word, and so the run: the group cannot go on without one of its ranks.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import math
import os
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import torch
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse

from asyncrl.errors import ConfigError
from asyncrl.http import Refused, fail, make_app
from asyncrl.messages.base import (
    BroadcastRequest,
    BroadcastResponse,
    ErrorBody,
    Moved,
    fatal_line,
)
from asyncrl.messages.trainer_calls import (
    ExportChunkRequest,
    ExportChunkResponse,
    ExportResponse,
    OffloadRequest,
    SaveRequest,
    StateRequest,
    StateSaved,
    TrainerHealth,
    TrainResponse,
    unpack_batch,
)
from asyncrl.trainer.model.parts import resolve_device
from asyncrl.trainer.ranks import Command, OneRankError, is_loss_of_a_rank, join_ranks
from asyncrl.trainer.spec import TrainerSpec
from asyncrl.trainer.step import TrainStep

T = TypeVar("T")
log = logging.getLogger("asyncrl.trainer")

KEPT_EXPORTS = 2
"""Engines may still read the export before the newest."""
GRACE_S = 10.0
"""How long a rank that has lost another one waits to be ended, so that the other is named and not itself."""


class TrainerService:
    """One TrainStep on its own thread. `num_waiting` counts requests that run or wait."""

    def __init__(self, spec: TrainerSpec) -> None:
        self._spec = spec
        self._torch_thread = ThreadPoolExecutor(1, "torch")
        self._sending_thread = ThreadPoolExecutor(1, "broadcast")
        self.num_waiting = 0
        self._broken = ""
        # Loaded on the thread that will step: the number of CPU threads belongs to the calling thread.
        self.step = self._torch_thread.submit(_make_step, spec).result()
        if not self.step.ranks.is_first:
            self._torch_thread.submit(self._follow)

    async def run(self, work: Callable[[], T]) -> T:
        """Run `work` on the torch thread, after all that came before it."""
        self.num_waiting += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._torch_thread, work)
        finally:
            self.num_waiting -= 1

    def health(self) -> TrainerHealth:
        """Answered at any time."""
        return TrainerHealth(
            policy_version=self.step.policy_version,
            device=self.step.device.type,
            is_busy=self.num_waiting > 0,
            offloaded=self.step.offloaded,
        )

    def together(self, name: str, body: bytes = b"", **arguments: Any) -> Any:
        """On the torch thread of rank 0: call this method of the step on all ranks. Raises what it raises."""
        if self._broken:
            raise Refused(
                409,
                f"the trainer's ranks are out of step: {self._broken}",
                rule="they end with the run",
                way_out="start it again.",
            )
        command = Command(name, arguments, body)
        try:
            self.step.ranks.send(command)
            return _perform(self.step, command)
        except (Refused, OSError):
            raise  # a refusal is all ranks' alike, and files are written beside what they do together
        except Exception as error:
            if self.step.ranks.size > 1:
                self._broken = str(error)
            raise

    async def call(self, name: str, **arguments: Any) -> Any:
        """together(), after all requests that came before it."""
        return await self.run(lambda: self.together(name, **arguments))

    def train(self, body: bytes) -> TrainResponse:
        """On the torch thread: one optimizer step. Raises Refused."""
        try:
            unpack_batch(body)
        except ValueError as error:
            raise Refused(422, str(error), rule="the body is trainer_calls.pack_batch") from error
        metrics = self.together("train", body)
        finite = {name: value for name, value in metrics.items() if math.isfinite(value)}
        return TrainResponse(
            policy_version=self.step.policy_version,
            metrics=finite,
            not_finite=[name for name in metrics if name not in finite],
        )

    def export(self) -> ExportResponse:
        """On the torch thread: write the newest weights, then delete exports that no engine can be asked to
        read any more.
        """
        path = self._spec.staging_dir / f"v{self.step.policy_version}.safetensors"
        with _no_room(
            f"cannot write {path}", f"shared memory holds up to {KEPT_EXPORTS + 1} exports at once"
        ):
            answer: ExportResponse = self.together("export", path=str(path))
        exports = sorted(self._spec.staging_dir.glob("v*.safetensors"), key=lambda file: int(file.stem[1:]))
        for old in exports[:-KEPT_EXPORTS]:
            old.unlink()
        return answer

    def export_chunk(self, version: int, index: int) -> ExportChunkResponse:
        """On the torch thread: write one chunk of the weights over the one before. Raises Refused."""
        names = self.step.chunk_names(version, index)
        rule = (
            f"shared memory holds a chunk of weight_sync.chunk_bytes={self._spec.chunk_bytes}, or one tensor"
        )
        with _no_room(f"cannot write chunk {index} into {self._spec.staging_dir}", rule):
            answer: ExportChunkResponse = self.together("export_chunk", index=index, names=names)
        return answer

    def save(self, path: str, *, merged: bool) -> TrainerHealth:
        """On the torch thread: write a Hugging Face folder, or the adapters alone. Raises Refused if it
        cannot be written.
        """
        try:
            self.together("save", path=path, merged=merged)
        except (OSError, ValueError) as error:
            raise Refused(
                409,
                f"cannot save to {path}: {error}",
                rule="the new folder is whole before it replaces one that is there",
                way_out="see to the room and the rights on its disk, and start the run again.",
            ) from error
        return self.health()

    async def broadcast(self, request: BroadcastRequest) -> BroadcastResponse:
        """Send what is held, beside the torch thread: training goes on. Raises Refused.

        A trainer that was started again holds nothing: it copies the version that is asked for if it is the
        newest.
        """
        transport = self.step.transport
        if transport.version != request.version == self.step.policy_version:
            await self.run(self.export)
        return await asyncio.get_running_loop().run_in_executor(self._sending_thread, transport.send, request)

    def _follow(self) -> NoReturn:
        """The torch thread of another rank: wait for a command, as long as it takes; do it; and again."""
        try:
            while True:
                command = self.step.ranks.wait_command()
                self.num_waiting = 1
                try:
                    _perform(self.step, command)
                except Refused as refused:
                    log.warning("%s was refused: %s", command.name, refused)
                self.num_waiting = 0
        except Exception as error:  # the outermost border of this thread: told, and the end
            log.exception("rank %d cannot go on", self.step.ranks.rank)
            if is_loss_of_a_rank(error):
                threading.Event().wait(GRACE_S)
            words = ErrorBody(error=f"{type(error).__name__}: {error}")
            print(
                fatal_line(error.body if isinstance(error, OneRankError) else words),
                file=sys.stderr,
                flush=True,
            )
            os._exit(1)


def _perform(step: TrainStep, command: Command) -> Any:
    """A command's part of this rank."""
    if command.name == "train":
        return step.train(*unpack_batch(command.body))
    arguments = dict(command.arguments)
    if "path" in arguments:
        arguments["path"] = Path(arguments["path"])
    return getattr(step, command.name)(**arguments)


@contextmanager
def _no_room(what: str, rule: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        way_out = "free or enlarge shared memory (df -h /dev/shm), or lower weight_sync.chunk_bytes."
        raise Refused(507, f"{what}: {error}", rule=rule, way_out=way_out) from error


def make_service(spec: TrainerSpec) -> FastAPI:
    """The app, model loaded. Ends the process with a fatal line if the spec cannot be met."""
    try:
        service = TrainerService(spec)
    except ConfigError as error:
        fail(error.what, rule=error.rule, way_out=error.way_out)
    except (
        MemoryError,
        RuntimeError,
    ) as error:  # torch reports a lack of memory on the CPU as a plain RuntimeError
        log.exception("cannot start")
        fail(
            f"the trainer cannot start: {type(error).__name__}: {error}",
            way_out="if memory is short, take a smaller model or more memory; the traceback is in this log.",
        )
    ranks = service.step.ranks
    log.info("serving %s, rank %d of %d", spec.model_path, ranks.rank, ranks.size)
    app = make_app()
    app.add_exception_handler(Exception, _broken)
    app.add_exception_handler(OneRankError, _one_rank)

    @app.get("/health")
    async def health() -> TrainerHealth:
        return service.health()

    if not ranks.is_first:
        return app

    @app.post("/train")
    async def train(request: Request) -> TrainResponse:
        body = await request.body()
        return await service.run(lambda: service.train(body))

    @app.post("/export")
    async def export() -> ExportResponse:
        return await service.run(service.export)

    @app.post("/save")
    async def save(message: SaveRequest) -> TrainerHealth:
        return await service.run(lambda: service.save(message.path, merged=message.merged))

    @app.post("/begin_save_state")
    async def begin_save_state(message: StateRequest) -> StateSaved:
        pending = await service.call("begin_save_state", path=message.path)
        return StateSaved(policy_version=service.step.policy_version, held_s=pending.held_s)

    @app.post("/wait_save_state")
    async def wait_save_state() -> TrainerHealth:
        await asyncio.to_thread(service.step.wait_save_state)  # the torch thread goes on meanwhile
        return service.health()

    @app.post("/load_state")
    async def load_state(message: StateRequest) -> TrainerHealth:
        await service.call("load_state", path=message.path)
        return service.health()

    @app.post("/offload")
    async def offload(message: OffloadRequest) -> Moved:
        moved: Moved = await service.call("offload", parts=message.parts)
        return moved

    @app.post("/onload")
    async def onload(message: OffloadRequest) -> Moved:
        moved: Moved = await service.call("onload", parts=message.parts)
        return moved

    @app.post("/export_chunk")
    async def export_chunk(message: ExportChunkRequest) -> ExportChunkResponse:
        return await service.run(lambda: service.export_chunk(message.version, message.index))

    @app.post("/broadcast")
    async def broadcast(message: BroadcastRequest) -> BroadcastResponse:
        return await service.broadcast(message)

    return app


def _make_step(spec: TrainerSpec) -> TrainStep:
    device, _ = resolve_device(spec)
    return TrainStep(spec, join_ranks(spec, device))


async def _one_rank(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, OneRankError)
    return JSONResponse(error.body.model_dump(), status_code=422)


async def _broken(_: Request, error: Exception) -> JSONResponse:
    """Any other exception is answered, not fatal; the server's log has the traceback, which Starlette raises
    again for it.
    """
    is_memory = isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)
    way_out = "lower trainer.micro_batch_tokens." if is_memory else "the trainer's log has the traceback."
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        way_out = "free space on the disk of the run directory and start the run again."
    return JSONResponse(
        ErrorBody(error=f"{type(error).__name__}: {error}", way_out=way_out).model_dump(), status_code=500
    )
