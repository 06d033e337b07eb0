"""A tiny Qwen3 with a character-level tokenizer, for every test that needs a real
model. Seconds to make, 20 k parameters.
"""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from asyncrl.config.model_config import ScratchConfig
from asyncrl.trainer.model.random_init import ScratchSpec, make_scratch_model

TINY_CHARACTERS = "abcdefghijklmnopqrstuvwxyz0123456789 .,:+-*=?\n"

SHAPE = {
    "model_type": "qwen3",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
}
TINY_ARCHITECTURE = SHAPE | {"initializer_range": 0.2}


def make_tiny_model(folder: Path, *, seed: int = 0, **architecture: object) -> Path:
    """Write the tiny model to `folder` (must not exist); `architecture` overrides keys
    of TINY_ARCHITECTURE.
    """
    scratch = ScratchConfig(
        architecture={**TINY_ARCHITECTURE, **architecture}, characters=TINY_CHARACTERS
    )
    make_scratch_model(ScratchSpec(out=folder, seed=seed, scratch=scratch))
    return folder


MOE: dict[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
}

DEEPSEEK: dict[str, Any] = {
    "n_routed_experts": 4,
    "n_group": 2,
    "topk_group": 1,
    "num_experts_per_tok": 2,
}
DEEPSEEK |= {
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 8,
    "num_key_value_heads": 4,
}
STACKED = {
    "qwen3_moe": MOE,
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "deepseek_v3": DEEPSEEK | {"moe_intermediate_size": 16, "first_k_dense_replace": 1},
}
"""Models whose experts transformers stacks at load; Mixtral's it also renames."""


def make_tiny_moe(
    folder: Path, model_type: str = "qwen3_moe", seed: int = 0, **architecture: Any
) -> Path:
    """The tiny model with experts, which transformers stacks at load; `architecture`
    instead of MOE.
    """
    make_tiny_model(folder)
    shape = {
        key: value
        for key, value in TINY_ARCHITECTURE.items()
        if key not in ("model_type", "head_dim")
    }
    torch.manual_seed(seed)
    config = AutoConfig.for_model(
        model_type, **{**shape, "vocab_size": 52, **(architecture or MOE)}
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder
