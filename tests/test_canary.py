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

from asyncrl.engines.vllm_server import CANARY_TOKENS, canary_limits
from asyncrl.messages.trainer_api import Canary

CONSTANT = 0.25
"""A limit in nats that deep models in bfloat16 would need."""
HEAD = 8
LAYER = "model.layers.1"
FAULTS: dict[str, tuple[str, Callable[[Tensor], Tensor]]] = {
    "a wrong scale": (f"{LAYER}.mlp.down_proj.weight", lambda weight: 1.1 * weight),
    "swapped heads": (f"{LAYER}.self_attn.q_proj.weight", lambda w: w.roll(HEAD, 0)),
    "no bias": (f"{LAYER}.self_attn.q_proj.bias", torch.zeros_like),
    "no norm": (f"{LAYER}.post_attention_layernorm.weight", torch.ones_like),
    "another rotary base": ("model.rotary_emb.inv_freq", lambda base: base**1.1),
}


@torch.no_grad()
def gaps_of(canary: Canary, model: Any) -> tuple[float, float]:
    """Return the distances of the next token's logprob, and of the text's on average."""
    ids_T = torch.tensor(canary.token_ids)
    logprob_TV = model(input_ids=ids_T[None]).logits[0].float().log_softmax(-1)
    scored_T = logprob_TV[:-1].gather(-1, ids_T[1:, None])[:, 0]
    mean = (scored_T - torch.tensor(canary.logprobs)).abs().mean()
    return abs(float(logprob_TV[-1].max()) - canary.next_logprob), float(mean)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_limit_admits_rounding_and_refuses_small_faults(
    make_step: MakeStep, tmp_path: Path, dtype: str
) -> None:
    folder = tmp_path / "model"
    random_model(make_config("qwen2", "vllm")).save_pretrained(folder)
    trainer = {"lora": {"rank": 4}, "learning_rate": 2e-3}
    values = {"dtype": dtype, "canary_tokens": CANARY_TOKENS}
    step = make_step(folder, trainer=trainer, **values)
    pushed = list[dict[str, Tensor]]()

    def engine(attention: str, version: int = -1) -> Any:
        model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=getattr(torch, dtype), attn_implementation=attention
        )
        model.load_state_dict(pushed[version], strict=False)
        return model

    for version in range(4):
        manifest = step.export(tmp_path / f"{version}.safetensors")
        canary = manifest.canary
        assert canary is not None
        pushed.append(load_file(manifest.path))
        limits = canary_limits(canary, None)
        for attention in ("eager", "sdpa"):
            gaps = gaps_of(canary, engine(attention))
            assert gaps[0] <= limits[0], attention
            assert gaps[1] <= limits[1], attention
            assert dtype == "bfloat16" or max(gaps) <= 1e-5
        step.train(*make_batch(version=version))
    faulty = {"no adapter": engine("sdpa", 0), "the version before": engine("sdpa", -2)}
    for name, (place, change) in FAULTS.items():
        faulty[name] = engine("sdpa")
        tensors = dict(faulty[name].named_parameters())
        tensors |= dict(faulty[name].named_buffers())
        tensors[place].data = change(tensors[place].data)
    means = {name: gaps_of(canary, model)[1] for name, model in faulty.items()}
    assert [name for name, mean in means.items() if mean <= limits[1]] == []
    assert sum(mean <= CONSTANT for mean in means.values()) >= 5, means
