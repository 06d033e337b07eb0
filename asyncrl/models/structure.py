"""Which modules of a model let tokens see each other, found without regard to the size
of its weights.

One token is poisoned with NaN, which no weight, decay or multiplier makes smaller, and
attention is replaced by a function that lets no token see another. A part of a layer
whose output has NaN at other tokens mixes tokens by itself: a recurrence, a
convolution, or attention that does not use transformers' interface.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only
from transformers import AttentionInterface, PreTrainedModel

from asyncrl.models.attention_kinds import AttentionKind, UnknownAttentionError, kind_of

NUM_TOKENS, POISONED = 23, 9
"""A length that no width of a model has, and the place of the token with NaN."""
ALONE = "asyncrl_alone"
T = TypeVar("T")
MODEL_ERRORS = (TypeError, AttributeError, LookupError, ValueError, RuntimeError)
"""What the code of a model raises if it cannot run as requested."""


class Structure(NamedTuple):
    """`mixers`: names of the modules that mix tokens by themselves; `kinds`: all kinds
    of attention.
    """

    mixers: tuple[str, ...]
    kinds: frozenset[AttentionKind]


def _attend_alone(
    kinds: set[AttentionKind],
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Let each token see only itself, and add the kind that is asked for to `kinds`."""
    kind = kind_of(module, attention_mask, options)
    if query.shape[2] != key.shape[2] or key.shape[:3] != value.shape[:3]:
        shapes = f"query {[*query.shape]}, key {[*key.shape]}, value {[*value.shape]}"
        raise UnknownAttentionError(f"its attention reads {shapes}")
    kinds.add(kind)
    # Grouped queries: several query heads share a head of keys and values.
    value = value.repeat_interleave(query.shape[1] // value.shape[1], dim=1)
    return value.transpose(1, 2).contiguous(), None


def backbone_of(model: PreTrainedModel) -> PreTrainedModel:
    """Return the model without its head. Llama 4's base_model is the whole model."""
    base = model.base_model
    return model.model if base is model else base


@torch.no_grad()
def find_structure(model: PreTrainedModel) -> Structure:
    """Run a model on one text with a poisoned token. Raises UnknownAttentionError."""
    kinds = set[AttentionKind]()
    # transformers builds no mask for a name that has no mask function.
    AttentionInterface.register(ALONE, partial(_attend_alone, kinds))
    before = model.config._attn_implementation
    device = next(model.parameters()).device
    position_1T = torch.arange(NUM_TOKENS, device=device)[None]
    # Small test models have fewer ids than tokens here.
    ids_1T = position_1T % model.get_input_embeddings().num_embeddings
    found = list[str]()
    parts = {model.get_input_embeddings(): "its embedding", **parts_of_layers(model)}
    with hooked(parts, partial(_see, found)):
        try:
            model.set_attn_implementation(ALONE)
            output = backbone_of(model)(
                input_ids=ids_1T, position_ids=position_1T, use_cache=False
            )
        except MODEL_ERRORS as error:
            reason = f"it does not run without attention masks ({type(error).__name__}: {error})"
            raise UnknownAttentionError(reason) from error
        finally:
            model.set_attn_implementation(before)
    _see(found, "the model", model, (), output.last_hidden_state)
    if outside := [name for name in found if name not in dict(model.named_modules())]:
        raise UnknownAttentionError(
            f"tokens see each other outside of its layers, in {outside[0]}"
        )
    return Structure(tuple(found), frozenset(kinds))


def outermost(model: nn.Module, classes: type[T] | tuple[type[T], ...]) -> dict[str, T]:
    """Return the modules of these classes that are not inside of another one, by name.
    One of the module lists holds the layers.
    """
    found = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, classes)
    }
    return {
        name: module
        for name, module in found.items()
        if not any(name.startswith(f"{other}.") for other in found)
    }


def parts_of_layers(model: PreTrainedModel) -> dict[nn.Module, str]:
    """Return the names of the layers and of the parts of each layer, the parts first."""
    parts = dict[nn.Module, str]()
    for list_name, layers in outermost(model, nn.ModuleList).items():
        for number, layer in layers.named_children():
            name = f"{list_name}.{number}"
            parts |= {
                part: f"{name}.{own}"
                for own, part in layer.named_children()
                if part not in parts
            }
            parts[layer] = name
    return parts


@contextmanager
def hooked(
    parts: Mapping[nn.Module, str], hook: Callable[..., object]
) -> Iterator[None]:
    """Call hook(name, module, inputs, output) after each of the modules; a result
    replaces the output.
    """
    handles = [
        module.register_forward_hook(partial(hook, name))
        for module, name in parts.items()
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _see(
    found: list[str], name: str, module: nn.Module, inputs: object, output: T
) -> T:
    """Note a module that spreads the poison, and leave the poison at its one token."""

    def cleaned(tensor: Tensor) -> Tensor:
        spread_T = tensor[0].isnan().flatten(1).any(dim=1)
        # Cleaned, so that only the module that spreads the poison is found and not all
        # that follow it. Put back, because a module may swallow NaN, for example in a
        # maximum, and those after it would pass untested.
        spread_T[POISONED] = False
        if spread_T.any() and name not in found:
            found.append(name)
        tensor = torch.where(
            spread_T.view(1, -1, *[1] * (tensor.ndim - 2)), 0.0, tensor
        )
        tensor[:, POISONED] = torch.nan
        return tensor

    return map_rows(cleaned, output, NUM_TOKENS)


def map_rows(change: Callable[[Tensor], Tensor], value: T, num_tokens: int) -> T:
    """Apply `change` to the tensors [1, num_tokens, width] of a value."""

    def changed(tensor: Tensor) -> Tensor:
        is_row = tensor.ndim >= 3 and tensor.shape[:2] == (1, num_tokens)
        return change(tensor) if is_row and tensor.is_floating_point() else tensor

    mapped: T = tree_map_only(Tensor, changed, value)
    return mapped
