"""Trainer process: serves one TrainStep to the controller.

One thread owns torch. Rank 0 sends requests to the other ranks and answers with a refusal of all ranks; any
other error ends the process.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import shutil
import signal
import stat
import sys
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import torch
from aiohttp import web
from pydantic import BaseModel
from safetensors import SafetensorError
from transformers.utils.logging import disable_progress_bar

from asyncrl.base.errors import ConfigError
from asyncrl.base.http import (
    Refused,
    add_route,
    child_arguments,
    die_with_parent,
    fail,
    json_answer,
    make_app,
    read_message,
    secret_of,
    serve,
)
from asyncrl.base.message import SECRET_ENV, ErrorBody, fatal_line
from asyncrl.messages.trainer_api import (
    BroadcastRequest,
    BroadcastResponse,
    ExportChunkRequest,
    ExportChunkResponse,
    ExportResponse,
    OffloadRequest,
    SaveRequest,
    StateRequest,
    TrainerHealth,
    TrainResponse,
    unpack_batch,
)
from asyncrl.trainer.build_model import resolve_device
from asyncrl.trainer.ranks import BEATS, Command, join_ranks, loss_behind
from asyncrl.trainer.step import TrainStep
from asyncrl.trainer.step_report import hold_record
from asyncrl.trainer.trainer_client import LOST_STATUS, TrainerSpec

T = TypeVar("T")
log = logging.getLogger("asyncrl.trainer")

ENDPOINTS = ("train", "begin_export", "export", "export_chunk", "broadcast", "wait_save_state")
CALLS: dict[str, type[BaseModel]] = {
    "save": SaveRequest,
    "begin_save_state": StateRequest,
    "load_state": StateRequest,
    "offload": OffloadRequest,
    "onload": OffloadRequest,
}
KEPT_EXPORTS = 2
GRACE_S = 10.0
"""Exit delay after another rank was lost, whose error is the run's."""


class TrainerService:
    """A TrainStep on its own thread."""

    def __init__(self, spec: TrainerSpec) -> None:
        self._spec = spec
        self._torch_thread = ThreadPoolExecutor(1, "torch")
        self._sending_thread = ThreadPoolExecutor(1, "broadcast")
        self.num_waiting = 0
        self._failure: Refused | None = None
        self._begun: Callable[[], ExportResponse] | None = None
        # torch's number of CPU threads belongs to the calling thread.
        self.step = self._torch_thread.submit(
            lambda: TrainStep(spec, join_ranks(spec, *resolve_device(spec)))
        ).result()
        if not self.step.ranks.is_first:
            self._torch_thread.submit(self._follow)
        elif self.step.ranks.size > 1:
            threading.Thread(target=self._beat, name="beat", daemon=True).start()

    async def run(self, work: Callable[[], T]) -> T:
        self.num_waiting += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._torch_thread, work)
        finally:
            self.num_waiting -= 1

    def together(self, name: str, body: bytes = b"", **arguments: Any) -> Any:
        """Call this method on all ranks, from rank 0's torch thread. Raises its errors, and Refused."""
        if self._failure is not None:
            raise self._failure
        command = Command(name, arguments, body)
        try:
            self.step.ranks.send(command)
            return _perform(self.step, command)
        except Refused:
            raise
        except (OSError, SafetensorError) as error:  # file errors do not desynchronize the ranks
            raise _cannot_write(name, arguments.get("path", "its file"), error) from error
        except Exception as error:
            if self.step.ranks.size > 1:
                self._failure = self._refusal_after(error)
                if self._failure.status == LOST_STATUS:
                    raise self._failure from error
            raise

    def _refusal_after(self, error: Exception) -> Refused:
        if (lost := loss_behind(error, self._spec)) is not None:
            return Refused(LOST_STATUS, lost.error, rule=lost.rule, way_out=lost.way_out)
        return Refused(409, f"the trainer's ranks are out of step: {error}", way_out="restart the trainer.")

    def _beat(self) -> None:
        never = threading.Event()
        while self._failure is None and not never.wait(self._spec.trainer.timeout_s / BEATS):
            try:
                self._torch_thread.submit(self.step.ranks.beat).result()
            except RuntimeError as error:
                self._failure = self._refusal_after(error)

    def route(self, name: str) -> Callable[[web.Request], Awaitable[web.Response]]:

        async def handle(request: web.Request) -> web.Response:
            message = read_message(CALLS[name], await request.read())
            answer = await self.run(lambda: self.together(name, **message.model_dump()))
            return json_answer(answer if isinstance(answer, BaseModel) else await self.health())

        return handle

    async def staged(self, request: web.Request) -> web.StreamResponse:
        """Send an exported file or a Range of it."""
        return web.FileResponse(self._spec.staging_dir / Path(request.match_info["name"]).name)

    async def health(self) -> TrainerHealth:
        if self._failure is not None and self._failure.status == LOST_STATUS:
            raise self._failure
        return TrainerHealth(
            policy_version=self.step.policy_version,
            device=self.step.device.type,
            is_busy=self.num_waiting > 0,
            offloaded=self.step.offloaded,
        )

    async def train(self, body: bytes) -> TrainResponse:

        def work() -> TrainResponse:
            metrics = self.together("train", body)
            finite = {name: value for name, value in metrics.items() if math.isfinite(value)}
            return TrainResponse(
                policy_version=self.step.policy_version,
                metrics=finite,
                not_finite=[name for name in metrics if name not in finite],
                rollout_gaps=self.step.rollout_gaps,
            )

        return await self.run(work)

    async def begin_export(self) -> TrainerHealth:
        version, self._begun = await self.run(self._begin_export)
        return (await self.health()).model_copy(update={"policy_version": version})

    async def export(self) -> ExportResponse:
        begun, self._begun = self._begun, None
        finish = begun or (await self.run(self._begin_export))[1]
        return await asyncio.to_thread(self._finish_export, finish)

    def _begin_export(self) -> tuple[int, Callable[[], ExportResponse]]:
        version = self.step.policy_version
        path = self._spec.staging_dir / f"v{version}.safetensors"
        return version, self.together("begin_export", path=str(path))

    def _finish_export(self, begun: Callable[[], ExportResponse]) -> ExportResponse:
        folder = self._spec.staging_dir
        try:
            answer = begun()
        except OSError as error:
            raise _cannot_write("export", folder, error) from error
        exports = sorted(folder.glob("v*.safetensors"), key=lambda file: int(file.stem[1:]))
        for old in exports[:-KEPT_EXPORTS]:
            old.unlink(missing_ok=True)
        return answer

    async def export_chunk(self, message: ExportChunkRequest) -> ExportChunkResponse:

        def work() -> ExportChunkResponse:
            self.step.check_chunk(message.version, message.index)
            answer: ExportChunkResponse = self.together("export_chunk", index=message.index)
            return answer

        return await self.run(work)

    async def broadcast(self, request: BroadcastRequest) -> BroadcastResponse:
        transport = self.step.transport
        if transport.version != request.version == self.step.policy_version:
            await self.export()
        return await asyncio.get_running_loop().run_in_executor(self._sending_thread, transport.send, request)

    async def wait_save_state(self) -> TrainerHealth:
        await asyncio.to_thread(self.step.wait_save_state)
        return await self.health()

    def _follow(self) -> NoReturn:
        try:
            while True:
                command = self.step.ranks.wait_command()
                self.num_waiting = 1
                try:
                    _perform(self.step, command)
                except Refused as refused:
                    log.warning("%s was refused: %s", command.name, refused)
                self.num_waiting = 0
        except Exception as error:
            log.exception("rank %d has failed", self.step.ranks.rank)
            lost = loss_behind(error, self._spec)
            if lost is not None:
                threading.Event().wait(GRACE_S)
            print(fatal_line(lost or _words(error)), file=sys.stderr, flush=True)
            os._exit(1)


def _perform(step: TrainStep, command: Command) -> Any:
    if command.name == "train":
        try:
            header, arrays = unpack_batch(command.body)
        except ValueError as error:
            raise Refused(422, str(error), rule="the body is what pack_batch makes") from error
        return step.train(header, arrays)
    arguments = dict(command.arguments)
    if "path" in arguments:
        arguments["path"] = Path(arguments["path"])
    return getattr(step, command.name)(**arguments)


def _cannot_write(name: str, path: object, error: Exception) -> Refused:
    what = f"/{name} cannot write {path}: {error}"
    way_out = "free space on the disk of the run directory (exports: /dev/shm), then start again."
    return Refused(507, what, way_out=way_out)


def _words(error: Exception) -> ErrorBody:
    if isinstance(error, ConfigError):
        return ErrorBody(error=error.what, rule=error.rule, way_out=error.way_out)
    way_out = "the trainer's log has the traceback."
    if type(error).__module__.startswith(("torch._dynamo", "torch._inductor", "triton.")):
        way_out = "set trainer.compile=false; " + way_out
    # on CPU torch raises RuntimeError for a lack of memory
    if isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in str(error):
        way_out = "lower trainer.micro_batch_tokens, or take a smaller model or more memory."
    return ErrorBody(error=f"{type(error).__name__}: {error}", way_out=way_out)


def make_service(service: TrainerService, secret: str) -> web.Application:
    app = make_app(secret, words=_words)
    add_route(app, "GET", "/health", service.health)
    for name in ENDPOINTS if service.step.ranks.is_first else ():
        add_route(app, "POST", f"/{name}", getattr(service, name))
    for name in CALLS if service.step.ranks.is_first else ():
        app.router.add_post(f"/{name}", service.route(name))
    app.router.add_get("/staged/{name}", service.staged)
    return app


def main() -> None:
    text, fd = child_arguments()
    spec = TrainerSpec.model_validate_json(text)
    # on several nodes, rank 0's parent counts
    orphaned = partial(shutil.rmtree, spec.staging_dir, ignore_errors=True)
    die_with_parent(*([orphaned] if spec.rank == 0 else []))
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: os._exit(0))
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    disable_progress_bar()
    try:
        if spec.rank == 0 or not spec.store:
            make_staging(spec.staging_dir)
        if spec.rank == 0:
            hold_record(spec.record_path)
        service = TrainerService(spec)
    except (ConfigError, MemoryError, RuntimeError, OSError) as error:
        log.exception("cannot start")
        words = _words(error)
        fail(words.error, rule=words.rule, way_out=words.way_out)
    log.info("serving %s, rank %d of %d", spec.model_path, spec.rank, spec.trainer.world_size)
    serve(make_service(service, secret_of(SECRET_ENV)), fd, handles_signals=False)


def make_staging(path: Path) -> None:
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    info = path.lstat()
    if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.getuid():
        raise PermissionError(f"the staging folder {path} belongs to user {info.st_uid}, or is no folder")
    path.chmod(0o700)


if __name__ == "__main__":
    main()
