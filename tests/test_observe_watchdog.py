"""The watchdog reports and acts if a run stops moving, and not if it is slow."""

from __future__ import annotations

import asyncio
import logging
import re
import threading
import time
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from stuck_runs import WATCHDOG_S, House, play

from asyncrl.base.errors import RoomError
from asyncrl.config import SupervisionConfig
from asyncrl.observe.watchdog import Reported, Watchdog


@pytest.fixture
def log_path(tmp_path: Path) -> Path:
    return tmp_path / "controller.log"


def hang_trainer(house: House) -> None:
    house.worker.hangs_at = 3


def hang_engine(path: str, house: House) -> None:
    house.servers[1].hung = (path,)


hang_commit, hang_generate = partial(hang_engine, "/commit"), partial(hang_engine, "/link")


def hang_reward(house: House) -> None:
    house.reward = lambda: 0.0 if house.worker.policy_version < 2 else 1e8


def hang_restarted_trainer(house: House) -> None:
    asyncio.get_running_loop().call_later(10.0, house.worker.die)
    asyncio.get_running_loop().call_later(11.0, lambda: setattr(house.worker, "hangs_at", 1))


HANGS = {
    hang_trainer: r"""
train loop waits in TrainerClient.train for optimizer step 4.* by trainer-0
producers waits in Buffer.wait_open for admission of a group \(step 5: 2 of 2 groups are ready, 0 run
publisher waits .* for a policy_version above 3.* woken by the train loop""",
    hang_restarted_trainer: r"""
catching up waits in TrainerClient.catch_up for the journaled batches .* woken by trainer-0
train loop waits in \w+Trainer.wait_up for the trainer to be back""",
    hang_commit: r"""
publisher waits .* for commit of policy_version 1, .* woken by engine-1
train loop waits in Buffer.wait_batch for publishing \(step""",
    hang_generate: r"""
\d rollouts waits in EnginePool.\w+ for completions.* woken by engine-1
rollout g\d+/r\d runs for 6\d s, in EnginePool.\w+ on engine-1
of 2 groups are ready""",
    hang_reward: r"""
rollouts waits in TaskScorer.score for their rewards.* woken by the reward function
rollout g\d+/r\d runs for \d+ s, in TaskScorer.score""",
}


@pytest.mark.parametrize(
    ("hang", "lines"), HANGS.items(), ids=["trainer", "restarted trainer", "commit", "engine", "reward"]
)
def test_a_report_names_what_hangs_and_who_waits(
    log_path: Path, hang: Callable[[House], None], lines: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.ERROR, "asyncrl.watchdog"):
        house = play(log_path, 100, hang)
    told_s, text = house.told[0]
    assert WATCHDOG_S <= told_s <= WATCHDOG_S + 20  # the remaining work, then the watchdog's minute
    for line in lines.split("\n")[1:]:
        assert re.search(line, text), text
    logged = next(record.getMessage() for record in caplog.records if record.name == "asyncrl.watchdog")
    assert logged.startswith(text)
    assert "task train loop: House._train (stuck_runs.py:" in logged, "and the stacks of all tasks"
    assert "thread MainThread:" in logged


def test_warnings_repeat_after_doubled_times(log_path: Path) -> None:
    house = play(log_path, 600, hang_trainer)
    times = [told_s for told_s, _ in house.told]
    start = times[0] - WATCHDOG_S
    assert [round((told_s - start) / WATCHDOG_S) for told_s in times] == [1, 2, 4, 8]
    what, details = house.notes[0]
    assert (what, details["on_stuck"]) == ("stuck", "warn")
    waiting = [text.partition(" waits in ")[0] for text in details["waits"]]
    assert waiting == ["train loop", "publisher", "producers"]


def test_restart_replaces_a_hung_engine(log_path: Path) -> None:
    house = play(log_path, 300, hang_commit, on_stuck="restart")
    assert len(house.restarted_s) == len(house.told) >= 1
    assert all(later - earlier >= WATCHDOG_S for earlier, later in pairwise(house.restarted_s))


@pytest.mark.parametrize(
    ("starts", "told_at"), [(True, [6]), (False, [1, 2, 3, 4, 5, 6])], ids=["starts", "waits for room"]
)
def test_only_a_starting_engine_is_given_time(log_path: Path, starts: bool, told_at: list[int]) -> None:
    def prepare(house: House) -> None:
        hang_commit(house)
        house.rooms.engines.down_nowait("engine-1")
        supervisor = SimpleNamespace(is_starting=starts, num_restarts=1)
        house.rooms.fleet.supervisors["engine-0"] = supervisor
        asyncio.get_running_loop().call_later(5 * WATCHDOG_S, setattr, supervisor, "is_starting", False)

    house = play(log_path, 6.5 * WATCHDOG_S, prepare, on_stuck="restart")
    assert [round(told_s / WATCHDOG_S) for told_s, _ in house.told] == told_at


@pytest.mark.parametrize("is_well", [True, False])
def test_fail_ends_the_run_naming_who_is_stuck(log_path: Path, is_well: bool) -> None:
    def prepare(house: House) -> None:
        hang_trainer(house)
        house.children = {"trainer-0: process 7 is stopped; no answer": is_well}

    with pytest.raises(ExceptionGroup) as caught:
        play(log_path, 300, prepare, on_stuck="fail")
    (error,) = caught.value.exceptions
    assert isinstance(error, RoomError)
    blamed = "train loop waits in TrainerClient.train" if is_well else "trainer-0: process 7 is stopped; no"
    assert f"watchdog: nothing has moved for 60 s: {blamed}" in str(error)
    assert "supervision.watchdog_s=60 and on_stuck=fail end such a run" in str(error)


def test_a_blocked_loop_gets_its_thread_stacks_logged(log_path: Path) -> None:
    written = threading.Event()

    def look() -> None:
        deadline_s = time.monotonic() + 30
        while "in block" not in log_path.read_text() and time.monotonic() < deadline_s:
            pass  # faulthandler writes without a lock, line by line
        written.set()

    def block() -> None:  # at rest: the stack of a thread that runs may be caught while it changes
        written.wait()

    async def story() -> None:
        calls: Any = {"tell": lambda text: None, "ask_children": None, "restart": None, "note": None}
        settings = SupervisionConfig(watchdog_s=0.5)
        watchdog = Watchdog(settings, lambda: Reported({}), log_path=log_path, way_out="", **calls)
        running = asyncio.create_task(watchdog.run(), name="watchdog")
        await asyncio.sleep(0)  # it runs up to its own sleep
        looking = threading.Thread(target=look)
        looking.start()
        block()
        looking.join()
        running.cancel()

    asyncio.run(story())
    assert "in block" in log_path.read_text()


def test_time_of_a_stopped_process_is_not_counted(log_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now_s, told = [0.0], list[str]()
    late_s = iter([1000.0])

    async def sleep(seconds: float) -> None:
        now_s[0] += seconds + next(late_s)

    async def no_children() -> dict[str, bool]:
        return {}

    async def story() -> None:
        calls: Any = {"ask_children": no_children, "restart": None, "note": lambda what, detail: None}
        settings = SupervisionConfig(watchdog_s=60.0)
        watchdog = Watchdog(settings, lambda: Reported({}), log_path, told.append, way_out="", **calls)
        watchdog._now = lambda: now_s[0]
        watchdog._moved()
        monkeypatch.setattr("asyncrl.observe.watchdog.asyncio.sleep", sleep)
        with pytest.raises(RuntimeError, match="StopIteration"):
            await watchdog.run()

    asyncio.run(story())
    assert [text.partition("\n")[0] for text in told] == ["nothing has moved for 60 s"]
