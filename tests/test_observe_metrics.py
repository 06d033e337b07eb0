"""Metrics of a batch, totals over a resume, declared metrics and generated pages."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from job_runs import read_lines, write_config
from journal_cases import make_batch

from asyncrl.config import load_config
from asyncrl.job.report import Reporter
from asyncrl.messages.records import Batch, Group, GroupId, Prompt, Trajectory, VersionSpan
from asyncrl.messages.trainer_api import TrainResponse
from asyncrl.observe.console import plain_line
from asyncrl.observe.metrics import GAUGES, SpecialTokens, Totals, batch_metrics, gauge_of
from asyncrl.observe.run_dir import evaluation_metrics
from asyncrl.observe.run_numbers import Steps
from asyncrl.trainer.step_metrics import append_line

DOCS = Path(__file__).parents[1] / "docs"


def test_the_docs_name_only_declared_metrics() -> None:
    kinds = {name.partition("/")[0] for name in GAUGES if "/" in name}
    for page in DOCS.glob("*.md"):
        for name in re.findall(r"`([a-z]+/[a-z_]+)`", page.read_text(encoding="utf-8")):
            assert name.partition("/")[0] not in kinds or gauge_of(name) is not None, (page.name, name)


def trajectory(reward: float, *spans: tuple[int, int, int], **more: Any) -> Trajectory:
    end = max(span[1] for span in spans)
    mask = np.zeros(end, dtype=np.bool_)
    for start, stop, _ in spans:
        mask[start:stop] = True
    return Trajectory(
        token_ids=np.arange(end, dtype=np.int32),
        loss_mask=mask,
        behaviour_logprobs=np.zeros(end, dtype=np.float32),
        version_spans=tuple(VersionSpan(*span) for span in spans),
        reward=reward,
        **{"sample_index": 0, **more},
    )


SPECIAL = SpecialTokens(end_ids=frozenset({9}), stray_ids=frozenset({0, 1}))


def measured(*trajectories: Trajectory, mask_older: bool = False) -> dict[str, float]:
    return batch_metrics(
        Batch(7, (Group(GroupId(0), Prompt("0", ()), trajectories),), 4, mask_older), SPECIAL
    )


@pytest.mark.parametrize(
    ("spans", "mask_older", "oldest", "masked", "trained"),
    [
        (((2, 4, 5), (4, 5, 6)), False, 2, 0.0, 3),
        (((2, 5, 3), (5, 6, 5)), True, 2, 0.75, 1),
        (((2, 5, 3), (5, 6, 5)), False, 4, 0.0, 4),
        (((2, 5, 3),), True, None, 1.0, 0),
    ],
    ids=["young", "masked", "too old in a batch that masks nothing", "nothing in the loss"],
)
def test_masked_tokens_count_only_for_the_length(
    spans: tuple[tuple[int, int, int], ...], mask_older: bool, oldest: int | None, masked: float, trained: int
) -> None:
    metrics = measured(trajectory(1.0, *spans), mask_older=mask_older)
    assert metrics.get("sample/staleness_max") == oldest
    assert (metrics["sample/masked_fraction"], metrics["tokens/trained"]) == (masked, trained)
    assert metrics["sample/length_mean"] == sum(end - start for start, end, _ in spans)


def test_sampled_special_tokens_and_truncated_ends_are_counted() -> None:
    def rollout(index: int, ids: list[int], *, is_truncated: bool) -> Trajectory:
        spans = ((2, len(ids), 5),)
        ids_T = np.array(ids, np.int32)
        return replace(
            trajectory(1.0, *spans, sample_index=index), token_ids=ids_T, is_truncated=is_truncated
        )

    metrics = measured(
        rollout(0, [0, 1, 5, 9], is_truncated=False),  # special tokens only in the prompt
        rollout(1, [5, 5, 1, 9], is_truncated=False),
        rollout(2, [5, 5, 5, 0], is_truncated=True),
        rollout(3, [5, 5, 5, 5], is_truncated=False),  # ended by a stop text
        rollout(4, [5, 5, 5, 9], is_truncated=True),  # ended, and then its agent met a limit
    )
    assert metrics["sample/special_fraction"] == 2 / 5
    assert metrics["sample/unfinished_fraction"] == 1 / 5


def test_each_of_several_tasks_is_measured() -> None:
    of_task = {"a/0/1": (1.0, 0.0), "b/3/2": (0.5, 0.5), "a/1/0": (1.0, 1.0)}
    groups = [
        Group(
            GroupId(number),
            Prompt(prompt_id, ()),
            tuple(trajectory(reward, (2, 4 + number, 7), sample_index=i) for i, reward in enumerate(rewards)),
        )
        for number, (prompt_id, rewards) in enumerate(of_task.items())
    ]
    metrics = batch_metrics(Batch(7, tuple(groups), 4), SPECIAL)
    found = {name: value for name, value in metrics.items() if name.endswith(("/a", "/b"))}
    assert found == {
        **{"reward/mean/a": 0.75, "sample/length_mean/a": 3.0, "sample/truncated_fraction/a": 0.0},
        **{"reward/mean/b": 0.5, "sample/length_mean/b": 3.0, "sample/truncated_fraction/b": 0.0},
    }
    assert all(gauge_of(name) is not None for name in found)
    assert "reward 0.667 (a 0.750, b 0.500)" in plain_line(Steps([metrics | {"step": 1}]), 1, 9, 4)


def test_several_evaluations_have_names_and_common_totals() -> None:
    metrics = {"eval/version": 4, "eval/reward_mean": 0.5, "eval/task/solved": 1.0, "eval/skipped": 2}
    line = {"policy_version": 4, "name": "math", **metrics}
    assert evaluation_metrics(line) == {
        **{"eval/math/version": 4, "eval/math/reward_mean": 0.5, "eval/math/task/solved": 1.0},
        "eval/skipped": 2,
    }
    assert evaluation_metrics({"policy_version": 4, **metrics}) == metrics


def test_a_rollout_with_branches_counts_once() -> None:
    own = {"solved": 1.0, "calls": 3.0}
    main = trajectory(1.0, (2, 4, 5), (7, 9, 6), num_interruptions=2, metrics=own)
    fork = trajectory(1.0, (3, 4, 4), is_truncated=True, branch=1, metrics=own)
    other = trajectory(0.0, (2, 3, 7), sample_index=1, metrics={"solved": 0.0})
    assert measured(main, fork, other) == {
        "reward/mean": 0.5,
        "reward/std": 0.5,
        "reward/equal_fraction": 0.0,
        "sample/staleness_mean": 1.5,
        "sample/staleness_max": 3,
        "sample/length_mean": 3.0,
        "sample/truncated_fraction": 0.5,
        "sample/special_fraction": 0.0,
        "sample/unfinished_fraction": 0.5,
        "sample/masked_fraction": 0.0,
        "sample/interrupted_fraction": 0.5,
        "tokens/sampled": 6,
        "tokens/trained": 6,
        "task/solved": 0.5,
        "task/calls": 3.0,
    }


def test_totals_survive_resumes_and_restarted_sources() -> None:
    totals = Totals()
    totals.starts_from({"tokens": 100, "other": 3})
    assert totals.add({"tokens": 40, "new": 2}) == {"tokens": 140, "new": 2}
    assert totals.add({"tokens": 5}) == {"tokens": 145}
    totals.starts_from({"tokens": 10})
    assert totals.add({"tokens": 5}) == {"tokens": 145}, "what is higher stays"
    decode = [{"engine-0": 4.0, "engine-1": 6.0}, {"engine-1": 7.0}, {"engine-0": 1.0, "engine-1": 8.0}]
    summed = [totals.add({"decode_s": each})["decode_s"] for each in decode]
    assert summed == [10.0, 11.0, 13.0], "engine-0 was started again"


class Rooms(dict[str, float]):
    tokenizer = SimpleNamespace(decode=None)
    special_tokens = SpecialTokens()


def report(reporter: Reporter, step: int, *, rooms: Any = (), **more: Any) -> None:
    answer: Any = TrainResponse(policy_version=step + 1, **{"metrics": {}, **more})
    parts: Any = Rooms(rooms)
    reporter.step(parts, make_batch(step, 2 * step, 2 * step + 1), answer, {})


class CountingReporter(Reporter):
    """One whose rooms are the numbers that they have counted."""

    def _metrics(self, rooms: Any, batch: Any, answer: TrainResponse, _: Any) -> dict[str, float]:
        found = {"step": batch.version + 1, "time_s": 1.0, "reward/mean": 0.5, **answer.metrics}
        return found | self._totals.add(rooms)


@contextmanager
def reporting_to(folder: Path) -> Iterator[Reporter]:
    config = load_config(write_config(folder, observe={"console": "plain", "samples_per_step": 0}))
    reporter = CountingReporter(config, folder, "test")
    yield reporter
    reporter._timeline.close()


def test_a_resumed_run_continues_its_totals(tmp_path: Path) -> None:
    for step in range(5):
        counts = {"tokens/generated": 100 * (step + 1), "rollout/retried": step}
        append_line(tmp_path / "metrics.jsonl", {"step": step + 1, "time_s": 1.0} | counts)
    with reporting_to(tmp_path) as reporter:
        # batches 3, 4 and 5 were taken; the run was killed before the line of step 6
        reporter.resumes(3, {"tokens/generated": 650, "rollout/filtered": 6})
        for step in (3, 4, 5):
            report(reporter, step, rooms={"tokens/generated": 0, "rollout/retried": 0})
        reporter.training_starts()
        report(reporter, 6, rooms={"tokens/generated": 50, "rollout/retried": 2})
    written = read_lines(tmp_path / "metrics.jsonl")
    assert [line["tokens/generated"] for line in written[3:]] == [400, 500, 650, 700]
    assert [line["rollout/retried"] for line in written[3:]] == [3, 4, 4, 6]


def test_a_skipped_step_is_reported_with_its_groups(
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
    said, warning = capsys.readouterr().out, "WARNING: 1 update skipped in step 2: not finite"
    assert "step  3/12  reward 0.500  2 updates skipped: not finite" in said
    assert said.count(f"{warning}, groups 2, 3") == said.count("WARNING") == 1
    assert "in step 3: not finite, groups 4, 5" in caplog.text, "each is in the controller's log"
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert len(summary["warnings"]) == 1
    assert (
        "2 updates skipped because loss or gradient was not finite (first step 2, last step 3)"
        in " ".join(summary["health"])
    )
