"""`python -m asyncrl_servers.scoring.teacher_server --spec FILE --fd N`: an embedded
engine that returns the logprobs of given tokens.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from functools import partial
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from pydantic import Field
from torch import Tensor

from asyncrl.base.http import Refused
from asyncrl.extensions.scoring.scoring_api import ScoreRequest, ScoreResponse
from asyncrl.models.devices import to_device
from asyncrl_servers.embedded.__main__ import main
from asyncrl_servers.embedded.decoder import EmbeddedSpec, LoadedModel, to_host
from asyncrl_servers.embedded.embedded_engine import Engine
from asyncrl_servers.embedded.kv_attention import Ints
from asyncrl_servers.embedded.loaded_weights import Weights
from asyncrl_servers.embedded.runner import TextReader, cut_calls
from asyncrl_servers.engine_routes import Act


class TeacherSpec(EmbeddedSpec):
    score_slots: int = Field(ge=1)
    """Texts that POST /score reads at once."""


class ScoredText(NamedTuple):
    ids: Ints
    request: ScoreRequest
    answer: Future[ScoreResponse]
    weights: Weights


class Scorer(TextReader):
    """Logprobs of given tokens, for distillation: up to score_slots texts at once, in
    the engine loop.
    """

    def __init__(self, loaded: LoadedModel, spec: TeacherSpec, is_exact: bool) -> None:
        super().__init__(loaded, spec.score_slots, spec.max_length, is_exact=is_exact)
        self._waiting = list[ScoredText]()

    def add(
        self, request: ScoreRequest, weights: Weights, answer: Future[ScoreResponse]
    ) -> None:
        """Queue a text for the next run(). Raises Refused (400)."""
        ids = np.asarray(request.token_ids, np.int64)
        is_unknown = ids.view(np.uint64) >= self.loaded.vocab_size  # negative ids too
        if is_unknown.any():
            rule = f"the model knows ids 0..{self.loaded.vocab_size - 1}"
            raise Refused(
                400, f"token id {ids[is_unknown][0]} cannot be scored", rule=rule
            )
        self._waiting.append(ScoredText(ids, request, answer, weights))

    def run(self) -> None:
        # In the loop's thread, between decode steps: no other thread may use the model.
        ready = [one for one in self._waiting if one.weights.can_serve]
        self._waiting = [one for one in self._waiting if not one.weights.can_serve]
        for start in range(0, len(ready), self.slots):
            texts = ready[start : start + self.slots]
            for text, read in zip(texts, self._read(texts), strict=True):
                logprobs, top_ids, top_logprobs = (
                    array[text.request.start - 1 :] for array in read
                )
                if not np.isfinite(logprobs).all():
                    # The next texts multiply masked values by 0.
                    self.cache.clear(range(self.slots))
                    text.answer.set_exception(text.weights.non_finite())
                    continue
                text.answer.set_result(
                    ScoreResponse(
                        version=text.weights.version,
                        logprobs=logprobs.tolist(),
                        top_ids=top_ids.ravel().tolist(),
                        top_logprobs=top_logprobs.ravel().tolist(),
                    )
                )

    def _read(self, texts: list[ScoredText]) -> list[list[npt.NDArray[np.generic]]]:
        """Return of each text the logprobs, float32 [T - 1], and the likeliest ids,
        int64 [T - 1, K], with their logprobs, float32 [T - 1, K].
        """
        read: list[list[list[npt.NDArray[np.generic]]]] = [[] for _ in texts]
        # The last token predicts nothing that was asked for.
        jobs = [(slot, text.ids[:-1], 0) for slot, text in enumerate(texts)]
        adapters = [
            text.weights.adapters[""] for text in texts if text.weights.adapters
        ]
        for parts in cut_calls(jobs, self._query_chunk):
            stretches = self.read_stretches(parts)
            logits = self._call(stretches, parts, None, adapters=adapters)
            row = 0
            of_parts = list[Tensor]()
            for slot, _, start, end in parts:
                ids, request, *_ = texts[slot]
                of_part = logits[row : row + end - start].float() / request.temperature
                row += end - start
                targets = to_device(ids[start + 1 : end + 1], logits.device)
                logprob_TV = torch.log_softmax(of_part, dim=-1)
                top = logprob_TV.topk(request.top_k)
                of_parts.append(logprob_TV.gather(1, targets[:, None])[:, 0])
                of_parts += [top.indices, top.values]
            on_host = iter(to_host(*of_parts))
            for slot, *_ in parts:
                read[slot].append([next(on_host) for _ in range(3)])
        return [[*map(np.concatenate, zip(*pieces, strict=True))] for pieces in read]


def routes_of(engine: Engine) -> list[Act]:
    scorer = engine.reader
    assert isinstance(scorer, Scorer)

    def add(body: ScoreRequest, answer: Future[ScoreResponse]) -> None:
        scorer.add(body, engine.weights_of(body.adapter, for_request=True), answer)

    async def score(body: ScoreRequest) -> ScoreResponse:
        return await asyncio.wrap_future(engine.ask(partial(add, body)))

    return [score]


if __name__ == "__main__":
    main(TeacherSpec, Scorer, routes_of)
