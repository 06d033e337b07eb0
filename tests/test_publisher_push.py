"""Weights on their way to the engines, in two phases."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.engines.own_server import EngineServer
from asyncrl.errors import ConnectionShortage, EngineLost, PublishError
from asyncrl.http import shortage
from asyncrl.messages.records import Batch, WeightManifest
from asyncrl.sync.publisher import Publisher
from asyncrl.sync.to_all import ToAll
from asyncrl.testing.fake_engine import FakeEngineServer
from asyncrl.testing.fakes import FakeTrainer
from asyncrl.testing.virtual_time import all_blocked, run_virtual


class House:
    """A publisher between a fake trainer and fake engine servers."""

    def __init__(
        self,
        tasks: asyncio.TaskGroup,
        trainer: FakeTrainer,
        fakes: Sequence[FakeEngineServer],
        *,
        timeout_s: float = 60.0,
    ) -> None:
        self.trainer, self.fakes = trainer, fakes
        self.served: list[int] = []
        self.served_at: list[float] = []
        targets = [EngineServer(fake) for fake in fakes]
        self.publisher = Publisher(
            trainer, targets, interrupt="abort", timeout_s=timeout_s, on_served=self._on_served
        )
        self.running = tasks.create_task(self.publisher.run(), name="publisher")

    def _on_served(self, version: int) -> None:
        assert all(fake.policy_version == version for fake in self.fakes), (
            "announced only when every engine serves it"
        )
        self.served.append(version)
        self.served_at.append(asyncio.get_running_loop().time())


def engines(count: int = 2, *, prepare_s: float = 2.0, swap_s: float = 0.5) -> list[FakeEngineServer]:
    return [
        FakeEngineServer(f"engine-{index}", prepare_s=prepare_s, swap_s=swap_s * (index + 1))
        for index in range(count)
    ]


async def fails(
    trainer: FakeTrainer, fakes: Sequence[FakeEngineServer], *, timeout_s: float = 60.0
) -> tuple[House, PublishError]:
    houses = []

    async def run() -> None:
        async with asyncio.TaskGroup() as tasks:
            houses.append(House(tasks, trainer, fakes, timeout_s=timeout_s))
            trainer.step()

    with pytest.raises(ExceptionGroup) as caught:
        await run()
    (error,) = caught.value.exceptions
    assert isinstance(error, PublishError)
    assert error.room == "publisher"
    assert "Way out" in str(error)
    return houses[0], error


def test_a_version_is_announced_after_every_engine_serves_it() -> None:
    async def story() -> None:
        async with asyncio.TaskGroup() as tasks:
            house = House(tasks, FakeTrainer(export_s=1.0), engines())
            house.trainer.step()
            await asyncio.sleep(10.0)
            house.running.cancel()
        assert (house.served, house.served_at) == ([1], [4.0]), "export 1 s, prepare 2 s, the slower swap 1 s"
        stats = house.publisher.stats()
        assert (stats.version, stats.published, stats.skipped, stats.num_bytes) == (1, 1, 0, 1000)
        assert (stats.publish_s, stats.export_s, stats.prepare_s, stats.commit_s, stats.pause_s) == (
            4.0,
            1.0,
            2.0,
            1.0,
            1.0,
        )
        assert repr(house.publisher) == "<Publisher idle, v1 on 2 engines, 0 skipped>"

    run_virtual(story())


def test_versions_that_came_while_a_push_was_under_way_are_skipped_and_counted() -> None:
    async def story() -> None:
        async with asyncio.TaskGroup() as tasks:
            house = House(tasks, FakeTrainer(), engines())
            house.trainer.step()
            await asyncio.sleep(1.0)
            for _ in range(3):
                house.trainer.step()
            await asyncio.sleep(10.0)
            house.running.cancel()
        assert house.served == [1, 4]
        assert (house.publisher.stats().published, house.publisher.stats().skipped) == (2, 2)
        assert house.publisher.stats().total_publish_s == 6.0
        assert house.trainer.exported == [1, 4]

    run_virtual(story())


def test_the_train_loop_waits_for_the_export_and_never_for_the_push() -> None:
    async def story() -> None:
        async with asyncio.TaskGroup() as tasks:
            house = House(tasks, FakeTrainer(export_s=1.0), engines())
            clock = asyncio.get_running_loop().time
            house.trainer.step()
            await house.publisher.wait_exported_or_busy(1)
            assert (clock(), house.trainer.exported) == (1.0, [1])
            house.trainer.step()
            await house.publisher.wait_exported_or_busy(2)
            assert (clock(), house.trainer.exported) == (1.0, [1]), "version 1 is still being pushed"
            await all_blocked()
            house.running.cancel()

    run_virtual(story())


def test_an_export_comes_before_the_next_step_whenever_the_publisher_is_idle() -> None:
    async def story() -> None:
        async with asyncio.TaskGroup() as tasks:
            house = House(tasks, FakeTrainer(train_s=10.0, export_s=1.0), engines())
            for version in range(1, 5):
                await house.trainer.train(Batch(version - 1, (), 0))
                await house.publisher.wait_exported_or_busy(version)
            assert house.trainer.exported == [1, 2, 3, 4], "each push ends long before the next step does"
            assert asyncio.get_running_loop().time() == 44.0
            house.running.cancel()

    run_virtual(story())


def test_a_digest_that_differs_is_an_error_with_both_and_nothing_is_announced_or_swapped() -> None:
    async def story() -> None:
        fakes = engines()
        fakes[1].corrupt_digest = True
        house, error = await fails(FakeTrainer(), fakes)
        assert (
            "engine-1 loaded policy_version 1 with digest corrupt, the trainer sent w1 (1 tensors, 1000 "
            "bytes)" in str(error)
        )
        assert "so 1 was not announced" in str(error)
        assert (house.served, [fake.policy_version for fake in fakes]) == ([], [0, 0])

    run_virtual(story())


def test_a_digest_that_differs_after_the_swap_is_an_error_too() -> None:
    class Target:
        name = "engine-0"

        async def prepare(self, manifest: WeightManifest) -> str:
            return manifest.digest

        async def commit(self, version: int, digest: str, interrupt: object) -> object:
            from asyncrl.messages.records import CommitReport

            return CommitReport(version, "stale", 0.0, 0)

    async def story() -> None:
        served: list[int] = []
        trainer = FakeTrainer()
        trainer.step()
        publisher = Publisher(trainer, [Target()], interrupt="keep", timeout_s=9.0, on_served=served.append)  # type: ignore[list-item]
        with pytest.raises(
            PublishError, match="engine-0 serves policy_version 1 with digest stale, the trainer sent w1"
        ):
            await publisher.run()
        assert served == []

    run_virtual(story())


def test_an_engine_that_dies_in_commit_is_named_with_the_versions_that_each_one_has() -> None:
    async def story() -> None:
        fakes = engines(3, swap_s=1.0)
        asyncio.get_running_loop().call_later(3.5, fakes[1].die)
        house, error = await fails(FakeTrainer(), fakes)
        assert "engine-1 failed in commit of policy_version 1" in str(error)
        assert "engine-0: 1, engine-1: 0 or 1, it gave no answer, engine-2: 1" in str(error)
        assert house.served == []

    run_virtual(story())


def test_a_push_that_this_machine_has_no_connection_for_is_no_failure_of_the_engine() -> None:
    async def prepare(target: EngineServer) -> str:
        raise shortage(target.name, errno.EMFILE)

    async def story() -> None:
        lost: list[EngineLost] = []
        push = ToAll(
            1, [EngineServer(fake) for fake in engines()], served=0, timeout_s=60.0, on_lost=lost.append
        )
        with pytest.raises(ConnectionShortage, match="which may be well"):
            await push.on_all("prepare", prepare)
        assert not lost

    run_virtual(story())


def test_an_engine_that_died_before_is_named_in_prepare() -> None:
    async def story() -> None:
        fakes = engines()
        fakes[0].die()
        _, error = await fails(FakeTrainer(), fakes)
        assert "engine-0 failed in prepare of policy_version 1" in str(error)
        assert "(policy_version served: engine-0: 0, engine-1: 0)" in str(error)

    run_virtual(story())


@pytest.mark.parametrize(
    ("prepare_s", "swap_s", "says"),
    [
        (100.0, 0.0, "engine-0, engine-1 did not prepare policy_version 1 within 60.0 s"),
        (
            0.0,
            40.0,
            "engine-1 did not commit policy_version 1 within 60.0 s (policy_version served: engine-0: 1, "
            "engine-1: 0 or 1",
        ),
    ],
)
def test_a_phase_that_does_not_end_in_time_is_an_error_that_names_who_was_silent(
    prepare_s: float, swap_s: float, says: str
) -> None:
    async def story() -> None:
        _, error = await fails(FakeTrainer(), engines(prepare_s=prepare_s, swap_s=swap_s))
        assert says in str(error)
        assert "publisher.timeout_s=60.0" in str(error)

    run_virtual(story())


def test_the_time_in_which_a_trainer_is_started_again_does_not_count_as_its_export() -> None:
    async def story() -> None:
        trainer, target = FakeTrainer(export_s=1.0), EngineServer(engines()[0])
        trainer.is_up = False
        served: list[int] = []
        publisher = Publisher(trainer, [target], interrupt="abort", timeout_s=5.0, on_served=served.append)
        running = asyncio.create_task(publisher.run(), name="publisher")
        trainer.step()
        await asyncio.sleep(100.0)
        assert served == []
        trainer.is_up = True
        trainer.went_up.set()
        await asyncio.sleep(10.0)
        assert served == [1]
        running.cancel()

    run_virtual(story())


def test_an_export_that_outlived_a_restart_has_its_whole_time_again() -> None:
    async def story() -> None:
        trainer, target = FakeTrainer(export_s=6.0), EngineServer(engines()[0])
        served: list[int] = []
        publisher = Publisher(trainer, [target], interrupt="abort", timeout_s=5.0, on_served=served.append)
        running = asyncio.create_task(publisher.run(), name="publisher")
        trainer.step()
        await asyncio.sleep(4.0)
        trainer.num_restarts, trainer.export_s = (
            1,
            4.0,
        )  # the call sleeps through it, and is made again by its new process
        await asyncio.sleep(10.0)
        assert served == [1]
        running.cancel()

    run_virtual(story())


def test_an_export_that_does_not_end_in_time_is_an_error() -> None:
    async def story() -> None:
        _, error = await fails(FakeTrainer(export_s=1000.0), engines(), timeout_s=5.0)
        assert "the trainer did not export policy_version 1 within 5.0 s" in str(error)

    run_virtual(story())


@given(
    gaps=st.lists(st.floats(0.0, 8.0), min_size=1, max_size=15),
    export_s=st.floats(0.0, 2.0),
    prepare_s=st.floats(0.0, 5.0),
    swap_s=st.floats(0.0, 1.0),
)
def test_the_newest_version_is_always_served_in_the_end(
    gaps: list[float], export_s: float, prepare_s: float, swap_s: float
) -> None:
    async def story() -> None:
        async with asyncio.TaskGroup() as tasks:
            house = House(
                tasks,
                FakeTrainer(train_s=0.0, export_s=export_s),
                engines(prepare_s=prepare_s, swap_s=swap_s),
            )
            clock = asyncio.get_running_loop().time
            for version, gap in enumerate(gaps, start=1):
                await asyncio.sleep(gap)
                await house.trainer.train(Batch(version - 1, (), 0))
                asked = clock()
                await house.publisher.wait_exported_or_busy(version)
                assert clock() - asked <= export_s + 1e-6, "never held for a push"
            await asyncio.sleep(1000.0)
            house.running.cancel()
        assert house.served == sorted(set(house.served))
        assert house.served[-1] == len(gaps)
        stats = house.publisher.stats()
        assert stats.published + stats.skipped == len(gaps)

    run_virtual(story())
