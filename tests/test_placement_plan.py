"""The plan of a run, from files alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from asyncrl.config import load_config
from asyncrl.placement.plan import engine_threads, make_plan, plan_text, trainer_threads

ROOT = Path(__file__).parent.parent


def test_the_plan_counts_the_weights_of_a_folder_from_its_headers(tiny_model_dir: Path, tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    config_path = tmp_path / "c.yaml"
    config_path.write_text(f"model: {{path: {tiny_model_dir}}}\ntask: {{files: [d.jsonl], reward: 'a:b'}}\nrollout: {{slots: 4}}\n")
    plan = make_plan(load_config(config_path))
    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir, dtype=torch.float32)
    assert plan.num_parameters == sum(parameter.numel() for parameter in model.parameters())
    engine = next(process for process in plan.processes if process.name == "engine-0")
    assert engine.weights_bytes == 2 * 4 * plan.num_parameters
    assert plan.total_bytes is not None


def test_a_scratch_model_is_estimated_within_a_few_percent() -> None:
    plan = make_plan(load_config(ROOT / "configs" / "quickstart.yaml"))
    assert plan.num_parameters == pytest.approx(0.8e6, rel=0.5)
    assert "engine-0" in plan_text(plan)


def test_a_model_that_is_not_there_yet_is_told_as_unknown(tmp_path: Path) -> None:
    config_path = tmp_path / "c.yaml"
    config_path.write_text("model: {path: org/name}\ntask: {files: [d.jsonl], reward: 'a:b'}\n")
    plan = make_plan(load_config(config_path))
    assert plan.total_bytes is None
    assert "not on disk yet" in plan_text(plan)


def test_threads_of_an_engine_do_not_depend_on_the_number_of_engines() -> None:
    one = load_config(ROOT / "configs" / "quickstart.yaml", ["rollout.num_engines=1"])
    two = load_config(ROOT / "configs" / "quickstart.yaml", ["rollout.num_engines=2"])
    assert engine_threads(one) == engine_threads(two)
    assert trainer_threads(one) >= trainer_threads(two) >= 1
