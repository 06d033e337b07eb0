"""A server of a role that no product code knows: counts rollouts, and dies during its
first call.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from aiohttp import web

from asyncrl.base.http import (
    SECRET_ENV,
    child_arguments,
    die_with_parent,
    make_app,
    secret_of,
    serve,
)
from asyncrl.messages.engine_api import EngineHealth

if __name__ == "__main__":
    given, fd = child_arguments()
    pids = Path(json.loads(given)["pids"])
    is_first = not pids.exists()
    with pids.open("a") as file:
        file.write(f"{os.getpid()}\n")
    num_calls = 0

    async def count(_: web.Request) -> web.Response:
        global num_calls
        num_calls += 1
        if is_first:
            os._exit(9)
        return web.json_response({"num_calls": num_calls})

    async def health(_: web.Request) -> web.Response:
        told = EngineHealth(
            policy_version=0, num_running=0, num_queued=0, tokens_generated=0
        )
        return web.json_response(told.model_dump())

    die_with_parent()
    app = make_app(secret_of(SECRET_ENV))
    app.router.add_post("/count", count)
    app.router.add_get("/health", health)
    serve(app, fd)
