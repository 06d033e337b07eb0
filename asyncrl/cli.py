"""The commands. Parses, prints, exits; no logic, and no torch."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from asyncrl import __version__
from asyncrl.errors import AsyncrlError

app = typer.Typer(
    name="asyncrl",
    help="Asynchronous reinforcement learning of language models, with a staleness bound that is one.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

ConfigPath = Annotated[Path, typer.Argument(metavar="CONFIG", help="YAML file, e.g. configs/quickstart.yaml.", show_default=False)]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[KEY=VALUE]...", help="Settings that replace those of the file, e.g. buffer.max_staleness=4.", show_default=False
    ),
]
RunDir = Annotated[Path, typer.Argument(metavar="RUN_DIR", help="Directory of a run.", show_default=False)]


def _print_version(is_wanted: bool) -> None:
    if is_wanted:
        typer.echo(f"asyncrl {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")] = False,
) -> None:
    pass


@app.command()
def run(
    config: ConfigPath,
    overrides: Overrides = None,
    run_dir: Annotated[
        Path | None, typer.Option(help="Directory for everything the run writes (default: runs/NAME-DATE-TIME).", show_default=False)
    ] = None,
) -> None:
    """Train. Three settings matter at first: trainer.num_groups, buffer.max_staleness and placement.

    Every setting is described in docs/configuration.md, and by `asyncrl keys`. Exit codes: 0 done, 1 a part of
    the run failed (it is named), 2 the configuration is wrong, 130 or 143 interrupted.
    """
    from asyncrl.config import load_config
    from asyncrl.job import run_job

    exit_code = run_job(load_config(config, overrides or []), run_dir, name=config.stem)
    if exit_code > 128:  # interrupted, everything closed: a thread that a library left in a download must not hold the end up
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(exit_code)
    raise typer.Exit(exit_code)


@app.command()
def check(config: ConfigPath, overrides: Overrides = None) -> None:
    """Validate a config, read its task, and print the plan: processes, devices, threads, memory. Starts nothing."""
    from asyncrl.config import load_config
    from asyncrl.placement.plan import make_plan, plan_text
    from asyncrl.tasks.build import check_task

    loaded = load_config(config, overrides or [])
    typer.echo(f"task: {check_task(loaded.task, loaded.seed)}")
    typer.echo(plan_text(make_plan(loaded)))


@app.command()
def keys(section: Annotated[str | None, typer.Argument(help="Only this section, e.g. buffer.", show_default=False)] = None) -> None:
    """List every setting with its type, default and meaning."""
    from asyncrl.config.describe import describe_keys

    typer.echo(describe_keys(section))


@app.command()
def status(run_dir: RunDir, as_json: Annotated[bool, typer.Option("--json", help="For machines.")] = False) -> None:
    """How a run stands, live or afterwards: steps, staleness, where the time goes, what is stuck."""
    from asyncrl.observe.read import render_status

    typer.echo(render_status(run_dir, as_json=as_json))


@app.command()
def inspect(
    run_dir: RunDir,
    as_json: Annotated[bool, typer.Option("--json", help="For machines.")] = False,
    step: Annotated[int | None, typer.Option(help="Only the batch of this step.", show_default=False)] = None,
    group: Annotated[int | None, typer.Option(help="Only this group.", show_default=False)] = None,
) -> None:
    """What was trained on: every step's batch with the versions of its tokens, from the trainer's own record."""
    from asyncrl.observe.read import render_inspect

    typer.echo(render_inspect(run_dir, as_json=as_json, step=step, group=group))


def main() -> None:
    """Entry point: an error on purpose is two or three lines on stderr, never a traceback."""
    try:
        app()
    except AsyncrlError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        raise SystemExit(error.exit_code) from None


if __name__ == "__main__":
    main()
