"""Worker process: take work items from a gateway, run them in the harness, post the
results. `python -m asyncrl.agents.worker` as a child of a run, `asyncrl work URL` on
any host.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import logging
import os
import random
import secrets
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import TypeVar

from aiohttp import web
from pydantic import BaseModel, Field

from asyncrl.agents.harness import (
    REQUEST_LOGGERS,
    Harness,
    Session,
    build_harness,
    make_http_client,
    run_item,
    without_proxy,
)
from asyncrl.base.errors import (
    ComponentError,
    ConfigError,
    ErrorBody,
    Message,
    fatal_line,
    first_cause,
)
from asyncrl.base.host import LOG_FORMAT, available_memory, hide_memory
from asyncrl.base.http import (
    SECRET_ENV,
    WORKER_KEY_ENV,
    Caller,
    CallLost,
    CallRefused,
    add_route,
    child_arguments,
    die_with_parent,
    make_app,
    secret_of,
)
from asyncrl.base.signals import END
from asyncrl.base.user_code import run_loop
from asyncrl.base.waits import Signal, at_most
from asyncrl.config import GeneratorConfig
from asyncrl.config.generator_config import HARNESSES
from asyncrl.messages import worker_api as wire
from asyncrl.messages.records import Outcome

log = logging.getLogger("asyncrl.worker")

Answer = TypeVar("Answer", bound=BaseModel)

CALL_TIMEOUT_S = 15.0
MAX_SIGN_PERIOD_S = 5.0
"""Upper limit; also a quarter of lease_timeout_s."""
MAX_BACKOFF_S = 30.0
# Only a courtesy: without it the gateway notices after lease_timeout_s.
GOODBYE_TIMEOUT_S = 1.0
ROOM_PERIOD_S = 2.0
MIB = 2**20


MIN_FREE_MIB = 256
"""Memory and disk that stay free: a worker with less takes no work."""


def shortage() -> str:
    """Return the resources that are short on this machine, or an empty text."""
    free = {
        "memory": available_memory() // MIB,
        "disk": shutil.disk_usage(tempfile.gettempdir()).free // MIB,
    }
    return " and ".join(
        f"{num_mib} MiB of {name} are free, {MIN_FREE_MIB} must be"
        for name, num_mib in free.items()
        if num_mib < MIN_FREE_MIB
    )


class WorkerSettings(Message):
    name: str
    slots: int = Field(ge=1)
    give_up_s: float | None = Field(default=None, ge=0)


@dataclass(eq=False)
class Worker:
    """Run one rollout per slot.

    Life: run() until cancelled, or the gateway reports the run's end: then all
        harnesses are cancelled.

    Waits: for a free slot, for memory and disk, then for work. Without an answer from
        the gateway it retries for `give_up_s`.

    Invariant: an item is in `running` from its arrival until its result is
    acknowledged, or it is cancelled. Heartbeats share the harnesses' event loop:
    blocking it for lease_timeout_s loses all items.
    """

    harnesses: Sequence[Harness]
    caller: Caller
    settings: WorkerSettings
    _busy = ""
    _is_over = False
    """The run has ended, as any answer may say."""
    _lease_timeout_s = 4 * MAX_SIGN_PERIOD_S

    def __post_init__(self) -> None:
        self.running: dict[str, asyncio.Task[None]] = {}
        name = self.settings.name
        self._identity = {"worker": name, "instance": secrets.token_hex(8)}
        self._freed = Signal()
        self._numbers = itertools.count()
        self._http_client = cache(make_http_client)
        self._clock = asyncio.get_running_loop().time

    async def run(self) -> None:
        """Run work items until the gateway says that the run is over.

        Raises ConfigError if the gateway refuses this worker or the harness cannot run,
        ComponentError after `give_up_s` without an answer.
        """
        try:
            async with asyncio.TaskGroup() as tasks:
                # Before heartbeats: the answer has the lease, which sets their period.
                # It brings no work, since nobody has looked for room yet.
                answer = await self._take(CALL_TIMEOUT_S)
                heartbeats = tasks.create_task(
                    self._send_heartbeats(), name="heartbeats"
                )
                while not self._is_over:
                    for item in answer.items:
                        name = f"{item.rollout_id} attempt {item.attempt}"
                        running = tasks.create_task(
                            self._run_item(item, answer), name=name
                        )
                        self.running[item.item_id] = running
                    await self._freed.wait_for(
                        lambda: len(self.running) < self.settings.slots or self._is_over
                    )
                    await self._wait_room()
                    timeout_s = wire.MAX_WAIT_S + CALL_TIMEOUT_S
                    answer = await self._take(timeout_s, is_poll=True)
                # Workers of `asyncrl work` return here. The run ends its own processes.
                if self.settings.give_up_s is None:
                    await asyncio.Event().wait()
                else:
                    log.info("worker %s: the run is done", self.settings.name)
                for task in (heartbeats, *self.running.values()):
                    task.cancel()
        except BaseExceptionGroup as errors:
            # Python 3.11.2 wraps what an except* raises
            error = first_cause(errors)
            if not isinstance(error, (ConfigError, ComponentError)):
                raise
            raise error from None
        finally:
            # The run retries the items now, not after lease_timeout_s of silence.
            leaving = self._request(is_leaving=True)
            with contextlib.suppress(CallLost, CallRefused):
                await self.caller.post(
                    "/work/take", leaving, wire.TakeAnswer, timeout_s=GOODBYE_TIMEOUT_S
                )
            if self._http_client.cache_info().currsize:
                await self._http_client().aclose()

    async def _wait_room(self) -> None:
        """Wait until the machine has memory and disk for another rollout."""
        while (short := shortage()) and not self._is_over:
            if not self._busy:
                log.warning("worker %s takes no work: %s", self.settings.name, short)
            self._busy = short
            async with at_most(ROOM_PERIOD_S):
                await self._freed.wait()
        self._busy = ""

    async def _take(
        self, timeout_s: float, *, is_poll: bool = False
    ) -> wire.TakeAnswer:
        """Ask for work if `is_poll`; else send a heartbeat."""
        # again for each try, because the held items change
        make = partial(self._request, is_poll=is_poll)
        answer = await self._ask("/work/take", make, wire.TakeAnswer, timeout_s)
        self._lease_timeout_s = answer.lease_timeout_s
        if answer.is_over:
            self._is_over = True
            self._freed.notify()
        return answer

    def _request(
        self, *, is_poll: bool = False, is_leaving: bool = False
    ) -> wire.TakeRequest:
        return wire.TakeRequest(
            **self._identity,
            max_items=self.settings.slots - len(self.running) if is_poll else 0,
            number=next(self._numbers),
            holding=list(self.running),
            is_leaving=is_leaving,
            busy=self._busy,
        )

    async def _run_item(self, item: wire.WorkItem, answer: wire.TakeAnswer) -> None:
        url = f"{self.caller.url}/v1"
        session = Session(
            url,
            item.key,
            answer.model,
            item.outcome_key,
            http_client=self._http_client,
            roles=answer.roles,
        )
        try:
            outcome = await run_item(self.harnesses[item.harness], item, session)
            field = "outcome" if isinstance(outcome, Outcome) else "failure"
            result = wire.ResultRequest(
                **self._identity, item_id=item.item_id, **{field: outcome}
            )
            await self._ask(
                "/work/result", lambda: result, wire.Accepted, CALL_TIMEOUT_S
            )
        except CallRefused as refused:
            log.info(
                "%s: its result was dropped: %s", item.rollout_id, refused.body.error
            )
        finally:
            del self.running[item.item_id]
            self._freed.notify()

    async def _send_heartbeats(self) -> None:
        while True:
            await asyncio.sleep(min(MAX_SIGN_PERIOD_S, self._lease_timeout_s / 4))
            timeout_s = min(CALL_TIMEOUT_S, self._lease_timeout_s / 3)
            answer = await self._take(timeout_s)
            for item_id in answer.cancel:
                if (running := self.running.get(item_id)) is not None:
                    log.info(
                        "%s is cancelled: the run has ended or requeued it",
                        running.get_name(),
                    )
                    # Also while it posts its result, which would be refused.
                    running.cancel()

    async def _ask(
        self,
        path: str,
        make: Callable[[], BaseModel],
        answer: type[Answer],
        timeout_s: float,
    ) -> Answer:
        """Post messages from `make` until answered. Raises CallRefused for 410,
        ConfigError if this worker is rejected, ComponentError after `give_up_s`.
        """
        backoff_s = 0.5
        lost_since_s: float | None = None
        while True:
            try:
                return await self.caller.post(path, make(), answer, timeout_s=timeout_s)
            except (CallRefused, CallLost) as error:
                # The item belongs to nobody or to another worker. Posting again would
                # not change that.
                if isinstance(error, CallRefused) and error.status == 410:
                    raise
                if isinstance(error, CallRefused) and error.status in (401, 422):
                    raise ConfigError(
                        f"the gateway at {self.caller.url} refused worker {self.settings.name}: "
                        f"{error.body.error}",
                        rule=error.body.rule,
                        way_out=error.body.way_out,
                    ) from error
                # Anything else may pass. A run may be resumed, with the same key and,
                # if it is configured, the same port.
                if lost_since_s is None:
                    lost_since_s = self._clock()
                    log.warning("worker %s: %s. It retries.", self.settings.name, error)
                lost_s = self._clock() - lost_since_s
                if (
                    self.settings.give_up_s is not None
                    and lost_s >= self.settings.give_up_s
                ):
                    raise ComponentError(
                        "gateway",
                        f"worker {self.settings.name}: no answer for {lost_s:.0f} s: {error}",
                        rule=f"--give-up-after={self.settings.give_up_s:g} s is the limit",
                        way_out="start the run again, then the worker; or raise --give-up-after.",
                    ) from error
            # A quarter of the lease at most. Heartbeats come every quarter and wait a
            # third for an answer, so a lost one is repeated before the lease ends.
            backoff_s = min(2 * backoff_s, MAX_BACKOFF_S, self._lease_timeout_s / 4)
            # After a restart of the gateway, workers must not return all at once.
            await asyncio.sleep(backoff_s * random.uniform(0.5, 1.0))


# ---- the worker process


class WorkerSpec(WorkerSettings):
    """Without the worker key, which is in WORKER_KEY_ENV."""

    url: str = Field(pattern="^https?://[^/]+")
    harnesses: list[GeneratorConfig] = Field(min_length=1)


def work(
    harnesses: Sequence[Harness],
    spec: WorkerSpec,
    key: str,
    health_fd: int | None = None,
) -> int:
    """Return 0 when the run is done, 143 after SIGTERM, 130 after Ctrl-C. A second
    signal cuts the harnesses' cleanup.
    """
    # Agents' own clients read the environment, and no proxy knows the endpoint.
    os.environ.update(without_proxy(os.environ, spec.url))

    async def live() -> None:
        task = asyncio.current_task()
        assert task is not None
        caller = Caller("gateway", spec.url, key)
        try:
            if health_fd is not None:
                await _serve_health(harnesses, health_fd)
            worker = Worker(harnesses, caller, spec)
            # A run's own worker outlives signals to all processes of the run.
            number = signal.SIGTERM if health_fd is None else END
            asyncio.get_running_loop().add_signal_handler(number, task.cancel)
            await worker.run()
        finally:
            await caller.aclose()

    try:
        run_loop(live())
    except asyncio.CancelledError:
        return 128 + signal.SIGTERM
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    return 0


def main() -> None:
    text, fd = child_arguments()
    spec = WorkerSpec.model_validate_json(text)
    harnesses = list[Harness]()

    def kill_commands() -> None:
        for harness in harnesses:
            getattr(harness, "kill_all_nowait", lambda: None)()

    # Before user code is imported, which may take long. `harnesses` is read when the
    # run has died, not here.
    die_with_parent(kill_commands)
    _log_to_stderr()
    hide_memory()
    key = secret_of(WORKER_KEY_ENV)
    code = 0
    try:
        harnesses += [build_harness(config) for config in spec.harnesses]
        work(harnesses, spec, key, fd)
    except ConfigError as error:
        code = 1
        body = ErrorBody(error=error.what, rule=error.rule, way_out=error.way_out)
        print(fatal_line(body), file=sys.stderr)
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # hanging threads do not delay it


async def _serve_health(harnesses: Sequence[Harness], fd: int) -> None:
    """Answer GET /health on the harnesses' event loop: a worker that blocks it is
    restarted.
    """

    async def health() -> wire.WorkerHealth:
        all_calls = [getattr(harness, "calls", None) for harness in harnesses]
        num_abandoned = sum(getattr(calls, "num_abandoned", 0) for calls in all_calls)
        return wire.WorkerHealth(num_abandoned=num_abandoned, cpu_s=time.process_time())

    app = make_app(secret_of(SECRET_ENV))
    add_route(app, "GET", "/health", health)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.SockSite(runner, socket.socket(fileno=fd)).start()


def _log_to_stderr() -> None:
    logging.basicConfig(level=logging.INFO, format=LOG_FORMAT)
    for name in REQUEST_LOGGERS:
        logging.getLogger(name).setLevel(logging.WARNING)


# ---- `asyncrl work`


def run_worker(
    url: str,
    *,
    key_file: Path | None,
    harness: Mapping[str, str | None],
    slots: int,
    name: str | None,
    args: str | None,
    env: Sequence[str],
    give_up_s: float,
    **settings: object,
) -> int:
    """Run rollouts of the gateway at `url` until its run is done; return 0, or 143 or
    130 after SIGTERM or Ctrl-C.

    `key_file` None: the key is in the environment. `harness` has one option of
    HARNESSES, `args` is a JSON object, `env` has NAME=VALUE, `settings` are others of
    GeneratorConfig. Raises ConfigError, and errors of Worker.run.
    """
    key = _worker_key(key_file)
    given = {
        kind: HARNESSES[kind].parse(text) for kind, text in harness.items() if text
    }
    given |= {name: value for name, value in settings.items() if value is not None}
    try:
        variables = dict(each.split("=", 1) for each in env)
        config = GeneratorConfig(**given, args=json.loads(args or "{}"), env=variables)
        if not config.is_harness:
            raise ValueError("no harness is given")
        spec = WorkerSpec(
            name=name or f"{socket.gethostname()}/{os.getpid()}",
            url=url.rstrip("/").removesuffix("/v1"),
            slots=slots,
            harnesses=[config],
            give_up_s=give_up_s,
        )
    except ValueError as error:
        options = ", ".join(
            f"--{kind} {each.metavar}" for kind, each in HARNESSES.items()
        )
        raise ConfigError(
            f"`asyncrl work {url}` got {given}, {args=}: {error}",
            way_out=f"give one harness ({options}); --args is a JSON object, --env NAME=VALUE.",
        ) from error
    _log_to_stderr()
    hide_memory()
    log.info("worker %s: %d slots, gateway %s", spec.name, slots, spec.url)
    return work([build_harness(config)], spec, key)


def _worker_key(key_file: Path | None) -> str:
    env_key = os.environ.pop(WORKER_KEY_ENV, "")
    try:
        key = (
            json.loads(key_file.read_text(encoding="utf-8"))["worker_key"]
            if key_file
            else env_key
        )
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(
            f"--key-file {key_file}: {type(error).__name__}: {error}"
        ) from error
    if not key:
        raise ConfigError(
            "`asyncrl work` has no worker key",
            way_out=f"set {WORKER_KEY_ENV}, or give --key-file with the run's gateway.json.",
        )
    return str(key)


if __name__ == "__main__":
    main()
