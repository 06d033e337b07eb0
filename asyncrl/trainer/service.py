"""The trainer's endpoints over one TrainStep. Knows HTTP; what a step is, it leaves to step.py.

Life:       one thread loads the model and owns torch; /train, /export and /save run on it in the order in which they
            arrive. /health is answered by the event loop, during a step too.
Waits:      a request waits for those before it; the client waits for its answer.
"""

from __future__ import annotations

import asyncio
import errno
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import torch
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse

from asyncrl.errors import ConfigError
from asyncrl.serving import Refused, fail, make_app
from asyncrl.trainer.spec import TrainerSpec
from asyncrl.trainer.step import TrainStep
from asyncrl.wire import ErrorBody, ExportResponse, SaveRequest, TrainerHealth, TrainResponse, unpack_batch

T = TypeVar("T")
log = logging.getLogger("asyncrl.trainer")

KEPT_EXPORTS = 2
"""Engines may still read the export before the newest."""


class TrainerService:
    """One TrainStep on its own thread. `num_waiting` counts requests that run or wait."""

    def __init__(self, spec: TrainerSpec) -> None:
        self._spec = spec
        self._torch_thread = ThreadPoolExecutor(1, "torch")
        self.num_waiting = 0
        # Loaded on the thread that will step: the number of CPU threads belongs to the calling thread.
        self.step = self._torch_thread.submit(TrainStep, spec).result()

    def __repr__(self) -> str:
        return f"<TrainerService {self.step!r}, {self.num_waiting} waiting>"

    async def run(self, work: Callable[[], T]) -> T:
        """Run `work` on the torch thread, after all that came before it."""
        self.num_waiting += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._torch_thread, work)
        finally:
            self.num_waiting -= 1

    def health(self) -> TrainerHealth:
        """Answered at any time."""
        return TrainerHealth(policy_version=self.step.policy_version, device=self.step.device.type, is_busy=self.num_waiting > 0)

    def train(self, body: bytes) -> TrainResponse:
        """On the torch thread: one optimizer step. Raises Refused."""
        try:
            header, arrays = unpack_batch(body)
        except ValueError as error:
            raise Refused(
                422, str(error), rule="the body is asyncrl.wire.pack_batch", way_out="send it with asyncrl's own client."
            ) from error
        metrics = self.step.train(header, arrays)
        return TrainResponse(policy_version=self.step.policy_version, metrics=metrics)

    def export(self) -> ExportResponse:
        """On the torch thread: write the newest weights, then delete exports that nobody can be asked to read any more."""
        path = self._spec.staging_dir / f"v{self.step.policy_version}.safetensors"
        try:
            answer = self.step.export(path)
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

    def save(self, path: Path) -> TrainerHealth:
        """On the torch thread: write a Hugging Face folder. Raises Refused if it cannot be written."""
        try:
            self.step.save(path)
        except (OSError, ValueError) as error:
            raise Refused(
                409, f"cannot save to {path}: {error}", rule="the folder is new, and writable", way_out="give another path."
            ) from error
        return self.health()


def make_service(spec: TrainerSpec) -> FastAPI:
    """The app, model loaded. Ends the process with a fatal line if the spec cannot be met."""
    try:
        service = TrainerService(spec)
    except ConfigError as error:
        fail(error.what, rule=error.rule, way_out=error.way_out)
    except (MemoryError, RuntimeError) as error:  # torch reports a lack of memory on the CPU as a plain RuntimeError
        log.exception("cannot start")
        fail(
            f"the trainer cannot start: {type(error).__name__}: {error}",
            way_out="if memory is short, take a smaller model or more memory; the traceback is in this log.",
        )
    log.info("serving %r", service)
    app = make_app()
    app.add_exception_handler(Exception, _broken)

    @app.get("/health")
    async def health() -> TrainerHealth:
        return service.health()

    @app.post("/train")
    async def train(request: Request) -> TrainResponse:
        body = await request.body()
        return await service.run(lambda: service.train(body))

    @app.post("/export")
    async def export() -> ExportResponse:
        return await service.run(service.export)

    @app.post("/save")
    async def save(message: SaveRequest) -> TrainerHealth:
        return await service.run(lambda: service.save(Path(message.path)))

    return app


async def _broken(_: Request, error: Exception) -> JSONResponse:
    """Any other exception is answered, not fatal; the server's log has the traceback, which Starlette raises again for it."""
    is_memory = isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)
    way_out = "lower trainer.micro_batch_tokens." if is_memory else "the trainer's log has the traceback."
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        way_out = "free space on the disk of the run directory and start the run again."
    return JSONResponse(ErrorBody(error=f"{type(error).__name__}: {error}", way_out=way_out).model_dump(), status_code=500)
