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
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import torch
from aiohttp import web
from pydantic import BaseModel
from safetensors import SafetensorError
from transformers.utils.logging import disable_progress_bar

from asyncrl.base.errors import ConfigError, ErrorBody, fatal_line
from asyncrl.base.host import LOG_FORMAT
from asyncrl.base.http import (
    SECRET_ENV,
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
from asyncrl.messages import trainer_api as api
from asyncrl.trainer.build_model import resolve_device
from asyncrl.trainer.ranks import BEATS, join_ranks, loss_behind
from asyncrl.trainer.step import TrainStep
from asyncrl.trainer.step_metrics import hold_record
from asyncrl.trainer.trainer_client import TrainerSpec

T = TypeVar("T")
log = logging.getLogger("asyncrl.trainer")

ENDPOINTS = ("train", "begin_export", "export", "broadcast", "wait_save_state")
CALLS: dict[str, type[BaseModel]] = {
    "export_chunk": api.ExportChunkRequest,
    "save": api.StateRequest,
    "begin_save_state": api.StateRequest,
    "load_state": api.StateRequest,
    "offload": api.OffloadRequest,
    "onload": api.OffloadRequest,
}
"""Methods of TrainStep that a request calls on all ranks, with the fields of its body."""
BODIES = CALLS | {"begin_export": api.StateRequest}
KEPT_EXPORTS = 2
GRACE_S = 10.0
"""Exit delay after another rank was lost, whose error is the run's."""


class TrainerService:
    """A TrainStep on its own thread."""

    def __init__(self, spec: TrainerSpec) -> None:
        self._spec = spec
        self._torch_thread = ThreadPoolExecutor(1, "torch")
        self._sending_thread = ThreadPoolExecutor(1, "broadcast")
        self._failure: Refused | None = None
        self._begun: Callable[[], api.ExportResponse] | None = None
        # torch's number of CPU threads belongs to the calling thread.
        self.step = self._torch_thread.submit(
            lambda: TrainStep(spec, join_ranks(spec, *resolve_device(spec)))
        ).result()
        if not self.step.ranks.is_first:
            self._torch_thread.submit(self._follow)
        elif self.step.ranks.size > 1:
            threading.Thread(target=self._beat, name="beat", daemon=True).start()

    async def run(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._torch_thread, work)

    def together(self, name: str, body: BaseModel | bytes) -> Any:
        """Call this method on all ranks, from rank 0's torch thread. Raises its errors, and Refused."""
        if self._failure is not None:
            raise self._failure
        content = body if isinstance(body, bytes) else body.model_dump_json().encode()
        try:
            self.step.ranks.send(name, content)
            return _perform(self.step, name, content)
        except Refused:
            raise
        except (OSError, SafetensorError) as error:  # file errors do not desynchronize the ranks
            raise _cannot_write(name, error) from error
        except Exception as error:
            self._failure = loss_behind(error, self._spec)
            if self._failure is not None:
                raise self._failure from error
            raise

    def _beat(self) -> None:
        never = threading.Event()
        while self._failure is None and not never.wait(self._spec.trainer.timeout_s / BEATS):
            try:
                self._torch_thread.submit(self.step.ranks.beat).result()
            except RuntimeError as error:
                self._failure = loss_behind(error, self._spec)

    def route(self, name: str) -> Callable[[web.Request], Awaitable[web.Response]]:

        async def handle(request: web.Request) -> web.Response:
            message = read_message(CALLS[name], await request.read())
            answer = await self.run(lambda: self.together(name, message))
            return json_answer(answer if isinstance(answer, BaseModel) else await self.health())

        return handle

    async def staged(self, request: web.Request) -> web.StreamResponse:
        """Send an exported file or a Range of it."""
        return web.FileResponse(self._spec.staging_dir / Path(request.match_info["name"]).name)

    async def health(self) -> api.TrainerHealth:
        if self._failure is not None:
            raise self._failure
        return api.TrainerHealth(
            policy_version=self.step.policy_version,
            device=self.step.device.type,
            offloaded=self.step.offloaded,
        )

    async def train(self, body: bytes) -> api.TrainResponse:

        def work() -> api.TrainResponse:
            metrics = self.together("train", body)
            finite = {name: value for name, value in metrics.items() if math.isfinite(value)}
            return api.TrainResponse(
                policy_version=self.step.policy_version,
                metrics=finite,
                not_finite=[name for name in metrics if name not in finite],
                rollout_gaps=self.step.rollout_gaps,
                rollout_advantages=self.step.rollout_advantages,
            )

        return await self.run(work)

    async def begin_export(self) -> api.TrainerHealth:
        version, self._begun = await self.run(self._begin_export)
        return (await self.health()).model_copy(update={"policy_version": version})

    async def export(self) -> api.ExportResponse:
        begun, self._begun = self._begun, None
        finish = begun or (await self.run(self._begin_export))[1]
        try:
            answer = await asyncio.to_thread(finish)
        except OSError as error:
            raise _cannot_write("export", error) from error
        exports = self._spec.staging_dir.glob("v*.safetensors")
        for old in sorted(exports, key=lambda file: int(file.stem[1:]))[:-KEPT_EXPORTS]:
            old.unlink(missing_ok=True)
        return answer

    def _begin_export(self) -> tuple[int, Callable[[], api.ExportResponse]]:
        version = self.step.policy_version
        path = self._spec.staging_dir / f"v{version}.safetensors"
        return version, self.together("begin_export", api.StateRequest(path=path))

    async def broadcast(self, request: api.BroadcastRequest) -> api.BroadcastResponse:
        transport = self.step.transport
        if transport.version != request.version == self.step.policy_version:
            await self.export()
        return await asyncio.get_running_loop().run_in_executor(self._sending_thread, transport.send, request)

    async def wait_save_state(self) -> api.TrainerHealth:
        await asyncio.to_thread(self.step.wait_save_state)
        return await self.health()

    def _follow(self) -> NoReturn:
        try:
            while True:
                name, body = self.step.ranks.wait_command()
                try:
                    _perform(self.step, name, body)
                except Refused as refused:
                    log.warning("%s was refused: %s", name, refused)
        except Exception as error:
            log.exception("rank %d has failed", self.step.ranks.rank)
            lost = loss_behind(error, self._spec)
            if lost is not None:
                threading.Event().wait(GRACE_S)
            print(fatal_line(lost.body if lost else _words(error)), file=sys.stderr, flush=True)
            os._exit(1)


def _perform(step: TrainStep, name: str, body: bytes) -> Any:
    if name == "train":
        return step.train(*api.unpack_batch(body))
    return getattr(step, name)(**dict(BODIES[name].model_validate_json(body)))


def _cannot_write(name: str, error: Exception) -> Refused:
    way_out = "free space on the disk of the run directory (exports: /dev/shm), then start again."
    return Refused(507, f"/{name} cannot write: {error}", way_out=way_out)


def _words(error: Exception) -> ErrorBody:
    if isinstance(error, ConfigError):
        return ErrorBody(error=error.what, rule=error.rule, way_out=error.way_out)
    way_out = "the trainer's log has the traceback."
    if type(error).__module__.startswith(("torch._dynamo", "torch._inductor", "triton.")):
        way_out = "set trainer.compile=false; " + way_out
    if "deterministic implementation" in str(error):
        way_out = "set trainer.deterministic=false, which gives up the same bits after a restart."
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

    def orphaned() -> None:
        if spec.rank == 0:  # on several nodes, rank 0's parent counts
            shutil.rmtree(spec.staging_dir, ignore_errors=True)

    die_with_parent(orphaned)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: os._exit(0))
    logging.basicConfig(level=logging.INFO, format=LOG_FORMAT)
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
