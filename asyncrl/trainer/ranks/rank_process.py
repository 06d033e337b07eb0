"""Trainer process: serves one TrainerRank to the controller.

One thread owns torch. Rank 0 sends requests to the other ranks and answers with a
refusal of all ranks; any other error ends the process.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import shutil
import stat
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, TypeVar

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
from asyncrl.base.waits import Signal
from asyncrl.messages import trainer_api as api
from asyncrl.messages.tokens import Tokens
from asyncrl.models.devices import choose_device
from asyncrl.trainer.loss.step_metrics import hold_record
from asyncrl.trainer.ranks.rank import TrainerRank
from asyncrl.trainer.ranks.ranks import BEATS, NEVER, join_ranks, loss_behind
from asyncrl.trainer.trainer_client import LOST_STATUS, TrainerSpec

T = TypeVar("T")
UnpackedBatch = tuple[api.BatchHeader, Tokens]
Finish = Callable[[], api.ExportResponse]
"""Waits for an export."""
log = logging.getLogger("asyncrl.trainer")

# The newest, which is being pushed, and the one before: engines that come back still
# get the announced weights from its file.
KEPT_EXPORTS = 2
GRACE_S = 10.0
"""Exit delay after another rank was lost, whose error is the run's."""


class TrainerService:
    """A TrainerRank on its own thread."""

    def __init__(self, spec: TrainerSpec) -> None:
        self._spec = spec
        self._torch_thread = ThreadPoolExecutor(1, "torch")
        # A separate thread, so that a slow engine does not hold up a step.
        self._sending_thread = ThreadPoolExecutor(1, "broadcast")
        # Batches go to the other ranks while these compute the step before.
        self._bodies_thread = ThreadPoolExecutor(1, "bodies")
        self._batches: dict[int, Future[UnpackedBatch]] = {}
        """Of the steps to come, by a number that grows with each."""
        self._num_batches = 0
        self._failure: Refused | None = None
        self._begun: Finish | None = None
        self._wanted: tuple[int, Future[BaseModel]] | None = None
        """An export of a version above this one has been requested."""
        self._made_soon = 0
        """Version that the steps on the torch thread make."""
        self._num_broken = 0
        self._turn = Signal()
        # torch's number of CPU threads belongs to the calling thread.
        self.rank = self._torch_thread.submit(self._make_rank).result()
        # Without beats: the commands find a lost rank.
        wait = None if self.rank.ranks.is_first else NEVER
        own_group = self.rank.ranks.with_own_group
        self._bodies = self._torch_thread.submit(own_group, wait).result()
        if not self.rank.ranks.is_first:
            # Never returns: from now on the torch thread belongs to rank 0's commands.
            self._torch_thread.submit(self._follow)
            self._bodies_thread.submit(self._receive)
        elif self.rank.ranks.size > 1:
            beat = threading.Thread(target=self._beat, name="beat", daemon=True)
            beat.start()

    def _make_rank(self) -> TrainerRank:
        device, dtype = choose_device(self._spec.device, self._spec.dtype)
        ranks = join_ranks(self._spec, device, dtype)
        return TrainerRank(self._spec, ranks)

    async def call(self, name: str, content: bytes) -> BaseModel:
        """Make the call of this name in CALLS. Raises its errors, and Refused for a
        body of another form.
        """
        call = CALLS[name]
        answer: object
        if call.on_all_ranks:
            # Not on the torch thread, which may run a step.
            body = await asyncio.to_thread(call.read, content)
            answer = await self._on_torch_thread(
                lambda: self._together(name, content, body)
            )
        else:
            answer = await call.function(self, call.read(content))
        return answer if isinstance(answer, BaseModel) else self.health()

    def _on_torch_thread(self, work: Callable[[], T]) -> asyncio.Future[T]:
        loop = asyncio.get_running_loop()
        return loop.run_in_executor(self._torch_thread, work)

    def _together(self, name: str, content: bytes = b"", body: Any = b"") -> object:
        """Make a call on all ranks, from rank 0's torch thread. `body`: the content as
        the call reads it: a body that cannot be read would end the other ranks. Raises
        its errors, and Refused.
        """
        if self._failure is not None:
            raise self._failure
        call = CALLS[name]
        asked = name.removesuffix("_together")
        try:
            self.rank.ranks.send(name, content)
            return call.function(self, body)
        # The ranks refuse together, or only rank 0 after its last collective. All go
        # back to waiting for a command.
        except Refused:
            raise
        except (OSError, SafetensorError) as error:
            # file errors do not desynchronize the ranks
            raise _cannot_write(asked, error) from error
        except Exception as error:
            # For good: the groups are broken, or the other ranks wait in a call that
            # this rank has left, and each further call would wait for its timeout. The
            # supervisor restarts all ranks.
            self._failure = loss_behind(error, self._spec)
            if self._failure is None and self.rank.ranks.size > 1:
                words = _words(error)
                self._failure = Refused(
                    LOST_STATUS,
                    f"rank 0 has failed in /{asked}: {words.error}",
                    rule="the ranks of a trainer make each call together, or start again",
                    way_out=words.way_out,
                )
            if self._failure is None:
                raise
            raise self._failure from error

    def _follow(self) -> NoReturn:
        try:
            while True:
                name, content = self.rank.ranks.wait_command()
                try:
                    call = CALLS[name]
                    call.function(self, call.read(content))
                except Refused as refused:
                    log.warning("%s was refused: %s", name, refused)
        except Exception as error:
            log.exception("rank %d has failed", self.rank.ranks.rank)
            lost = loss_behind(error, self._spec)
            if lost is None:
                words = _words(error)
            else:
                # The rank that caused the loss reports first.
                threading.Event().wait(GRACE_S)
                words = lost.body
            print(fatal_line(words), file=sys.stderr, flush=True)
            os._exit(1)

    def _receive(self) -> None:
        """Take the batches that rank 0 sends early."""
        while True:
            number, content = self._bodies.wait_command()
            self._batch(int(number)).set_result(api.unpack_batch(content))

    def _batch(self, number: int) -> Future[UnpackedBatch]:
        return self._batches.setdefault(number, Future())

    def _beat(self) -> None:
        """Keep the other ranks from running into their timeout between two calls."""
        never = threading.Event()
        pause_s = self._spec.trainer.timeout_s / BEATS
        while self._failure is None and not never.wait(pause_s):
            # On the torch thread, between two calls: a beat in the middle of a call
            # would mix two collectives. During a long call the beat waits, as the other
            # ranks are in that call too.
            beating = self._torch_thread.submit(self._together, "beat")
            if (error := beating.exception()) is not None:
                log.error("the beat between two calls has failed", exc_info=error)

    def health(self) -> api.TrainerHealth:
        """Return version, device and offloaded parts. Raises Refused once other ranks are
        lost, so that a health check finds it between two calls.
        """
        if self._failure is not None:
            raise self._failure
        return api.TrainerHealth(
            policy_version=self.rank.policy_version,
            device=self.rank.device.type,
            offloaded=self.rank.offloaded,
        )

    async def answer_health(self) -> api.TrainerHealth:
        return self.health()

    async def staged(self, request: web.Request) -> web.StreamResponse:
        """Send an exported file or a Range of it."""
        name = Path(request.match_info["name"]).name
        return web.FileResponse(self._spec.staging_dir / name)

    # ---- calls on all ranks

    def train_together(self, number: int) -> api.TrainResponse:
        batch = self._batch(number).result(self._spec.trainer.timeout_s)
        del self._batches[number]
        return self._trained(self.rank.train(*batch))

    def evaluate(self, batch: UnpackedBatch) -> api.TrainResponse:
        return self._trained(self.rank.evaluate(*batch))

    def _trained(self, metrics: dict[str, float]) -> api.TrainResponse:
        finite = {
            name: value for name, value in metrics.items() if math.isfinite(value)
        }
        return api.TrainResponse(
            policy_version=self.rank.policy_version,
            metrics=finite,
            not_finite=[name for name in metrics if name not in finite],
            rollout_gaps=self.rank.rollout_gaps,
            rollout_advantages=self.rank.rollout_advantages,
        )

    def export_together(self, _: bytes) -> api.TrainerHealth:
        name = f"v{self.rank.policy_version}.safetensors"
        path = self._spec.staging_dir / name
        self._begun = self.rank.begin_export(path)
        # Here, because the next step may have begun before the event loop runs again.
        return self.health()

    # ---- calls of rank 0, which wait outside the torch thread

    async def train(self, content: bytes) -> api.TrainResponse:
        self.rank.meter.note_whole()
        # Not on the torch thread, which may run the step before.
        batch = await asyncio.to_thread(api.unpack_batch, content)
        return await self._step(content, batch)

    async def train_next(self, content: bytes) -> api.TrainResponse:
        """Train once the torch thread has the step before. Raises Refused if that step
        fails.
        """
        batch = await asyncio.to_thread(api.unpack_batch, content)
        version, num_broken = batch[0].version, self._num_broken
        # Two requests that are sent one after the other may arrive in any order.
        await self._turn.wait_for(
            lambda: (
                version <= max(self._made_soon, self.rank.policy_version)
                or self._num_broken > num_broken
            )
        )
        return await self._step(content, batch)

    async def _step(self, content: bytes, batch: UnpackedBatch) -> api.TrainResponse:
        def send_batch() -> UnpackedBatch:
            self._bodies.send(str(number), content)
            return batch

        self._num_batches = number = self._num_batches + 1
        self._batches[number] = self._bodies_thread.submit(send_batch)

        def step() -> object:
            # A step that was sent early must not go before the export.
            self._export_wanted()
            return self._together("train_together", b"%d" % number, number)

        self._made_soon = batch[0].version + 1
        self._turn.notify()
        try:
            answer = await self._on_torch_thread(step)
        except BaseException:
            # The next step is refused, too: its version is no longer the next one.
            self._made_soon = self.rank.policy_version
            self._num_broken += 1
            raise
        finally:
            self._turn.notify()
        if self._wanted is not None:
            self._on_torch_thread(self._export_wanted)
        assert isinstance(answer, api.TrainResponse)
        return answer

    async def begin_export(self, asked: api.BeginExportRequest) -> BaseModel:
        """Return once an export of a version above `asked.above` has begun: at once, or
        right after the step that makes it.
        """
        if self._wanted is not None:
            self._wanted[1].cancel()  # of a caller that is gone
        begun = Future[BaseModel]()
        self._wanted = asked.above, begun
        # Else a step is under way, and _step() asks again after it.
        if self._made_soon <= self.rank.policy_version:
            self._on_torch_thread(self._export_wanted)
        return await asyncio.wrap_future(begun)

    def _export_wanted(self) -> None:
        """Begin the export that is wanted, if its version is there. On the torch thread."""
        wanted = self._wanted
        if wanted is None or self.rank.policy_version <= wanted[0]:
            return
        self._wanted = None
        if not wanted[1].set_running_or_notify_cancel():
            return
        try:
            self._together("export_together")
            wanted[1].set_result(self.health())
        except Exception as error:  # the caller's, not the next step's
            wanted[1].set_exception(error)

    async def export(self, _: bytes) -> api.ExportResponse:
        """Wait for the export that has begun, or begin one."""
        # Another call may take the export that this one begins.
        while self._begun is None:
            await self._on_torch_thread(lambda: self._together("export_together"))
        finish = self._begun
        self._begun = None
        try:
            # Not on the torch thread, or the copy would hold up the next step.
            answer = await asyncio.to_thread(finish)
        except OSError as error:
            raise _cannot_write("export", error) from error
        exports = self._spec.staging_dir.glob("v*.safetensors")
        # By number: as text, v10 comes before v9.
        by_version = sorted(exports, key=lambda file: int(file.stem[1:]))
        for old in by_version[:-KEPT_EXPORTS]:
            old.unlink(missing_ok=True)
        return answer

    async def broadcast(self, request: api.BroadcastRequest) -> api.BroadcastResponse:
        transport = self.rank.exports.transport
        # A restarted trainer holds nothing. If it is at this version again, export it;
        # if not, send() refuses.
        if transport.version != request.version == self.rank.policy_version:
            await self.export(b"")
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._sending_thread, transport.send, request)

    async def wait_save_state(self, _: bytes) -> None:
        await asyncio.to_thread(self.rank.wait_save_state)


class RankCall(NamedTuple):
    """A request of the controller. `function` gets the body: a message, or bytes as
    they came.

    With `on_all_ranks`, rank 0 sends the request to the other ranks, and each calls
    `function` on its torch thread. Without, `function` is a coroutine of rank 0, which
    may wait while the torch thread works. A call that returns no message is answered
    with the trainer's health.
    """

    body: type[BaseModel] | Callable[[bytes], Any]
    function: Callable[[TrainerService, Any], Any]
    on_all_ranks: bool = True

    def read(self, content: bytes) -> Any:
        """Return the body as a message, or as `body` reads it. Raises Refused for a
        message of another form.
        """
        body: Any = self.body
        if isinstance(body, type) and issubclass(body, BaseModel):
            return read_message(body, content)
        return body(content)


CALLS = {
    "beat": RankCall(bytes, lambda self, _: self.rank.ranks.gather(None)),
    "train": RankCall(bytes, TrainerService.train, on_all_ranks=False),
    "train_next": RankCall(bytes, TrainerService.train_next, on_all_ranks=False),
    "train_together": RankCall(int, TrainerService.train_together),
    "add_part": RankCall(
        api.unpack_batch, lambda self, part: self.rank.add_part(*part)
    ),
    "evaluate": RankCall(api.unpack_batch, TrainerService.evaluate),
    "begin_export": RankCall(
        api.BeginExportRequest, TrainerService.begin_export, on_all_ranks=False
    ),
    "export_together": RankCall(bytes, TrainerService.export_together),
    "export_chunk": RankCall(
        api.ExportChunkRequest,
        lambda self, asked: self.rank.export_chunk(asked.version, asked.index),
    ),
    "save": RankCall(api.StateRequest, lambda self, asked: self.rank.save(asked.path)),
    "load_state": RankCall(
        api.StateRequest, lambda self, asked: self.rank.load_state(asked.path)
    ),
    "begin_save_state": RankCall(
        api.StateRequest,
        lambda self, asked: self.rank.begin_save_state(asked.path),
    ),
    "offload": RankCall(
        api.OffloadRequest, lambda self, asked: self.rank.offload(asked.parts)
    ),
    "onload": RankCall(
        api.OffloadRequest, lambda self, asked: self.rank.onload(asked.parts)
    ),
    "export": RankCall(bytes, TrainerService.export, on_all_ranks=False),
    "broadcast": RankCall(
        api.BroadcastRequest, TrainerService.broadcast, on_all_ranks=False
    ),
    "wait_save_state": RankCall(
        bytes, TrainerService.wait_save_state, on_all_ranks=False
    ),
}
"""Each call by its path."""


def _cannot_write(name: str, error: Exception) -> Refused:
    return Refused(
        507,
        f"/{name} cannot write: {error}",
        way_out="restore the run directory, its permissions or space on its disk (exports: /dev/shm), then "
        "start again.",
    )


def _words(error: Exception) -> ErrorBody:
    if isinstance(error, ConfigError):
        return ErrorBody(
            error=error.what,
            rule=error.rule,
            way_out=error.way_out,
        )
    way_out = "the trainer's log has the traceback."
    if type(error).__module__.startswith(
        ("torch._dynamo", "torch._inductor", "triton.")
    ):
        way_out = "set trainer.compile=false; " + way_out
    if "deterministic implementation" in str(error):
        way_out = "set trainer.deterministic=false, which gives up the same bits after a restart."
    # on CPU torch raises RuntimeError for a lack of memory
    if isinstance(
        error, torch.OutOfMemoryError | MemoryError
    ) or "can't allocate memory" in str(error):
        way_out = (
            "lower trainer.micro_batch_tokens, or take a smaller model or more memory."
        )
    what = f"{type(error).__name__}: {error}"
    return ErrorBody(error=what, way_out=way_out)


def make_service(service: TrainerService, secret: str) -> web.Application:
    app = make_app(secret, words=_words)

    async def call(request: web.Request) -> web.Response:
        name = request.match_info["name"]
        if name not in CALLS:
            raise web.HTTPNotFound
        content = await request.read()
        answer = await service.call(name, content)
        return json_answer(answer)

    add_route(app, "GET", "/health", service.answer_health)
    app.router.add_get("/staged/{name}", service.staged)
    if service.rank.ranks.is_first:
        app.router.add_post("/{name}", call)
    return app


def main() -> None:
    serve_trainer(lambda spec, secret: make_service(TrainerService(spec), secret))


def serve_trainer(make: Callable[[TrainerSpec, str], web.Application]) -> None:
    """Be a trainer process. `make`: its app, from the spec and the secret; may raise
    ConfigError, MemoryError, RuntimeError and OSError.
    """
    text, fd = child_arguments()
    spec = TrainerSpec.model_validate_json(text)

    def orphaned() -> None:
        if spec.rank == 0:  # on several nodes, rank 0's parent counts
            shutil.rmtree(spec.staging_dir, ignore_errors=True)

    # First: if the controller dies during the start, nobody else ends this process.
    die_with_parent(orphaned)
    logging.basicConfig(level=logging.INFO, format=LOG_FORMAT)
    disable_progress_bar()
    try:
        if spec.rank == 0 or not spec.store:
            make_staging(spec.staging_dir)
        # Before the model is loaded: the trainer of a run that was just killed may
        # still write a line.
        if spec.rank == 0:
            hold_record(spec.record_path)
        app = make(spec, secret_of(SECRET_ENV))
    except (ConfigError, MemoryError, RuntimeError, OSError) as error:
        log.exception("cannot start")
        words = _words(error)
        fail(words.error, rule=words.rule, way_out=words.way_out)
    size = spec.trainer.world_size
    log.info("serving %s, rank %d of %d", spec.model_path, spec.rank, size)
    # A new process restores everything from checkpoint and journal, and torch's threads
    # may be in a collective that never ends.
    serve(app, fd, ends_at_once=True)


def make_staging(path: Path) -> None:
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    info = path.lstat()
    if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.getuid():
        raise PermissionError(
            f"the staging folder {path} is owned by user {info.st_uid}, or is not a folder"
        )
    path.chmod(0o700)


if __name__ == "__main__":
    main()
