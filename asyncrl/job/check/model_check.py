"""Check the model and the models of other roles: support, tokenizer, lengths, and builds
without weights.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from asyncrl.agents.endpoint.tool_formats import find_tool_format
from asyncrl.base.errors import ConfigError
from asyncrl.config import ModelConfig, RolloutConfig, RunConfig
from asyncrl.job.check.found import Found
from asyncrl.job.roles import extra_models, extra_servers
from asyncrl.launch.model_sizes import (
    find_architecture,
    read_architecture,
    read_text_architecture,
)
from asyncrl.models.support import find_support, support_lines
from asyncrl.rollouts.tokenizer import HFChatTokenizer, read_template, read_vocabulary
from asyncrl.trainer.model.model_folder import (
    check_model_type,
    check_plain,
    find_model,
    find_on_disk,
)


def check_architecture(config: RunConfig) -> Iterator[str]:
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


def later_prompts(config: RunConfig, tokenizer: HFChatTokenizer) -> Iterator[str]:
    """Yield how the template changes earlier answers. Raises ConfigError if there is no
    such tool format.
    """
    tool_format = find_tool_format(config.gateway.tool_format, tokenizer.template)
    if changed := tokenizer.changed_answer(tool_format.thinking):
        sampled, written = changed
        effect = "and later prompts are its own"
        if config.gateway.thoughts == "keep":
            effect = "but later prompts keep the sampled tokens"
        yield (
            f"conversations: the template writes the earlier answer {sampled!r} as {written!r}, "
            f"{effect} (gateway.thoughts={config.gateway.thoughts})"
        )


def check_support(config: RunConfig, found: Found) -> None:
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
        if own is not None and server.engine == "embedded" and not server.url:
            section = own.key.rpartition(".")[0]
            yield f"{section}.engine", own.model, server.max_length


def try_engines(config: RunConfig, found: Found) -> None:
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


def check_tokenizer(
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
            there = find_on_disk(str(model.path), needs_weights=needs_weights)
            if there is None or not (needs_weights or any(there.glob("tokenizer*"))):
                text = "has no tokenizer here; not checked: its files, the template, and lengths of prompts"
                found.lines.append(f"model: {model.path} {text}")
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


def find_models(
    config: RunConfig,
    tokenizer: HFChatTokenizer,
    find: Callable[..., Path | None] = find_model,
) -> dict[str, Path]:
    """Return the model folders of roles that load another model. Raises ConfigError
    if such a model reads token ids, and has other ids than the trained model. Blocks.
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
