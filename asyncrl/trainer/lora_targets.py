"""Which layers of a model get an adapter. Asks for names and kinds of modules alone, so a model without weights (on `meta`) will do."""

from __future__ import annotations

from typing import Any

from torch import nn

from asyncrl.config import LoraConfig
from asyncrl.errors import ConfigError


def find_targets(model: Any, config: LoraConfig) -> list[str]:
    """Full names of the layers that get an adapter. Raises ConfigError with what the model has."""
    head = model.get_output_embeddings()
    linear = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear) and module is not head}
    if config.targets == "all-linear":
        found = list(linear)
    else:
        found = [name for target in config.targets for name in _named(model, target, linear, head)]
    if not found:
        raise ConfigError(
            f"trainer.lora.targets={config.targets} names no layer of {type(model).__name__}; its linear layers are {_kinds(linear)}",
            rule="an adapter sits on a linear layer other than the head",
            way_out="name some of them, or set trainer.lora to none to train all weights.",
        )
    chosen = [name for name in linear if name in set(found)]
    shared = _shared_weights(model)
    if tied := [name for name in chosen if f"{name}.weight" in shared]:
        raise ConfigError(
            f"trainer.lora: {tied[0]}.weight is shared with another layer ({len(tied)} such targets)",
            rule="a merged adapter would change the other layer too",
            way_out="leave these layers out of trainer.lora.targets.",
        )
    return chosen


def _named(model: Any, target: str, linear: dict[str, nn.Linear], head: nn.Module | None) -> list[str]:
    """Names of the linear layers that are `target` or end in it. Raises ConfigError if there are none, or others too."""
    matches = {name: module for name, module in model.named_modules() if name == target or name.endswith(f".{target}")}
    if any(module is head for module in matches.values()):
        raise ConfigError(
            f"trainer.lora.targets names {target}, the output head of {type(model).__name__}",
            rule="the head carries no adapter: it is often tied to the embedding, and applied to few tokens at a time",
            way_out=f"take {target} out of trainer.lora.targets; its linear layers are {_kinds(linear)}.",
        )
    if wrong := [name for name in matches if name not in linear]:
        raise ConfigError(
            f"trainer.lora.targets names {target}, and {wrong[0]} is a {type(matches[wrong[0]]).__name__}",
            rule="an adapter sits on a torch.nn.Linear",
            way_out=f"name other layers in trainer.lora.targets; the linear ones are {_kinds(linear)}.",
        )
    if not matches:
        raise ConfigError(
            f"trainer.lora.targets names {target}, and {type(model).__name__} has no such layer",
            rule="a target is the name of a module, or its end",
            way_out=f"correct trainer.lora.targets; the linear layers are {_kinds(linear)}.",
        )
    return list(matches)


def _kinds(linear: dict[str, nn.Linear]) -> list[str]:
    """Last parts of the names, each once."""
    return list(dict.fromkeys(name.rpartition(".")[2] for name in linear))


def _shared_weights(model: Any) -> set[str]:
    """Names of the parameters that the model has under more than one name."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return {name for group in names.values() if len(group) > 1 for name in group}
