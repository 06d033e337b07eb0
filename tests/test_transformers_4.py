"""transformers 4 reads exports and scratch models as transformers 5 does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import read_models
import torch
from job_runs import ROOT
from tiny_model import make_tiny_model
from transformers import AutoConfig, AutoModelForCausalLM

from asyncrl.config import load_config
from asyncrl.models.loading import load_language_model
from asyncrl.trainer.model.random_init import ScratchSpec, make_scratch_model
from asyncrl.trainer.ranks.state import save_folder
from asyncrl.weights.export import named_weights, whole_tensors

VARIABLE = "ASYNCRL_TRANSFORMERS_4"
"""A folder of `pip install --target` with transformers 4 (CONTRIBUTING.md)."""
YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
}
TABLES = {
    "full_attention": {"rope_type": "linear", "rope_theta": 5e5, "factor": 4.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 2e3},
}
MODELS: dict[str, dict[str, Any]] = {
    f"{kind}-{tied}": {"model_type": kind, "tie_word_embeddings": tied == "tied"}
    for kind in ("llama", "qwen3", "gemma3_text")
    for tied in ("tied", "untied")
}
MODELS |= {
    "llama-theta": {"model_type": "llama", "rope_theta": 5e5},
    "qwen3-yarn": {"rope_parameters": YARN},
    "gemma3-tables": {
        "model_type": "gemma3_text",
        "num_hidden_layers": 6,
        "sliding_window": 8,
        "rope_parameters": TABLES,
    },
    "qwen3_moe": {
        "model_type": "qwen3_moe",
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
    },
    "mixtral": {
        "model_type": "mixtral",
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
    },
}


def make_opt(folder: Path, *, is_tied: bool) -> Path:
    config = AutoConfig.for_model(
        "opt",
        vocab_size=52,
        hidden_size=32,
        word_embed_proj_dim=32,
        ffn_dim=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=128,
        tie_word_embeddings=is_tied,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def exported(base: Path) -> Path:
    """Write a folder like `base` with other weights."""
    model = load_language_model(base, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    out = base.with_name(f"{base.name}-exported")
    weights = dict(whole_tensors(named_weights(model), torch.float32))
    save_folder(model, weights, base, out, dtype=torch.float32, template=None)
    return out


def test_transformers_4_reads_what_5_reads(tmp_path: Path) -> None:
    site = os.environ.get(VARIABLE)
    if site is None:
        pytest.skip(f"{VARIABLE} names no folder with transformers 4")
    torch.manual_seed(0)
    bases = [
        make_tiny_model(tmp_path / name, **architecture)
        for name, architecture in MODELS.items()
    ]
    quickstart = tmp_path / "quickstart"
    scratch = load_config(ROOT / "configs/quickstart.yaml").model.scratch
    assert scratch is not None
    make_scratch_model(ScratchSpec(out=quickstart, seed=0, scratch=scratch))
    scratch_models = [*bases, quickstart]
    opts = [
        make_opt(tmp_path / f"opt-{is_tied}", is_tied=is_tied)
        for is_tied in (True, False)
    ]
    folders = [*scratch_models, *map(exported, [*scratch_models, *opts])]
    expected = read_models.read(folders)
    child = subprocess.run(
        [sys.executable, read_models.__file__, *map(str, folders)],
        env={**os.environ, "PYTHONPATH": site},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert child.returncode == 0, child.stderr
    found = json.loads(child.stdout.splitlines()[-1])
    assert (expected.pop("version")[0], found.pop("version")[0]) == ("5", "4")
    assert found.keys() == expected.keys()
    for name, ours in expected.items():
        theirs = found[name]
        assert theirs["texts"] == ours["texts"], name
        distance = np.abs(np.array(theirs["logits"]) - ours["logits"]).max()
        assert distance <= 1e-5, name
