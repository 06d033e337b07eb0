"""Check a config: load everything except weights. Torch and user code that the controller does not run load
in a child process, `python -m asyncrl.job.check`.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import os
import sys
import tempfile
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from asyncrl.agents.endpoint.tool_formats import find_tool_format
from asyncrl.agents.harness import build_harness
from asyncrl.agents.verifiers import taskset_loader
from asyncrl.algorithms.registry import resolve
from asyncrl.base.errors import ConfigError, TaskError, install_extra, may_lack_train
from asyncrl.base.http import fail
from asyncrl.base.message import find_fatal
from asyncrl.base.user_code import load_advantage, load_loss
from asyncrl.config import LoraConfig, ModelConfig, RunConfig, load_config, run_config_yaml
from asyncrl.config.generator_gateway import kind_of
from asyncrl.config.model_task_eval import EVAL_SEED
from asyncrl.config.run_config import key_of
from asyncrl.job.lifecycle import Lifecycle
from asyncrl.job.servers import TEACHER_KEY
from asyncrl.launch.machine import Node, single_node
from asyncrl.launch.plan import plan_run, plan_text, refuse_over_capacity, resolve_auto
from asyncrl.launch.processes import run_module
from asyncrl.messages.records import Prompt
from asyncrl.observe.trackers import check_trackers
from asyncrl.rollouts.tokenizer import HFChatTokenizer, read_template, read_vocabulary
from asyncrl.tasks.sources import (
    EvalTask,
    build_task,
    look_at_task,
    make_prompt_source,
    take_prompts,
)
from asyncrl.tasks.task import PromptTask
from asyncrl.trainer.model_folder import (
    check_model_type,
    fetch_architectures,
    find_model,
    find_on_disk,
    hub_source,
)

NUM_PROMPTS = 100
NUM_SCRATCH_PROMPTS = 1000
"""Prompts to compare with a scratch model's alphabet."""
SIMULATED = "rollout.engine=simulated: tokens are drawn at random, rewards and weights mean nothing"
FINE = 64
"""Exit code after loading everything."""


@dataclass(slots=True, eq=False)
class Found:
    """Lines to print, notes to warn of, and loaded tasks."""

    lines: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    tasks: dict[str, PromptTask] = field(default_factory=dict)
    evals: dict[str, EvalTask] = field(default_factory=dict)


def check_lines(config: RunConfig, where: Sequence[Node] | None = None) -> Iterator[str]:
    unchecked = list[str]()
    with may_lack_train("trackers", unchecked):
        check_trackers(config.observe)
    nodes = where or single_node()
    config, resolved = resolve_auto(config, nodes)
    if nodes[0].machine.is_here:
        fetch_architectures(config)
    found = validate(config, unchecked)
    yield from found.lines
    if unchecked:
        yield f"not checked: {', '.join(unchecked)}; that needs the extra train: {install_extra('train')}"
    yield from resolved
    yield from (f"note: {note}" for note in found.notes)
    plan, messages = plan_run(config, nodes)
    yield plan_text(plan, config)
    yield from messages
    refuse_over_capacity(plan, config)


async def check_everything(life: Lifecycle, *, is_needed: bool = True) -> Found:
    """Validate a run's config. `is_needed`: read tasks that only a start may read."""
    life.log.activity("checking the config")
    found = await asyncio.to_thread(validate, life.config)
    for note in found.notes:
        life.log.info(note)
    if not is_needed:
        return found
    life.log.activity("reading the tasks")
    load = taskset_loader(life.config.generator)
    for name, settings in life.config.tasks.items():
        if name not in found.tasks:
            task = await asyncio.to_thread(build_task, settings, life.config.seed, load_taskset=load)
            found.tasks[name] = task
    found.tasks = {name: found.tasks[name] for name in life.config.tasks}
    for name, eval_settings in life.config.evals.items():
        if name not in found.evals:
            task = await asyncio.to_thread(build_task, eval_settings.task, EVAL_SEED)
            found.evals[name] = take_prompts(eval_settings, task, name)
    return found


def validate(config: RunConfig, unchecked: list[str] | None = None) -> Found:
    """Load everything except weights. Parts that lack the extra train go into `unchecked`."""
    resolve(config.algorithm)
    found = Found()
    if not config.rollout.facts.has_model:
        found.notes.append(SIMULATED)
    _check_tasks(config, found, unchecked)
    tokenizer: HFChatTokenizer | None = None
    with may_lack_train("the model's tokenizer, the lengths of the prompts", unchecked):
        tokenizer = _check_model(config, found)
    _check_prompts(config, found, tokenizer)
    with may_lack_train("the teacher", unchecked):
        found.lines += check_teacher(config, tokenizer)
    if tokenizer is not None:
        find_tool_format(config.gateway.tool_format, tokenizer.template, tokenizer.response_template)
    elif ":" in config.gateway.tool_format:
        find_tool_format(config.gateway.tool_format, "", None)
    kind = kind_of(config.generator)
    if kind is not None and kind.checked_in == "here":
        build_harness(config.generator, is_worker=False)
    with may_lack_train("loss, advantage, agent and LoRA", unchecked):
        _check_in_child(config)
    return found


def _check_tasks(config: RunConfig, found: Found, unchecked: list[str] | None) -> None:
    load = taskset_loader(config.generator)
    total = sum(config.shares.values())
    for name, settings in config.tasks.items():
        with may_lack_train(key_of("task", name), unchecked):
            task, text = look_at_task(settings, config.seed, load_taskset=load)
            share = f" ({config.shares[name] / total:.1%} of the prompts)" if name else ""
            found.lines.append(f"{key_of('task', name)}: {text}{share}")
            if task is not None:
                found.tasks[name] = task
    for name, eval_settings in config.evals.items():
        with may_lack_train(key_of("eval", name), unchecked):
            task, text = look_at_task(eval_settings.task, EVAL_SEED)
            found.lines.append(f"eval.{name} task: {text}" if name else f"eval task: {text}")
            if task is not None:
                found.evals[name] = take_prompts(eval_settings, task, name)


def _check_model(config: RunConfig, found: Found) -> HFChatTokenizer | None:
    """Return None if a part is only on the hub."""
    tokenizer = _tokenizer(config)
    if tokenizer is None:
        text = "is fetched from the hub when the run starts; not checked: that needs the network"
        found.lines.append(f"model: {config.model.source} {text}")
        return None
    folder = Path(tokenizer.model_path)
    if (hub := hub_source(folder)) is not None:
        found.lines.append(f"model: {config.model.source} is commit {hub[1]} of {hub[0]}, as far as fetched")
    if config.rollout.facts.has_model:
        _refuse_beyond_positions(config, folder)
    return tokenizer


def _check_prompts(config: RunConfig, found: Found, tokenizer: HFChatTokenizer | None) -> None:
    by_task = dict[str, list[Prompt]]()
    num_prompts = NUM_PROMPTS if config.model.scratch is None else NUM_SCRATCH_PROMPTS
    if len(found.tasks) == len(config.tasks):
        source = make_prompt_source(config, found.tasks)
        try:
            for _ in range(min(num_prompts, sum(map(len, found.tasks.values())))):
                prompt = source.next_nowait()
                by_task.setdefault(f"task {prompt.task}".rstrip(), []).append(prompt)
        except TaskError as error:
            raise ConfigError(error.fault, rule=error.rule, way_out=error.way_out) from error
    for name, (_, held_out) in found.evals.items():
        by_task[f"eval task {name}".rstrip()] = list(held_out)
    if config.model.scratch is not None:
        _refuse_outside_alphabet(by_task, config.model.scratch.characters)
    if tokenizer is None:
        return
    if config.generator.is_harness or config.evaluates_agent:
        with _refusing(config, "the simplest chat"):
            tokenizer.render([{"role": "user", "content": "Hello"}])
    for name, prompts in by_task.items():
        is_eval = name.startswith("eval")
        if not (config.evaluates_agent if is_eval else config.generator.is_harness):
            found.notes += _check_lengths(name, prompts[:NUM_PROMPTS], tokenizer, config)


def _tokenizer(config: RunConfig) -> HFChatTokenizer | None:
    """Return None if a part is only on the hub."""
    model, template, settings = config.model, config.model.chat_template, config.model.chat_template_kwargs
    if template is not None:
        read_template(Path(template))
    if model.scratch is None:
        folder = find_on_disk(str(model.path), revision=model.revision)
        if folder is None:
            return None
        return HFChatTokenizer(folder, chat_template=template, chat_template_kwargs=settings)
    check_model_type(model.scratch.architecture.get("model_type"), "model.scratch.architecture")
    from asyncrl.trainer.random_init import make_character_tokenizer

    with tempfile.TemporaryDirectory(prefix="asyncrl-check-") as made:
        characters, has_tool_role = model.scratch.characters, model.scratch.has_tool_role
        make_character_tokenizer(characters, has_tool_role=has_tool_role).save_pretrained(made)
        return HFChatTokenizer(made, chat_template=template, chat_template_kwargs=settings)


@contextlib.contextmanager
def _refusing(config: RunConfig, what: str) -> Iterator[None]:
    template = config.model.chat_template
    source = "the model's template" if template is None else f"model.chat_template={template}"
    try:
        yield
    except ValueError as error:
        raise ConfigError(
            f"{source} cannot render {what}: {error}",
            way_out="correct the prompts or the template, or set model.chat_template to another one.",
        ) from error


def _refuse_beyond_positions(config: RunConfig, model_path: Path) -> None:
    if config.model.scratch is not None:
        model = config.model.scratch.architecture
    else:
        model = json.loads((model_path / "config.json").read_text(encoding="utf-8"))
        model = model.get("text_config", model)
    positions = model.get("max_position_embeddings")
    is_stretched = "factor" in (model.get("rope_scaling") or model.get("rope_parameters") or {})
    if positions is None or is_stretched or config.rollout.max_length <= positions:
        return
    raise ConfigError(
        f"rollout.max_prompt_tokens={config.rollout.max_prompt_tokens} and rollout.max_tokens="
        f"{config.rollout.max_tokens} allow {config.rollout.max_length} tokens",
        rule=f"the model has max_position_embeddings={positions}",
        way_out=f"lower one of them so that their sum is at most {positions}.",
    )


def _refuse_outside_alphabet(by_task: Mapping[str, Sequence[Prompt]], characters: str) -> None:
    for name, prompts in by_task.items():
        chats = (message["content"] for prompt in prompts for message in prompt.messages)
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
    """Return notes. Raises ConfigError if all prompts are too long."""
    limit = config.rollout.max_prompt_tokens
    with _refusing(config, f"a prompt of the {name}"):
        lengths = [len(tokenizer.encode_chat(prompt.messages)) for prompt in prompts]
    num_too_long = sum(length > limit for length in lengths)
    if not num_too_long:
        return []
    note = (
        f"{num_too_long} of the first {len(lengths)} prompts of the {name} are longer than "
        f"rollout.max_prompt_tokens={limit}; the longest has {max(lengths)} tokens"
    )
    if num_too_long == len(lengths):
        way_out = f"raise rollout.max_prompt_tokens to {max(lengths)} or more, or shorten the prompts."
        raise ConfigError(note, rule="prompts are never truncated; their rollouts fail", way_out=way_out)
    return [f"{note}: their rollouts fail"]


def check_teacher(config: RunConfig, tokenizer: HFChatTokenizer | None) -> list[str]:
    """Describe the teacher. Raises ConfigError for other tokens."""
    if config.teacher is None:
        return []
    path = config.teacher.path
    folder = find_on_disk(path, TEACHER_KEY, config.teacher.revision)
    if folder is None or tokenizer is None:
        return [f"teacher: {path} is compared with the model when the run starts"]
    _refuse_other_tokens(path, folder, tokenizer)
    return [f"teacher: {path} has the model's vocabulary"]


def find_teacher(config: RunConfig, tokenizer: HFChatTokenizer) -> Path | None:
    """Return the folder of the teacher's model. Raises ConfigError. Blocks."""
    if config.teacher is None:
        return None
    folder = find_model(config.teacher.path, config.teacher.revision, TEACHER_KEY)
    _refuse_other_tokens(config.teacher.path, folder, tokenizer)
    return folder


def _refuse_other_tokens(path: str, folder: Path, tokenizer: HFChatTokenizer) -> None:
    theirs = {number: token for token, number in read_vocabulary(folder).items()}
    ours = {number: token for token, number in tokenizer.vocabulary.items()}
    if theirs == ours:
        return
    first = min(number for number in {*theirs, *ours} if theirs.get(number) != ours.get(number))
    raise ConfigError(
        f"{TEACHER_KEY}={path} has {len(theirs)} tokens, the model {len(ours)}: id {first} is "
        f"{theirs.get(first)!r} in the teacher, {ours.get(first)!r} in the model",
        rule="the teacher scores the sampled token ids, so both vocabularies must be equal",
        way_out="use a teacher with the model's tokenizer, for example from the same family.",
    )


def _check_in_child(config: RunConfig) -> None:
    """Load the user code that the controller does not run. Raises ConfigError."""
    names = (config.algorithm.loss, config.algorithm.advantage)
    kind = kind_of(config.generator)
    is_code = any(":" in name for name in names) or (kind is not None and kind.checked_in == "child")
    if not is_code and config.trainer.lora is None:
        return
    if importlib.util.find_spec("torch") is None:
        raise ModuleNotFoundError("the trainer needs torch", name="torch")
    limit_s = config.supervision.start_timeout_s
    with tempfile.NamedTemporaryFile("w", encoding="utf-8", suffix=".yaml") as file:
        file.write(run_config_yaml(config))
        file.flush()
        code, text = asyncio.run(run_module("asyncrl.job.check", [file.name], limit_s))
    if code == FINE:
        return
    if (fatal := find_fatal(text)) is not None:
        raise ConfigError(fatal.error, rule=fatal.rule, way_out=fatal.way_out)
    ended = f"took longer than {limit_s:g} s" if code is None else f"ended with exit code {code}"
    raise ConfigError(
        f"loading loss, advantage, agent and layers of LoRA {ended}: {text[-1000:].strip()}",
        way_out="correct the modules: importing them must neither wait nor end the process.",
    )


def load_in_child(config: RunConfig) -> None:
    if ":" in config.algorithm.loss:
        load_loss(config.algorithm.loss)
    if ":" in config.algorithm.advantage:
        load_advantage(config.algorithm.advantage)
    kind = kind_of(config.generator)
    if kind is not None and kind.checked_in == "child":
        build_harness(config.generator, is_worker=False)
    model, lora = config.model, config.trainer.lora
    folder = None if model.path is None else find_on_disk(model.path, revision=model.revision)
    if lora is not None and (model.scratch is not None or folder is not None):
        _check_targets(model, folder, lora)


def _check_targets(model: ModelConfig, folder: Path | None, lora: LoraConfig) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from asyncrl.trainer.lora import find_targets
    from asyncrl.trainer.random_init import make_character_tokenizer, scratch_config

    if model.scratch is None:
        architecture = AutoConfig.from_pretrained(folder)
    else:
        tokenizer = make_character_tokenizer(model.scratch.characters)
        architecture = scratch_config(model.scratch.architecture, tokenizer)
    with torch.device("meta"):
        whole = AutoModelForCausalLM.from_config(architecture)
    find_targets(whole, lora)


def main() -> None:
    """Check a config file; exit without waiting for threads of user modules."""
    code = 1
    try:
        load_in_child(load_config(sys.argv[1]))
        code = FINE
    except ConfigError as error:
        with contextlib.suppress(SystemExit):
            fail(error.what, rule=error.rule, way_out=error.way_out)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    main()
