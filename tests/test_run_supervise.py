"""Engine servers that die, hang and return, on the virtual clock."""

from __future__ import annotations

import asyncio
import contextlib
from functools import partial
from typing import Any

import pytest
from fake_engine import FakeEngineServer
from fakes import FakeTrainer
from hypothesis import given, settings
from hypothesis import strategies as st
from turn_cases import DECODE_S, START_S, EngineRooms, make_request, play, play_to_its_error

from asyncrl.base.errors import EngineLost
from asyncrl.config import SupervisionConfig
from asyncrl.engines.engine import EngineServer
from asyncrl.engines.pool import EnginePool
from asyncrl.job.colocate import Disaggregated
from asyncrl.messages.records import Completion, SamplingRequest
from asyncrl.testing.virtual_time import stand_still


async def undisturbed(request: SamplingRequest) -> Completion:
    server = EngineServer(FakeEngineServer(decode_s=DECODE_S))
    completion = await EnginePool([server], slots=4).generate(request)
    server.disconnect_nowait()  # close the reader of its link
    return completion


Asked = list[tuple[SamplingRequest, int, asyncio.Task[Completion]]]
"""Requests, the version that was announced when each was made, and what becomes of it."""


async def all_continued(asked: Asked) -> None:
    """Each got the tokens of a server that nothing befalls, in order, and none older than announced."""
    for request, announced, task in asked:
        completion, expected = await task, await undisturbed(request)
        assert completion.token_ids == expected.token_ids
        assert completion.behaviour_logprobs == expected.behaviour_logprobs
        covered = [index for span in completion.version_spans for index in range(span.start, span.end)]
        assert covered == list(range(len(completion.token_ids)))
        assert min(span.version for span in completion.version_spans) >= announced


class House(EngineRooms):
    """Engines and a trainer on separate devices."""

    fakes: list[FakeEngineServer]

    def __init__(
        self,
        tasks: asyncio.TaskGroup,
        num_engines: int = 2,
        *,
        is_frozen: bool = True,
        prepare_s: float = 0.0,
        swap_s: float = 0.0,
        timeout_s: float = 60.0,
        **supervision: Any,
    ) -> None:
        times = {"decode_s": DECODE_S, "prepare_s": prepare_s, "swap_s": swap_s}
        super().__init__(
            tasks,
            [FakeEngineServer(f"engine-{index}", **times) for index in range(num_engines)],
            FakeTrainer(is_frozen=is_frozen),
            SupervisionConfig(**{"max_restarts": 3, "backoff_s": 1.0, **supervision}),
            lambda: Disaggregated(self.publisher, num_steps=0, spawn=tasks.create_task),
            timeout_s=timeout_s,
        )
        self.announced = [0]
        self.running.append(tasks.create_task(self.publisher.run(), name="publisher"))


live, fails = partial(play, House), partial(play_to_its_error, House)


def test_waits_between_restarts_double_and_end_at_30_s() -> None:
    async def story(house: House) -> None:
        house.processes[0].fails_to_start = 6
        house.fakes[0].die()
        await asyncio.sleep(1000.0)
        starts = house.processes[0].started_at
        waits = [later - before - START_S for before, later in zip(starts, starts[1:], strict=False)]
        assert starts[0] == 2.0
        assert waits == [4.0, 8.0, 16.0, 30.0, 30.0, 30.0]
        assert house.supervisors["engine-0"].num_restarts == 7

    live(story, max_restarts=7, backoff_s=2.0)


def test_restart_counts_until_its_window_has_passed(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story(house: House) -> None:
        for _ in range(5):
            await asyncio.sleep(110.0)
            house.fakes[1].die()
        await asyncio.sleep(30.0)
        assert house.supervisors["engine-1"].num_restarts == 5
        assert house.told[-1].endswith("restarting engine-1, 1 of 2")
        for _ in range(2):
            house.fakes[1].die()
            await asyncio.sleep(45.0)

    monkeypatch.setattr("asyncrl.launch.supervise.RESTART_WINDOW_S", 100.0)
    said = "max_restarts=2 is used up within 100 s of work"
    assert said in str(fails(story, max_restarts=2))


def test_run_outlives_a_lost_node_while_an_engine_works() -> None:
    async def story(house: House) -> None:
        running = [house.ask(make_request(f"r{index}", max_tokens=3000, seed=index)) for index in range(4)]
        await asyncio.sleep(1.0)
        house.processes[1].is_node_gone = True
        house.fakes[1].die()
        await asyncio.sleep(600.0)
        assert [len((await task).token_ids) for task in running] == [3000] * 4
        starts = house.processes[1].started_at
        waits = [later - before for before, later in zip(starts, starts[1:], strict=False)]
        assert waits == pytest.approx([5.0] * len(waits))
        assert len(waits) > 100
        gone = "engine-1: the node far (10.0.0.2) is gone: no answer for 15 s"
        then = "restarting engine-1, once its node is back; the run continues without it"
        assert house.told == [f"{gone}; {then}"]
        house.trainer.step()
        house.processes[1].is_node_gone = False
        await asyncio.sleep(5.0 + START_S + 1.0)
        assert house.pool.down == ()
        assert house.fakes[1].policy_version == 1
        house.processes[0].is_node_gone = house.processes[1].is_node_gone = True
        house.fakes[1].die()
        await asyncio.sleep(60.0)
        house.fakes[0].die()
        await asyncio.sleep(600.0)

    error = str(fails(story, is_frozen=False))
    assert "the node far (10.0.0.2) is gone: no answer for 15 s" in error
    assert "supervision.max_restarts=3 is used up" in error


MOVE = st.sampled_from(["die", "freeze", "step", "ask", "ask", "abort"])


@settings(max_examples=100, deadline=None)
@given(
    moves=st.lists(st.tuples(st.floats(0.0, 4.0), MOVE, st.integers(0, 2)), max_size=25),
    prepare_s=st.sampled_from([0.0, 0.5, 3.0]),
    swap_s=st.sampled_from([0.0, 0.3]),
    num_engines=st.integers(1, 3),
)
def test_deaths_lose_or_double_no_token_and_serve_none_old(
    moves: list[tuple[float, str, int]], prepare_s: float, swap_s: float, num_engines: int
) -> None:
    async def story(house: House) -> None:
        asked: Asked = []
        for number, (gap_s, what, where) in enumerate(moves):
            await asyncio.sleep(gap_s)
            fake = house.fakes[where % num_engines]
            if what in ("die", "freeze"):
                getattr(fake, what)()
            elif what == "step":
                house.trainer.step()
            elif what == "abort":
                with contextlib.suppress(EngineLost):
                    await house.targets[where % num_engines].abort(None, timeout_s=0.1)
            else:
                request = make_request(f"r{number}", max_tokens=150 * (where + 1), seed=number)
                asked.append((request, house.announced[-1], house.ask(request)))
        await all_continued(asked)
        await asyncio.sleep(100.0 + 50.0 * len(moves))
        assert house.announced == sorted(set(house.announced))
        assert house.announced[-1] == house.trainer.policy_version
        assert {fake.policy_version for fake in house.fakes} == {house.announced[-1]}
        assert (sum(house.pool.load.values()), house.pool.down) == (0, ())

    live(story, num_engines=num_engines, max_restarts=1000, backoff_s=0.5, prepare_s=prepare_s, swap_s=swap_s)


@pytest.mark.parametrize("begins_s", [0.5, 3.5, 4.5], ids=["in prepare", "at its end", "in commit"])
def test_controller_stopped_in_a_push_serves_its_newest_version(begins_s: float) -> None:
    async def story(house: House) -> None:
        house.trainer.step()
        await asyncio.sleep(begins_s)
        stand_still(1000.0)
        await asyncio.sleep(60.0)
        house.trainer.step()
        await asyncio.sleep(60.0)
        assert {fake.policy_version for fake in house.fakes} == {2}

    assert live(story, prepare_s=4.0, swap_s=1.0, timeout_s=5.0).announced == [0, 1, 2]
