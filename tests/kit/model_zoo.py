"""Tiny random models of every causal type that transformers knows: configs from
model_zoo.toml.
"""

from __future__ import annotations

import dataclasses
import tomllib
from pathlib import Path
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM

ZOO = tomllib.loads(
    (Path(__file__).parent / "model_zoo.toml").read_text(encoding="utf-8")
)
TYPES: tuple[str, ...] = (*ZOO["types"], *ZOO["variants"], *ZOO["composites"])
"""Names like "qwen3" and "qwen3 yarn", a variant."""
FIRST_ID, VOCAB = 3, ZOO["tiny"]["vocab_size"]
"""Special tokens have the ids below the first."""
VECTORS = ("A_log", "dt_bias", "time_", "layer_scalar")
"""Parameters that keep their size, and change a little."""


def make_config(name: str, size: str = "types") -> Any:
    """Return the tiny config of a type or a variant. `size` vllm: vLLM has
    kernels for these sizes on a CPU.
    """
    if name in ZOO["composites"]:
        parts = dict(ZOO["composites"][name])
        text = make_config(parts.pop("text"), size)
        return AutoConfig.for_model(name, text_config=text.to_dict(), **parts)
    model_type = name.partition(" ")[0]
    kind = CONFIG_MAPPING[model_type]
    renamed = kind.attribute_map
    own = {
        *renamed,
        *renamed.values(),
        *(field.name for field in dataclasses.fields(kind)),
    }
    served = ZOO["vllm"] if size == "vllm" else {}
    sizes = ZOO["tiny"] | served.get("tiny", {})
    tiny = {key: value for key, value in sizes.items() if key in own}
    given = tiny | ZOO["types"][model_type] | ZOO["variants"].get(name, {})
    given |= served.get(model_type, {}) | served.get(name, {})
    values = {
        renamed.get(key, key): None if value == "none" else value
        for key, value in given.items()
    }
    return AutoConfig.for_model(model_type, **values)


@torch.no_grad()
def random_model(config: Any, seed: int = 0) -> Any:
    """Return a float32 model whose norms, biases, gates and sinks are not trivial, in
    eval mode.
    """
    with torch.random.fork_rng([]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(
            config, dtype=torch.float32, attn_implementation="eager"
        )
        redraw(model)
    return model.eval()


@torch.no_grad()
def redraw(model: Any) -> None:
    """Draw other weights for a model."""
    hidden_size = model.config.get_text_config().hidden_size
    for name, parameter in model.named_parameters():
        noise = torch.randn_like(parameter)
        is_vector = parameter.numel() == max(parameter.shape, default=1)
        if is_vector or any(part in name for part in VECTORS):
            parameter.add_(0.2 * noise)
        elif parameter.shape[-1] < 8:  # a convolution's kernel
            parameter.copy_(0.5 * noise)
        else:
            parameter.copy_(noise * hidden_size**-0.5)
    for name, buffer in model.named_buffers():
        if name.endswith("bias") and buffer.is_floating_point():  # others are masks
            buffer.add_(0.1 * torch.randn_like(buffer))
