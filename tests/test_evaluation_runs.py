"""Which versions are evaluated, and that neither publisher nor trainer ever waits for it."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
import weakref
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from rollout_cases import single_turn, virtual

from asyncrl.engines.own_server import EngineServer
from asyncrl.engines.pool import EnginePool
from asyncrl.errors import ConnectionShortage
from asyncrl.messages.records import Batch, Prompt
from asyncrl.messages.trainer_calls import ExportResponse
from asyncrl.rollouts.evaluation import Evaluation, Schedule
from asyncrl.rollouts.evaluator import EvalResult, Evaluator
from asyncrl.sync.publisher import Publisher
from asyncrl.testing.fake_engine import FakeEngineServer
from asyncrl.testing.fakes import FakeTrainer
from asyncrl.testing.virtual_time import run_virtual

KEPT_EXPORTS = 2
"""As the trainer worker does: an older file is gone."""
PROMPTS = tuple(Prompt(f"0/{number}", ({"role": "user", "content": f"p{number}"},)) for number in range(6))


class FileTrainer(FakeTrainer):
    """Exports into files, of which the newest KEPT_EXPORTS stay."""

    def __init__(self, folder: Path) -> None:
        super().__init__(train_s=1.0)
        self.folder = folder

    async def export(self) -> ExportResponse:
        manifest = await super().export()
        path = self.folder / f"v{manifest.version}.safetensors"
        path.write_text(str(manifest.version))
        for old in self.exported[:-KEPT_EXPORTS]:
            (self.folder / f"v{old}.safetensors").unlink(missing_ok=True)
        return manifest.model_copy(update={"path": str(path)})


class House:
    """A trainer that steps once a second, a publisher, one engine for rollouts and one for evaluation."""

    def __init__(
        self,
        *,
        every: int = 3,
        last: int = 10,
        at_start: bool = True,
        prepare_s: float = 0.1,
        decode_s: float = 0.01,
        timeout_s: float = 60.0,
    ) -> None:
        self.last = last
        self.folder = Path(tempfile.mkdtemp())
        weakref.finalize(self, shutil.rmtree, self.folder)
        self.trainer = FileTrainer(self.folder)
        self.rollout_engine = FakeEngineServer("engine-0", prepare_s=0.1)
        self.eval_engine = FakeEngineServer("engine-eval", prepare_s=prepare_s, decode_s=decode_s)
        self.results: list[EvalResult] = []
        self.troubles: list[str] = []
        self.served_at: list[float] = []
        self.trained_at: list[float] = []
        target = EngineServer(self.eval_engine)
        generator = single_turn(EnginePool([target], slots=4), max_tokens=10)
        evaluator = Evaluator(generator, PROMPTS, samples=2, slots=4)
        self.evaluation = Evaluation(
            evaluator,
            target,
            Schedule(every=every, last=last, at_start=at_start),
            self.folder,
            timeout_s=timeout_s,
            on_result=self.results.append,
            on_trouble=self.troubles.append,
        )
        self.publisher = Publisher(
            self.trainer,
            [EngineServer(self.rollout_engine)],
            interrupt="abort",
            timeout_s=60.0,
            on_served=self._on_served,
            on_published=self.evaluation.published_nowait,
        )

    def _on_served(self, version: int) -> None:
        self.served_at.append(asyncio.get_running_loop().time())

    async def live(self, *, before_step: Callable[[int], None] = lambda _: None) -> None:
        """A whole run: every step, its publish, and the last evaluation."""
        async with asyncio.TaskGroup() as tasks:
            services = [tasks.create_task(self.publisher.run(), name="publisher")]
            services.append(tasks.create_task(self.evaluation.run(), name="evaluation"))
            for version in range(1, self.last + 1):
                before_step(version)
                await self.trainer.train(Batch(version - 1, (), 0))
                self.trained_at.append(asyncio.get_running_loop().time())
                await self.publisher.wait_exported_or_busy(version)
            await self.evaluation.wait_last()
            for service in services:
                service.cancel()

    @property
    def kept(self) -> list[int]:
        """Versions whose files are kept for the eval engine."""
        return sorted(int(path.stem.removeprefix("eval-")) for path in self.folder.glob("eval-*"))

    @property
    def versions(self) -> list[int]:
        return [result.version for result in self.results]


def undisturbed(house: House) -> bool:
    """Whether the trainer's and the rollout engines' times are those of a run in which evaluation cannot be
    felt.
    """
    steps = [float(number) for number in range(1, house.last + 1)]
    return house.trained_at == pytest.approx(steps) and house.served_at[: house.last - 1] == pytest.approx(
        [t + 0.1 for t in steps[:-1]]
    )


@virtual
async def test_the_initial_weights_each_multiple_and_the_last_version_are_evaluated_at_one_version_each() -> (
    None
):
    house = House()
    await house.live()
    assert house.versions == [0, 3, 6, 9, 10]
    assert undisturbed(house)
    assert [request.request_id.split("/")[0] for request in house.eval_engine.requests[::12]] == [
        f"eval-v{version}" for version in house.versions
    ]
    assert all(len(result.samples) == 12 for result in house.results)
    assert house.evaluation.stats().finished == 5
    assert (house.kept, house.troubles) == ([], [])


@virtual
async def test_an_evaluation_that_takes_long_skips_what_is_due_meanwhile_and_never_the_last() -> None:
    house = House(decode_s=0.15)  # three turns of ten tokens: 4.5 s
    await house.live()
    assert house.versions == [0, 6, 10]
    assert [result.num_skipped for result in house.results] == [1, 2, 2], "3 beside 0, 9 beside 6"
    assert undisturbed(house)
    assert house.kept == []


@virtual
async def test_weights_that_load_slowly_delay_nobody_and_their_file_is_kept_until_they_are_loaded() -> None:
    house = House(at_start=False, prepare_s=5.0)
    kept_at_step: list[list[int]] = []
    await house.live(before_step=lambda _: kept_at_step.append(house.kept))
    assert undisturbed(house)
    assert (house.versions[0], house.versions[-1]) == (3, 10)
    assert kept_at_step[7] == [3], "the trainer has exported 4, 5, 6 and 7 since"
    assert house.kept == []


@virtual
async def test_an_eval_engine_that_dies_is_told_once_and_the_run_goes_on_without() -> None:
    house = House(decode_s=0.15)
    await house.live(before_step=lambda version: house.eval_engine.die() if version == 3 else None)
    assert house.versions == []
    (trouble,) = house.troubles
    assert "the run goes on without evaluation: engine-eval" in trouble
    assert undisturbed(house)
    stats = house.evaluation.stats()
    assert (stats.state, stats.abandoned) == ("off", 1)
    assert house.kept == []


@virtual
async def test_an_evaluation_past_its_limit_is_abandoned_told_and_the_next_one_is_tried() -> None:
    house = House(timeout_s=2.0, decode_s=0.15)

    def before_step(version: int) -> None:
        if version == 6:
            house.eval_engine.decode_s = 0.01

    await house.live(before_step=before_step)
    assert house.versions == [6, 9, 10]
    assert [result.num_abandoned for result in house.results] == [2, 2, 2]
    assert [trouble.partition(";")[0] for trouble in house.troubles] == [
        f"the evaluation of policy_version {version} is given up: did not end within eval.timeout_s=2.0"
        for version in (0, 3)
    ]
    assert undisturbed(house)


def test_an_evaluation_that_this_machine_has_no_connection_for_is_abandoned_and_the_next_one_is_tried() -> (
    None
):
    house = House(every=3, last=6, at_start=False)
    post = house.eval_engine.post

    async def short(path: str, body: Any, *args: Any, **keywords: Any) -> Any:
        if path == "/prepare" and body.version == 3:
            raise ConnectionShortage("engine-eval", "no descriptor is left")
        return await post(path, body, *args, **keywords)

    house.eval_engine.post = short  # type: ignore[method-assign]
    run_virtual(house.live())
    assert [result.version for result in house.results] == [6]
    (told,) = house.troubles
    assert "the evaluation of policy_version 3 is given up: " in told
    assert "no descriptor is left" in told


@virtual
async def test_weights_that_arrive_changed_are_not_evaluated() -> None:
    house = House(at_start=False)
    house.eval_engine.corrupt_digest = True
    await house.live()
    (trouble,) = house.troubles
    assert "has (policy_version, digest) (3, 'corrupt'); the trainer sent (3, 'w3')" in trouble
    assert (house.versions, house.eval_engine.policy_version) == ([], 0)
    assert undisturbed(house)


@given(
    published=st.lists(st.integers(1, 12), min_size=1, max_size=20),
    every=st.integers(1, 7),
    cut=st.integers(0, 20),
    at_start=st.booleans(),
)
@example(published=[5, 5, 1, 1], every=3, cut=2, at_start=True)
def test_one_version_is_due_for_each_multiple_that_was_reached_and_the_last_one_after_a_resume_too(
    published: list[int], every: int, cut: int, at_start: bool
) -> None:
    versions = list(accumulate(published))
    last = versions[-1]
    multiples = range(every, last + 1, every)
    expected = {min(v for v in versions if v >= multiple) for multiple in multiples} | {last}
    schedule = Schedule(every=every, last=last, at_start=at_start)
    due = [version for version in versions[:cut] if schedule.is_due_nowait(version)]
    newest = max([0] * at_start + due, default=None)
    resumed = Schedule(every=every, last=last, at_start=at_start, evaluated=newest)
    assert resumed.at_start == (at_start and newest is None), "the initial weights are evaluated once"
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
async def test_whatever_the_eval_engine_does_training_keeps_its_pace_and_no_file_stays_behind(
    decode_s: float, prepare_s: float, every: int, timeout_s: float, death: int
) -> None:
    house = House(every=every, last=12, decode_s=decode_s, prepare_s=prepare_s, timeout_s=timeout_s)
    await house.live(before_step=lambda version: house.eval_engine.die() if version == death else None)
    assert undisturbed(house)
    assert house.kept == []
    assert house.versions == sorted(set(house.versions))
    stats = house.evaluation.stats()
    assert stats.finished == len(house.results)
    if stats.state != "off":
        due = {0, 12, *range(every, 13, every)}
        assert stats.finished + stats.skipped + stats.abandoned == len(due)
