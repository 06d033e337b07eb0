"""Interrupted and shared sequences of the embedded engine have the bits of fresh
requests.
"""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from engine_cases import SMALL, iterate_until
from engine_in_process import make_qwen3, make_request, make_spec, stage_file
from engine_replies import Reply, ask
from hypothesis import given, settings
from hypothesis import strategies as st
from logit_oracle import ADJUSTED

from asyncrl.messages.engine_api import CommitRequest, PrepareRequest, WakeRequest
from asyncrl.messages.sampling import SamplingRequest
from asyncrl.messages.tokens import SegmentPart
from asyncrl_servers.embedded import scheduler
from asyncrl_servers.embedded.embedded_engine import Engine, build_engine

SLOTS = 3


class Weights:
    """Two sets, one after the other: version v is set v % 2. `fresh` are engines of each
    that share nothing.
    """

    def __init__(self, scratch: Path) -> None:
        self.folders = [
            make_qwen3(scratch / f"model-{seed}", seed=seed, **SMALL) for seed in (0, 1)
        ]
        self._staged = [
            stage_file(folder, version, scratch)
            for version, folder in enumerate(self.folders)
        ]
        self._fresh = [
            build_engine(make_spec(folder, slots=1)) for folder in self.folders
        ]

    def engine(self, **how: Any) -> Engine:
        return build_engine(make_spec(self.folders[0], slots=SLOTS, **how))

    def staged(self, version: int) -> PrepareRequest:
        return self._staged[version % 2].model_copy(update={"version": version})

    def check(self, request: SamplingRequest, answer: SegmentPart) -> None:
        """Compare each version's tokens with a fresh request under its weights."""
        for span in answer.sampled.spans:
            prompt = [*request.prompt_ids, *answer.token_ids[: span.start]]
            rest = replace(
                request,
                prompt_ids=prompt,
                max_tokens=span.end - span.start,
                num_resumed=span.start,
            )
            engine = self._fresh[span.version % 2]
            (fresh,) = ask(engine, [rest])
            iterate_until(engine, fresh)
            got = (
                answer.token_ids[span.start : span.end],
                answer.logprobs[span.start : span.end],
            )
            assert got == (fresh.result().token_ids, fresh.result().logprobs)


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Weights:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scheduler, "MIN_COPIED", 10**9)
        return Weights(tmp_path_factory.mktemp("resumed"))


def commit(engine: Engine, weights: Weights, interrupt: str = "abort") -> int:
    version = engine.weights.version + 1
    digest = engine.weights.prepare(weights.staged(version)).digest
    request = {"version": version, "digest": digest, "interrupt": interrupt}
    committed = engine.commit(CommitRequest.model_validate(request))
    iterate_until(engine, committed)
    return committed.result().num_interrupted


def sleep_and_wake(engine: Engine, weights: Weights) -> None:
    """The served weights serve again: weights that slept are pushed once more."""
    iterate_until(
        engine, engine.sleep(), engine.wake(WakeRequest(parts=["kv", "weights"]))
    )
    version = engine.weights.version
    digest = engine.weights.prepare(weights.staged(version)).digest
    iterate_until(engine, engine.commit(CommitRequest(version=version, digest=digest)))


def test_turn_reads_only_new_tokens_until_weights_change(
    weights: Weights, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = weights.engine(num_kept=SLOTS)
    text, num_read = list(range(40)), list[int]()
    step = engine.runner.step

    def counted(jobs: Any, *how: Any, **named: Any) -> Any:
        num_read[-1] += sum(len(ids) - first for _, ids, first in jobs)
        return step(jobs, *how, **named)

    monkeypatch.setattr(engine.runner, "step", counted)

    def turn() -> None:
        num_read.append(0)
        text.extend((7, 8, 9))
        request = make_request(prompt_ids=tuple(text), max_tokens=10)
        (reply,) = ask(engine, [request])
        iterate_until(engine, reply)
        weights.check(request, reply.result())
        text.extend(reply.result().token_ids)

    turn()
    turn()
    commit(engine, weights)
    turn()
    turn()
    sleep_and_wake(engine, weights)
    turn()
    assert num_read == [43, 4, 69, 4, 95], (
        "the newest token of a turn is not in the cache"
    )


ASKS = st.tuples(
    st.integers(0, 9), st.integers(0, 80), st.integers(0, 4), st.integers(1, 30)
)
EVENTS = st.one_of(
    st.tuples(st.just("ask"), st.lists(ASKS, min_size=1, max_size=4)),
    st.tuples(st.just("iterations"), st.integers(1, 30)),
    st.tuples(st.just("commit"), st.sampled_from(["abort", "abort", "keep", "wait"])),
    st.tuples(st.sampled_from(["resume", "abort"]), st.integers(0, 9)),
    st.tuples(st.just("sleep"), st.none()),
)


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(st.lists(EVENTS, max_size=14), st.booleans())
def test_random_pasts_change_no_bit(
    weights: Weights, events: list[tuple[str, Any]], keeps: bool
) -> None:
    rng = random.Random(3)
    texts = [[rng.randrange(50) for _ in range(80)] for _ in range(2)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scheduler, "MIN_COPIED", 4)
        engine = weights.engine(num_kept=SLOTS * keeps)
        asked = list[tuple[SamplingRequest, Reply]]()
        for what, how in events:
            if what == "ask":
                over = [
                    (request, reply.result())
                    for request, reply in asked
                    if reply.done()
                ]
                texts += [
                    [*request.prompt_ids, *answer.token_ids] for request, answer in over
                ]
                requests = []
                for which, cut, num_new, max_tokens in how:
                    prompt = [
                        *texts[-which % len(texts)][: max(1, cut)],
                        *[num_new] * num_new,
                    ]
                    seed = len(asked) + len(requests)
                    given = {"max_tokens": max_tokens, "seed": seed}
                    given |= [{}, *ADJUSTED][seed % 4]
                    requests.append(make_request("r", tuple(prompt), **given))
                asked += zip(requests, ask(engine, requests, ends=False), strict=True)
            elif what == "iterations":
                for _ in range(how):
                    engine.iterate()
            elif what == "commit":
                commit(engine, weights, how)
            elif what == "sleep":
                sleep_and_wake(engine, weights)
            elif asked:
                reply = asked[-how % len(asked)][1]
                reply.resume() if what == "resume" else reply.abort()
            assert engine.health().num_running <= SLOTS
        engine.iterate()
        for _, reply in asked:
            reply.resume()
        iterate_until(engine, *(reply for _, reply in asked))
        for request, reply in asked:
            weights.check(request, reply.result())
