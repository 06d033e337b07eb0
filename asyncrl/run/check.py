"""What can be known of a config before a process of the run starts: everything that can be loaded without a
model's weights.

`asyncrl check` prints what is found, and a run looks first thing. Each check calls what the run itself calls.
Code of the user's that the controller does not run (losses, advantages, agents) and torch are left to a
short-lived process (user_code.py).
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from asyncrl.agents.command import CommandHarness
from asyncrl.agents.endpoint.tool_calls import find_tool_format
from asyncrl.agents.verifiers import taskset_loader
from asyncrl.algorithms.registry import resolve
from asyncrl.config import ModelConfig, RunConfig, run_config_yaml
from asyncrl.errors import ConfigError, TaskError
from asyncrl.messages.base import SECRET_ENV, find_fatal
from asyncrl.messages.records import Prompt
from asyncrl.rollouts.tokenizer import HFChatTokenizer, read_template
from asyncrl.run.check_user_code import CONFIG, FINE
from asyncrl.run.model_folder import check_model_type, find_on_disk, is_hub_id
from asyncrl.run.start import START_TIMEOUT_S
from asyncrl.tasks.feed import Feed
from asyncrl.tasks.from_config import EvalTask, look_at_eval_task, look_at_task, task_name
from asyncrl.tasks.task import Task
from asyncrl.trainer.model.scratch import make_character_tokenizer

NUM_PROMPTS = 100
"""So many prompts are tokenized, the first ones."""


SIMULATED = (
    "rollout.engine=simulated: tokens are drawn at random, so the rewards and the trained weights mean "
    "nothing, and there is no logprob "
    "gap to measure"
)


@dataclass(frozen=True, slots=True, eq=False)
class Found:
    """`lines`: what was looked at, for people. `notes`: what the person who starts a run has to know. `task`
    and `eval_task` are handed on to the run, None where only its start may read them.
    """

    lines: tuple[str, ...]
    notes: tuple[str, ...]
    task: Task | None
    eval_task: EvalTask | None


def look(config: RunConfig) -> Found:
    """Load everything but weights. Raises ConfigError with the first that cannot be had."""
    resolve(config.algorithm)
    task, words = look_at_task(config.task, config.seed, load_taskset=taskset_loader(config.generator))
    lines, notes = [f"task: {words}"], [SIMULATED] if config.rollout.engine == "simulated" else []
    eval_task = None
    if config.eval is not None:
        eval_task, words = look_at_eval_task(config.eval)
        lines.append(f"eval task: {words}")
    prompts = () if task is None else _first_prompts(config, task)
    eval_prompts = () if eval_task is None else eval_task[1][:NUM_PROMPTS]
    if config.model.scratch is not None:
        check_model_type(config.model.scratch.architecture.get("model_type"), "model.scratch.architecture")
    tokenizer = _tokenizer(config)
    if tokenizer is None:
        lines.append(
            f"model: {config.model.path} is fetched from the hub when the run starts; not looked at: that "
            f"needs the network"
        )
    else:  # harnesses make prompts of their own
        if config.generator.is_harness or config.evaluates_agent:
            _try_template(tokenizer, config.model)
        limit = config.rollout.max_prompt_tokens
        notes += [] if config.generator.is_harness else _too_long(prompts, tokenizer, limit, "task")
        notes += [] if config.evaluates_agent else _too_long(eval_prompts, tokenizer, limit, "eval task")
    if tokenizer is not None or ":" in config.gateway.tool_format:
        find_tool_format(config.gateway.tool_format, tokenizer.template if tokenizer is not None else "")
    if config.generator.command is not None:
        generator = config.generator
        CommandHarness(
            config.generator.command, generator.env, generator.max_output_bytes, pass_env=generator.pass_env
        )
    _ask_user_code(config)
    return Found(tuple(lines), tuple(notes), task, eval_task)


def _tokenizer(config: RunConfig) -> HFChatTokenizer | None:
    """That of the run, None while it, or a part of it, is on the hub alone."""
    model, template = config.model, config.model.chat_template
    if template is not None:
        read_template(Path(template))
    if model.scratch is None:
        if (folder := find_on_disk(model)) is None:
            return None
        try:
            return HFChatTokenizer(folder, chat_template=template)
        except ConfigError:
            if is_hub_id(
                model
            ):  # the hub's cache, and not all of it is there: the start of the run fetches the rest
                return None
            raise
    with tempfile.TemporaryDirectory(prefix="asyncrl-check-") as made:
        try:
            make_character_tokenizer(
                model.scratch.characters, has_tool_role=model.scratch.has_tool_role
            ).save_pretrained(made)
        except ValueError as error:
            raise ConfigError(str(error), way_out="correct model.scratch.characters.") from error
        return HFChatTokenizer(made, chat_template=template)


def _first_prompts(config: RunConfig, task: Task) -> Sequence[Prompt]:
    """Those that the run begins with. Raises ConfigError if one cannot be made."""
    feed = Feed(
        task,
        seed=config.seed,
        shuffle=config.task.shuffle,
        system_prompt=config.task.system_prompt,
        name=task_name(config.task),
    )
    try:
        return [feed.next_nowait() for _ in range(min(NUM_PROMPTS, len(task)))]
    except TaskError as error:
        raise ConfigError(error.fault, rule=error.rule, way_out=error.way_out) from error


def _try_template(tokenizer: HFChatTokenizer, model: ModelConfig) -> None:
    """Raise ConfigError if the chat template cannot write the simplest chat: what a harness asks is not known
    before it asks.
    """
    try:
        tokenizer.render([{"role": "user", "content": "Hello"}])
    except ValueError as error:
        whose = (
            f"model.chat_template={model.chat_template}"
            if model.chat_template is not None
            else "the model's own"
        )
        raise ConfigError(
            f"{error} ({whose}; the messages: one of the user)",
            rule="what a harness asks goes through the chat template",
            way_out="correct the template, or set model.chat_template to another one.",
        ) from error


def _too_long(prompts: Sequence[Prompt], tokenizer: HFChatTokenizer, limit: int, name: str) -> list[str]:
    """In words, how many are, if any. Raises ConfigError if all are, or if the chat template refuses one."""
    if not prompts:
        return []
    try:
        lengths = [len(tokenizer.encode_chat(prompt.messages)) for prompt in prompts]
    except ValueError as error:
        raise ConfigError(
            f"a prompt of the {name} cannot be written as a chat: {error}",
            rule="each prompt goes through the chat template",
            way_out="correct the prompts, or model.chat_template.",
        ) from error
    num_too_long = sum(length > limit for length in lengths)
    if num_too_long == len(lengths):
        shortest, longest = min(lengths), max(lengths)
        span = str(longest) if shortest == longest else f"{shortest} to {longest}"
        which = f"all of the first {len(lengths)} prompts of the {name} are"
        if len(lengths) == 1:
            which = f"the first prompt of the {name} is"
        raise ConfigError(
            f"{which} longer than rollout.max_prompt_tokens={limit}: {span} tokens",
            rule="a prompt is never cut: one that is too long is a failed rollout",
            way_out=f"raise rollout.max_prompt_tokens to {max(lengths)} or more, or shorten the prompts.",
        )
    if not num_too_long:
        return []
    return [
        f"{num_too_long} of the first {len(lengths)} prompts of the {name} are longer than "
        f"rollout.max_prompt_tokens={limit} "
        f"(the longest has {max(lengths)} tokens): each is a failed rollout"
    ]


def _ask_user_code(config: RunConfig) -> None:
    """Raise the ConfigError that a process of its own finds, if there is something for it to load."""
    names = (config.algorithm.loss, config.algorithm.advantage)
    is_own = any(":" in name for name in names) or config.generator.python is not None
    if not is_own and config.trainer.lora is None:
        return
    if config.model.path is not None and (folder := find_on_disk(config.model)) is not None:
        config = config.model_copy(update={"model": config.model.model_copy(update={"path": str(folder)})})
    environment = {name: value for name, value in os.environ.items() if name != SECRET_ENV}
    command = [sys.executable, "-m", "asyncrl.run.check_user_code"]
    with (
        tempfile.TemporaryFile() as output,
        subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=output, stderr=subprocess.STDOUT, env=environment
        ) as process,
    ):
        assert process.stdin is not None
        try:
            with contextlib.suppress(BrokenPipeError):  # it died already: its exit code says so
                process.stdin.write(json.dumps({CONFIG: run_config_yaml(config)}).encode() + b"\n")
                # and stays open: its end would tell the child that nobody waits any more
                process.stdin.flush()
            code = process.wait(START_TIMEOUT_S)
        except subprocess.TimeoutExpired as error:
            raise ConfigError(
                f"loading the loss, the advantage or the agent took longer than {START_TIMEOUT_S:g} s",
                way_out="find what their modules wait for when they are imported.",
            ) from error
        finally:
            process.kill()
        output.seek(0)
        text = output.read().decode(errors="replace")
    if code == FINE:
        return
    if (fatal := find_fatal(text)) is not None:
        raise ConfigError(fatal.error, rule=fatal.rule, way_out=fatal.way_out)
    raise ConfigError(
        f"the process that loads the loss, the advantage or the agent ended with exit code {code}: "
        f"{text[-1000:].strip() or '(no output)'}",
        rule="their modules can be imported without ending the process",
        way_out="correct what they do when they are imported.",
    )
