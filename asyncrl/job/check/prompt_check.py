"""Check the first prompts: their lengths and characters, and how the template writes
them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from asyncrl.base.errors import ConfigError
from asyncrl.config import RunConfig
from asyncrl.job.check.found import Found
from asyncrl.launch.model_sizes import read_text_architecture
from asyncrl.messages.records import Prompt
from asyncrl.rollouts.tokenizer import HFChatTokenizer, is_written
from asyncrl.tasks.sources import make_prompt_source

NUM_PROMPTS = 100


def _called(kind: str, name: str) -> str:
    return f"{kind} {name}".rstrip()


def check_prompts(
    config: RunConfig, found: Found, tokenizer: HFChatTokenizer | None
) -> None:
    by_task = dict[str, list[Prompt]]()
    agents = {
        _called(kind, name)
        for kind, generators in (
            ("task", config.generators),
            ("eval task", config.eval_generators),
        )
        for name, generator in generators.items()
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
