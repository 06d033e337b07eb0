"""A whole run that trains and publishes adapters alone."""

from __future__ import annotations

import json
from pathlib import Path

import peft
import pytest
import torch
from job_runs import read_lines, run, write_config
from transformers import AutoModelForCausalLM

pytestmark = pytest.mark.slow

IDS = torch.arange(3, 19)[None]


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return torch.log_softmax(model(input_ids=IDS).logits.float(), dim=-1)


def test_a_run_publishes_adapters_while_rollouts_go_on_and_leaves_merged_weights_and_the_adapters(
    tmp_path: Path,
) -> None:
    config = write_config(
        tmp_path,
        buffer={"max_staleness": 2, "look_ahead": 2},
        rollout={"max_tokens": 100},
        trainer={"num_steps": 12, "num_groups": 2, "learning_rate": 0.01, "lora": {"rank": 4, "alpha": 8}},
        publisher={"transport": "lora"},
    )
    answer = run(config, tmp_path / "run")
    assert answer.returncode == 0, answer.stderr
    steps = read_lines(tmp_path / "run" / "metrics.jsonl")
    assert len(steps) == 12
    assert sum(step["rollout/interrupted"] for step in steps) > 0, "no rollout was interrupted by a publish"
    gaps = [step["policy/logprob_gap_max"] for step in steps if "policy/logprob_gap_max" in step]
    assert gaps
    assert max(gaps) <= 1e-4, (
        "an engine that merges adapters samples from the policy that the trainer computes"
    )

    base_dir, final, adapter = (tmp_path / "run" / name for name in ("model", "final", "adapter"))
    merged = AutoModelForCausalLM.from_pretrained(final, dtype=torch.float32)
    base = AutoModelForCausalLM.from_pretrained(base_dir, dtype=torch.float32)
    before = logits(base)
    with pytest.warns(
        FutureWarning, match="is_gradient_checkpointing"
    ):  # peft 0.21 asks transformers 5.23 by an old name
        with_adapters = peft.PeftModel.from_pretrained(base, adapter)
    assert torch.allclose(logits(merged), logits(with_adapters), atol=1e-5)
    assert not torch.allclose(logits(merged), before, atol=1e-2), "nothing was learned"
    num_bytes = {
        folder: sum(file.stat().st_size for file in folder.glob("*.safetensors"))
        for folder in (final, adapter)
    }
    assert num_bytes[adapter] < num_bytes[final]
    assert json.loads((adapter / "adapter_config.json").read_text())["r"] == 4
