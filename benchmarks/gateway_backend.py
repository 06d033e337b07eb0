"""The engine behind both servers of benchmarks/gateway.py: the simulated engine, with a
JSON route for the load.
"""

from __future__ import annotations

import asyncio
import json
import os

from aiohttp import web
from engine_replies import ask
from pydantic_core import from_json

from asyncrl.base.http import (
    SECRET_ENV,
    child_arguments,
    die_with_parent,
    secret_of,
    serve,
)
from asyncrl.messages.sampling import SamplingRequest
from asyncrl.messages.tokens import SegmentPart
from asyncrl_servers.engine_routes import engine_routes
from asyncrl_servers.simulated import SimulatedEngine, SimulatedSpec


def main() -> None:
    """Serve the spec: the engine's, and `core`."""
    die_with_parent()
    text, fd = child_arguments()
    values = json.loads(text)
    os.sched_setaffinity(0, {values.pop("core")})
    spec = SimulatedSpec.model_validate(values)
    engine = SimulatedEngine(spec)
    app = engine_routes(engine, secret_of(SECRET_ENV))

    async def answered(asked: SamplingRequest) -> SegmentPart:
        return await asyncio.wrap_future(ask(engine, [asked])[0])

    async def generate(request: web.Request) -> web.Response:
        asked = SamplingRequest(**from_json(await request.read()))
        part = await answered(asked)
        return web.json_response({"token_ids": part.token_ids})

    app.router.add_post("/generate", generate)
    serve(app, fd)


if __name__ == "__main__":
    main()
