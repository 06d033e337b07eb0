"""Loading refuses folders whose tensors are not the model's, and gives each rank its rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_model import STACKED, make_tiny_model, make_tiny_moe
from torch.distributed.tensor import DTensor
from trainer_cases import make_spec, mesh_of_one
from transformers import AutoModelForCausalLM

from asyncrl.base.errors import ConfigError
from asyncrl.trainer.build_model import TrainedModel, load_model


@pytest.mark.parametrize(
    ("architecture", "values"),
    [
        ({}, {}),
        ({"tie_word_embeddings": False, "attention_bias": True}, {"dtype": "bfloat16"}),
        ({}, {"trainer": {"lora": {"rank": 2}}, "dtype": "bfloat16"}),
        *((kind, {}) for kind in STACKED),
    ],
)
def test_shards_are_the_stored_weights(
    tmp_path: Path, architecture: dict[str, Any] | str, values: dict[str, Any]
) -> None:
    if isinstance(architecture, str):
        folder = make_tiny_moe(tmp_path / "model", architecture, **STACKED[architecture])
    else:
        folder = make_tiny_model(tmp_path / "model", **architecture)
    with mesh_of_one(tmp_path) as ranks:
        made = TrainedModel(make_spec(folder, tmp_path, **values), ranks, needs_reference=True)
    model = made.policy.model
    found = {name.replace(".base_layer.", "."): one for name, one in model.named_parameters()}
    dtype = torch.float32 if made.adapters is None else torch.bfloat16
    expected = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    wanted = dict(expected.named_parameters())
    assert {name for name in found if ".lora_" not in name} == wanted.keys()
    for name, tensor in wanted.items():
        assert isinstance(found[name], DTensor)
        assert torch.equal(found[name].to_local(), tensor), name
    buffers = dict(model.named_buffers())
    assert all(torch.equal(buffers[name], one) for name, one in expected.named_buffers())
    is_tied = model.lm_head.weight is model.get_input_embeddings().weight
    assert is_tied is model.config.tie_word_embeddings
    assert (made.reference is None) is (made.adapters is not None)


UP, EXPERT = "model.layers.1.mlp.up_proj.weight", "model.layers.1.mlp.experts.2.up_proj.weight"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda found: {UP: None}, rf"1 lack \['{UP}'\]"),
        (lambda found: {UP.replace("1", "2"): torch.zeros(3)}, "1 are not used"),
        (lambda found: {"model.norm.weight": torch.zeros(7)}, "1 lack"),
        (lambda found: {EXPERT: None}, "1 lack|cannot load the model"),
    ],
)
def test_wrong_tensor_of_a_model_is_named(tmp_path: Path, change: Any, words: str) -> None:
    folder = (make_tiny_moe if "cannot" in words else make_tiny_model)(tmp_path / "model")
    found = load_file(folder / "model.safetensors")
    tensors = {name: one for name, one in {**found, **change(found)}.items() if one is not None}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=words):
        load_model(make_spec(folder, tmp_path), torch.float32)
