"""Norms and rotary embeddings in fewer passes: the same function as transformers', where it is exchanged."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from asyncrl.trainer.model.fused import fuse

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 99,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def results(model: torch.nn.Module, ids_BT: Tensor, grad_BTV: Tensor) -> list[Tensor]:
    """Logits, then the gradients of all weights."""
    logits_BTV = model(input_ids=ids_BT).logits
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    return [logits_BTV.detach(), *torch.autograd.grad(logits_BTV, weights, grad_BTV)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("model_type", "exchanged"),
    [
        ("qwen3", {"Qwen3RMSNorm", "Qwen3Attention"}),
        ("llama", {"LlamaRMSNorm", "LlamaAttention"}),
        ("gemma2", {"Gemma2Attention"}),  # its norm multiplies with 1 + weight
        ("phi3", {"Phi3RMSNorm"}),  # it turns a part of each head alone
        ("nanochat", set()),  # it turns the other way, by a function that the rotary one calls
    ],
)
def test_a_model_gives_the_same_logits_and_gradients(
    model_type: str, exchanged: set[str], dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    plain = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **SIZES), dtype=dtype).eval()
    for name, weight in plain.named_parameters():
        if weight.ndim == 1:
            torch.nn.init.normal_(weight, 1.0, 0.3)
        if name.endswith("layers.0.input_layernorm.weight"):
            weight.requires_grad_(False)
    fused = copy.deepcopy(plain)
    fuse(fused)
    fused = copy.deepcopy(fused)  # as a frozen reference is made
    assert {type(one).__name__ for one in fused.modules() if "forward" in vars(one)} == exchanged
    given = torch.randint(0, 99, (2, 40)), torch.randn(2, 40, 99, dtype=dtype)
    for one, other in zip(results(fused, *given), results(plain, *given), strict=True):
        difference = float((one - other).norm() / other.norm())
        assert difference < 1e-5 if dtype == torch.float32 else difference == 0.0
    for module in fused.modules():
        if "forward" in vars(module):
            assert module.forward.__self__ is module, "a copy computes with its own weights"
