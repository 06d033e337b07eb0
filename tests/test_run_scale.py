"""Another number of engines in a running job: engines that leave and come, on the virtual clock; and the
command that asks for them.
"""

from __future__ import annotations

import asyncio
import shlex
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from fake_engine import FakeEngineServer
from fakes import FakeTrainer
from hypothesis import given, settings
from hypothesis import strategies as st
from job_runs import write_config
from test_run_supervise import MOVE, Asked, all_continued, undisturbed
from turn_cases import DECODE_S, START_S, EngineRooms, make_request, play, play_to_its_error

from asyncrl.base.errors import ConfigError, PublishError
from asyncrl.base.files import RunLock
from asyncrl.config import SupervisionConfig, load_config
from asyncrl.config.generation import EngineRange
from asyncrl.engines.engine import EngineServer
from asyncrl.job.colocate import Disaggregated
from asyncrl.job.lifecycle import RunLog
from asyncrl.job.resume import changed_keys
from asyncrl.job.scale import (
    WANTED_FILE,
    EngineScale,
    ScaledEngine,
    first_wanted,
    read_wanted,
    scale_run,
    write_wanted,
)
from asyncrl.job.supervisors import EngineSupervisor
from asyncrl.launch.supervise import Supervision
from asyncrl.observe.run_dir import Recorder


def make_config(folder: Path, num_engines: Any, **rollout: Any) -> Any:
    return load_config(write_config(folder, rollout={"num_engines": num_engines, **rollout}))


class House(EngineRooms):
    """Engines on devices of their own: `start` work at first, the others are parked."""

    fakes: list[FakeEngineServer]

    def __init__(
        self,
        tasks: asyncio.TaskGroup,
        folder: Path,
        num_engines: int = 3,
        *,
        start: int = 1,
        is_frozen: bool = True,
        prepare_s: float = 0.0,
        max_restarts: int = 3,
    ) -> None:
        fakes = [
            FakeEngineServer(f"engine-{index}", decode_s=DECODE_S, prepare_s=prepare_s, swap_s=0.1)
            for index in range(num_engines)
        ]
        for fake in fakes[start:]:
            fake.die()
        self.folder, self.start, self.lines = folder, start, list[str]()
        self.capacities = [start]
        self.supervision = SupervisionConfig(max_restarts=max_restarts, backoff_s=0.5)
        super().__init__(
            tasks,
            fakes,
            FakeTrainer(is_frozen=is_frozen),
            self.supervision,
            lambda: Disaggregated(self.publisher, num_steps=0, spawn=tasks.create_task),
        )
        self.announced = [0]
        self.running.append(tasks.create_task(self.publisher.run(), name="publisher"))
        self.running.append(tasks.create_task(self.scale.follow(), name="scale"))

    def supervisor(self, process: Any, target: EngineServer, supervision: Supervision) -> EngineSupervisor:
        if not hasattr(self, "scale"):
            limits = {"min": 1, "max": len(self.fakes)}
            config, change = make_config(self.folder, limits), self.capacities.append
            self.scale = EngineScale(
                config,
                self.folder,
                self.pool,
                RunLog(self.lines.append),
                on_change=change,
                num_first=self.start,
            )
        return ScaledEngine(process, target, self.scale, self.turns, supervision)

    @property
    def states(self) -> list[str]:
        down = self.pool.down
        return [
            self.scale.state_of(fake.name) or ("down" if fake.name in down else "up") for fake in self.fakes
        ]

    def happened(self) -> list[str]:
        return [f"{what.removeprefix('engine ')} {detail['name'][-1]}" for what, detail in self.events]

    def num_restarts(self) -> int:
        return sum(one.num_restarts for one in self.supervisors.values())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("run")


@pytest.fixture
def live(folder: Path) -> Any:
    (folder / WANTED_FILE).unlink(missing_ok=True)
    return partial(play, House, folder=folder)


@pytest.mark.parametrize("is_streamed", [False, True])
def test_scaling_keeps_versions_and_requests(live: Any, is_streamed: bool) -> None:
    async def story(house: House) -> None:
        house.trainer.step()
        await asyncio.sleep(1.0)
        requests = [make_request(f"r{index}", max_tokens=2000, seed=index) for index in range(6)]
        told = (lambda _: None) if is_streamed else None
        running = [house.tasks.create_task(house.pool.generate(one, on_tokens=told)) for one in requests]
        write_wanted(house.folder, 3)
        await asyncio.sleep(1.5)
        assert house.states == ["up", "starting", "starting"]
        assert house.pool.load["engine-0"] == 6
        await asyncio.sleep(START_S)
        assert house.states == ["up", "up", "up"]
        assert [fake.policy_version for fake in house.fakes] == [1, 1, 1]
        assert [fake.num_running for fake in house.fakes] == [4, 2, 0], "what had queued has moved"
        write_wanted(house.folder, 1)
        await asyncio.sleep(1.5)
        assert house.states == ["up", "parked", "parked"]
        assert [fake.has_ended.is_set() for fake in house.fakes] == [False, True, True]
        for request, task in zip(requests, running, strict=True):
            completion = await task
            assert completion.token_ids == (await undisturbed(request)).token_ids
        moved = [task.result() for task in running[4:]]
        assert all([span.engine for span in one.version_spans] == [1, 0] for one in moved), (
            "with their tokens"
        )
        assert sum(fake.tokens_generated for fake in house.fakes) == 6 * 2000, "and nothing is sampled twice"
        assert house.happened() == ["unparked 1", "unparked 2", "parked 2", "parked 1"]
        assert house.capacities == [1, 2, 3, 2, 1]
        assert (house.num_restarts(), house.told) == (0, [])
        assert house.scale.gauges() == {"engine/up": 1}

    live(story)


@pytest.mark.parametrize("max_restarts", [0, 2])
def test_new_engine_that_fails_to_start_ends_no_run(live: Any, max_restarts: int) -> None:
    async def story(house: House) -> None:
        house.processes[1].fails_to_start = 99
        write_wanted(house.folder, 2)
        await asyncio.sleep(10 * START_S)
        assert house.states == ["up", "parked", "parked"]
        assert "the run continues with 1 of 2 engines" in house.lines[-1]
        assert read_wanted(house.folder, house.scale.range) == 1
        house.processes[1].fails_to_start = max(0, max_restarts - 1)
        write_wanted(house.folder, 2)
        await asyncio.sleep(10 * START_S)
        assert house.states == ["up", "up", "parked"], "asked for again, it is tried again"
        house.processes[1].fails_to_start = 99
        house.fakes[1].die()
        await asyncio.sleep(1e4)

    (error,) = [play_to_its_error(House, story, folder=live.keywords["folder"], max_restarts=max_restarts)]
    assert error.room == "engine-1", "one that has worked is needed"


def test_corrupt_weights_at_a_new_engine_end_the_run(live: Any) -> None:
    async def story(house: House) -> None:
        house.trainer.step()
        await asyncio.sleep(1.0)
        house.fakes[1].corrupt_digest = True
        house.scale.set_nowait(2)
        await asyncio.sleep(20.0)

    error = play_to_its_error(House, story, folder=live.keywords["folder"])
    assert isinstance(error, PublishError)


@settings(max_examples=60, deadline=None)
@given(
    moves=st.lists(
        st.tuples(st.floats(0.0, 4.0), st.one_of(st.just("scale"), MOVE), st.integers(0, 2)), max_size=25
    ),
    prepare_s=st.sampled_from([0.0, 0.5, 3.0]),
    start=st.integers(1, 3),
)
def test_scaling_and_deaths_lose_or_double_no_token(
    folder: Path, moves: list[tuple[float, str, int]], prepare_s: float, start: int
) -> None:
    (folder / WANTED_FILE).unlink(missing_ok=True)

    async def story(house: House) -> None:
        asked: Asked = []
        for number, (gap_s, what, where) in enumerate(moves):
            await asyncio.sleep(gap_s)
            fake = house.fakes[where]
            if what == "scale":
                house.scale.set_nowait(where + 1)
            elif what in ("die", "freeze"):
                getattr(fake, what)()
            elif what == "step":
                house.trainer.step()
            elif what == "ask":
                request = make_request(f"r{number}", max_tokens=150 * (where + 1), seed=number)
                asked.append((request, house.announced[-1], house.ask(request)))
        await all_continued(asked)
        await asyncio.sleep(100.0 + 50.0 * len(moves))
        num = house.scale.wanted
        assert house.states == ["up"] * num + ["parked"] * (3 - num)
        assert [fake.has_ended.is_set() for fake in house.fakes] == [False] * num + [True] * (3 - num)
        assert house.announced == sorted(set(house.announced))
        assert house.announced[-1] == house.trainer.policy_version
        assert {fake.policy_version for fake in house.fakes[:num]} == {house.announced[-1]}
        assert (sum(house.pool.load.values()), house.capacities[-1]) == (0, num)

    play(House, story, folder=folder, start=start, prepare_s=prepare_s, max_restarts=1000)


# ---- what is asked for


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("4 engines", "has no number of engines"),
        ("[4]", "has no number of engines"),
        ('{"engines": 9}', "engines=9 is outside rollout.num_engines={min: 1, max: 3}"),
        ('{"engines": true}', "engines=True is outside"),
    ],
)
def test_invalid_wanted_file_is_reported_once(live: Any, text: str, says: str) -> None:
    async def story(house: House) -> None:
        (house.folder / WANTED_FILE).write_text(text)
        await asyncio.sleep(10.0)
        assert [says in line for line in house.lines] == [True]
        assert house.states == ["up", "parked", "parked"]

    live(story)


class Ran:
    """A run directory with its lock held."""

    def __init__(self, folder: Path, num_engines: Any = None) -> None:
        self.folder = folder / "run"
        (self.folder / "logs").mkdir(parents=True)
        config = write_config(folder, rollout={"num_engines": num_engines or {"min": 1, "max": 4}})
        (self.folder / "config.yaml").write_text(config.read_text())
        self.recorder = Recorder(self.folder)

    def write(self, wanted: int | None, *engines: str, state: str = "running") -> None:
        named = {f"engine-{number}": words for number, words in enumerate(engines)}
        self.recorder.write_status({"state": state, "engines": named, "engines_wanted": wanted})

    def scale(self, asked: str) -> str:
        lock = RunLock(self.folder / "run.lock").acquire()
        try:
            return scale_run(self.folder, asked)
        finally:
            lock.release()


V3 = "policy_version 3"


@pytest.mark.parametrize(
    ("asked", "num_engines", "state", "says"),
    [
        ("engine=2", None, "running", "'engine=2' is not a number of engines.\n  Way out: write engines=4"),
        ("engines=two", None, "running", "'engines=two' is not a number of engines"),
        ("engines=5", None, "running", "engines=5 is outside rollout.num_engines={min: 1, max: 4}"),
        ("engines=0", None, "running", "engines=0 is outside"),
        ("engines=5", 2, "running", "'rollout.num_engines={min: 1, max: 5}' --allow-change"),
        ("engines=2", None, "done", "no run is active in"),
        ("engines=2", None, "interrupted", "then scale it"),
    ],
)
def test_scale_command_refuses_invalid_requests(
    tmp_path: Path, asked: str, num_engines: Any, state: str, says: str
) -> None:
    ran = Ran(tmp_path, num_engines)
    if num_engines is None:
        ran.write(1, V3)
        assert "asked for 3 engines" in ran.scale("engines=3")
        assert read_wanted(ran.folder, EngineRange(max=4)) == 3
        (ran.folder / WANTED_FILE).unlink()
    ran.write(1, V3, state=state)
    with pytest.raises(ConfigError) as caught:
        ran.scale(asked)
    assert says in str(caught.value)
    assert not (ran.folder / WANTED_FILE).exists()
    if "--allow-change" in says:
        *_, override, _, allowed = shlex.split(str(caught.value).split("`")[1])
        saved = ran.folder / "config.yaml"
        changed = changed_keys(load_config(saved), load_config(saved, [override]))
        assert list(changed) == [allowed], "what it says to write would be accepted"
    with pytest.raises(ConfigError, match="is not a run directory"):
        scale_run(tmp_path / "nowhere", "engines=2")


@pytest.mark.parametrize(
    ("limits", "wanted", "num"),
    [({"min": 1, "max": 4}, None, 1), ({"min": 1, "max": 4}, 4, 4), (2, 4, 2), ({"min": 1, "max": 3}, 4, 1)],
)
def test_resumed_run_begins_with_the_wanted_number(
    tmp_path: Path, limits: Any, wanted: int | None, num: int
) -> None:
    if wanted is not None:
        write_wanted(tmp_path, wanted)
    assert first_wanted(make_config(tmp_path, limits), tmp_path) == num
