"""The routes of the Tinker API, as the client of package tinker calls them."""

from __future__ import annotations

import asyncio
import re
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import partial
from hmac import compare_digest
from pathlib import Path
from typing import Any, TypeVar

from fastapi import FastAPI
from google.protobuf.message import DecodeError
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from tinker import types
from tinker.proto import tinker_public_pb2 as pb

from asyncrl.base.waits import clock
from asyncrl.extensions.tinker import ledger as rows
from asyncrl.extensions.tinker.ledger import Ledger, changed
from asyncrl.extensions.tinker.tinker_config import ServerConfig
from asyncrl.extensions.tinker.tinker_requests import (
    UserError,
    check_ttl,
    checkpoint_of,
    read,
    read_object,
)
from asyncrl.extensions.tinker.tinker_sampling import (
    SampleFuture,
    SamplePlan,
    Sampling,
    inflight_name,
)
from asyncrl.extensions.tinker.trainer_calls import Part
from asyncrl.extensions.tinker.training_queue import (
    HIDDEN,
    SAMPLER_WEIGHTS,
    WEIGHTS,
    Training,
)

Form = TypeVar("Form", bound=BaseModel)
Handler = Callable[[str, Request], Awaitable[Any]]
PROTO = "application/x-protobuf"
POLL_S = 20.0
"""Answer time of a poll without a result. The client waits 45 s."""
SESSION_S = 600.0
"""A session without a heartbeat ends after this time."""
MAX_BODY_BYTES = 2**26
PLAIN = (
    "optim_step",
    "save_weights",
    "save_weights_for_sampler",
    "save_weights_external",
)
"""Requests that only their model's queue reads."""
PART_OF: Mapping[str, Part] = {
    "train_attn": "attn",
    "train_mlp": "mlp",
    "train_unembed": "unembed",
}
KIND_OF = {WEIGHTS: "training", SAMPLER_WEIGHTS: "sampler"}
NOT_SERVED = (
    "this server has no {}; docs/tinker-requests.md lists the supported requests"
)


@dataclass(frozen=True)
class Served:
    """The base model. `names`: its names in requests."""

    names: Sequence[str]
    folder: Path
    architecture: str
    max_length: int
    max_rank: int

    def check(self, name: str | None) -> None:
        """Raise UserError for another model. A name may have a suffix after a colon."""
        if name is not None and name.partition(":")[0] not in self.names:
            raise UserError(
                f"the model {name!r} is not served; there is {self.names[0]}", 404
            )


class Routes:
    """Checks keys and owners, and passes requests on. `keys`: names of owners by key."""

    def __init__(
        self,
        keys: Mapping[str, str],
        served: Served,
        limits: ServerConfig,
        ledger: Ledger,
        training: Training,
        sampling: Sampling,
    ) -> None:
        self._keys = keys
        self._served = served
        self._limits = limits
        self._ledger = ledger
        self._training = training
        self._sampling = sampling
        self._seen_s = dict[str, float]()
        """Last heartbeat of each open session."""

    async def restore(self) -> None:
        """Take up the sessions and models of an earlier process."""
        open_ones = {
            one.id for one in await self._ledger.find(rows.ClientSession, ended="")
        }
        self._seen_s = dict.fromkeys(open_ones, clock())
        models = await self._ledger.find(rows.Model)
        await self._training.restore(
            [one for one in models if one.session_id in open_ones]
        )

    # ---- the application

    def app(self) -> FastAPI:
        app = FastAPI(title="asyncrl: Tinker API", redirect_slashes=False)
        for kind in (UserError, HTTPException, DecodeError, ClientDisconnect):
            app.add_exception_handler(kind, _failed)
        checkpoint = "training_runs/{run_id}/checkpoints/{kind}/{name}"
        routes: list[tuple[str, str, Handler]] = [
            ("POST", "client/config", self._config),
            ("POST", "client/dynamic_config", self._dynamic_config),
            ("POST", "create_session", self._create_session),
            ("POST", "session_heartbeat", self._heartbeat),
            ("POST", "sessions/{session_id}/finish", self._finish_session),
            ("POST", "telemetry", self._telemetry),
            ("POST", "create_model", self._create_model),
            ("POST", "get_info", self._get_info),
            ("POST", "forward_backward", self._forward_backward),
            ("POST", "load_weights", self._load_weights),
            *(("POST", kind, partial(self._train, kind)) for kind in PLAIN),
            ("POST", "create_sampling_session", self._create_sampling_session),
            ("POST", "asample", self._asample),
            ("POST", "retrieve_future", self._retrieve_future),
            ("POST", "cancel_future", self._cancel_future),
            ("POST", "weights_info", self._weights_info),
            ("GET", "healthz", self._health),
            ("GET", "get_server_capabilities", self._capabilities),
            ("GET", "samplers/{sampler_id:path}", self._sampler),
            ("GET", "sessions", self._sessions),
            ("GET", "sessions/{session_id}", self._session_info),
            ("GET", "training_runs", self._training_runs),
            ("GET", "training_runs/{run_id}/checkpoints", self._checkpoints_of_run),
            ("GET", "training_runs/{run_id}", self._training_run),
            ("GET", "checkpoints", self._checkpoints),
            ("DELETE", checkpoint, self._delete),
            ("POST", f"{checkpoint}/publish", self._publish),
            ("DELETE", f"{checkpoint}/publish", self._publish),
            ("PUT", f"{checkpoint}/ttl", self._set_ttl),
        ]
        for method, path, handler in routes:
            route = f"/api/v1/{path}"
            app.add_route(route, self._called(handler), methods=[method], name=path)
        every = ["GET", "POST", "PUT", "DELETE", "PATCH"]
        app.add_route("/{path:path}", self._called(self._refuse), methods=every)
        return app

    async def _refuse(self, _: str, request: Request) -> Any:
        raise UserError(NOT_SERVED.format(request.url.path))

    def _called(self, handler: Handler) -> Callable[[Request], Awaitable[Response]]:
        async def answer(request: Request) -> Response:
            given = request.headers.get("x-api-key", "").encode()
            # All are compared, so that the time tells nothing.
            owners = [
                owner
                for key, owner in self._keys.items()
                if compare_digest(key.encode(), given)
            ]
            if not owners:
                raise UserError("the key in X-API-Key is unknown", 401)
            if int(request.headers.get("content-length", 0)) > MAX_BODY_BYTES:
                raise UserError(f"the body is above {MAX_BODY_BYTES} bytes", 413)
            found = await handler(owners[0], request)
            if isinstance(found, Response):
                return found
            return Response(status_code=204) if found is None else JSONResponse(found)

        return answer

    # ---- sessions

    async def _config(self, _: str, __: Request) -> Any:
        return types.ClientConfigResponse().model_dump()

    async def _dynamic_config(self, _: str, __: Request) -> Any:
        return {
            "refresh_interval_sec": 300,
            "sample_cancel_enabled": True,
            "sample_cancel_max_batch_size": 64,
        }

    async def _telemetry(self, _: str, __: Request) -> Any:
        # Unread: events may hold headers with keys.
        return {"status": "accepted"}

    async def _health(self, _: str, __: Request) -> Any:
        return {"status": "ok"}

    async def _create_session(self, owner: str, request: Request) -> Any:
        asked = read(types.CreateSessionRequest, await request.body())
        made = rows.ClientSession(
            secrets.token_hex(12),
            owner,
            list(asked.tags),
            asked.user_metadata,
            getattr(asked, "display_name", None),
        )
        await self._ledger.put(made)
        self._seen_s[made.id] = clock()
        return {"type": "create_session", "session_id": made.id}

    async def _heartbeat(self, owner: str, request: Request) -> Any:
        asked = read(types.SessionHeartbeatRequest, await request.body())
        await self._session(owner, asked.session_id)
        return {"type": "session_heartbeat"}

    async def _finish_session(self, owner: str, request: Request) -> Any:
        session_id = request.path_params["session_id"]
        try:
            session = await self._session(owner, session_id)
        except UserError as error:
            if error.status == 410:
                return None  # the first reason counts
            raise
        body = read_object(await request.body())
        reason = body.get("reason")
        reason = reason.get("type") if isinstance(reason, dict) else "success"
        await self._end(session, f"the client ended it: {reason}")
        return None

    async def _session(self, owner: str, session_id: str) -> rows.ClientSession:
        """Return an open session, which lives on from now. Raises UserError."""
        found = await self._ledger.first(rows.ClientSession, id=session_id)
        if found is None or found.owner != owner:
            raise UserError(f"this key has no session {session_id!r}", 404)
        if found.ended:
            raise UserError(f"the session {session_id} has ended: {found.ended}", 410)
        self._seen_s[session_id] = clock()
        return found

    async def _end(self, session: rows.ClientSession, why: str) -> None:
        self._seen_s.pop(session.id, None)
        await self._ledger.put(changed(session, ended=why))
        for run in [*self._training.runs.values()]:
            if run.row.session_id == session.id:
                await self._training.end(run.row.id)

    async def tidy(self) -> None:
        """End silent sessions, and delete expired files, for ever."""
        while True:
            await asyncio.sleep(SESSION_S / 20)
            for session_id, seen_s in [*self._seen_s.items()]:
                if clock() - seen_s > SESSION_S:
                    found = await self._ledger.first(rows.ClientSession, id=session_id)
                    assert found is not None
                    await self._end(found, f"no heartbeat for {SESSION_S:g} s")
            for one in await self._ledger.find(rows.SavedWeights):
                if one.expires_s is not None and one.expires_s < time.time():
                    await self._training.remove(one)
            await self._ledger.tidy()
            self._sampling.tidy()

    # ---- models

    async def _create_model(self, owner: str, request: Request) -> Any:
        body = await request.body()
        asked = read(types.CreateModelRequest, body)
        self._served.check(asked.base_model)
        lora = asked.lora_config or types.LoraConfig(rank=32)
        parts = [part for key, part in PART_OF.items() if getattr(lora, key)]
        if not parts:
            raise UserError("no part of the model is trained")
        if not 1 <= lora.rank <= self._served.max_rank:
            raise UserError(f"rank {lora.rank} is not 1 to {self._served.max_rank}")
        if asked.optimizer_config.type != "adamw":
            raise UserError(
                NOT_SERVED.format(f"optimizer {asked.optimizer_config.type!r}")
            )
        seed = secrets.randbits(31) if lora.seed is None else lora.seed % 2**63
        return await self._begin(
            owner, asked, "create_model", body, lora.rank, seed, parts
        )

    async def _load_weights(self, owner: str, request: Request) -> Any:
        body = await request.body()
        if "model_id" in read_object(body):
            return await self._train("load_weights", owner, request)
        asked = read(types.LoadWeightsRequest, body)
        self._served.check(asked.base_model)
        found = await checkpoint_of(self._ledger, asked.path, owner)
        # A is loaded, so the seed has no effect.
        return await self._begin(
            owner, asked, "load_weights", body, found.rank, 0, found.parts
        )

    async def _begin(
        self,
        owner: str,
        asked: Any,
        kind: str,
        body: bytes,
        rank: int,
        seed: int,
        parts: list[Part],
    ) -> Any:
        await self._session(owner, asked.session_id)
        model_id = f"{asked.session_id}:train:{asked.model_seq_id}"
        runs = self._training.runs
        num = sum(one.row.owner == owner for one in runs.values())
        if model_id not in runs and num >= self._limits.max_adapters:
            raise UserError(
                f"this key trains {num} models, of at most {self._limits.max_adapters}; close a session first"
            )
        model = rows.Model(
            model_id, asked.session_id, owner, rank, seed, parts, asked.user_metadata
        )
        await self._training.submit(rows.Request(model_id, 0, kind, body), model)
        return {"request_id": f"{model_id}:0", "model_id": model_id}

    async def _model(self, owner: str, model_id: Any) -> rows.Model:
        """Return a model of an open session. Raises UserError."""
        found = await self._ledger.first(rows.Model, id=str(model_id))
        if found is None or found.owner != owner:
            raise UserError(f"this key has no model {model_id!r}", 404)
        if found.id not in self._training.runs:
            await self._session(owner, found.session_id)
            raise UserError(f"the model {model_id} has ended", 404)
        self._seen_s[found.session_id] = clock()
        return found

    async def _get_info(self, owner: str, request: Request) -> Any:
        asked = read(types.GetInfoRequest, await request.body())
        model = await self._model(owner, asked.model_id)
        name = self._served.names[0]
        return {
            "type": "get_info",
            "model_data": {
                "arch": self._served.architecture,
                "model_name": name,
                "tokenizer_id": str(self._served.folder),
            },
            "model_id": model.id,
            "is_lora": True,
            "lora_rank": model.rank,
            "model_name": name,
            "optimizer_config": {"type": "adamw"},
        }

    async def _forward_backward(self, owner: str, request: Request) -> Any:
        body = await request.body()
        asked = pb.ForwardBackwardRequest.FromString(body)
        place = asked.model_id, asked.seq_id
        return await self._accept(owner, *place, "forward_backward", body)

    async def _train(self, kind: str, owner: str, request: Request) -> Any:
        body = await request.body()
        values = read_object(body)
        place = values.get("model_id"), values.get("seq_id")
        return await self._accept(owner, *place, kind, body)

    async def _accept(
        self, owner: str, model_id: Any, seq: Any, kind: str, body: bytes
    ) -> Any:
        """Accept a training request. Once its model and number are known, its future
        reports every fault: the client never sends a refused number again.
        """
        model = await self._model(owner, model_id)
        if type(seq) is not int or not 0 < seq < 2**31:
            raise UserError(f"seq_id={seq!r} is not a number from 1 to 2**31", 422)
        run = self._training.runs[model.id]
        if len(run.waiting) >= self._limits.max_futures and seq not in run.waiting:
            raise UserError(f"{len(run.waiting)} requests of this model wait", 429)
        await self._training.submit(rows.Request(model.id, seq, kind, body))
        return {"request_id": f"{model.id}:{seq}", "model_id": model.id}

    # ---- futures

    async def _retrieve_future(self, owner: str, request: Request) -> Any:
        asked = read(types.FutureRetrieveRequest, await request.body())
        request_id = asked.request_id
        sample = self._sampling.futures.get(request_id)
        if sample is not None and sample.owner == owner:
            return await self._sample_answer(request_id, sample)
        found = re.fullmatch(r"(.+:train:\d+):(\d+)", request_id)
        if found is None:
            raise UserError("the answer is gone; send the request again", 410)
        model_id, seq = found[1], int(found[2])
        model = await self._ledger.first(rows.Model, id=model_id)
        if model is None or model.owner != owner:
            raise UserError(f"this key has no request {request_id!r}", 404)
        try:
            done = await self._training.answer_of(model_id, seq, POLL_S)
        except KeyError:
            raise UserError(f"the answer of {request_id} is gone", 410) from None
        if done is None:
            return _pending(request_id, self._training.why_waiting(model_id, seq))
        assert done.answer is not None
        return _answer(done.form, done.answer)

    async def _sample_answer(self, request_id: str, future: Any) -> Response:
        if future.answer is None:
            try:
                async with asyncio.timeout(POLL_S):
                    await future.done.wait_for(lambda: future.answer is not None)
            except TimeoutError:
                num = self._sampling.num_open[future.owner]
                return _pending(
                    request_id, f"{num} samples of this key are queued or running"
                )
        return _answer(future.form, future.answer)

    async def _cancel_future(self, owner: str, request: Request) -> None:
        asked = read_object(await request.body())
        name = str(asked.get("request_id"))
        future = self._sampling.futures.get(name)
        if future is not None and future.owner == owner:
            self._sampling.cancel(name)

    # ---- samplers

    async def _create_sampling_session(self, owner: str, request: Request) -> Any:
        asked = read(types.CreateSamplingSessionRequest, await request.body())
        session = await self._session(owner, asked.session_id)
        weights = None
        if asked.model_path is not None:
            found = await checkpoint_of(self._ledger, asked.model_path, owner)
            weights = asdict(found)
        else:
            self._served.check(asked.base_model or "")
        number = asked.sampling_session_seq_id
        sampler_id = f"{session.id}:sample:{number}"
        made = rows.Sampler(
            sampler_id, session.id, owner, asked.model_path or "", weights
        )
        await self._ledger.put(made)
        return {"type": "create_sampling_session", "sampling_session_id": sampler_id}

    async def _known_sampler(self, owner: str, sampler_id: str | None) -> rows.Sampler:
        known = await self._ledger.first(rows.Sampler, id=sampler_id)
        if known is None or known.owner != owner:
            raise UserError(f"this key has no sampler {sampler_id!r}", 404)
        await self._session(owner, known.session_id)
        return known

    async def _asample(self, owner: str, request: Request) -> Any:
        asked = read(types.SampleRequest, await request.body())
        if asked.sampling_session_id is not None:
            sampler = await self._known_sampler(owner, asked.sampling_session_id)
        elif asked.model_path is not None:
            found = await checkpoint_of(self._ledger, asked.model_path, owner)
            sampler = rows.Sampler("", "", owner, found.path, asdict(found))
        else:
            self._served.check(asked.base_model or "")
            sampler = rows.Sampler("", "", owner)
        # A repeated request gets the first one's answer.
        request_id = f"sample-{secrets.token_hex(12)}"
        if asked.sampling_session_id is not None and asked.seq_id is not None:
            request_id = f"{sampler.id}:{asked.seq_id}"
        future = self._sampling.futures.get(request_id)
        if future is None:
            if self._sampling.num_open[owner] >= self._limits.max_futures:
                num = self._limits.max_futures
                raise UserError(f"{num} samples of this key are open", 429)
            name = inflight_name(sampler.inflight) if sampler.inflight else ""
            plan = SamplePlan(asked, self._sampling.max_length)
            # Of this process: a restarted server's record must not mix two answers.
            first = f"{request_id}/{secrets.token_hex(4)}"
            ids = [f"{first}-{index}" for index in range(asked.num_samples)]
            weights = self._weights_of(sampler)
            future = SampleFuture(owner, plan, ids, weights, name)
            self._sampling.submit(request_id, future)
        return {"request_id": request_id, "sample_sequence_ids": [*future.ids]}

    def _weights_of(
        self, sampler: rows.Sampler
    ) -> Callable[[], rows.SavedWeights | None]:
        own = sampler.checkpoint
        if not sampler.inflight or own is None:
            return lambda: own
        newest = self._training.inflight
        newest.setdefault(sampler.inflight, own)
        return lambda: newest[sampler.inflight]

    async def _sampler(self, owner: str, request: Request) -> Any:
        found = await self._known_sampler(owner, request.path_params["sampler_id"])
        return {
            "sampler_id": found.id,
            "base_model": self._served.names[0],
            "model_path": found.path or None,
        }

    # ---- listing, keeping, deleting

    async def _capabilities(self, _: str, __: Request) -> Any:
        return {
            "supported_models": [
                {
                    "model_name": name,
                    "max_context_length": self._served.max_length,
                    "trainable": True,
                    "sampleable": True,
                }
                for name in self._served.names
            ]
        }

    async def _sessions(self, owner: str, request: Request) -> Any:
        found = await self._ledger.find(rows.ClientSession, owner=owner)
        shown, _ = _page([one.id for one in found], request)
        return {"sessions": shown}

    async def _session_info(self, owner: str, request: Request) -> Any:
        known = {"id": request.path_params["session_id"], "owner": owner}
        found = await self._ledger.first(rows.ClientSession, **known)
        if found is None:
            raise UserError(f"this key has no session {known['id']!r}", 404)
        models = await self._ledger.find(rows.Model, session_id=found.id)
        samplers = await self._ledger.find(rows.Sampler, session_id=found.id)
        return {
            "training_run_ids": [one.id for one in models],
            "sampler_ids": [one.id for one in samplers],
            "user_metadata": found.user_metadata,
            "display_name": found.display_name,
        }

    async def _training_runs(self, owner: str, request: Request) -> Any:
        models = await self._ledger.find(rows.Model, owner=owner)
        shown, cursor = _page(models[::-1], request)
        runs = [await self._run_body(one) for one in shown]
        return {"training_runs": runs, "cursor": cursor}

    async def _training_run(self, owner: str, request: Request) -> Any:
        return await self._run_body(await self._any_model(owner, request))

    async def _any_model(self, owner: str, request: Request) -> rows.Model:
        known = {"id": request.path_params["run_id"], "owner": owner}
        found = await self._ledger.first(rows.Model, **known)
        if found is None:
            raise UserError(f"this key has no training run {known['id']!r}", 404)
        return found

    async def _run_body(self, model: rows.Model) -> dict[str, Any]:
        made = await self._ledger.find(rows.SavedWeights, model_id=model.id)
        last = dict[str, Any]()
        for one in made:
            if not one.name.startswith(HIDDEN):
                last[one.kind] = _checkpoint_body(one)
        return {
            "training_run_id": model.id,
            "base_model": self._served.names[0],
            "model_owner": model.owner,
            "is_lora": True,
            "corrupted": False,
            "lora_rank": model.rank,
            "last_request_time": _time(model.used_s),
            "last_checkpoint": last.get(WEIGHTS),
            "last_sampler_checkpoint": last.get(SAMPLER_WEIGHTS),
            "user_metadata": model.user_metadata,
        }

    async def _checkpoints_of_run(self, owner: str, request: Request) -> Any:
        model = await self._any_model(owner, request)
        made = await self._ledger.find(rows.SavedWeights, model_id=model.id)
        shown = [
            _checkpoint_body(one) for one in made if not one.name.startswith(HIDDEN)
        ]
        return {"checkpoints": shown, "cursor": None}

    async def _checkpoints(self, owner: str, request: Request) -> Any:
        made = await self._ledger.find(rows.SavedWeights, owner=owner)
        visible = [one for one in made if not one.name.startswith(HIDDEN)]
        shown, cursor = _page(visible[::-1], request)
        return {
            "checkpoints": [_checkpoint_body(one) for one in shown],
            "cursor": cursor,
        }

    async def _own_checkpoint(self, owner: str, request: Request) -> rows.SavedWeights:
        place = request.path_params
        path = f"tinker://{place['run_id']}/{place['kind']}/{place['name']}"
        found = await checkpoint_of(self._ledger, path, owner)
        if found.owner != owner:
            raise UserError(f"{path} belongs to another key", 403)
        return found

    async def _delete(self, owner: str, request: Request) -> None:
        await self._training.remove(await self._own_checkpoint(owner, request))

    async def _publish(self, owner: str, request: Request) -> None:
        found = await self._own_checkpoint(owner, request)
        await self._ledger.put(changed(found, public=request.method == "POST"))

    async def _set_ttl(self, owner: str, request: Request) -> None:
        found = await self._own_checkpoint(owner, request)
        ttl_s = read_object(await request.body()).get("ttl_seconds")
        check_ttl(ttl_s)
        expires_s = None if ttl_s is None else time.time() + ttl_s
        await self._ledger.put(changed(found, expires_s=expires_s))

    async def _weights_info(self, owner: str, request: Request) -> Any:
        path = read_object(await request.body()).get("tinker_path", "")
        found = await checkpoint_of(self._ledger, str(path), owner)
        return {
            "base_model": self._served.names[0],
            "is_lora": True,
            "lora_rank": found.rank,
            **{key: part in found.parts for key, part in PART_OF.items()},
            "optimizer_config": {"type": "adamw"},
        }


def _failed(_: Request, error: Exception) -> Response:
    if isinstance(error, UserError):
        return JSONResponse({"detail": str(error)}, error.status)
    if isinstance(error, HTTPException):
        return JSONResponse({"detail": str(error.detail)}, error.status_code)
    return JSONResponse({"detail": f"the body cannot be read: {error}"}, 422)


def _answer(form: str, answer: bytes) -> Response:
    kind = PROTO if form == "proto" else "application/json"
    return Response(answer, media_type=kind)


def _pending(request_id: str, why: str) -> Response:
    # 408: the client asks again at once, without a warning in its log.
    body = {
        "type": "try_again",
        "request_id": request_id,
        "queue_state": "active",
        "queue_state_reason": why,
    }
    return JSONResponse(body, 408)


def _page(found: Sequence[Any], request: Request) -> tuple[list[Any], dict[str, int]]:
    try:
        offset = max(0, int(request.query_params.get("offset", 0)))
        limit = max(0, int(request.query_params.get("limit", 20)))
    except ValueError:
        raise UserError("offset and limit are whole numbers", 422) from None
    cursor = {"offset": offset, "limit": limit, "total_count": len(found)}
    return list(found[offset : offset + limit]), cursor


def _time(at_s: float) -> str:
    return datetime.fromtimestamp(at_s, UTC).isoformat()


def _checkpoint_body(one: rows.SavedWeights) -> dict[str, Any]:
    return {
        "checkpoint_id": one.id,
        "checkpoint_type": KIND_OF[one.kind],
        "time": _time(one.created_s),
        "tinker_path": one.path,
        "size_bytes": one.size_bytes,
        "public": one.public,
        "user_metadata": one.user_metadata,
        "expires_at": None if one.expires_s is None else _time(one.expires_s),
    }
