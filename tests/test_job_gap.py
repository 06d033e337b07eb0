"""A real run reports, step by step, how far each of its engines is from the trainer."""

from __future__ import annotations

from pathlib import Path

import job_runs
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

pytestmark = pytest.mark.slow


def test_each_engine_of_a_run_has_its_own_gap_in_the_metrics_and_in_tensorboard(tmp_path: Path) -> None:
    config = job_runs.write_config(
        tmp_path,
        rollout={"num_engines": 2, "slots": 4},
        trainer={"num_steps": 3, "logprob_gap_limit": 1e-4},
        observe={"tensorboard": True},
    )
    done = job_runs.run(config, tmp_path / "run")
    assert done.returncode == 0, done.stderr
    steps = job_runs.read_lines(tmp_path / "run" / "metrics.jsonl")
    assert len(steps) == 3
    names = [
        f"policy/logprob_gap_{kind}{engine}"
        for kind in ("mean", "max")
        for engine in ("", "/engine-0", "/engine-1")
    ]
    for step in steps:
        assert max(step[name] for name in names) < 1e-4, (
            "float32 on the CPU: engine and trainer compute the same"
        )
        assert step["policy/logprob_gap_max"] == max(
            step["policy/logprob_gap_max/engine-0"], step["policy/logprob_gap_max/engine-1"]
        )
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard")).Reload()
    assert set(names) <= set(events.Tags()["scalars"])
    assert [event.step for event in events.Scalars("policy/logprob_gap_mean/engine-1")] == [
        step["step"] for step in steps
    ]
