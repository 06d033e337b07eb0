"""The size of a model from its config.json, against the model itself."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from asyncrl.config import ModelConfig
from asyncrl.launch.model_shape import KNOWN_MODELS, SIZES, model_shape

ROOT = Path(__file__).parents[1]
SMALL: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 160, "num_attention_heads": 8}
SMALL |= {"num_key_value_heads": 2, "head_dim": 16, "vocab_size": 100, "num_hidden_layers": 4}
SMALL |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
SPARSE = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48}


def parameters_of(**architecture: Any) -> int:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**architecture))
    model.tie_weights()
    return model.num_parameters()


@pytest.mark.parametrize(
    ("model_type", "more", "active"),
    [
        ("qwen3", {}, 160),
        ("llama", {"tie_word_embeddings": True}, 160),
        ("qwen3_moe", SPARSE, 96),
        ("qwen2_moe", {**SPARSE, "shared_expert_intermediate_size": 96}, 192),
        ("mixtral", {"num_local_experts": 8}, 320),
    ],
)
def test_config_json_gives_the_number_of_parameters(
    model_type: str, more: dict[str, Any], active: int, tmp_path: Path
) -> None:
    architecture = {**SMALL, "num_experts_per_tok": 2, "model_type": model_type, **more}
    (tmp_path / "config.json").write_text(json.dumps(architecture))
    shape = model_shape(ModelConfig(path=str(tmp_path)))
    assert shape.num_parameters == pytest.approx(parameters_of(**architecture), rel=0.02)
    assert (shape.active, shape.cached, shape.has_experts) == (active, 64, active != 160)


@pytest.mark.parametrize("name", KNOWN_MODELS)
def test_known_model_has_the_parameters_of_its_architecture(name: str) -> None:
    kinds = {"Qwen2": "qwen2", "Qwen3": "qwen3"}
    kind = next((kind for part, kind in kinds.items() if part in name), "llama")
    num = parameters_of(model_type=kind, **dict(zip(SIZES, KNOWN_MODELS[name], strict=True)))
    for suffix in ("", "-Instruct", "-Base"):
        shape = model_shape(ModelConfig(path=f"{name}{suffix}"))
        assert shape.num_parameters == pytest.approx(num, rel=1e-3)


def test_table_has_every_model_of_configs_and_pages() -> None:
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "configs").glob("*.yaml")]
    text = "".join(page.read_text(encoding="utf-8") for page in pages)
    named = set(re.findall(r"\b(?:Qwen|HuggingFaceTB|meta-llama)/[\w.-]*\w", text))
    assert "Qwen/Qwen3-0.6B" in named
    assert {name.removesuffix("-Instruct").removesuffix("-Base") for name in named} <= KNOWN_MODELS.keys()
