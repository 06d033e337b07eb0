"""Check a config: load everything except weights."""

from __future__ import annotations

import asyncio
import re
import shutil
from collections.abc import Callable, Iterator, Sequence

from asyncrl.agents.endpoint.tool_formats import find_tool_format
from asyncrl.agents.harness import build_harness
from asyncrl.algorithms.registry import resolve
from asyncrl.base.errors import ConfigError
from asyncrl.base.extensions import all_of, load_place
from asyncrl.base.host import exit_raises
from asyncrl.base.user_code import load_advantage, load_loss
from asyncrl.config import GeneratorConfig, JobConfig, RunConfig, TaskConfig
from asyncrl.config.eval_config import EVAL_SEED
from asyncrl.config.run_config import key_of
from asyncrl.job.check.config_warnings import (
    digests_of,
    find_warnings,
    repeats_of,
    warn_of_age,
)
from asyncrl.job.check.found import Found
from asyncrl.job.check.model_check import (
    check_architecture,
    check_support,
    check_tokenizer,
    find_models,
    later_prompts,
    try_engines,
)
from asyncrl.job.check.prompt_check import check_prompts
from asyncrl.job.check.reward_trial import try_prompt
from asyncrl.job.checkpoint_callback import load_callback
from asyncrl.job.lifecycle import Lifecycle
from asyncrl.job.roles import extra_models, extra_servers
from asyncrl.launch.machine import Node, find_worker_python
from asyncrl.launch.model_sizes import read_architecture
from asyncrl.launch.plan import (
    DISK,
    plan_run,
    plan_text,
    refuse_over_capacity,
    resolve_auto,
    size_text,
)
from asyncrl.observe.trackers import check_trackers
from asyncrl.rollouts.tokenizer import HFChatTokenizer
from asyncrl.tasks.sources import look_at_task, take_prompts
from asyncrl.tasks.task import PromptTask
from asyncrl.trainer.model.model_folder import fetch_architectures, find_on_disk

TASK_KEYS = re.compile(rf"\btask(?=\.({'|'.join(TaskConfig.model_fields)})\b)")
GET_CONFIG = (
    "Way out: `hf download OWNER/NAME config.json --local-dir FOLDER` where the hub answers; "
    "with --devices, model.path=FOLDER is enough."
)


def check_lines(settings: JobConfig, nodes: Sequence[Node]) -> Iterator[str]:
    """Yield what `asyncrl check` prints, warnings last. Raises ConfigError."""
    check: Callable[..., Iterator[str]] = load_place(settings.check)
    doubts = list[str]()
    try:
        for line in check(settings, nodes):
            if line.startswith("warning: "):
                doubts.append(line)
            else:
                yield line
    except ConfigError:
        yield from doubts  # They may explain the error.
        raise
    # Above the plan nobody would read them.
    yield from doubts


def check_run(config: RunConfig, nodes: Sequence[Node]) -> Iterator[str]:
    extra = extra_servers(config)
    config, resolved = resolve_auto(config, nodes, extra)
    own = [other.model for other in extra_models(config).values()]
    fetch_architectures(config.model, *own)
    is_here = nodes[0].machine.is_here
    found = validate(config, needs_weights=is_here)
    check_reports(config)
    yield from found.lines
    yield from resolved
    yield from (f"note: {note}" for note in found.notes)
    evals = {key_of("eval", name): task for name, (task, _) in found.evals.items()}
    doubts = find_warnings(
        config.trainer,
        sum(map(len, found.tasks.values())) or None,
        digests_of(found.tasks).values(),
        digests_of(evals),
    )
    trained = {key_of("task", name): task for name, task in found.tasks.items()}
    yield from (
        f"warning: {text}"
        for text in [*doubts, *repeats_of(trained), *warn_of_age(config)]
    )
    for name, prompt in found.prompts.items():
        yield from try_prompt(config, found, name, prompt)
    yield from check_plan(config, nodes)


def check_plan(config: RunConfig, nodes: Sequence[Node]) -> Iterator[str]:
    """Yield processes, devices and memory of a config without `auto`. Raises ConfigError."""
    extra = extra_servers(config)
    yield from check_architecture(config)
    plan, messages = plan_run(config, nodes, extra)
    # Run directories are here by default.
    disk_bytes = None
    if nodes[0].machine.is_here:
        disk_bytes = shutil.disk_usage(".").free
    yield plan_text(plan, config, disk_bytes)
    yield from messages
    if not plan.shape.num_parameters:
        yield f"warning: memory is not checked, because {config.model.path} is not here. {GET_CONFIG}"
    for other in extra_models(config).values():
        if not read_architecture(other.model):
            path = other.model.path
            yield f"warning: {other.key}={path} is not checked, because it is not here. {GET_CONFIG}"
    needed = plan.needed_bytes(DISK)
    if disk_bytes is not None and needed > disk_bytes:
        yield f"warning: this disk has less than {size_text(needed)} free: choose a --run-dir on another one"
    # Last: the printed plan shows what does not fit.
    refuse_over_capacity(plan, config)


def check_reports(config: JobConfig) -> None:
    """Load the user code that a run reports to."""
    check_trackers(config.observe)
    if config.checkpoint.callback is not None:
        load_callback(config.checkpoint.callback)


def check_model(
    config: RunConfig, nodes: Sequence[Node]
) -> tuple[list[str], HFChatTokenizer | None]:
    """Return lines about the model of a job without engines, and its tokenizer unless a
    part is not here. Raises ConfigError.
    """
    fetch_architectures(config.model)
    check_reports(config)
    found = Found()
    check_support(config, found)
    tokenizer = check_tokenizer(config, found, needs_weights=nodes[0].machine.is_here)
    return found.lines, tokenizer


async def check_everything(lifecycle: Lifecycle, *, reads_all: bool = True) -> Found:
    """Validate a run's config, and load its tasks."""
    lifecycle.log.activity("checking the config and reading the tasks")
    found = await asyncio.to_thread(validate, lifecycle.config, reads_all=reads_all)
    for note in found.notes:
        lifecycle.log.info(note)
    return found


@exit_raises()
def validate(
    config: RunConfig, *, reads_all: bool = False, needs_weights: bool = True
) -> Found:
    """Load everything except weights. `reads_all`: also tasks that only a start may
    read. `needs_weights`: False accepts a model folder with only config.json. Raises
    ConfigError.
    """
    algorithms = config.all_algorithms
    for algorithm in algorithms:
        resolve(algorithm)
    found = Found()
    _check_tasks(config, found, reads_all=reads_all)
    found.lines += all_of("check", config, found.tasks)
    check_support(config, found)
    tokenizer = found.tokenizer = check_tokenizer(
        config, found, needs_weights=needs_weights
    )
    check_prompts(config, found, tokenizer)
    if tokenizer is not None:
        found.lines += later_prompts(config, tokenizer)
        find_models(config, tokenizer, find_on_disk)
    elif ":" in config.gateway.tool_format:
        find_tool_format(config.gateway.tool_format, "")
    try_engines(config, found)
    if ":" in config.algorithm.loss:
        load_loss(config.algorithm.loss)
    for algorithm in algorithms:
        if ":" in algorithm.advantage:
            load_advantage(algorithm.advantage)
    _check_harnesses(config, found)
    return found


def _check_harnesses(config: RunConfig, found: Found) -> None:
    named = config.generator.worker_python
    if named is not None:
        find_worker_python(named)
    for harness in config.harnesses:
        # Another Python has other packages: the worker reports a failed import.
        if harness.command or (harness.python and named is None):
            build_harness(harness, is_worker=False)


def _check_tasks(config: RunConfig, found: Found, *, reads_all: bool) -> None:
    def load(
        key: str,
        settings: TaskConfig,
        seed: int,
        generator: GeneratorConfig,
        more: str = "",
    ) -> PromptTask | None:
        is_evaluated = key.startswith("eval")
        try:
            task, text = look_at_task(
                settings,
                seed,
                generator=generator,
                is_evaluated=is_evaluated,
                reads_all=reads_all,
            )
        except ConfigError as error:
            section = f"{key}.task" if is_evaluated else key
            error.what = TASK_KEYS.sub(section, error.what)
            error.way_out = TASK_KEYS.sub(section, error.way_out)
            raise
        found.lines.append(f"{key}: {text}{more}")
        return task

    total = sum(config.shares.values())
    for name, settings in config.tasks.items():
        generator = config.generators[name]
        more = ""
        if name:
            more = f" ({config.shares[name] / total:.1%} of the prompts), {generator.called}"
        key = key_of("task", name)
        if (task := load(key, settings, config.seed, generator, more)) is not None:
            found.tasks[name] = task
    for name, eval_settings in config.evals.items():
        key = key_of("eval", name)
        held_out = eval_settings.task
        generator = config.eval_generators[name]
        more = f", {generator.called}" if held_out.generator is not None else ""
        if (task := load(key, held_out, EVAL_SEED, generator, more)) is not None:
            found.evals[name] = take_prompts(eval_settings, task, name)
