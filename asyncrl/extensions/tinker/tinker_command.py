"""The command `asyncrl serve tinker`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from asyncrl.base.errors import needing


def serve_tinker(
    config: Annotated[
        Path, Argument(metavar="CONFIG", help="YAML file, e.g. configs/tinker.yaml.")
    ],
    overrides: Annotated[
        list[str] | None,
        Argument(metavar="[KEY=VALUE]...", help="Settings, e.g. tinker.port=8000."),
    ] = None,
    key: Annotated[
        list[str] | None,
        Option(
            metavar="NAME=tml-...",
            help="A user's name and key (default: one new key). May be repeated.",
        ),
    ] = None,
    run_dir: Annotated[
        Path | None,
        Option(
            help="Directory of requests and checkpoints; an earlier server's is taken up "
            "(default: runs/serve-NAME-DATE-TIME)."
        ),
    ] = None,
) -> None:
    """Serve a model to clients of the Tinker API, until Ctrl-C: they train adapters and
    sample from them, each with the results of a server of its own.

    Prints the base URL and the keys. Nothing that the server has accepted is lost or done
    twice if it is killed and started again with the same --run-dir.

    For example:
      asyncrl serve tinker configs/tinker.yaml --key ann=tml-secret-1 --key bob=tml-secret-2
      asyncrl serve tinker configs/tinker.yaml model.scratch=none model.path=Qwen/Qwen3-0.6B
    """
    with needing("tinker", "the Tinker server"):
        from asyncrl.extensions.tinker.serve_tinker import serve

    raise SystemExit(serve(config, overrides or [], key or [], run_dir))
