"""The script behind docs/results/objectives.md, on numbers whose answer is known."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import objective_curves as script
import pytest
from objective_report import Pair, Run, Setting, comparisons, difference, settings_table

from asyncrl.algorithms.registry import resolve
from asyncrl.config import load_config

LABELS = {"a": "A", "b": "B"}


def make_run(
    held_out: float | None = 0.5, reward: float = 0.5, *, num_steps: int = 20, filtered_share: float = 0.0
) -> Run:
    return Run(
        rewards=[0.0] * (num_steps - 2) + [reward - 0.1, reward + 0.1],
        ess=[0.5, 1.0],
        clip_fraction=[],
        staleness=[2.0],
        times_s=[1.0, 30.0],
        held_out=held_out,
        filtered_share=filtered_share,
    )


def seeds(*held_out: float) -> dict[int, Run]:
    return {seed: make_run(value, value) for seed, value in enumerate(held_out)}


def test_every_planned_run_has_a_valid_config_and_a_directory_of_its_own() -> None:
    planned = script.plan(list(script.VARIANTS), [0, 1, 2])
    assert len({run.name for run in planned}) == len(planned) == 7 * 2 * 3
    for run in planned:
        config = load_config(script.CONFIG, run.overrides(160))
        resolve(config.algorithm)  # refuses what corrects twice
        assert (config.trainer.num_steps, config.seed, config.trainer.num_groups) == (
            160,
            run.seed,
            script.NUM_GROUPS,
        )
        assert config.buffer.look_ahead == config.buffer.max_staleness == run.setting.max_staleness
        assert (config.buffer.filter == "equal_rewards") == (run.setting.variant in script.FILTERED)
        assert config.eval is not None
        assert config.eval.every == 160
    drawn = {variant for variants in script.COLUMNS.values() for variant in variants}
    assert drawn == set(script.VARIANTS), "every objective is drawn"
    assert {name for a, b, _ in script.QUESTIONS for name in (a, b)} == set(script.VARIANTS), (
        "and asked about"
    )


def test_no_correction_and_tis_are_what_they_are_called() -> None:
    recipes = {
        name: resolve(load_config(script.CONFIG, script.Planned(Setting(name, 8), 0).overrides(6)).algorithm)
        for name in script.VARIANTS
    }
    assert (recipes["naive"].ratio, recipes["naive"].correction) == ("proximal", "none")
    assert (recipes["grpo"].ratio, recipes["grpo"].correction) == ("behaviour", "none")
    assert all(
        (recipe.ratio, recipe.correction) == ("proximal", "tis")
        for name, recipe in recipes.items()
        if "tis" in name
    )


def test_a_difference_counts_if_it_is_larger_than_its_interval_over_seeds() -> None:
    found = difference([0.1, 0.2, 0.3], [0.5, 0.6, 0.7])
    assert found.value == pytest.approx(0.4)
    assert found.needed == pytest.approx(2.776 * 0.1 * (2 / 3) ** 0.5)
    assert found.counts
    assert not difference([0.1, 0.2, 0.3], [0.3, 0.4, 0.5]).counts
    assert not difference([0.5, 0.5], [0.5, 0.5]).counts, "the same numbers"
    assert difference([0.1], [0.9]).needed is None
    assert not difference([0.1], [0.9]).counts


def test_the_words_name_what_counts_and_how_many_do_by_chance() -> None:
    runs = {
        Setting("a", 0): seeds(0.1, 0.2, 0.3),
        Setting("b", 0): seeds(0.5, 0.6, 0.7),
        Setting("b", 8): seeds(0.5, 0.6, 0.8),
    }
    pairs = [
        Pair(Setting("a", 0), Setting("b", 0), "is b better"),
        Pair(Setting("b", 0), Setting("b", 8), "what age costs"),
        Pair(Setting("a", 0), Setting("a", 8), "was not run"),
    ]
    said = comparisons(runs, pairs, LABELS, frozenset())
    assert (
        "| B at 0 against A at 0 | is b better | **+0.400 (needs 0.227)** | **+0.400 (needs 0.227)** |"
        in said
    )
    assert "of 2 comparisons 0.1 are expected to by chance alone" in said
    assert "- B at 0 against A at 0: higher by 0.400 (0.227 needed)." in said
    assert "- B at 8" not in said
    assert "The other 1 are not" in said
    assert "was not run" not in said


def test_where_nothing_differs_the_words_say_so_and_one_seed_says_nothing() -> None:
    pairs = [Pair(Setting("a", 0), Setting("b", 0), "is b better")]
    alike = {Setting("a", 0): seeds(0.1, 0.5), Setting("b", 0): seeds(0.2, 0.6)}
    assert "**None of the 1 differences in held-out reward is larger" in comparisons(
        alike, pairs, LABELS, frozenset()
    )
    alone = {Setting("a", 0): seeds(0.1), Setting("b", 0): seeds(0.9)}
    assert "Nothing can be said of differences" in comparisons(alone, pairs, LABELS, frozenset())
    unheld = {Setting("a", 0): {0: make_run(None), 1: make_run(None)}, Setting("b", 0): seeds(0.9, 0.9)}
    assert "Nothing can be said of differences" in comparisons(unheld, pairs, LABELS, frozenset())


def test_training_rewards_with_and_without_the_filter_are_not_compared() -> None:
    runs = {Setting("a", 0): seeds(0.1, 0.2), Setting("b", 0): seeds(0.8, 0.9)}
    said = comparisons(runs, [Pair(Setting("a", 0), Setting("b", 0), "?")], LABELS, frozenset({"b"}))
    assert "| not comparable |" in said


def test_the_table_has_means_over_seeds_and_the_last_tenth_of_the_steps() -> None:
    runs = {Setting("a", 8): {0: make_run(0.4, 0.6), 1: make_run(0.6, 0.8, filtered_share=0.5)}}
    line = settings_table(runs, LABELS).splitlines()[-1]
    assert line == "| A | 8 | 2.0 | 0.500 ± 0.141 | 0.600, 0.800 | 0.700 ± 0.141 | 0.750 | - | 25% | 30 |"


def write_run(
    root: Path, run: script.Planned, *, state: str = "done", held_out: float = 0.5, num_steps: int = 4
) -> None:
    folder = root / run.name
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text("seed: 0\n")
    steps = [
        {"step": n, "time_s": 1.0 + n, "reward/mean": 0.1 * n, "policy/ess": 0.9, "rollout/filtered": 8 * n}
        for n in range(num_steps)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps))
    (folder / "summary.json").write_text(
        json.dumps({"state": state, "evaluation": {"eval/reward_mean": held_out}})
    )


def test_it_draws_what_is_done_and_tells_what_failed(tmp_path: Path) -> None:
    root, out = tmp_path / "runs", tmp_path / "out"
    for run in script.plan(["grpo", "dapo"], [0, 1]):
        is_failed = run.name == "dapo-max_staleness_8-seed1"
        write_run(root, run, state="failed" if is_failed else "done", held_out=0.3 + 0.01 * run.seed)
    assert (
        script.main([str(root), "--only", "grpo", "dapo", "--seeds", "0", "1", "--out", str(out), "--draw"])
        == 0
    )
    assert (out / "objectives.png").read_bytes().startswith(b"\x89PNG")
    rows = list(csv.DictReader((out / "objectives.csv").read_text().splitlines()))
    assert len(rows) == 4 * 4
    assert list(rows[3].values()) == ["grpo", "0", "2", "3", "0.3", "0.3", "0.3", "0.9", ""]
    page = (out / "objectives.md").read_text()
    assert "Failed and left out: dapo-max_staleness_8-seed1." in page
    assert "| GRPO | 0 | - | 0.305 ± 0.007 | 0.300, 0.300 | 0.300 ± 0.000 | 0.900 | - | 43% | 4 |" in page


def test_runs_that_are_done_or_failed_are_not_made_again_and_no_runs_are_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    planned = script.plan(["grpo"], [0])
    for run, state in zip(planned, ("done", "failed"), strict=True):
        write_run(tmp_path, run, state=state)
    script.run_all(planned, tmp_path, num_steps=4)  # would take seconds and replace the files otherwise
    assert "2 runs, 2 of them are there" in capsys.readouterr().out
    (tmp_path / planned[1].name / "metrics.jsonl").write_text("")
    assert script.state_of(tmp_path / planned[1].name) == "unfinished", "it never trained: it is made again"
    with pytest.raises(SystemExit, match=r"has 4 steps, not 160.\n  Way out: another RUNS_DIR"):
        script.run_all(planned, tmp_path, num_steps=160)
    with pytest.raises(SystemExit, match="holds no run that is done"):
        script.read_all(script.plan(["dapo"], [0]), tmp_path)
