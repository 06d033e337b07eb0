"""How much memory a KV cache takes, from a model's config file alone. Imports no vLLM."""

from __future__ import annotations

import json
from pathlib import Path

_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_BLOCK_TOKENS = 128
"""vLLM's block on CPU; a sequence takes whole blocks."""
MIN_BYTES = 2**26


def kv_cache_bytes(folder: Path, dtype: str, slots: int, max_length: int) -> int:
    """Memory in which all slots hold sequences of full length, one block over; MIN_BYTES where the config file does not tell."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        config = config.get("text_config", config)
        heads = config["num_attention_heads"]
        head_dim = config.get("head_dim") or config["hidden_size"] // heads
        token_bytes = 2 * config["num_hidden_layers"] * (config.get("num_key_value_heads") or heads) * head_dim * _BYTES[dtype]
    except (OSError, ValueError, KeyError, TypeError):
        return MIN_BYTES
    blocks = slots * -(-max_length // _BLOCK_TOKENS) + 1
    return max(MIN_BYTES, int(blocks * _BLOCK_TOKENS * token_bytes))
