"""Rows of docs/models.csv: how models of each type are trained and served, as tests
measure it. Imports no torch.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping
from importlib.resources import files
from typing import Any

CELLS = ("trainer", "embedded engine", "vllm on a CPU")
STATE_LAYERS = {"linear_attention", "mamba", "conv", "hybrid", "hybrid_sliding"}
"""Names in `layer_types` of layers that carry a state from token to token."""
STATE_SIZES = (
    "mamba_d_state",
    "ssm_state_size",
    "state_size",
    "conv_L_cache",
    "linear_num_value_heads",
    "lru_width",
)
"""Keys of architectures with such layers that may have no `layer_types`."""
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


def find_support(model_type: str) -> list[dict[str, str]]:
    """Return the rows of a type and of its variants; none if it is not tested."""
    text = (files("asyncrl.models") / "support.csv").read_text(encoding="utf-8")
    return [
        row for row in csv.DictReader(text.splitlines()) if row["type"] == model_type
    ]


def support_lines(rows: list[dict[str, str]]) -> list[str]:
    """Return a line for the type, and a line for each variant with other cells."""
    names = dict[str, str]()
    for row in rows:
        text = ", ".join(f"{cell}: {row[cell]}" for cell in CELLS)
        names.setdefault(text, f"{row['type']} {row['variant']}".rstrip())
    return [f"model: {name}: {text}" for text, name in names.items()]


def has_experts(architecture: Mapping[str, Any]) -> bool:
    """Return whether routers send tokens to experts."""
    parts = (architecture, architecture.get("ffn_config") or {})  # the latter of DBRX
    is_off = architecture.get("enable_moe_block") is False  # in Gemma 4
    return not is_off and any(part.get(name) for part in parts for name in EXPERTS)


def has_states(architecture: Mapping[str, Any]) -> bool:
    """Return whether some layers carry a state from token to token, as Mamba's do."""
    if kinds := architecture.get("layer_types"):
        return not STATE_LAYERS.isdisjoint(kinds)
    return any(architecture.get(name) for name in STATE_SIZES)
