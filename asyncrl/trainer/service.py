"""The trainer's endpoints over one MovableStep. Knows HTTP; what a step is, it leaves to step.py.

Life:       one thread loads the model and owns torch; all requests but /health run on it in the order in
which they
            arrive. /health is answered by the event loop, during a step too.
Waits:      a request waits for those before it; the client waits for its answer.
Ranks:      every rank answers /health. Rank 0 alone takes requests, and sends each as a command to the torch
threads of the
            others, which do their part of it (following.py). What it refuses by itself, it refuses before it
            sends.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import math
import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NoReturn, TypeVar

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
    TrainerPart,
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
from asyncrl.trainer.movable_step import MovableStep
from asyncrl.trainer.ranks import Command, OneRankError, is_loss_of_a_rank, join_ranks
from asyncrl.trainer.spec import TrainerSpec

T = TypeVar("T")
log = logging.getLogger("asyncrl.trainer")

KEPT_EXPORTS = 2
"""Engines may still read the export before the newest."""


class TrainerService:
    """One MovableStep on its own thread. `num_waiting` counts requests that run or wait."""

    def __init__(self, spec: TrainerSpec) -> None:
        self._spec = spec
        self._torch_thread = ThreadPoolExecutor(1, "torch")
        self._sending_thread = ThreadPoolExecutor(1, "broadcast")
        self.num_waiting = 0
        self._broken = ""
        # Loaded on the thread that will step: the number of CPU threads belongs to the calling thread.
        self.step = self._torch_thread.submit(_make_step, spec).result()
        self._follower = None if self.step.ranks.is_first else Follower(self.step)
        if self._follower is not None:
            self._torch_thread.submit(self._follower.run)

    def __repr__(self) -> str:
        return f"<TrainerService {self.step!r}, {self.step.ranks!r}, {self.num_waiting} waiting>"

    async def run(self, work: Callable[[], T]) -> T:
        """Run `work` on the torch thread, after all that came before it."""
        self.num_waiting += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._torch_thread, work)
        finally:
            self.num_waiting -= 1

    def health(self) -> TrainerHealth:
        """Answered at any time."""
        is_busy = self.num_waiting > 0 if self._follower is None else self._follower.is_busy
        return TrainerHealth(
            policy_version=self.step.policy_version,
            device=self.step.device.type,
            is_busy=is_busy,
            offloaded=self.step.offloaded,
        )

    def together(self, command: Command, work: Callable[[], T]) -> T:
        """On the torch thread of rank 0: `work`, while the other ranks do their part of it. Raises what it
        raises.
        """
        if self._broken:
            raise Refused(
                409,
                f"the trainer's ranks are out of step: {self._broken}",
                rule="they end with the run",
                way_out="start it again.",
            )
        try:
            self.step.ranks.send(command)
            return work()
        except (Refused, OSError):
            raise  # a refusal is all ranks' alike, and files are written beside what they do together
        except Exception as error:
            if self.step.ranks.size > 1:
                self._broken = str(error)
            raise

    def train(self, body: bytes) -> TrainResponse:
        """On the torch thread: one optimizer step. Raises Refused."""
        try:
            header, arrays = unpack_batch(body)
        except ValueError as error:
            raise Refused(
                422,
                str(error),
                rule="the body is asyncrl.messages.trainer_calls.pack_batch",
                way_out="send it with asyncrl's own client.",
            ) from error
        metrics = self.together(Command("train", body=body), lambda: self.step.train(header, arrays))
        finite = {name: value for name, value in metrics.items() if math.isfinite(value)}
        return TrainResponse(
            policy_version=self.step.policy_version,
            metrics=finite,
            not_finite=[name for name in metrics if name not in finite],
        )

    def export(self) -> ExportResponse:
        """On the torch thread: write the newest weights, then delete exports that nobody can be asked to read
        any more.
        """
        path = self._spec.staging_dir / f"v{self.step.policy_version}.safetensors"
        try:
            answer = self.together(Command("export"), lambda: self.step.export(path))
        except OSError as error:
            raise Refused(
                507,
                f"cannot write {path}: {error}",
                rule=f"shared memory holds up to {KEPT_EXPORTS + 1} exports at once",
                way_out="free or enlarge shared memory (df -h /dev/shm).",
            ) from error
        exports = sorted(self._spec.staging_dir.glob("v*.safetensors"), key=lambda file: int(file.stem[1:]))
        for old in exports[:-KEPT_EXPORTS]:
            old.unlink()
        return answer

    def save(self, path: Path, *, merged: bool) -> TrainerHealth:
        """On the torch thread: write a Hugging Face folder, or the adapters alone. Raises Refused if it
        cannot be written.
        """
        try:
            self.step.check_save(
                merged=merged
            )  # before it is sent: the other ranks would gather for what is refused
            self.together(Command("save", {"merged": merged}), lambda: self.step.save(path, merged=merged))
        except (OSError, ValueError) as error:
            raise Refused(
                409,
                f"cannot save to {path}: {error}",
                rule="the new folder is whole before it replaces one that is there",
                way_out="see to the room and the rights on its disk, and start the run again.",
            ) from error
        return self.health()

    def begin_save_state(self, path: Path) -> StateSaved:
        """On the torch thread: copy the state; the writing goes on beside what comes next. Raises Refused."""
        command = Command("begin_save_state", {"path": str(path)})
        pending = self.together(command, lambda: self.step.begin_save_state(path))
        return StateSaved(policy_version=self.step.policy_version, held_s=pending.held_s)

    async def wait_save_state(self) -> TrainerHealth:
        """Answer when what was begun is complete; the torch thread goes on meanwhile. Raises Refused if it
        could not be written.
        """
        try:
            await asyncio.to_thread(self.step.wait_save_state)
        finally:  # the others have written when rank 0 has, or have failed as it did
            await self.run(lambda: self.together(Command("wait_save_state"), self.step.release_copy))
        return self.health()

    def offload(self, parts: list[TrainerPart]) -> Moved:
        """On the torch thread: move these parts off the devices of all ranks. Raises Refused, with all where
        it was.
        """
        return self.together(Command("offload", {"parts": parts}), lambda: self.step.offload(parts))

    def onload(self, parts: list[TrainerPart]) -> Moved:
        """On the torch thread: move them back. Raises Refused, with all where it was."""
        return self.together(Command("onload", {"parts": parts}), lambda: self.step.onload(parts))

    def export_chunk(self, version: int, index: int) -> ExportChunkResponse:
        """On the torch thread: write one chunk of the weights over the one before. Raises Refused."""
        command = Command(
            "export_chunk",
            {"names": self.step.chunk_names(version, index), "is_last": self.step.is_last_chunk(index)},
        )
        try:
            return self.together(command, lambda: self.step.export_chunk(index))
        except OSError as error:
            raise Refused(
                507,
                f"cannot write chunk {index} into {self._spec.staging_dir}: {error}",
                rule=f"shared memory holds one chunk of publisher.chunk_bytes={self._spec.chunk_bytes}, or "
                f"the largest tensor",
                way_out="free or enlarge shared memory (df -h /dev/shm), or lower publisher.chunk_bytes.",
            ) from error

    async def broadcast(self, request: BroadcastRequest) -> BroadcastResponse:
        """Send what is held, beside the torch thread: training goes on. Raises Refused.

        A trainer that was started again holds nothing: it copies the version that is asked for if it is the
        newest.
        """
        transport = self.step.transport
        if transport.version != request.version == self.step.policy_version:
            await self.run(self.export)
        return await asyncio.get_running_loop().run_in_executor(self._sending_thread, transport.send, request)

    def load_state(self, path: Path, *, is_checked: bool) -> TrainerHealth:
        """On the torch thread: go on from there. Raises Refused, with all as it was."""
        command = Command("load_state", {"path": str(path), "is_checked": is_checked})
        self.together(command, lambda: self.step.load_state(path, is_checked=is_checked))
        return self.health()


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
    log.info("serving %r", service)
    app = make_app()
    app.add_exception_handler(Exception, _broken)
    app.add_exception_handler(OneRankError, _one_rank)

    @app.get("/health")
    async def health() -> TrainerHealth:
        return service.health()

    if not service.step.ranks.is_first:
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
        return await service.run(lambda: service.save(Path(message.path), merged=message.merged))

    @app.post("/begin_save_state")
    async def begin_save_state(message: StateRequest) -> StateSaved:
        return await service.run(lambda: service.begin_save_state(Path(message.path)))

    @app.post("/wait_save_state")
    async def wait_save_state() -> TrainerHealth:
        return await service.wait_save_state()

    @app.post("/offload")
    async def offload(message: OffloadRequest) -> Moved:
        return await service.run(lambda: service.offload(message.parts))

    @app.post("/onload")
    async def onload(message: OffloadRequest) -> Moved:
        return await service.run(lambda: service.onload(message.parts))

    @app.post("/export_chunk")
    async def export_chunk(message: ExportChunkRequest) -> ExportChunkResponse:
        return await service.run(lambda: service.export_chunk(message.version, message.index))

    @app.post("/broadcast")
    async def broadcast(message: BroadcastRequest) -> BroadcastResponse:
        return await service.broadcast(message)

    @app.post("/load_state")
    async def load_state(message: StateRequest) -> TrainerHealth:
        return await service.run(
            lambda: service.load_state(Path(message.path), is_checked=message.is_checked)
        )

    return app


def _make_step(spec: TrainerSpec) -> MovableStep:
    device, _ = resolve_device(spec)
    return MovableStep(spec, join_ranks(spec, device))


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


# What the ranks other than the first do: follow its commands. Knows the commands; knows no HTTP.
#
# A refusal that all ranks come to alike is rank 0's to answer. Any other error ends this process, with the
# reason as its last
# word, and so the run: the group cannot go on without one of its ranks.


GRACE_S = 10.0
"""How long a rank that has lost another one waits to be ended, so that the other is named and not itself."""

COMMANDS: dict[str, Callable[[MovableStep, Command], object]] = {
    "train": lambda step, command: step.train(*unpack_batch(command.body)),
    "export": lambda step, command: step.export(Path()),
    "save": lambda step, command: step.join_save(**command.arguments),
    "begin_save_state": lambda step, command: step.begin_save_state(Path(command.arguments["path"])),
    "wait_save_state": lambda step, command: step.end_save_state(),
    "offload": lambda step, command: step.offload(command.arguments["parts"]),
    "onload": lambda step, command: step.onload(command.arguments["parts"]),
    "export_chunk": lambda step, command: step.join_chunk(**command.arguments),
    "load_state": lambda step, command: step.load_state(
        Path(command.arguments["path"]), is_checked=command.arguments["is_checked"]
    ),
}
"""Each request to rank 0, by name: the part of the other ranks."""


class Follower:
    """Life: run() on the torch thread, which never returns: the process ends."""

    def __init__(self, step: MovableStep) -> None:
        self._step = step
        self.is_busy = False

    def run(self) -> NoReturn:
        """Wait for a command, as long as it takes; do it; and again."""
        try:
            while True:
                self._follow(self._step.ranks.wait_command())
        except Exception as error:  # the outermost border of this thread: told, and the end
            log.exception("rank %d cannot go on", self._step.ranks.rank)
            if is_loss_of_a_rank(error):
                threading.Event().wait(GRACE_S)
            body = (
                error.body
                if isinstance(error, OneRankError)
                else ErrorBody(error=f"{type(error).__name__}: {error}")
            )
            print(fatal_line(body), file=sys.stderr, flush=True)
            os._exit(1)

    def _follow(self, command: Command) -> None:
        self.is_busy = True
        try:
            COMMANDS[command.name](self._step, command)
        except Refused as refused:
            log.warning("%s was refused: %s", command.name, refused)
        finally:
            self.is_busy = False
