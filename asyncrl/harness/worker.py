"""The worker process of a run: `python -m asyncrl.harness.worker --spec FILE --fd N`. Knows how to start and end; runs no rollout itself.

Harnesses run on the event loop of the main thread. GET /health is answered from another thread, so that a harness that blocks the loop
costs its rollouts and not the run. SIGTERM ends the worker with all that its commands have started; so does the end of the parent.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable
from functools import partial
from typing import NoReturn

from pydantic import Field, ValidationError

from asyncrl.calling import Caller
from asyncrl.errors import ConfigError
from asyncrl.harness.build import HarnessSpec, build_harness
from asyncrl.harness.families import hide_memory
from asyncrl.harness.leasing import Worker
from asyncrl.harness.task import Harness
from asyncrl.user_calls import end_what_is_left
from asyncrl.wire import ErrorBody, Message, fatal_line
from asyncrl.worker_wire import WORKER_KEY_ENV, WorkerHealth


class WorkerSpec(Message):
    """What a worker of a run is told; the worker key is a secret beside it, WORKER_KEY_ENV."""

    name: str
    url: str
    slots: int = Field(ge=1)
    harness: HarnessSpec


async def work(harness: Harness, *, url: str, key: str, name: str, slots: int, begun: Callable[[Worker], None] = lambda _: None) -> int:
    """Work until SIGTERM or SIGINT comes, and return the number of the signal; the second one ends the process at once.

    Raises ConfigError; see Worker.run.
    """
    caller, caught = Caller("gateway", url, key), list[int]()
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None

    def end(number: int) -> None:
        if caught:  # the second one: what a harness cleans up, or refuses to, is not waited for; a keeper ends its commands
            end_process(128 + number)
        caught.append(number)
        task.cancel()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, end, number)
    try:
        worker = Worker(harness, caller, name=name, slots=slots)
        begun(worker)
        await worker.run()
    except asyncio.CancelledError:
        if not caught:
            raise
    finally:
        await caller.aclose()
    return caught[0]


def main() -> None:
    """Work until SIGTERM or the parent's end; ends with a fatal line if the spec cannot be met."""
    from asyncrl.serving import child_arguments, die_with_parent, fail, secret_of

    text, fd = child_arguments()
    try:
        spec = WorkerSpec.model_validate_json(text)
    except ValidationError as error:
        fail(f"the worker's spec is wrong: {error}", rule="see asyncrl/harness/worker.py", way_out="start it through asyncrl.")
    harnesses: list[Harness] = []
    die_with_parent(lambda: kill_commands(harnesses))
    log_to_stderr()
    hide_memory()
    key = secret_of(WORKER_KEY_ENV)
    try:
        harnesses.append(build_harness(spec.harness))
    except ConfigError as error:
        fail(error.what, rule=error.rule, way_out=error.way_out)

    async def work_and_end() -> None:
        code = 0
        try:
            await work(harnesses[0], url=spec.url, key=key, name=spec.name, slots=spec.slots, begun=partial(_serve_health, fd))
        except ConfigError as error:
            body, code = ErrorBody(error=error.what, rule=error.rule, way_out=error.way_out), 1
            print(fatal_line(body), file=sys.stderr)
        end_process(code)

    asyncio.run(end_what_is_left(work_and_end()))


def log_to_stderr() -> None:
    """The worker's log, without a line for each call of the model."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)


def kill_commands(harnesses: list[Harness]) -> None:
    """SIGKILL to what the commands of these have started, if they are commands."""
    for harness in harnesses:
        if kill := getattr(harness, "kill_all_nowait", None):
            kill()


def end_process(code: int) -> NoReturn:
    """End at once, from within the event loop: closing that would wait for threads that a harness has hanging in asyncio.to_thread."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _serve_health(fd: int, worker: Worker) -> None:
    """Answer GET /health on the inherited socket, from a thread of its own."""
    from asyncrl.serving import make_app, serve

    loop, app = asyncio.get_running_loop(), make_app()

    @app.get("/health")
    async def health() -> WorkerHealth:
        return worker.health(loop.time())

    threading.Thread(target=serve, args=(app, fd), name="health", daemon=True).start()


if __name__ == "__main__":
    main()
