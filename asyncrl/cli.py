"""The commands. Imports no torch."""

from __future__ import annotations

import contextlib
import functools
import io
import json
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from inspect import Parameter, signature
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import typer
from typer.core import TyperCommand

from asyncrl import __version__
from asyncrl.base.errors import OF_TRAIN, AsyncrlError, ConfigError, not_installed
from asyncrl.base.extensions import discover, extensions, load_place, rows
from asyncrl.base.progress import told_if_long
from asyncrl.base.signals import usual_signals
from asyncrl.config import JobConfig, load_any, load_config
from asyncrl.config.extended import extensions_text, refuse_broken
from asyncrl.config.generator_config import HARNESSES
from asyncrl.config.load import job_forms, load_job, name_of_config, usage_hint

Option = functools.partial(typer.Option, show_default=False)
Argument = functools.partial(typer.Argument, show_default=False)

Text: TypeAlias = str | None
Texts: TypeAlias = list[str] | None
File: TypeAlias = Path | None

Overrides = Annotated[
    Texts,
    Argument(metavar="[KEY=VALUE]...", help="Settings, e.g. buffer.max_staleness=4."),
]
NamedRun = Annotated[Path, Argument(metavar="RUN_DIR", help="Directory of a run.")]
RunDir = Annotated[
    File,
    Argument(
        metavar="[RUN_DIR]", help="Directory of a run (default: the newest in runs/)."
    ),
]
RunDirs = Annotated[
    list[Path] | None,
    Argument(
        metavar="[RUN_DIR]...",
        help="Directories of runs (default: the newest in runs/).",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]

app = typer.Typer(
    name="asyncrl",
    help="Asynchronous RL of language models, with a hard staleness bound on every token.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
serve_app = typer.Typer(
    help="A gateway, to try an agent, or an engine.", no_args_is_help=True
)
app.add_typer(serve_app, name="serve")


class ExamplesLast(TyperCommand):
    """Show the examples of a docstring after the options."""

    def __init__(self, name: str, *, help: str, **settings: Any) -> None:
        text, _, examples = help.partition("For example:\n")
        epilog = f"\b\nFor example:\n{examples}"  # \b: its lines are not wrapped
        super().__init__(name, help=text, **settings | {"epilog": epilog})


command = functools.partial(app.command, cls=ExamplesLast)
serve_command = functools.partial(serve_app.command, cls=ExamplesLast)
ConfigPath = Annotated[
    Path, Argument(metavar="CONFIG", help="YAML file, e.g. configs/quickstart.yaml.")
]
DEVICES_HELP = """Plan for other CUDA devices: 8xH200-141GB, 2x80GB, cpu; 2x8xH200-141GB: two nodes.
GB is 10^9 bytes, GiB 2^30. Needs --cores and --memory."""
ServeDir = Annotated[
    File, Option("--run-dir", help="For logs (default: runs/serve-NAME-DATE-TIME).")
]


def with_options(
    parameter: str, options: Mapping[str, Any]
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Replace a parameter of a command by `options`, annotations by name. The function
    gets the options' values as this parameter, by name.
    """

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(function)
        def command(**given: Any) -> None:
            values = {name: given.pop(name) for name in options}
            function(**{parameter: values}, **given)

        added = [
            Parameter(name, Parameter.KEYWORD_ONLY, default=None, annotation=option)
            for name, option in options.items()
        ]
        plain = signature(function, eval_str=True)
        parameters = list[Parameter]()
        for each in plain.parameters.values():
            is_replaced = each.name == parameter
            own = each.replace(kind=Parameter.KEYWORD_ONLY)
            parameters += added if is_replaced else [own]
        command.__dict__["__signature__"] = plain.replace(parameters=parameters)
        return command

    return decorate


OF_HARNESSES = {
    name: Annotated[Text, Option(metavar=kind.metavar, help=f"Agent: {kind.text}.")]
    for name, kind in HARNESSES.items()
}
EXPORTS = rows("exports")
OF_EXPORTS = {
    name: Annotated[bool, Option(f"--{name}", help=kind.text)]
    for name, kind in EXPORTS.items()
}


@app.callback(invoke_without_command=True)
def _root(
    version: Annotated[
        bool, typer.Option("--version", "-V", help="Print the version.")
    ] = False,
) -> None:
    for argument in sys.argv[1:]:
        # An empty path would be the working directory.
        if not argument:
            raise ConfigError(
                "an argument is empty",
                way_out="set the shell variable that it came from.",
            )
        if re.search(r"(^|=|\[)~/", argument):
            raise ConfigError(
                f"~ in {argument} is not expanded",
                way_out=f'write "{argument.replace("~", "$HOME")}".',
            )
    if version:
        print_version()
        raise typer.Exit


@command("extensions")
def list_extensions() -> None:
    """List the extensions, and what each one adds.

    ASYNCRL_EXTENSIONS=core,NAME uses only the named ones.

    For example:
      asyncrl extensions
    """
    for line in extensions_text():
        typer.echo(line)


@command("version")
def print_version() -> None:
    """Print the version.

    For example:
      asyncrl version
    """
    typer.echo(f"asyncrl {__version__}")


@command()
def init(
    kind: Annotated[
        str, Argument(metavar="quickstart|gsm8k|agent", help="What to start from.")
    ],
    folder: Annotated[Path, Option(help="Where to write (default: here).")] = Path(),
) -> None:
    """Write a config with its task and agent. Never overwrites files.

    quickstart: letters on a CPU in half a minute. gsm8k: Qwen3-0.6B on one GPU. agent:
    a model calls a tool.

    For example:
      asyncrl init quickstart
      asyncrl init gsm8k --folder my-task
    """
    # Imports are within the commands: `asyncrl --help` and `asyncrl status` must not
    # load the packages that only a run needs, and that may not be installed.
    from asyncrl.templates import write_template

    for line in write_template(kind, folder):
        typer.echo(line)


def _job_command(form: type[JobConfig]) -> Callable[..., None]:
    """Return the command of a kind of job, which is described by its settings."""

    def start(
        config: ConfigPath,
        overrides: Overrides = None,
        run_dir: Annotated[
            File, Option(help="Directory of the run (default: runs/NAME-DATE-TIME).")
        ] = None,
        resume: Annotated[
            str, typer.Option(help="never: refuse a run in --run-dir; must: a new one.")
        ] = "auto",
        allow_change: Annotated[
            Texts, Option(help="Key or section that may change in a resumed run.")
        ] = None,
    ) -> None:
        from asyncrl.launch.fork_server import serving

        loaded = load_job(form, config, overrides or [], run_dir=run_dir)
        with serving():  # imports for children run in parallel
            with told_if_long("importing packages"):
                from asyncrl.job.loop import run_job

            code = run_job(
                loaded,
                run_dir,
                name=name_of_config(config),
                resume=resume,
                allow_change=allow_change or [],
            )
        _exit(code)

    start.__doc__ = form.__doc__
    return start


for _form in job_forms().values():
    if _form.job:
        command(_form.command)(_job_command(_form))


@command()
@told_if_long("checking the config")
def check(
    config: ConfigPath,
    overrides: Overrides = None,
    devices: Annotated[Text, Option(metavar="NxNAME-SIZE", help=DEVICES_HELP)] = None,
    cores: Annotated[
        int | None, Option(metavar="N", help="Cores of each node.")
    ] = None,
    memory: Annotated[
        Text, Option(metavar="SIZE", help="Host memory of each node: 512GB, 2TB.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Validate a config without loading weights, and print processes, devices, threads
    and memory by node.

    For example:
      asyncrl check configs/quickstart.yaml trainer.num_steps=100
      asyncrl check configs/gsm8k-qwen3-0.6b-1gpu.yaml --devices 1xRTX4090-24GB --cores 16 --memory 64GB
    """
    from asyncrl.job.check.config_check import check_lines
    from asyncrl.launch.launchers import opened
    from asyncrl.launch.machine import described_nodes

    # Described devices need no launcher, so a laptop can plan for a cluster.
    nodes = described_nodes(devices, cores, memory)
    settings = load_any(config, overrides or [])
    with _result(as_json) as found, contextlib.ExitStack() as stack:
        nodes = nodes or stack.enter_context(opened(settings.launcher)).nodes
        lines = found["lines"] = list[str]()
        for line in check_lines(settings, nodes):
            lines.append(line)
            typer.echo(line)


@command("eval")
def evaluate(
    target: Annotated[
        Path, Argument(metavar="CONFIG|RUN_DIR", help="A config, or weights of a run.")
    ],
    overrides: Overrides = None,
    step: Annotated[
        Text, Option(metavar="N|best|last", help="Weights of a run (default: last).")
    ] = None,
    as_json: Json = False,
) -> None:
    """Score a model on the prompts of `eval`, without training: mean reward with its 95%
    interval. For benchmarks such as MMLU, export the weights and use lm-eval
    (docs/evaluation.md).

    For example:
      asyncrl eval configs/smollm2.yaml
      asyncrl eval runs/mine --step 100 eval.num_prompts=200
    """
    with told_if_long("importing packages"):
        from asyncrl.job.evaluate import evaluate as scores_of
        from asyncrl.observe.show import table, to_text

    with _result(as_json) as found:
        scores = scores_of(target, overrides or [], step=step)
        found["evaluations"] = scores
        typer.echo(to_text(table(scores)))


@command()
def sweep(
    config: ConfigPath,
    choices: Annotated[
        list[str], Argument(metavar="KEY=A,B,C...", help="Values of settings.")
    ],
    folder: Annotated[
        File, Option(help="Where the runs are (default: runs/sweep-NAME).")
    ] = None,
) -> None:
    """Train each combination of values, one run after another, and write a report that
    compares the runs. Repeat the command to continue.

    For example:
      asyncrl sweep configs/quickstart.yaml trainer.learning_rate=3e-4,1e-3 seed=0,1
    """
    from asyncrl.job.sweep import sweep as run_all

    _exit(run_all(config, choices, folder=folder, tell=typer.echo))


@command()
def launch(
    kind: Annotated[
        str, Argument(metavar="slurm|kuberay|skypilot", help="Kind of cluster.")
    ],
    config: ConfigPath,
    overrides: Overrides = None,
) -> None:
    """Print a file that starts this run on a cluster, with the sizes of its placement.

    For example:
      asyncrl launch slurm configs/gsm8k-qwen2.5-7b-2x8gpu.yaml
    """
    from asyncrl.launch.cluster_file import cluster_file

    typer.echo(cluster_file(kind, config, overrides or []), nl=False)


@command()
def keys(
    what: Annotated[
        Text,
        Argument(
            metavar="[WHAT]",
            help="Section (buffer), key (buffer.max_staleness), or search word.",
        ),
    ] = None,
    list_all: Annotated[bool, Option("--all", help="Every setting.")] = False,
    count: Annotated[
        bool, Option("--count", help="With --all: print only their number.")
    ] = False,
    schema: Annotated[
        bool, Option("--schema", help="All as a JSON schema, for editors.")
    ] = False,
) -> None:
    """Describe the basic settings, or the settings matching WHAT.

    For example:
      asyncrl keys buffer
      asyncrl keys staleness
      asyncrl keys --all
    """
    from asyncrl.config.load import count_keys, describe_keys, schema_text

    if count and (what or not list_all):
        raise typer.BadParameter("--count is of --all, without WHAT")
    if schema:
        typer.echo(schema_text().rstrip())
    elif count:
        typer.echo(count_keys())
    else:
        typer.echo(describe_keys(what, lists_all=list_all))


@contextlib.contextmanager
def _result(as_json: bool) -> Iterator[dict[str, object]]:
    """Yield the object that --json prints. All other output of the block then goes to
    stderr, that of user code too.
    """
    found = dict[str, object]()
    with contextlib.redirect_stdout(sys.stderr if as_json else sys.stdout):
        yield found
    if as_json:
        typer.echo(json.dumps(found, indent=2))


def _or_newest(run_dir: Path | None) -> Path:
    """Return the named run, or the newest, named on stderr."""
    if run_dir is not None:
        return run_dir
    from asyncrl.observe.show import newest_run

    newest = newest_run()
    # On stderr: stdout may be JSON for another program.
    typer.echo(f"the newest run: {newest}", err=True)
    return newest


@command()
def runs(
    folder: Annotated[
        File, Argument(metavar="[FOLDER]", help="Folder of runs (default: runs).")
    ] = None,
    as_json: Json = False,
) -> None:
    """List runs, newest first: state, steps, reward, best evaluation, model, size on
    disk, process, and time of the last write.

    For example:
      asyncrl runs
      asyncrl runs runs/sweep-quickstart --json
    """
    from asyncrl.observe.show import render_runs

    typer.echo(render_runs(folder or Path("runs"), as_json=as_json))


@command()
def status(
    run_dir: RunDir = None,
    verbose: Annotated[
        bool,
        typer.Option("--verbose", help="Add waits, queues, engines and time spent."),
    ] = False,
    as_json: Json = False,
) -> None:
    """Describe a run's learning, health and speed.

    For example:
      asyncrl status
      asyncrl status runs/mine --verbose
    """
    from asyncrl.observe.show import render_status

    run = _or_newest(run_dir)
    typer.echo(render_status(run, is_verbose=verbose, as_json=as_json))


@command()
@told_if_long("reading the run")
def inspect(
    run_dir: RunDir = None,
    as_json: Json = False,
    step: Annotated[int | None, Option(help="Only the batch of this step.")] = None,
    group: Annotated[
        int | None, Option(help="History of this group, with its conversation.")
    ] = None,
    samples: Annotated[
        bool, Option("--samples", help="Rollouts as text: the newest, or of --step.")
    ] = False,
    best: Annotated[
        bool, Option("--best", help="Samples with the best reward of their batch.")
    ] = False,
    worst: Annotated[
        bool, typer.Option("--worst", help="Samples with the worst reward.")
    ] = False,
    failed: Annotated[
        bool, typer.Option("--failed", help="Samples of rollouts that failed.")
    ] = False,
) -> None:
    """Show the trained groups, and all others in the journal.

    For example:
      asyncrl inspect runs/mine --samples
      asyncrl inspect runs/mine --step 12
    """
    from asyncrl.observe.show import render_inspect

    kinds = [
        name
        for name, is_asked in (("best", best), ("worst", worst), ("failed", failed))
        if is_asked
    ]
    run = _or_newest(run_dir)
    typer.echo(
        render_inspect(
            run, as_json=as_json, step=step, group=group, samples=samples, kinds=kinds
        )
    )


@command()
@told_if_long("reading the run")
def report(
    run_dirs: RunDirs = None,
    out: Annotated[
        File,
        Option(
            metavar="FILE",
            help="The page (default: RUN_DIR/report.html; of several: report.html).",
        ),
    ] = None,
) -> None:
    """Write an HTML page about one or several runs: verdict, curves, timeline, samples.

    Each RUN_DIR gets a trace.json for https://ui.perfetto.dev.

    For example:
      asyncrl report
      asyncrl report runs/a runs/b --out compared.html
    """
    from asyncrl.observe.report_page import write_report

    for line in write_report(run_dirs or [_or_newest(None)], out):
        typer.echo(line)


@command()
def watch(
    run_dirs: RunDirs = None,
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: a free one.")] = 0,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
) -> None:
    """Show the page of one or several runs in a browser, live and read-only, until
    Ctrl-C.

    For example:
      asyncrl watch
      asyncrl watch runs/a runs/b --port 8080
    """
    import asyncio

    from asyncrl.observe import web

    asyncio.run(web.watch(run_dirs or [_or_newest(None)], host, port, typer.echo))


@command()
@with_options("others", OF_EXPORTS)
@told_if_long("exporting")
def export(
    paths: Annotated[
        list[Path],
        Argument(
            metavar="[RUN_DIR] OUT",
            help="Run (default: the newest in runs/), and new folder or file.",
        ),
    ],
    step: Annotated[
        str, typer.Option(metavar="N|best|last", help="best: by eval/reward_mean.")
    ] = "last",
    adapter: Annotated[
        bool, Option("--adapter", help="LoRA: only the adapters, not merged.")
    ] = False,
    role: Annotated[
        Text, Option(metavar="NAME", help="With trainer.roles: whose policy.")
    ] = None,
    samples: Annotated[
        bool, Option("--samples", help="Rollouts as messages, for fine-tuning.")
    ] = False,
    min_reward: Annotated[
        float | None, Option(help="Of --samples: only rollouts with this reward.")
    ] = None,
    others: Mapping[str, bool] = {},
    as_json: Json = False,
    push: Annotated[
        Text,
        Option(metavar="OWNER/NAME", help="Also upload it to the Hugging Face hub."),
    ] = None,
    private: Annotated[
        bool, Option("--private", help="Of --push: a new repository is private.")
    ] = False,
) -> None:
    """Export weights as a Hugging Face folder with a model card, for transformers, vLLM
    and peft.

    Works in any state of the run and changes nothing in RUN_DIR. Without --step: final/
    if it exists, else the newest checkpoint. Needs no GPU. --samples writes a JSONL file
    of rollouts instead.

    For example:
      asyncrl export runs/mine my-model
      asyncrl export runs/mine my-model --step best --push me/my-model --private
      asyncrl export runs/mine good.jsonl --samples --min-reward 0.9
    """
    from asyncrl.job.run_export import export_run

    if len(paths) > 2 or (paths[-1] / "run.id").is_file():
        raise typer.BadParameter("export takes RUN_DIR and OUT, and OUT is new")
    run_dir, out = paths if len(paths) == 2 else (_or_newest(None), *paths)
    if samples != (min_reward is not None):
        raise typer.BadParameter("give both --samples and --min-reward, or neither")
    if private and push is None:
        raise typer.BadParameter("--private is of --push")
    is_of_weights = adapter or role is not None or push is not None or step != "last"
    asked = [name for name in others if others[name]]
    if asked and (samples or is_of_weights or asked[1:]):
        raise typer.BadParameter(f"--{asked[0]} takes no other option")
    if samples and is_of_weights:
        raise typer.BadParameter("--samples takes only --min-reward")
    write = functools.partial(
        export_run,
        step=step,
        adapter=adapter,
        role=role,
        push=push,
        private=private,
    )
    if asked:
        write = functools.partial(load_place(EXPORTS[asked[0]].place))
    if min_reward is not None:
        from asyncrl.job.sample_export import export_samples

        write = functools.partial(export_samples, min_reward=min_reward)
    with _result(as_json) as found:
        found |= write(run_dir, out, tell=typer.echo)


@command()
def scale(
    run_dir: NamedRun,
    asked: Annotated[
        str, Argument(metavar="NAME=N", help="A live setting, such as engines=3.")
    ],
) -> None:
    """Change a live setting of a running job, such as engines=3 within
    rollout.num_engines={min: 1, max: 8}.

    `asyncrl status` shows the progress. The number survives a resume.

    For example:
      asyncrl scale runs/mine engines=3
    """
    from asyncrl.job.live_settings import scale_run

    typer.echo(scale_run(run_dir, asked))


@command()
def stop(
    run_dir: NamedRun,
    timeout: Annotated[
        float, typer.Option(metavar="SECONDS", help="End the wait with an error.")
    ] = 600.0,
) -> None:
    """Stop a run of this machine: its controller finishes the step, saves and ends.

    For example:
      asyncrl stop runs/mine
      asyncrl stop runs/mine --timeout 60
    """
    from asyncrl.job.run_control import stop_run

    stop_run(run_dir, typer.echo, timeout_s=timeout)


@command()
def delete(
    run_dir: NamedRun,
    yes: Annotated[bool, Option("--yes", help="Do not ask.")] = False,
) -> None:
    """Delete the directory of a run that has ended, with its checkpoints and weights.

    For example:
      asyncrl delete runs/mine
      asyncrl delete runs/mine --yes
    """
    from asyncrl.job.run_control import delete_run

    delete_run(run_dir, lambda question: yes or typer.confirm(question), typer.echo)


@command()
@with_options("harness", OF_HARNESSES)
def work(
    url: Annotated[
        str, Argument(metavar="URL", help="Printed address of the gateway.")
    ],
    harness: dict[str, Text],
    key_file: Annotated[
        File,
        Option(
            metavar="FILE",
            help="The run's gateway.json (default: the key in ASYNCRL_WORKER_KEY).",
        ),
    ] = None,
    slots: Annotated[int, typer.Option(help="Concurrent rollouts.")] = 8,
    name: Annotated[Text, Option(help="Name in messages (default: HOST/PID).")] = None,
    args: Annotated[Text, Option(metavar="JSON", help="Settings of the agent.")] = None,
    env: Annotated[
        Texts, Option(metavar="NAME=VALUE", help="Environment variable of the command.")
    ] = None,
    pass_env: Annotated[
        Texts, Option(metavar="NAME", help="Variable to pass on.")
    ] = None,
    sandbox: Annotated[
        Text, Option(metavar="KIND", help="Run a command in a sandbox: bubblewrap.")
    ] = None,
    sandbox_paths: Annotated[
        Texts,
        Option("--sandbox-path", metavar="PATH", help="Readable path in the sandbox."),
    ] = None,
    max_memory_mb: Annotated[
        int | None, Option(help="Memory of a sandboxed process, in MiB.")
    ] = None,
    give_up_after: Annotated[
        float, Option(metavar="SECONDS", help="End if the gateway is silent this long.")
    ] = 1800.0,
) -> None:
    """Run rollouts for a run with generator.remote: true. Workers can join and leave at
    any time.

    Exits with code 0 when the run is done. Gives up after --give-up-after seconds
    without an answer.

    For example:
      asyncrl work http://trainer-host:8700 --key-file gateway.json --python my_agent:run
      asyncrl work http://trainer-host:8700 --command './agent.sh' --env CORPUS=/data/wiki
    """
    from asyncrl.agents.worker import run_worker

    refuse_broken()
    code = run_worker(
        url,
        key_file=key_file,
        harness=harness,
        slots=slots,
        name=name,
        args=args,
        env=env or [],
        pass_env=pass_env,
        sandbox=sandbox,
        sandbox_paths=sandbox_paths,
        max_memory_mb=max_memory_mb,
        give_up_s=give_up_after,
    )
    _exit(code)


@serve_command("gateway")
def serve_gateway(
    config: ConfigPath,
    overrides: Overrides = None,
    record: Annotated[
        File, Option(metavar="FILE", help="Append rollouts as JSON lines.")
    ] = None,
    rollouts: Annotated[
        int | None, Option(metavar="N", min=1, help="Run N rollouts, and end.")
    ] = None,
    run_dir: ServeDir = None,
) -> None:
    """Serve engines and a gateway without training, until Ctrl-C.

    The printed key never expires: POST /v1/outcome with a reward ends a rollout and
    begins the next. With --rollouts: exit code 1 if all fail.

    For example:
      asyncrl serve gateway configs/quickstart.yaml --record tried.jsonl
      asyncrl serve gateway configs/agent.yaml --rollouts 8
    """
    from asyncrl.launch.fork_server import serving

    loaded, name = load_config(config, overrides or []), name_of_config(config)
    with serving():
        with told_if_long("importing packages"):
            from asyncrl.job import serve

        code = serve.serve_gateway(
            loaded, run_dir, name=name, record=record, num_tried=rollouts
        )
    _exit(code)


@serve_command("engine")
def serve_engine(
    config: ConfigPath, overrides: Overrides = None, run_dir: ServeDir = None
) -> None:
    """Serve one engine with the initial weights, by its own protocol (asyncrl/messages
    or vLLM's), until Ctrl-C.

    For example:
      asyncrl serve engine configs/quickstart.yaml
    """
    from asyncrl.launch.fork_server import serving

    loaded = load_config(config, overrides or [])
    with serving():
        with told_if_long("importing packages"):
            from asyncrl.job import serve

        code = serve.serve_engine(loaded, run_dir, name=name_of_config(config))
    _exit(code)


for _name, _extension in extensions().items():
    for _command, _place in _extension.commands.items():
        try:
            _app, _, _word = _command.rpartition(" ")
            (serve_command if _app else command)(_word)(load_place(_place))
        except ConfigError as error:  # as in discover()
            discover().broken[_name] = error.what


def _exit(exit_code: int) -> None:
    """Exit, immediately if a library's thread would delay it: of a download, or of a
    stuck tracker.
    """
    trackers = sys.modules.get("asyncrl.observe.trackers")
    # A normal exit joins the threads. os._exit does not, but writes no buffers either,
    # hence the flush.
    if exit_code > 128 or (trackers is not None and trackers.LEFT):
        for file in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError):
                file.flush()
        os._exit(exit_code)
    raise SystemExit(exit_code)


def main() -> None:
    """Run the CLI; print an AsyncrlError in two or three lines, without traceback."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        # Samples have any characters. A terminal that cannot show one must not end the
        # command.
        sys.stdout.reconfigure(errors="backslashreplace")  # PYTHONIOENCODING=ascii
    try:
        try:
            with usual_signals():
                app()
        except SystemExit as ended:
            # typer has printed click's error and only SystemExit is left, but its
            # context still names the option, or the missing argument.
            error = ended.__context__
            option = getattr(error, "option_name", None)
            if type(error).__name__ == "MissingParameter":
                option = getattr(getattr(error, "param", None), "metavar", None)
            if ended.code == 2 and (hint := usage_hint(option, sys.argv[1:])):
                print(f"  Way out: {hint}", file=sys.stderr)
            raise
        except ModuleNotFoundError as absent:
            if (module := (absent.name or "").split(".")[0]) not in OF_TRAIN:
                raise
            raise not_installed(module) from None
        except OSError as error:
            # Of a path that the user gave. Others are not expected.
            given = [one for one in sys.argv[1:] if str(error.filename).startswith(one)]
            if not given:
                raise
            raise ConfigError(
                f"cannot use {error.filename}: {error.strerror}",
                way_out=f"give another path than {given[0]}.",
            ) from error
    except AsyncrlError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        _exit(error.exit_code)


if __name__ == "__main__":
    main()
