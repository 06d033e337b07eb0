"""A desk of late rewards, and a watched run."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from harness_gateway import make_work
from starlette.requests import Request

from asyncrl.agents.endpoint.requests import ApiError
from asyncrl.agents.work_queue import RolloutQueue
from asyncrl.base.http import Refused
from asyncrl.base.waits import waiting
from asyncrl.config.supervision_config import SupervisionConfig
from asyncrl.messages import worker_api as shapes
from asyncrl.messages.records import Outcome
from asyncrl.observe.watchdog import Reported, Watchdog
from asyncrl.testing.virtual_time import run_virtual


class Line(asyncio.Transport):
    """The connection to a client, as the routes see it."""

    is_cut = False

    def is_closing(self) -> bool:
        return self.is_cut


TAKE: dict[str, Any] = {"instance": "1", "max_items": 1, "holding": []}


class Desk:
    """A queue, and workers and programs that call it by hand."""

    def __init__(self, **settings: Any) -> None:
        more: Any = {
            "model": "m",
            "lease_timeout_s": 60.0,
            "task_seed": lambda work: 7,
            **settings,
        }
        self.queue, self.number = RolloutQueue(worker_key="k", **more), 0
        self.handlers = {route.path: route.endpoint for route in self.queue.routes()}

    async def call(
        self, path: str, body: bytes, key: str = "k", line: Line | None = None
    ) -> tuple[int, Any]:
        """(status, JSON)."""

        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": body, "more_body": False}

        scope: Any = {"type": "http", "path_params": {}, "app": None}
        scope["headers"] = [(b"authorization", f"Bearer {key}".encode("latin-1"))]
        scope["connection"] = SimpleNamespace(
            transport=line or Line(), cycle=SimpleNamespace(more_body=False)
        )
        try:
            response = await self.handlers[path](Request(scope, receive))
        except ApiError as error:  # which the gateway answers
            return error.status, error.error
        except Refused as refusal:
            return refusal.status, refusal.body
        return response.status_code, json.loads(response.body)

    async def post(self, outcome: Any, key: str) -> tuple[int, Any]:
        status, answer = await self.call(
            "/v1/outcome", json.dumps(outcome).encode(), key
        )
        return status, answer.get("code")

    def run(self, number: int = 0, **work: Any) -> asyncio.Task[Outcome]:
        return asyncio.create_task(
            self.queue.run(make_work(number, **work), started=lambda: None)
        )

    async def ask(
        self, worker: str, line: Line | None = None, **asked: Any
    ) -> shapes.TakeAnswer:
        self.number += 1
        values = {"number": self.number, "wait_s": 1000.0, **TAKE, **asked}
        request = shapes.TakeRequest(worker=worker, **values)
        _, answer = await self.call(
            "/work/take", request.model_dump_json().encode(), line=line
        )
        return shapes.TakeAnswer.model_validate(answer)

    async def take(
        self, worker: str = "w", line: Line | None = None, **asked: Any
    ) -> list[shapes.WorkItem]:
        return (await self.ask(worker, line, **asked)).items

    async def alive(self, *items: str, worker: str = "w", **asked: Any) -> list[str]:
        return (await self.ask(worker, holding=items, max_items=0, **asked)).cancel

    async def result(
        self, item_id: str, worker: str = "w", **said: Any
    ) -> tuple[int, Any]:
        request = shapes.ResultRequest(
            worker=worker, instance="1", item_id=item_id, **said
        )
        return await self.call("/work/result", request.model_dump_json().encode())


WATCHDOG_S = 60.0


async def hang() -> None:
    with waiting("optimizer step 4", on="trainer-0"):
        await asyncio.Event().wait()


def watched(
    log_path: Path,
    seconds: float,
    *,
    on_stuck: str = "warn",
    is_well: bool = True,
    report: Callable[[float], Reported] = lambda now_s: Reported(
        {"steps": 3.0}, (("g7/r1", 62.0),)
    ),
) -> tuple[list[tuple[float, str]], list[tuple[str, Any]]]:
    """Watch a run that hangs on the virtual clock; return its warnings and notes, with
    times in periods of the watchdog. A restart is a note.
    """
    told, notes = list[tuple[float, str]](), list[tuple[str, Any]]()

    async def story() -> None:
        loop = asyncio.get_running_loop()

        async def ask_children() -> dict[str, bool]:
            return {"trainer-0: process 7 is stopped; no answer": is_well}

        async def restart() -> None:
            notes.append(("restart", loop.time()))

        watchdog = Watchdog(
            SupervisionConfig.model_validate(
                {"watchdog_s": WATCHDOG_S, "on_stuck": on_stuck}
            ),
            lambda: report(loop.time()),
            log_path,
            lambda text: told.append((loop.time() / WATCHDOG_S, text)),
            way_out="look at it.",
            ask_children=ask_children,
            restart=restart,
            note=lambda what, details: notes.append((what, details)),
        )
        watchdog.look()
        running = [
            asyncio.create_task(coro, name=name)
            for name, coro in (("rollout g7/r1", hang()), ("watchdog", watchdog.run()))
        ]
        done, pending = await asyncio.wait(
            running, timeout=seconds, return_when=asyncio.FIRST_EXCEPTION
        )
        for task in pending:
            task.cancel()
        for task in done:
            task.result()

    run_virtual(story())
    return told, notes
