"""A rolling publish: one engine swaps after the other, and what befalls one of them stops no other."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.engines.own_server import EngineServer
from asyncrl.errors import EngineLost, PublishError
from asyncrl.messages.records import CommitReport, Interrupt
from asyncrl.sync.publisher import Publisher
from asyncrl.testing.fake_engine import FakeEngineServer
from asyncrl.testing.fakes import FakeTrainer
from asyncrl.testing.virtual_time import run_virtual

PREPARE_S = 2.0


class Target(EngineServer):
    """An engine server that tells when it swaps."""

    def __init__(self, fake: FakeEngineServer, on_swap: Callable[[str, bool], None]) -> None:
        super().__init__(fake)
        self._on_swap = on_swap

    async def commit(self, version: int, digest: str, interrupt: Interrupt) -> CommitReport:
        self._on_swap(self.name, True)
        try:
            return await super().commit(version, digest, interrupt)
        finally:
            self._on_swap(self.name, False)


class House:
    """A publisher over fake engines whose losses are told, as a supervisor would hear them; nobody starts
    them again.
    """

    def __init__(
        self,
        tasks: asyncio.TaskGroup,
        swaps_s: Sequence[float],
        *,
        is_rolling: bool = True,
        is_supervised: bool = True,
        timeout_s: float = 60,
    ) -> None:
        self.trainer = FakeTrainer(export_s=1.0)
        self.fakes = [
            FakeEngineServer(f"engine-{i}", prepare_s=PREPARE_S, swap_s=swap_s)
            for i, swap_s in enumerate(swaps_s)
        ]
        self.targets = [Target(fake, self._on_swap) for fake in self.fakes]
        self.swapping: set[str] = set()
        self.peak_swapping = 0
        self.served: list[tuple[int, float]] = []
        self.lost: list[str] = []
        self.publisher = Publisher(
            self.trainer,
            self.targets,
            interrupt="abort",
            timeout_s=timeout_s,
            on_served=self._on_served,
            is_rolling=is_rolling,
            on_lost=self.on_lost if is_supervised else None,
        )
        self.running = tasks.create_task(self.publisher.run(), name="publisher")

    def on_lost(self, lost: EngineLost) -> None:
        if not lost.is_told:
            self.lost.append(lost.room)
        self.publisher.down_nowait(lost.room)
        next(target for target in self.targets if target.name == lost.room).cut_nowait()

    def versions(self) -> list[int]:
        return [target.policy_version for target in self.targets]

    def _on_swap(self, name: str, begins: bool) -> None:
        (self.swapping.add if begins else self.swapping.discard)(name)
        self.peak_swapping = max(self.peak_swapping, len(self.swapping))

    def _on_served(self, version: int) -> None:
        live = [fake for fake in self.fakes if fake.name not in self.lost]
        assert all(fake.policy_version == version for fake in live), (
            "the oldest version that any live engine serves is the one that counts"
        )
        self.served.append((version, asyncio.get_running_loop().time()))


def live(story: Callable[[House], Coroutine[Any, Any, None]], *swaps_s: float, **knobs: Any) -> House:
    async def play() -> House:
        async with asyncio.TaskGroup() as tasks:
            house = House(tasks, swaps_s, **knobs)
            await story(house)
            house.running.cancel()
        return house

    return run_virtual(play())


def test_one_engine_swaps_after_the_other_and_all_are_prepared_at_once() -> None:
    async def story(house: House) -> None:
        house.trainer.step()
        await asyncio.sleep(1.0 + PREPARE_S + 0.5)
        assert house.versions() == [0, 0, 0]
        await asyncio.sleep(1.0)
        assert house.versions() == [1, 0, 0]
        assert house.served == [], "admission counts with the oldest version that is served"
        await asyncio.sleep(2.0)
        assert (house.versions(), house.served) == ([1, 1, 0], [])
        await asyncio.sleep(10.0)

    house = live(story, 1.0, 2.0, 3.0)
    assert house.peak_swapping == 1
    assert house.served == [(1, 1.0 + PREPARE_S + 1.0 + 2.0 + 3.0)]
    stats = house.publisher.stats()
    assert (stats.commit_s, stats.pause_s) == (6.0, 3.0), "no engine pauses longer than for its own swap"


def test_without_it_all_engines_swap_at_once() -> None:
    async def story(house: House) -> None:
        house.trainer.step()
        await asyncio.sleep(20.0)

    house = live(story, 1.0, 2.0, 3.0, is_rolling=False)
    assert house.peak_swapping == 3
    assert house.served == [(1, 1.0 + PREPARE_S + 3.0)]


def test_with_one_engine_rolling_changes_nothing() -> None:
    async def story(house: House) -> None:
        house.trainer.step()
        await asyncio.sleep(20.0)

    assert (
        live(story, 2.0).served == live(story, 2.0, is_rolling=False).served == [(1, 1.0 + PREPARE_S + 2.0)]
    )


def test_an_engine_that_dies_in_its_turn_does_not_stop_those_after_it() -> None:
    async def story(house: House) -> None:
        house.trainer.step()
        await asyncio.sleep(1.0 + PREPARE_S + 1.0 + 0.5)
        house.fakes[1].die()
        await asyncio.sleep(20.0)
        assert house.versions() == [1, 0, 1]
        house.trainer.step()
        await asyncio.sleep(20.0)
        assert house.versions() == [2, 0, 2]

    house = live(story, 1.0, 2.0, 3.0)
    assert house.lost == ["engine-1"]
    assert [version for version, _ in house.served] == [1, 2]


def test_a_frozen_engine_holds_the_others_up_until_it_is_given_up_and_no_longer() -> None:
    async def story(house: House) -> None:
        house.trainer.step()
        await asyncio.sleep(1.0 + PREPARE_S + 0.5)
        house.fakes[1].freeze()
        await asyncio.sleep(4.5)
        assert house.versions() == [1, 0, 0], "nobody has given it up yet"
        house.on_lost(EngineLost("engine-1", "does not answer its heartbeat"))
        await asyncio.sleep(3.5)
        assert house.versions() == [1, 0, 1]

    assert live(story, 1.0, 1.0, 3.0).lost == ["engine-1"]


def test_a_frozen_engine_whose_heartbeat_nobody_watches_is_given_up_at_the_limit_of_its_turn() -> None:
    async def story(house: House) -> None:
        house.trainer.step()
        await asyncio.sleep(1.0 + PREPARE_S + 0.5)
        house.fakes[0].freeze()
        await asyncio.sleep(30.0)

    house = live(story, 1.0, 1.0, timeout_s=10)
    assert house.lost == ["engine-0"]
    assert house.served == [(1, 1.0 + PREPARE_S + 10.0 + 1.0)]


def test_an_engine_that_went_down_and_came_back_before_its_turn_is_left_to_whoever_brings_it_up() -> None:
    async def story(house: House) -> None:
        house.trainer.step()
        await asyncio.sleep(1.0 + PREPARE_S + 0.5)
        house.on_lost(EngineLost("engine-1", "was killed"))
        house.fakes[1].restart()  # another process, with nothing staged
        house.targets[1].renew_nowait()
        back = asyncio.ensure_future(house.publisher.bring_up("engine-1"))
        await asyncio.sleep(5.0)
        assert house.served[0][0] == 1, "nothing was committed on it, which it would have refused"
        await back
        assert house.versions() == [1, 1]

    live(story, 2.0, 1.0)


def test_the_same_holds_where_all_swap_at_once_and_one_is_prepared_long_after_another() -> None:
    async def story(house: House) -> None:
        house.fakes[1].prepare_s = 30.0
        house.trainer.step()
        await asyncio.sleep(1.0 + PREPARE_S + 1.0)
        house.on_lost(EngineLost("engine-0", "was killed"))
        house.fakes[0].restart()
        house.targets[0].renew_nowait()
        back = asyncio.ensure_future(house.publisher.bring_up("engine-0"))
        await asyncio.sleep(60.0)
        await back
        assert house.versions() == [1, 1]

    live(story, 1.0, 1.0, is_rolling=False)


def test_weights_that_differ_stop_the_publish_before_the_next_engine_has_them() -> None:
    async def run() -> House:
        async with asyncio.TaskGroup() as tasks:
            house = houses[0] = House(tasks, [1.0, 1.0, 1.0])
            wrong = house.targets[1]

            async def commit(version: int, digest: str, interrupt: Interrupt) -> CommitReport:
                report = await Target.commit(wrong, version, digest, interrupt)
                return CommitReport(report.version, "stale", report.pause_s, report.num_interrupted)

            wrong.commit = commit  # type: ignore[method-assign]
            house.trainer.step()
        raise AssertionError("the publisher ends with an error")

    houses: dict[int, House] = {}
    with pytest.raises(ExceptionGroup) as caught:
        run_virtual(run())
    (error,) = caught.value.exceptions
    assert isinstance(error, PublishError)
    assert "engine-1 serves policy_version 1 with digest stale, the trainer sent w1" in str(error)
    assert "engine-0: 1, engine-1: 1, engine-2: 0" in str(error)
    assert houses[0].fakes[2].policy_version == 0
    assert houses[0].served == []


def test_without_supervision_an_engine_that_dies_in_its_turn_ends_the_run_with_the_versions_of_all() -> None:
    async def run() -> None:
        async with asyncio.TaskGroup() as tasks:
            house = House(tasks, [1.0, 1.0, 1.0], is_supervised=False)
            house.trainer.step()
            await asyncio.sleep(1.0 + PREPARE_S + 1.5)
            house.fakes[1].die()

    with pytest.raises(ExceptionGroup) as caught:
        run_virtual(run())
    assert "engine-0: 1, engine-1: 0 or 1, it gave no answer, engine-2: 0" in str(caught.value.exceptions[0])


@given(
    swaps_s=st.lists(st.floats(0.0, 3.0), min_size=1, max_size=4),
    gaps_s=st.lists(st.floats(0.0, 8.0), min_size=1, max_size=6),
    deaths=st.dictionaries(st.integers(0, 3), st.tuples(st.floats(0.0, 40.0), st.booleans()), max_size=3),
    is_rolling=st.booleans(),
)
def test_whoever_lives_serves_the_newest_version_in_the_end(
    swaps_s: list[float], gaps_s: list[float], deaths: dict[int, tuple[float, bool]], is_rolling: bool
) -> None:
    async def story(house: House) -> None:
        for index, (at_s, is_frozen) in deaths.items():
            if index < len(house.fakes):
                fake = house.fakes[index]
                asyncio.get_running_loop().call_later(at_s, fake.freeze if is_frozen else fake.die)
        for gap_s in gaps_s:
            await asyncio.sleep(gap_s)
            house.trainer.step()
        await asyncio.sleep(1000.0)

    house = live(story, *swaps_s, is_rolling=is_rolling, timeout_s=20)
    assert house.peak_swapping <= (1 if is_rolling else len(swaps_s))
    versions = [version for version, _ in house.served]
    assert versions == sorted(set(versions))
    assert versions[-1] == len(gaps_s), "the dead and the frozen stop nobody"
    assert set(house.lost) <= {f"engine-{index}" for index in deaths}
    for target in house.targets:
        assert (
            target.policy_version == len(gaps_s)
            or target.name in house.lost
            or int(target.name[-1]) in deaths
        )
