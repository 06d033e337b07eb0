"""The canary's limit follows the rounding noise of the model: an engine that rounds in
another way is within the limit, and an engine with a small fault is not.

The engine is plain transformers in the run's dtype, with weights from the export's file.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from model_zoo import make_config, random_model
from safetensors.torch import load_file
from torch import Tensor
from trainer_cases import MakeStep, make_batch
from transformers import AutoModelForCausalLM

from asyncrl.engines.vllm_server import (
    CANARY_TOKENS,
    canary_gaps,
    canary_limits,
    is_within,
)
from asyncrl.messages.trainer_api import Canary

CONSTANT = 0.25
"""A limit that allows for the rounding of deep models in bfloat16, in nats."""


def scale_layer(model: Any) -> None:
    model.model.layers[1].mlp.down_proj.weight.mul_(1.1)


def swap_heads(model: Any) -> None:
    weight_HDI = model.model.layers[0].self_attn.q_proj.weight.unflatten(0, (-1, 8))
    weight_HDI.copy_(weight_HDI.flip(0).clone())


def drop_bias(model: Any) -> None:
    model.model.layers[0].self_attn.q_proj.bias.zero_()


def drop_norm(model: Any) -> None:
    model.model.layers[1].post_attention_layernorm.weight.fill_(1.0)


def change_rope(model: Any) -> None:
    model.model.rotary_emb.inv_freq[1:].mul_(0.9)


FAULTS: dict[str, Callable[[Any], None]] = {
    function.__name__: function
    for function in (scale_layer, swap_heads, drop_bias, drop_norm, change_rope)
}


@torch.no_grad()
def gaps_of(canary: Canary, model: Any) -> tuple[float, float]:
    ids_T = torch.tensor(canary.token_ids)
    logprob_TV = model(input_ids=ids_T[None]).logits[0].float().log_softmax(-1)
    scored_T = logprob_TV[:-1].gather(-1, ids_T[1:, None])[:, 0]
    return canary_gaps(canary, float(logprob_TV[-1].max()), scored_T.tolist())


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_limit_admits_rounding_and_refuses_small_faults(
    make_step: MakeStep, tmp_path: Path, dtype: str
) -> None:
    folder = tmp_path / "model"
    random_model(make_config("qwen2", "vllm")).save_pretrained(folder)
    values = {"dtype": dtype, "canary_tokens": CANARY_TOKENS}
    trainer = {"lora": {"rank": 4}, "learning_rate": 2e-3}
    step = make_step(folder, trainer=trainer, **values)
    pushed = list[dict[str, Tensor]]()

    def engine(attention: str, weights: dict[str, Tensor] | None = None) -> Any:
        model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=getattr(torch, dtype), attn_implementation=attention
        )
        model.load_state_dict(pushed[-1] if weights is None else weights, strict=False)
        return model

    for version in range(4):
        manifest = step.export(tmp_path / f"{version}.safetensors")
        canary = manifest.canary
        assert canary is not None
        pushed.append(load_file(manifest.path))
        limits = canary_limits(canary, None)
        for attention in ("eager", "sdpa"):
            gaps = gaps_of(canary, engine(attention))
            assert is_within(gaps, limits), attention
        step.train(*make_batch(version=version))
    stale = {
        "adapter of no version": pushed[0],
        "adapter of the version before": pushed[-2],
    }
    found = {name: gaps_of(canary, engine("sdpa", one)) for name, one in stale.items()}
    for name, fault in FAULTS.items():
        model = engine("sdpa")
        with torch.no_grad():
            fault(model)
        found[name] = gaps_of(canary, model)
    assert [name for name, gaps in found.items() if is_within(gaps, limits)] == []
    of_constant = canary_limits(canary, CONSTANT)
    passed = [name for name, gaps in found.items() if is_within(gaps, of_constant)]
    assert len(passed) >= 5
