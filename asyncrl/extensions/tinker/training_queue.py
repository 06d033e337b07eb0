"""Training requests of all models: each runs once, in the order of its model's numbers.

The trainer's memory follows from the ledger: a state file and the requests after it. So a
lost trainer, or a lost server, repeats what the ledger says and nothing else.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import ValidationError
from tinker import types
from tinker.proto import tinker_public_pb2 as pb

from asyncrl.base.http import CallLost, CallRefused
from asyncrl.base.waits import Signal, clock, waiting
from asyncrl.extensions.tinker.ledger import (
    Ledger,
    Model,
    Request,
    Sampler,
    SavedWeights,
    changed,
)
from asyncrl.extensions.tinker.tinker_requests import (
    UserError,
    check_name,
    check_ttl,
    checkpoint_of,
    read,
)
from asyncrl.extensions.tinker.token_ages import AgeRule, Ages
from asyncrl.extensions.tinker.trainer_calls import AdamParams, TinkerTrainer

log = logging.getLogger("asyncrl.tinker")
HOLE_S = 300.0
"""A number that is missing so long after a newer one never comes: the client retries for
five minutes.
"""
KEEP_STEPS = 8
"""Optimizer steps between two state files, which bound what a loss repeats."""
KEEP_BYTES = 2**26
"""Bytes of requests after which a state file comes earlier."""
STATES = "states"
WEIGHTS = "weights"
SAMPLER_WEIGHTS = "sampler_weights"
HIDDEN = "~"
"""Begins the name of a checkpoint that a sampler holds and no list shows."""
INFLIGHT = f"{HIDDEN}inflight"


class Result(NamedTuple):
    """`rows`: more rows for the ledger."""

    form: str
    answer: bytes
    rows: Sequence[Any] = ()
    masked: Mapping[int, list[int]] = {}

    @classmethod
    def of(cls, answer: Mapping[str, Any], *rows: Any) -> Result:
        return cls("json", json.dumps(answer).encode(), rows)

    @classmethod
    def error(cls, text: str, category: str = "user") -> Result:
        body = {"error": text, "category": category}
        return cls("error", json.dumps(body).encode())


@dataclass(eq=False)
class ModelQueue:
    """A model that is trained. `waiting`: its requests by number. `failed`: a
    forward_backward since the last step that failed. `ages`: of the tokens since then.
    `served`: tokens, for fair turns.
    """

    row: Model
    waiting: dict[int, Request] = field(default_factory=dict)
    is_open: bool = False
    failed: int | None = None
    ages: Ages = field(default_factory=Ages)
    num_since_kept: int = 0
    bytes_since_kept: int = 0
    served: float = 0.0
    kept_file: str = ""
    """The state file in the ledger."""
    hole_s: float | None = None

    @property
    def is_ready(self) -> bool:
        return self.row.next_seq in self.waiting


class Training:
    """Queues and runs the training requests.

    Life: restore() -> submit() any number of times, while serve() runs -> the process ends.
    Waits: serve() for a request that is next in its model, then for the trainer; a request
        for the number before it, at most HOLE_S; callers in answer_of().
    Dies anywhere: accepted requests are in the ledger. Those without an answer run again,
        after the trainer has the state that all answered ones have made.
    Invariant: requests of a model run in the order of their numbers, each with one effect.
    """

    def __init__(
        self,
        ledger: Ledger,
        trainer: TinkerTrainer,
        folder: Path,
        ages: AgeRule,
    ) -> None:
        self.runs = dict[str, ModelQueue]()
        self.changed = Signal()
        self.trainer_is_up = True
        self.inflight = dict[str, SavedWeights]()
        """Newest inflight weights of each model."""
        self.on_inflight: Callable[[SavedWeights], Awaitable[None]] | None = None
        """Give newer inflight weights to engines that serve older ones."""
        self.on_lost: Callable[[CallLost], None] = lambda _: None
        """Report a broken call of the trainer."""
        self._ledger = ledger
        self._trainer = trainer
        self._folder = folder
        self._ages = ages
        self._kinds: Mapping[
            str, Callable[[ModelQueue, Request], Awaitable[Result]]
        ] = {
            "create_model": self._create,
            "forward_backward": self._forward_backward,
            "optim_step": self._optim_step,
            "save_weights": self._save_weights,
            "save_weights_for_sampler": self._save_for_sampler,
            "save_weights_external": self._save_external,
            "load_weights": self._load_weights,
        }
        self._time = 0.0
        """Tokens of the run that was served last, as `ModelQueue.served`."""
        for name in (STATES, WEIGHTS, SAMPLER_WEIGHTS):
            (folder / name).mkdir(exist_ok=True)

    # ---- requests

    async def restore(self, models: Sequence[Model]) -> None:
        """Take up the models of an earlier process."""
        for row in models:
            run = self.runs[row.id] = ModelQueue(row, kept_file=row.state_file)
            for request in await self._ledger.find(Request, model_id=row.id):
                if request.answer is None:
                    run.waiting[request.seq] = request
            for made in await self._ledger.find(SavedWeights, model_id=row.id):
                if made.name.startswith(INFLIGHT):
                    self.inflight[row.id] = made

    async def remove(self, checkpoint: SavedWeights) -> None:
        """Delete a checkpoint. Samplers of it keep its file until their session ends."""
        known = {"model_id": checkpoint.model_id, "kind": checkpoint.kind}
        await self._ledger.drop(SavedWeights, **known, name=checkpoint.name)
        if checkpoint.kind == WEIGHTS:
            (self._folder / checkpoint.file).unlink(missing_ok=True)

    async def submit(self, request: Request, model: Model | None = None) -> None:
        """Accept a request durably, with the row of a new model. A repeated one changes
        nothing.
        """
        run = self.runs.get(request.model_id)
        if run is not None and request.seq in run.waiting:
            return
        known = await self._ledger.first(
            Request, model_id=request.model_id, seq=request.seq
        )
        if known is not None:
            return
        if run is not None and request.seq < run.row.next_seq:
            answer = Result.error(f"request {request.seq} ran before").answer
            await self._ledger.put(changed(request, answer=answer, form="error"))
            return
        await self._ledger.put(request, *filter(None, [model]))
        # Another try of the same request may have been first.
        if model is not None and request.model_id not in self.runs:
            self.runs[request.model_id] = ModelQueue(model, served=self._time)
        run = self.runs[request.model_id]
        if request.seq >= run.row.next_seq:
            # A model that was idle gets no credit for it.
            if not run.waiting:
                run.served = max(run.served, self._time)
            run.waiting.setdefault(request.seq, request)
        self.changed.notify()

    async def answer_of(
        self, model_id: str, seq: int, limit_s: float
    ) -> Request | None:
        """Return the request once it has its answer, None after `limit_s`; marks it as
        read. Raises KeyError if it is unknown.
        """
        run = self.runs.get(model_id)
        if run is not None and seq in run.waiting:
            try:
                async with asyncio.timeout(limit_s):
                    await self.changed.wait_for(lambda: seq not in run.waiting)
            except TimeoutError:
                return None
        found = await self._ledger.first(Request, model_id=model_id, seq=seq)
        if found is None or found.answer is None:
            raise KeyError(f"{model_id}:{seq}")
        self._ledger.note_read(model_id, seq)
        return found

    def why_waiting(self, model_id: str, seq: int) -> str:
        """Return what a request waits for, as a sentence."""
        run = self.runs.get(model_id)
        if not self.trainer_is_up:
            return "the trainer is starting again after a loss"
        if run is not None and seq > run.row.next_seq and not run.is_ready:
            return f"request {run.row.next_seq} of this model has not arrived"
        num = sum(len(one.waiting) for one in self.runs.values())
        return f"{num} training requests are queued or running"

    async def end(self, model_id: str) -> None:
        """Drop a model from the trainer, and files that only its session used. Its
        checkpoints stay.
        """
        run = self.runs.pop(model_id)
        self.changed.notify()
        await self._close(run)
        kept = set[str]()
        for made in await self._ledger.find(SavedWeights, model_id=model_id):
            if made.name.startswith(HIDDEN):
                await self.remove(made)
            else:
                kept |= {made.file, made.sampler_file}
        used = [run.row.state_file]
        for kind in (WEIGHTS, SAMPLER_WEIGHTS):
            files = self._folder.glob(f"{kind}/{_folder_of(model_id)}/*")
            used += [str(file.relative_to(self._folder)) for file in files]
        for name in {*used} - kept - {""}:
            (self._folder / name).unlink(missing_ok=True)

    async def _close(self, run: ModelQueue) -> None:
        """Drop the trainer's state of a run, which the ledger can make again."""
        if run.is_open and self.trainer_is_up:
            run.is_open = False
            with contextlib.suppress(CallLost, CallRefused):
                await self._trainer.drop(run.row.id)

    def trainer_lost(self) -> None:
        self.trainer_is_up = False
        for run in self.runs.values():
            run.is_open = False

    def trainer_up(self) -> None:
        self.trainer_is_up = True
        self.changed.notify()

    # ---- the worker

    async def serve(self) -> None:
        """Run requests for ever."""
        while True:
            run = self._next()
            if run is None:
                with waiting("a training request", on="clients"):
                    await self.changed.wait_for(lambda: self._next() is not None)
                continue
            request = run.waiting[run.row.next_seq]
            result = await self._result(run, request)
            await self._finish(run, request, result)

    async def watch_holes(self) -> None:
        """Fail requests that wait for a number that never comes."""
        while True:
            await asyncio.sleep(HOLE_S / 60)
            for run in [*self.runs.values()]:
                if not run.waiting or run.is_ready:
                    run.hole_s = None
                elif run.hole_s is None:
                    run.hole_s = clock()
                elif clock() - run.hole_s >= HOLE_S:
                    await self._give_up(run)

    async def _give_up(self, run: ModelQueue) -> None:
        """Fail the waiting requests, and the missing ones as parts of a gradient."""
        first = run.row.next_seq
        text = (
            f"request {first} of this model never came, and requests run in the order of their "
            f"numbers; this one waited {HOLE_S:g} s. Send the work again."
        )
        answer = Result.error(text).answer
        failed = list[Request]()
        for seq in range(first, max(run.waiting) + 1):
            missing = Request(run.row.id, seq, "forward_backward", b"")
            one = run.waiting.get(seq, missing)
            failed.append(changed(one, answer=answer, form="error"))
        run.row = changed(run.row, next_seq=failed[-1].seq + 1)
        # The trainer's state is made again, from what the ledger says now.
        await self._close(run)
        await self._ledger.put(run.row, *failed)
        for one in failed:
            run.waiting.pop(one.seq, None)
        self.changed.notify()

    def _next(self) -> ModelQueue | None:
        """Return the run whose turn it is: of the ready runs the least served."""
        ready = [run for run in self.runs.values() if run.is_ready]
        if not ready or not self.trainer_is_up:
            return None
        return min(ready, key=lambda run: run.served)

    async def _result(self, run: ModelQueue, request: Request) -> Result:
        while True:
            try:
                await self._open(run)
                return await self._kinds[request.kind](run, request)
            except UserError as error:
                return Result.error(str(error))
            except ValidationError as error:
                return Result.error(f"the request cannot be read: {error}")
            except CallLost as lost:
                self.trainer_lost()
                self.on_lost(lost)
                with waiting("the trainer", on="supervisor"):
                    await self.changed.wait_for(lambda: self.trainer_is_up)
            except CallRefused as error:
                said = error.body
                category = "user" if error.status < 500 else "server"
                return Result.error(f"{said.error}. {said.rule}", category)
            # The ledger has the request: without an answer it would fail each start.
            except Exception as error:
                log.exception("%s of %s failed", request.kind, run.row.id)
                await self._close(run)
                return Result.error(f"{type(error).__name__}: {error}", "server")

    async def _finish(self, run: ModelQueue, request: Request, result: Result) -> None:
        """Write the answer and the run's new state, all at once."""
        old_file = run.kept_file
        run.row = changed(run.row, next_seq=request.seq + 1, used_s=time.time())
        run.kept_file = run.row.state_file
        run.bytes_since_kept += len(request.body)
        done = changed(
            request,
            answer=result.answer,
            form=result.form,
            masked={str(key): value for key, value in result.masked.items()},
        )
        await self._ledger.put(done, run.row, *result.rows)
        if old_file not in ("", run.kept_file):
            (self._folder / old_file).unlink(missing_ok=True)
        run.waiting.pop(request.seq, None)
        self._time = max(self._time, run.served)
        self.changed.notify()

    async def _keep(self, run: ModelQueue, row: Model, request: Request) -> Model:
        """Write a state file, which is the whole state: there is no gradient. Return the
        row that names it.
        """
        file = f"{STATES}/{secrets.token_hex(8)}.safetensors"
        await self._trainer.save(row.id, self._folder / file, True)
        run.num_since_kept = run.bytes_since_kept = 0
        return changed(row, kept_seq=request.seq, state_file=file)

    async def _open(self, run: ModelQueue) -> None:
        """Give the trainer the state that all answered requests have made."""
        row = run.row
        if run.is_open or not row.next_seq:
            return
        await self._trainer.open(row.id, row.rank, row.seed, row.parts)
        run.is_open = True
        try:
            if row.state_file:
                await self._trainer.load(row.id, self._folder / row.state_file, True)
            run.failed = None
            requests = await self._ledger.find(Request, model_id=row.id)
            for request in sorted(requests, key=lambda one: one.seq):
                if row.kept_seq < request.seq < row.next_seq and request.form:
                    await self._repeat(run, request)
        except CallRefused:
            await self._close(run)
            raise

    async def _repeat(self, run: ModelQueue, request: Request) -> None:
        name, is_error = run.row.id, request.form == "error"
        if request.kind == "forward_backward":
            if is_error:
                run.failed = request.seq
            elif not pb.ForwardBackwardRequest.FromString(request.body).forward_only:
                masked = {int(key): value for key, value in request.masked.items()}
                await self._trainer.forward_backward(name, request.body, masked)
        elif request.kind == "optim_step":
            run.failed = None
            if is_error:
                await self._trainer.drop_gradient(name)
            else:
                await self._trainer.optim_step(name, _adam(request))

    # ---- kinds of requests

    async def _create(self, run: ModelQueue, request: Request) -> Result:
        row = run.row
        opened = await self._trainer.open(row.id, row.rank, row.seed, row.parts)
        assert opened.targets
        run.is_open = True
        return Result.of({"type": "create_model", "model_id": row.id})

    async def _forward_backward(self, run: ModelQueue, request: Request) -> Result:
        asked = pb.ForwardBackwardRequest.FromString(request.body)
        try:
            ages = await self._ages.of(asked, run.row)
            body = await self._trainer.forward_backward(
                run.row.id, request.body, ages.masked
            )
        except (UserError, CallRefused):
            if not asked.forward_only:
                run.failed = request.seq
            raise
        run.served += sum(
            len(chunk.encoded_text.tokens) / 4
            for datum in asked.data
            for chunk in datum.model_input
        )
        if not asked.forward_only:
            run.ages = run.ages.joined(ages)
        if metrics := ages.metrics:
            answer = pb.ForwardBackwardOutput.FromString(body)
            for name, value in metrics.items():
                answer.metrics[name] = value
            body = answer.SerializeToString()
        return Result("proto", body, masked=ages.masked)

    async def _optim_step(self, run: ModelQueue, request: Request) -> Result:
        failed, ages = run.failed, run.ages
        run.failed, run.ages = None, Ages()
        if failed is not None:
            await self._trainer.drop_gradient(run.row.id)
            return Result.error(
                f"no step was taken: forward_backward request {failed} failed, so the gradient is not "
                "whole. The gradient is dropped; send forward_backward again."
            )
        try:
            metrics = await self._trainer.optim_step(run.row.id, _adam(request))
        except CallLost:
            run.ages = ages
            raise
        except (UserError, CallRefused):
            await self._trainer.drop_gradient(run.row.id)
            raise
        row = changed(run.row, version=run.row.version + 1)
        run.num_since_kept += 1
        is_due = run.num_since_kept >= KEEP_STEPS
        if is_due or run.bytes_since_kept >= KEEP_BYTES:
            # The step counts even if its state is lost now: it will be repeated.
            with contextlib.suppress(CallLost, CallRefused):
                row = await self._keep(run, row, request)
        run.row = row
        return Result.of({"metrics": {**metrics, **ages.metrics}})

    async def _save_weights(self, run: ModelQueue, request: Request) -> Result:
        asked = read(types.SaveWeightsRequest, request.body)
        known = await self._checkpoint(
            run, WEIGHTS, asked, name=asked.path, overwrite=asked.overwrite
        )
        await self._trainer.save(run.row.id, self._folder / known.file, True)
        made = await self._exported(run, known, asked)
        return Result.of({"type": "save_weights", "path": made.path}, made)

    async def _save_for_sampler(self, run: ModelQueue, request: Request) -> Result:
        asked = read(types.SaveWeightsForSamplerRequest, request.body)
        hidden = f"{HIDDEN}{asked.kind}-{request.seq}"
        known = await self._checkpoint(
            run, SAMPLER_WEIGHTS, asked, name=asked.path or hidden
        )
        made = await self._exported(run, known, asked)
        if asked.path is not None:
            body = {"type": "save_weights_for_sampler", "path": made.path}
            return Result.of(body, made)
        row = run.row
        number = asked.sampling_session_seq_id
        sampler = Sampler(
            f"{row.session_id}:sample:{number}",
            row.session_id,
            row.owner,
            made.path,
            asdict(made),
            row.id if asked.kind == "inflight" else "",
        )
        if sampler.inflight:
            self.inflight[row.id] = made
            if self.on_inflight is not None:
                await self.on_inflight(made)
        body = {"type": "save_weights_for_sampler", "sampling_session_id": sampler.id}
        return Result.of(body, made, sampler)

    async def _save_external(self, run: ModelQueue, request: Request) -> Result:
        raise UserError(
            "external weights are not supported; use save_weights_for_sampler, and copy the file"
        )

    async def _load_weights(self, run: ModelQueue, request: Request) -> Result:
        asked = read(types.LoadWeightsRequest, request.body)
        row = run.row
        found = await checkpoint_of(self._ledger, asked.path, row.owner)
        if found.kind != WEIGHTS:
            raise UserError(
                f"{asked.path} has no optimizer state and cannot be trained: load a path with /weights/"
            )
        if (found.rank, found.parts) != (row.rank, row.parts):
            raise UserError(
                f"{asked.path} has rank {found.rank} of {found.parts}, the model {row.rank} of {row.parts}"
            )
        if not request.seq:
            await self._create(run, request)
        path = self._folder / found.file
        await self._trainer.load(row.id, path, asked.optimizer)
        # The loaded file may be deleted, so a repetition must not need it.
        try:
            kept = changed(row, version=row.version + 1)
            run.row = await self._keep(run, kept, request)
        except CallRefused:
            await self._close(run)
            raise
        run.failed, run.ages = None, Ages()
        return Result.of(
            {"type": "load_weights", "path": asked.path, "model_id": row.id}
        )

    async def _checkpoint(
        self,
        run: ModelQueue,
        kind: str,
        asked: Any,
        *,
        name: str | None,
        overwrite: bool = True,
    ) -> SavedWeights:
        """Return the row of a checkpoint that is to be written. Raises UserError."""
        row = run.row
        name = name or f"step-{row.version}"
        check_name(asked.path)
        check_ttl(asked.ttl_seconds)
        known = {"model_id": row.id, "kind": kind, "name": name}
        found = None if overwrite else await self._ledger.first(SavedWeights, **known)
        if found is not None:
            raise UserError(f"the checkpoint {kind}/{name} exists; set overwrite=True")
        folder = self._folder / kind / _folder_of(row.id)
        folder.mkdir(exist_ok=True)
        # Another save of this name gets another file: samplers may use the old one.
        file = f"{kind}/{folder.name}/{name}-{row.next_seq}.safetensors"
        return SavedWeights(
            row.id, kind, name, row.owner, row.rank, row.parts, row.version, file
        )

    async def _exported(
        self, run: ModelQueue, known: SavedWeights, asked: Any
    ) -> SavedWeights:
        """Write the file that engines read, and return the whole row."""
        path = self._folder / known.sampler_file
        exported = await self._trainer.export(run.row.id, path)
        ttl_s = asked.ttl_seconds
        return changed(
            known,
            size_bytes=(self._folder / known.file).stat().st_size,
            digest=exported.digest,
            num_tensors=exported.num_tensors,
            num_bytes=exported.num_bytes,
            user_metadata=asked.user_metadata,
            expires_s=None if ttl_s is None else time.time() + ttl_s,
        )


def _folder_of(model_id: str) -> str:
    return model_id.replace(":", "-")


def _adam(request: Request) -> AdamParams:
    asked = read(types.OptimStepRequest, request.body)
    params = asked.optim_params
    if not isinstance(params, types.AdamParams):
        raise UserError(
            f"the optimizer {getattr(params, 'type', params)!r} is not supported; use AdamParams"
        )
    return AdamParams(**params.model_dump())
