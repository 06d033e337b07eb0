"""Commands that read a run's directory, live or afterwards, or act on it. No logic."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Annotated, TypeAlias

import typer

Option = functools.partial(typer.Option, show_default=False)
Argument = functools.partial(typer.Argument, show_default=False)

Text: TypeAlias = str | None
Texts: TypeAlias = list[str] | None
File: TypeAlias = Path | None
Number: TypeAlias = float | None


def complete_key(incomplete: str) -> list[str]:
    """Return keys of settings, for shell completion."""
    from asyncrl.config.load import all_keys

    return [key for key in all_keys() if key.startswith(incomplete)]


def _complete_override(incomplete: str) -> list[str]:
    return [f"{key}=" for key in complete_key(incomplete)]


Overrides = Annotated[
    Texts,
    Argument(
        metavar="[KEY=VALUE]...",
        help="Settings that replace the file's: buffer.max_staleness=4.",
        autocompletion=_complete_override,
    ),
]
NamedRun = Annotated[Path, Argument(metavar="RUN_DIR", help="Directory of a run.")]
RunDir = Annotated[
    File, Argument(metavar="[RUN_DIR]", help="Directory of a run (default: the newest in runs/).")
]
RunDirs = Annotated[
    list[Path] | None,
    Argument(metavar="[RUN_DIR]...", help="Directories of runs (default: the newest in runs/)."),
]
Json = Annotated[bool, typer.Option("--json", help="For machines.")]


def _or_newest(run_dir: Path | None) -> Path:
    """Return the named run, or the newest one, which stderr names."""
    if run_dir is not None:
        return run_dir
    from asyncrl.observe.show import newest_run

    newest = newest_run()
    typer.echo(f"the newest run: {newest}", err=True)
    return newest


def runs(
    folder: Annotated[Path, Argument(metavar="[FOLDER]", help="Folder of runs (default: runs).")] = Path(
        "runs"
    ),
    as_json: Json = False,
) -> None:
    """List the runs in a folder, newest first: state, steps, reward, and time of the last write."""
    from asyncrl.observe.show import render_runs

    typer.echo(render_runs(folder, as_json=as_json))


def status(
    run_dir: RunDir = None,
    as_json: Json = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", help="With waits, queues, engines and where the time went.")
    ] = False,
) -> None:
    """Describe a run, live or ended: whether it learns, its health, its speed."""
    from asyncrl.observe.show import render_status

    typer.echo(render_status(_or_newest(run_dir), as_json=as_json, is_verbose=verbose))


def inspect(
    run_dir: RunDir = None,
    as_json: Json = False,
    step: Annotated[int | None, Option(help="Only the batch of this step.")] = None,
    group: Annotated[int | None, Option(help="This group's whole story, with its conversation.")] = None,
    samples: Annotated[
        bool, typer.Option("--samples", help="Rollouts as text: the newest, or of --step.")
    ] = False,
    best: Annotated[
        bool, typer.Option("--best", help="Samples with the best reward of their batch.")
    ] = False,
    worst: Annotated[bool, typer.Option("--worst", help="Samples with the worst reward.")] = False,
    failed: Annotated[bool, typer.Option("--failed", help="Samples of rollouts that failed.")] = False,
) -> None:
    """Show the trained groups, from the trainer's record, and all others, from the journal."""
    from asyncrl.observe.show import render_inspect

    kinds = [name for name, is_asked in (("best", best), ("worst", worst), ("failed", failed)) if is_asked]
    run = _or_newest(run_dir)
    typer.echo(render_inspect(run, as_json=as_json, step=step, group=group, samples=samples, kinds=kinds))


def report(
    run_dirs: RunDirs = None,
    out: Annotated[
        File, Option(metavar="FILE", help="The page (default: RUN_DIR/report.html; of several: report.html).")
    ] = None,
) -> None:
    """Write an HTML page about a run, live or ended: verdict, curves, timeline, samples.

    Several runs are compared. Each RUN_DIR gets a trace.json for https://ui.perfetto.dev.
    """
    from asyncrl.observe.page.render import write_report

    for line in write_report(run_dirs or [_or_newest(None)], out):
        typer.echo(line)


def watch(
    run_dirs: RunDirs = None,
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: a free one.")] = 0,
    host: Annotated[
        str, typer.Option(help="Address to listen on. On one that others reach, the page asks for a key.")
    ] = "127.0.0.1",
    opens: Annotated[bool, Option("--open", help="Open it in the browser.")] = False,
) -> None:
    """Show a run's page in a browser, live: curves, timeline, samples. Several runs are compared.

    Read-only. Runs until Ctrl-C, across the run's end and its resumes.
    """
    from asyncrl.observe.page.watch import watch as serve_page

    raise typer.Exit(serve_page(run_dirs or [_or_newest(None)], host, port, opens=opens, say=typer.echo))


def export(
    paths: Annotated[
        list[Path],
        Argument(
            metavar="[RUN_DIR] OUT",
            help="Directory of a run (default: the newest in runs/), and the folder to make.",
        ),
    ],
    step: Annotated[
        str, typer.Option(metavar="N|best|last", help="Checkpoint; best: by eval/reward_mean.")
    ] = "last",
    adapter: Annotated[bool, Option("--adapter", help="LoRA: the adapters alone, not merged.")] = False,
    base: Annotated[Text, Option(metavar="NAME", help="Base model as others load it: a hub id.")] = None,
    dtype: Annotated[Text, Option(help="float32, bfloat16 or float16 (default: as trained).")] = None,
    overwrite: Annotated[bool, Option("--overwrite", help="Replace an export in OUT.")] = False,
    push: Annotated[Text, Option(metavar="REPO", help="Upload it to OWNER/NAME of the hub, private.")] = None,
    public: Annotated[bool, Option("--public", help="For everyone to see.")] = False,
) -> None:
    """Export a run's weights as a Hugging Face folder with a model card, for transformers, vLLM and peft.

    The run may be done, stopped, killed, failed or still running; nothing in RUN_DIR changes. The default
    without --step is final/ of a finished run, else the newest checkpoint. Needs no GPU.
    """
    from asyncrl.job.exporting.run_export import export_run

    if len(paths) > 2:
        raise typer.BadParameter(f"export takes RUN_DIR and OUT, not {len(paths)} paths")
    run_dir, out = paths if len(paths) == 2 else (_or_newest(None), *paths)
    asked = {"adapter": adapter, "overwrite": overwrite, "public": public}
    export_run(run_dir, out, step=step, base=base, dtype=dtype, push=push, tell=typer.echo, **asked)


def scale(
    run_dir: NamedRun,
    engines: Annotated[str, Argument(metavar="engines=N", help="Number of engines from now on.")],
) -> None:
    """Change the number of engines of a running job, within rollout.num_engines={min: 1, max: 8}.

    `asyncrl status` shows the progress. The number survives a resume.
    """
    from asyncrl.job.scale import scale_run

    typer.echo(scale_run(run_dir, engines))


COMMANDS = (runs, status, inspect, report, watch, export, scale)
"""In the order of the help text."""
