"""Pushes to engines on separate devices, in two phases."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, nullcontext
from typing import Any
from unittest.mock import AsyncMock

import pytest
from fake_engine import FakeEngineServer
from fakes import FakeTrainer
from hypothesis import example, given
from hypothesis import strategies as st
from rollout_cases import virtual

from asyncrl.base.errors import EngineLost, PublishError, WeightsLost
from asyncrl.base.http import Refused
from asyncrl.engines.engine import EngineServer
from asyncrl.messages.engine_api import (
    ChunkMemory,
    CommitResponse,
    MemoryHandle,
    PrepareRequest,
)
from asyncrl.messages.records import Batch
from asyncrl.messages.trainer_api import ExportResponse
from asyncrl.sync.push import PushLoop

EXPORT_S, PREPARE_S = 1.0, 2.0


class Sync:
    """A publisher over a fake trainer and fake engines. A lost engine is reported and
    not restarted.
    """

    def __init__(
        self,
        tasks: asyncio.TaskGroup,
        swaps_s: Sequence[float],
        *,
        export_s: float = EXPORT_S,
        train_s: float = 1.0,
        make_trainer: Callable[..., FakeTrainer] = FakeTrainer,
        **knobs: Any,
    ) -> None:
        self.trainer = make_trainer(train_s=train_s, export_s=export_s)
        self.fakes = [
            FakeEngineServer(f"engine-{index}", prepare_s=PREPARE_S, swap_s=swap_s)
            for index, swap_s in enumerate(swaps_s)
        ]
        self.targets = [EngineServer(fake) for fake in self.fakes]
        self.served: list[tuple[int, float]] = []
        self.lost: list[str] = []
        knobs = {
            "timeout_s": 60,
            "on_served": self._on_served,
            "on_lost": self.on_lost,
        } | knobs
        self.publisher = PushLoop(self.trainer, self.targets, **knobs)
        self.running = tasks.create_task(self.publisher.run(), name="publisher")

    def on_lost(self, lost: EngineLost) -> None:
        if not lost.is_told:
            self.lost.append(lost.component)
        self.publisher.down_nowait(lost.component)
        next(
            target for target in self.targets if target.name == lost.component
        ).disconnect_nowait()

    def versions(self) -> list[int]:
        return [target.policy_version for target in self.targets]

    def start_again(self, index: int) -> asyncio.Future[None]:
        """Another process, with nothing staged, which is being brought up."""
        self.on_lost(EngineLost(f"engine-{index}", "was killed"))
        self.fakes[index].restart()
        self.targets[index].reset_nowait()
        return asyncio.ensure_future(self.publisher.bring_up(f"engine-{index}"))

    def _on_served(self, version: int) -> None:
        live = [fake for fake in self.fakes if fake.name not in self.lost]
        assert all(fake.policy_version == version for fake in live), (
            "announced only when every engine serves"
        )
        self.served.append((version, asyncio.get_running_loop().time()))


@asynccontextmanager
async def publishing(*swaps_s: float, **knobs: Any) -> AsyncIterator[Sync]:
    async with asyncio.TaskGroup() as tasks:
        sync = Sync(tasks, swaps_s, **knobs)
        yield sync
        sync.running.cancel()


async def failure(begin: Callable[[Sync], None], *swaps_s: float, **knobs: Any) -> str:
    """Return what the publisher of a first version ended with; nothing was announced."""
    with pytest.raises(ExceptionGroup) as caught:  # noqa: PT012  the block fails as it sleeps
        async with publishing(*swaps_s, **knobs) as sync:
            sync.trainer.step()
            begin(sync)
            await asyncio.sleep(1000.0)
    (error,) = caught.value.exceptions
    assert isinstance(error, PublishError)
    assert sync.served == []
    return str(error)


@virtual
async def test_no_engine_gets_a_step_before_its_report() -> None:
    class Ahead(FakeTrainer):
        """Has trained version 2, and reports it after 30 s."""

        async def begin_export(self, above: int) -> int:
            await self.wait_version_above(above)
            self._begun = 2
            return 2

    async with publishing(0.5, make_trainer=Ahead) as sync:
        sync.trainer.step()
        await asyncio.sleep(30.0)
        assert (sync.versions(), sync.served) == ([0], [])
        sync.trainer.step()
        await asyncio.sleep(30.0)
        assert (sync.versions(), sync.publisher.num_skipped) == ([2], 1)


@virtual
async def test_other_digest_is_an_error_before_any_swap() -> None:
    def corrupt(sync: Sync) -> None:
        sync.fakes[1].corrupt_digest = True

    says = "engine-1 loaded policy_version 1 with digest corrupt, the trainer sent w1; 1 was not announced"
    error = await failure(corrupt, 0.5, 1.0)
    assert says in error


@virtual
async def test_other_weights_after_a_swap_stop_the_publish() -> None:
    stale = CommitResponse(version=1, digest="stale", pause_s=0.0, num_interrupted=0)

    def serve_stale(sync: Sync) -> None:
        sync.targets[1].commit = AsyncMock(return_value=stale)  # type: ignore[method-assign]

    error = await failure(serve_stale, 1.0, 1.0, 1.0)
    assert (
        "engine-1 serves policy_version 1 with digest stale of version 1, the trainer sent w1"
        in error
    )


@virtual
async def test_engines_read_weights_of_their_own_node() -> None:
    async def locate(engine: str, sent: Any) -> Any:
        if engine == "engine-1":
            raise EngineLost(engine, "its node gets no weights")
        return sent.model_copy(update={"path": f"on the node of {engine}"})

    async with publishing(0.5, 0.5, locate=locate) as sync:
        prepare = AsyncMock(wraps=sync.targets[0].prepare)
        sync.targets[0].prepare = prepare  # type: ignore[method-assign]
        sync.trainer.step()
        await asyncio.sleep(EXPORT_S + PREPARE_S + 2.0)
        assert (sync.lost, sync.versions()) == (["engine-1"], [1, 0])
        assert prepare.await_args is not None
        assert prepare.await_args.args[0].path == "on the node of engine-0"
        with pytest.raises(EngineLost, match="gets no weights"):
            await sync.start_again(1)


@pytest.mark.parametrize("num_losses", [1, 2])
@virtual
async def test_lost_weights_are_exported_again_once(num_losses: int) -> None:
    gone = WeightsLost("engine-0", "no node has them")
    losses = [gone] * num_losses

    async def locate(engine: str, sent: Any) -> Any:
        if engine == "engine-0" and losses:
            raise losses.pop()
        return sent

    with pytest.raises(ExceptionGroup) if num_losses > 1 else nullcontext() as caught:
        async with publishing(0.5, 0.5, locate=locate) as sync:
            for _ in range(3):
                sync.trainer.step()
            await asyncio.sleep(2 * (EXPORT_S + PREPARE_S) + 5.0)
            assert (sync.lost, sync.versions()) == ([], [3, 3])
            assert [version for version, _ in sync.served] == [3]
            assert sync.publisher.num_skipped == 2
    assert caught is None or caught.value.exceptions == (gone,)


class FilesTrainer(FakeTrainer):
    """Keeps the files of its two newest exports."""

    kept: tuple[str, ...] = ()

    async def export(self) -> ExportResponse:
        answer = await super().export()
        older = [path for path in self.kept if path != answer.path]
        self.kept = (*older[-1:], answer.path)
        return answer


@virtual
async def test_new_engine_after_lost_weights_waits_for_the_next_version() -> None:
    async def locate(engine: str, sent: Any) -> Any:
        if engine == "engine-0" and sent.version == 2:
            raise WeightsLost(engine, "no node has them")
        return sent

    async with publishing(0.5, 0.5, locate=locate, make_trainer=FilesTrainer) as sync:
        trainer = sync.trainer
        assert isinstance(trainer, FilesTrainer)

        def read(request: PrepareRequest) -> dict[str, bytes]:
            if request.path not in trainer.kept:
                raise Refused(400, f"{request.path} is missing")
            return {}

        trainer.step()
        await asyncio.sleep(10.0)
        trainer.step()
        await asyncio.sleep(EXPORT_S + PREPARE_S / 2)
        trainer.step()
        # Version 2 is lost when all engines have prepared it; version 3 is exported.
        await asyncio.sleep(PREPARE_S / 2 + EXPORT_S / 2)
        up = sync.start_again(1)
        sync.fakes[1].engine.weights.read = read  # type: ignore[method-assign]
        await up
        await asyncio.sleep(20.0)
        assert sync.versions() == [3, 3]


@virtual
async def test_export_limit_leaves_out_restarts() -> None:
    async with publishing(0.5, timeout_s=5) as sync:
        sync.trainer.is_up = False
        sync.trainer.step()
        await asyncio.sleep(100.0)
        assert sync.served == []
        sync.trainer.is_up = True
        sync.trainer.went_up.set()
        await asyncio.sleep(20.0)
        assert [version for version, _ in sync.served] == [1]
    error = await failure(lambda _: None, 1.0, export_s=1000.0, timeout_s=5)
    assert "the trainer did not export policy_version 1 within 5 s" in error


@given(
    swaps_s=st.lists(st.floats(0.0, 3.0), min_size=1, max_size=4),
    gaps_s=st.lists(st.floats(0.0, 8.0), min_size=1, max_size=8),
    export_s=st.floats(0.0, 2.0),
    deaths=st.dictionaries(
        st.integers(0, 3), st.tuples(st.floats(0.0, 40.0), st.booleans()), max_size=3
    ),
)
@virtual
async def test_living_engines_serve_the_newest_version_and_training_never_waits(
    swaps_s: list[float],
    gaps_s: list[float],
    export_s: float,
    deaths: dict[int, tuple[float, bool]],
) -> None:
    loop = asyncio.get_running_loop()
    async with publishing(
        *swaps_s, timeout_s=20, export_s=export_s, train_s=0.0
    ) as sync:
        for index, (at_s, is_frozen) in deaths.items():
            if index < len(sync.fakes):
                fake = sync.fakes[index]
                loop.call_later(at_s, fake.freeze if is_frozen else fake.die)
        for version, gap_s in enumerate(gaps_s, start=1):
            await asyncio.sleep(gap_s)
            await sync.trainer.train(Batch(version - 1, (), 0))
            asked_s = loop.time()
            await sync.publisher.wait_exported_or_busy(version)
            assert loop.time() - asked_s <= 1e-6, "nor for a copy"
        await asyncio.sleep(1000.0)
    versions = [version for version, _ in sync.served]
    assert versions == sorted(set(versions))
    assert versions[-1] == len(gaps_s), "the dead and the frozen stop nobody"
    assert len(versions) + sync.publisher.num_skipped == len(gaps_s)
    assert set(sync.lost) <= {f"engine-{index}" for index in deaths}
    for index, target in enumerate(sync.targets):
        assert (
            target.policy_version == len(gaps_s)
            or target.name in sync.lost
            or index in deaths
        )


# ---- weights in the trainer's memory


class SharingTrainer(FakeTrainer):
    """Holds one version in memory that is lost with its process. Training again gives
    other bits.
    """

    held: tuple[int, int] | None = None
    """(restarts, version)."""

    async def export(self) -> ExportResponse:
        while True:
            await self.wait_up()
            number = self.num_restarts
            self.held = None
            answer = await super().export()
            if self.is_up and self.num_restarts == number:
                break
        self.held = number, answer.version
        memory = ChunkMemory(
            handles=[MemoryHandle(kind="file", name=str(number), num_bytes=1)],
            tensors=[],
        )
        digest = f"{answer.digest} of trainer {number}"
        return answer.model_copy(
            update={"path": "", "is_held": True, "memory": memory, "digest": digest}
        )

    def die(self) -> None:
        self.is_up, self.held = False, None

    def restart(self) -> None:
        self.num_restarts += 1
        self.is_up = True
        self.went_up.set()
        self.went_up = asyncio.Event()


class SharedSync(Sync):
    """A publisher of weights in memory. `num_unread`: times that an engine did not find
    them there.
    """

    def __init__(self, *given: Any, **knobs: Any) -> None:
        super().__init__(*given, make_trainer=SharingTrainer, is_held=True, **knobs)
        self.num_unread = 0
        for fake in self.fakes:
            self._opens_memory(fake)

    def on_lost(self, lost: EngineLost) -> None:
        if not lost.is_told:  # else its successor may already be starting
            super().on_lost(lost)

    def start_again(self, index: int) -> asyncio.Future[None]:
        up = super().start_again(index)
        self._opens_memory(self.fakes[index])
        return up

    def _opens_memory(self, fake: FakeEngineServer) -> None:
        def read(request: PrepareRequest) -> dict[str, bytes]:
            assert isinstance(self.trainer, SharingTrainer)
            assert request.memory is not None
            if (
                int(request.memory.handles[0].name),
                request.version,
            ) != self.trainer.held:
                self.num_unread += 1
                raise Refused(409, "these weights are not there")
            return {}

        fake.engine.weights.read = read  # type: ignore[method-assign]


@given(
    gaps_s=st.lists(st.floats(0.0, 6.0), min_size=1, max_size=6),
    deaths_s=st.lists(st.tuples(st.floats(0.0, 10.0), st.floats(0.0, 4.0)), max_size=3),
    restarts=st.lists(st.tuples(st.floats(0.0, 10.0), st.integers(0, 1)), max_size=3),
)
@example(gaps_s=[0.0, 6.0], deaths_s=[(5.0, 1.0), (6.0, 0.0)], restarts=[(2.0, 0)])
@example(gaps_s=[0.0], deaths_s=[(5.0, 4.0)], restarts=[(2.0, 1)])
@virtual
async def test_engines_read_whole_weights_from_a_living_trainer(
    gaps_s: list[float],
    deaths_s: list[tuple[float, float]],
    restarts: list[tuple[float, int]],
) -> None:
    async with asyncio.TaskGroup() as tasks:
        sync = SharedSync(tasks, [0.5, 1.0])
        trainer = sync.trainer
        assert isinstance(trainer, SharingTrainer)
        num_losses = 0

        async def lose_trainer() -> None:
            nonlocal num_losses
            for after_s, down_s in deaths_s:
                await asyncio.sleep(after_s)
                trainer.die()
                num_losses += 1
                await asyncio.sleep(down_s)
                trainer.restart()

        async def lose_engines() -> None:
            for after_s, index in restarts:
                await asyncio.sleep(after_s)
                for _ in range(1 + 2 * len(deaths_s)):
                    try:
                        await sync.start_again(index)
                        break
                    except EngineLost:
                        assert num_losses > 0, "only a lost trainer loses weights"
                else:
                    raise AssertionError("more losses than deaths of the trainer")

        helpers = [tasks.create_task(lose_trainer()), tasks.create_task(lose_engines())]
        for version, gap_s in enumerate(gaps_s, start=1):
            await asyncio.sleep(gap_s)
            await trainer.train(Batch(version - 1, (), 0))
        await asyncio.gather(*helpers)
        await asyncio.sleep(1000.0)
        sync.running.cancel()
    assert sync.versions() == [len(gaps_s)] * 2
    assert sync.num_unread == 0 or num_losses > 0


@asynccontextmanager
async def bringing_up_version_2() -> AsyncIterator[tuple[SharedSync, Any]]:
    """Two engines serve version 1, whose trainer was lost. The bring-up of engine-1
    finds version 2, which run() wants to push too.
    """
    async with asyncio.TaskGroup() as tasks:
        sync = SharedSync(tasks, [0.5, 0.5])
        trainer = sync.trainer
        assert isinstance(trainer, SharingTrainer)
        trainer.step()
        await asyncio.sleep(10.0)
        trainer.die()
        trainer.restart()
        up = sync.start_again(1)
        await asyncio.sleep(EXPORT_S / 2)
        trainer.step()
        yield sync, up
        sync.running.cancel()


@virtual
async def test_cancelled_bring_up_leaves_no_version_some_engines() -> None:
    async with bringing_up_version_2() as (sync, up):
        trainer = sync.trainer
        assert isinstance(trainer, SharingTrainer)
        await asyncio.sleep(EXPORT_S)
        assert sync.versions() == [1, 0], "engine-1 waits for the push to both"
        up.cancel()
        # A new trainer makes version 2 again, with other bits.
        trainer.die()
        trainer.restart()
        await asyncio.sleep(20.0)
        assert up.cancelled()
        assert [version for version, _ in sync.served] == [1, 2]
        assert sync.publisher.is_down("engine-1")
        trainer.step()
        await asyncio.sleep(20.0)
        assert [version for version, _ in sync.served] == [1, 2, 3]
        assert sync.versions() == [3, 0]


@virtual
async def test_train_loop_waits_for_the_export_after_a_bring_up() -> None:
    async with bringing_up_version_2() as (sync, up):
        await up
        assert sync.versions() == [2, 2]
        await asyncio.sleep(20.0)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(5.0):
                await sync.publisher.wait_exported_or_busy(3)
