"""Only adapters are trained; merged, exported and saved they are the trained policy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from model_zoo import make_config, random_model
from tiny_model import STACKED, make_tiny_moe
from torch import nn
from trainer_cases import MakeStep, gradient_of, make_batch
from transformers import AutoModelForCausalLM

from asyncrl.base.errors import ConfigError
from asyncrl.config.trainer_config import LoraConfig, TrainerConfig
from asyncrl.trainer.loss.objective import BatchNumbers
from asyncrl.trainer.model.lora import AdapterTable, targets_of
from asyncrl.trainer.ranks.rank import TrainerRank
from asyncrl.weights.export import named_weights

LORA: dict[str, Any] = {"lora": {"rank": 4, "alpha": 8.0}}


def trained(step: TrainerRank, num_batches: int = 3) -> TrainerRank:
    for version in range(num_batches):
        step.train(*make_batch(version=version))
    return step


BATCH = make_batch(version=3)


def logprobs(step: TrainerRank) -> np.ndarray:
    return step._forward(step.policy, BatchNumbers(*BATCH, BATCH[1].is_sampled))[0]


def test_adapters_alone_are_trained(make_step: MakeStep, tiny_model_dir: Path) -> None:
    step = make_step(trainer=LORA, dtype="bfloat16", algorithm={"kl_coefficient": 0.1})
    before = logprobs(step)
    trained(step)
    assert len(step.masters.named) == 2 * 14, (
        "A and B of seven linear layers in each of two decoder layers"
    )
    base = AutoModelForCausalLM.from_pretrained(
        tiny_model_dir, dtype=torch.float32
    ).state_dict()
    for name, parameter in step.policy.model.named_parameters():
        assert parameter.requires_grad == (".lora_" in name)
        if parameter.requires_grad:
            assert parameter.dtype == torch.float32
            assert parameter.any(), f"{name} is still 0"
        else:
            assert parameter.dtype == torch.bfloat16
            assert torch.equal(parameter, base[name].bfloat16())
    batch = BatchNumbers(*BATCH, BATCH[1].is_sampled)
    step._numbers(batch)
    assert np.array_equal(batch.reference_N, before)
    assert not np.array_equal(logprobs(step), before), (
        "and the adapters are on again afterwards"
    )


@pytest.mark.parametrize(
    ("name", "passive"), [("mamba", "dt_proj"), ("llama4_text", "router")]
)
def test_layers_that_are_not_called_get_no_adapters(name: str, passive: str) -> None:
    """The model reads the weight of dt_proj; a router is a linear layer with another
    forward.
    """
    model = random_model(make_config(name))
    assert any(
        name.endswith(passive) and isinstance(module, nn.Linear)
        for name, module in model.named_modules()
    )
    assert not any(one.endswith(passive) for one in targets_of(model, LoraConfig()))


def test_gradient_of_an_adapter_follows_from_the_full_weight(
    make_step: MakeStep,
) -> None:
    """With W + s B A as the weight, dB = s dW A^T, and dA = s B^T dW, which is 0 while
    B is.
    """
    header, arrays = make_batch()
    gradients = []
    for step in (make_step(trainer=LORA), make_step()):
        gradient_of(step, header, arrays)
        gradients.append(
            {name: master.grad for name, master in step.masters.named.items()}
        )
    with_adapters, full = gradients
    weights = dict(make_step(trainer=LORA).masters.named)
    for name, gradient in with_adapters.items():
        module, _, kind = name.partition(".lora_")
        if kind.startswith("A"):
            assert not gradient.any()
        else:
            expected = (
                2.0 * full[f"{module}.weight"] @ weights[f"{module}.lora_A.weight"].T
            )
            assert torch.allclose(gradient, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.filterwarnings("error:.*(MoE|experts|adapter)")
def test_each_linear_layer_beside_experts_has_its_adapter(tmp_path: Path) -> None:
    """Peft's own conversion would move adapters of dense layers to the experts."""
    folder = make_tiny_moe(tmp_path / "model", "deepseek_v3", **STACKED["deepseek_v3"])
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    lora = LoraConfig(rank=2)
    adapters = AdapterTable(model, TrainerConfig(lora=lora), torch.float32, tmp_path)
    linear = [
        name for name, module in base.named_modules() if isinstance(module, nn.Linear)
    ]
    assert [*adapters.layers, "lm_head"] == linear
    for name, weight in adapters.trained().masters.named.items():
        if "lora_B" in name:
            nn.init.normal_(weight, std=0.3)
    ids = torch.arange(6, 20)[None]
    with torch.no_grad():
        changed, expected = model(ids).logits, base(ids).logits
        assert not torch.allclose(changed, expected)
        weights, merges = adapters.merging(named_weights(model))
        exported = weights | {name: merged() for name, merged in merges.items()}
        missing, unexpected = base.load_state_dict(exported, strict=False)
        assert (missing, unexpected) == (["lm_head.weight"], []), (
            "the head is the embedding"
        )
        assert torch.allclose(base(ids).logits, changed, atol=1e-5), (
            "the export holds the trained weights"
        )


def test_targets_without_adapters_are_refused(tiny_model_dir: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir)
    with pytest.raises(ConfigError, match="no layer q_projection, embed_tokens"):
        targets_of(
            model, LoraConfig(targets=["q_proj", "q_projection", "embed_tokens"])
        )
    every = targets_of(model, LoraConfig())
    assert targets_of(model, LoraConfig(targets="all")) == [*every, "lm_head"]


def test_a_model_of_convolutions_may_adapt_its_head() -> None:
    model = random_model(make_config("gpt2"))
    for targets in (["lm_head"], "all"):
        assert targets_of(model, LoraConfig(targets=targets)) == ["lm_head"]
    with pytest.raises(ConfigError, match="no linear layers that adapters fit"):
        targets_of(model, LoraConfig())
