"""Workers against a real gateway's lease routes, in process and as processes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from agent_cases import started
from gateway_cases import in_loop, until
from harness_gateway import WORKER_KEY, open_gateway, processes_of, working

from asyncrl.agents import Outcome, Session, Task
from asyncrl.agents.harness import AnyTask, build_harness
from asyncrl.agents.worker import Worker, WorkerSettings
from asyncrl.base.errors import ComponentError, ConfigError, RolloutFailure
from asyncrl.base.http import WORKER_KEY_ENV, Caller
from asyncrl.config import GeneratorConfig
from asyncrl.messages.worker_api import WorkerHealth


class Steps:
    """A harness whose runs wait for futures that the test resolves."""

    def __init__(self) -> None:
        self.tasks: list[AnyTask] = []
        self.ends: dict[str, asyncio.Future[Any]] = {}
        self.cancelled: list[str] = []

    async def run(self, task: AnyTask, session: Session) -> Outcome:
        self.tasks.append(task)
        end = self.ends[task.prompt_id] = asyncio.get_running_loop().create_future()
        try:
            return await end  # type: ignore[no-any-return]
        except asyncio.CancelledError:
            self.cancelled.append(task.prompt_id)
            raise


@in_loop
async def test_worker_fills_its_slots_and_posts_outcomes() -> None:
    steps = Steps()
    async with open_gateway() as gateway, working(gateway, steps) as worker:
        runs = [
            asyncio.ensure_future(gateway.run(number, info={"deep": [number]}))
            for number in range(3)
        ]
        await until(lambda: len(steps.ends) == 2)
        assert (gateway.queue.gauges()["harness/queued"], len(worker.running)) == (1, 2)
        messages = ({"role": "user", "content": "What is 1?"},)
        assert steps.tasks[1] == Task(
            "p1", messages, {"deep": [1]}, 1000, 0, 0, answer="42"
        )
        steps.ends["p1"].set_result(Outcome(0.5, {"turns": 2}, {"chatcmpl-0": 0.25}))
        assert await runs[1] == Outcome(0.5, {"turns": 2.0}, {"chatcmpl-0": 0.25})
        await until(lambda: "p2" in steps.ends)
        for name in ("p0", "p2"):
            steps.ends[name].set_result(Outcome())
        assert [await runs[0], await runs[2]] == [Outcome(), Outcome()]


@in_loop
async def test_worker_continues_after_a_harness_error() -> None:
    for name, result, said in (
        (
            "agent",
            "error",
            r"g0/r0 \(prompt p0\): its harness raised ZeroDivisionError: by \\ud800 zero",
        ),
        ("plain", "stop", "its harness raised RuntimeError: StopIteration: no more"),
        ("agent", "unspeakable", "its harness raised .*UnspeakableError"),
        ("agent", "interrupt", "its harness raised KeyboardInterrupt"),
        (
            "agent",
            "no await",
            r"no attribute 'choices'; is an `await` missing\? \(agents_for_test.py line",
        ),
        (
            "agent",
            "cancellation",
            "generator.python=agents_for_test:agent raised CancelledError",
        ),
    ):
        harness = build_harness(
            GeneratorConfig(python=f"agents_for_test:{name}", args={"result": result})
        )
        async with open_gateway() as gateway, working(gateway, harness):
            for _ in range(2):
                with pytest.raises(RolloutFailure, match=said):
                    await gateway.run(0)


@in_loop
async def test_worker_finds_a_restarted_gateway_and_drops_old_rollouts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("asyncrl.agents.worker.MAX_SIGN_PERIOD_S", 0.5)
    steps = Steps()
    async with contextlib.AsyncExitStack() as later:
        async with open_gateway() as old:
            port = int(old.url.rpartition(":")[2])
            await later.enter_async_context(working(old, steps, slots=1))
            lost = asyncio.ensure_future(old.run(0))
            await until(lambda: "p0" in steps.ends)
            lost.cancel()
        new = await later.enter_async_context(open_gateway(port=port))
        running = asyncio.ensure_future(new.run(1))
        await until(lambda: "p1" in steps.ends and steps.cancelled == ["p0"])
        steps.ends["p1"].set_result(Outcome(1.0))
        assert await running == Outcome(1.0)


@in_loop
async def test_a_worker_elsewhere_ends_with_its_run_or_gives_up() -> None:
    async with open_gateway() as gateway:
        caller = gateway.worker()
        running = asyncio.ensure_future(
            Worker(
                [Steps()], caller, WorkerSettings(name="w", slots=2, give_up_s=60.0)
            ).run()
        )
        own = gateway.worker()
        owned = asyncio.ensure_future(
            Worker([Steps()], own, WorkerSettings(name="own", slots=2)).run()
        )
        await until(lambda: gateway.queue.gauges()["harness/workers"] == 2)
        gateway.queue.is_over = True
        await gateway.queue.aclose()
        await running
        late = gateway.worker()
        await Worker(
            [Steps()], late, WorkerSettings(name="late", slots=1, give_up_s=60.0)
        ).run()
        assert not owned.done(), "the run ends its own"
        owned.cancel()
        await asyncio.wait({owned})
        for each in (caller, own, late):
            await each.aclose()
    gone = Caller("gateway", gateway.url, WORKER_KEY)
    with pytest.raises(
        ComponentError, match="no answer for 0 s: .*--give-up-after=0 s is the limit"
    ):
        await Worker(
            [Steps()], gone, WorkerSettings(name="w", slots=1, give_up_s=0.0)
        ).run()
    await gone.aclose()


@in_loop
async def test_worker_without_memory_or_disk_takes_no_work(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("asyncrl.agents.worker.ROOM_PERIOD_S", 0.01)
    monkeypatch.setattr("asyncrl.agents.worker.MAX_SIGN_PERIOD_S", 0.04)
    free = {"memory": 100}
    monkeypatch.setattr(
        "asyncrl.agents.worker.available_memory", lambda: free["memory"] * 2**20
    )
    steps = Steps()
    async with open_gateway() as gateway:
        caller = gateway.worker()
        worker = Worker([steps], caller, WorkerSettings(name="w", slots=3))
        living = asyncio.ensure_future(worker.run())
        running = asyncio.ensure_future(gateway.run(0))
        await until(lambda: "takes none: 100 MiB" in gateway.queue.what_runs())
        assert not steps.ends
        free["memory"] = 300
        await until(lambda: "p0" in steps.ends)
        steps.ends["p0"].set_result(Outcome(1.0))
        assert await running == Outcome(1.0)
        assert "takes none" not in gateway.queue.what_runs()
        living.cancel()
        await asyncio.wait({living})
        await caller.aclose()


@in_loop
async def test_worker_without_room_ends_with_its_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("asyncrl.agents.worker.MAX_SIGN_PERIOD_S", 0.04)
    monkeypatch.setattr("asyncrl.agents.worker.MIN_FREE_MIB", 10**9)
    async with open_gateway() as gateway:
        caller = gateway.worker()
        worker = Worker(
            [Steps()], caller, WorkerSettings(name="w", slots=1, give_up_s=60.0)
        )
        living = asyncio.ensure_future(worker.run())
        await until(lambda: "takes none" in gateway.queue.what_runs())
        gateway.queue.is_over = True
        await gateway.queue.aclose()
        await living
        await caller.aclose()


@pytest.mark.slow
def test_worker_without_a_gateway_ends_at_sigterm() -> None:
    options = ["--command", "true"]
    with subprocess.Popen(
        [sys.executable, "-m", "asyncrl", "work", "http://127.0.0.1:9", *options],
        env={**os.environ, WORKER_KEY_ENV: "x"},
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stderr is not None
        while "It retries" not in process.stderr.readline():
            assert process.poll() is None
        process.terminate()
        assert process.wait(timeout=60) == 143


@in_loop
async def test_wrong_key_or_broken_harness_ends_the_worker() -> None:
    class Needs:
        async def run(self, task: AnyTask, session: Session) -> Outcome:
            raise ConfigError("no such package")

    async with open_gateway() as gateway:
        running = asyncio.ensure_future(gateway.run(0))
        for key, said in (
            ("wrong", "refused worker w: wrong or missing worker key"),
            (WORKER_KEY, "no such package"),
        ):
            caller = gateway.worker(key=key)
            with pytest.raises(ConfigError, match=said):
                await Worker([Needs()], caller, WorkerSettings(name="w", slots=1)).run()
            await caller.aclose()
        with pytest.raises(RolloutFailure, match="worker w was ended"):
            await running


@pytest.mark.slow
@in_loop
async def test_worker_process_runs_rollouts_and_ends_on_sigterm(tmp_path: Path) -> None:
    async with open_gateway() as gateway:
        harness = GeneratorConfig(python="agents_for_test:environment")
        async with started(gateway, tmp_path, harness) as (process, caller):
            assert (
                await caller.get("/health", WorkerHealth, timeout_s=60.0)
            ).num_abandoned == 0
            said = await gateway.run(0)
            assert said == Outcome(1.0, {"has_worker_key": 0.0, "is_hidden": 1.0}), (
                "a harness finds no key"
            )
        assert process.returncode == 0
        assert gateway.queue.gauges()["harness/workers"] == 0, "it said goodbye"


@pytest.mark.slow
@pytest.mark.parametrize("how", ["orphaned", "SIGKILL"])
@in_loop
async def test_the_commands_of_a_worker_end_with_it(tmp_path: Path, how: str) -> None:
    temp, written = tmp_path / "tmp", tmp_path / "env"
    temp.mkdir()
    async with open_gateway() as gateway:
        script = (
            f"env > {written}; trap '' TERM; sleep 3600 & while :; do sleep 1; done"
        )
        harness = GeneratorConfig(command=["/bin/bash", "-c", script])
        async with started(gateway, tmp_path, harness, TMPDIR=str(temp)) as (
            process,
            _,
        ):
            running = asyncio.ensure_future(gateway.run(0))
            await until(lambda: len(processes_of(token(written))) >= 3)
            if how == "orphaned":
                os.close(process._stdin or -1)
                process._stdin = None
                await process.wait()
            if how == "SIGKILL":
                process.kill_nowait()
                await process.wait()
                await until(lambda: not processes_of(token(written)))
        await until(lambda: not processes_of(token(written)))
        await until(lambda: list(temp.iterdir()) == [])
        gateway.queue.worker_gone_nowait("worker-0", "ended")
        with pytest.raises(
            RolloutFailure, match="worker worker-0 (was ended|is gone: ended)"
        ):
            await running


def token(environment: Path) -> str:
    """Return the marks of a worker's commands; invalid until the command has written
    its environment.
    """
    lines = environment.read_text().splitlines() if environment.exists() else []
    marks = [
        line.partition("=")[2] for line in lines if line.startswith("ASYNCRL_COMMAND=")
    ]
    return marks[0] if marks else "nothing"
