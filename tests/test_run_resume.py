"""Rules for resuming: run directories, checkpoints and changed settings."""

from __future__ import annotations

import asyncio
import json
import shlex
from pathlib import Path
from typing import Any

import pytest
from job_runs import write_config
from journal_cases import make_batch, tell_ready
from test_run_restore import save_checkpoint
from typer.testing import CliRunner

from asyncrl.base.errors import ConfigError
from asyncrl.cli import app
from asyncrl.config import RunConfig, load_config, run_config_yaml
from asyncrl.job import loop, resume
from asyncrl.job.resume import ResumePoint, find_resume
from asyncrl.journal.checkpoint_folders import Checkpoints
from asyncrl.journal.journal import Journal
from asyncrl.messages.records import GroupId, Prompt, Ticket


def make_config(folder: Path, **sections: Any) -> RunConfig:
    folder.mkdir(parents=True, exist_ok=True)
    return load_config(write_config(folder, **sections))


async def open_journal(run_dir: Path, *, num_groups: int = 1) -> None:
    journal = Journal.open(run_dir / "journal.sqlite", run_id="r")
    for group_id in range(num_groups):
        journal.admitted_nowait(Ticket(GroupId(group_id), 0), Prompt("0/0", ()))
    await journal.aclose()


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """Of a run that was killed before its first checkpoint."""
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "config.yaml").write_text(run_config_yaml(make_config(tmp_path / "first")))
    asyncio.run(open_journal(folder))
    return folder


def found(run_dir: Path, config: RunConfig, mode: Any = "auto", *allowed: str) -> ResumePoint:
    point = find_resume(run_dir, config, mode, allowed)
    assert point is not None
    return point


def test_failed_start_may_change_settings(run_dir: Path, tmp_path: Path) -> None:
    (run_dir / "journal.sqlite").unlink()
    (run_dir / "run.id").write_text("r")
    asyncio.run(open_journal(run_dir, num_groups=0))
    corrected = make_config(tmp_path / "now", trainer={"learning_rate": 0.5})
    assert find_resume(run_dir, corrected, "auto") is None
    asyncio.run(open_journal(run_dir))
    with pytest.raises(ConfigError, match="trainer.learning_rate"):
        find_resume(run_dir, corrected, "auto")


def test_run_directory_is_resumed_or_refused(run_dir: Path, tmp_path: Path) -> None:
    config, new = make_config(tmp_path / "now"), tmp_path / "new"
    assert find_resume(new, config, "auto") is find_resume(new, config, "never") is None
    assert found(run_dir, config) == found(run_dir, config, "must") == ResumePoint(None)
    with pytest.raises(ConfigError, match="contains no run"):
        find_resume(new, config, "must")
    with pytest.raises(ConfigError, match="contains a run already"):
        find_resume(run_dir, config, "never")
    with pytest.raises(ConfigError, match="--resume always is not known; it is auto, never or must"):
        resume.as_resume_mode("always")
    (new / "adapter").mkdir(parents=True)
    with pytest.raises(ConfigError, match="adapter, which a new run would replace"):
        find_resume(new, config, "auto")
    (tmp_path / "config.yaml").write_text("precious")
    with pytest.raises(ConfigError, match=r"contains a config\.yaml that no run has written"):
        find_resume(tmp_path, config, "auto")
    (run_dir / "config.yaml").unlink()
    for mode in ("auto", "never", "must"):
        with pytest.raises(ConfigError, match=r"contains a run without its config\.yaml"):
            find_resume(run_dir, config, resume.as_resume_mode(mode))


def test_newest_whole_checkpoint_is_taken_and_damage_named(run_dir: Path, tmp_path: Path) -> None:
    config = make_config(tmp_path / "now", trainer={"num_steps": 200, "schedule": "constant"})
    (run_dir / "config.yaml").write_text(run_config_yaml(config))
    for version in (50, 100):
        save_checkpoint(Checkpoints(run_dir, config.checkpoint), version)
    assert (found(run_dir, config).version, found(run_dir, config).notes) == (100, ())
    (run_dir / "checkpoints" / "step_100" / "trainer" / "weights").write_text("101")
    point = found(run_dir, config)
    assert (point.version, [folder.folder.name for folder in point.damaged]) == (50, ["step_100"])
    assert ["step_100" in note for note in point.notes] == [True]
    assert (run_dir / "checkpoints" / "step_100").exists()


def test_fewer_steps_than_were_trained_are_refused(run_dir: Path, tmp_path: Path) -> None:
    shorter = make_config(tmp_path / "now", trainer={"schedule": "constant", "num_steps": 3})
    (run_dir / "config.yaml").write_text(run_config_yaml(shorter))

    async def train(num_steps: int) -> None:
        journal = Journal.open(run_dir / "journal.sqlite", run_id="r")
        tell_ready(journal, *range(num_steps))
        for version in range(num_steps):
            await journal.batch_taken(make_batch(version, version))
            journal.trained_nowait(version, {})
        await journal.aclose()

    (run_dir / "journal.sqlite").unlink()
    asyncio.run(train(3))
    assert found(run_dir, shorter) == ResumePoint(None)
    (run_dir / "journal.sqlite").unlink()
    asyncio.run(train(4))
    with pytest.raises(ConfigError, match="has trained 4 steps, and trainer.num_steps=3"):
        find_resume(run_dir, shorter, "auto")


@pytest.mark.parametrize("schedule", ["constant", "linear"])
def test_done_run_continues_by_the_command_it_prints(
    run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, schedule: str
) -> None:
    config = make_config(tmp_path / "now", trainer={"schedule": schedule})
    (run_dir / "config.yaml").write_text(run_config_yaml(config))
    summary = {"state": "interrupted", "num_steps": config.trainer.num_steps}
    (run_dir / "summary.json").write_text(json.dumps(summary))
    found(run_dir, config)  # cut off after its last step
    (run_dir / "summary.json").write_text(json.dumps(summary | {"state": "done"}))
    other = make_config(tmp_path / "other", trainer={"schedule": schedule, "learning_rate": 0.1})
    with pytest.raises(ConfigError, match="was started with other settings"):
        find_resume(run_dir, other, "auto")
    with pytest.raises(ConfigError, match="is done, after 12 steps") as caught:
        find_resume(run_dir, config, "auto")
    shorter = make_config(tmp_path / "shorter", trainer={"schedule": schedule, "num_steps": 3})
    with pytest.raises(ConfigError, match="is done, after 12 steps(.|\n)*trainer.num_steps=24"):
        find_resume(run_dir, shorter, "auto", ["trainer.num_steps"])

    def only_looks(config: RunConfig, run_dir: Path, *, resume: Any, allow_change: Any, **_: str) -> int:
        found(run_dir, config, resume, *allow_change)
        assert config.trainer.num_steps == 24
        return 0

    monkeypatch.setattr(loop, "run_job", only_looks)
    program, *arguments = shlex.split(caught.value.way_out.split("`")[1])
    assert program == "asyncrl"
    answer = CliRunner().invoke(app, arguments)
    assert (answer.exit_code, answer.exception) == (0, None), answer.output


def test_changed_settings_are_listed_and_accepted(run_dir: Path, tmp_path: Path) -> None:
    changed = {"trainer": {"learning_rate": 0.1}, "rollout": {"max_tokens": 20}}
    config = make_config(tmp_path / "now", **changed, weight_sync={"canary_limit": None, "transport": "nccl"})
    with pytest.raises(ConfigError) as caught:
        find_resume(run_dir, config, "auto")
    text = str(caught.value)
    assert "trainer.learning_rate: 0.003 -> 0.1" in text
    assert "rollout.max_tokens: 24 -> 20" in text
    assert "canary_limit" not in text
    assert "transport" not in text, "engines get the same bits"
    assert "--allow-change rollout.max_tokens --allow-change trainer.learning_rate" in caught.value.way_out
    for allowed in (["trainer.learning_rate", "rollout.max_tokens"], ["trainer", "rollout"]):
        assert list(found(run_dir, config, "auto", *allowed).notes) == [
            "resuming with rollout.max_tokens: 24 -> 20",
            "resuming with trainer.learning_rate: 0.003 -> 0.1",
        ]
    with pytest.raises(ConfigError, match="learning_rate") as caught:
        find_resume(run_dir, config, "auto", ["rollout"])
    assert "max_tokens" not in str(caught.value)


@pytest.mark.parametrize(
    ("section", "keys"),
    [
        ("buffer", {"max_staleness": 2}),
        ("task", {"args": {"length": 3}}),
        ("rollout", {"engine": "vllm"}),
        ("trainer", {"lora": {"rank": 4}}),
        ("weight_sync", {"transport": "lora"}),
        ("trainer", {"num_steps": 20, "schedule": "linear"}),
        ("eval", {"task": {"python": "a:B"}}),
    ],
)
def test_settings_of_the_computation_may_not_change(
    run_dir: Path, tmp_path: Path, section: str, keys: Any
) -> None:
    config = make_config(tmp_path / "now", **{section: keys})
    with pytest.raises(ConfigError, match=f"{section}.{next(iter(keys))}: "):
        find_resume(run_dir, config, "auto")
    found(run_dir, config, "auto", section)


def test_model_path_may_change_with_a_pin(run_dir: Path, tmp_path: Path) -> None:
    models = ({"path": f"some/{name}", "scratch": None} for name in ("before", "now"))
    before, now = (make_config(tmp_path, model=model) for model in models)
    (run_dir / "config.yaml").write_text(run_config_yaml(before))
    with pytest.raises(ConfigError, match="model.path"):
        find_resume(run_dir, now, "auto")
    (run_dir / "model.json").write_text("{}")
    found(run_dir, now)
