"""Each batch is in the weights exactly once, on the virtual clock."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from fake_server import FakeChild, FakeProcess, FakeTrainerServer
from hypothesis import given, settings
from hypothesis import strategies as st
from restored_cases import batch_at, weights_of

from asyncrl.base.errors import ComponentError, TrainerError, TrainerLost
from asyncrl.config.supervision_config import SupervisionConfig
from asyncrl.job.trainer_recovery import SupervisedTrainer
from asyncrl.launch.supervise import FirstStart, Server, Supervision, summary_of
from asyncrl.messages.records import Batch
from asyncrl.messages.trainer_api import TrainerHealth, TrainResponse
from asyncrl.testing.virtual_time import run_virtual
from asyncrl.trainer.trainer_client import LOST_STATUS, TrainerClient

START_S, TRAIN_S, HEARTBEAT_S = 5.0, 1.0, 3.0


class World:
    """A SupervisedTrainer over fake ranks, a journal that is a list, and at most one
    saved state.
    """

    def __init__(
        self,
        tasks: asyncio.TaskGroup,
        num_ranks: int = 1,
        *,
        state_at: int = 0,
        timeout_s: Any = None,
        **supervision: Any,
    ) -> None:
        self.tasks = tasks
        others = [FakeTrainerServer(f"trainer-{rank}") for rank in range(1, num_ranks)]
        self.server = FakeTrainerServer(train_s=TRAIN_S, peers=others)
        self.ranks = [
            FakeProcess(server, start_s=START_S) for server in (self.server, *others)
        ]
        self.journal: list[Batch] = []
        self.state_at, self.state = state_at, Path("states/one")
        self.num_ended = 0
        self.told: list[str] = []
        self.trainer = SupervisedTrainer(
            self.ranks,
            Supervision(
                SupervisionConfig(
                    **{"max_restarts": 3, "backoff_s": 1.0, **supervision}
                ),
                HEARTBEAT_S,
                self.told.append,
                lambda *_: None,
            ),
            bring_back=self.bring_back,
            timeout_s=timeout_s,
        )
        self.running = tasks.create_task(self.trainer.run(), name="watch trainer")

    async def bring_back(self, client: TrainerClient, version: int) -> None:
        is_there = str(self.state) in self.server.states
        batches = self.load(self.state_at if is_there else 0, version)
        await client.catch_up(
            self.state if is_there else None, batches, lambda *_: None
        )

    async def load(self, start: int, stop: int) -> AsyncIterator[Batch]:
        for batch in self.journal[start:stop]:
            yield batch

    async def write(self, batch: Batch, durable_s: float) -> None:
        await asyncio.sleep(durable_s)
        self.journal.append(batch)

    async def steps(
        self, number: int, durable_s: float = 0.0, num_ahead: int = 0
    ) -> None:
        """The train loop: write a batch down within `durable_s`, then train on it, while
        up to `num_ahead` steps before it run.
        """
        answers = deque[asyncio.Task[TrainResponse]]()
        for _ in range(number):
            batch = batch_at(len(self.journal))
            body = await self.trainer.pack(batch)
            await self.write(batch, durable_s)
            step = self.trainer.step(batch.version, body)
            answers.append(asyncio.ensure_future(step))
            if len(answers) > num_ahead:
                await self.ended(await answers.popleft())
        for answer in answers:
            await self.ended(await answer)

    async def ended(self, report: TrainResponse) -> None:
        self.num_ended += 1
        assert report.policy_version == self.num_ended
        if self.num_ended == self.state_at:
            self.server.states[str(self.state)] = weights_of(self.state_at)

    def go(self, number: int, *how: Any) -> asyncio.Task[None]:
        return self.tasks.create_task(self.steps(number, *how), name="train loop")

    def check(self) -> None:
        """Check that every written batch is in the weights, once and in order."""
        assert self.server.weights == weights_of(len(self.journal))


def live(story: Callable[[World], Any], **knobs: Any) -> World:
    async def play() -> World:
        async with asyncio.TaskGroup() as tasks:
            world = World(tasks, **knobs)
            await story(world)
            world.running.cancel()
        return world

    return run_virtual(play())


@pytest.mark.parametrize(("died_s", "num_caught_up"), [(2.0, 2), (23.5, 1)])
def test_step_begins_once_its_batch_is_durable(
    died_s: float, num_caught_up: int
) -> None:
    """The trainer dies before, and has caught up by then or must be waited for."""

    async def story(world: World) -> None:
        await world.steps(2)
        world.server.calls.clear()
        running = world.go(1, 30.0)
        await asyncio.sleep(died_s)
        world.server.die()
        await asyncio.sleep(29.9 - died_s)
        assert world.server.calls == ["/train"] * num_caught_up
        assert len(world.journal) == 2
        await running
        world.check()
        assert (world.trainer.policy_version, world.trainer.num_restarts) == (3, 1)

    live(story)


@pytest.mark.parametrize(("state_at", "moment_s"), [(0, 2.5), (2, 5.0)])
def test_trainer_that_dies_while_catching_up_starts_over(
    moment_s: float, state_at: int
) -> None:
    async def story(world: World) -> None:
        world.journal = [batch_at(version) for version in range(5)]
        told: list[int] = []
        if state_at:
            world.server.states[str(world.state)] = weights_of(state_at)
        asyncio.get_running_loop().call_later(moment_s, world.server.die)
        await world.trainer.recover(
            world.state if state_at else None,
            lambda: world.load(state_at, 5),
            lambda batch, report: told.append(report.policy_version),
        )
        assert told == list(range(state_at + 1, 6))
        world.num_ended = 5
        await world.steps(1)
        world.check()
        assert (world.trainer.policy_version, world.trainer.num_restarts) == (6, 1)

    live(story, state_at=state_at)


def test_processes_that_always_die_at_start_end_the_run_soon() -> None:
    process = FakeProcess(FakeTrainerServer())
    process.fails_to_start, process.child.returncode = 99, -9
    supervision = Supervision(
        SupervisionConfig(max_restarts=99), HEARTBEAT_S, print, lambda *_: None
    )

    async def start() -> None:
        await FirstStart([process], supervision).run()

    with pytest.raises(ComponentError, match="3 starts in a row have failed"):
        run_virtual(start())
    assert len(process.started_at) == 3


def test_tries_without_a_node_are_no_failed_starts() -> None:
    async def story(world: World) -> None:
        (process,) = world.ranks
        process.child.is_node_gone = True
        world.server.die()
        await asyncio.sleep(16.0)
        assert len(process.started_at) == 3
        process.child.is_node_gone = False
        process.fails_to_start = 1
        await world.steps(1)
        world.check()

    live(story)


def test_process_without_a_first_answer_is_late() -> None:
    async def story() -> None:
        fake = FakeTrainerServer()
        fake.freeze()
        ask = partial(fake.get, "/health", TrainerHealth)
        server = Server(FakeChild(fake), fake, ask, start_s=5.0)
        with pytest.raises(
            ComponentError, match="did not start: .*no answer within 5.0 s"
        ):
            await server.come_up()

    run_virtual(story())


def test_step_that_does_not_end_restarts_the_trainer() -> None:
    async def story(world: World) -> None:
        world.server.train_s = 1e6
        asyncio.get_running_loop().call_later(
            60.0, setattr, world.server, "train_s", TRAIN_S
        )
        await world.steps(1)
        world.check()
        assert 60.0 < asyncio.get_running_loop().time() < 120.0

    live(story, timeout_s=50.0)


def test_restarts_are_forgotten_after_long_work(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("asyncrl.launch.supervise.RESTART_WINDOW_S", 120.0)

    async def story(world: World) -> None:
        for gap_s in [60.0] * 8 + [20.0] * 4:
            world.server.die()
            gaps_s.append(gap_s)
            await asyncio.sleep(gap_s)

    gaps_s: list[float] = []

    with pytest.raises(ExceptionGroup) as caught:
        live(story)
    assert "max_restarts=3 is used up within 120 s of work" in str(
        caught.value.exceptions[0]
    )
    assert gaps_s.count(60.0) == 8, "it ends for the deaths that follow each other"


def test_rank_that_has_lost_the_others_is_a_loss() -> None:
    async def story(world: World) -> None:
        world.server.refuse["/train"] = "rank 0 has lost the other ranks"
        world.server.refuse_status = LOST_STATUS
        await world.steps(2)
        world.check()
        assert (world.trainer.num_restarts, world.trainer.policy_version) == (1, 2)

    world = live(story, num_ranks=2)
    assert "rank 0 has lost the other ranks" in world.told[0]


def test_refused_batch_is_no_loss() -> None:
    async def story(world: World) -> None:
        world.server.refuse["/train"] = "it has no tokens"
        with pytest.raises(
            TrainerError, match=r"(?s)/train was refused \(409\): it has no.*log"
        ) as caught:
            await world.steps(1)
        assert not isinstance(caught.value, TrainerLost)
        assert (world.trainer.is_up, world.trainer.num_restarts) == (True, 0)

    live(story, num_ranks=2)


def test_checkpoints_hear_of_a_loss() -> None:
    async def story(world: World) -> None:
        trainer = world.trainer
        await world.steps(2)
        world.server.dies_at = "/begin_save_state"
        with pytest.raises(TrainerLost):
            await trainer.begin_save_state(Path("s"))
        await world.steps(1)
        assert await trainer.begin_save_state(Path("s")) == 3
        asyncio.get_running_loop().call_later(1.0, world.server.die)
        with pytest.raises(TrainerLost):
            await trainer.wait_save_state()
        world.server.calls.clear()
        await asyncio.sleep(2 * trainer.config.backoff_s + START_S + 1.5)
        assert world.server.policy_version == 1, "it answers, with another version"
        for call in (trainer.begin_save_state(Path("s")), trainer.wait_save_state()):
            with pytest.raises(TrainerLost, match="is restarting"):
                await call
        assert "/begin_save_state" not in world.server.calls

    live(story)


# ---- everything at once

Move = tuple[float, str, int]
KINDS = st.sampled_from(["die", "freeze", "die after", "export", "part"])
MOVES = st.lists(st.tuples(st.floats(0.0, 12.0), KINDS, st.integers(0, 1)), max_size=12)


@settings(max_examples=80, deadline=None)
@given(
    moves=MOVES,
    num_ranks=st.integers(1, 2),
    state_at=st.integers(0, 4),
    reap_s=st.sampled_from([0.0, 0.3]),
    durable_s=st.sampled_from([0.0, 0.5, 3.0, 20.0]),
    num_ahead=st.integers(0, 1),
)
def test_each_batch_is_in_the_weights_once(
    moves: list[Move],
    num_ranks: int,
    state_at: int,
    reap_s: float,
    durable_s: float,
    num_ahead: int,
) -> None:
    async def story(world: World) -> None:
        for rank in world.ranks:
            rank.child.reap_s = reap_s
        running, exports = world.go(8, durable_s, num_ahead), []
        parts = list[asyncio.Task[None]]()
        for gap_s, what, where in moves:
            await asyncio.sleep(gap_s)
            assert len(world.server.weights) <= len(world.journal)
            if what == "export":
                export = world.tasks.create_task(world.trainer.export())
                exports.append((world.trainer.policy_version, export))
            elif what == "part":
                part = batch_at(world.trainer.policy_version + where)
                sending = world.trainer.add_part(part)
                parts.append(asyncio.ensure_future(sending))
            elif what == "die after":
                world.server.dies_after = "/train_next" if num_ahead else "/train"
            else:
                getattr(world.ranks[where % num_ranks].server, what)()
        await running
        for version, export in exports:
            assert (await export).version >= version
        assert (await world.trainer.export()).version == 8, "the last loss is repaired"
        world.check()
        assert world.trainer.policy_version == 8
        # A part that is lost or too late ends with an error, and costs no restart.
        for error in await asyncio.gather(*parts, return_exceptions=True):
            assert error is None or isinstance(error, TrainerError)
        assert world.trainer.num_restarts <= sum(
            what not in ("export", "part") for _, what, _ in moves
        )

    live(story, num_ranks=num_ranks, state_at=state_at, max_restarts=100, backoff_s=0.0)


def test_an_error_that_a_process_declares_is_shown_with_its_way_out() -> None:
    declared = ComponentError("w", "task.answer is not given", way_out="set x=true.")
    died = ComponentError(
        "w", "exited with code 1; the end of its log:\n  x", way_out="y."
    )
    assert summary_of(declared) == "w: task.answer is not given (way out: set x=true)"
    assert summary_of(died) == "w: exited with code 1"
