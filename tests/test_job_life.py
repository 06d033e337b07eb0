"""How a run starts, ends and is interrupted, with fakes in place of its processes."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import signal
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fakes import MemoryJournal
from job_runs import write_config
from journal_cases import RUN_ID, admit, with_journal
from rollout_cases import virtual

from asyncrl.config import RunConfig, load_config, run_config_yaml
from asyncrl.errors import ConfigError, EngineError, RoomError
from asyncrl.job import loop as job
from asyncrl.job.colocate import SideBySide
from asyncrl.job.life import close_within
from asyncrl.job.loop import Job
from asyncrl.job.report import Reporter
from asyncrl.job.resume import ResumePoint
from asyncrl.job.start import end_server
from asyncrl.journal.journal import Journal
from asyncrl.messages.calls import TrainResponse
from asyncrl.messages.records import Batch
from asyncrl.testing.virtual_time import all_blocked
from asyncrl.trainer.model_folder import MODEL_PIN

REPORTED = ("start", "status_server", "close_console", "training_starts", "status", "step", "evaluated")


def make_config(tmp_path: Path, **sections: Any) -> RunConfig:
    return load_config(write_config(tmp_path, **{"observe": {"console": "none"}, **sections}))


def make_job(tmp_path: Path, *, point: ResumePoint | None = None, **sections: Any) -> Job:
    return Job(make_config(tmp_path, **sections), tmp_path, "test", point, None, num_first=1)  # type: ignore[arg-type]


def make_reporter(tmp_path: Path, *, num_steps: int = 0, console: str = "none") -> Reporter:
    """One whose run has reported so many steps of 100 s."""
    lines = (
        {"step": step + 1, "time_s": 100.0 * step + 100, "reward/mean": 0.5} for step in range(num_steps)
    )
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return Reporter(make_config(tmp_path, observe={"console": console}), tmp_path, "test")


async def for_ever(*_: object) -> None:
    await asyncio.Event().wait()


async def nothing(*_: object) -> None:
    pass


def ignore(*_: object, **__: object) -> None:
    pass


def raising(error: Exception) -> Callable[..., Awaitable[Any]]:
    async def fail(*_: Any, **__: Any) -> None:
        raise error

    return fail


class FakeTrainer:
    """A save, and a step, end once they may. `run` ends when it dies, and says so."""

    def __init__(self) -> None:
        self.policy_version = 0
        self.may_save, self.may_step, self.has_died = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self.saved: list[Path] = []
        self.trained: list[int] = []

    async def run(self) -> None:
        await self.has_died.wait()
        raise RoomError("trainer-0", "was killed")

    async def save(self, path: Path) -> None:
        self.saved.append(path)
        await self.may_save.wait()

    async def train(self, batch: Batch) -> TrainResponse:
        await self.may_step.wait()
        self.policy_version += 1
        self.trained.append(batch.version)
        return TrainResponse(policy_version=self.policy_version, metrics={})


class House:
    """A job of three steps whose rooms are small fakes: batches are given, a step waits to be let go. `last`:
    versions of its last checkpoints.
    """

    def __init__(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.job = make_job(tmp_path, trainer={"num_steps": 3})
        silent: Any = SimpleNamespace(**dict.fromkeys(REPORTED, ignore), counted_before_publish=lambda *_: {})
        self.job.reporter, self.job.tell, self.job.warn = silent, print, print  # type: ignore[assignment]
        self.trainer, self.journal = FakeTrainer(), MemoryJournal()
        self.batches = asyncio.Queue[Batch]()
        self.after_step, self.last = list[int](), list[int]()
        room = SimpleNamespace(run=for_ever, aclose=nothing, guard=for_ever, wait_last=for_ever)
        self.publisher = SimpleNamespace(run=for_ever, start_before_nowait=ignore)
        self.publisher.wait_exported_or_busy = self.publisher.wait_announced = nothing
        self.rooms = SimpleNamespace(
            servers=(),
            trainer=self.trainer,
            producers=room,
            turns=SideBySide(self.publisher, num_steps=3, spawn=self.job.spawn),  # type: ignore[arg-type]
            journal=self.journal,
            supervisors=(),
            supervisors_beside=(),
            scale=SimpleNamespace(is_fixed=True),
            feed=SimpleNamespace(order={}),
            buffer=SimpleNamespace(wait_batch=self.batches.get),
            checkpointer=SimpleNamespace(after_step=self.step_done, make_last=self.make_last),
            evaluation=None,
            eval_server=None,
            harnessing=None,
            teaching=None,
            special_tokens=None,
            write_pins=ignore,
        )
        watchdog = SimpleNamespace(run=for_ever, look=ignore)
        monkeypatch.setattr(job, "open_parts", self.open_parts)
        monkeypatch.setattr(job.Job, "_make_watchdog", lambda *_: watchdog)
        monkeypatch.setattr(job, "heartbeat", ignore)
        monkeypatch.setattr(job, "batch_metrics", lambda *_: {})  # of batches that have no groups

    async def open_parts(self, *_: Any, **__: Any) -> Any:
        return self.rooms

    async def step_done(self, version: int) -> None:
        self.after_step.append(version)

    async def make_last(self, version: int) -> None:
        self.last.append(version)

    async def begin(self, num_batches: int = 0) -> None:
        """Until all waits, with so many batches given."""
        self.living = asyncio.create_task(self.job._live())
        self.give_batches(num_batches)
        await all_blocked()

    def give_batches(self, num_batches: int) -> None:
        for _ in range(num_batches):
            self.batches.put_nowait(Batch(self.trainer.policy_version, (), 0))

    def interrupt(self) -> None:
        self.job._on_signal(signal.SIGINT, self.living)

    @property
    def names(self) -> set[str]:
        """Of the tasks that run."""
        return {task.get_name() for task in self.job._tasks}


@pytest.fixture
def house(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> House:
    return House(tmp_path, monkeypatch)


@virtual
async def test_a_trainer_that_dies_while_it_saves_ends_the_run_once_it_is_given_up(house: House) -> None:
    house.trainer.policy_version = 3
    await house.begin()
    assert len(house.trainer.saved) == 1
    assert "watch trainer" in house.names
    house.trainer.has_died.set()
    with pytest.raises(BaseExceptionGroup) as caught:
        await house.living
    assert [str(error) for error in caught.value.exceptions] == ["trainer-0: was killed."]
    assert house.last == [3], "a resume saves, and has nothing to train again"


@virtual
async def test_a_run_that_is_done_makes_a_checkpoint_then_saves_its_weights(house: House) -> None:
    house.trainer.policy_version = 2
    house.trainer.may_step.set()
    await house.begin(num_batches=1)
    assert (house.trainer.saved, house.last) == ([house.job.run_dir / "final"], [3])
    assert "producers" not in house.names
    house.trainer.may_save.set()
    await house.living
    assert (house.after_step, house.last) == ([3], [3])
    assert [event[0] for event in house.journal.events] == ["order", "batch_taken", "trained"]


@virtual
async def test_an_interrupt_during_the_last_evaluation_ends_the_run_with_all_saved(house: House) -> None:
    house.trainer.policy_version = 3
    house.rooms.evaluation = house.rooms.producers
    house.rooms.eval_server = SimpleNamespace(name="engine-eval", child=SimpleNamespace(watch=ignore))
    house.trainer.may_save.set()
    await house.begin()
    assert (len(house.trainer.saved), house.last) == (1, [3]), "safe before the last evaluation"
    assert house.names >= {"publisher", "evaluation"}, "it needs both"
    assert "producers" not in house.names
    house.interrupt()
    with pytest.raises(asyncio.CancelledError):
        await house.living


@virtual
async def test_a_signal_lets_the_step_in_hand_end_and_makes_a_checkpoint_not_final(house: House) -> None:
    await house.begin(num_batches=2)
    house.interrupt()
    await all_blocked()
    assert not house.living.done(), "the step was begun: it ends"
    house.trainer.may_step.set()
    await house.living
    assert (house.trainer.trained, house.after_step, house.last) == ([0], [1], [1])
    assert (house.trainer.saved, house.batches.qsize()) == ([], 1), "the next batch was not touched"


@pytest.mark.parametrize("num_batches", [0, 1])
@virtual
async def test_a_signal_ends_the_wait_for_a_batch_and_loses_none_that_comes_with_it(
    house: House, num_batches: int
) -> None:
    house.trainer.may_step.set()
    await house.begin()
    house.give_batches(num_batches)
    house.interrupt()
    await house.living
    assert len(house.trainer.trained) + house.batches.qsize() == num_batches
    assert (house.last, house.trainer.saved) == ([len(house.trainer.trained)], [])


@virtual
async def test_a_signal_before_training_ends_the_run_at_once(house: House) -> None:
    house.trainer.policy_version = 1
    house.publisher.wait_announced = for_ever  # a resumed run brings its weights to the engines first
    await house.begin()
    house.interrupt()
    with pytest.raises(asyncio.CancelledError):
        await house.living
    assert house.last == []


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (RoomError("trainer-0", "cannot start"), "cannot start"),
        (OverflowError("too large"), r"internal error OverflowError: too large(.|\n)*controller.log"),
        (None, ""),
    ],
)
def test_a_resume_that_ends_before_it_could_go_on_leaves_what_the_run_had_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception | None, said: str
) -> None:
    make_reporter(tmp_path, num_steps=9)
    (tmp_path / "summary.json").write_text('{"state": "done", "num_steps": 9}')
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}

    async def interrupted(*_: Any, **__: Any) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        await for_ever()

    monkeypatch.setattr(job, "open_parts", raising(error) if error else interrupted)
    resuming = make_job(tmp_path, point=ResumePoint(None, ("checkpoint step_9 is damaged",)))
    if error:
        with pytest.raises(RoomError, match=said):
            asyncio.run(resuming.run())
    else:
        assert asyncio.run(resuming.run()) == 130
    assert {path: path.read_bytes() for path in before} == before
    state = json.loads((tmp_path / "status.json").read_text())["state"]
    assert state == ("failed" if error else "interrupted")
    assert resuming.reporter._warnings == ["checkpoint step_9 is damaged"]


# ---- what is closed, and what blocks


@virtual
async def test_closing_goes_on_to_its_end_when_the_run_is_cancelled_meanwhile() -> None:
    closed = []

    async def close() -> None:
        await asyncio.sleep(3)
        closed.append("engine-0")

    closing = asyncio.create_task(close_within(5, "engine-0", close))
    await all_blocked()
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
    assert closed == ["engine-0"]


def test_a_process_that_does_not_die_at_the_end_of_the_run_is_shown() -> None:
    told: list[str] = []
    for left in ("", "process 7 of engine-0 is still there"):
        server: Any = SimpleNamespace(aclose=nothing, child=SimpleNamespace(left=left))
        asyncio.run(end_server(server, told.append))
    assert told == ["process 7 of engine-0 is still there"]


# ---- what is said and written


@pytest.mark.parametrize("state", ["done", "interrupted"])
def test_a_run_says_at_its_end_where_its_weights_are_or_how_to_go_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], state: str
) -> None:
    (tmp_path / "final").mkdir()
    make_reporter(tmp_path, num_steps=3, console="plain").finish(state, "a signal")
    said = capsys.readouterr().out
    goes_on = f"go on with: asyncrl run {tmp_path / 'config.yaml'} --run-dir {tmp_path}"
    assert (f"weights: {tmp_path / 'final'}" in said, goes_on in said) == (state == "done", state != "done")
    assert json.loads((tmp_path / "summary.json").read_text())["why"] == "a signal"


def test_a_run_that_was_refused_does_not_say_how_to_go_on_and_a_broken_one_names_what_it_lacked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(error: Exception) -> str:
        return make_job(tmp_path, observe={"console": "plain"})._fail(error).way_out

    fail(ConfigError("model.path=x: there is no such folder"))
    assert "go on with" not in capsys.readouterr().out
    fail(EngineError("engine-0", "died"))
    assert "go on with: asyncrl run" in capsys.readouterr().out
    assert "raise the limit (ulimit -n)" in fail(OSError(errno.EMFILE, "Too many open files"))
    assert "free space on its disk" in fail(OSError(errno.ENOSPC, "No space left on device"))


def test_a_resumed_run_goes_on_with_the_steps_before_and_tells_which_are_lost(tmp_path: Path) -> None:
    reporter = make_reporter(tmp_path, num_steps=400)
    reporter.resumes(300, {})
    assert reporter._last == {"step": 300, "time_s": 30_000.0, "reward/mean": 0.5}, "and keeps no other"
    reporter.training_starts()
    assert time.monotonic() - reporter._trained_since_s >= 30_000.0
    assert reporter._warnings == []
    reporter.resumes(302, {})
    assert ["steps 301..302 are missing in metrics.jsonl" in text for text in reporter._warnings] == [True]
    reporter.finish("interrupted")
    assert json.loads((tmp_path / "summary.json").read_text())["num_steps"] == 300
    assert json.loads((tmp_path / "status.json").read_text())["step"] == 300


# ---- what a start finds in its directory


def begun_run(tmp_path: Path, config: RunConfig) -> Path:
    """A run directory with one admitted group and the weights of an earlier end."""

    async def story(journal: Journal) -> None:
        admit(journal, 0)

    run_dir = tmp_path / "begun"
    (run_dir / "final").mkdir(parents=True)
    (run_dir / "final" / "weights").write_text("whole")
    (run_dir / "config.yaml").write_text(run_config_yaml(config))
    (run_dir / "run.id").write_text(RUN_ID)
    return with_journal(run_dir / "journal.sqlite", story).parent


@pytest.mark.parametrize("is_done", [False, True])
def test_weights_of_an_earlier_end_are_put_back_whatever_becomes_of_a_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_done: bool
) -> None:
    config = make_config(tmp_path)
    run_dir = begun_run(tmp_path, config)
    (run_dir / "final").rename(run_dir / ".final.old")  # killed between the two names
    for name in (".final.new", ".adapter.new", ".model.new"):
        (run_dir / name).mkdir()
    if is_done:
        (run_dir / "summary.json").write_text('{"state": "done", "num_steps": 1000000}')

    refused = raising(RoomError("trainer-0", "cannot start"))
    monkeypatch.setattr(job, "Job", lambda *_, **__: SimpleNamespace(run=refused, say=ignore))
    with pytest.raises((RoomError, ConfigError), match="is done" if is_done else "cannot start"):
        job.run_job(config, run_dir, name="test")
    assert (run_dir / "final" / "weights").read_text() == "whole"
    assert [*run_dir.glob(".final*"), *run_dir.glob(".adapter*"), *run_dir.glob(".model*")] == []


def test_what_a_failed_start_has_left_goes_and_what_a_run_or_somebody_else_has_made_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, left, said = make_config(tmp_path), ("model", MODEL_PIN), list[str]()
    begun, failed, foreign = begun_run(tmp_path, config), tmp_path / "failed", tmp_path / "foreign"
    monkeypatch.setattr(job, "Job", lambda *_, **__: SimpleNamespace(run=nothing, say=said.append))
    for folder, allowed, stays in ((begun, [], 1), (begun, ["model"], 1), (foreign, [], 1), (failed, [], 0)):
        (folder / "model").mkdir(parents=True, exist_ok=True)
        for name in left[1:]:
            (folder / name).write_text("{}")
        if folder == failed:
            (folder / "run.id").write_text(RUN_ID)
        job.run_job(config, folder, name="test", allow_change=allowed)
        assert [(folder / name).exists() for name in left] == [bool(stays)] * len(left)
    logs = [(folder / "logs" / "controller.log").read_text() for folder in (begun, foreign, failed)]
    assert sum(log.count("rollout.deterministic: auto is true: ") for log in logs) == 4
    assert said == [], "the choices of auto stay in the log"
