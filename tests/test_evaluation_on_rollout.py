"""Evaluations on the rollout engines: waits, deaths and limits."""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from colocated_cases import EngineRooms, play
from fake_engine import FakeEngineServer
from fakes import FakeTrainer
from hypothesis import given, settings
from hypothesis import strategies as st
from rollout_cases import make_held_out, single_turn

from asyncrl.config.supervision_config import SupervisionConfig
from asyncrl.job.colocate import Disaggregated
from asyncrl.messages.records import Batch, Prompt
from asyncrl.messages.trainer_api import ExportResponse
from asyncrl.rollouts.evaluation import EvalResult, Evaluation

PROMPTS = tuple(
    Prompt(f"0/{number}", ({"role": "user", "content": f"p{number}"},))
    for number in range(6)
)
ONCE_S = 3 * 10 * 0.1
"""Seconds of an evaluation: 12 samples of 10 tokens, 4 at once."""


class Apart(EngineRooms):
    """Engines on separate devices, a trainer with steps of a second, and evaluations on
    the engines.
    """

    def __init__(
        self,
        tasks: asyncio.TaskGroup,
        *,
        every: int = 2,
        last: int = 6,
        timeout_s: float = 60.0,
        decode_s: float = 0.1,
        max_staleness: int = 2,
    ) -> None:
        self.last, self.max_staleness = last, max_staleness
        self.trained_at, self.served_at = list[float](), list[float]()
        self.results, self.troubles = list[EvalResult](), list[str]()

        async def published(manifest: ExportResponse) -> None:
            self.evaluation.on_served_nowait(manifest.version)

        super().__init__(
            tasks,
            [
                FakeEngineServer(f"engine-{number}", prepare_s=0.1, decode_s=decode_s)
                for number in range(2)
            ],
            FakeTrainer(train_s=1.0, export_s=0.1),
            SupervisionConfig(max_restarts=20, backoff_s=0.1),
            partial(
                Disaggregated,
                num_steps=last,
                spawn=self.spawn,
                is_held_up=lambda: self.evaluation.is_holding(),
            ),
            on_published=published,
            wait_released=lambda: self.evaluation.wait_released(),
        )
        generator = single_turn(self.pool.counted_apart(), max_tokens=10)
        limits: Any = {"every": every, "last": last, "timeout_s": timeout_s}
        self.evaluation = Evaluation(
            [make_held_out(generator, PROMPTS, **limits)],
            None,
            Path(),
            on_result=self.results.append,
            on_trouble=self.troubles.append,
        )

    @property
    def versions(self) -> list[int]:
        return [result.version for result in self.results]

    def spawn(self, coro: Any, *, name: str) -> asyncio.Task[None]:
        task: asyncio.Task[None] = self.tasks.create_task(coro, name=name)
        self.running.append(task)
        return task

    async def begin(self) -> None:
        self.spawn(self.evaluation.run(), name="evaluation")
        await self.publisher.start(0)
        self.evaluation.on_served_nowait(0)

    async def whole(self) -> None:
        """Act as the train loop; a batch needs a version that is not too old."""
        for version in range(self.last):
            await self.publisher.wait_announced(version - self.max_staleness)
            await self.trainer.train(Batch(version, (), 0))
            self.trained_at.append(asyncio.get_running_loop().time())
            await self.publisher.to_engines(version + 1)
        await self.evaluation.wait_last()

    def on_served(self, version: int) -> None:
        super().on_served(version)
        self.served_at.append(asyncio.get_running_loop().time())


live = partial(play, Apart)


def test_push_waits_for_the_evaluation_and_training_for_its_bound() -> None:
    rooms = live(Apart.whole, last=4, max_staleness=1)
    assert rooms.versions == [0, 2, 4]
    assert rooms.announced == [2, 4], (
        "versions 1 and 3 were replaced by newer ones while a push was held"
    )
    assert rooms.trained_at[:2] == pytest.approx([1.0, 2.0]), (
        "the trainer steps until its bound"
    )
    assert rooms.served_at[0] == pytest.approx(ONCE_S + 0.2, abs=0.1)
    assert rooms.trained_at[2] == pytest.approx(rooms.served_at[0] + 1.0, abs=0.1)
    stats = rooms.evaluation.stats
    assert (stats.finished, stats.skipped, stats.abandoned, rooms.troubles) == (
        3,
        0,
        0,
        [],
    )
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
    decode_s: float,
    every: int,
    timeout_s: float,
    deaths: list[tuple[float, int]],
    max_staleness: int,
) -> None:
    async def story(rooms: Apart) -> None:
        for at_s, number in deaths:
            asyncio.get_running_loop().call_later(at_s, rooms.fakes[number].die)
        await rooms.whole()

    rooms = live(
        story,
        decode_s=decode_s,
        every=every,
        timeout_s=timeout_s,
        max_staleness=max_staleness,
    )
    stats, versions = rooms.evaluation.stats, rooms.versions
    assert versions == sorted(set(versions))
    assert all(len(result.samples) == 12 for result in rooms.results)
    assert len(rooms.troubles) == stats.abandoned
    assert all("did not end within" in trouble for trouble in rooms.troubles)
    assert (stats.finished, stats.skipped) == (len(versions), 0)
    assert rooms.evaluation.is_over
