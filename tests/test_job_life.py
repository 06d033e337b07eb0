"""How a run starts, ends and is interrupted, with fakes in place of its processes."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from job_runs import interrupt, start, wait_until, write_config

from asyncrl.config import RunConfig, load_config, run_config_yaml
from asyncrl.errors import ConfigError, EngineError, RoomError
from asyncrl.files import RunLock
from asyncrl.journal.journal import Journal
from asyncrl.messages.records import Batch, GroupId, Prompt, Ticket
from asyncrl.messages.trainer_calls import TrainResponse
from asyncrl.placement.devices import CudaDevice
from asyncrl.placement.staging import clear_own_staging, new_staging_dir
from asyncrl.run import life as wiring
from asyncrl.run import loop as job
from asyncrl.run import specs
from asyncrl.run import start as startup
from asyncrl.run.colocate import SideBySide
from asyncrl.run.loop import Job
from asyncrl.run.model_folder import MODEL_PIN, in_daemon_thread
from asyncrl.run.report import Reporter
from asyncrl.run.resume import ResumePoint
from asyncrl.run.start import end_server
from asyncrl.testing.memory_journal import MemoryJournal
from asyncrl.testing.virtual_time import all_blocked, run_virtual

REPORTED = (
    "start",
    "close_console",
    "tell",
    "training_starts",
    "status",
    "step",
    "finish",
    "evaluated",
    "warn",
    "resumes",
)


def make_config(tmp_path: Path, **sections: Any) -> RunConfig:
    return load_config(write_config(tmp_path, **{"observe": {"console": "none"}, **sections}))


def make_job(config: RunConfig, tmp_path: Path) -> Job:
    return Job(config, tmp_path, "test", RunLock(tmp_path / "run.lock"), None, None)  # type: ignore[arg-type]


class FakeTrainer:
    """A trainer that has taken `version` steps; a save, and a step, end once they may. `run` ends when it
    dies, and says so.
    """

    def __init__(self, version: int) -> None:
        self.policy_version = version
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


async def for_ever(*_: object) -> None:
    await asyncio.Event().wait()


async def nothing(*_: object) -> None:
    pass


class House:
    """A job whose rooms are small fakes, beside those of the other tests: batches are given, a step waits to
    be let go.
    """

    def __init__(
        self,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        *,
        version: int = 0,
        with_evaluation: bool = False,
    ) -> None:
        config = make_config(tmp_path, trainer={"num_steps": 3})
        self.job = make_job(config, tmp_path)
        self.job.reporter._recorder.close()
        monkeypatch.setattr(
            self.job, "reporter", SimpleNamespace(**dict.fromkeys(REPORTED, lambda *_, **__: None))
        )
        self.trainer, self.journal = FakeTrainer(version), MemoryJournal()
        self.batches = asyncio.Queue[Batch]()
        self.after_step: list[int] = []
        self.last: list[int] = []
        self.given: list[str] = []
        room = SimpleNamespace(run=for_ever, aclose=nothing, guard=for_ever, wait_last=for_ever)
        publisher = SimpleNamespace(
            run=for_ever,
            start_before_nowait=lambda _: None,
            wait_exported_or_busy=nothing,
            wait_announced=nothing,
        )
        server = SimpleNamespace(
            child=SimpleNamespace(name="engine-eval", watch=lambda: None), check_alive=nothing
        )
        turns: Any = SideBySide(
            publisher, num_steps=3, spawn=lambda coro, name: self.job.spawn(coro, name=name)
        )  # type: ignore[arg-type]
        self.rooms = SimpleNamespace(
            servers=(),
            trainer=self.trainer,
            producers=room,
            publisher=publisher,
            turns=turns,
            journal=self.journal,
            supervisors=(),
            feed=SimpleNamespace(order={}),
            buffer=SimpleNamespace(wait_batch=self.wait_batch),
            checkpointer=SimpleNamespace(after_step=self.step_done, make_last=self.make_last),
            evaluation=room if with_evaluation else None,
            eval_server=server if with_evaluation else None,
            harnessing=None,
            pin=SimpleNamespace(write=lambda: None),
        )

        async def open_rooms(*_: Any, **__: Any) -> Any:
            return self.rooms

        monkeypatch.setattr(job, "open_rooms", open_rooms)
        monkeypatch.setattr(
            job, "make_watchdog", lambda *_, **__: SimpleNamespace(run=for_ever, look=lambda: None)
        )
        monkeypatch.setattr(job, "heartbeat", lambda *_: None)

    async def wait_batch(self) -> Batch:
        return await self.batches.get()

    def give_batch(self) -> None:
        self.batches.put_nowait(Batch(self.trainer.policy_version, (), 0))

    async def step_done(self, version: int) -> None:
        self.after_step.append(version)

    async def make_last(self, version: int) -> None:
        self.last.append(version)

    @property
    def names(self) -> set[str]:
        """Of the tasks that run."""
        return {task.get_name() for task in self.job._tasks}

    def interrupt(self, main: asyncio.Task[None]) -> None:
        self.job._on_signal(signal.SIGINT, main)


def test_a_trainer_that_dies_while_it_saves_ends_the_run_once_it_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story() -> None:
        house = House(tmp_path, monkeypatch, version=3)
        living = asyncio.create_task(house.job._live())
        await all_blocked()
        assert house.trainer.saved == [tmp_path / "final"]
        assert "watch trainer" in house.names
        house.trainer.has_died.set()
        with pytest.raises(BaseExceptionGroup) as caught:
            await living
        assert [str(error) for error in caught.value.exceptions] == ["trainer-0: was killed."]
        assert house.last == []

    run_virtual(story())


def test_a_run_that_is_done_saves_its_weights_then_makes_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story() -> None:
        house = House(tmp_path, monkeypatch, version=2)
        living = asyncio.create_task(house.job._live())
        house.give_batch()
        house.trainer.may_step.set()
        await all_blocked()
        assert (house.trainer.saved, house.last) == ([tmp_path / "final"], [])
        assert "producers" not in house.names
        house.trainer.may_save.set()
        await living
        assert (house.trainer.saved, house.after_step, house.last) == ([tmp_path / "final"], [3], [3])
        assert [event[0] for event in house.journal.events] == ["order", "batch_taken", "trained"]

    run_virtual(story())


def test_an_interrupt_during_the_last_evaluation_ends_the_run_with_everything_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story() -> None:
        house = House(tmp_path, monkeypatch, version=3, with_evaluation=True)
        house.trainer.may_save.set()
        living = asyncio.create_task(house.job._live())
        await all_blocked()
        assert (house.trainer.saved, house.last) == ([tmp_path / "final"], [3]), (
            "the weights are safe before the last evaluation"
        )
        assert house.names >= {"publisher", "evaluation"}, "it needs both"
        assert "producers" not in house.names
        house.interrupt(living)
        with pytest.raises(asyncio.CancelledError):
            await living
        assert (len(house.trainer.saved), house.last) == (1, [3])

    run_virtual(story())


def test_a_signal_lets_the_step_in_hand_end_and_makes_a_checkpoint_instead_of_final(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story() -> None:
        house = House(tmp_path, monkeypatch)
        living = asyncio.create_task(house.job._live())
        house.give_batch()
        house.give_batch()
        await all_blocked()
        house.interrupt(living)
        await all_blocked()
        assert not living.done(), "the step was begun: it ends"
        house.trainer.may_step.set()
        await living
        assert (house.trainer.trained, house.after_step, house.last) == ([0], [1], [1])
        assert (house.trainer.saved, house.batches.qsize()) == ([], 1), "the next batch was not touched"

    run_virtual(story())


def test_a_signal_while_the_train_loop_waits_for_a_batch_ends_the_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story() -> None:
        house = House(tmp_path, monkeypatch)
        living = asyncio.create_task(house.job._live())
        await all_blocked()
        house.interrupt(living)
        await living
        assert (house.trainer.trained, house.last, house.trainer.saved) == ([], [0], [])
        assert house.journal.named("batch_taken") == []

    run_virtual(story())


def test_a_batch_that_comes_together_with_the_signal_is_trained_or_left_and_never_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story() -> None:
        house = House(tmp_path, monkeypatch)
        house.trainer.may_step.set()
        living = asyncio.create_task(house.job._live())
        await all_blocked()
        house.give_batch()
        house.interrupt(living)
        await living
        assert len(house.trainer.trained) + house.batches.qsize() == 1
        assert house.last == [len(house.trainer.trained)]

    run_virtual(story())


def test_a_signal_before_training_ends_the_run_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story() -> None:
        house = House(tmp_path, monkeypatch, version=1)
        house.rooms.publisher.wait_announced = (
            for_ever  # a resumed run brings its weights to the engines first
        )
        living = asyncio.create_task(house.job._live())
        await all_blocked()
        house.interrupt(living)
        with pytest.raises(asyncio.CancelledError):
            await living
        assert house.last == []

    run_virtual(story())


def test_a_foreign_error_at_the_start_is_named_and_ends_the_status_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def open_rooms(*_: Any, **__: Any) -> Any:
        raise OverflowError("too large a number")

    monkeypatch.setattr(job, "open_rooms", open_rooms)
    with pytest.raises(
        RoomError, match="controller: internal error OverflowError: too large a number"
    ) as caught:
        asyncio.run(make_job(make_config(tmp_path), tmp_path).run())
    assert "controller.log" in caught.value.way_out
    assert json.loads((tmp_path / "status.json").read_text())["state"] == "failed"


def test_closing_goes_on_to_its_end_when_the_run_is_cancelled_meanwhile() -> None:
    async def story() -> None:
        closed = []

        async def close() -> None:
            await asyncio.sleep(3)
            closed.append("engine-0")

        closing = asyncio.create_task(wiring.close_within(5, "engine-0", close))
        await all_blocked()
        closing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await closing
        assert closed == ["engine-0"]

    run_virtual(story())


def test_blocking_work_of_the_start_is_not_waited_for_when_it_is_cancelled() -> None:
    released = threading.Event()

    async def story() -> None:
        loop, started = asyncio.get_running_loop(), asyncio.Event()

        def work() -> None:
            loop.call_soon_threadsafe(started.set)
            released.wait()

        waiting = asyncio.create_task(in_daemon_thread(work))
        await started.wait()
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting

    asyncio.run(story())  # with a thread of the loop's own pool this would never return
    released.set()


@pytest.mark.parametrize("stop", [lambda: [][1], lambda: sys.exit("enough")])
def test_what_blocking_work_raises_reaches_the_start(stop: Callable[[], Any]) -> None:
    with pytest.raises((IndexError, RuntimeError), match="out of range|enough"):
        asyncio.run(in_daemon_thread(stop))


def test_the_trainer_is_told_the_chat_template(tmp_path: Path) -> None:
    config = make_config(tmp_path, model={"chat_template": "own.jinja"})
    spec = json.loads(specs.trainer_spec(config, tmp_path / "model", tmp_path, tmp_path / "staging"))
    assert spec["chat_template"] == "own.jinja"


def test_a_process_is_told_its_kind_of_device_and_sees_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        startup, "find_cuda_devices", lambda: (CudaDevice("4"), CudaDevice("GPU-b"), CudaDevice("GPU-c"))
    )
    config = make_config(tmp_path, trainer={"world_size": 2})
    trainers, (engine,) = startup.make_servers(
        config, tmp_path / "model", tmp_path, tmp_path / "staging", "s3cret"
    )
    for server, names in zip([*trainers, engine], ["4,GPU-b", "4,GPU-b", "GPU-c"], strict=True):
        assert json.loads(server.child._spec)["device"] == "cuda"
        assert server.child._env["CUDA_VISIBLE_DEVICES"] == names


def test_without_a_cuda_device_every_process_is_told_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(startup, "find_cuda_devices", tuple)  # nvidia-smi beside a CPU build of torch, say
    (trainer,), (engine,) = startup.make_servers(
        make_config(tmp_path), tmp_path / "model", tmp_path, tmp_path / "staging", "s3cret"
    )
    assert (trainer.caller.short_s, engine.caller.short_s) == (60.0, 60.0)
    in_haste = make_config(tmp_path, rollout={"timeout_s": 50.0}, weight_sync={"timeout_s": 30.0})
    _, (hasty,) = startup.make_servers(in_haste, tmp_path / "model", tmp_path, tmp_path / "staging", "s3cret")
    assert hasty.caller.short_s == 15.0, "a call that waits for a descriptor says so before its push is over"
    for server in (trainer, engine):
        assert json.loads(server.child._spec)["device"] == "cpu"
        assert "CUDA_VISIBLE_DEVICES" not in server.child._env


def test_an_abrupt_end_clears_this_processs_staging() -> None:
    folder = new_staging_dir()
    (folder / "v1.safetensors").touch()
    clear_own_staging()
    assert not folder.exists()


def finish(tmp_path: Path, state: str) -> None:
    reporter = Reporter(make_config(tmp_path, observe={"console": "plain"}), tmp_path, "test")
    metrics = dict.fromkeys(
        (
            "step",
            "reward/mean",
            "tokens/trained",
            "tokens/sampled",
            "perf/wait_stragglers_s",
            "rollout/dropped",
        ),
        0.0,
    )
    reporter._recorder.record_step({**metrics, "time_s": 1.0})
    reporter.finish(state, "" if state == "done" else "interrupted by SIGINT")


def test_an_interrupted_run_says_how_to_go_on_and_names_no_weights(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    finish(tmp_path, "interrupted")
    said = capsys.readouterr().out
    assert f"go on with: asyncrl run {tmp_path / 'config.yaml'} --run-dir {tmp_path}" in said
    assert "weights: " not in said
    assert json.loads((tmp_path / "summary.json").read_text())["why"] == "interrupted by SIGINT"


def test_a_run_that_was_refused_before_it_began_does_not_say_how_to_go_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    refused = Job(make_config(tmp_path, observe={"console": "plain"}), tmp_path, "test", None, None, None)  # type: ignore[arg-type]
    refused._fail(ConfigError("model.path=x: there is no such folder"))
    assert "go on with" not in capsys.readouterr().out
    broken = Job(make_config(tmp_path, observe={"console": "plain"}), tmp_path, "test", None, None, None)  # type: ignore[arg-type]
    broken._fail(EngineError("engine-0", "died"))
    assert "go on with: asyncrl run" in capsys.readouterr().out


def test_a_run_without_a_descriptor_left_names_that_limit_and_not_its_disk(tmp_path: Path) -> None:
    for number, says in (
        (errno.EMFILE, "raise the limit of open files"),
        (errno.ENOSPC, "free space on its disk"),
    ):
        job = Job(make_config(tmp_path), tmp_path, "test", None, None, None)  # type: ignore[arg-type]
        assert says in job._fail(OSError(number, os.strerror(number), "status.json")).way_out


def test_a_status_that_cannot_be_written_for_want_of_a_descriptor_is_left_to_the_next_second(
    tmp_path: Path,
) -> None:
    numbers = [errno.EMFILE, errno.EMFILE, 0, errno.ENOSPC]

    async def story() -> float:
        job = Job(make_config(tmp_path), tmp_path, "test", None, None, None)  # type: ignore[arg-type]

        def status(*_: Any) -> None:
            if number := numbers.pop(0):
                raise OSError(number, os.strerror(number))

        job.reporter.status = status  # type: ignore[method-assign,assignment]
        with pytest.raises(OSError, match="No space left"):
            await job._report_status(None, SimpleNamespace(look=tuple))  # type: ignore[arg-type]
        job.finish("failed")
        return asyncio.get_running_loop().time()

    assert run_virtual(story()) == 3.0


def test_a_run_that_is_done_names_its_weights(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "final").mkdir()
    finish(tmp_path, "done")
    said = capsys.readouterr().out
    assert f"weights: {tmp_path / 'final'}" in said
    assert "go on with" not in said


def test_the_controller_keeps_no_line_of_a_step_but_the_last(tmp_path: Path) -> None:
    reporter = Reporter(make_config(tmp_path, observe={"console": "none"}), tmp_path, "test")
    (tmp_path / "metrics.jsonl").write_text(
        "".join(f'{{"step": {step}, "time_s": 1.0, "reward/mean": 0.5}}\n' for step in range(5000))
    )
    reporter.resumes(4000, [])
    assert reporter._last == {"step": 3999, "time_s": 1.0, "reward/mean": 0.5}
    reporter.finish("interrupted")
    assert json.loads((tmp_path / "summary.json").read_text())["num_steps"] == 4000
    assert json.loads((tmp_path / "status.json").read_text())["step"] == 4000


def test_a_run_that_warns_without_end_names_the_first_hundred_and_counts_the_others(tmp_path: Path) -> None:
    reporter = Reporter(make_config(tmp_path, observe={"console": "none"}), tmp_path, "test")
    for number in range(250):
        reporter.warn(f"warning {number}")
    assert (len(reporter._warnings), reporter._warnings[99]) == (101, "warning 99")
    assert reporter._warnings[100] == "and 150 more; logs/controller.log has all of them"


def test_a_process_that_does_not_die_at_the_end_of_the_run_is_shown() -> None:
    told: list[str] = []
    server: Any = SimpleNamespace(aclose=nothing, child=SimpleNamespace(left=""))
    asyncio.run(end_server(server, told.append))
    server.child.left = "process 7 of engine-0 is still there"
    asyncio.run(end_server(server, told.append))
    assert told == ["process 7 of engine-0 is still there"]


def test_steps_that_metrics_have_lost_are_told_at_a_resume(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 0, "time_s": 7.0, "reward/mean": 0.5}\n')
    reporter = Reporter(make_config(tmp_path, observe={"console": "none"}), tmp_path, "test")
    reporter.resumes(3, [])
    assert reporter._warnings == [
        "steps 1..2 are missing in metrics.jsonl (lost before a sync: the machine stopped, or the file was "
        "cut)"
    ]
    assert time.monotonic() - reporter._trained_since_s >= 7.0
    reporter.finish("interrupted")


def test_the_time_of_a_resumed_run_goes_on_where_its_last_step_was(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text(
        "".join(f'{{"step": {step}, "time_s": {100.0 * step + 100}}}\n' for step in range(5))
    )
    reporter = Reporter(make_config(tmp_path), tmp_path, "test")
    reporter.resumes(3)
    assert reporter._last["step"] == 2
    replayed_s = time.monotonic() - reporter._trained_since_s
    assert 300.0 <= replayed_s < 400.0, "of the steps that are taken again"
    reporter.training_starts()
    assert 300.0 <= time.monotonic() - reporter._trained_since_s < 400.0
    reporter._recorder.close()


@pytest.mark.parametrize("state", ["failed", "interrupted"])
def test_a_resume_that_ends_before_it_could_go_on_leaves_what_the_run_had_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state: str
) -> None:
    (tmp_path / "metrics.jsonl").write_text(
        "".join(f'{{"step": {step}, "time_s": 1.0}}\n' for step in range(9))
    )
    (tmp_path / "summary.json").write_text('{"state": "done", "num_steps": 9}')
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}

    async def open_rooms(*_: Any, **__: Any) -> Any:
        if state == "interrupted":
            os.kill(os.getpid(), signal.SIGINT)
            await for_ever()
        raise RoomError("trainer-0", "cannot start")

    monkeypatch.setattr(job, "open_rooms", open_rooms)
    point = ResumePoint(None, ("checkpoint step_9 is damaged",))
    resuming = Job(make_config(tmp_path), tmp_path, "test", RunLock(tmp_path / "run.lock"), point, None)  # type: ignore[arg-type]
    if state == "failed":
        with pytest.raises(RoomError, match="cannot start"):
            asyncio.run(resuming.run())
    else:
        assert asyncio.run(resuming.run()) == 130
    assert {path: path.read_bytes() for path in before} == before
    assert json.loads((tmp_path / "status.json").read_text())["state"] == state
    assert resuming.reporter._warnings == ["checkpoint step_9 is damaged"]


def test_the_verdict_of_a_resumed_run_is_of_all_its_steps_and_not_of_what_was_counted_since(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = {
        "time_s": 1.0,
        "perf/step_s": 1.0,
        "perf/wait_stragglers_s": 0.5,
        "rollout/filtered": 40.0,
        "reward/mean": 0.0,
    }
    (tmp_path / "metrics.jsonl").write_text(
        "".join(json.dumps({"step": step, **line}) + "\n" for step in range(9))
    )
    reporter = Reporter(
        make_config(tmp_path, buffer={"on_overdue": "wait", "filter": "equal_rewards"}), tmp_path, "test"
    )
    reporter.resumes(9)
    monkeypatch.setattr(reporter, "_step_metrics", lambda *_: {"step": 9, **line})
    reporter.step(
        SimpleNamespace(),
        Batch(9, (), 0),
        TrainResponse(policy_version=10, metrics={}),
        step_s=1.0,
    )  # type: ignore[arg-type]
    reporter.finish("done")
    said = " ".join(json.loads((tmp_path / "summary.json").read_text())["sentences"])
    assert "on_overdue=wait cost 5.0 s (50.0%) in 10 of 10 batches" in said
    assert "replaced 40 groups" in said


@pytest.mark.slow
def test_an_interrupt_ends_a_start_that_hangs(tmp_path: Path) -> None:
    mark = tmp_path / "hangs"
    task = {"python": "rewards_for_test:HangsAtTheStart", "args": {"mark": str(mark)}}
    process = start(write_config(tmp_path, task=task), tmp_path / "run")
    wait_until(mark.exists, process)
    stdout, stderr = interrupt(process, signal.SIGTERM)
    assert process.returncode == 143, stderr
    goes_on = f"go on with: asyncrl run {tmp_path / 'run' / 'config.yaml'} --run-dir {tmp_path / 'run'}"
    assert goes_on in stdout
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["why"] == "interrupted by SIGTERM"


def test_a_folder_that_no_run_has_made_is_not_removed_from_its_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config(tmp_path)
    precious = tmp_path / "mine" / "model" / "precious"
    precious.parent.mkdir(parents=True)
    precious.write_text("kept")
    monkeypatch.setattr(job, "Job", lambda *_: SimpleNamespace(run=nothing))
    job.run_job(config, tmp_path / "mine", name="test")
    assert precious.read_text() == "kept"
    job.run_job(config, tmp_path / "mine", name="test")
    assert not precious.exists(), "with an id it is a run's own, of a start that failed"


def begun_run(tmp_path: Path, config: RunConfig) -> Path:
    """A run directory with one admitted group and the weights of an earlier end."""

    async def admit_one() -> None:
        journal = Journal.open(run_dir / "journal.sqlite", run_id="r")
        journal.admitted_nowait(Ticket(GroupId(0), 0), Prompt("0/0", ()))
        await journal.aclose()

    run_dir = tmp_path / "begun"
    (run_dir / "final").mkdir(parents=True)
    (run_dir / "final" / "weights").write_text("whole")
    (run_dir / "config.yaml").write_text(run_config_yaml(config))
    (run_dir / "run.id").write_text("r")
    asyncio.run(admit_one())
    return run_dir


def test_weights_of_an_earlier_end_stay_whatever_becomes_of_a_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config(tmp_path)
    run_dir = begun_run(tmp_path, config)
    (run_dir / "final").rename(run_dir / ".final.old")  # killed between the two names
    (run_dir / ".final.new").mkdir()
    (run_dir / ".adapter.new").mkdir()
    (run_dir / ".model.new").mkdir()

    def refused(*_: object) -> None:
        raise RoomError("trainer-0", "cannot start")

    monkeypatch.setattr(job, "Job", refused)
    for _ in range(2):
        with pytest.raises(RoomError, match="cannot start"):
            job.run_job(config, run_dir, name="test")
        assert (run_dir / "final" / "weights").read_text() == "whole"
        assert [*run_dir.glob(".final*"), *run_dir.glob(".adapter*"), *run_dir.glob(".model*")] == []


def test_weights_of_a_run_that_was_killed_at_its_end_are_put_back_though_the_start_is_refused(
    tmp_path: Path,
) -> None:
    config = make_config(tmp_path)
    run_dir = begun_run(tmp_path, config)
    (run_dir / "final").rename(run_dir / ".final.old")
    (run_dir / "summary.json").write_text('{"state": "done", "num_steps": 1000000}')
    with pytest.raises(ConfigError, match="is done"):
        job.run_job(config, run_dir, name="test")
    assert (run_dir / "final" / "weights").read_text() == "whole"


def test_a_new_run_does_not_begin_where_it_would_replace_weights_that_are_not_its_own(tmp_path: Path) -> None:
    (tmp_path / "run" / "adapter").mkdir(parents=True)
    with pytest.raises(ConfigError, match="adapter is there, which a new run would replace at its end"):
        job.run_job(make_config(tmp_path), tmp_path / "run", name="test")
    assert (tmp_path / "run" / "adapter").is_dir()


def test_the_pin_of_a_failed_start_goes_and_that_of_a_run_stays_until_it_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config(tmp_path)
    begun, failed = begun_run(tmp_path, config), tmp_path / "failed"
    failed.mkdir()
    (failed / "run.id").write_text("r")
    monkeypatch.setattr(job, "Job", lambda *_: SimpleNamespace(run=nothing))
    for folder, allowed, stays in ((begun, [], True), (begun, ["model"], True), (failed, [], False)):
        (folder / MODEL_PIN).write_text("{}")
        job.run_job(config, folder, name="test", allow_change=allowed)
        assert (folder / MODEL_PIN).exists() == stays
