"""`python -m asyncrl_servers.embedded --spec FILE --fd N`: one embedded engine server."""

from __future__ import annotations

import asyncio
import os
import sys
import traceback

from asyncrl.base.errors import ErrorBody, fatal_line
from asyncrl.base.http import die_with_parent
from asyncrl.messages import engine_api as api
from asyncrl_servers.embedded.decoder import EmbeddedSpec
from asyncrl_servers.embedded.embedded_engine import build_engine
from asyncrl_servers.engine_routes import read_spec, serve_engine


def main() -> None:
    die_with_parent()
    spec, fd = read_spec(EmbeddedSpec)

    def on_crash(error: BaseException) -> None:
        traceback.print_exception(error)
        what = f"the engine loop died: {type(error).__name__}: {error}"
        body = ErrorBody(error=what, way_out="see the traceback in this log.")
        print(fatal_line(body), file=sys.stderr, flush=True)
        # This is the engine's thread: SystemExit would end only the thread, and the
        # server would accept requests that nobody runs.
        os._exit(1)

    engine = build_engine(spec, on_crash)
    engine.start()

    async def open_adapter(body: api.OpenAdapterRequest) -> api.OpenAdapters:
        return await asyncio.wrap_future(engine.open_adapter(body))

    async def drop_adapter(body: api.DropAdapterRequest) -> api.OpenAdapters:
        return await asyncio.wrap_future(engine.drop_adapter(body))

    async def score(body: api.ScoreRequest) -> api.ScoreResponse:
        return await asyncio.wrap_future(engine.score(body))

    serve_engine(engine, fd, open_adapter, drop_adapter, score)
    engine.stop()


if __name__ == "__main__":
    main()
