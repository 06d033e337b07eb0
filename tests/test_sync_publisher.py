"""Weights on their way to the engines: two phases, at once or one engine after the other."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.engines.own_server import EngineServer
from asyncrl.errors import ConnectionShortage, EngineLost, PublishError
from asyncrl.http import out_of
from asyncrl.messages.base import Interrupt
from asyncrl.messages.engine_calls import CommitResponse
from asyncrl.messages.records import Batch
from asyncrl.messages.trainer_calls import ExportResponse
from asyncrl.sync.publisher import Publisher
from asyncrl.sync.push import Push
from asyncrl.testing.fake_engine import FakeEngineServer
from asyncrl.testing.fakes import FakeTrainer
from asyncrl.testing.virtual_time import all_blocked, run_virtual

EXPORT_S, PREPARE_S = 1.0, 2.0


class House:
    """A publisher over a fake trainer and fake engines, whose losses are told as a supervisor would hear them
    (is_supervised); nobody starts them again.
    """

    def __init__(
        self,
        tasks: asyncio.TaskGroup,
        swaps_s: Sequence[float],
        *,
        is_rolling: bool = False,
        is_supervised: bool = True,
        timeout_s: float = 60,
        export_s: float = EXPORT_S,
        train_s: float = 1.0,
    ) -> None:
        self.trainer = FakeTrainer(train_s=train_s, export_s=export_s)
        self.fakes = [
            FakeEngineServer(f"engine-{index}", prepare_s=PREPARE_S, swap_s=swap_s)
            for index, swap_s in enumerate(swaps_s)
        ]
        self.targets = [EngineServer(fake) for fake in self.fakes]
        self.served: list[tuple[int, float]] = []
        self.lost: list[str] = []
        self.publisher = Publisher(
            self.trainer,
            self.targets,
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

    def start_again(self, index: int) -> asyncio.Future[None]:
        """Another process, with nothing staged, which is being brought up."""
        self.on_lost(EngineLost(f"engine-{index}", "was killed"))
        self.fakes[index].restart()
        self.targets[index].renew_nowait()
        return asyncio.ensure_future(self.publisher.bring_up(f"engine-{index}"))

    def _on_served(self, version: int) -> None:
        live = [fake for fake in self.fakes if fake.name not in self.lost]
        assert all(fake.policy_version == version for fake in live), "announced only when every engine serves"
        self.served.append((version, asyncio.get_running_loop().time()))


Story = Callable[[House], Coroutine[Any, Any, None]]


def live(story: Story, *swaps_s: float, **knobs: Any) -> House:
    async def play() -> House:
        async with asyncio.TaskGroup() as tasks:
            house = House(tasks, swaps_s, **knobs)
            await story(house)
            house.running.cancel()
        return house

    return run_virtual(play())


def fails(story: Story, *swaps_s: float, **knobs: Any) -> tuple[House, str]:
    """The house, and what the publisher ended with, unsupervised."""
    houses: list[House] = []

    async def play() -> None:
        async with asyncio.TaskGroup() as tasks:
            houses.append(House(tasks, swaps_s, is_supervised=False, **knobs))
            await story(houses[0])

    with pytest.raises(ExceptionGroup) as caught:
        run_virtual(play())
    (error,) = caught.value.exceptions
    assert isinstance(error, PublishError)
    assert error.room == "publisher"
    assert "Way out" in str(error)
    return houses[0], str(error)


@pytest.mark.parametrize("is_rolling", [True, False])
def test_all_are_prepared_at_once_swap_at_once_or_in_turn_and_the_version_is_announced_after_all(
    is_rolling: bool,
) -> None:
    async def story(house: House) -> None:
        house.trainer.step()
        await asyncio.sleep(EXPORT_S + PREPARE_S + 0.5)
        assert house.versions() == [0, 0, 0]
        await asyncio.sleep(1.0)
        assert house.versions() == [1, 0, 0]
        assert house.served == [], "admission counts with the oldest version that is served"
        await asyncio.sleep(10.0)

    house = live(story, 1.0, 2.0, 3.0, is_rolling=is_rolling)
    commit_s = 6.0 if is_rolling else 3.0
    assert house.served == [(1, EXPORT_S + PREPARE_S + commit_s)]
    stats = house.publisher.stats()
    assert (stats.version, stats.published, stats.skipped, stats.num_bytes) == (1, 1, 0, 1000)
    assert (stats.publish_s, stats.export_s, stats.prepare_s, stats.commit_s) == (
        3 + commit_s,
        1,
        2,
        commit_s,
    )
    assert stats.pause_s == 3.0, "no pause is longer than an engine's own swap"


def test_the_train_loop_waits_for_the_export_and_never_for_the_push() -> None:
    async def story(house: House) -> None:
        clock = asyncio.get_running_loop().time
        for version in (1, 2):
            house.trainer.step()
            await house.publisher.wait_exported_or_busy(version)
            assert (clock(), house.trainer.exported) == (1.0, [1]), "version 1 is still being pushed"
        await all_blocked()

    live(story, 0.5, 1.0)


def test_a_digest_that_differs_is_an_error_with_both_and_nothing_is_announced_or_swapped() -> None:
    async def story(house: House) -> None:
        house.fakes[1].corrupt_digest = True
        house.trainer.step()

    house, error = fails(story, 0.5, 1.0)
    assert (
        "engine-1 loaded policy_version 1 with digest corrupt, the trainer sent w1 (1 tensors, 1000" in error
    )
    assert "so 1 was not announced" in error
    assert (house.served, [fake.policy_version for fake in house.fakes]) == ([], [0, 0])


def test_weights_that_differ_after_a_swap_stop_the_publish_before_the_next_engine_has_them() -> None:
    async def story(house: House) -> None:
        commit = house.targets[1].commit

        async def stale(version: int, digest: str, interrupt: Interrupt) -> CommitResponse:
            return (await commit(version, digest, interrupt)).model_copy(update={"digest": "stale"})

        house.targets[1].commit = stale  # type: ignore[method-assign]
        house.trainer.step()

    house, error = fails(story, 1.0, 1.0, 1.0, is_rolling=True)
    assert "engine-1 serves policy_version 1 with digest stale of version 1, the trainer sent w1" in error
    assert "engine-0: 1, engine-1: 1, engine-2: 0" in error
    assert (house.fakes[2].policy_version, house.served) == (0, [])


@pytest.mark.parametrize(
    ("at_s", "how", "phase", "versions"),
    [
        (0.0, "die", "prepare", "engine-0: 0, engine-1: 0, engine-2: 0"),
        (0.0, "freeze", "prepare", "engine-0: 0, engine-1: 0, engine-2: 0"),
        (3.5, "die", "commit", "engine-0: 1, engine-1: 0 or 1, it gave no answer, engine-2: 1"),
        (3.5, "freeze", "commit", "engine-0: 1, engine-1: 0 or 1, it gave no answer, engine-2: 1"),
    ],
)
def test_an_engine_that_dies_or_is_silent_is_named_with_the_versions_that_each_one_has(
    at_s: float, how: str, phase: str, versions: str
) -> None:
    async def story(house: House) -> None:
        house.trainer.step()
        await asyncio.sleep(at_s)
        getattr(house.fakes[1], how)()

    house, error = fails(story, 1.0, 1.0, 1.0)
    assert f"engine-1 failed in {phase} of policy_version 1" in error
    assert versions in error
    assert house.served == []
    assert how == "die" or "within 60 s" in error


def test_a_push_that_this_machine_has_no_connection_for_is_no_failure_of_the_engine() -> None:
    class Short(EngineServer):
        async def prepare(self, manifest: ExportResponse) -> str:
            raise out_of(f"cannot open a connection to {self.name}", errno.EMFILE, self.name)

    async def story() -> None:
        lost: list[EngineLost] = []
        push = Push(1, [Short(FakeEngineServer("engine-0"))], served=0, timeout_s=60.0, on_lost=lost.append)
        with pytest.raises(ConnectionShortage, match="cannot open a connection to engine-0"):
            await push.whole(ExportResponse(version=1, path="p", digest="w1", num_tensors=1, num_bytes=1))
        assert not lost

    run_virtual(story())


def test_an_export_has_a_limit_in_which_the_time_of_a_restart_does_not_count() -> None:
    async def story(house: House) -> None:
        house.trainer.is_up = False
        house.trainer.step()
        await asyncio.sleep(100.0)
        assert house.served == []
        house.trainer.is_up = True
        house.trainer.went_up.set()
        await asyncio.sleep(4.0)
        # The call of the next export sleeps through another restart, and is made again by the new process.
        house.trainer.export_s = 6.0
        house.trainer.step()
        await asyncio.sleep(4.0)
        house.trainer.num_restarts, house.trainer.export_s = 1, 4.0
        await asyncio.sleep(20.0)

    async def too_slow(house: House) -> None:
        house.trainer.step()

    assert [version for version, _ in live(story, 0.5, timeout_s=5).served] == [1, 2]
    _, error = fails(too_slow, 1.0, export_s=1000.0, timeout_s=5)
    assert "the trainer did not export policy_version 1 within 5 s" in error


def test_a_frozen_engine_holds_the_others_up_until_it_is_given_up() -> None:
    async def story(house: House) -> None:
        house.trainer.step()
        await asyncio.sleep(EXPORT_S + PREPARE_S + 0.5)
        house.fakes[0].freeze()
        await asyncio.sleep(4.5)
        assert house.versions() == [0, 0], "nobody has given it up yet"
        house.on_lost(EngineLost("engine-0", "does not answer its heartbeat"))
        await asyncio.sleep(1.5)
        assert house.versions() == [0, 1]

    assert live(story, 1.0, 1.0, is_rolling=True).lost == ["engine-0"]


@pytest.mark.parametrize("is_rolling", [True, False])
def test_an_engine_that_came_back_before_its_commit_is_left_to_its_bring_up(is_rolling: bool) -> None:
    async def story(house: House) -> None:
        if not is_rolling:
            house.fakes[0].prepare_s = 30.0  # engine-1 is prepared long before it
        house.trainer.step()
        await asyncio.sleep(EXPORT_S + PREPARE_S + 0.5)
        back = house.start_again(1)
        await asyncio.sleep(60.0)
        assert house.served[0][0] == 1, "nothing was committed on it, which it would have refused"
        await back
        assert house.versions() == [1, 1]

    live(story, 2.0, 1.0, is_rolling=is_rolling)


@given(
    swaps_s=st.lists(st.floats(0.0, 3.0), min_size=1, max_size=4),
    gaps_s=st.lists(st.floats(0.0, 8.0), min_size=1, max_size=8),
    export_s=st.floats(0.0, 2.0),
    deaths=st.dictionaries(st.integers(0, 3), st.tuples(st.floats(0.0, 40.0), st.booleans()), max_size=3),
    is_rolling=st.booleans(),
)
def test_every_engine_that_lives_serves_the_newest_version_in_the_end_and_training_never_waits_for_a_push(
    swaps_s: list[float],
    gaps_s: list[float],
    export_s: float,
    deaths: dict[int, tuple[float, bool]],
    is_rolling: bool,
) -> None:
    async def story(house: House) -> None:
        clock = asyncio.get_running_loop().time
        for index, (at_s, is_frozen) in deaths.items():
            if index < len(house.fakes):
                fake = house.fakes[index]
                asyncio.get_running_loop().call_later(at_s, fake.freeze if is_frozen else fake.die)
        for version, gap_s in enumerate(gaps_s, start=1):
            await asyncio.sleep(gap_s)
            await house.trainer.train(Batch(version - 1, (), 0))
            asked = clock()
            await house.publisher.wait_exported_or_busy(version)
            assert clock() - asked <= export_s + 1e-6
        await asyncio.sleep(1000.0)

    house = live(story, *swaps_s, is_rolling=is_rolling, timeout_s=20, export_s=export_s, train_s=0.0)
    versions = [version for version, _ in house.served]
    assert versions == sorted(set(versions))
    assert versions[-1] == len(gaps_s), "the dead and the frozen stop nobody"
    stats = house.publisher.stats()
    assert stats.published + stats.skipped == len(gaps_s)
    assert set(house.lost) <= {f"engine-{index}" for index in deaths}
    for index, target in enumerate(house.targets):
        assert target.policy_version == len(gaps_s) or target.name in house.lost or index in deaths
