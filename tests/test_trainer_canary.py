"""Each export holds the logprobs of a fixed text under the weights in the file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tiny_model import make_tiny_model
from torch import Tensor
from trainer_cases import MakeStep, make_batch
from transformers import AutoConfig, AutoModelForCausalLM

from asyncrl.base.http import Refused
from asyncrl.messages.trainer_api import Canary

NUM_TOKENS = 160


@pytest.fixture
def make_step(make_step: MakeStep, tmp_path: Path) -> MakeStep:
    """Make trainers of an untied model."""
    untied = make_tiny_model(tmp_path / "model", tie_word_embeddings=False)
    sizes = {"canary_tokens": NUM_TOKENS, "chunk_bytes": 10_000}
    return lambda model_dir=untied, **values: make_step(model_dir, **sizes, **values)


@torch.no_grad()
def plain(weights: dict[str, Tensor], model_dir: Path, ids: list[int]) -> tuple[Tensor, float]:
    """(logprobs of ids[1:], highest logprob of the next one) by transformers."""
    dtype = next(iter(weights.values())).dtype
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model_dir), dtype=dtype)
    missing, unexpected = model.load_state_dict(weights, strict=False)
    assert (set(missing), unexpected) <= ({"lm_head.weight"}, [])
    model.tie_weights()
    logprob_TV = torch.log_softmax(model.eval()(torch.tensor([ids])).logits[0].double(), -1)
    targets = torch.tensor(ids[1:])
    return logprob_TV[:-1].gather(-1, targets[:, None])[:, 0], float(logprob_TV[-1].max())


def distance(canary: Canary | None, logprobs: Tensor, next_logprob: float) -> float:
    """The largest difference, in nats."""
    assert canary is not None
    assert len(canary.logprobs) == len(canary.token_ids) - 1
    found = np.array([*canary.logprobs, canary.next_logprob])
    return float(np.abs(found - np.array([*logprobs.tolist(), next_logprob])).max())


@pytest.mark.parametrize("lora", [None, {"rank": 4}], ids=["tied", "untied with adapters"])
def test_canary_is_what_transformers_says(make_step: MakeStep, tmp_path: Path, lora: Any) -> None:
    folder = make_tiny_model(tmp_path / "base", tie_word_embeddings=lora is None)
    step = make_step(folder, trainer={"lora": lora})
    seen = []
    for version in range(2):
        answer = step.export(tmp_path / f"v{version}.safetensors")
        assert answer.canary is not None
        assert len(answer.canary.token_ids) == NUM_TOKENS
        assert distance(answer.canary, *plain(load_file(answer.path), folder, answer.canary.token_ids)) < 1e-5
        seen.append(answer.canary)
        step.train(*make_batch(version=version))
    assert seen[0].token_ids == seen[1].token_ids
    assert distance(seen[0], torch.tensor(seen[1].logprobs), seen[1].next_logprob) > 1e-2


def test_weights_that_give_nan_are_not_published(make_step: MakeStep, tmp_path: Path) -> None:
    step = make_step()
    with torch.no_grad():
        step.policy.model.model.norm.weight.fill_(torch.nan)
    with pytest.raises(Refused, match="not finite, 159 of 159 tokens") as refused:
        step.export(tmp_path / "v0.safetensors")
    assert "weight_sync.canary_limit=none" in refused.value.body.way_out
