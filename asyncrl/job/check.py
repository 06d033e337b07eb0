"""Check a config: load everything except weights."""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import re
import shutil
import signal
import tempfile
import threading
import time
import warnings
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path

from asyncrl.agents.endpoint.tool_formats import find_tool_format
from asyncrl.agents.harness import build_harness
from asyncrl.algorithms.registry import resolve
from asyncrl.base.errors import ConfigError
from asyncrl.base.extensions import all_of, load_place
from asyncrl.base.host import exit_raises
from asyncrl.base.user_code import load_advantage, load_loss
from asyncrl.config import (
    GeneratorConfig,
    JobConfig,
    ModelConfig,
    RolloutConfig,
    RunConfig,
    TaskConfig,
)
from asyncrl.config.eval_config import EVAL_SEED
from asyncrl.config.run_config import key_of
from asyncrl.job.checkpoint_callback import load_callback
from asyncrl.job.config_warnings import (
    digests_of,
    find_warnings,
    repeats_of,
    tried_prompts,
)
from asyncrl.job.lifecycle import Lifecycle
from asyncrl.job.roles import extra_models, extra_servers
from asyncrl.launch.machine import Node, find_worker_python
from asyncrl.launch.model_sizes import (
    find_architecture,
    read_architecture,
    read_text_architecture,
)
from asyncrl.launch.plan import (
    DISK,
    offload_text,
    plan_run,
    plan_text,
    refuse_over_capacity,
    resolve_auto,
    size_text,
)
from asyncrl.messages.records import Prompt
from asyncrl.messages.tokens import NO_COMPLETION
from asyncrl.models.support import find_support, support_lines
from asyncrl.observe.trackers import check_trackers
from asyncrl.rollouts.tokenizer import (
    HFChatTokenizer,
    is_written,
    read_template,
    read_vocabulary,
)
from asyncrl.tasks.rewards import (
    UnreadableAnswer,
    UserCodeFailed,
    call,
    call_async,
    check_spans,
    optional,
    score_of,
)
from asyncrl.tasks.sources import (
    EvalTask,
    look_at_task,
    make_prompt_source,
    take_prompts,
)
from asyncrl.tasks.task import PromptTask
from asyncrl.trainer.model.model_folder import (
    check_model_type,
    check_plain,
    fetch_architectures,
    find_model,
    find_on_disk,
)

TriedReward = float | list[float] | UserCodeFailed
"""What a trial of a reward gave."""
NUM_PROMPTS = 100
MAX_SHOWN = 2000
TASK_KEYS = re.compile(rf"\btask(?=\.({'|'.join(TaskConfig.model_fields)})\b)")
TRIAL_S = 10.0
"""Seconds for a trial of a reward."""
GET_CONFIG = (
    "Way out: `hf download OWNER/NAME config.json --local-dir FOLDER` where the hub answers; "
    "with --devices, model.path=FOLDER is enough."
)
SIMULATED = "rollout.engine=simulated: tokens are drawn at random, rewards and weights mean nothing"


@dataclass(slots=True, eq=False)
class Found:
    """Lines to print, notes to warn of, loaded tasks, and the first prompt of each."""

    lines: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    tasks: dict[str, PromptTask] = field(default_factory=dict)
    evals: dict[str, EvalTask] = field(default_factory=dict)
    prompts: dict[str, Prompt] = field(default_factory=dict)
    tokenizer: HFChatTokenizer | None = None


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
    yield from (f"warning: {text}" for text in [*doubts, *repeats_of(trained)])
    for name, prompt in found.prompts.items():
        yield from _try_prompt(config, found, name, prompt)
    yield from check_plan(config, nodes)


def check_plan(config: RunConfig, nodes: Sequence[Node]) -> Iterator[str]:
    """Yield processes, devices and memory of a config without `auto`. Raises ConfigError."""
    extra = extra_servers(config)
    yield from _try_model(config)
    plan, messages = plan_run(config, nodes, extra)
    disk_bytes = _disk_bytes(nodes)
    yield plan_text(plan, config, disk_bytes)
    if offloads := offload_text(plan, config, nodes, extra):
        yield f"\n{offloads}"
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


def _disk_bytes(nodes: Sequence[Node]) -> int | None:
    """Return the free space where run directories are by default, if it is this machine."""
    return shutil.disk_usage(".").free if nodes[0].machine.is_here else None


def check_model(
    config: RunConfig, nodes: Sequence[Node]
) -> tuple[list[str], HFChatTokenizer | None]:
    """Return lines about the model of a job without engines, and its tokenizer unless a
    part is not here. Raises ConfigError.
    """
    fetch_architectures(config.model)
    check_reports(config)
    found = Found()
    _check_support(config, found)
    tokenizer = _check_model(config, found, needs_weights=nodes[0].machine.is_here)
    return found.lines, tokenizer


def _try_prompt(
    config: RunConfig, found: Found, name: str, prompt: Prompt
) -> Iterator[str]:
    """Yield the prompt as the model reads it, and rewards of its reference answer and
    of an empty one. Raises ConfigError if the reward returns no numbers.
    """
    key = key_of("task", name)
    settings = config.tasks[name]
    if found.tokenizer is not None:
        yield f"{key}: the first prompt is {found.tokenizer.render(prompt.messages)[:MAX_SHOWN]!r}"
    if config.generators[name].is_harness or not settings.has_score:
        return
    if settings.scored_by is not None:
        return
    task = found.tasks[name]
    texts = [*_reference(settings, prompt), ""]
    rewards = try_reward(task, prompt, texts)
    source = f"{key}: the reward {settings.reward or settings.called}"
    shown = {
        text[:60]: _shown(reward) for text, reward in zip(texts, rewards, strict=False)
    }
    yield f"{key}: rewards of the reference answer, if it is a text or number, and of an empty one: {shown}"
    faults = [str(reward) for reward in rewards if isinstance(reward, UserCodeFailed)]
    if len(rewards) < len(texts):
        yield f"warning: {source} takes more than {TRIAL_S:g} s; it is not checked"
    # Only a wrong return value is surely a fault, and the end of the process, which may
    # be the run's. An exception may be meant: it fails the rollout, for example without
    # an answer.
    elif len(faults) == len(texts) and all(
        fault.startswith(("returned", "ended")) for fault in faults
    ):
        what = f"{source} {faults[0]}"
        raise ConfigError(
            what,
            rule="a reward is one finite number",
            way_out="return a number for each completion, such as 1.0.",
        )
    elif len(faults) == len(texts):
        yield f"warning: {source} {faults[0]} for each answer that was tried: such rollouts fail"
    elif [] not in rewards and len({*map(str, rewards)}) < len(texts):
        yield f"warning: {source} does not tell the two answers apart; is it right?"
    else:
        yield from _try_rows(settings, task, source)


def _try_rows(settings: TaskConfig, task: PromptTask, source: str) -> Iterator[str]:
    """Yield a warning if the reward fails for a row."""
    started_s = time.monotonic()
    for prompt in tried_prompts(task):
        texts = [*_reference(settings, prompt), ""]
        for text, reward in zip(texts, try_reward(task, prompt, texts), strict=False):
            if isinstance(reward, UserCodeFailed):
                row = f"{text!r:.60} in a row with the answer {prompt.answer!r:.60}"
                yield f"warning: {source} {reward} for {row}: such rollouts fail"
                return
        if time.monotonic() - started_s > TRIAL_S:
            return


def _reference(settings: TaskConfig, prompt: Prompt) -> list[str]:
    """Return the reference answer if it is a text or number."""
    answer = prompt.answer["answer"] if settings.reasoning_gym else prompt.answer
    with suppress(ValueError):  # of an integer with more than 4,300 digits
        if isinstance(answer, str | int | float | Decimal):
            return [str(answer)]
    return []


def _shown(reward: TriedReward) -> object:
    if reward == []:  # of a function that scores tokens, of which the trial has none
        return "one per token"
    return str(reward) if isinstance(reward, UserCodeFailed) else reward


def try_reward(
    task: PromptTask, prompt: Prompt, texts: Sequence[str]
) -> list[TriedReward]:
    """Return the reward of each text, or its failure; [] after TRIAL_S."""
    function, takes_group = score_of(task)
    receiving, sending = multiprocessing.Pipe(duplex=False)

    def score() -> None:
        rewards = list[TriedReward]()
        for given in [texts] if takes_group else texts:
            asked = {} if takes_group else optional(function, NO_COMPLETION)
            try:
                result = call(function, prompt, given, asked)
                if isinstance(result, Awaitable):
                    result = asyncio.run(call_async(result, given))
                if isinstance(result, list) and not takes_group:
                    check_spans(result, num_tokens=0)
            except UnreadableAnswer:
                result = 0.0
            except UserCodeFailed as failure:
                rewards.extend([failure] * (len(texts) if takes_group else 1))
                continue
            if takes_group:
                rewards.extend(result)
            else:
                rewards.append(result)
        sending.send(rewards)

    def score_in_thread() -> None:
        """Score in a thread, as a run does: a function may need the main thread."""
        # Only of tasks that the function started.
        logging.getLogger("asyncio").setLevel(logging.CRITICAL)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        thread = threading.Thread(target=score)
        thread.start()
        thread.join()

    # A reward may end or change its process, or never return. The process is a fork:
    # what a task keeps in memory need not be picklable.
    child = multiprocessing.get_context("fork").Process(target=score_in_thread)
    with warnings.catch_warnings():
        # Python 3.12 warns of threads that hold locks: then the trial meets its limit.
        warnings.simplefilter("ignore", DeprecationWarning)
        child.start()
    sending.close()
    try:
        rewards = receiving.recv() if receiving.poll(TRIAL_S) else []
        child.join(1.0)  # it prints what the function printed
    except EOFError:
        child.join()
        failure = UserCodeFailed(f"ended its process (exit code {child.exitcode})")
        rewards = [failure] * len(texts)
    finally:
        child.kill()
        child.join()
        receiving.close()
    return rewards


def _try_model(config: RunConfig) -> Iterator[str]:
    """Build the model on `meta`, and yield how its experts are balanced. Raises
    ConfigError.
    """
    path = find_architecture(config.model)
    if config.model.scratch is None and not path.is_file():
        return
    try:
        from asyncrl.trainer.model.model_trial import try_model
    except ModuleNotFoundError as error:
        yield f"model: its architecture is not checked: that needs the package {error.name}"
    else:
        weight = try_model(config, path.parent)
        if weight is not None:
            auto = "auto is " if config.trainer.router_aux_loss == "auto" else ""
            shown = f"{weight:g}" if weight else "off"
            yield f"trainer.router_aux_loss: {auto}{shown}"


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
    algorithms = [config.algorithm, *config.algorithms.values()]
    for algorithm in algorithms:
        resolve(algorithm)
    found = Found()
    if not config.rollout.facts.has_model:
        found.notes.append(SIMULATED)
    _check_tasks(config, found, reads_all=reads_all)
    found.lines += all_of("check", config)
    _check_support(config, found)
    tokenizer = found.tokenizer = _check_model(
        config, found, needs_weights=needs_weights
    )
    _check_prompts(config, found, tokenizer)
    if tokenizer is not None:
        find_tool_format(config.gateway.tool_format, tokenizer.template)
        find_models(config, tokenizer, find_on_disk)
    elif ":" in config.gateway.tool_format:
        find_tool_format(config.gateway.tool_format, "")
    _try_engines(config, found)
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


def _check_support(config: RunConfig, found: Found) -> None:
    """Add how models of this type are trained and served. Raises ConfigError if the
    engine refuses them.
    """
    model_type = read_architecture(config.model).get("model_type", "not known yet")
    rows = find_support(model_type)
    found.lines += support_lines(rows) or [
        f"model: its type, {model_type}, is not tested (docs/models.md)"
    ]
    for key, model, _ in _embedded_models(config):
        model_type = read_architecture(model).get("model_type", "")
        rows = find_support(model_type)
        if {row["embedded engine"] for row in rows} == {"refused"}:
            raise ConfigError(
                f"the embedded engine refuses {model_type} models: {rows[0]['known deviation']}",
                way_out=f"set {key}=vllm (its CPU build: {rows[0]['vllm on a CPU']}).",
            )


def _embedded_models(config: RunConfig) -> Iterator[tuple[str, ModelConfig, int]]:
    """Yield the models that embedded engines serve, as (setting of the engine, model,
    longest text).
    """
    longest = config.rollout.max_length
    if config.rollout.engine == "embedded":  # an own eval engine is of this kind
        yield "rollout.engine", config.model, longest
    for server in extra_servers(config).values():
        own = server.model
        if own is not None and server.engine == "embedded" and not server.is_remote:
            section = own.key.rpartition(".")[0]
            yield f"{section}.engine", own.model, server.max_length or longest


def _try_engines(config: RunConfig, found: Found) -> None:
    """Raise ConfigError if an embedded engine would refuse a model of a type outside of
    docs/models.csv. Blocks.
    """
    for key, model, longest in _embedded_models(config):
        architecture = read_architecture(model)
        if not architecture or find_support(architecture.get("model_type", "")):
            continue
        try:
            from asyncrl.trainer.model.model_trial import try_engine
        except ModuleNotFoundError as error:
            found.lines.append(
                f"{key}=embedded: not tried: that needs the package {error.name}"
            )
            return
        try_engine(key, model, find_architecture(model).parent, longest)


def _check_model(
    config: RunConfig, found: Found, *, needs_weights: bool
) -> HFChatTokenizer | None:
    """Return None if a part is not here."""
    model = config.model
    architecture = read_architecture(model)
    check_plain(config, architecture)
    template = model.chat_template
    if template is not None:
        read_template(Path(template))
    with tempfile.TemporaryDirectory(prefix="asyncrl-check-") as made:
        if model.scratch is not None:
            check_model_type(
                architecture.get("model_type"), "model.scratch.architecture"
            )
            from asyncrl.trainer.model.random_init import make_character_tokenizer

            characters = model.scratch.characters
            has_tool_role = model.scratch.has_tool_role
            make_character_tokenizer(
                characters, has_tool_role=has_tool_role
            ).save_pretrained(made)
            folder = Path(made)
        else:
            there = find_on_disk(
                str(model.path), revision=model.revision, needs_weights=needs_weights
            )
            if there is None or not (needs_weights or any(there.glob("tokenizer*"))):
                text = "has no tokenizer here; not checked: its files, the template, and lengths of prompts"
                found.lines.append(f"model: {model.source} {text}")
                return None
            folder = there
        tokenizer = HFChatTokenizer(
            folder,
            chat_template=template,
            chat_template_kwargs=model.chat_template_kwargs,
            parse_special_tokens=config.gateway.parse_special_tokens,
        )
    if config.rollout.facts.has_model:
        _refuse_beyond_positions(config.rollout, positions_of(model))
        if not tokenizer.ends_answers:
            found.notes.append(
                f"the chat template ends answers with {tokenizer.no_end}"
            )
    return tokenizer


def positions_of(model: ModelConfig) -> int | None:
    """Return the positions of a language model; None: unknown."""
    architecture = read_text_architecture(model)
    scaling = (
        architecture.get("rope_scaling") or architecture.get("rope_parameters") or {}
    )
    # A scaling factor extends the positions beyond max_position_embeddings.
    is_scaled = "factor" in scaling
    return None if is_scaled else architecture.get("max_position_embeddings")


def _refuse_beyond_positions(rollout: RolloutConfig, positions: int | None) -> None:
    if positions is not None and rollout.max_length > positions:
        raise ConfigError(
            f"rollout.max_prompt_tokens={rollout.max_prompt_tokens} and rollout.max_tokens="
            f"{rollout.max_tokens} allow {rollout.max_length} tokens",
            rule=f"the model has max_position_embeddings={positions}",
            way_out=f"lower one so that their sum is at most {positions}.",
        )


def _called(kind: str, name: str) -> str:
    return f"{kind} {name}".rstrip()


def _check_prompts(
    config: RunConfig, found: Found, tokenizer: HFChatTokenizer | None
) -> None:
    by_task = dict[str, list[Prompt]]()
    agents = {
        _called("task", name)
        for name, generator in config.generators.items()
        if generator.is_harness
    }
    agents |= {
        _called("eval task", name)
        for name, generator in config.eval_generators.items()
        if generator.is_harness
    }
    if len(found.tasks) == len(config.tasks):
        # A separate source: the run's own must still begin with its first prompt.
        source = make_prompt_source(config, found.tasks)
        for _ in range(min(NUM_PROMPTS, sum(map(len, found.tasks.values())))):
            prompt = source.next_nowait()
            found.prompts.setdefault(prompt.task, prompt)
            by_task.setdefault(_called("task", prompt.task), []).append(prompt)
    for name, (_, held_out) in found.evals.items():
        by_task[_called("eval task", name)] = list(held_out)
    if config.model.scratch is not None:
        _refuse_outside_alphabet(by_task, config.model.scratch.characters)
    if tokenizer is None:
        return
    rendered = {
        name: prompts for name, prompts in by_task.items() if name not in agents
    }
    if agents:  # an agent writes its own prompts
        rendered["simplest chat"] = [
            Prompt("", ({"role": "user", "content": "Hello"},))
        ]
    for name, prompts in rendered.items():
        found.notes += _check_lengths(name, prompts[:NUM_PROMPTS], tokenizer, config)


def _refuse_outside_alphabet(
    by_task: Mapping[str, Sequence[Prompt]], characters: str
) -> None:
    for name, prompts in by_task.items():
        chats = (
            message["content"] for prompt in prompts for message in prompt.messages
        )
        used = {character for text in chats for character in text}
        if unknown := "".join(sorted(used - set(characters))):
            raise ConfigError(
                f"prompts of the {name} have characters that model.scratch.characters lacks: {unknown!r}",
                rule="each would become the token <unk>",
                way_out="add them to model.scratch.characters, or change the prompts.",
            )


def _check_lengths(
    name: str, prompts: Sequence[Prompt], tokenizer: HFChatTokenizer, config: RunConfig
) -> list[str]:
    """Return notes. Raises ConfigError if all prompts are too long, or one cannot be
    rendered.
    """
    limit = config.rollout.max_prompt_tokens
    template = config.model.chat_template
    source = (
        "the model's template"
        if template is None
        else f"model.chat_template={template}"
    )
    try:
        texts = [tokenizer.render(prompt.messages) for prompt in prompts]
        chats = [*map(tokenizer.encode, texts)]
    except ValueError as error:
        raise ConfigError(
            f"{source} cannot render a prompt of the {name}: {error}",
            way_out="correct the prompts or the template, or set model.chat_template to another one.",
        ) from error
    lengths = [*map(len, chats)]
    num_rows = read_text_architecture(config.model).get("vocab_size")
    if num_rows and (largest := max(map(max, chats))) >= num_rows:
        raise ConfigError(
            f"{source} writes the token {largest} into a prompt of the {name}",
            rule=f"the model's embedding has vocab_size={num_rows} rows",
            way_out="correct the template, or take the tokenizer that belongs to the model.",
        )
    notes = [
        f"{source} leaves out the {message['role']} message of prompts of the {name}"
        for message in prompts[0].messages
        if not is_written(message["content"], texts[0])
    ]
    if not (num_too_long := sum(length > limit for length in lengths)):
        return notes
    note = (
        f"{num_too_long} of the first {len(lengths)} prompts of the {name} are longer than "
        f"rollout.max_prompt_tokens={limit}; the longest has {max(lengths)} tokens"
    )
    if num_too_long < len(lengths):
        return [*notes, f"{note}: their rollouts fail"]
    way_out = f"raise rollout.max_prompt_tokens to {max(lengths)} or more, or shorten the prompts."
    raise ConfigError(
        note, rule="prompts are never truncated; their rollouts fail", way_out=way_out
    )


def find_models(
    config: RunConfig,
    tokenizer: HFChatTokenizer,
    find: Callable[..., Path | None] = find_model,
) -> dict[str, Path]:
    """Return the model folders of roles with a model of their own. Raises ConfigError
    if one that reads token ids has others than the trained model. Blocks.
    """
    ours = {number: token for token, number in tokenizer.vocabulary.items()}
    if config.algorithm.num_distill_ids > len(ours):
        raise ConfigError(
            f"algorithm.distill_top_k={config.algorithm.distill_top_k}, and the model has {len(ours)} tokens",
            way_out=f"set algorithm.distill_top_k={len(ours)} or lower.",
        )
    found = dict[str, Path]()
    for role, extra in extra_models(config).items():
        key, model = extra.key, extra.model
        folder = find(
            model.path,
            key=key,
            revision=model.revision,
            needs_weights=not extra.is_remote,
        )
        if folder is None:
            continue
        found[role] = folder
        if not extra.reads_token_ids:
            continue
        theirs = {number: token for token, number in read_vocabulary(folder).items()}
        if differing := theirs.items() ^ ours.items():
            first, _ = min(differing)
            raise ConfigError(
                f"{key}={model.path} has {len(theirs)} tokens, the model {len(ours)}: id {first} is "
                f"{theirs.get(first)!r} in the {role}, {ours.get(first)!r} in the model",
                rule=f"the {role} reads the sampled token ids, so both vocabularies must be equal",
                way_out=f"use a {role} with the model's tokenizer, for example from the same family.",
            )
        positions = positions_of(model)
        needed = config.rollout.max_length + extra.num_sampled
        if positions is not None and positions < needed:
            more = ", and its server samples one more" if extra.num_sampled else ""
            raise ConfigError(
                f"{key}={model.path} has max_position_embeddings={positions}",
                rule=f"the {role} reads whole texts, of at most {config.rollout.max_length} tokens{more}",
                way_out=f"use another {role}, or lower rollout.max_prompt_tokens or rollout.max_tokens.",
            )
    return found
