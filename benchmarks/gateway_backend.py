"""The engine behind both servers of benchmarks/gateway.py: the simulated engine, with a
JSON route for the load.

It draws from the ids behind `num_special`. A uniform draw would put an end token into
every fourth answer, which no engine returns, and whose text no client sends back.
"""

from __future__ import annotations

import asyncio
import json
import os
from dataclasses import replace
from typing import Any

import numpy as np
from aiohttp import web
from asyncrl_simulated.simulated_engine import SimulatedEngine, SimulatedSpec
from engine_replies import ask
from pydantic_core import from_json

from asyncrl.base.http import (
    SECRET_ENV,
    child_arguments,
    die_with_parent,
    secret_of,
    serve,
)
from asyncrl.messages.codec import Sampled
from asyncrl.messages.sampling import SamplingRequest
from asyncrl.messages.tokens import SegmentPart
from asyncrl_servers.engine_routes import engine_routes


class TextEngine(SimulatedEngine):
    """A simulated engine that samples no special token. These have the lowest ids."""

    num_special = 0

    def report(self, run: Any, sampled: Sampled) -> None:
        size = self.spec.vocab_size
        ids = sampled.tokens.ids.astype(np.int64) * (size - self.num_special) // size
        shifted = (ids + self.num_special).astype(np.int32)
        tokens = replace(sampled.tokens, ids=shifted)
        super().report(run, sampled._replace(tokens=tokens))


def main() -> None:
    """Serve the spec: the engine's, `core` and `num_special`."""
    die_with_parent()
    text, fd = child_arguments()
    values = json.loads(text)
    os.sched_setaffinity(0, {values.pop("core")})
    num_special = values.pop("num_special")
    spec = SimulatedSpec.model_validate(values)
    engine = TextEngine(spec)
    engine.num_special = num_special
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
