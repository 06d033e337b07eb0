"""How a run starts, ends and is interrupted, with fakes for its processes; and its directory's mode and
secrets.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import logging
import os
import signal
import stat
import sys
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fakes import MemoryJournal
from job_runs import write_config
from journal_cases import RUN_ID, admit, with_journal
from rollout_cases import virtual

from asyncrl.base.errors import ConfigError, RoomError
from asyncrl.config import ObserveConfig, RunConfig, load_config, run_config_yaml
from asyncrl.job import loop as job
from asyncrl.job.lifecycle import Lifecycle, RunLog, locked_run_dir, logging_to
from asyncrl.job.loop import Job, run_job
from asyncrl.job.report import Reporter
from asyncrl.job.resume import ResumePoint
from asyncrl.job.serve import serve_gateway
from asyncrl.journal.journal import Journal
from asyncrl.launch.launchers import LocalLauncher
from asyncrl.messages.records import Batch
from asyncrl.messages.trainer_api import TrainResponse
from asyncrl.testing.virtual_time import all_blocked

REPORTED = ("start", "status_server", "close_console", "training_starts", "status", "step", "evaluated")


def make_config(tmp_path: Path, **sections: Any) -> RunConfig:
    return load_config(write_config(tmp_path, **{"observe": {"console": "none"}, **sections}))


def make_job(tmp_path: Path, *, point: ResumePoint | None = None, **sections: Any) -> Job:
    config = make_config(tmp_path, **sections)
    reporter = Reporter(config, tmp_path, "test", goes_on=point is not None)
    life = Lifecycle(
        config, tmp_path, reporter.log, LocalLauncher(), on_end=reporter.finish, on_exit=reporter.aclose
    )
    return Job(life, reporter, None, point)  # type: ignore[arg-type]


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
        self.job = replace(self.job, reporter=silent)
        self.trainer, self.journal = FakeTrainer(), MemoryJournal()
        self.batches = asyncio.Queue[Batch]()
        self.after_step, self.last = list[int](), list[int]()
        room = SimpleNamespace(run=for_ever, aclose=nothing, guard=for_ever, wait_last=for_ever)
        fleet = SimpleNamespace(servers=(), supervisors={}, eval_server=None)
        self.rooms = SimpleNamespace(
            fleet=fleet,
            trainer=self.trainer,
            producers=room,
            scheduler=SimpleNamespace(start=nothing, to_trainer=nothing, to_engines=nothing),
            journal=self.journal,
            scale=SimpleNamespace(is_fixed=True, engines=(), watch_nowait=ignore),
            feed=SimpleNamespace(order={}),
            buffer=SimpleNamespace(wait_batch=self.batches.get),
            checkpointer=SimpleNamespace(after_step=self.step_done, make_last=self.make_last),
            evaluation=None,
            harnessing=None,
            special_tokens=None,
            write_pins=ignore,
        )
        watchdog = SimpleNamespace(run=for_ever, look=ignore)
        monkeypatch.setattr(job, "build", self.build)
        monkeypatch.setattr(job.Job, "_make_watchdog", lambda *_: watchdog)
        monkeypatch.setattr(job, "batch_metrics", lambda *_: {})  # of batches that have no groups

    async def build(self, *_: Any, **__: Any) -> Any:
        return self.rooms

    async def step_done(self, version: int) -> None:
        self.after_step.append(version)

    async def make_last(self, version: int) -> None:
        self.last.append(version)

    async def begin(self, num_batches: int = 0) -> None:
        """Run with `num_batches` batches until all waits."""
        self.living = asyncio.create_task(self.job.life._live(self.job.live))
        self.give_batches(num_batches)
        await all_blocked()

    def give_batches(self, num_batches: int) -> None:
        for _ in range(num_batches):
            self.batches.put_nowait(Batch(self.trainer.policy_version, (), 0))

    def interrupt(self) -> None:
        self.job.life._on_signal(signal.SIGINT, self.living)

    @property
    def names(self) -> set[str]:
        """Of the tasks that run."""
        return {task.get_name() for task in self.job.life._tasks}


@pytest.fixture
def house(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> House:
    return House(tmp_path, monkeypatch)


@virtual
async def test_trainer_death_in_save_ends_the_run(house: House) -> None:
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
async def test_signal_ends_after_the_step_with_a_checkpoint(house: House) -> None:
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
async def test_signal_during_a_wait_loses_no_batch(house: House, num_batches: int) -> None:
    house.trainer.may_step.set()
    await house.begin()
    house.give_batches(num_batches)
    house.interrupt()
    await house.living
    assert len(house.trainer.trained) + house.batches.qsize() == num_batches
    assert (house.last, house.trainer.saved) == ([len(house.trainer.trained)], [])


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (RoomError("trainer-0", "cannot start"), "cannot start"),
        (OverflowError("too large"), r"internal error OverflowError: too large(.|\n)*controller.log"),
        (None, ""),
    ],
)
def test_failed_resume_leaves_the_run_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception | None, said: str
) -> None:
    lines = ({"step": step, "time_s": 100.0 * step, "reward/mean": 0.5} for step in range(1, 10))
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "summary.json").write_text('{"state": "done", "num_steps": 9}')
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}

    async def interrupted(*_: Any, **__: Any) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        await for_ever()

    monkeypatch.setattr(job, "build", raising(error) if error else interrupted)
    resuming = make_job(tmp_path, point=ResumePoint(None, ("checkpoint step_9 is damaged",)))
    if error:
        with pytest.raises(RoomError, match=said):
            asyncio.run(resuming.life.run(resuming.live))
    else:
        assert asyncio.run(resuming.life.run(resuming.live)) == 130
    assert {path: path.read_bytes() for path in before} == before
    state = json.loads((tmp_path / "status.json").read_text())["state"]
    assert state == ("failed" if error else "interrupted")
    assert resuming.life.log.warnings == ["checkpoint step_9 is damaged"]


@pytest.mark.parametrize("changed", [{}, {"learning_rate": 0.5}])
def test_failed_or_refused_start_restores_earlier_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changed: dict[str, float]
) -> None:
    run_dir = tmp_path / "begun"
    (run_dir / ".final.old").mkdir(parents=True)  # killed between the two names
    (run_dir / ".final.old" / "weights").write_text("whole")
    (run_dir / "config.yaml").write_text(run_config_yaml(make_config(tmp_path)))
    (run_dir / "run.id").write_text(RUN_ID)

    async def story(journal: Journal) -> None:
        admit(journal, 0)

    with_journal(run_dir / "journal.sqlite", story)
    for name in (".final.new", ".adapter.new", ".model.new"):
        (run_dir / name).mkdir()
    refused = raising(RoomError("trainer-0", "cannot start"))
    monkeypatch.setattr(job.Lifecycle, "run", refused)
    with pytest.raises((RoomError, ConfigError), match="other settings" if changed else "cannot start"):
        job.run_job(make_config(tmp_path, trainer=changed), run_dir, name="test")
    assert (run_dir / "final" / "weights").read_text() == "whole"
    assert [*run_dir.glob(".final*"), *run_dir.glob(".adapter*"), *run_dir.glob(".model*")] == []


@pytest.mark.parametrize(
    ("before", "holds", "wanted", "then"),
    [
        (None, "", 0o750, 0o750),
        (0o2777, "", 0o750, 0o2750),
        (0o755, "run.lock", 0o700, 0o700),
        (0o755, "thesis.txt", 0o700, 0o755),
    ],
)
def test_run_directory_gets_the_mode_of_its_config(
    before: int | None, holds: str, wanted: int, then: int, tmp_path: Path
) -> None:
    folder = tmp_path / "runs" / "new"
    if before is not None:
        folder.mkdir(parents=True)
        folder.chmod(before)
        (folder / holds).touch()
    with locked_run_dir(folder, wanted):
        pass
    assert (stat.S_IMODE(folder.stat().st_mode), (folder / "logs").is_dir()) == (then, True)
    modes = {"owner": 0o700, "group": 0o750, "all": 0o755}
    assert {who: ObserveConfig.model_validate({"readable_by": who}).dir_mode for who in modes} == modes
    assert ObserveConfig().dir_mode == 0o700


def test_a_secret_is_printed_and_never_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run" / "logs").mkdir(parents=True)
    monkeypatch.setattr(logging.getLogger("asyncrl"), "propagate", True)  # logging_to turns it off
    with logging_to(tmp_path / "run"):
        RunLog().info("ready")
        RunLog().print_secret("export OPENAI_API_KEY=abc")
    assert capsys.readouterr().out == "ready\nexport OPENAI_API_KEY=abc\n"
    log = (tmp_path / "run" / "logs" / "controller.log").read_text()
    assert "ready" in log
    assert "abc" not in log


@pytest.mark.skipif(sys.platform != "linux", reason="/proc")
@pytest.mark.parametrize("begin", [run_job, serve_gateway])
def test_controller_of_agents_hides_its_memory(
    begin: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    libc, get_dumpable, set_dumpable = ctypes.CDLL(None), 3, 4
    monkeypatch.delenv("JUDGE_API_KEY", raising=False)
    shell_agent = Path(__file__).parents[1] / "examples" / "shell_agent" / "shell_agent.yaml"
    config = load_config(shell_agent, ["generator.pass_env=[JUDGE_API_KEY]"])
    try:
        libc.prctl(set_dumpable, 1, 0, 0, 0)
        with pytest.raises(ConfigError, match="JUDGE_API_KEY"):
            begin(config, tmp_path / "run", name="run")
        assert not (tmp_path / "run").exists(), "refused before anything is made"
        assert libc.prctl(get_dumpable, 0, 0, 0, 0) == 0
    finally:
        libc.prctl(set_dumpable, 1, 0, 0, 0)
