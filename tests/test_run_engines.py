"""Engine servers that die, hang, leave and return, on the virtual clock; and the
command that scales them.
"""

from __future__ import annotations

import asyncio
import contextlib
import shlex
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from colocated_cases import (
    DECODE_S,
    START_S,
    EngineRooms,
    make_request,
    play,
    play_to_its_error,
)
from fake_engine import FakeEngineServer
from fakes import FakeTrainer
from hypothesis import given, settings
from hypothesis import strategies as st
from job_runs import write_config

from asyncrl.base.errors import ConfigError, EngineLost
from asyncrl.config import load_config
from asyncrl.config.supervision_config import SupervisionConfig
from asyncrl.engines.engine import EngineServer
from asyncrl.engines.pool import EnginePool
from asyncrl.job.colocate import Disaggregated
from asyncrl.job.live_settings import (
    WANTED_FILE,
    read_wanted,
    scale_run,
    write_wanted,
)
from asyncrl.job.resume import changed_keys
from asyncrl.messages.records import Completion
from asyncrl.messages.sampling import SamplingRequest


async def undisturbed(request: SamplingRequest) -> Completion:
    server = EngineServer(FakeEngineServer(decode_s=DECODE_S))
    completion = await EnginePool([server], slots=4).generate(request)
    server.disconnect_nowait()  # close the reader of its link
    return completion


Asked = list[tuple[SamplingRequest, int, asyncio.Task[Completion]]]
"""Requests, the version that was announced when each was made, and what becomes of it.
"""


async def all_continued(asked: Asked) -> None:
    """Each got the tokens of a server that nothing befalls, in order, and none older
    than announced.
    """
    for request, announced, task in asked:
        completion, expected = await task, await undisturbed(request)
        assert completion.token_ids == expected.token_ids
        assert completion.behaviour_logprobs == expected.behaviour_logprobs
        covered = [
            index
            for span in completion.sampled.spans
            for index in range(span.start, span.end)
        ]
        assert covered == list(range(len(completion.token_ids)))
        assert min(span.version for span in completion.sampled.spans) >= announced


class World(EngineRooms):
    """Engines and a trainer on separate devices: `start` engines work at first, the
    others are parked.
    """

    fakes: list[FakeEngineServer]

    def __init__(
        self,
        tasks: asyncio.TaskGroup,
        num_engines: int = 2,
        *,
        folder: Path = Path("none"),
        start: int | None = None,
        is_frozen: bool = True,
        prepare_s: float = 0.0,
        swap_s: float = 0.0,
        **supervision: Any,
    ) -> None:
        times = {"decode_s": DECODE_S, "prepare_s": prepare_s, "swap_s": swap_s}
        fakes = [
            FakeEngineServer(f"engine-{index}", **times) for index in range(num_engines)
        ]
        for fake in fakes[start or num_engines :]:
            fake.die()
        super().__init__(
            tasks,
            fakes,
            FakeTrainer(is_frozen=is_frozen),
            SupervisionConfig(**{"max_restarts": 3, "backoff_s": 1.0, **supervision}),
            partial(Disaggregated, num_steps=0, spawn=tasks.create_task),
            run_dir=folder,
            start=start,
        )
        self.announced = [0]
        self.folder = folder
        self.spawn(self.publisher.run(), name="publisher")
        if start is not None:
            self.spawn(self.scale.follow(), name="scale")

    @property
    def states(self) -> list[str]:
        down = self.pool.down
        states = [self.scale.states[fake.name] for fake in self.fakes]
        return [
            state if state != "working" else "down" if fake.name in down else "up"
            for fake, state in zip(self.fakes, states, strict=True)
        ]

    def happened(self) -> list[str]:
        return [
            f"{what.removeprefix('engine ')} {detail['name'][-1]}"
            for what, detail in self.events
        ]

    def num_restarts(self) -> int:
        return sum(one.num_restarts for one in self.supervisors.values())


live, fails = partial(play, World), partial(play_to_its_error, World)
THREE = {"num_engines": 3, "start": 1, "swap_s": 0.1, "backoff_s": 0.5}


def test_run_outlives_a_lost_node_while_an_engine_works() -> None:
    async def story(world: World) -> None:
        running = [
            world.ask(make_request(f"r{index}", max_tokens=3000, seed=index))
            for index in range(4)
        ]
        await asyncio.sleep(1.0)
        world.processes[1].child.is_node_gone = True
        world.fakes[1].die()
        await asyncio.sleep(600.0)
        assert [len((await task).token_ids) for task in running] == [3000] * 4
        starts = world.processes[1].started_at
        waits = [
            later - before for before, later in zip(starts, starts[1:], strict=False)
        ]
        assert waits == pytest.approx([5.0] * len(waits))
        assert len(waits) > 100
        gone = "engine-1: the node far (10.0.0.2) is gone: no answer for 15 s"
        then = (
            "restarting engine-1, once its node is back; the run continues without it"
        )
        assert world.told == [f"{gone}; {then}"]
        world.trainer.step()
        world.processes[1].child.is_node_gone = False
        await asyncio.sleep(5.0 + START_S + 1.0)
        assert world.pool.down == ()
        assert world.fakes[1].policy_version == 1
        world.processes[0].child.is_node_gone = world.processes[
            1
        ].child.is_node_gone = True
        world.fakes[1].die()
        await asyncio.sleep(60.0)
        world.fakes[0].die()
        await asyncio.sleep(620.0)

    error = str(fails(story, is_frozen=False))
    assert "the node far (10.0.0.2) is gone: no answer for 15 s" in error
    assert "a run waits 600 s for a node that it needs" in error


def test_node_lost_after_its_engine_is_reported_once() -> None:
    async def story(world: World) -> None:
        world.fakes[1].die()
        await asyncio.sleep(0.5)
        world.processes[1].child.is_node_gone = True
        await asyncio.sleep(60.0)
        world.processes[1].child.is_node_gone = False
        await asyncio.sleep(5.0 + START_S + 1.0)
        assert world.pool.down == ()
        first, second = world.told
        assert first.endswith("restarting engine-1, 1 of 3")
        assert second.endswith(
            "restarting engine-1, once its node is back; the run continues without it"
        )

    live(story)


def test_scaling_keeps_versions_and_requests(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        world.trainer.step()
        await asyncio.sleep(1.0)
        requests = [
            make_request(f"r{index}", max_tokens=2000, seed=index) for index in range(6)
        ]
        running = [world.ask(one) for one in requests[:4]]
        write_wanted(world.folder, 3)
        await asyncio.sleep(1.5)
        assert world.states == ["up", "starting", "starting"]
        assert world.pool.load["engine-0"] == 4
        await asyncio.sleep(START_S)
        assert world.states == ["up", "up", "up"]
        assert [fake.policy_version for fake in world.fakes] == [1, 1, 1]
        running += [world.ask(one) for one in requests[4:]]
        await asyncio.sleep(1.0)
        assert [fake.num_running for fake in world.fakes] == [4, 1, 1]
        write_wanted(world.folder, 1)
        await asyncio.sleep(1.5)
        assert world.states == ["up", "parked", "parked"]
        assert [fake.has_ended.is_set() for fake in world.fakes] == [False, True, True]
        for request, task in zip(requests, running, strict=True):
            completion = await task
            assert completion.token_ids == (await undisturbed(request)).token_ids
        for task in running[4:]:
            first, last = task.result().sampled.spans
            assert first.engine != last.engine == 0, "with their tokens"
        assert sum(fake.tokens_generated for fake in world.fakes) == 6 * 2000, (
            "and nothing is sampled twice"
        )
        assert sorted(world.happened()) == [
            "parked 1",
            "parked 2",
            "unparked 1",
            "unparked 2",
        ]
        assert (max(world.capacities), world.capacities[-1]) == (3, 1)
        assert (world.num_restarts(), world.told) == (0, [])
        assert world.scale.gauges() == {"engine/up": 1}

    live(story, folder=tmp_path, **THREE)


def test_new_engine_that_fails_to_start_ends_no_run(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        world.processes[1].fails_to_start = 99
        write_wanted(world.folder, 2)
        await asyncio.sleep(10 * START_S)
        assert world.states == ["up", "parked", "parked"]
        assert "the run continues with 1 of 2 engines" in world.lines[-1]
        assert read_wanted(world.folder, world.scale.range.numbers) == 1
        world.processes[1].fails_to_start = 1
        write_wanted(world.folder, 2)
        await asyncio.sleep(10 * START_S)
        assert world.states == ["up", "up", "parked"], (
            "asked for again, it is tried again"
        )
        world.processes[1].fails_to_start = 99
        world.fakes[1].die()
        await asyncio.sleep(1e4)

    error = fails(story, folder=tmp_path, **THREE, max_restarts=2)
    assert error.component == "engine-1", "an engine that has worked is needed"


MOVE = st.sampled_from(["die", "freeze", "step", "ask", "ask", "abort", "scale"])


@settings(max_examples=30, deadline=None)
@given(
    moves=st.lists(
        st.tuples(st.floats(0.0, 4.0), MOVE, st.integers(0, 2)), max_size=25
    ),
    prepare_s=st.sampled_from([0.0, 0.5, 3.0]),
    swap_s=st.sampled_from([0.0, 0.3]),
    num_engines=st.integers(1, 3),
    start=st.integers(1, 3),
)
def test_deaths_and_scaling_lose_or_double_no_token_and_serve_none_old(
    moves: list[tuple[float, str, int]],
    prepare_s: float,
    swap_s: float,
    num_engines: int,
    start: int,
) -> None:
    async def story(world: World) -> None:
        asked: Asked = []
        for number, (gap_s, what, where) in enumerate(moves):
            await asyncio.sleep(gap_s)
            fake = world.fakes[where % num_engines]
            if what == "scale":
                world.scale.wanted = where % num_engines + 1
            elif what in ("die", "freeze"):
                getattr(fake, what)()
            elif what == "step":
                world.trainer.step()
            elif what == "abort":
                with contextlib.suppress(EngineLost):
                    await world.targets[where % num_engines].abort(None, timeout_s=0.1)
            else:
                request = make_request(
                    f"r{number}", max_tokens=150 * (where + 1), seed=number
                )
                asked.append((request, world.announced[-1], world.ask(request)))
        await all_continued(asked)
        await asyncio.sleep(100.0 + 50.0 * len(moves))
        num = world.scale.wanted
        assert world.states == ["up"] * num + ["parked"] * (num_engines - num)
        assert [fake.has_ended.is_set() for fake in world.fakes] == [
            number >= num for number in range(num_engines)
        ]
        assert world.announced == sorted(set(world.announced))
        assert world.announced[-1] == world.trainer.policy_version
        assert {fake.policy_version for fake in world.fakes[:num]} == {
            world.announced[-1]
        }
        assert (sum(world.pool.load.values()), [num, *world.capacities][-1]) == (0, num)

    live(
        story,
        num_engines=num_engines,
        start=min(start, num_engines),
        max_restarts=1000,
        backoff_s=0.5,
        prepare_s=prepare_s,
        swap_s=swap_s,
    )


def test_run_resumes_with_the_wanted_number_if_it_is_valid(tmp_path: Path) -> None:
    limits = range(1, 4)
    assert read_wanted(tmp_path, limits) is None
    for text in ("4 engines", '{"engines": 9}', '{"engines": "2"}', "[1]"):
        (tmp_path / WANTED_FILE).write_text(text)
        assert read_wanted(tmp_path, limits) is None
    write_wanted(tmp_path, 2)
    assert read_wanted(tmp_path, limits) == 2


@pytest.mark.parametrize(
    ("asked", "num_engines", "says"),
    [
        ("engines=3", {"min": 1, "max": 4}, "asked for 3 engines"),
        ("engine=2", {"min": 1, "max": 4}, "'engine=2' is not engines=N"),
        ("engines=0", {"min": 1, "max": 4}, "'engines=0' is not"),
        ("engines=5", 2, "'rollout.num_engines={min: 1, max: 5}' --allow-change"),
    ],
)
def test_scale_command_asks_or_refuses(
    tmp_path: Path, asked: str, num_engines: Any, says: str
) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    saved = write_config(tmp_path, rollout={"num_engines": num_engines}).rename(
        folder / "config.yaml"
    )
    try:
        said = scale_run(folder, asked)
    except ConfigError as error:
        said = str(error)
    assert says in said
    assert (folder / WANTED_FILE).exists() == said.startswith("asked")
    if "--allow-change" in says:
        *_, override, _, allowed = shlex.split(said.split("`")[1])
        changed = changed_keys(load_config(saved), load_config(saved, [override]))
        assert list(changed) == [allowed], "its way out would be accepted"
