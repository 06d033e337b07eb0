"""What config.json tells of a model, against the model itself: its parameters, and what its layers keep of a
token for a backward pass.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from placement_cases import load
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from asyncrl.config import ModelConfig
from asyncrl.placement.known_models import ARCHITECTURES, PUBLISHED_PARAMETERS
from asyncrl.placement.model_shape import ModelShape, model_shape
from asyncrl.placement.process_memory import compiles_layers, trainer_memory
from asyncrl.trainer.model import fused
from asyncrl.trainer.model import policy as policy_module
from asyncrl.trainer.model.packing import pack_texts
from asyncrl.trainer.model.policy import ForwardPlan, Policy

ROOT = Path(__file__).parents[1]
SIZES: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 160, "num_attention_heads": 8}
SIZES |= {"num_key_value_heads": 2, "head_dim": 16, "vocab_size": 100, "num_hidden_layers": 2}
SIZES |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
NUM_TOKENS = 256
DEEP = {"n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
DEEP |= {"first_k_dense_replace": 1, "q_lora_rank": 24, "kv_lora_rank": 16, "qk_rope_head_dim": 8}
DEEP |= {"qk_nope_head_dim": 16, "v_head_dim": 16, "n_group": 2, "topk_group": 1, "num_hidden_layers": 3}


def shape_of(folder: Path, **architecture: Any) -> ModelShape:
    """Of a folder with nothing but this config.json."""
    (folder / "config.json").write_text(json.dumps(architecture))
    return model_shape(ModelConfig(path=str(folder)))


def kept_bytes(architecture: dict[str, Any], dtype: torch.dtype, *, is_compiled: bool) -> int:
    """Of all tensors that a forward pass saves, the parameters left out."""
    torch._dynamo.reset()
    config = AutoConfig.for_model(**architecture)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval().requires_grad_(True)
    policy = Policy(model, ForwardPlan(True, True), is_compiled=is_compiled)
    given = pack_texts([[np.random.default_rng(0).integers(3, 100, NUM_TOKENS)]], torch.device("cpu"))
    own = {one.untyped_storage().data_ptr() for one in model.parameters()}
    kept, held = dict[int, int](), list[Tensor]()

    def save(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        held.append(tensor)  # no other takes its address
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
        policy(given, 1.0)
    return sum(kept.values())


def assert_kept(folder: Path, model_type: str, dtype: torch.dtype, kind: str, **how: bool) -> None:
    """What one layer more keeps is what the plan counts, within a tenth."""
    experts = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 48}
    deep = {**DEEP, "num_key_value_heads": 8, "head_dim": 8, "first_k_dense_replace": 0}
    more = {"qwen3_moe": experts, "deepseek_v3": deep, "latent": {**deep, "v_head_dim": 24}}
    given = {**SIZES, **more.get(model_type, {}), "model_type": model_type.replace("latent", "deepseek_v3")}
    sizes = [kept_bytes({**given, "num_hidden_layers": num}, dtype, **how) for num in (2, 3)]
    measured = (sizes[1] - sizes[0]) / NUM_TOKENS / dtype.itemsize
    counted, _ = shape_of(folder, **given).layer_entries(dtype.itemsize, kind, **how)
    assert counted == pytest.approx(measured, rel=0.1)


@pytest.mark.parametrize("model_type", ["qwen3", "qwen2", "llama", "qwen3_moe", "deepseek_v3", "latent"])
@pytest.mark.parametrize(
    ("kind", "dtype"), [("cpu", torch.float32), ("cuda", torch.float32), ("cuda", torch.bfloat16)]
)
def test_layers_that_are_not_compiled_keep_what_the_plan_counts(
    model_type: str, kind: str, dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kind == "cuda":  # nothing is exchanged there
        monkeypatch.setattr(policy_module, "fuse", lambda _: None)
    assert_kept(tmp_path, model_type, dtype, kind, is_compiled=False)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # asked by dynamo
@pytest.mark.parametrize(
    "model_type", ["qwen3", *(pytest.param(each, marks=pytest.mark.long) for each in ("qwen2", "llama"))]
)
def test_compiled_layers_keep_what_the_plan_counts(
    model_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is kept is chosen before inductor, which changes this process's environment."""
    monkeypatch.setattr(fused, "BACKEND", "aot_eager")
    assert_kept(tmp_path, model_type, torch.bfloat16, "cuda", is_compiled=True)


QWEN3 = {"hidden_size": 1024, "intermediate_size": 3072, "num_attention_heads": 16}
QWEN3 |= {"num_key_value_heads": 8, "head_dim": 128}
LARGER = {"hidden_size": 2560, "intermediate_size": 9728, "num_attention_heads": 32}
QWEN2 = {"hidden_size": 3584, "intermediate_size": 18944, "num_attention_heads": 28, "num_key_value_heads": 4}
A3B = {"hidden_size": 2048, "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8}
A3B |= {"num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "intermediate_size": 6144}


@pytest.mark.parametrize(
    ("model_type", "sizes", "compiled", "eager"),
    [
        ("qwen3", QWEN3, 45_056, 71_680),
        ("qwen3", QWEN3 | LARGER, 109_568, 169_984),
        ("qwen2", QWEN2, 158_720, 225_280),
        ("qwen3_moe", A3B, None, 193_458),
    ],
)
def test_bytes_that_were_measured_of_a_token_and_layer_of_large_models(
    model_type: str, sizes: dict[str, int], compiled: int | None, eager: int, tmp_path: Path
) -> None:
    shape = shape_of(tmp_path, model_type=model_type, num_hidden_layers=1, vocab_size=100, **sizes)
    for is_compiled, measured in ((True, compiled), (False, eager)):
        counted, _ = shape.layer_entries(2, "cuda", is_compiled=is_compiled)
        assert measured is None or 2 * counted == pytest.approx(measured, rel=0.001)


ERNIE = {"moe_num_experts": 8, "moe_k": 2, "moe_num_shared_experts": 2, "moe_intermediate_size": 48}
ERNIE |= {"num_hidden_layers": 4, "moe_layer_start_index": 0, "tie_word_embeddings": True}
SPARSE = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "num_hidden_layers": 4}


@pytest.mark.parametrize(
    ("model_type", "more"),
    [
        ("qwen3_moe", SPARSE),
        ("qwen3_moe", {**SPARSE, "decoder_sparse_step": 2}),
        ("qwen3_moe", {**SPARSE, "mlp_only_layers": [0, 1]}),
        ("qwen2_moe", {**SPARSE, "shared_expert_intermediate_size": 96}),
        ("mixtral", {"num_local_experts": 8}),
        ("deepseek_v3", DEEP),
        ("deepseek_v3", {**DEEP, "q_lora_rank": None}),
        ("ernie4_5_moe", ERNIE),
        ("ernie4_5_moe", {**ERNIE, "moe_layer_start_index": 2}),
        ("ernie4_5_moe", {**ERNIE, "moe_layer_end_index": 2, "moe_layer_interval": 2}),
        ("qwen3", {}),
    ],
)
def test_config_json_alone_tells_how_many_parameters_a_model_has(
    model_type: str, more: dict[str, Any], tmp_path: Path
) -> None:
    architecture = {**SIZES, "hidden_size": 256, "model_type": model_type, **more}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**architecture))
    shape = shape_of(tmp_path, **architecture)
    num, layers = sum(one.numel() for one in model.parameters()), model.model.layers
    assert shape.num_parameters == pytest.approx(num, rel=0.02)
    largest = max(sum(one.numel() for one in layer.parameters()) for layer in layers)
    assert shape.largest_layer == pytest.approx(largest, rel=0.02)


@pytest.mark.parametrize(
    ("device", "overrides", "routed", "has_compiler", "is_compiled"),
    [
        ("cuda:0", ["model.dtype=auto"], 0, True, True),
        ("cuda:0", ["model.dtype=auto"], 0, False, False),
        ("cuda:0", ["model.dtype=auto"], 8, True, False),
        ("cuda:0", ["model.dtype=float32"], 0, True, False),
        ("cuda:0", ["trainer.compile=false", "model.dtype=bfloat16"], 0, True, False),
        ("cpu", ["model.dtype=float32"], 0, True, False),
        ("cpu", ["model.dtype=float32", "trainer.compile=true"], 0, True, True),
    ],
)
def test_the_plan_counts_compiled_layers_where_the_trainer_compiles_them(
    device: str, overrides: list[str], routed: int, has_compiler: bool, is_compiled: bool
) -> None:
    shape = ModelShape(hidden=64, layers=1, width=64, routed=routed)
    config = load(*overrides)
    assert compiles_layers(config, shape, device, has_compiler=has_compiler) == is_compiled


def test_at_the_end_of_a_backward_pass_all_that_is_outside_layers_is_reduced_at_once() -> None:
    config = load("model.dtype=bfloat16", "trainer.world_size=4")
    shape = ModelShape(num_parameters=10**9, hidden=64, vocab=100, outside=10**9)
    counted = 10**9 * (2 + 2 + 4) + 10**9 * 4 // 4
    assert trainer_memory(config, shape, "cuda:0").activations == counted
    adapted = load("model.dtype=bfloat16", "trainer.world_size=4", "trainer.lora={rank: 2}")
    assert trainer_memory(adapted, shape, "cuda:0").activations < counted


@pytest.mark.parametrize("name", PUBLISHED_PARAMETERS)
def test_a_known_model_has_its_published_number_of_parameters(name: str) -> None:
    architecture = dict(ARCHITECTURES[name])
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**architecture))
    model.tie_weights()
    assert model.num_parameters() == PUBLISHED_PARAMETERS[name]
    shape = model_shape(ModelConfig(path=name))
    assert shape.num_parameters == pytest.approx(PUBLISHED_PARAMETERS[name], rel=1e-3)
    assert shape.is_from_table


def test_a_revision_of_a_known_model_is_not_taken_from_the_table() -> None:
    assert model_shape(ModelConfig(path="Qwen/Qwen3-0.6B", revision="v1")) == ModelShape()


def test_the_table_has_every_model_that_configs_and_pages_name() -> None:
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "configs").glob("*.yaml")]
    text = "".join(page.read_text(encoding="utf-8") for page in pages)
    named = set(re.findall(r"\b(?:Qwen|HuggingFaceTB|meta-llama)/[\w.-]*\w", text))
    assert "Qwen/Qwen3-0.6B" in named
    assert named <= ARCHITECTURES.keys()
