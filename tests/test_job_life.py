"""How a run starts and fails, without processes; and its directory's mode and secrets."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import errno
import gc
import inspect
import json
import os
import pkgutil
import re
import resource
import signal
import stat
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import date
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import pytest
import yaml
from job_runs import write_config
from journal_cases import RUN_ID, admit, make_batch, with_journal

import asyncrl
from asyncrl.base.errors import ComponentError, ConfigError, JournalError
from asyncrl.base.files import run_lock
from asyncrl.base.signals import STOPS
from asyncrl.base.user_code import run_loop
from asyncrl.config import RunConfig, load_config, run_config_yaml
from asyncrl.config.observe_config import ObserveConfig
from asyncrl.job import lifecycle
from asyncrl.job import loop as job
from asyncrl.job.agent_runtime import AgentRuntime
from asyncrl.job.build import prepare_model
from asyncrl.job.lifecycle import (
    CLOSE_TIMEOUT_S,
    Lifecycle,
    locked_run_dir,
)
from asyncrl.job.loop import Job, run_job
from asyncrl.job.reporter import Reporter
from asyncrl.job.resume import ResumePoint
from asyncrl.job.serve import serve_gateway
from asyncrl.journal.journal import Journal
from asyncrl.launch.launchers import LocalLauncher
from asyncrl.messages.trainer_api import TrainResponse
from asyncrl.observe.console import RunLog
from asyncrl.observe.run_dir import read_metrics, read_status
from asyncrl.testing.virtual_time import run_virtual


def make_config(tmp_path: Path, **sections: Any) -> RunConfig:
    return load_config(
        write_config(tmp_path, **{"observe": {"console": "none"}, **sections})
    )


def make_job(
    tmp_path: Path, *, point: ResumePoint = ResumePoint(is_new=True), **sections: Any
) -> Job:
    config = make_config(tmp_path, **sections)
    reporter = Reporter(config, tmp_path, "test", is_resume=not point.is_new)
    life = Lifecycle(
        config,
        tmp_path,
        reporter.log,
        LocalLauncher(),
        on_end=reporter.finish,
        on_exit=reporter.aclose,
    )
    return Job(config, life, reporter, None, point)  # type: ignore[arg-type]


async def for_ever(*_: object) -> None:
    await asyncio.Event().wait()


def raising(error: BaseException) -> Callable[..., Awaitable[Any]]:
    async def fail(*_: Any, **__: Any) -> None:
        raise error

    return fail


@pytest.mark.asyncio
async def test_errors_that_nothing_awaits_are_named_once(tmp_path: Path) -> None:
    life = make_job(tmp_path).lifecycle

    async def live() -> int:
        for number in range(2):
            task = asyncio.ensure_future(raising(ValueError(f"left {number}"))())
            await asyncio.sleep(0)
            del task
            gc.collect()
        return 0

    assert await life.run(live) == 0
    (warning,) = life.log.warnings
    assert "in a task that nothing awaits: ValueError: left 0" in warning


def test_a_long_stage_is_said_again_until_the_run_trains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lifecycle, "is_in_main_thread", lambda: False)
    life = make_job(tmp_path).lifecycle
    stages = list[str]()
    life.log = RunLog(show_activity=lambda text, _: stages.append(text))

    async def live() -> int:
        life.log.activity("loading")
        await asyncio.sleep(100)
        life.can_stop = True
        await asyncio.sleep(1000)
        return 0

    run_virtual(life.run(live))
    assert stages == ["loading"] * 4


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ComponentError("trainer-0", "cannot start"), "cannot start"),
        (
            OverflowError("too large"),
            r"internal error OverflowError: too large(.|\n)*controller.log",
        ),
        (KeyboardInterrupt(), "internal error KeyboardInterrupt"),
        (OSError(errno.ENOSPC, "full"), "cannot use the run directory /.*: full"),
        (
            PermissionError(errno.EACCES, "denied", "/bin/python"),
            "cannot use /bin/python: denied",
        ),
        (ConnectionResetError("peer"), "internal error ConnectionResetError: peer"),
        (None, ""),
    ],
)
def test_failed_resume_leaves_the_run_as_it_was(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    error: BaseException | None,
    said: str,
) -> None:
    lines = (
        {"step": step, "time_s": 100.0 * step, "reward/mean": 0.5}
        for step in range(1, 10)
    )
    (tmp_path / "metrics.jsonl").write_text(
        "".join(json.dumps(line) + "\n" for line in lines)
    )
    (tmp_path / "summary.json").write_text('{"state": "done", "num_steps": 9}')
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}

    async def interrupted(*_: Any, **__: Any) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        await for_ever()

    monkeypatch.setattr(job, "build", raising(error) if error else interrupted)
    resuming = make_job(
        tmp_path, point=ResumePoint(None, ("checkpoint step_9 is damaged",))
    )
    if error:
        with pytest.raises(ComponentError, match=said):
            asyncio.run(resuming.lifecycle.run(resuming.live))
    else:
        assert asyncio.run(resuming.lifecycle.run(resuming.live)) == 130
    assert {path: path.read_bytes() for path in before} == before
    state = json.loads((tmp_path / "status.json").read_text())["state"]
    assert state == ("failed" if error else "interrupted")
    assert resuming.lifecycle.log.warnings == ["checkpoint step_9 is damaged"]


STARTS = ["job.loop.Reporter", "job.loop.build", "job.reporter.Reporter.start"]
RUNS = [
    "observe.watchdog.Watchdog.look",
    "buffer.buffer.Buffer.admit_nowait",
    "buffer.buffer.Buffer.take_nowait",
    "journal.journal._add_batch",
    "job.reporter.Reporter.step",
    "launch.lease.Lease.hand_to",
    "sync.push.PushLoop._publish",
    "job.checkpointer.Checkpointer.make_last",
    "job.reporter.Reporter.aclose",
    "rollouts.producers.Producers.aclose",
]
"""Parts of the controller: its tasks, its threads, and its end."""


@pytest.mark.parametrize(
    "place", [*STARTS, *(pytest.param(place, marks=pytest.mark.slow) for place in RUNS)]
)
def test_the_log_has_the_traceback_of_an_internal_error(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_apart = place == "sync.push.PushLoop._publish"
    path = write_config(
        tmp_path,
        placement={"rollout": "cpu" if is_apart else "trainer"},
        trainer={"num_steps": 2},
        observe={"console": "none"},
    )
    target = f"asyncrl.{place}"
    is_async = inspect.iscoroutinefunction(pkgutil.resolve_name(target))

    def has_planted_fault(*_: object, **__: object) -> None:
        raise AssertionError

    async def fails(*_: object, **__: object) -> None:
        has_planted_fault()

    monkeypatch.setattr(target, fails if is_async else has_planted_fault)
    # Everything is done when the producers are closed: their fault does not end the run.
    with contextlib.suppress(ComponentError, JournalError, AssertionError):
        asyncrl.run(yaml.safe_load(path.read_text()), run_dir=tmp_path / "run")
    log = (tmp_path / "run/logs/controller.log").read_text()
    assert "in has_planted_fault" in log


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
    for name in (".final.new", ".model.new"):
        (run_dir / name).mkdir()
    refused = raising(ComponentError("trainer-0", "cannot start"))
    monkeypatch.setattr(job.Lifecycle, "run", refused)
    with pytest.raises(
        (ComponentError, ConfigError),
        match="other settings" if changed else "cannot start",
    ):
        job.run_job(make_config(tmp_path, trainer=changed), run_dir, name="test")
    assert (run_dir / "final" / "weights").read_text() == "whole"
    assert [*run_dir.glob(".final*"), *run_dir.glob(".model*")] == []


FORKING = """
    import os, sys
    from pathlib import Path
    from asyncrl.base.files import run_lock
    from asyncrl.messages.records import Prompt
    from asyncrl.tasks.rewards import call
    def forks(prompt, completion):
        if os.fork() == 0:
            os.close(1)
            os.read(0, 1)  # until the test closes it
        return 1.0
    with run_lock(Path(sys.argv[1])):
        assert call(forks, Prompt("0/0", ()), "", {}) == 1.0
        print("the parent alone")
"""


def test_forked_child_neither_holds_the_lock_nor_returns(tmp_path: Path) -> None:
    lock = tmp_path / "run.lock"
    reading, writing = os.pipe()
    command = [sys.executable, "-c", textwrap.dedent(FORKING), str(lock)]
    done = subprocess.run(command, stdin=reading, stdout=subprocess.PIPE, check=True)
    with (
        run_lock(lock),
        pytest.raises(JournalError, match=f"process {os.getpid()} writes"),
        run_lock(lock),
    ):
        pass
    os.close(reading)
    os.close(writing)
    assert done.stdout == b"the parent alone\n"


SIGNALLED = """
    import asyncio, os, signal, sys, time
    from pathlib import Path
    from types import SimpleNamespace
    from asyncrl.base.user_code import run_loop
    from asyncrl.job import lifecycle

    lifecycle.MAX_DEAF_S = 1.0
    lifecycle.SAME_SIGNAL_S = 60.0
    def sleeps(): time.sleep(1000)
    def computes():
        while True: pass
    def forks():
        child = os.fork()
        if child == 0:
            time.sleep(1000)
        os.kill(child, signal.SIGTERM)
        print("child", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    log = SimpleNamespace(warn=print, activity=print, current_activity="")
    async def aclose(): print("closed in order")
    life = lifecycle.Lifecycle(None, Path(sys.argv[1]), log, SimpleNamespace(aclose=aclose))
    async def live():
        print("ready", flush=True)
        if sys.argv[2] == "waits":
            life.can_stop = True
            await life.stop.wait()
            await asyncio.sleep(2)
            return 128 + life.signal
        globals()[sys.argv[2]]()
        await asyncio.sleep(0)  # a signal of the child would arrive here
        return 0
    sys.exit(run_loop(life.run(live)))
"""


def signalled(
    folder: Path, user_code: str, script: str = SIGNALLED
) -> subprocess.Popen[str]:
    command = [sys.executable, "-uc", textwrap.dedent(script), str(folder), user_code]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def test_signal_to_a_forked_child_ends_only_the_child(tmp_path: Path) -> None:
    with signalled(tmp_path, "forks") as process:
        said, _ = process.communicate(timeout=120)
    assert said.splitlines() == ["ready", f"child {-signal.SIGTERM}", "closed in order"]
    assert process.returncode == 0


def test_second_signal_ends_a_run_at_once(tmp_path: Path) -> None:
    script = SIGNALLED.replace("SAME_SIGNAL_S = 60.0", "SAME_SIGNAL_S = 0.0")
    script = script.replace("sleep(2)", "sleep(1000)")
    with signalled(tmp_path, "waits", script) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGINT)
        assert process.stdout.readline().startswith("stopping")
        process.send_signal(signal.SIGINT)
        said, _ = process.communicate(timeout=120)
    assert (said, process.returncode) == ("", 128 + signal.SIGINT)


def test_signal_before_a_run_has_begun_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a notebook the run works in a thread, and may download for minutes before it
    has a loop.
    """
    monkeypatch.setattr(
        job, "fetch_architectures", lambda _: os.kill(os.getpid(), signal.SIGINT)
    )
    config = make_config(tmp_path)

    async def notebook() -> str:
        return asyncrl.run(config, run_dir=tmp_path / "run").state

    assert asyncio.run(notebook()) == "interrupted"


@contextlib.contextmanager
def before_line(function: str, line: int, act: Callable[[], object]) -> Iterator[None]:
    """Call `act` before the line with this number of the function runs, in this thread."""
    earlier = sys.gettrace()
    lines = 0

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal lines
        if frame.f_code.co_name != function:
            return None
        if event == "line":
            lines += 1
            if lines == line:
                act()
        return trace

    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(earlier)
    assert lines >= line


@pytest.mark.parametrize("line", [1, 2, 3])
def test_signal_while_a_run_begins_in_a_thread_is_kept(
    tmp_path: Path, line: int
) -> None:
    life = make_job(tmp_path).lifecycle
    has_begun = threading.Event()

    async def live() -> int:
        has_begun.set()
        await asyncio.sleep(10)  # the limit of a run that hears nothing
        return 0

    with ThreadPoolExecutor(1) as pool:
        running = list[Future[int]]()

        def begin() -> None:
            running.append(pool.submit(run_loop, life.run(live)))
            assert has_begun.wait(60)

        if line == 3:  # the line of a run that has begun
            begin()
        with before_line("send", line, begin if line < 3 else int):
            life.sent_signals.send(signal.SIGTERM)
        assert running[0].result(60) == 128 + signal.SIGTERM


def test_handlers_of_signals_return_after_a_run(tmp_path: Path) -> None:
    def handlers() -> list[Any]:
        return [signal.getsignal(number) for number in STOPS]

    async def live() -> int:
        assert handlers() != earlier
        return 0

    earlier = handlers()
    assert run_loop(make_job(tmp_path).lifecycle.run(live)) == 0
    assert handlers() == earlier


@pytest.mark.parametrize("user_code", ["sleeps", "computes", "waits"])
def test_signal_ends_a_run_that_user_code_blocks(
    tmp_path: Path, user_code: str
) -> None:
    """`timeout` sends a signal twice, at once: that is not a second signal, which would
    end a run unsaved.
    """
    with signalled(tmp_path, user_code) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        for _ in range(2):
            process.send_signal(signal.SIGTERM)
            time.sleep(0.05)
        said, _ = process.communicate(timeout=120)
    assert process.returncode == 128 + signal.SIGTERM
    if user_code == "waits":
        assert said.splitlines() == [
            "stopping (press Ctrl-C again to end at once)",
            "closed in order",
        ]
    else:
        assert re.search(
            rf'did not hear it for 1 s in\n.*"<string>", line \d+, in {user_code}\n',
            said,
        ), said


@pytest.mark.parametrize(("holds", "then"), [("", 0o750), ("thesis.txt", 0o755)])
def test_empty_run_directory_gets_the_mode_of_its_config(
    holds: str, then: int, tmp_path: Path
) -> None:
    folder = tmp_path / "runs"
    folder.mkdir()
    folder.chmod(0o755)
    (folder / holds).touch()
    with locked_run_dir(folder, 0o750):
        pass
    assert (stat.S_IMODE(folder.stat().st_mode), (folder / "logs").is_dir()) == (
        then,
        True,
    )
    assert ObserveConfig().dir_mode == 0o700


@pytest.mark.skipif(sys.platform != "linux", reason="/proc")
@pytest.mark.parametrize("begin", [run_job, serve_gateway])
def test_controller_of_agents_hides_its_memory(
    begin: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    libc, get_dumpable, set_dumpable = ctypes.CDLL(None), 3, 4
    monkeypatch.setattr(resource, "getrlimit", lambda _: (8, 8))  # a start is refused
    monkeypatch.setattr(resource, "setrlimit", lambda *_: None)
    config = make_config(tmp_path, generator={"python": "my_agent:run"})
    try:
        libc.prctl(set_dumpable, 1, 0, 0, 0)
        with pytest.raises(ConfigError, match="may open 8 files"):
            begin(config, tmp_path / "run", name="run")
        assert not (tmp_path / "run").exists(), "refused before anything is made"
        assert libc.prctl(get_dumpable, 0, 0, 0, 0) == 0
    finally:
        libc.prctl(set_dumpable, 1, 0, 0, 0)


def test_part_that_never_closes_is_given_up() -> None:
    async def story() -> None:
        life: Any = SimpleNamespace(stack=contextlib.AsyncExitStack())
        async with life.stack:
            Lifecycle.closes(life, "hung part", asyncio.Event().wait)  # type: ignore[arg-type]
        assert asyncio.get_running_loop().time() == CLOSE_TIMEOUT_S

    run_virtual(story())


def test_workers_close_at_the_same_time() -> None:
    """One limit, CLOSE_TIMEOUT_S, covers all workers and the gateway."""

    async def story() -> None:
        all_close = asyncio.Barrier(4)
        closed = list[str]()

        def part(name: str, *waits: Callable[[], Awaitable[object]]) -> Any:
            async def aclose() -> None:
                for wait in waits:
                    await wait()
                closed.append(name)

            return SimpleNamespace(aclose=aclose)

        gateway, queue = part("gateway"), part("queue")
        gateway.sessions = SimpleNamespace(end_all_nowait=closed.append)
        queue.is_over = False
        workers = [part(f"worker-{number}", all_close.wait) for number in range(4)]
        runtime = SimpleNamespace(gateway=gateway, queue=queue, workers=workers)
        close: Any = AgentRuntime.aclose
        async with asyncio.timeout(CLOSE_TIMEOUT_S):
            await close(runtime)
        assert (closed[1], closed[-1], len(closed)) == ("queue", "gateway", 7)

    run_virtual(story())


def test_settings_of_prompts_reach_the_tokenizer_of_a_run(
    tmp_path: Path, tiny_model_dir: Path
) -> None:
    template = tmp_path / "dated.jinja"
    template.write_text("{{ strftime_now('%Y') }}{{ messages[0].content }}")
    model = {
        "path": str(tiny_model_dir),
        "scratch": None,
        "chat_template": str(template),
    }
    num_tokens = []
    for parses in (True, False):
        job = make_job(tmp_path, model=model, gateway={"parse_special_tokens": parses})
        _, tokenizer = asyncio.run(prepare_model(job.lifecycle, now=date(2001, 2, 3)))
        ids = tokenizer.encode_chat([{"role": "user", "content": "<|im_end|>"}])
        assert tokenizer.decode(ids, skip_special_tokens=False).startswith("2001")
        num_tokens.append(len(ids))
    assert num_tokens[0] < num_tokens[1], "the name of a special token is text"


def test_record_of_a_step_has_its_own_numbers_not_those_of_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ready, busy_s = 3.0, 10.0

    def read_gauges(_: object) -> dict[str, float]:
        return {"buffer/ready": ready, "perf/to_engines_s": ready / 10}

    monkeypatch.setattr("asyncrl.job.reporter.gauges", read_gauges)
    engines = SimpleNamespace(busy_s=lambda now_s: {"engine-0": busy_s})
    run: Any = SimpleNamespace(
        engines=engines, tokenizer=SimpleNamespace(decode=lambda ids, **_: "")
    )
    reporter = Reporter(make_config(tmp_path), tmp_path, "test")
    reporter.start()
    ended = []
    for version in (0, 1):
        ended.append(reporter.end_step(run, make_batch(version, version)))
        # The next step begins before the record of this one is made.
        ready, busy_s = ready + 2, busy_s + 10
    for version in (0, 1):
        report = TrainResponse(
            policy_version=version + 1, metrics={"tokens/trained": 1}
        )
        reporter.step(run, make_batch(version, version), report, {}, ended[version])
    reporter.finish("finished")
    first, second = read_metrics(tmp_path, [])
    assert (first["buffer/ready"], second["buffer/ready"]) == (3, 5)
    assert (first["perf/to_engines_s"], second["perf/to_engines_s"]) == (0.3, 0.5)
    # Ten busy seconds between the ends of the two steps, whenever they are recorded.
    seconds = second["time_s"] - first["time_s"]
    assert second["engine/busy_slots"] == pytest.approx(10 / seconds)
    assert 0 <= second["perf/cores_fraction"] <= 1


def test_unwritable_status_is_a_warning_and_ends_no_run(tmp_path: Path) -> None:
    reporter = Reporter(make_config(tmp_path), tmp_path, "test")
    unfinished = tmp_path / ".status.json.new"
    unfinished.mkdir()
    reporter.write_status(1, {})
    assert reporter.log.warnings == ["status.json is out of date: Is a directory"]
    unfinished.rmdir()
    reporter.write_status(2, {})
    assert read_status(tmp_path, [])["step"] == 2
    reporter.finish("interrupted")
