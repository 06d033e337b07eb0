"""Controller's end of a Ray node: its actor (ray_host.py) and processes."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from asyncrl.base.errors import NodeLost, RoomError
from asyncrl.base.waits import waiting
from asyncrl.launch.fork_server import ONE_THREAD
from asyncrl.launch.nodes import Node, Order
from asyncrl.launch.on_ray.ray_host import News, RefusedStart, Started
from asyncrl.launch.processes import GROUP_TIMEOUT_S, KILL_TIMEOUT_S, death_of, read_log, tail_of

logger = logging.getLogger("asyncrl.launch.on_ray.ray_node")

NEWS_S = 0.5
"""Interval of log reads."""
LOST_S = 15.0
"""Silence after which a node is lost."""
ACTOR_S = 120.0
"""Limit for a new actor's first answer: Ray starts a Python."""
START_S = 180.0
"""Limit for a start, which may include a fork server's imports from a slow disk."""
END_S = 5.0 + GROUP_TIMEOUT_S + 2 * KILL_TIMEOUT_S + LOST_S
DRAIN_S = 5.0
"""Limit for the last lines of an ended process."""
_keys = itertools.count()


class RayNode:
    """A node of the run and its actor.

    Life: open() -> up -> lost: the actor died, or gave no answer for LOST_S -> open(), with a new actor ->
        aclose().
    Waits: one task polls the actor for updates of all processes; each call has a limit.
    """

    def __init__(
        self,
        node: Node,
        make_actor: Callable[[], tuple[Node, Any]],
        kill_actor: Callable[[Any], None],
        addressed: Callable[[str], str],
    ) -> None:
        """Initialize. `make_actor` uses this node or a replacement; `addressed` fills current node
        addresses into a spec.
        """
        self.node, self._make, self._kill, self.addressed = node, make_actor, kill_actor, addressed
        self._actor: Any = None
        self._lost = "it was not opened"
        self._asking: asyncio.Future[None] | None = None
        self._turn = asyncio.Lock()
        self._processes = dict[str, RayProcess]()

    def gone(self, name: str) -> NodeLost:
        """Return the loss of this node, as the end of a process on it."""
        return self._away(name, f"is gone: {self._lost}")

    def _away(self, name: str, how: str) -> NodeLost:
        rule = "all processes there end with it"
        way_out = "see `ray status`; start Ray there again."
        where = f"{self.node.name} ({self.node.address})"
        return NodeLost(name, f"the node {where} {how}", rule=rule, way_out=way_out)

    async def open(self) -> None:
        """Start an actor unless one answers. Raises RoomError."""
        async with self._turn:
            if not self._lost:
                return
            await self._end_actor()
            try:
                self.node, self._actor = await asyncio.to_thread(self._make)
                with waiting("its actor", on=self.node.name):
                    await self._within(ACTOR_S, "ready")
            except _lost_errors() as error:
                self._lost = f"Ray starts no actor of ours there: {_words(error)}"
                raise self.gone(self.node.name) from error
            self._lost = ""
            self._asking = asyncio.ensure_future(self._ask())
            self._asking.add_done_callback(self._asked)

    async def call(self, method: str, *arguments: Any, timeout_s: float = LOST_S) -> Any:
        """Call a Host method. Raises NodeLost without an answer, RoomError if the method raised."""
        if self._lost:
            raise self.gone(self.node.name)
        try:
            return await self._within(timeout_s, method, *arguments)
        except _raised_errors() as error:
            raise RoomError(self.node.name, f"its actor was asked for {method}: {_words(error)}") from error
        except _lost_errors() as error:
            raise self._away(self.node.name, f"does not answer: {_why_lost(error, timeout_s)}") from error

    def tell_nowait(self, method: str, *arguments: Any) -> None:
        if not self._lost:
            with contextlib.suppress(*_lost_errors()):
                getattr(self._actor, method).remote(*arguments)

    async def start(self, process: RayProcess, order: Order) -> Started | RefusedStart:
        """Start a process; its updates arrive from then on."""
        await self.open()
        answer: Started | RefusedStart = await self.call("start", process.key, order, timeout_s=START_S)
        if isinstance(answer, Started):
            self._processes[process.key] = process
        return answer

    async def aclose(self) -> None:
        if not self._lost:
            with contextlib.suppress(RoomError):
                await self.call("leave")
        self._lost = self._lost or "it was closed"
        await self._end_actor()

    async def _end_actor(self) -> None:
        if self._asking is not None:
            self._asking.cancel()
            await asyncio.wait({self._asking})
            self._asking = None
        if self._actor is not None:
            with contextlib.suppress(*_lost_errors()):
                async with asyncio.timeout(LOST_S):
                    await asyncio.to_thread(self._kill, self._actor)
            self._actor = None

    async def _within(self, timeout_s: float, method: str, *arguments: Any) -> Any:
        async with asyncio.timeout(timeout_s):
            return await asyncio.wrap_future(getattr(self._actor, method).remote(*arguments).future())

    async def _ask(self) -> None:
        """Poll until the node is lost. Polls are repeatable, because connections may break."""
        clock = asyncio.get_running_loop().time
        until_s = clock() + LOST_S
        while True:
            known = {key: one.num_read for key, one in self._processes.items() if one.returncode is None}
            try:
                news = await self._within(NEWS_S + LOST_S, "news", known, NEWS_S)
            except _broken_errors() as error:
                if clock() > until_s:
                    self._lose(error)
                    return
                await asyncio.sleep(NEWS_S)
                continue
            except _lost_errors() as error:
                self._lose(error)
                return
            until_s = clock() + LOST_S
            for key, new in news.items():
                if key in self._processes:
                    self._processes[key].hear(new)

    def _asked(self, asking: asyncio.Future[None]) -> None:
        if not asking.cancelled() and (error := asking.exception()) is not None:
            assert isinstance(error, Exception)
            self._lose(error)

    def forget_nowait(self, process: RayProcess) -> None:
        self._processes.pop(process.key, None)
        self.tell_nowait("forget", process.key)

    def _lose(self, error: Exception) -> None:
        self._lost = _why_lost(error, LOST_S)
        logger.warning("the node %s is lost: %s", self.node.name, error)
        for process in self._processes.values():
            process.lost()
        self._processes.clear()


class RayProcess:
    """Process on a Ray node. Its output arrives in RUN_DIR/logs, all of it before its end is reported."""

    def __init__(self, on: RayNode, order: Order, *, is_here: bool) -> None:
        """Initialize. `is_here`: the node is the controller's own machine."""
        self.name, self.url, self.left, self.num_read = order.name, "", "", 0
        self.key = f"{order.name}-{next(_keys)}"
        self.returncode: int | None = None
        self._on, self._order, self._is_here = on, order, is_here
        self._pid: int | None = None
        self._ended = asyncio.Event()
        self._gone: RoomError | None = None
        self._is_asked = self._is_closed = False
        self._log_start = 0

    @property
    def log_path(self) -> Path:
        return self._order.run_dir / "logs" / f"{self.name}.log"

    @property
    def pid(self) -> int | None:
        return self._pid if self._is_here else None

    def seen(self) -> str:
        if self._pid is None:
            return "not started"
        if self._gone is not None:
            return self._gone.fault
        how = "runs" if self.returncode is None else f"ended with {self.returncode}"
        return f"process {self._pid} on {self._on.node.name} {how}"

    async def start(self) -> None:
        """Start without waiting for readiness. Raises RoomError if the node is gone, ConfigError if a port
        is taken.
        """
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        with self.log_path.open("ab") as log:
            self._log_start = log.tell()
        threads = {name: os.environ.get(name, number) for name, number in ONE_THREAD.items()}
        order = replace(self._order, env={**threads, **self._order.env})
        try:
            await self._on.open()  # may move the node to another machine
            order = replace(order, spec=self._on.addressed(order.spec))
            self._is_asked = True
            answer = await self._on.start(self, order)
        except RoomError as error:
            raise type(error)(self.name, error.fault, rule=error.rule, way_out=error.way_out) from error
        if isinstance(answer, RefusedStart):
            raise answer.error(self.name, self._on.node.name)
        self.url, self._pid = answer.url, answer.pid

    def renewed(self) -> RayProcess:
        return RayProcess(self._on, self._order, is_here=self._is_here)

    async def wait(self) -> None:
        """Sleep until the process or its node is gone."""
        await self._ended.wait()

    async def watch(self) -> None:
        """Sleep until the end; then raise RoomError with the reason."""
        await self.wait()
        raise self.death()

    def death(self) -> RoomError:
        log = read_log(self.log_path, self._log_start)
        return self._gone or death_of(self, f"process {self._pid} on {self._on.node.name}", log)

    def log_tail(self) -> str:
        return tail_of(read_log(self.log_path, self._log_start))

    async def aclose(self) -> None:
        """End the process and its group, even after an abandoned start; describe survivors in `left`.
        Idempotent.
        """
        if not self._is_asked or self._gone is not None or self._is_closed:
            return
        self._is_closed = True
        with contextlib.suppress(RoomError):  # a lost node has ended it
            self.left = await self._on.call("end", self.key, timeout_s=END_S)
            if self._pid is not None:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(DRAIN_S):
                        await self.wait()
        self._on.forget_nowait(self)

    def kill_nowait(self) -> None:
        if self._pid is not None:
            self._on.tell_nowait("kill", self.key)

    def dump_stacks_nowait(self) -> None:
        if self._pid is not None and self.returncode is None:
            self._on.tell_nowait("dump_stacks", self.key)

    # called by its node

    def hear(self, news: News) -> None:
        self.num_read += len(news.log)
        if news.log:
            try:
                with self.log_path.open("ab") as file:
                    file.write(news.log)
            except OSError as error:  # a full disk must not hide the state of the node
                logger.warning("cannot write %s: %s", self.log_path, error)
        if news.returncode is not None:
            self.returncode = news.returncode
            self._ended.set()

    def lost(self) -> None:
        if self.returncode is None:
            self._gone = self._on.gone(self.name)
            self._ended.set()


def _lost_errors() -> tuple[type[Exception], ...]:
    """Return errors of a lost or silent actor, node or head."""
    from ray.exceptions import RayError

    return (TimeoutError, ConnectionError, RayError)


def _broken_errors() -> tuple[type[Exception], ...]:
    """Return errors of a broken connection; Ray reports later if the actor died."""
    from ray.exceptions import ActorUnavailableError

    return (ActorUnavailableError,)


def _raised_errors() -> tuple[type[Exception], ...]:
    """Return errors raised by the method itself."""
    from ray.exceptions import RayTaskError

    return (RayTaskError,)


def _why_lost(error: Exception, waited_s: float) -> str:
    """Return the reason without the long texts of Ray and gRPC."""
    if isinstance(error, _broken_errors()):
        return "Ray reaches its actor no more"
    return f"no answer within {waited_s:g} s" if isinstance(error, TimeoutError) else _words(error)


def _words(error: Exception) -> str:
    """Return the line with the reason."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    why = next(
        (line for line in lines if "because" in line or "detail" in line), (lines or [repr(error)])[-1]
    )
    return why[:400]
