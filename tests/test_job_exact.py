"""A run at max_staleness 0 equals the plain synchronous loop bit for bit."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
from conftest import NUM_STEPS
from crash_fuzz import differences, promise_of
from job_runs import read_lines
from resume_checker import read_evidence, violations
from sync_run import SyncRun
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from asyncrl.config import load_config
from asyncrl.messages.records import Completion

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def play(
    config: Path, run_dir: Path, *overrides: str, spoil: Callable[[int, list[Completion]], None] | None = None
) -> Path:
    """The run directory of the plain loop. Completions of its first steps are sampled one after the other."""
    sync = SyncRun(load_config(config, overrides), run_dir)
    honest = sync.generate

    def generate(requests: Sequence[tuple[Sequence[int], int]]) -> list[Completion]:
        sync.one_by_one = sync.trainer.policy_version < 3
        completions = honest(requests)
        if spoil is not None:
            spoil(sync.trainer.policy_version, completions)
        return completions

    sync.generate = generate  # type: ignore[method-assign]
    try:
        sync.steps()
    finally:
        sync.close()
    return run_dir


def test_on_policy_run_equals_the_plain_loop_bit_for_bit(whole: Path, tmp_path: Path) -> None:
    reference = play(whole / "config.yaml", tmp_path / "reference")
    assert len(read_lines(whole / "trained.jsonl")) == NUM_STEPS
    assert differences(reference, whole, of_metrics=False) == []


def test_one_planted_token_makes_the_comparison_fail(whole: Path, tmp_path: Path) -> None:
    def spoil(version: int, completions: list[Completion]) -> None:
        if version == 2 and len(completions) == 16:
            first = completions[0]
            wrong = (first.token_ids[0] ^ 1, *first.token_ids[1:])
            completions[0] = replace(first, token_ids=wrong)

    spoilt = play(
        whole / "config.yaml",
        tmp_path / "spoilt",
        "trainer.num_steps=3",
        "trainer.logprob_gap_limit=none",
        spoil=spoil,
    )
    found = differences(spoilt, whole, of_metrics=False)
    assert "step 2: trajectories" in found
    assert "step 1: trajectories" not in found
    assert any(difference.startswith("weights") for difference in found)


def test_finished_run_leaves_whole_files(whole: Path, on_policy: Path) -> None:
    assert violations(read_evidence(whole), promise_of(on_policy), num_steps=NUM_STEPS) == []
    summary = json.loads((whole / "summary.json").read_text())
    assert (summary["state"], summary["warnings"]) == ("done", [])
    assert (whole / "reward.png").is_file()
    samples = read_lines(whole / "samples.jsonl")
    kinds = ("best", "worst", "random")
    assert [(one["step"], one["kind"]) for one in samples] == [*product(range(1, NUM_STEPS + 1), kinds)]
    assert all(0 <= one["logprob_gap"] < 1e-4 and one["staleness"] == 0 for one in samples)
    assert "random sample of step 1: reward " in (whole.parent / "said.txt").read_text()
    events = EventAccumulator(str(whole / "tensorboard")).Reload()
    assert events.Tags()["tensors"] == [f"samples/{kind}" for kind in kinds]
    assert (whole / "final" / "config.json").is_file()
    assert (whole / "checkpoints" / f"step_{NUM_STEPS}" / "manifest.json").is_file()
