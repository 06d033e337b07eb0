"""Only adapters are trained; merged, exported and saved they are the trained policy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
from tiny_model import STACKED, make_tiny_moe
from torch import nn
from trainer_cases import MakeStep, make_batch, naive_logprobs
from transformers import AutoModelForCausalLM

from asyncrl.base.errors import ConfigError
from asyncrl.config import LoraConfig, TrainerConfig
from asyncrl.trainer.lora import ADAPTER, Adapters, MergedLinear, find_targets, merge
from asyncrl.trainer.objective import BatchNumbers
from asyncrl.trainer.step import TrainStep

LORA: dict[str, Any] = {"lora": {"rank": 4, "alpha": 8.0}}


def trained(step: TrainStep, num_batches: int = 3) -> TrainStep:
    for version in range(num_batches):
        step.train(*make_batch(version=version))
    return step


BATCH = make_batch(version=3)


def logprobs(step: TrainStep) -> np.ndarray:
    return step._forward(step.policy, BatchNumbers(*BATCH, BATCH[1].loss_mask))[0]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_adapters_alone_are_trained(make_step: MakeStep, tiny_model_dir: Path, dtype: str) -> None:
    step = make_step(trainer=LORA, dtype=dtype, algorithm={"kl_coefficient": 0.1})
    before = logprobs(step)
    trained(step)
    assert len(step._masters.named) == 2 * 14, "A and B of seven linear layers in each of two decoder layers"
    assert len(step._optimizer.state) == 2 * 14
    base = AutoModelForCausalLM.from_pretrained(tiny_model_dir, dtype=torch.float32).state_dict()
    for name, parameter in step.policy.model.named_parameters():
        assert parameter.dtype == getattr(torch, dtype)
        assert parameter.requires_grad == (".lora_" in name)
        if parameter.requires_grad:
            assert step._masters.named[name].dtype == torch.float32
            assert parameter.any(), f"{name} is still 0"
        else:
            assert torch.equal(parameter, base[name.replace(".base_layer", "")].to(parameter.dtype))
    assert step._reference is None, "no copy is held"
    assert np.array_equal(step._numbers(BatchNumbers(*BATCH, BATCH[1].loss_mask)).reference_N, before)
    assert not np.array_equal(logprobs(step), before), "and the adapters are on again afterwards"
    assert step.train(*BATCH)["policy/kl_reference"] > 0


def test_gradient_of_an_adapter_follows_from_the_full_weight(make_step: MakeStep) -> None:
    """With W + s B A as the weight, dB = s dW A^T, and dA = s B^T dW, which is 0 while B is."""
    header, arrays = make_batch()
    gradients = []
    for step in (make_step(trainer=LORA), make_step()):
        step._accumulate(step._numbers(BatchNumbers(header, arrays, arrays.loss_mask)), arrays.loss_mask)
        gradients.append({name: master.grad for name, master in step._masters.named.items()})
    with_adapters, full = gradients
    weights = dict(make_step(trainer=LORA)._masters.named)
    for name, gradient in with_adapters.items():
        module, _, kind = name.partition(".lora_")
        if kind.startswith("A"):
            assert not gradient.any()
        else:
            expected = 2.0 * full[f"{module}.weight"] @ weights[f"{module}.lora_A.default.weight"].T
            assert torch.allclose(gradient, expected, rtol=1e-4, atol=1e-6)


def test_change_too_small_for_bfloat16_changes_nothing() -> None:
    torch.manual_seed(0)
    linear, config = nn.Linear(6, 5, bias=False), peft.LoraConfig()
    layer = MergedLinear(linear, ADAPTER, r=3, lora_alpha=3, config=config).bfloat16()
    base = nn.init.uniform_(layer.get_base_layer().weight, 0.25, 1.0)
    x = torch.rand(7, 6, dtype=torch.bfloat16)
    for size, is_visible in ((1e-5, False), (1.0, True)):
        nn.init.constant_(layer.lora_B[ADAPTER].weight, size)
        weight = merge(base, layer.lora_A[ADAPTER].weight, layer.lora_B[ADAPTER].weight, 1.0)
        assert torch.equal(layer(x), nn.functional.linear(x, weight)), "what an engine computes, bit for bit"
        assert torch.equal(weight, base) is not is_visible
        layer(x).sum().backward()
        assert layer.lora_A[ADAPTER].weight.grad.all()
        layer.zero_grad()


def test_merge_once_a_step_is_merge_in_each_pass(
    make_step: MakeStep, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    digests = []
    for when in ("pass", "step"):
        monkeypatch.setattr(TrainerConfig, "keeps_merged", when == "step")
        settings = {**LORA, "micro_batch_tokens": 40}
        step = make_step(trainer=settings, dtype="bfloat16", algorithm={"kl_coefficient": 0.1})
        trained(step)
        step.begin_save_state(tmp_path / when).result()
        step.offload(["optimizer"])
        step.offload(["weights"])
        assert all(layer.kept is None for layer in step._adapters.layers.values()), "copies do not move"
        step.onload(["weights", "optimizer"])
        before = logprobs(step)
        step.train(*make_batch(version=step.policy_version))
        assert not np.array_equal(logprobs(step), before)
        step.load_state(tmp_path / "pass")
        assert np.array_equal(logprobs(step), before)
        digests.append((step.weights_digest(), step.export(tmp_path / f"{when}.safetensors").digest))
        digests[-1] += (before.tobytes(),)
    assert digests[0] == digests[1]


@pytest.mark.parametrize("model_type", ["deepseek_v3", "qwen3_moe"])
@pytest.mark.filterwarnings("error:.*(MoE|experts|adapter)")
def test_each_linear_layer_beside_experts_has_its_adapter(tmp_path: Path, model_type: str) -> None:
    """Peft's own conversion would move adapters of dense layers to the experts."""
    folder = make_tiny_moe(tmp_path / "model", model_type, **STACKED[model_type])
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    adapters = Adapters(model, LoraConfig(rank=2), torch.float32)
    linear = [name for name, module in base.named_modules() if isinstance(module, nn.Linear)]
    assert [*adapters.layers, "lm_head"] == linear
    assert {type(layer) for layer in adapters.layers.values()} == {MergedLinear}
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trained == {
        f"{name}.{kind}.{ADAPTER}.weight" for name in adapters.layers for kind in ("lora_A", "lora_B")
    }
    for layer in adapters.layers.values():
        nn.init.normal_(layer.lora_B[ADAPTER].weight)
    ids = torch.arange(6, 20)[None]
    with torch.no_grad():
        changed, expected = model(ids).logits, base(ids).logits
        with adapters.off():
            assert torch.equal(model(ids).logits, expected)
        assert not torch.allclose(changed, expected)
        weights, merges = adapters.merging()
        exported = weights | {name: merged() for name, merged in merges.items()}
        missing, unexpected = base.load_state_dict(exported, strict=False)
        assert (missing, unexpected) == (["lm_head.weight"], []), "the head is the embedding"
        assert torch.allclose(base(ids).logits, changed, atol=1e-5), "the export holds the trained weights"


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # of some versions
def test_saved_adapters_open_elsewhere(make_step: MakeStep, tiny_model_dir: Path, tmp_path: Path) -> None:
    step = trained(make_step(trainer=LORA))
    step.save(tmp_path / "final")
    step.save(tmp_path / "adapter", merged=False)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "final", dtype=torch.float32)
    assert np.abs(naive_logprobs(merged, *BATCH, 1.0) - logprobs(step)).max() < 1e-5
    configs = [folder / "config.json" for folder in (tmp_path / "final", tiny_model_dir)]
    assert json.loads(configs[0].read_text()) == json.loads(configs[1].read_text())
    base = AutoModelForCausalLM.from_pretrained(tiny_model_dir, dtype=torch.float32)
    with_adapters = peft.PeftModel.from_pretrained(base, tmp_path / "adapter")
    assert np.abs(naive_logprobs(with_adapters, *BATCH, 1.0) - logprobs(step)).max() < 1e-5


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        (["q_projection"], r"no layer q_projection.*q_proj.*down_proj"),
        (["q_proj", "embed_tokens"], "no layer embed_tokens"),
        ([], "no layer"),
    ],
)
def test_targets_without_adapters_are_refused(tiny_model_dir: Path, targets: list[str], message: str) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir)
    with pytest.raises(ConfigError, match=f"(?s)trainer.lora.*{message}"):
        find_targets(model, LoraConfig(targets=targets))
