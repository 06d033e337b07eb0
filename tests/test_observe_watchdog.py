"""A run that stops moving says who waits for whom, and acts; one that is only slow never does."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from stuck_runs import WATCHDOG_S, House, play

from asyncrl.config import SupervisionConfig
from asyncrl.errors import RoomError
from asyncrl.observe.watchdog import ChildState, Reported, StuckClock, Watchdog


@pytest.fixture
def log_path(tmp_path: Path) -> Path:
    return tmp_path / "controller.log"


def lines_about(text: str, word: str) -> list[str]:
    return [line.strip() for line in text.splitlines() if word in line]


def hang_trainer(house: House) -> None:
    house.worker.hangs_at = 3


def hang_commit(house: House) -> None:
    house.servers[1].hung = ("/commit",)


def hang_engine(house: House) -> None:
    house.servers[1].hung = ("/generate",)


def hang_reward(house: House) -> None:
    house.reward = lambda: 0.0 if house.worker.policy_version < 2 else 1e8


def test_a_hung_trainer_is_named_with_its_batch_and_since_when(log_path: Path) -> None:
    house = play(log_path, 80, hang_trainer)
    [(told_s, text)] = house.told
    (line,) = lines_about(text, "train loop waits")
    assert "train loop waits in TrainerClient.train for the optimizer step of batch 3" in line
    assert line.endswith("to be woken by trainer-0")
    assert 60 <= told_s <= 75  # 3 steps of a second, what is left to generate, the watchdog's minute
    (producers,) = lines_about(text, "producers waits")
    assert (
        "Buffer.wait_open for leave to start a group (2 ready, 0 run, batch 4 is next, version 3 is served)"
        in producers
    )
    (publisher,) = lines_about(text, "publisher waits")
    assert "for a policy_version above 3" in publisher
    assert publisher.endswith("woken by the train loop")


def test_a_trainer_that_is_long_in_starting_is_no_reason_to_speak_up(log_path: Path) -> None:
    def prepare(house: House) -> None:
        house.trainer_process.start_s = 200.0
        asyncio.get_running_loop().call_later(10.0, house.worker.die)

    house = play(log_path, 240, prepare)
    assert house.told == []
    assert house.rooms.trainer.num_restarts == 1
    assert house.rooms.trainer.policy_version > 3


def test_a_restarted_trainer_that_hangs_in_the_batches_of_before_is_named(log_path: Path) -> None:
    def prepare(house: House) -> None:
        asyncio.get_running_loop().call_later(10.0, house.worker.die)
        asyncio.get_running_loop().call_later(11.0, lambda: setattr(house.worker, "hangs_at", 1))

    house = play(log_path, 100, prepare)
    [(told_s, text)] = house.told
    assert told_s >= 10.0 + 1.0 + 5.0 + WATCHDOG_S, "backoff and start, then the watchdog's minute"
    (line,) = lines_about(text, "catching up waits")
    assert "TrainerClient.recover for the journaled batches to be trained on again" in line
    assert line.endswith("woken by trainer-0")
    (line,) = lines_about(text, "train loop waits")
    assert "LivingTrainer.wait_up for the trainer to be back" in line


def test_a_hung_commit_is_named_with_its_engine_and_closed_admission_with_the_publishing(
    log_path: Path,
) -> None:
    house = play(log_path, 80, hang_commit)
    [(_, text)] = house.told
    (line,) = lines_about(text, "publisher waits")
    assert "for commit of policy_version 1, " in line
    assert line.endswith("woken by engine-1")
    assert "engine-0" not in text
    (line,) = lines_about(text, "train loop waits")
    assert "Buffer.wait_batch for publishing, for no group may start before a newer version is served" in line
    assert len(lines_about(text, "Buffer.wait_open")) == 1


def test_a_hung_engine_is_named_with_the_rollouts_that_wait_for_it_oldest_first(log_path: Path) -> None:
    house = play(log_path, 80, hang_engine)
    [(_, text)] = house.told
    (line,) = lines_about(text, "rollouts waits")
    assert "EnginePool._segment for completions" in line
    assert line.endswith("woken by engine-1")
    oldest = lines_about(text, "rollout g")
    assert len(oldest) == int(line.split()[0])
    assert "runs for 6" in oldest[0]
    assert "EnginePool._segment on engine-1" in oldest[0]
    assert "of 2 groups are ready" in text
    assert "; the oldest is group g" in text
    assert ", start_version 0" in text


def test_a_reward_that_never_returns_is_named(log_path: Path) -> None:
    house = play(log_path, 80, hang_reward)
    text = house.told[0][1]
    (line,) = lines_about(text, "rollouts waits")
    assert "TaskScorer.score for their rewards" in line
    assert line.endswith("woken by the reward function")
    assert all("in TaskScorer.score" in line for line in lines_about(text, "rollout g"))


def test_the_log_gets_the_report_and_the_stacks_of_all_tasks_and_threads(
    log_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.ERROR, "asyncrl.watchdog"):
        play(log_path, 80, hang_trainer)
    (record,) = caplog.records
    text = record.getMessage()
    assert "TrainerClient.train for the optimizer step" in text
    assert "task train loop: House._train (stuck_runs.py:" in text
    assert "> TrainerClient.train (trainer_client.py:" in text
    assert "FakeTrainerServer.post (fake_trainer.py:" in text
    assert "thread MainThread:" in text


def test_warn_speaks_again_after_twice_and_four_times_as_long(log_path: Path) -> None:
    house = play(log_path, 600, hang_trainer)
    times = [told_s for told_s, _ in house.told]
    start = times[0] - WATCHDOG_S
    assert [round((told_s - start) / WATCHDOG_S) for told_s in times] == [1, 2, 4, 8]
    assert house.notes[0][0] == "stuck"
    assert house.notes[0][1]["on_stuck"] == "warn"
    assert [wait["who"] for wait in house.notes[0][1]["waits"]] == ["train loop", "publisher", "producers"]


def test_restart_mends_a_hung_engine_and_the_run_goes_on(log_path: Path) -> None:
    house = play(log_path, 300, hang_commit, on_stuck="restart")
    assert len(house.restarted_s) == len(house.told) >= 1
    assert all(
        later - earlier >= WATCHDOG_S
        for earlier, later in zip(house.restarted_s, house.restarted_s[1:], strict=False)
    )


@pytest.mark.parametrize(
    ("starts", "told_at"), [(True, [6]), (False, [1, 2, 3, 4, 5, 6])], ids=["starts", "waits for room"]
)
def test_an_engine_that_is_being_started_again_is_given_its_time_and_one_that_is_only_down_is_not(
    log_path: Path, starts: bool, told_at: list[int]
) -> None:
    def prepare(house: House) -> None:
        hang_commit(house)
        house.rooms.engines.down_nowait("engine-1")
        supervisor = SimpleNamespace(is_starting=starts, num_restarts=1)
        house.rooms.supervisors = (supervisor,)
        asyncio.get_running_loop().call_later(5 * WATCHDOG_S, setattr, supervisor, "is_starting", False)

    house = play(log_path, 6.5 * WATCHDOG_S, prepare, on_stuck="restart")
    assert [round(told_s / WATCHDOG_S) for told_s, _ in house.told] == told_at


def test_fail_ends_the_run_with_the_child_that_gives_no_answer(log_path: Path) -> None:
    def prepare(house: House) -> None:
        hang_trainer(house)
        house.children = (
            ChildState(
                "trainer-0",
                "process 7 is stopped",
                "trainer-0 gave no answer to /health: too late",
                is_well=False,
            ),
            ChildState(
                "engine-0",
                "process 8 is sleeping",
                "answers: policy_version 3, 0 run, 0 queued",
                is_well=True,
            ),
        )

    with pytest.raises(ExceptionGroup) as caught:
        play(log_path, 300, prepare, on_stuck="fail")
    (error,) = caught.value.exceptions
    assert isinstance(error, RoomError)
    assert str(error) == (
        "watchdog: nothing has moved for 60 s: trainer-0: process 7 is stopped; trainer-0 gave no answer to "
        "/health: too late; supervision.watchdog_s=60 and on_stuck=fail end such a run.\n"
        "  Way out: look at it."
    )


def test_fail_names_who_waits_for_whom_if_all_children_are_well(log_path: Path) -> None:
    with pytest.raises(ExceptionGroup) as caught:
        play(log_path, 300, hang_reward, on_stuck="fail")
    assert "TaskScorer.score for their rewards" in str(caught.value.exceptions[0])


def test_a_run_that_moves_slower_than_most_but_moves_is_left_alone(log_path: Path) -> None:
    def prepare(house: House) -> None:
        house.worker.train_s = 0.95 * WATCHDOG_S
        house.reward = lambda: 0.9 * WATCHDOG_S

    house = play(log_path, 1800, prepare)
    assert house.told == []
    assert house.rooms.trainer.policy_version > 10


def test_progress_after_a_report_starts_the_count_again(log_path: Path) -> None:
    def prepare(house: House) -> None:
        house.worker.train_s = 3.2 * WATCHDOG_S

    house = play(log_path, 20 * WATCHDOG_S, prepare)
    seconds = [float(text.split("for ")[1].split(" s")[0]) for _, text in house.told]
    assert set(seconds) <= {60.0, 61.0, 120.0, 121.0}  # never four times as long: each step is progress
    assert len(seconds) >= 8


def test_a_run_that_is_done_waiting_for_nothing_has_words_for_its_oldest_wait(log_path: Path) -> None:
    house = play(log_path, 200, lambda house: None, num_steps=3)
    assert "nothing has moved" in house.told[0][1]  # whoever lets a run stand still that is done is told so


def test_a_loop_that_is_blocked_has_its_threads_written_down_all_the_same(log_path: Path) -> None:
    written = threading.Event()

    def look() -> None:
        deadline_s = time.monotonic() + 30
        while "in block" not in log_path.read_text() and time.monotonic() < deadline_s:
            pass  # the stacks are written without a lock: "Timeout (" is there before they are
        written.set()

    def block() -> None:  # at rest: the stack of a thread that runs may be caught while it changes
        written.wait()

    async def story() -> None:
        watchdog = Watchdog(
            SupervisionConfig(watchdog_s=0.5),
            lambda: Reported({}),
            log_path=log_path,
            tell=lambda text: None,
            way_out="",
            ask_children=no_children,
            restart=no_children,
        )
        running = asyncio.create_task(watchdog.run(), name="watchdog")
        await asyncio.sleep(0)  # it runs up to its own sleep
        looking = threading.Thread(target=look)
        looking.start()
        block()
        looking.join()
        running.cancel()

    async def no_children() -> tuple[ChildState, ...]:
        return ()

    asyncio.run(story())
    assert "in block" in log_path.read_text()


def test_time_in_which_the_process_itself_was_stopped_counts_for_nobody() -> None:
    clock = StuckClock(60.0, now_s=0.0)
    clock.look({"tokens": 1.0}, 10.0)
    clock.forgive(1000.0)  # asked to be woken at 70, was woken at 1070
    clock.look({"tokens": 1.0}, 1070.0)
    assert not clock.take_due(1069.0)
    assert clock.take_due(1070.0)
    assert clock.quiet_s(1070.0) == 60.0


@given(st.lists(st.tuples(st.floats(0.1, 50.0), st.booleans()), max_size=60))
def test_a_report_is_due_exactly_when_nothing_changed_for_long_enough(
    events: list[tuple[float, bool]],
) -> None:
    clock, now_s, moved_s, counter = StuckClock(30.0, now_s=0.0), 0.0, 0.0, 0
    clock.look({"c": 0.0}, 0.0)
    reports = 0
    for pause_s, moves in events:
        now_s += pause_s
        counter += moves
        clock.look({"c": float(counter)}, now_s)
        if moves:
            moved_s, reports = now_s, 0
        due = clock.take_due(now_s)
        expected = sum(now_s - moved_s >= 30.0 * factor for factor in (1, 2, 4, 8, 16, 32, 64, 128))
        assert due == (expected > reports)
        assert clock.quiet_s(now_s) == now_s - moved_s
        reports = max(reports, expected)
        assert clock.due_s > now_s
