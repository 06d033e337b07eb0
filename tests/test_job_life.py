"""How a run starts, ends and is interrupted, with fakes in place of its processes."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from job_runs import environment, interrupt, write_config

from asyncrl import job, startup, wiring
from asyncrl.config import RunConfig, load_config
from asyncrl.errors import RoomError
from asyncrl.job import Job
from asyncrl.placement.staging import clear_own_staging, new_staging_dir
from asyncrl.reporting import Reporter
from asyncrl.testing.virtual_time import all_blocked, run_virtual

REPORTED = ("start", "close_console", "tell", "training_starts", "status", "step", "finish")


def make_config(tmp_path: Path, **sections: Any) -> RunConfig:
    return load_config(write_config(tmp_path, **{"observe": {"console": "none"}, **sections}))


def make_job(config: RunConfig, tmp_path: Path) -> Job:
    return Job(config, tmp_path, "test")


class FakeTrainer:
    """A trainer whose every step is taken, and whose save never answers."""

    def __init__(self, num_steps: int) -> None:
        self.policy_version = num_steps
        self.is_saving = asyncio.Event()

    async def save(self, path: Path) -> None:
        self.is_saving.set()
        await asyncio.Event().wait()


class FakeChild:
    """A process that dies as soon as the trainer saves."""

    name, returncode, died = "trainer-0", None, None

    def __init__(self, trainer: FakeTrainer) -> None:
        self._trainer = trainer

    async def watch(self) -> None:
        await self._trainer.is_saving.wait()
        raise RoomError(self.name, "was killed")

    async def wait(self) -> None:
        await asyncio.Event().wait()

    def note_death(self) -> None:
        pass


async def for_ever(*_: object) -> None:
    await asyncio.Event().wait()


async def nothing(*_: object) -> None:
    pass


def test_a_trainer_that_dies_while_it_saves_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = make_config(tmp_path)
    run = make_job(config, tmp_path)
    run.reporter._recorder.close()
    monkeypatch.setattr(run, "reporter", SimpleNamespace(**dict.fromkeys(REPORTED, lambda *_: None)))

    async def story() -> None:
        trainer = FakeTrainer(config.trainer.num_steps)
        room = SimpleNamespace(run=for_ever, aclose=nothing)
        server = SimpleNamespace(child=FakeChild(trainer), check_alive=nothing)

        async def open_rooms(*_: Any, **__: Any) -> Any:
            return SimpleNamespace(servers=(server,), trainer=trainer, producers=room, publisher=room)

        monkeypatch.setattr(job, "open_rooms", open_rooms)
        with pytest.raises(BaseExceptionGroup) as caught:
            await run._live()
        assert [str(error) for error in caught.value.exceptions] == ["trainer-0: was killed."]

    run_virtual(story())


def test_a_foreign_error_at_the_start_is_named_and_ends_the_status_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def open_rooms(*_: Any, **__: Any) -> Any:
        raise OverflowError("too large a number")

    monkeypatch.setattr(job, "open_rooms", open_rooms)
    with pytest.raises(RoomError, match="controller: internal error OverflowError: too large a number") as caught:
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

        waiting = asyncio.create_task(startup.in_daemon_thread(work))
        await started.wait()
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting

    asyncio.run(story())  # with a thread of the loop's own pool this would never return
    released.set()


@pytest.mark.parametrize("stop", [lambda: [][1], lambda: sys.exit("enough")])
def test_what_blocking_work_raises_reaches_the_start(stop: Callable[[], Any]) -> None:
    with pytest.raises((IndexError, RuntimeError), match="out of range|enough"):
        asyncio.run(startup.in_daemon_thread(stop))


def test_the_trainer_is_told_the_chat_template(tmp_path: Path) -> None:
    config = make_config(tmp_path, model={"chat_template": "own.jinja"})
    spec = json.loads(startup.trainer_spec(config, tmp_path / "model", tmp_path, tmp_path / "staging"))
    assert spec["chat_template"] == "own.jinja"


def test_auto_is_settled_by_torch_and_not_by_what_the_driver_has_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "asyncrl.placement.plan.shutil.which", lambda name: f"/usr/bin/{name}"
    )  # nvidia-smi, say, beside a CPU build of torch
    config = make_config(tmp_path)
    assert json.loads(startup.trainer_spec(config, tmp_path / "model", tmp_path, tmp_path / "staging"))["device"] == "auto"
    assert json.loads(startup.engine_spec(config, tmp_path / "model", "engine-0"))["device"] == "auto"


def test_an_abrupt_end_clears_this_processs_staging() -> None:
    folder = new_staging_dir()
    folder.mkdir(mode=0o700)
    clear_own_staging()
    assert not folder.exists()


def test_weights_that_could_not_be_saved_are_not_announced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    reporter = Reporter(make_config(tmp_path, observe={"console": "plain"}), tmp_path, "test")
    metrics = dict.fromkeys(("step", "reward/mean", "tokens/trained", "tokens/sampled", "perf/wait_stragglers_s", "rollout/dropped"), 0.0)
    reporter._steps.append({**metrics, "time_s": 1.0})
    reporter.finish("interrupted", "interrupted by SIGINT")
    said = capsys.readouterr().out
    assert "the weights could not be saved" in said
    assert "weights: " not in said


@pytest.mark.slow
@pytest.mark.parametrize("body", ["time.sleep(600)", "ThreadPoolExecutor(1).submit(time.sleep, 600).result()"])
def test_an_interrupt_ends_a_start_that_hangs(tmp_path: Path, body: str) -> None:
    (tmp_path / "hanging_task.py").write_text(
        "import time\nfrom concurrent.futures import ThreadPoolExecutor\nfrom pathlib import Path\n"
        f"class Hangs:\n    def __init__(self, size, seed, mark):\n        Path(mark).touch()\n        {body}\n"
    )
    mark = tmp_path / "hangs"
    config = write_config(tmp_path, task={"python": "hanging_task:Hangs", "args": {"mark": str(mark)}})
    command = [sys.executable, "-m", "asyncrl.cli", "run", str(config), "--run-dir", str(tmp_path / "run")]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(PYTHONPATH=str(tmp_path)),
        start_new_session=True,
    )
    while not mark.exists():
        assert process.poll() is None, process.communicate()
    stdout, stderr = interrupt(process, signal.SIGTERM)
    assert process.returncode == 143, stderr
    assert "interrupted by SIGTERM before the first step" in stdout
