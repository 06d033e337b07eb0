"""`python -m asyncrl_servers.embedded --spec FILE --fd N`: one embedded engine server, a child of the run."""

from __future__ import annotations

import os
import sys
import traceback

from pydantic import ValidationError

from asyncrl.http import child_arguments, die_with_parent, fail, serve
from asyncrl.messages.base import ErrorBody, fatal_line
from asyncrl_servers.embedded.kv_memory import EmbeddedSpec
from asyncrl_servers.engine_app import engine_app


def main() -> None:
    """Read the spec, load, check, serve until SIGTERM or until the parent is gone."""
    die_with_parent()
    text, fd = child_arguments()
    try:
        spec = EmbeddedSpec.model_validate_json(text)
    except ValidationError as error:
        fail(
            f"the spec of the embedded engine is wrong: {error}", rule="see asyncrl_servers/embedded/spec.py"
        )

    from asyncrl_servers.embedded.build_engine import build_engine

    def on_crash(error: BaseException | None) -> None:
        traceback.print_exception(error)
        body = ErrorBody(
            error=f"{spec.name}: the engine loop died: {type(error).__name__}: {error}",
            way_out="see the traceback in this log.",
        )
        print(fatal_line(body), file=sys.stderr, flush=True)
        os._exit(1)

    engine = build_engine(spec, on_crash)
    engine.start()
    serve(engine_app(engine), fd)
    engine.stop()


if __name__ == "__main__":
    main()
