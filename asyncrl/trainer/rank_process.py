"""The trainer process: `python -m asyncrl.trainer.rank_process --spec FILE --fd N`. The endpoints over one
TrainStep of step.py.

Life: one thread loads the model and owns torch; all requests but /health run on it in the order in which they
    arrive. /health is answered by the event loop, during a step too. Rank 0 makes the staging directory with
    mode 0700, and removes it if its parent is gone; ranks that meet in a file of it are on rank 0's node, and
    make it too. Any other end leaves it to the parent: engines may still read the last export.
Waits: a request waits for those before it; the client waits for its answer.
Ranks: every rank is such a process and answers /health. Rank 0 alone takes requests, and sends each as a
    command to the torch threads of the others, which call the same method of their TrainStep. If all ranks
    refuse alike, rank 0 answers with that refusal. Any other error ends the process of its rank, with the
    reason as the last line of its log, and with it the run: the group needs all of its ranks. Rank 0, which
    has lost another one, answers all calls with that, /health too, until it is ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import shutil
import signal
import stat
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import torch
from aiohttp import web
from safetensors import SafetensorError
from transformers.utils.logging import disable_progress_bar

from asyncrl.errors import ConfigError
from asyncrl.messages.base import (
    SECRET_ENV,
    BroadcastRequest,
    BroadcastResponse,
    ErrorBody,
    Moved,
    fatal_line,
)
from asyncrl.messages.calls import (
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
from asyncrl.serving import (
    Refused,
    add_route,
    child_arguments,
    die_with_parent,
    fail,
    make_app,
    secret_of,
    serve,
)
from asyncrl.trainer.model.parts import resolve_device
from asyncrl.trainer.ranks import BEATS, Command, join_ranks, loss_behind
from asyncrl.trainer.step import TrainStep
from asyncrl.trainer.step_report import hold_record
from asyncrl.trainer.trainer_client import LOST_STATUS, TrainerSpec

T = TypeVar("T")
log = logging.getLogger("asyncrl.trainer")

ENDPOINTS = (
    *("train", "begin_export", "export", "export_chunk", "broadcast", "save"),
    *("begin_save_state", "wait_save_state", "load_state", "offload", "onload"),
)
KEPT_EXPORTS = 2
"""Engines may still read the export before the newest."""
GRACE_S = 10.0
"""How long a rank waits to be ended after another one was lost, so that the run's error names the other."""


class TrainerService:
    """One TrainStep on its own thread. `num_waiting` counts requests that run or wait."""

    def __init__(self, spec: TrainerSpec) -> None:
        self._spec = spec
        self._torch_thread = ThreadPoolExecutor(1, "torch")
        self._sending_thread = ThreadPoolExecutor(1, "broadcast")
        self.num_waiting = 0
        self._broken = ""
        self._begun: Callable[[], ExportResponse] | None = None
        """The export that was begun and has not been asked for."""
        # Loaded on the thread that will step: the number of CPU threads belongs to the calling thread.
        self.step = self._torch_thread.submit(
            lambda: TrainStep(spec, join_ranks(spec, *resolve_device(spec)))
        ).result()
        self._lost: Refused | None = None
        if not self.step.ranks.is_first:
            self._torch_thread.submit(self._follow)
        elif self.step.ranks.size > 1:
            threading.Thread(target=self._beat, name="beat", daemon=True).start()

    async def run(self, work: Callable[[], T]) -> T:
        """Run `work` on the torch thread, after all that came before it."""
        self.num_waiting += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._torch_thread, work)
        finally:
            self.num_waiting -= 1

    def together(self, name: str, body: bytes = b"", **arguments: Any) -> Any:
        """On the torch thread of rank 0: call this method of the step on all ranks. Raises what it raises,
        and Refused for a file that cannot be written.
        """
        if self._lost is not None:
            raise self._lost
        if self._broken:
            what = f"the trainer's ranks are out of step: {self._broken}"
            raise Refused(409, what, way_out="start it again.")
        command = Command(name, arguments, body)
        try:
            self.step.ranks.send(command)
            return _perform(self.step, command)
        except Refused:
            raise  # all ranks' alike
        except (OSError, SafetensorError) as error:  # files are written beside what the ranks do together
            raise _cannot_write(name, arguments.get("path", "its file"), error) from error
        except Exception as error:
            if self.step.ranks.size > 1:
                self._broken = str(error)
                self._check_lost(error)
            raise

    def _check_lost(self, error: Exception) -> None:
        """Raises Refused for an error by which another rank is lost."""
        if (words := loss_behind(error, self._spec)) is not None:
            self._lost = Refused(LOST_STATUS, words.error, rule=words.rule, way_out=words.way_out)
            raise self._lost from error

    def _beat(self) -> None:
        """On a thread of rank 0: the others know by it that it is there."""
        period_s, never = self._spec.trainer.timeout_s / BEATS, threading.Event()
        while not self._broken and not never.wait(period_s):
            try:
                self._torch_thread.submit(self.step.ranks.beat).result()
            except RuntimeError as error:
                self._broken = str(error)
                with contextlib.suppress(Refused):
                    self._check_lost(error)

    async def call(self, name: str, **arguments: Any) -> Any:
        """together(), after all requests that came before it."""
        return await self.run(lambda: self.together(name, **arguments))

    # Endpoints. What reads the version runs on the torch thread.

    async def staged(self, request: web.Request) -> web.StreamResponse:
        """GET /staged/NAME: an exported file, whole or a Range of it. Other nodes fetch weights here."""
        return web.FileResponse(self._spec.staging_dir / Path(request.match_info["name"]).name)

    async def health(self) -> TrainerHealth:
        """Answered at any time."""
        if self._lost is not None:
            raise self._lost
        return TrainerHealth(
            policy_version=self.step.policy_version,
            device=self.step.device.type,
            is_busy=self.num_waiting > 0,
            offloaded=self.step.offloaded,
        )

    async def train(self, body: bytes) -> TrainResponse:
        """One optimizer step."""

        def work() -> TrainResponse:
            metrics = self.together("train", body)
            finite = {name: value for name, value in metrics.items() if math.isfinite(value)}
            lost = [name for name in metrics if name not in finite]
            return TrainResponse(
                policy_version=self.step.policy_version,
                metrics=finite,
                not_finite=lost,
                rollout_gaps=self.step.rollout_gaps,
                rollout_advantages=self.step.rollout_advantages,
            )

        return await self.run(work)

    async def begin_export(self) -> TrainerHealth:
        """Begin to write the newest weights; its answer comes from the next export(). Returns once training
        may go on: what is being written stays as it is.
        """
        version, self._begun = await self.run(self._begin_export)
        return (await self.health()).model_copy(update={"policy_version": version})

    async def export(self) -> ExportResponse:
        """Write the newest weights, or finish what was begun; then delete exports that no engine can be asked
        to read any more.
        """
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
        """Write one chunk of the weights over the one before."""

        def work() -> ExportChunkResponse:
            names = self.step.chunk_names(message.version, message.index)
            answer: ExportChunkResponse = self.together("export_chunk", index=message.index, names=names)
            return answer

        return await self.run(work)

    async def broadcast(self, request: BroadcastRequest) -> BroadcastResponse:
        """Send what is held, beside the torch thread: training goes on. A trainer that was started again
        holds nothing: it copies the version that is asked for if it is the newest.
        """
        transport = self.step.transport
        if transport.version != request.version == self.step.policy_version:
            await self.export()
        return await asyncio.get_running_loop().run_in_executor(self._sending_thread, transport.send, request)

    async def save(self, message: SaveRequest) -> TrainerHealth:
        """Write a Hugging Face folder, or the adapters alone."""
        await self.call("save", path=message.path, merged=message.merged)
        return await self.health()

    async def begin_save_state(self, message: StateRequest) -> TrainerHealth:
        """Returns once training may go on: what is being copied stays as it is."""
        await self.call("begin_save_state", path=message.path)
        return await self.health()

    async def wait_save_state(self) -> TrainerHealth:
        """Returns once it is written; the torch thread goes on meanwhile."""
        await asyncio.to_thread(self.step.wait_save_state)
        return await self.health()

    async def load_state(self, message: StateRequest) -> TrainerHealth:
        """Go on from a saved folder."""
        await self.call("load_state", path=message.path)
        return await self.health()

    async def offload(self, message: OffloadRequest) -> Moved:
        """Move these parts off the device."""
        moved: Moved = await self.call("offload", parts=message.parts)
        return moved

    async def onload(self, message: OffloadRequest) -> Moved:
        """Move these parts back."""
        moved: Moved = await self.call("onload", parts=message.parts)
        return moved

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
        except Exception as error:  # the outermost frame of this thread: log the error and end the process
            log.exception("rank %d cannot go on", self.step.ranks.rank)
            lost = loss_behind(error, self._spec)
            if lost is not None:
                threading.Event().wait(GRACE_S)
            print(fatal_line(lost or _words(error)), file=sys.stderr, flush=True)
            os._exit(1)


def _perform(step: TrainStep, command: Command) -> Any:
    """A command's part of this rank."""
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
    """For an answer, and for the last word of a process; the traceback is in the log."""
    if isinstance(error, ConfigError):
        return ErrorBody(error=error.what, rule=error.rule, way_out=error.way_out)
    way_out = "the trainer's log has the traceback."
    if type(error).__module__.startswith(("torch._dynamo", "torch._inductor", "triton.")):
        way_out = "set trainer.compile=false, which takes the model's layers as they are; " + way_out
    # torch reports a lack of memory on the CPU as a plain RuntimeError
    if isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in str(error):
        way_out = "lower trainer.micro_batch_tokens, or take a smaller model or more memory."
    return ErrorBody(error=f"{type(error).__name__}: {error}", way_out=way_out)


def make_service(service: TrainerService, secret: str) -> web.Application:
    """The app: on rank 0 all endpoints, on the others /health. An error is answered, not fatal."""
    app = make_app(secret, words=_words)
    add_route(app, "GET", "/health", service.health)
    for name in ENDPOINTS if service.step.ranks.is_first else ():
        add_route(app, "POST", f"/{name}", getattr(service, name))
    app.router.add_get("/staged/{name}", service.staged)
    return app


def main() -> None:
    """Serve until SIGTERM or the parent's end; ends with a fatal line if the spec cannot be met."""
    text, fd = child_arguments()
    spec = TrainerSpec.model_validate_json(text)
    # where each node has a parent of its own, that of rank 0 counts
    orphaned = partial(shutil.rmtree, spec.staging_dir, ignore_errors=True)
    die_with_parent(*([orphaned] if spec.rank == 0 else []))
    for number in (signal.SIGTERM, signal.SIGINT):
        # A step may hold the torch thread for long; nothing of it is worth waiting for.
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
    """Make the folder that only this user may enter. Raises OSError, for a folder of another user's too."""
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    info = path.lstat()
    if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.getuid():
        raise PermissionError(f"the staging folder {path} belongs to user {info.st_uid}, or is no folder")
    path.chmod(0o700)


if __name__ == "__main__":
    main()
