"""The canary's limit follows the rounding noise of the model: an engine that rounds in
another way is within the limit, and an engine with a small fault is not.

The engine is plain transformers in the run's dtype, with weights from the export's file.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from model_zoo import make_config, random_model
from safetensors.torch import load_file
from torch import Tensor
from trainer_cases import MakeStep, make_batch
from transformers import AutoModelForCausalLM

from asyncrl.extensions.vllm.vllm_server import CANARY_TOKENS, canary_limits
from asyncrl.messages.trainer_api import Canary

pytestmark = pytest.mark.extension("vllm")

CONSTANT = 0.25
"""A limit in nats that deep models in bfloat16 would need."""
HEAD = 8
LAYER = "model.layers.1"
FAULTS: dict[str, tuple[str, Callable[[Tensor], Tensor]]] = {
    "a wrong scale": (f"{LAYER}.mlp.down_proj.weight", lambda weight: 1.1 * weight),
    "swapped heads": (f"{LAYER}.self_attn.q_proj.weight", lambda w: w.roll(HEAD, 0)),
    # Without the bias, float32 logprobs differ by 0.0217 nats: that is the limit itself.
    "a negated bias": (f"{LAYER}.self_attn.q_proj.bias", torch.neg),
    "no norm": (f"{LAYER}.post_attention_layernorm.weight", torch.ones_like),
    "another rotary base": ("model.rotary_emb.inv_freq", lambda base: base**1.1),
}


@torch.no_grad()
def gaps_of(canary: Canary, model: Any) -> list[float]:
    """Return the distances of the next token's logprob, and of the text's mean and
    median.
    """
    ids_T = torch.tensor(canary.token_ids)
    logprob_TV = model(input_ids=ids_T[None]).logits[0].float().log_softmax(-1)
    scored_T = logprob_TV[:-1].gather(-1, ids_T[1:, None])[:, 0]
    gap_T = (scored_T - torch.tensor(canary.logprobs)).abs()
    next_gap = abs(float(logprob_TV[-1].max()) - canary.next_logprob)
    return [next_gap, float(gap_T.mean()), float(gap_T.median())]


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_limit_admits_rounding_and_refuses_small_faults(
    make_step: MakeStep, tmp_path: Path, dtype: str
) -> None:
    folder = tmp_path / "model"
    random_model(make_config("qwen2", "vllm")).save_pretrained(folder)
    trainer = {"lora": {"rank": 4}, "learning_rate": 1.5e-3}
    step = make_step(folder, trainer=trainer, dtype=dtype, canary_tokens=CANARY_TOKENS)
    engine = peft.get_peft_model(
        AutoModelForCausalLM.from_pretrained(
            folder, dtype=getattr(torch, dtype), attn_implementation="eager"
        ),
        peft.LoraConfig(r=4, lora_alpha=32, target_modules="all-linear"),
        autocast_adapter_dtype=False,
    )

    def load(version: int) -> None:
        """Load pushed adapters by peft's own names."""
        named = {
            f"base_model.model.{name}": one for name, one in pushed[version].items()
        }
        answer = peft.set_peft_model_state_dict(engine, named)
        assert not answer.unexpected_keys

    pushed = list[dict[str, Tensor]]()
    for version in range(4):
        manifest = step.begin_export(tmp_path / f"{version}.safetensors")()
        canary = manifest.canary
        assert canary is not None
        pushed.append(load_file(manifest.path))
        load(-1)
        gaps, (most, median_most) = gaps_of(canary, engine), canary_limits(canary, None)
        assert max(gaps) <= (most if dtype == "bfloat16" else 1e-5)
        assert gaps[2] <= median_most
        step.train(*make_batch(version=version))
    assert canary is not None
    found = dict[str, list[float]]()
    tensors = {
        name.removeprefix("base_model.model.").replace(".base_layer.", "."): one
        for name, one in (*engine.named_parameters(), *engine.named_buffers())
    }
    for name, (place, change) in FAULTS.items():
        right = tensors[place].data
        tensors[place].data = change(right)
        found[name] = gaps_of(canary, engine)
        tensors[place].data = right
    for name, stale in (("no adapter", 0), ("the version before", -2)):
        load(stale)
        found[name] = gaps_of(canary, engine)
    assert min(gaps[2] for gaps in found.values()) > median_most, found
    assert sum(max(gaps) <= CONSTANT for gaps in found.values()) >= 5, found
