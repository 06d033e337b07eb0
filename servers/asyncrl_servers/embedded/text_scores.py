"""Scores of given texts, by the model of an embedded engine."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from asyncrl.base.http import Refused
from asyncrl.messages.engine_api import ScoreRequest, ScoreResponse
from asyncrl.models.devices import to_device
from asyncrl_servers.embedded.decoder import EmbeddedSpec, LoadedModel, draw, to_host
from asyncrl_servers.embedded.kv_attention import Ints
from asyncrl_servers.embedded.loaded_weights import Weights
from asyncrl_servers.embedded.runner import Runner, cut_calls
from asyncrl_servers.engine_routes import no_adapter, uniform_draws

VALUES = (
    "logprobs",
    "top_ids",
    "top_logprobs",
    "target_logprobs",
    "draw_ids",
    "draw_logprobs",
)
"""Fields of a ScoreResponse with values of each scored token."""


class ScoredText(NamedTuple):
    request: ScoreRequest
    wanted_ids: Ints
    """int64 [T, 1 + K], ids whose logprobs are reported: the text's own in column 0, then
    targets (-1: none).
    """
    weights: Weights
    answer: Future[ScoreResponse]


class Scorer(Runner):
    """Scores up to score_slots texts at once, in the engine loop."""

    def __init__(self, loaded: LoadedModel, spec: EmbeddedSpec, is_exact: bool) -> None:
        super().__init__(loaded, spec.score_slots, spec.max_length, is_exact=is_exact)
        self._waiting = list[ScoredText]()

    def wanted_ids(self, request: ScoreRequest) -> Ints:
        """Check a request, in any thread, and return its ScoredText.wanted_ids. Raises
        Refused (400).
        """
        ids, num_known = request.token_ids, self.loaded.vocab_size
        num_scored = max(0, len(ids) - request.start)
        targets: Sequence[Sequence[int]] = [[]] * num_scored
        if request.targets is not None:
            targets = request.targets
        if len(ids) > self.max_length:
            raise Refused(
                400,
                f"a text of {len(ids)} tokens cannot be scored",
                rule=f"the engine reads {self.max_length} tokens at most",
            )
        if len(targets) != num_scored or len({*map(len, targets)}) > 1:
            raise Refused(
                400,
                f"targets are of {len(targets)} tokens, and {num_scored} are scored",
                rule="each scored token has the same number of targets",
            )
        unknown = [one for one in ids if not 0 <= one < num_known]
        every_target = chain.from_iterable(targets)
        unknown += [one for one in every_target if not -1 <= one < num_known]
        if unknown or request.top_k > num_known:
            what = f"token id {unknown[0]}" if unknown else f"top_k={request.top_k}"
            rule = f"the model knows ids 0..{num_known - 1}"
            raise Refused(400, f"{what} cannot be scored", rule=rule)
        num_targets = len(targets[0]) if targets else 0
        wanted_TK = np.full((len(ids), 1 + num_targets), -1, np.int64)
        wanted_TK[:, 0] = ids
        wanted_TK[request.start :, 1:] = targets
        return wanted_TK

    def add(self, text: ScoredText) -> None:
        """Queue a text for the next run()."""
        self._waiting.append(text)

    def forget(self, weights: Weights) -> None:
        """Refuse the texts that wait for a dropped adapter."""
        dropped = [one for one in self._waiting if one.weights is weights]
        self._waiting = [one for one in self._waiting if one.weights is not weights]
        for text in dropped:
            text.answer.set_exception(no_adapter(weights.name, (), 404))

    def run(self) -> None:
        """Score the texts that wait and whose weights serve."""
        # In the loop's thread, between decode steps: no other thread may use the model.
        ready = [one for one in self._waiting if one.weights.can_serve]
        self._waiting = [one for one in self._waiting if not one.weights.can_serve]
        for start in range(0, len(ready), self.slots):
            texts = ready[start : start + self.slots]
            for text, values in zip(texts, self._read(texts), strict=True):
                if np.isfinite(values["logprobs"]).all():
                    version = text.weights.version
                    text.answer.set_result(ScoreResponse(version=version, **values))
                    continue
                # The next texts multiply masked values by 0.
                self.cache.clear(range(self.slots))
                text.answer.set_exception(text.weights.non_finite())

    def _read(self, texts: Sequence[ScoredText]) -> list[dict[str, list[Any]]]:
        """Return the VALUES of each text."""
        read = [{name: list[Any]() for name in VALUES} for _ in texts]
        # The last token predicts nothing that was asked for.
        jobs = [(slot, text.wanted_ids[:-1, 0], 0) for slot, text in enumerate(texts)]
        adapters = [
            text.weights.adapters[""] for text in texts if text.weights.adapters
        ]
        # Texts of one token have no part.
        for parts in filter(None, cut_calls(jobs, self._query_chunk)):
            stretches = self.read_stretches(parts)
            logits_RV = self._call(stretches, parts, None, adapters=adapters)
            end_row = 0
            of_parts = list[Tensor]()
            for slot, _, start, end in parts:
                end_row += end - start
                first = max(start, texts[slot].request.start - 1)
                num = max(0, end - first)
                # A row predicts the token behind its own.
                place_T = np.arange(end + 1 - num, end + 1)
                logits_TV = logits_RV[end_row - num : end_row]
                of_parts += _values(texts[slot], place_T, logits_TV)
            on_host = iter(to_host(*of_parts))
            for slot, *_ in parts:
                for name in VALUES:
                    read[slot][name] += next(on_host).ravel().tolist()
        return read


def _values(text: ScoredText, place_T: Ints, logits_TV: Tensor) -> list[Tensor]:
    """Return the VALUES of the tokens at these places, which the logits predict."""
    request, device = text.request, logits_TV.device
    logits_TV = logits_TV.float() / request.temperature
    logprobs_TV = torch.log_softmax(logits_TV, dim=-1)
    wanted_TK = to_device(text.wanted_ids[place_T], device)
    found_TK = logprobs_TV.gather(1, wanted_TK.clamp(min=0))
    found_TK = found_TK.masked_fill(wanted_TK < 0, 0.0)
    top = logprobs_TV.topk(request.top_k)
    drawn_TD = wanted_TK[:, :0]
    if request.draws:
        # Places are below 2**32, so all draws of a seed use different numbers.
        number_TD = place_T[:, None] + (np.arange(request.draws) << 32)
        uniform_TD = uniform_draws(np.array([request.seed], np.uint64), number_TD)
        drawn_TD, _ = draw(logits_TV, to_device(uniform_TD, device))
    return [
        found_TK[:, 0],
        top.indices,
        top.values,
        found_TK[:, 1:],
        drawn_TD,
        logprobs_TV.gather(1, drawn_TD),
    ]
