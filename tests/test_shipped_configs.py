"""Every shipped config and example that fits a machine without CUDA runs three steps."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from harness_gateway import need_bubblewrap
from job_runs import ROOT, RUN, ended, popen
from needed_extensions import missing_for
from vllm_process import vllm_python

from asyncrl.config.job_config import JobConfig
from asyncrl.config.load import load_any
from asyncrl.config.run_config import RunConfig

SMOLLM2 = "models/smollm2-135m-instruct"
NEEDS_PACKAGE = {
    "examples/harbor/numbers.yaml": "harbor",
    "examples/openenv/echo.yaml": "echo_env",
    "examples/openenv/learn.yaml": "openenv",
    "examples/textarena/duel.yaml": "textarena",
    "examples/textarena/nim.yaml": "textarena",
    "examples/verifiers_env/calculator.yaml": "verifiers",
    "examples/nemo_gym/nemo_gym.yaml": "nemo_gym",
}
"""Examples of agent frameworks, which tests/test_frameworks.py and their own tests run."""
NEEDS_PERSON = {
    "configs/tinker.yaml": "clients send its work (tests/test_tinker_server.py)",
    "examples/thumbs.yaml": "people post its rewards (tests/test_late_rewards.py)",
}
BEFORE = {
    "configs/distill.yaml": ("configs/quickstart.yaml", "teacher.path"),
    "examples/sft_then_rl/rl.yaml": ("examples/sft_then_rl/sft.yaml", "model.path"),
}
"""A run that has to end first, and the setting that names its model."""


def shipped() -> dict[str, JobConfig]:
    """Return the configs below configs/ and examples/, by path."""
    paths = [*ROOT.glob("configs/*.yaml"), *ROOT.glob("examples/**/*.yaml")]
    names = sorted(str(path.relative_to(ROOT)) for path in paths)
    # Files for launchers are no configs.
    return {
        name: load_any(ROOT / name)
        for name in names
        if "/launch/" not in name and not missing_for(name)
    }


def needs_cuda(config: JobConfig) -> bool:
    return config.placement.trainer not in ("auto", "cpu")


def stand_in() -> str:
    """Return a random model with SmolLM2's layers, but two, and its type of weights: so
    a CPU picks the same kernels.
    """
    shape = {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 9, "num_key_value_heads": 3}
    architecture = {"model_type": "llama", "max_position_embeddings": 4096}
    characters = "".join(map(chr, range(32, 127))) + "\n"
    scratch = {
        "characters": characters,
        "has_tool_role": True,
        "architecture": architecture | shape | heads,
    }
    return json.dumps(scratch)


def train(name: str, run_dir: Path, *more: str) -> None:
    config = CONFIGS[name]
    overrides = ["trainer.num_steps=3", "observe.trackers=[]", *more]
    command = [*RUN[:-1], config.command]
    if isinstance(config, RunConfig) and config.critic is not None:
        # Its first steps train no policy.
        overrides.append("critic.warmup_steps=0")
    if config.model.path == SMOLLM2:
        overrides += ["model.path=none", f"model.scratch={stand_in()}"]
        # A token is a character here, and no answer is right.
        overrides += [
            "rollout.max_prompt_tokens=3000",
            "rollout.max_tokens=16",
            "buffer.filter=none",
        ]
    done = ended(popen(ROOT / name, *overrides, command=command, run_dir=run_dir), 500)
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
    lines = (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    assert len(lines) == 3


CONFIGS = shipped()
FITTING = [
    name
    for name, config in CONFIGS.items()
    if not needs_cuda(config) and name not in NEEDS_PACKAGE | NEEDS_PERSON
]


@pytest.mark.extension("scoring", "sft", "tinker", "vllm")
def test_each_config_that_is_left_out_has_its_reason() -> None:
    left_out = {*NEEDS_PACKAGE, *NEEDS_PERSON, *BEFORE}
    assert {name for name in left_out if not missing_for(name)} <= {*CONFIGS}
    assert len(FITTING) >= 14
    for name in FITTING:
        path = CONFIGS[name].model.path
        known = path in (None, SMOLLM2) or name in BEFORE
        assert known, f"{name} needs {path}: give the test a stand-in"


@pytest.mark.slow
@pytest.mark.rotated
@pytest.mark.parametrize("name", FITTING)
def test_a_shipped_config_trains_three_steps(name: str, tmp_path: Path) -> None:
    more = list[str]()
    config = CONFIGS[name]
    if isinstance(config, RunConfig) and config.rollout.engine == "vllm":
        more.append(f"rollout.vllm_python={vllm_python()}")
    if name == "examples/harbor/harbor.yaml":
        need_bubblewrap()
    if name in BEFORE:
        first, key = BEFORE[name]
        train(first, tmp_path / "before")
        more.append(f"{key}={tmp_path / 'before/final'}")
    train(name, tmp_path / "run", *more)
