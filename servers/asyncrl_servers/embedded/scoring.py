"""Logprobs of given tokens, for a teacher."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from asyncrl.base.http import Refused
from asyncrl.messages.engine_api import ScoreRequest, ScoreResponse
from asyncrl_servers.embedded.decoder import EmbeddedSpec, LoadedModel, to_device, to_host
from asyncrl_servers.embedded.kv_attention import NO_INTS, Ints, Part, Stretch, written
from asyncrl_servers.embedded.runner import Runner, cut_calls

if TYPE_CHECKING:
    from asyncrl_servers.embedded.decode_loop import Engine


class ScoredText(NamedTuple):
    ids: Ints
    request: ScoreRequest
    answer: Future[ScoreResponse]


class Scorer(Runner):
    """Reads up to score_slots texts at once, in the engine's loop."""

    def __init__(self, loaded: LoadedModel, spec: EmbeddedSpec, *, is_exact: bool) -> None:
        super().__init__(loaded, spec.score_slots, spec.max_length, is_exact=is_exact)
        self._waiting = deque[ScoredText]()

    def add(self, request: ScoreRequest, answer: Future[ScoreResponse]) -> None:
        """Raises Refused (400)."""
        num_tokens, most = len(request.token_ids), self.max_length
        if num_tokens > most or request.start >= num_tokens:
            what = f"{num_tokens} tokens are to be scored from number {request.start} on"
            rule = f"a text has {most} tokens at most, and start is one of its tokens"
            raise Refused(400, what, rule=rule, way_out="raise rollout.max_prompt_tokens or max_tokens.")
        ids = np.asarray(request.token_ids, np.int64)
        is_unknown = ids.view(np.uint64) >= self.loaded.vocab_size  # negative ids too
        if is_unknown.any():
            rule = f"the model knows ids 0..{self.loaded.vocab_size - 1}"
            raise Refused(400, f"token id {ids[is_unknown][0]} is to be scored", rule=rule)
        self._waiting.append(ScoredText(ids, request, answer))

    def run(self) -> None:
        while self._waiting:
            texts = [self._waiting.popleft() for _ in range(min(self.slots, len(self._waiting)))]
            for text, logprobs in zip(texts, self._read(texts), strict=True):
                found = logprobs[text.request.start - 1 :]
                if not np.isfinite(found).all():
                    raise FloatingPointError("the model gives logprobs that are not finite")
                text.answer.set_result(ScoreResponse(logprobs=found.tolist()))

    def _read(self, texts: list[ScoredText]) -> list[np.ndarray[Any, np.dtype[np.float32]]]:
        """Return float32 [T - 1] per text."""
        found = [np.zeros(len(text.ids) - 1, np.float32) for text in texts]
        for parts in cut_calls([(slot, text.ids[:-1], 0) for slot, text in enumerate(texts)]):
            logits, row, of_parts = self._logits(parts), 0, list[Tensor]()
            for slot, _, start, end in parts:
                of_part, row = logits[row : row + end - start], row + end - start
                targets = to_device(texts[slot].ids[start + 1 : end + 1], logits.device)
                logprobs = torch.log_softmax(of_part.float() / texts[slot].request.temperature, dim=-1)
                of_parts.append(logprobs.gather(1, targets[:, None])[:, 0])
            for (slot, _, start, end), logprobs_T in zip(parts, to_host(*of_parts), strict=True):
                found[slot][start:end] = logprobs_T
        return found

    def _logits(self, parts: list[Part]) -> Tensor:
        """Return logits [rows, V] of all tokens, then padding rows."""
        stretches: list[Stretch] = [*self._read_stretches(parts, 0)]
        positions = np.concatenate([np.arange(start, end) for _, _, start, end in parts])
        ids = np.concatenate([all_ids[start:end] for _, all_ids, start, end in parts])
        return self._call(stretches, written(NO_INTS, parts, ()), positions, ids, None)


def score_route(engine: Engine) -> Callable[[ScoreRequest], Coroutine[Any, Any, ScoreResponse]]:

    async def score(body: ScoreRequest) -> ScoreResponse:
        return await asyncio.wrap_future(engine.score(body))

    return score
