"""Child process for launcher tests: does what its spec says, and reports its
environment.
"""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path

from aiohttp import web

from asyncrl.base.http import (
    SECRET_ENV,
    child_arguments,
    die_with_parent,
    fail,
    make_app,
    secret_of,
    serve,
)


async def probe(request: web.Request) -> web.Response:
    environ = await asyncio.to_thread(
        Path("/proc/self/environ").read_text, errors="replace"
    )
    command = await asyncio.to_thread(Path("/proc/self/cmdline").read_text)
    seen = {
        "environ": dict(os.environ),
        "in the open": f"{command} {environ} {dict(os.environ)}",
        "other secret": secret_of("OTHER"),
        "pids": [os.getpid(), os.getppid()],
    }
    return web.json_response(seen)


def main() -> None:
    spec, fd = child_arguments()
    given = json.loads(spec)
    die_with_parent(Path(given["clears"]).touch)
    if given["do"] == "refuse":
        fail("no such model", rule="a model must be there", way_out="give one.")
    if given["do"] == "crash":
        raise RuntimeError("unexpected failure")
    print("serving", flush=True)
    app = make_app(secret_of(SECRET_ENV))
    app.router.add_get("/probe", probe)
    serve(app, fd)


if __name__ == "__main__":
    main()
