"""Which versions an eval engine evaluates, and the cost of a slow or broken one."""

from __future__ import annotations

import asyncio
import errno
import math
import shutil
import tempfile
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
from fake_engine import FakeEngineServer
from fakes import FakeEngine, FakeScorer
from hypothesis import example, given
from hypothesis import strategies as st
from rollout_cases import make_held_out, one_token, single_turn, virtual

from asyncrl.base.errors import ComponentError, NodeLost, RolloutFailure
from asyncrl.base.failures import FailureKind
from asyncrl.base.http import Caller
from asyncrl.engines.engine import EngineServer
from asyncrl.engines.pool import EnginePool
from asyncrl.job.build import publish_to
from asyncrl.messages.engine_api import FileRequest
from asyncrl.messages.records import Prompt
from asyncrl.messages.trainer_api import ExportResponse
from asyncrl.observe.metrics import gauge_of
from asyncrl.observe.run_numbers import evaluation_text
from asyncrl.rollouts.evaluation import EvalResult, Evaluation, HeldOut
from asyncrl.rollouts.recent_failures import WINDOW
from asyncrl.sync.push import NodeFiles

KEPT_EXPORTS = 2
"""Export like the trainer: an older file is gone."""
PROMPTS = tuple(
    Prompt(f"0/{number}", ({"role": "user", "content": f"p{number}"},))
    for number in range(6)
)


class World:
    """Publish a version a second; run the real evaluation over a separate fake engine."""

    def __init__(
        self,
        *,
        every: int | dict[str, int] = 3,
        last: int = 10,
        at_start: bool = True,
        timeout_s: float = 60.0,
        **engine: Any,
    ) -> None:
        self.last, self.folder = last, Path(tempfile.mkdtemp())
        weakref.finalize(self, shutil.rmtree, self.folder)
        self.eval_engine = FakeEngineServer(
            "engine-eval", **{"prepare_s": 0.1, "decode_s": 0.01, **engine}
        )
        self.results, self.troubles = list[EvalResult](), list[str]()
        target = EngineServer(self.eval_engine)
        generator = single_turn(EnginePool([target], slots=4), max_tokens=10)
        schedule: Any = {"last": last, "at_start": at_start, "timeout_s": timeout_s}
        self.evaluation = Evaluation(
            [
                make_held_out(generator, PROMPTS, name=name, every=each, **schedule)
                for name, each in (
                    {"": every} if isinstance(every, int) else every
                ).items()
            ],
            target,
            self.folder,
            on_result=self.results.append,
            on_trouble=self.troubles.append,
        )

    def export(self, version: int) -> ExportResponse:
        path = self.folder / f"v{version}"
        path.touch()
        (self.folder / f"v{version - KEPT_EXPORTS}").unlink(missing_ok=True)
        values = {"version": version, "path": str(path), "digest": f"w{version}"}
        return ExportResponse(**values, num_tensors=1, num_bytes=1)

    def publish(self, version: int) -> None:
        self.evaluation.on_published_nowait(self.export(version))

    async def live(
        self, *, before_step: Callable[[int], None] = lambda _: None
    ) -> None:
        """A whole run; nothing of it waits for the evaluation but its end."""
        async with asyncio.TaskGroup() as tasks:
            running = tasks.create_task(self.evaluation.run(), name="evaluation")
            for version in range(1, self.last + 1):
                before_step(version)
                await asyncio.sleep(1.0)
                self.publish(version)
            await self.evaluation.wait_last()
            running.cancel()

    @property
    def kept(self) -> list[int]:
        """Versions whose files are kept for the eval engine."""
        return sorted(
            int(path.stem.removeprefix("eval-")) for path in self.folder.glob("eval-*")
        )

    @property
    def versions(self) -> list[int]:
        return [result.version for result in self.results]


@virtual
async def test_weights_that_cannot_be_kept_end_only_the_evaluation() -> None:
    world = World(every=2, last=5)
    (world.folder / "eval-4.safetensors").touch()
    await world.live()
    assert world.versions == [0, 2]
    (trouble,) = world.troubles
    assert trouble.startswith(
        "the run continues without evaluation: evaluation: cannot"
    )
    assert "eval-4.safetensors: File exists" in trouble


@virtual
async def test_several_evaluations_follow_their_schedules() -> None:
    world = World(every={"often": 2, "seldom": 5}, last=7)
    post, loaded = world.eval_engine.post, list[int]()

    async def noting(path: str, body: Any, *args: Any, **keywords: Any) -> Any:
        loaded.extend([body.version] if path == "/prepare" else [])
        return await post(path, body, *args, **keywords)

    world.eval_engine.post = noting  # type: ignore[method-assign]
    await world.live()
    found = [(result.version, result.name) for result in world.results]
    both = [(version, name) for version in (0, 7) for name in ("often", "seldom")]
    assert sorted(found) == sorted(
        [*both, (2, "often"), (4, "often"), (6, "often"), (5, "seldom")]
    )
    assert (found[:2], found[-2:]) == (both[:2], both[2:])
    assert loaded == [2, 4, 5, 6, 7], "once a version"
    assert (world.kept, world.troubles) == ([], [])


@given(
    published=st.lists(st.integers(1, 12), min_size=1, max_size=20),
    every=st.integers(1, 7),
    cut=st.integers(0, 20),
    at_start=st.booleans(),
)
@example(published=[5, 5, 1, 1], every=3, cut=2, at_start=True)
def test_schedule_is_the_same_after_a_resume(
    published: list[int], every: int, cut: int, at_start: bool
) -> None:
    versions = [0, *accumulate(published)]
    last = versions[-1]
    multiples = range(0 if at_start else every, last + 1, every)
    expected = {min(v for v in versions if v >= multiple) for multiple in multiples} | {
        last
    }
    settings: Any = {"every": every, "last": last, "at_start": at_start}
    schedule = make_held_out(None, (), **settings)
    due = [version for version in versions[:cut] if schedule.is_due_nowait(version)]
    resumed = make_held_out(None, (), evaluated=max(due, default=None), **settings)
    due += [version for version in versions[cut:] if resumed.is_due_nowait(version)]
    assert due == sorted(expected)


@given(
    decode_s=st.floats(0.001, 0.5),
    prepare_s=st.floats(0.0, 6.0),
    every=st.integers(1, 5),
    timeout_s=st.floats(0.5, 30.0),
    death=st.integers(1, 40),
)
@virtual
async def test_run_ends_without_files_for_any_engine_failure(
    decode_s: float, prepare_s: float, every: int, timeout_s: float, death: int
) -> None:
    world = World(
        every=every,
        last=12,
        decode_s=decode_s,
        prepare_s=prepare_s,
        timeout_s=timeout_s,
    )
    await world.live(
        before_step=lambda version: (
            world.eval_engine.die() if version == death else None
        )
    )
    assert world.kept == []
    assert world.versions == sorted(set(world.versions))
    stats = world.evaluation.stats
    assert stats.finished == len(world.results)
    if stats.state != "off":
        due = {0, 12, *range(every, 13, every)}
        assert stats.finished + stats.skipped + stats.abandoned == len(due)


@pytest.mark.parametrize("late", ["decode_s", "prepare_s"])
@virtual
async def test_late_evaluation_is_abandoned(late: str) -> None:
    world = World(every=1, last=2, timeout_s=5.0, **{late: 1000.0})
    await world.live()
    assert asyncio.get_running_loop().time() < 60.0
    assert "eval.timeout_s=5.0" in world.troubles[0]


# ---- one evaluation


def held_out_of(
    engine: Any, scorer: Any = None, prompts: Any = None, **values: Any
) -> HeldOut:
    generator = single_turn(
        engine, scorer, run_seed=5, max_tokens=4, max_prompt_tokens=8, reseeds=False
    )
    return make_held_out(generator, prompts or PROMPTS[:4], slots=3, **values)


@virtual
async def test_samples_that_fail_are_counted_and_cost_nothing_else() -> None:
    def reward(item: Prompt, _: str) -> float | str:
        if item.prompt_id == "0/3":
            raise KeyError("answer")
        return "no" if item.prompt_id == "0/1" else 1.0

    engine = FakeEngine(
        latency_s=lambda request: 99.0 if "0/0/s1" in request.request_id else 1.0
    )
    prompts = [
        *PROMPTS[:2],
        Prompt("0/2", ({"role": "user", "content": "far too long"},)),
        *PROMPTS[3:5],
    ]
    sampled = list[None]()
    result = await held_out_of(
        engine, FakeScorer(reward), prompts, rollout_timeout_s=50.0
    ).evaluate(0, lambda: sampled.append(None))
    assert len(sampled) == 10, "failed samples count"
    assert [prompt_id for prompt_id, _ in result.samples] == ["0/0", "0/4", "0/4"]
    assert result.num_failed == 7
    assert (
        "eval-v0/0/3/s1 (prompt 0/3) raised KeyError: 'answer'" in result.last_failure
    )
    metrics = result.metrics()
    assert (metrics["eval/failed"], metrics["eval/reward_mean"]) == (7, 1.0)


@virtual
async def test_failures_of_the_infrastructure_are_retried_and_have_their_names() -> (
    None
):
    tries = Counter[str]()

    def reward(item: Prompt, _: str) -> float:
        tries[item.prompt_id] += 1
        if item.prompt_id == "0/0" and tries["0/0"] == 1:
            raise OSError(errno.ENOSPC, "No space left on device")
        if item.prompt_id == "0/1":
            raise ConnectionResetError("reset by the peer")
        if item.prompt_id == "0/2":
            raise RolloutFailure("too many calls", kind=FailureKind.LIMIT)
        return 1.0

    engine = FakeEngine()
    held_out = held_out_of(engine, FakeScorer(reward), PROMPTS[:4], retries=2)
    metrics = (await held_out.evaluate(0)).metrics()
    assert tries == {"0/0": 3, "0/1": 6, "0/2": 2, "0/3": 2}
    counted = {
        name: num
        for name, num in metrics.items()
        if name.startswith(("eval/fail", "eval/retried"))
    }
    assert counted == {
        "eval/failed": 4,
        "eval/failure/endpoint_lost": 2,
        "eval/failure/limit": 2,
        "eval/retried": 5,
    }
    assert all(gauge_of(name) for name in counted)
    assert metrics["eval/reward_mean"] == 1.0, "none of them is a reward of 0"
    assert "endpoint_lost 2, limit 2" in evaluation_text(metrics)
    seeds = defaultdict[str, set[int]](set)
    for request in engine.requests:
        sample, _, _ = request.request_id.partition("/t0/")
        seeds[sample].add(request.seed)
    assert len(seeds) == 8
    assert all(len(each) == 1 for each in seeds.values()), "a retry has equal tokens"


@virtual
async def test_evaluation_whose_attempts_all_fail_ends_no_run() -> None:
    def reward(item: Prompt, _: str) -> float:
        raise OSError(errno.ENOSPC, "No space left on device")

    prompts = [Prompt(f"0/{index}", PROMPTS[0].messages) for index in range(WINDOW)]
    held_out = held_out_of(FakeEngine(), FakeScorer(reward), prompts)
    metrics = (await held_out.evaluate(0)).metrics()
    assert metrics["eval/failure/disk_full"] == metrics["eval/failed"] == 2 * WINDOW
    assert "eval/reward_mean" not in metrics


def test_the_standard_error_counts_prompts_and_not_samples() -> None:
    rewards = {"a": [0.0, 1.0], "b": [1.0, 1.0], "c": [0.0]}
    samples = [
        (name, (replace(one_token(0, reward=reward), is_truncated=reward > 0),))
        for name, found in rewards.items()
        for reward in found
    ]
    failures = {FailureKind.LIMIT: 1}
    result = EvalResult(4, samples, failures, seconds=2.5, num_skipped=3)
    metrics = result.metrics()
    assert metrics["eval/reward_mean"] == pytest.approx(0.5), "means 0.5, 1, 0"
    assert metrics["eval/standard_error"] == pytest.approx(0.5 / math.sqrt(3))
    assert metrics["eval/truncated_fraction"] == pytest.approx(0.6)
    counts = [
        metrics[f"eval/{name}"]
        for name in ("version", "length_mean", "failed", "seconds", "skipped")
    ]
    assert counts == [4, 1, 1, 2.5, 3]
    assert "eval/standard_error" not in EvalResult(0, samples[:2]).metrics()


@pytest.mark.parametrize(
    ("error", "lost_version", "evaluated"),
    [
        (NodeLost("n1", "the node is gone"), 3, [0]),
        (ComponentError("n1", "is silent"), 3, [0, 4, 6, 7]),
        (ComponentError("n1", "is silent"), 7, [0, 3, 6]),
    ],
)
@virtual
async def test_weights_that_do_not_arrive_cost_only_evaluations(
    error: ComponentError, lost_version: int, evaluated: list[int]
) -> None:
    world = World(every=3, last=7)

    async def fetch(_node: int, request: FileRequest, _timeout_s: float) -> str:
        name = request.url.rpartition("/")[2]
        if name == f"v{lost_version}":
            raise error
        return str(world.folder / name)

    trainer = Caller("trainer-0", "http://10.0.0.1:80", "secret")
    files = NodeFiles(fetch, trainer, {"engine-eval": 1}, trainer_node=0, timeout_s=5.0)
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(world.evaluation.run(), name="evaluation")
        for version in range(1, world.last + 1):
            await asyncio.sleep(1.0)
            manifest = world.export(version)
            await publish_to(world.evaluation, files, manifest)
        await world.evaluation.wait_last()
        running.cancel()
    assert world.versions == evaluated
    assert bool(world.troubles) == (7 not in evaluated)
