"""The embedded engine computes every family as plain transformers does, whoever else is in the batch."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_in_process import drawn, make_request, publish, running_engine, stage_file
from engine_replies import ask
from transformers import AutoConfig, AutoModelForCausalLM

HIDDEN, LAYERS = 48, 4
SIZES: dict[str, Any] = {"vocab_size": 61, "hidden_size": HIDDEN, "intermediate_size": 64, "head_dim": 16}
SIZES |= {"num_hidden_layers": LAYERS, "num_attention_heads": 4, "num_key_value_heads": 2}
SIZES |= {"max_position_embeddings": 512, "initializer_range": HIDDEN**-0.5}
SIZES |= {"eos_token_id": None, "bos_token_id": None, "pad_token_id": 0}

EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
DELTA = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8}
DELTA |= {"linear_value_head_dim": 8, "layer_types": ["linear_attention", "full_attention"] * 2}
MAMBA2 = {"mamba_n_heads": 6, "mamba_d_head": 16, "mamba_n_groups": 1, "mamba_d_state": 16}
MAMBA2 |= {"mamba_chunk_size": 16}
SLIDING = {"sliding_window": 24, "layer_types": ["sliding_attention", "full_attention"] * 2}
PER_LAYER = {"vocab_size_per_layer_input": 61, "hidden_size_per_layer_input": 16, "num_kv_shared_layers": 2}

FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3": {},
    "qwen3_moe": EXPERTS,
    "mistral": {"sliding_window": 24},
    "gemma2": SLIDING | {"attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 16},
    "gemma3_text": SLIDING | {"query_pre_attn_scalar": 16},
    "gemma3n_text": SLIDING | PER_LAYER | {"laurel_rank": 8, "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0]},
    "gemma4_text": SLIDING | PER_LAYER | {"global_head_dim": 32},
    "gpt_oss": SLIDING | EXPERTS,
    "olmo3": SLIDING,
    "cohere2": SLIDING,
    "exaone4": SLIDING,
    "llama4_text": {
        **{"attention_chunk_size": 24, "layer_types": ["chunked_attention", "full_attention"] * 2},
        **{"no_rope_layers": [1, 0] * 2, "floor_scale": 8, "attn_temperature_tuning": True},
        **{"num_local_experts": 2, "num_experts_per_tok": 1, "intermediate_size_mlp": 64},
    },
    "qwen3_next": EXPERTS | DELTA | {"shared_expert_intermediate_size": 32},
    "qwen3_5_text": DELTA,
    "olmo_hybrid": DELTA,
    "kimi_linear": EXPERTS | {"num_key_value_heads": 4, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 12, "linear_head_dim": 8, "linear_num_heads": 4,
        "layer_types": ["linear_attention", "full_attention"] * 2,
    },
    "nemotron_h": {
        **{"hybrid_override_pattern": "M*-E", "mamba_num_heads": 6, "mamba_head_dim": 16, "n_groups": 1},
        **{"ssm_state_size": 16, "chunk_size": 16},
    },
    "falcon_h1": {**MAMBA2, "mamba_d_ssm": 96},
    "granitemoehybrid": EXPERTS | MAMBA2 | {"layer_types": ["mamba", "attention"] * 2},
    "bamba": MAMBA2 | {"attn_layer_indices": [1, 3]},
    "mamba2": {"num_heads": 6, "head_dim": 16, "n_groups": 1, "state_size": 16, "chunk_size": 16},
    "mamba": {"state_size": 8},
    "falcon_mamba": {"state_size": 8},
    "jamba": EXPERTS | {"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 8},
    "zamba2": {"mamba_d_state": 16, "layers_block_type": ["mamba", "hybrid"] * 2, "chunk_size": 16},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "lfm2_moe": EXPERTS | {"layer_types": ["conv", "full_attention"] * 2, "num_dense_layers": 1},
    "recurrent_gemma": {"attention_window_size": 24},
    "minimax": EXPERTS | {"layer_types": ["linear_attention", "full_attention"] * 2, "block_size": 16},
}
