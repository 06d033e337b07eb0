"""The script behind objectives.md in docs/results/, on numbers that are known."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path

import objective_curves as script
import pytest
from objective_report import Pair, Run, Setting, comparisons, difference, settings_table

from asyncrl.algorithms.registry import resolve
from asyncrl.config import load_config

LABELS = {"a": "A", "b": "B"}


def write_steps(folder: Path, rewards: list[float]) -> None:
    folder.mkdir(parents=True)
    lines = [
        {"step": n, "time_s": n, "reward/mean": reward, "policy/ess": 0.9, "rollout/filtered": 8 * n}
        for n, reward in enumerate(rewards, start=1)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def seeds(*rewards: float) -> dict[int, Run]:
    """Runs that end with these rewards, on the prompts of the training and on others."""
    return {
        seed: Run([0.0] * 18 + [end - 0.1, end + 0.1], [0.5, 1.0], [], [2.0], [1.0, 30.0], end, 0.0)
        for seed, end in enumerate(rewards)
    }


def test_every_planned_run_has_a_valid_config_and_a_directory_of_its_own() -> None:
    planned = script.plan(list(script.VARIANTS), [0, 1, 2], 160)
    assert len({run.name for run in planned}) == len(planned) == 7 * 2 * 3
    for run in planned:
        config = load_config(run.config, run.settings)
        recipe = resolve(config.algorithm)  # refuses what corrects twice
        assert (config.trainer.num_steps, config.seed) == (160, run.seed)
        assert config.buffer.look_ahead == config.buffer.max_staleness == run.setting.max_staleness
        assert (config.buffer.filter == "equal_rewards") == (run.setting.variant in script.FILTERED)
        assert ("tis" in run.setting.variant) <= (recipe.correction == "tis")
    drawn = {variant for variants in script.COLUMNS.values() for variant in variants}
    asked = {name for a, b, _ in script.QUESTIONS for name in (a, b)}
    assert drawn == asked == set(script.VARIANTS), "every objective is drawn and asked about"


def test_a_difference_counts_if_it_is_larger_than_its_interval_over_seeds() -> None:
    found, alone = difference([0.1, 0.2, 0.3], [0.5, 0.6, 0.7]), difference([0.1], [0.9])
    assert (found.value, found.needed) == pytest.approx((0.4, 2.776 * 0.1 * (2 / 3) ** 0.5))
    assert found.counts
    assert not difference([0.1, 0.2, 0.3], [0.3, 0.4, 0.5]).counts
    assert (alone.needed, alone.counts) == (None, False)


def test_the_words_name_what_counts_and_how_many_do_by_chance() -> None:
    a, b, old_b = Setting("a", 0), Setting("b", 0), Setting("b", 8)
    runs = {a: seeds(0.1, 0.2, 0.3), b: seeds(0.5, 0.6, 0.7), old_b: seeds(0.5, 0.6, 0.8)}
    better = Pair(a, b, "is b better")
    pairs = [better, Pair(b, old_b, "what age costs"), Pair(a, Setting("a", 8), "was not run")]
    said = comparisons(runs, pairs, LABELS, frozenset())
    row = "| B at 0 against A at 0 | is b better | **+0.400 (needs 0.227)** | **+0.400 (needs 0.227)** |"
    for words in (row, "of 2 comparisons 0.1 are expected", "- B at 0 against A at 0: higher by 0.400"):
        assert words in said
    assert not re.search("- B at 8|was not run", said)
    assert "| not comparable |" in comparisons(runs, [better], LABELS, frozenset({"b"})), "by its filter"
    alone = comparisons({a: seeds(0.1), b: seeds(0.9)}, [better], LABELS, frozenset())
    assert "Nothing can be said of differences" in alone


def test_the_table_has_means_over_seeds_and_the_last_tenth_of_the_steps() -> None:
    line = settings_table({Setting("a", 8): seeds(0.4, 0.6)}, LABELS).splitlines()[-1]
    assert line == "| A | 8 | 2.0 | 0.500 ± 0.141 | 0.400, 0.600 | 0.500 ± 0.141 | 0.750 | - | 0% | 30 |"


def test_what_is_done_is_drawn_and_not_made_again_and_what_failed_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root, out, planned = tmp_path / "runs", tmp_path / "out", script.plan(["grpo", "dapo"], [0, 1], 4)
    for run in planned:
        write_steps(root / run.name, [0.0, 0.1, 0.2, 0.3])
        (root / run.name / "config.yaml").write_text("seed: 0\n")
        state = "failed" if run.name == "dapo-max_staleness_8-seed1" else "done"
        summary = {"state": state, "evaluation": {"eval/reward_mean": 0.3 + 0.01 * run.seed}}
        (root / run.name / "summary.json").write_text(json.dumps(summary))
    script.run_all(planned, root)  # would take seconds and replace the files otherwise
    assert "8 runs, 8 of them are there" in capsys.readouterr().out
    arguments = ["--only", "grpo", "dapo", "--seeds", "0", "1", "--out", str(out), "--draw"]
    assert script.main([str(root), *arguments]) == 0
    assert (out / "objectives.png").read_bytes().startswith(b"\x89PNG")
    assert len(list(csv.DictReader((out / "objectives.csv").read_text().splitlines()))) == 4 * 4
    page = (out / "objectives.md").read_text()
    assert "Failed and left out: dapo-max_staleness_8-seed1." in page
    assert "| GRPO | 0 | - | 0.305 ± 0.007 | 0.300, 0.300 |" in page
    (root / planned[1].name / "metrics.jsonl").write_text("")
    assert script.state_of(root / planned[1].name) == "unfinished", "it never trained: it is made again"
    with pytest.raises(SystemExit, match=r"has 4 steps, not 160.\n  Way out: another RUNS_DIR"):
        script.run_all(script.plan(["grpo"], [0], 160), root)
