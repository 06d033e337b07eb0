"""Evaluations on the rollout engines: waits, deaths, limits and stops."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from fake_engine import FakeEngineServer
from fakes import FakeTrainer
from hypothesis import given, settings
from hypothesis import strategies as st
from rollout_cases import single_turn
from turn_cases import EngineRooms, House, play

from asyncrl.config import SupervisionConfig
from asyncrl.job.colocate import Disaggregated
from asyncrl.messages.records import Batch, Prompt
from asyncrl.messages.trainer_api import ExportResponse
from asyncrl.rollouts.evaluation import EvalResult, Evaluation, HeldOut

PROMPTS = tuple(Prompt(f"0/{number}", ({"role": "user", "content": f"p{number}"},)) for number in range(6))
ONCE_S = 3 * 10 * 0.1
"""Seconds of an evaluation: 12 samples of 10 tokens, 4 at once."""


class Evaluated:
    """The evaluations of some rooms, as a run wires them."""

    def __init__(self, *, every: Mapping[str, int], last: int, timeout_s: float) -> None:
        self.every, self.last, self.timeout_s = every, last, timeout_s
        self.results, self.troubles = list[EvalResult](), list[str]()

    def attach(self, rooms: EngineRooms) -> None:
        generator = single_turn(rooms.pool.counted_apart(), max_tokens=10)
        self.evaluation = Evaluation(
            [
                HeldOut(
                    generator=generator,
                    prompts=PROMPTS,
                    samples=2,
                    slots=4,
                    name=name,
                    every=every,
                    last=self.last,
                    timeout_s=self.timeout_s,
                )
                for name, every in self.every.items()
            ],
            None,
            Path(),
            on_result=self.results.append,
            on_trouble=self.troubles.append,
        )

    @property
    def hooks(self) -> dict[str, Any]:
        async def published(manifest: ExportResponse) -> None:
            self.evaluation.served_nowait(manifest.version)

        return {"on_published": published, "wait_released": lambda: self.evaluation.wait_released()}

    @property
    def versions(self) -> list[int]:
        return [result.version for result in self.results]


class Apart(EngineRooms):
    """Engines on separate devices, and a trainer with steps of a second."""

    def __init__(
        self,
        tasks: asyncio.TaskGroup,
        *,
        every: int | Mapping[str, int] = 2,
        last: int = 6,
        timeout_s: float = 60.0,
        decode_s: float = 0.1,
        max_staleness: int = 2,
    ) -> None:
        named = {"": every} if isinstance(every, int) else every
        self.evaluated = Evaluated(every=named, last=last, timeout_s=timeout_s)
        self.last, self.max_staleness = last, max_staleness
        self.trained_at, self.served_at = list[float](), list[float]()
        super().__init__(
            tasks,
            [FakeEngineServer(f"engine-{number}", prepare_s=0.1, decode_s=decode_s) for number in range(2)],
            FakeTrainer(train_s=1.0, export_s=0.1),
            SupervisionConfig(max_restarts=20, backoff_s=0.1),
            partial(Disaggregated, num_steps=last, spawn=self.spawn),
            **self.evaluated.hooks,
        )
        self.evaluated.attach(self)
        self.evaluation, self.results = self.evaluated.evaluation, self.evaluated.results

    def spawn(self, coro: Any, *, name: str) -> asyncio.Task[None]:
        task: asyncio.Task[None] = self.tasks.create_task(coro, name=name)
        self.running.append(task)
        return task

    async def begin(self) -> None:
        self.spawn(self.evaluation.run(), name="evaluation")
        await self.publisher.start(0)
        self.evaluation.served_nowait(0)

    async def steps(self, num: int | None = None) -> None:
        """What the train loop does; a batch needs a version that is not too old."""
        for version in range(self.trainer.policy_version, self.last if num is None else num):
            await self.publisher.wait_announced(version - self.max_staleness)
            await self.trainer.train(Batch(version, (), 0))
            self.trained_at.append(asyncio.get_running_loop().time())
            await self.publisher.to_engines(version + 1)

    async def whole(self) -> None:
        await self.steps()
        await self.evaluation.wait_last()

    def on_served(self, version: int) -> None:
        super().on_served(version)
        self.served_at.append(asyncio.get_running_loop().time())


live = partial(play, Apart)


def test_push_waits_for_the_evaluation_and_training_for_its_bound() -> None:
    rooms = live(Apart.whole, last=4, max_staleness=1)
    assert rooms.evaluated.versions == [0, 2, 4]
    assert rooms.announced == [2, 4], "versions 1 and 3 were replaced by newer ones while a push was held"
    assert rooms.trained_at[:2] == pytest.approx([1.0, 2.0]), "the trainer steps until its bound"
    assert rooms.served_at[0] == pytest.approx(ONCE_S + 0.2, abs=0.1)
    assert rooms.trained_at[2] == pytest.approx(rooms.served_at[0] + 1.0, abs=0.1)
    stats = rooms.evaluation.stats
    assert (stats.finished, stats.skipped, stats.abandoned, rooms.evaluated.troubles) == (3, 0, 0, [])
    assert stats.held_s == pytest.approx(2 * (ONCE_S - 1.0), abs=0.5)
    assert rooms.evaluation.gauges()["evaluation/held_s"] == stats.held_s
    assert rooms.pool.gauges()["tokens/generated"] == 0, "its tokens are not trained on"


@given(
    decode_s=st.floats(0.001, 0.3),
    every=st.integers(1, 4),
    timeout_s=st.floats(0.5, 20.0),
    deaths=st.lists(st.tuples(st.floats(0.0, 20.0), st.integers(0, 1)), max_size=3),
    max_staleness=st.integers(0, 3),
)
@settings(max_examples=60)
def test_deaths_leave_each_evaluation_with_one_version(
    decode_s: float, every: int, timeout_s: float, deaths: list[tuple[float, int]], max_staleness: int
) -> None:
    async def story(rooms: Apart) -> None:
        for at_s, number in deaths:
            asyncio.get_running_loop().call_later(at_s, rooms.fakes[number].die)
        await rooms.whole()

    rooms = live(story, decode_s=decode_s, every=every, timeout_s=timeout_s, max_staleness=max_staleness)
    stats, versions = rooms.evaluation.stats, rooms.evaluated.versions
    assert versions == sorted(set(versions))
    assert all(len(result.samples) == 12 for result in rooms.results)
    assert len(rooms.evaluated.troubles) == stats.abandoned
    assert all("did not end within" in trouble for trouble in rooms.evaluated.troubles)
    assert (stats.finished, stats.skipped) == (len(versions), 0)
    assert rooms.evaluation.is_over


def in_turns(story: Callable[[House, Evaluated], Any], *, stays: bool, num_steps: int) -> Evaluated:
    evaluated = Evaluated(every={"": 2}, last=num_steps, timeout_s=60.0)

    def attach(house: House) -> None:
        evaluated.attach(house)
        house.running.append(house.tasks.create_task(evaluated.evaluation.run(), name="evaluation"))

    async def whole(house: House) -> None:
        evaluated.evaluation.served_nowait(0)
        await story(house, evaluated)

    play(House, whole, stays=stays, num_steps=num_steps, at_start=attach, **evaluated.hooks)
    return evaluated


@pytest.mark.parametrize("stays", [True, False])
def test_in_turns_the_engines_keep_theirs_until_the_evaluation_ends(stays: bool) -> None:
    async def story(house: House, evaluated: Evaluated) -> None:
        for version in range(1, 4):
            was_due, num_before = version % 2 == 1, len(evaluated.results)
            await house.step()
            assert len(evaluated.results) == num_before + was_due
        assert house.publisher.status()["state"] == "training", "it saves first"
        await house.publisher.to_trainer()
        await house.publisher.to_engines(3, is_for_evaluation=True)
        await evaluated.evaluation.wait_last()
        assert house.publisher.status()["state"] == "generating"

    assert in_turns(story, stays=stays, num_steps=3).versions == [0, 2, 3]
