"""At max_staleness 0 a run is the plain synchronous loop, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from job_runs import CONFIG, read_lines, run, write_config
from safetensors.numpy import load_file
from sync_run import SyncRun

from asyncrl.config import load_config

pytestmark = pytest.mark.slow
NUM_STEPS = CONFIG["trainer"]["num_steps"]


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run directory of the plain loop, which samples one completion after the other."""
    folder = tmp_path_factory.mktemp("reference")
    sync = SyncRun(load_config(write_config(folder)), folder / "run", one_by_one=True)
    try:
        sync.steps()
    finally:
        sync.close()
    return folder / "run"


def differences(one: Path, other: Path) -> list[str]:
    """Where two runs differ: tokens, rewards and losses of every step, and every byte of the final
    weights.
    """
    found = []
    steps = zip(read_lines(one / "trained.jsonl"), read_lines(other / "trained.jsonl"), strict=True)
    for number, (left, right) in enumerate(steps):
        for key in ("trajectories", "loss"):
            if left[key] != right[key]:
                found.append(f"step {number}: {key}")
    weights, others = (
        load_file(one / "final" / "model.safetensors"),
        load_file(other / "final" / "model.safetensors"),
    )
    assert weights.keys() == others.keys()
    found += [f"weights: {name}" for name in weights if weights[name].tobytes() != others[name].tobytes()]
    return found


@pytest.mark.parametrize("num_engines", [1, 2])
def test_a_run_at_max_staleness_0_equals_the_plain_loop_bit_for_bit(
    reference: Path, tmp_path: Path, num_engines: int
) -> None:
    run_dir = tmp_path / "run"
    answer = run(write_config(tmp_path), run_dir, f"rollout.num_engines={num_engines}")
    assert answer.returncode == 0, answer.stderr
    assert len(read_lines(run_dir / "trained.jsonl")) == NUM_STEPS >= 10
    assert differences(reference, run_dir) == []


def test_one_planted_token_makes_the_comparison_fail(reference: Path, tmp_path: Path) -> None:
    sync = SyncRun(load_config(write_config(tmp_path)), tmp_path / "run")
    honest, calls = sync.generate, []

    def with_one_wrong_token(requests: Any) -> Any:
        completions = honest(requests)
        calls.append(len(completions))
        if len(calls) == 5:
            import dataclasses

            first = completions[0]
            wrong = (first.token_ids[0] ^ 1, *first.token_ids[1:])
            completions[0] = dataclasses.replace(first, token_ids=wrong)
        return completions

    sync.generate = with_one_wrong_token  # type: ignore[method-assign]
    try:
        sync.steps()
    finally:
        sync.close()
    found = differences(reference, tmp_path / "run")
    assert "step 4: trajectories" in found
    assert "step 3: trajectories" not in found
    assert any(difference.startswith("weights") for difference in found)
