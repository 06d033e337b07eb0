"""Counters of the whole run go on where a killed process left them, and a step that was skipped is told in
all places.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from job_runs import read_lines, write_config
from journal_cases import make_batch

from asyncrl.config import RunConfig, load_config
from asyncrl.journal.read import Counted
from asyncrl.messages.records import StepReport
from asyncrl.observe.step_metrics import Totals
from asyncrl.rollouts.evaluator import EvalResult
from asyncrl.run.report import Reporter


def make_config(folder: Path, **sections: Any) -> RunConfig:
    return load_config(write_config(folder, **sections))


def test_a_total_goes_on_from_where_it_was_and_over_a_source_that_begins_anew() -> None:
    totals = Totals()
    totals.starts_from({"tokens": 100, "other": 3})
    assert totals.add({"tokens": 0}) == {"tokens": 100}
    assert totals.add({"tokens": 40, "new": 2}) == {"tokens": 140, "new": 2}
    assert totals.add({"tokens": 40}) == {"tokens": 140}
    assert totals.add({"tokens": 5}) == {"tokens": 145}
    totals.starts_from({"tokens": 10})
    assert totals.add({"tokens": 5}) == {"tokens": 145}, "what is higher stays"
    decode = [{"engine-0": 4.0, "engine-1": 6.0}, {"engine-1": 7.0}, {"engine-0": 1.0, "engine-1": 8.0}]
    assert [totals.add({"decode_s": each})["decode_s"] for each in decode] == [10.0, 11.0, 13.0], (
        "engine-0 was started again"
    )


def report(reporter: Reporter, step: int, *, rooms: Any = None, **more: Any) -> None:
    reporter.step(
        rooms,
        make_batch(step, 2 * step, 2 * step + 1),
        StepReport(policy_version=step + 1, **{"metrics": {}, **more}),
        step_s=1.0,
    )


class CountingReporter(Reporter):
    """One whose rooms are the numbers that they have counted."""

    def _step_metrics(self, rooms: Any, batch: Any, answer: StepReport, step_s: float) -> dict[str, float]:
        return {
            "step": batch.version,
            "time_s": step_s,
            "reward/mean": 0.5,
            **answer.metrics,
            **self._totals.add(rooms or {}),
        }


@contextmanager
def reporting_to(folder: Path) -> Iterator[Reporter]:
    reporter = CountingReporter(make_config(folder, observe={"console": "plain"}), folder, "test")
    reporter._is_resumed = True  # else it asks the buffer
    yield reporter
    reporter._recorder.close()


def test_a_resumed_run_counts_on_from_its_lines_and_from_its_journal_where_a_line_is_missing(
    tmp_path: Path,
) -> None:
    lines = [
        {"step": step, "time_s": 1.0, "tokens/generated": 100 * (step + 1), "rollout/retried": step}
        for step in range(5)
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    counted = [Counted(generated=tokens, filtered=tokens // 100) for tokens in (399, 499, 610, 650)]
    with reporting_to(tmp_path) as reporter:
        reporter.resumes(
            3, counted
        )  # batches 3, 4 and 5 were taken; the run was killed before the line of step 5
        for step in (3, 4, 5):
            report(reporter, step, rooms={"tokens/generated": 0, "rollout/retried": 0})
        reporter.training_starts()
        report(reporter, 6, rooms={"tokens/generated": 50, "rollout/retried": 2})
    written = {
        line["step"]: (line["tokens/generated"], line["rollout/retried"])
        for line in read_lines(tmp_path / "metrics.jsonl")[3:]
    }
    assert written == {3: (400, 3), 4: (500, 4), 5: (610, 4), 6: (700, 6)}


def test_evaluations_that_were_skipped_are_counted_over_a_resume(tmp_path: Path) -> None:
    first = {
        "policy_version": 2,
        "eval/version": 2,
        "eval/seconds": 1.0,
        "eval/skipped": 3,
        "eval/abandoned": 1,
        "eval/abandoned_calls": 7,
    }
    (tmp_path / "eval.jsonl").write_text(json.dumps(first) + "\n")
    with reporting_to(tmp_path) as reporter:
        reporter.resumes(2, [])
        reporter.evaluated(
            EvalResult(4, [], num_failed=3, last_failure="no", num_skipped=2, num_abandoned_calls=1)
        )
    last = read_lines(tmp_path / "eval.jsonl")[-1]
    assert (last["eval/skipped"], last["eval/abandoned"], last["eval/abandoned_calls"]) == (5, 1, 8)


def test_a_skipped_step_has_no_loss_and_is_told_with_its_groups(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    skipped = {"metrics": {"trainer/skipped_steps": 1.0}, "not_finite": ("policy/loss", "policy/grad_norm")}
    with reporting_to(tmp_path) as reporter:
        report(reporter, 0, metrics={"trainer/skipped_steps": 0.0, "policy/loss": 0.5})
        report(reporter, 1, **skipped)
        report(reporter, 2, **skipped)
        reporter.finish("interrupted")
    first, second, _ = read_lines(tmp_path / "metrics.jsonl")
    assert (first["policy/loss"], "not_finite" in first) == (0.5, False)
    assert ("policy/loss" in second, second["not_finite"]) == (False, ["policy/loss", "policy/grad_norm"])
    said = capsys.readouterr().out
    assert "step  2/12  reward 0.500  step skipped: not finite (batch 1, counted from 0)" in said
    assert (
        said.count("WARNING: step skipped: not finite (batch 1, counted from 0), groups 2, 3")
        == said.count("WARNING")
        == 1
    )
    assert "step skipped: not finite (batch 2, counted from 0), groups 4, 5" in caplog.text, (
        "each is in the controller's log"
    )
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (summary["num_skipped_steps"], len(summary["warnings"])) == (2, 1)
    assert "in 2 optimizer steps (of batches 1, 2, counted from 0)" in " ".join(summary["sentences"])
