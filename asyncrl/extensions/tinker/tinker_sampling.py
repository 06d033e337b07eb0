"""Sampling requests: the engines' adapters, draws, prompt logprobs, and answers."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import math
import secrets
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from tinker.proto import tinker_public_pb2 as pb

from asyncrl.base.errors import AdapterMissing, EngineError, EngineLost, RequestRefused
from asyncrl.base.waits import Signal, waiting
from asyncrl.engines.engine import EngineClient
from asyncrl.engines.pool import EnginePool
from asyncrl.extensions.tinker.ledger import (
    ANSWER_S,
    Ledger,
    SampleRecord,
    SavedWeights,
)
from asyncrl.extensions.tinker.tinker_requests import UserError
from asyncrl.extensions.tinker.trainer_calls import ALPHA, Part
from asyncrl.messages.engine_api import (
    MAX_TOP_LOGPROBS,
    OpenAdapterRequest,
    ScoreRequest,
    ScoreResponse,
)
from asyncrl.messages.records import Completion
from asyncrl.messages.sampling import SamplingRequest
from asyncrl.messages.tokens import TOP_IDS, TOP_LOGPROBS
from asyncrl.messages.trainer_api import ExportResponse

log = logging.getLogger("asyncrl.tinker")


def inflight_name(model_id: str) -> str:
    """Return the name of the adapter of a model's inflight samplers."""
    return f"{model_id}#inflight"


EMPTY_LOGPROB = -99999.0
"""Of an empty row of likeliest tokens, whose id is 0."""
BASE = ""
"""The engines' own adapter, which changes nothing."""


class EngineAdapters:
    """Loads the weights of samplers into the engines, the longest idle ones out.

    Waits: a request for a free place, until other samplers' requests end; for engines to
        load a file.
    Invariant: a snapshot's weights never change, and the weights of an inflight name
        only become newer.
    """

    def __init__(
        self,
        servers: Sequence[EngineClient],
        folder: Path,
        layers: Mapping[Part, Sequence[str]],
        most: int,
    ) -> None:
        """`layers`: names by part. `most`: adapters of each engine."""
        self._servers = servers
        self._folder = folder
        self._layers = layers
        self._most = most
        self._loaded = {server.name: dict[str, int]() for server in servers}
        """Version of each adapter, the longest idle first."""
        self._users = dict[str, int]()
        self._locks = {server.name: asyncio.Lock() for server in servers}
        self._freed = Signal()

    def forget(self, server: str) -> None:
        """Note that a new process has no adapters."""
        self._loaded[server].clear()

    @contextlib.asynccontextmanager
    async def use(
        self, weights: SavedWeights | None, name: str = ""
    ) -> AsyncIterator[str]:
        """Yield the adapter of these weights, which stays until the block ends. `name`: of
        an adapter that follows newer weights.
        """
        if weights is None:
            yield BASE
            return
        name = name or weights.file
        if name not in self._users:
            with waiting("a place in the engines", on="other samplers", who="samplers"):
                await self._freed.wait_for(
                    lambda: name in self._users or len(self._users) < self._most
                )
        self._users[name] = self._users.get(name, 0) + 1
        try:
            await self.load(weights, name)
            yield name
        finally:
            self._users[name] -= 1
            if not self._users[name]:
                del self._users[name]
            self._freed.notify()

    async def renew(self, weights: SavedWeights) -> None:
        """Give newer inflight weights to the engines that hold older ones."""
        name = inflight_name(weights.model_id)
        if any(name in loaded for loaded in self._loaded.values()):
            await self.load(weights, name)

    async def load(self, weights: SavedWeights, name: str) -> None:
        """Load weights into all engines that lack them or have older ones. Raises
        EngineError.
        """
        for server in self._servers:
            loaded = self._loaded[server.name]
            async with self._locks[server.name]:
                if loaded.get(name, -1) >= weights.version:
                    loaded[name] = loaded.pop(name)
                    continue
                # A lost engine loads them when its requests are sent again.
                with contextlib.suppress(EngineLost):
                    await self._load(server, weights, name)

    async def _load(
        self, server: EngineClient, weights: SavedWeights, name: str
    ) -> None:
        loaded = self._loaded[server.name]
        if name not in loaded:
            idle = [other for other in loaded if other not in self._users]
            for other in idle[: max(0, len(loaded) + 1 - self._most)]:
                del loaded[other]
                await server.drop_adapter(other)
            names = [one for part in weights.parts for one in self._layers[part]]
            scale = ALPHA / weights.rank
            await server.open_adapter(
                OpenAdapterRequest(
                    adapter=name, rank=weights.rank, scale=scale, targets=names
                )
            )
        version, digest = weights.version, weights.digest
        manifest = ExportResponse(
            adapter=name,
            version=version,
            digest=digest,
            num_tensors=weights.num_tensors,
            num_bytes=weights.num_bytes,
            path=str(self._folder / weights.sampler_file),
        )
        try:
            await server.prepare(manifest)
            await server.commit(version, digest, "keep", name)
        except EngineError:
            # The next request opens it again.
            loaded.pop(name, None)
            with contextlib.suppress(EngineError):
                await server.drop_adapter(name)
            raise
        loaded[name] = version


@dataclass(eq=False)
class SampleFuture:
    """A sampling request. `ids`: of the sequences. `weights`: of its sampler at any time.
    `adapter`: the name for these, if they follow newer ones. `answer`: None until it is
    there; `form`: proto or error.
    """

    owner: str
    plan: SamplePlan
    ids: Sequence[str]
    weights: Callable[[], SavedWeights | None]
    adapter: str
    answer: bytes | None = None
    form: str = ""
    answered_s: float = math.inf
    task: asyncio.Task[None] | None = None
    done: Signal = field(default_factory=Signal)


class Sampling:
    """Runs sampling requests. Their futures are in memory: a restarted server answers
    410, and the client samples again.
    """

    def __init__(
        self,
        pool: EnginePool,
        adapters: EngineAdapters,
        ledger: Ledger,
        spawn: Callable[..., asyncio.Task[Any]],
        max_length: int,
    ) -> None:
        self.futures = dict[str, SampleFuture]()
        self.num_open = Counter[str]()
        """Requests without an answer, by owner."""
        self.max_length = max_length
        self._adapters = adapters
        self._pool = pool
        self._ledger = ledger
        self._spawn = spawn

    def submit(self, request_id: str, future: SampleFuture) -> None:
        self.futures[request_id] = future
        self.num_open[future.owner] += 1
        work = self._run(future)
        future.task = self._spawn(work, name=f"sample {request_id}")

    def cancel(self, request_id: str) -> None:
        future = self.futures.pop(request_id, None)
        if future is not None and future.task is not None:
            future.task.cancel()

    def tidy(self) -> None:
        """Forget answers that are old."""
        for request_id, future in [*self.futures.items()]:
            if future.answered_s < time.time() - ANSWER_S:
                del self.futures[request_id]

    async def _run(self, future: SampleFuture) -> None:
        try:
            future.answer = await self._sample(future)
            future.form = "proto"
        except (RequestRefused, UserError) as error:
            text = error.why if isinstance(error, RequestRefused) else str(error)
            future.form, future.answer = "error", _error(text, "user")
        # Of any kind: one user's request must not end the server for the others.
        except Exception as error:
            log.exception("a sampling request failed")
            future.form, future.answer = "error", _error(str(error), "server")
        finally:
            self.num_open[future.owner] -= 1
            future.answered_s = time.time()
            future.done.notify()

    async def _sample(self, future: SampleFuture) -> bytes:
        while True:
            known = future.weights()
            try:
                async with self._adapters.use(known, future.adapter) as adapter:
                    return await self._sample_with(future, known, adapter)
            # Of an engine that was started again: the next try loads its adapter.
            except AdapterMissing:
                continue

    async def _sample_with(
        self, future: SampleFuture, weights: SavedWeights | None, adapter: str
    ) -> bytes:
        plan = future.plan
        requests = [
            plan.sampling_request(index, name, adapter)
            for index, name in enumerate(future.ids)
        ]
        completions, scores = await asyncio.gather(
            asyncio.gather(*map(self._pool.generate, requests)),
            asyncio.gather(*map(self._score, plan.score_requests(adapter))),
        )
        made = pb.SampleResponse()
        model_id = "" if weights is None else weights.model_id
        for name, completion in zip(future.ids, completions, strict=True):
            plan.add_sequence(made, completion)
            spans = [list(span[:3]) for span in completion.sampled.spans]
            self._ledger.put_soon(SampleRecord(name, future.owner, model_id, spans))
        for one in scores:
            plan.add_scores(made, one)
        if plan.is_first_only:
            made.prompt_logprobs = np.array([np.nan], "<f4").tobytes()
        content: bytes = made.SerializeToString()
        return content

    async def _score(self, request: ScoreRequest) -> ScoreResponse:
        return await self._pool.ask("prompt logprobs", lambda one: one.score(request))


def _error(text: str, category: str) -> bytes:
    return json.dumps({"error": text, "category": category}).encode()


class SamplePlan:
    """What a sampling request asks of the engines, and how their answers are put
    together. `asked`: tinker's SampleRequest.
    """

    def __init__(self, asked: Any, max_length: int) -> None:
        """Raises UserError for what cannot be sampled."""
        self._asked = asked
        for chunk in asked.prompt.chunks:
            if chunk.type != "encoded_text":
                raise UserError(f"a prompt has {chunk.type!r}: only text is supported")
        self._ids: list[int] = [int(one) for one in asked.prompt.to_ints()]
        if any(not 0 <= one < 2**31 for one in self._ids):
            raise UserError("the prompt has a number that is no token id")
        params = asked.sampling_params
        num_prompt = len(self._ids)
        room = max_length - num_prompt
        self._max_tokens = room if params.max_tokens is None else params.max_tokens
        last = asked.prompt_logprobs_last_n
        k = max(asked.topk_prompt_logprobs, asked.topk_sample_logprobs)
        for name, value, low, high in (
            ("the number of prompt tokens", num_prompt, 1, max_length - 1),
            ("max_tokens after this prompt", self._max_tokens, 1, room),
            ("num_samples", asked.num_samples, 1, 1024),
            ("temperature", params.temperature, 0, 100),
            ("top_p", params.top_p, 1e-6, 1),
            ("top_k", params.top_k or -2, -1, 2**31),
            ("topk logprobs", k, 0, MAX_TOP_LOGPROBS),
            ("prompt_logprobs_last_n", last or 1, 1, max(num_prompt - 1, 1)),
        ):
            if not low <= value <= high:
                raise UserError(
                    f"{name} is {value}, and must be in {low:g} to {high:g}"
                )
        self._stop = self._stops()
        seed = secrets.randbits(62) if params.seed is None else params.seed
        self._seed = seed % 2**62
        self._targets = self._target_rows()

    def _stops(self) -> dict[str, Any]:
        stop = self._asked.sampling_params.stop
        if stop is None:
            return {}
        if isinstance(stop, str):
            return {"stop": (stop,)}
        # Without any stop, EOS included, the answer has all its tokens.
        if not stop:
            return {"ignore_eos": True}
        if all(isinstance(one, int) for one in stop):
            return {"stop_ids": tuple(stop)}
        if all(isinstance(one, str) for one in stop):
            return {"stop": tuple(stop)}
        raise UserError("stop is a text, a list of texts, or a list of token ids")

    def _target_rows(self) -> list[list[int]] | None:
        """Return the asked ids of each position after the first; -1: none, also at the
        end of short rows.
        """
        tensor = self._asked.target_prompt_logprobs
        if tensor is None:
            return None
        num = len(self._ids) - 1
        bounds = tensor.sparse_crow_indices
        if bounds is None:
            width = tensor.shape[-1] if tensor.shape else 1
            bounds = range(0, len(tensor.data) + 1, max(width, 1))
        rows = [
            [int(one) for one in tensor.data[start:end]]
            for start, end in pairwise(bounds)
        ]
        if len(rows) != num:
            raise UserError(
                f"target_prompt_logprobs has {len(rows)} rows; the prompt has {num} tokens after the first"
            )
        self._widths = [len(row) for row in rows]
        widest = max(self._widths, default=0)
        return [row + [-1] * (widest - len(row)) for row in rows] if widest else None

    def sampling_request(self, index: int, name: str, adapter: str) -> SamplingRequest:
        params = self._asked.sampling_params
        seed = blake2b(f"{self._seed}/{index}".encode(), digest_size=7).digest()
        return SamplingRequest(
            request_id=name,
            prompt_ids=np.array(self._ids, np.int32),
            max_tokens=self._max_tokens,
            seed=int.from_bytes(seed),
            temperature=params.temperature,
            top_p=params.top_p,
            top_k=max(params.top_k, 0),
            top_logprobs=self._asked.topk_sample_logprobs,
            route_key=f"{adapter}/{name.rpartition('-')[0]}",
            adapter=adapter,
            **self._stop,
        )

    def score_requests(self, adapter: str) -> Iterator[ScoreRequest]:
        asked, num = self._asked, len(self._ids)
        if num < 2:
            return
        last = asked.prompt_logprobs_last_n
        plain = ScoreRequest(token_ids=self._ids, adapter=adapter)
        if asked.prompt_logprobs or asked.topk_prompt_logprobs:
            first = 1 if last is None else num - last
            k = asked.topk_prompt_logprobs
            yield plain.model_copy(update={"start": first, "top_k": k})
        if self._targets is not None:
            yield plain.model_copy(update={"targets": self._targets})
        # At the request's temperature, unlike the logprobs above.
        if asked.prompt_alt_tokens_k:
            more = {"draws": asked.prompt_alt_tokens_k, "seed": self._seed}
            temperature = asked.sampling_params.temperature or 1.0
            yield plain.model_copy(update=more | {"temperature": temperature})

    @property
    def is_first_only(self) -> bool:
        """Whether the request wants prompt logprobs of a single token: it has no context."""
        return bool(self._asked.prompt_logprobs) and len(self._ids) == 1

    def add_sequence(self, made: Any, completion: Completion) -> None:
        sampled = completion.sampled
        one = made.sequences.add()
        one.stop_reason = 0 if completion.finish_reason == "stop" else 1
        one.tokens = sampled.ids.astype("<i4").tobytes()
        one.logprobs = sampled.behaviour_logprobs.astype("<f4").tobytes()
        k = self._asked.topk_sample_logprobs
        if k:
            ids, logprobs = sampled.column(TOP_IDS), sampled.column(TOP_LOGPROBS)
            _set_top(one.topk_sampled_logprobs, k, ids.values, logprobs.values)

    def add_scores(self, made: Any, scores: ScoreResponse) -> None:
        """Add the answer of one of score_requests()."""
        asked, num = self._asked, len(self._ids)
        if scores.target_logprobs:
            self._set_targets(made.target_prompt_logprobs, scores.target_logprobs)
            return
        if scores.draw_ids:
            shape = [num - 1, asked.prompt_alt_tokens_k]
            alt = made.prompt_alt_tokens
            _set_dense(alt.tokens, np.array(scores.draw_ids, np.int64), shape)
            _set_dense(alt.logprobs, np.array(scores.draw_logprobs, np.float32), shape)
            return
        first = num - len(scores.logprobs)
        if asked.prompt_logprobs:
            logprobs = np.full(num, np.nan, "<f4")
            logprobs[first:] = scores.logprobs
            made.prompt_logprobs = logprobs.tobytes()
        if k := asked.topk_prompt_logprobs:
            ids = np.zeros((num, k), np.int32)
            top = np.full((num, k), EMPTY_LOGPROB, np.float32)
            ids[first:] = np.reshape(scores.top_ids, (-1, k))
            top[first:] = np.reshape(scores.top_logprobs, (-1, k))
            _set_top(made.topk_prompt_logprobs, k, ids, top)

    def _set_targets(self, tensor: Any, found: Sequence[float]) -> None:
        asked = self._asked.target_prompt_logprobs
        num = len(self._ids) - 1
        values = np.reshape(np.array(found, np.float32), (num, -1))
        if asked.sparse_crow_indices is None:
            _set_dense(tensor, values, values.shape)
            return
        tensor.dtype = pb.DTYPE_FLOAT32
        tensor.shape.extend(asked.shape)
        is_asked = np.arange(values.shape[1]) < np.array(self._widths)[:, None]
        tensor.sparse_csr.values = values[is_asked].tobytes()
        for name in ("crow_indices", "col_indices"):
            indices = np.array(getattr(asked, f"sparse_{name}"), np.int64)
            setattr(tensor.sparse_csr, name, indices.tobytes())


def _set_top(
    top: Any, k: int, ids: npt.NDArray[Any], logprobs: npt.NDArray[Any]
) -> None:
    top.k = k
    top.length = ids.size // k
    top.token_ids = ids.astype("<i4").tobytes()
    top.logprobs = logprobs.astype("<f4").tobytes()


def _set_dense(tensor: Any, values: npt.NDArray[Any], shape: Sequence[int]) -> None:
    tensor.dtype = pb.DTYPE_INT64 if values.dtype == np.int64 else pb.DTYPE_FLOAT32
    tensor.shape.extend(shape)
    tensor.dense = values.tobytes()
