"""Whether a directory holds a run to go on with, from where, and which settings may have changed
meanwhile.
"""

from __future__ import annotations

import asyncio
import json
import math
import shlex
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from job_runs import write_config
from typer.testing import CliRunner

from asyncrl.checkpoints.folder import Checkpoints
from asyncrl.cli import app
from asyncrl.config import RunConfig, load_config, run_config_yaml
from asyncrl.errors import ConfigError
from asyncrl.journal.journal import Journal
from asyncrl.messages.records import GroupId, Prompt, Ticket
from asyncrl.run import loop as job
from asyncrl.run.resume import (
    FREE_KEYS,
    FREE_SECTIONS,
    ResumeMode,
    _flat,
    as_resume_mode,
    changed_keys,
    find_resume,
)


def make_config(folder: Path, **sections: Any) -> RunConfig:
    folder.mkdir(parents=True, exist_ok=True)
    return load_config(write_config(folder, **sections))


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """Of a run that was killed before its first checkpoint."""
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "config.yaml").write_text(run_config_yaml(make_config(tmp_path / "first")))
    asyncio.run(admit_one(folder))
    return folder


async def admit_one(run_dir: Path) -> None:
    journal = Journal.open(run_dir / "journal.sqlite", run_id="r")
    journal.admitted_nowait(Ticket(GroupId(0), 0), Prompt("0/0", ()))
    await journal.aclose()


def save(run_dir: Path, config: RunConfig, version: int) -> Path:
    checkpoints = Checkpoints(run_dir, config.checkpoint)
    pending = checkpoints.begin()
    pending.trainer_dir.mkdir()
    (pending.trainer_dir / "weights").write_text(str(version))
    return checkpoints.finish(pending, version, {"num_drawn": version})


# ---- modes


def test_a_start_that_failed_before_the_first_group_may_be_made_again_with_other_settings(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "config.yaml").write_text(run_config_yaml(make_config(tmp_path / "first")))
    (folder / "run.id").write_text("r")
    corrected = make_config(tmp_path / "now", trainer={"learning_rate": 0.5})
    assert find_resume(folder, corrected, "auto") is None
    asyncio.run(open_alone(folder))
    assert find_resume(folder, corrected, "auto") is None
    asyncio.run(admit_one(folder))
    with pytest.raises(ConfigError, match="trainer.learning_rate"):
        find_resume(folder, corrected, "auto")


async def open_alone(run_dir: Path) -> None:
    await Journal.open(run_dir / "journal.sqlite", run_id="r").aclose()


def test_a_new_directory_is_a_new_run_unless_there_must_be_one(tmp_path: Path) -> None:
    config = make_config(tmp_path / "now")
    assert find_resume(tmp_path / "new", config, "auto") is None
    assert find_resume(tmp_path / "new", config, "never") is None
    with pytest.raises(ConfigError, match="holds no run"):
        find_resume(tmp_path / "new", config, "must")
    (tmp_path / "config.yaml").write_text("precious")
    with pytest.raises(ConfigError, match=r"holds a config\.yaml that no run has written"):
        find_resume(tmp_path, config, "auto")


def test_a_directory_with_a_run_is_gone_on_with_or_refused(run_dir: Path, tmp_path: Path) -> None:
    config = make_config(tmp_path / "now")
    for mode in ("auto", "must"):
        point = find_resume(run_dir, config, as_resume_mode(mode))
        assert point is not None
        assert (point.checkpoint, point.version, point.told) == (None, 0, ())
    with pytest.raises(ConfigError, match="holds a run already") as caught:
        find_resume(run_dir, config, "never")
    assert "--run-dir" in caught.value.way_out


@pytest.mark.parametrize("mode", ["auto", "never", "must"])
def test_a_run_whose_config_was_deleted_is_not_taken_for_a_new_one(
    run_dir: Path, tmp_path: Path, mode: str
) -> None:
    (run_dir / "config.yaml").rename(tmp_path / "config.yaml")
    with pytest.raises(ConfigError, match=r"holds a run without its config\.yaml") as caught:
        find_resume(run_dir, make_config(tmp_path / "now"), as_resume_mode(mode))
    assert "put back" in caught.value.way_out
    (tmp_path / "config.yaml").rename(run_dir / "config.yaml")
    assert find_resume(run_dir, make_config(tmp_path / "now"), "auto") is not None


def test_a_mode_that_is_not_known_is_refused() -> None:
    with pytest.raises(ConfigError, match="--resume always is not known; it is auto, never or must"):
        as_resume_mode("always")


def test_the_newest_whole_checkpoint_is_taken_and_a_damaged_one_is_named(
    run_dir: Path, tmp_path: Path
) -> None:
    config = make_config(tmp_path / "now")
    save(run_dir, config, 50)
    damaged = save(run_dir, config, 100) / "trainer" / "weights"
    point = find_resume(run_dir, config, "auto")
    assert point is not None
    assert (point.version, point.told) == (100, ())
    damaged.write_text("101")
    point = find_resume(run_dir, config, "auto")
    assert point is not None
    assert point.checkpoint is not None
    assert (point.version, point.checkpoint.controller) == (50, {"num_drawn": 50})
    (told,) = point.told
    assert "step_100" in told
    assert [found.folder.name for found in point.damaged] == ["step_100"]
    assert (run_dir / "checkpoints" / "step_100").exists(), "set aside once the run goes on"


def finish(run_dir: Path, config: RunConfig, state: str) -> None:
    """summary.json, as far as it is read again."""
    summary = {"state": state, "why": "", "num_steps": config.trainer.num_steps}
    (run_dir / "summary.json").write_text(json.dumps(summary))


@pytest.mark.parametrize("schedule", ["constant", "linear"])
def test_a_run_that_is_done_is_gone_on_with_by_the_command_that_it_says(
    run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, schedule: str
) -> None:
    config = make_config(tmp_path / "now", trainer={"schedule": schedule})
    (run_dir / "config.yaml").write_text(run_config_yaml(config))
    finish(run_dir, config, "done")
    with pytest.raises(ConfigError, match="is done, after trainer.num_steps=12") as caught:
        find_resume(run_dir, config, "auto")

    def only_looks(
        config: RunConfig, run_dir: Path, *, name: str, resume: ResumeMode, allow_change: Sequence[str]
    ) -> int:
        assert find_resume(run_dir, config, resume, allow_change) is not None
        assert config.trainer.num_steps == 24
        return 0

    monkeypatch.setattr(job, "run_job", only_looks)
    program, *arguments = shlex.split(caught.value.way_out.split("`")[1])
    assert program == "asyncrl"
    answer = CliRunner().invoke(app, arguments)
    assert (answer.exit_code, answer.exception) == (0, None), answer.output


@pytest.mark.parametrize("state", ["interrupted", "failed"])
def test_a_run_that_was_cut_off_after_its_last_step_is_gone_on_with(
    run_dir: Path, tmp_path: Path, state: str
) -> None:
    config = make_config(tmp_path / "now")
    finish(run_dir, config, state)
    assert find_resume(run_dir, config, "auto") is not None


# ---- what may change


def test_all_that_was_changed_is_listed_with_both_values_and_the_flags_to_accept_it(
    run_dir: Path, tmp_path: Path
) -> None:
    config = make_config(
        tmp_path / "now",
        trainer={"learning_rate": 0.1},
        rollout={"max_tokens": 20},
        observe={"heartbeat_s": 99.0},
    )
    with pytest.raises(ConfigError) as caught:
        find_resume(run_dir, config, "auto")
    text = str(caught.value)
    assert "trainer.learning_rate: 0.003 -> 0.1" in text
    assert "rollout.max_tokens: 24 -> 20" in text
    assert "heartbeat_s" not in text
    assert "--allow-change rollout.max_tokens --allow-change trainer.learning_rate" in caught.value.way_out
    assert caught.value.exit_code == 2


@pytest.mark.parametrize("allowed", [["trainer.learning_rate", "rollout.max_tokens"], ["trainer", "rollout"]])
def test_what_is_named_may_change_by_key_or_by_section(
    run_dir: Path, tmp_path: Path, allowed: list[str]
) -> None:
    config = make_config(tmp_path / "now", trainer={"learning_rate": 0.1}, rollout={"max_tokens": 20})
    point = find_resume(run_dir, config, "auto", allowed)
    assert point is not None
    assert [text for text in point.told if text.startswith("goes on with")] == [
        "goes on with rollout.max_tokens: 24 -> 20",
        "goes on with trainer.learning_rate: 0.003 -> 0.1",
    ]
    with pytest.raises(ConfigError, match="learning_rate") as caught:
        find_resume(run_dir, config, "auto", [name for name in allowed if not name.startswith("trainer")])
    assert "max_tokens" not in str(caught.value)


@pytest.mark.parametrize(
    "sections",
    [
        {"seed": {}},
        {"buffer": {"max_staleness": 2}},
        {"task": {"size": 201}},
        {"task": {"args": {"length": 3}}},
        {"rollout": {"group_size": 8}},
        {"algorithm": {"advantage": "rloo"}},
        {"trainer": {"lora": {"rank": 4}}},
        {"trainer": {"num_groups": 5}},
    ],
)
def test_what_alters_what_is_computed_may_not(
    run_dir: Path, tmp_path: Path, sections: dict[str, Any]
) -> None:
    if "seed" in sections:
        path = write_config(tmp_path)
        path.write_text(path.read_text().replace("seed: 7", "seed: 8"))
        config = load_config(path)
    else:
        config = make_config(tmp_path / "now", **sections)
    with pytest.raises(ConfigError, match="was started with other settings") as caught:
        find_resume(run_dir, config, "auto")
    section = next(iter(sections))
    assert find_resume(run_dir, config, "auto", [section]) is not None
    assert section in str(caught.value)


def test_with_a_schedule_that_ends_the_number_of_steps_is_part_of_every_learning_rate(
    run_dir: Path, tmp_path: Path
) -> None:
    before = make_config(tmp_path / "before", trainer={"schedule": "linear"})
    (run_dir / "config.yaml").write_text(run_config_yaml(before))
    longer = make_config(tmp_path / "now", trainer={"schedule": "linear", "num_steps": 20})
    with pytest.raises(ConfigError, match="trainer.num_steps: 12 -> 20"):
        find_resume(run_dir, longer, "auto")


def test_model_path_is_a_place_only_while_it_is_known_what_lay_there(tmp_path: Path) -> None:
    before, now = (
        make_config(tmp_path / name, model={"path": f"some/{name}", "scratch": None})
        for name in ("before", "now")
    )
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    (run_dir / "config.yaml").write_text(run_config_yaml(before))
    asyncio.run(admit_one(run_dir))
    with pytest.raises(ConfigError, match="model.path"):
        find_resume(run_dir, now, "auto")
    (run_dir / "model.json").write_text("{}")
    assert find_resume(run_dir, now, "auto") is not None


def test_every_key_that_may_change_is_a_key() -> None:
    sections = {
        name: getattr(field.annotation, "model_fields", {}) for name, field in RunConfig.model_fields.items()
    }
    free = {f"{section}.{key}" for section, keys in FREE_KEYS.items() for key in keys.split()}
    assert free <= {f"{name}.{key}" for name, keys in sections.items() for key in keys}
    assert set(FREE_SECTIONS) <= set(sections)


Values = st.recursive(
    st.none() | st.integers(0, 2) | st.lists(st.integers(0, 1), max_size=2),
    lambda inner: st.dictionaries(st.sampled_from(("a", "b", "1", 1, "a.b")), inner),
)


@given(
    one=st.dictionaries(st.sampled_from("abc"), Values), other=st.dictionaries(st.sampled_from("abc"), Values)
)
def test_two_configs_are_flat_alike_only_if_they_are_equal(
    one: dict[str, Any], other: dict[str, Any]
) -> None:
    assert (_flat(one) == _flat(other)) == (one == other)


# ---- files


@pytest.mark.parametrize(
    ("then", "now"),
    [
        ({1: 0.5}, {"1": 0.5}),
        (1, "1"),
        (1, True),
        (1, 1.0),
        (math.inf, None),
        (date(2024, 1, 1), "2024-01-01"),
        ({"a.b": 1}, {"a": {"b": 1}}),
    ],
)
def test_settings_that_only_look_alike_have_changed_and_equal_ones_have_not(
    tmp_path: Path, then: Any, now: Any
) -> None:
    before, after = (make_config(tmp_path, task={"args": {"x": value}}) for value in (then, now))
    assert changed_keys(before, after), "the task would be given something else"
    for config in (before, after):
        assert changed_keys(config, config.model_copy(deep=True)) == {}
