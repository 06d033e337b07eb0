"""Rotary embeddings whose frequencies depend on the longest position of a call.

LongRoPE (https://arxiv.org/abs/2402.13753) uses other factors above a border; dynamic
NTK scaling has other frequencies for each length above it. transformers takes the
length from the largest position of the call, so a sequence gets the frequencies of its
longest neighbor unless calls are made of one side of the border.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from asyncrl.base.errors import ConfigError

LENGTH_TYPES = ("longrope", "dynamic")


class LengthBorder(NamedTuple):
    """Frequencies change above `length` tokens. `is_stepwise`: all sequences above it
    share theirs.
    """

    rope_type: str
    length: int
    is_stepwise: bool


def length_border(config: PreTrainedConfig) -> LengthBorder | None:
    """Return the border of a model's rotary embedding, or None if it depends on
    positions only.
    """
    config = config.get_text_config()
    given = (
        getattr(config, "rope_parameters", None)
        or getattr(config, "rope_scaling", None)
        or {}
    )
    sets = [given, *(one for one in given.values() if isinstance(one, dict))]
    borders = list[LengthBorder]()
    for parameters in sets:
        rope_type = str(
            parameters.get("rope_type") or parameters.get("type") or "default"
        )
        if not any(name in rope_type for name in LENGTH_TYPES):
            continue
        longest = config.max_position_embeddings
        is_stepwise = "longrope" in rope_type
        if is_stepwise:
            key = "original_max_position_embeddings"
            longest = getattr(config, key, None) or parameters.get(key) or longest
        borders.append(LengthBorder(rope_type, int(longest), is_stepwise))
    # Up to the first border, all kinds of layers are independent of the length.
    return min(borders, key=lambda border: border.length, default=None)


def refuse_lengths(config: PreTrainedConfig, max_length: int) -> None:
    """Raise ConfigError if texts of at most `max_length` tokens are on both sides of
    the border.
    """
    border = length_border(config)
    if border is not None and max_length > border.length:
        raise ConfigError(
            f"rotary embeddings of type {border.rope_type} change above {border.length} tokens, and "
            f"max_length is {max_length}",
            rule="texts of all lengths share a call of the embedded engine, and so one rotary table",
            way_out=f"set rollout.max_prompt_tokens and rollout.max_tokens to {border.length} in sum, or "
            "rollout.engine=vllm.",
        )


def rotary_modules(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules whose frequencies depend on the length."""
    for module in model.modules():
        rope_type = getattr(module, "rope_type", None)
        kinds = rope_type.values() if isinstance(rope_type, dict) else [rope_type]
        if any(name in str(kind) for kind in kinds for name in LENGTH_TYPES):
            yield module


def forget_lengths(model: nn.Module) -> None:
    """Let each rotary module forget longer sequences of earlier calls, which change
    dynamic NTK's tables.
    """
    for module in rotary_modules(model):
        # transformers resets its cached frequencies in a call that is short again. This
        # is the shortest one: one token at position 0.
        x = torch.empty(0, device=next(module.buffers()).device)
        position_11 = torch.zeros((1, 1), dtype=torch.int64, device=x.device)
        kinds = list(module.rope_type) if isinstance(module.rope_type, dict) else [None]
        for kind in kinds:
            module(x, position_11, **({} if kind is None else {"layer_type": kind}))


def pin_length(model: nn.Module, length: int) -> None:
    """Give every call the frequencies of a text of `length` tokens, as vLLM does for
    its max_model_len.

    Each call sees one more position, length - 1, whose angles are dropped.
    """
    for module in rotary_modules(model):
        module.forward = partial(_pinned, module.forward, length)


def _pinned(
    forward: Callable[..., tuple[Tensor, ...]],
    length: int,
    x: Tensor,
    position_ids: Tensor,
    *args: object,
    **options: object,
) -> tuple[Tensor, ...]:
    # transformers takes the length from the largest position, so one more is enough.
    last = torch.full_like(position_ids[..., :1], length - 1)
    tables = forward(x, torch.cat([position_ids, last], dim=-1), *args, **options)
    return tuple(table[..., :-1, :] for table in tables)
