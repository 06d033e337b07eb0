"""Rules for resuming: run directories, checkpoints and changed settings."""

from __future__ import annotations

import asyncio
import json
import shlex
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from job_runs import CONFIG, write_config
from journal_cases import make_batch, tell_ready
from restored_cases import save_checkpoint
from typer.testing import CliRunner

from asyncrl.base.errors import ConfigError
from asyncrl.cli import app
from asyncrl.config import RunConfig, load_config, run_config_yaml
from asyncrl.job import loop
from asyncrl.job.resume import ResumePoint, find_resume
from asyncrl.journal.checkpoint_folders import Checkpoints
from asyncrl.journal.journal import Journal
from asyncrl.tasks.sources import DataPin

SCRATCH = CONFIG["model"]["scratch"]


def make_config(folder: Path, **sections: Any) -> RunConfig:
    folder.mkdir(parents=True, exist_ok=True)
    return load_config(write_config(folder, **sections))


def write_journal(run_dir: Path, *, num_ready: int = 0, num_trained: int = 0) -> None:
    async def write() -> None:
        (run_dir / "journal.sqlite").unlink(missing_ok=True)
        journal = Journal(run_dir / "journal.sqlite", run_id="r")
        tell_ready(journal, *range(max(num_ready, num_trained)))
        for version in range(num_trained):
            await journal.add_batch(make_batch(version, version))
            journal.add_training_nowait(version, {})
        await journal.aclose()

    asyncio.run(write())


def killed_run(folder: Path, config: RunConfig) -> Path:
    """The directory of a run that was killed before its first checkpoint."""
    folder.mkdir()
    (folder / "config.yaml").write_text(run_config_yaml(config))
    write_journal(folder, num_ready=1)
    return folder


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    return killed_run(tmp_path / "run", make_config(tmp_path / "first"))


def found(
    run_dir: Path, config: RunConfig, mode: Any = "auto", *allowed: str
) -> ResumePoint:
    point = find_resume(run_dir, config, mode, allowed)
    assert point is not None
    return point


def test_failed_start_may_change_settings(run_dir: Path, tmp_path: Path) -> None:
    (run_dir / "run.id").write_text("r")
    write_journal(run_dir)
    corrected = make_config(tmp_path / "now", trainer={"learning_rate": 0.5})
    assert find_resume(run_dir, corrected, "auto") is None
    write_journal(run_dir, num_ready=1)
    with pytest.raises(ConfigError, match="trainer.learning_rate"):
        find_resume(run_dir, corrected, "auto")


@pytest.mark.extension("scoring")
def test_address_of_one_of_several_teachers_may_change(tmp_path: Path) -> None:
    def taught(folder: str, port: int, path: str = "m") -> RunConfig:
        teachers = [{"path": path, "base_url": f"http://h:{port}", "tasks": ["a", "b"]}]
        tasks = [{"name": name, "files": ["x"], "reward": "math"} for name in "ab"]
        plain = make_config(tmp_path / folder).model_dump(exclude_unset=True)
        changes = {"task": tasks, "teacher": teachers}
        algorithm = {"distill_weight": 1.0}
        return RunConfig.model_validate(plain | changes | {"algorithm": algorithm})

    run_dir = killed_run(tmp_path / "run", taught("first", 1))
    assert found(run_dir, taught("moved", 2)).notes == ()
    with pytest.raises(ConfigError, match=r"teacher\.0\.path"):
        found(run_dir, taught("other", 1, "n"))
    assert found(run_dir, taught("other2", 1, "n"), "auto", "teacher").notes


def test_run_with_steps_and_an_empty_journal_has_begun(
    run_dir: Path, tmp_path: Path
) -> None:
    """The user moved the journal away, and the next start was killed."""
    (run_dir / "run.id").write_text("r")
    write_journal(run_dir)
    (run_dir / "metrics.jsonl").write_text('{"step": 1}\n')
    assert found(run_dir, make_config(tmp_path / "now")) == ResumePoint(None)


def test_run_directory_is_resumed_or_refused(run_dir: Path, tmp_path: Path) -> None:
    config, new = make_config(tmp_path / "now"), tmp_path / "new"
    assert find_resume(new, config, "auto") is find_resume(new, config, "never") is None
    assert found(run_dir, config) == found(run_dir, config, "must") == ResumePoint(None)
    with pytest.raises(ConfigError, match="contains no run"):
        find_resume(new, config, "must")
    with pytest.raises(ConfigError, match="contains a run already"):
        find_resume(run_dir, config, "never")
    with pytest.raises(
        ConfigError, match="--resume always is not known; it is auto, never or must"
    ):
        find_resume(run_dir, config, "always")
    (new / "final").mkdir(parents=True)
    with pytest.raises(ConfigError, match="final, which a new run would replace"):
        find_resume(new, config, "auto")
    (tmp_path / "config.yaml").write_text("precious")
    with pytest.raises(
        ConfigError, match=r"contains a config\.yaml that no run has written"
    ):
        find_resume(tmp_path, config, "auto")
    (run_dir / "config.yaml").unlink()
    with pytest.raises(ConfigError, match=r"contains a run without its config\.yaml"):
        find_resume(run_dir, config, "auto")


def test_newest_whole_checkpoint_is_taken_and_damage_named(tmp_path: Path) -> None:
    config = make_config(tmp_path / "now", trainer={"num_steps": 200})
    run_dir = killed_run(tmp_path / "run", config)
    for version in (50, 100):
        save_checkpoint(Checkpoints(run_dir, config.checkpoint), version)
    assert (found(run_dir, config).version, found(run_dir, config).notes) == (100, ())
    (run_dir / "checkpoints" / "step_100" / "trainer" / "weights").write_text("101")
    point = found(run_dir, config)
    assert (point.version, [folder.folder.name for folder in point.damaged]) == (
        50,
        ["step_100"],
    )
    assert ["step_100" in note for note in point.notes] == [True]
    assert (run_dir / "checkpoints" / "step_100").exists()


@pytest.mark.parametrize(
    ("num_trained", "summary", "is_refused"),
    [
        (3, {"state": "failed"}, False),
        # it was extended, and killed after its last step
        (3, {"state": "done", "policy_version": 2}, False),
        (4, {"state": "failed"}, True),
    ],
)
def test_run_with_all_steps_continues_by_the_command_it_prints(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    num_trained: int,
    summary: dict[str, Any],
    is_refused: bool,
) -> None:
    config = make_config(
        tmp_path / "now", trainer={"schedule": "linear", "num_steps": 3}
    )
    run_dir = killed_run(tmp_path / "run", config)
    write_journal(run_dir, num_trained=num_trained)
    if is_refused:
        save_checkpoint(Checkpoints(run_dir, config.checkpoint), num_trained)
    (run_dir / "summary.json").write_text(json.dumps(summary))
    if not is_refused:
        assert found(run_dir, config) == ResumePoint(None), (
            "the weights are still to be saved"
        )
        return
    with pytest.raises(
        ConfigError, match=f"has trained {num_trained} steps, and"
    ) as caught:
        find_resume(run_dir, config, "auto")

    def only_looks(
        config: RunConfig, run_dir: Path, *, resume: Any, allow_change: Any, **_: str
    ) -> int:
        found(run_dir, config, resume, *allow_change)
        assert config.trainer.num_steps == 2 * num_trained
        return 0

    monkeypatch.setattr(loop, "run_job", only_looks)
    program, *arguments = shlex.split(caught.value.way_out.split("`")[1])
    assert program == "asyncrl"
    answer = CliRunner().invoke(app, arguments)
    assert (answer.exit_code, answer.exception) == (0, None), answer.output


def test_changed_settings_are_listed_and_accepted(
    run_dir: Path, tmp_path: Path
) -> None:
    changed = {"trainer": {"learning_rate": 0.1}, "rollout": {"max_tokens": 20}}
    config = make_config(
        tmp_path / "now",
        **changed,
        weight_sync={"canary_limit": None, "transport": "nccl"},
    )
    with pytest.raises(ConfigError) as caught:
        find_resume(run_dir, config, "auto")
    text = str(caught.value)
    assert "trainer.learning_rate: 0.003 -> 0.1" in text
    assert "rollout.max_tokens: 24 -> 20" in text
    assert "canary_limit" not in text
    assert "transport" not in text, "engines get the same bits"
    assert (
        "--allow-change rollout.max_tokens --allow-change trainer.learning_rate"
        in caught.value.way_out
    )
    for allowed in (
        ["trainer.learning_rate", "rollout.max_tokens"],
        ["trainer", "rollout"],
    ):
        assert list(found(run_dir, config, "auto", *allowed).notes) == [
            "resuming with rollout.max_tokens: 24 -> 20",
            "resuming with trainer.learning_rate: 0.003 -> 0.1",
        ]
    with pytest.raises(ConfigError, match="learning_rate") as caught:
        find_resume(run_dir, config, "auto", ["rollout"])
    assert "max_tokens" not in str(caught.value)


@pytest.mark.parametrize(
    ("changed", "is_of_training"),
    [
        ({"trainer": {"learning_rate": 0.1}}, True),
        ({"trainer": {"num_steps": 20, "schedule": "linear"}}, True),
        ({"algorithm": {"loss": "cispo"}}, True),
        ({"model": {"dtype": "bfloat16", "scratch": SCRATCH}}, True),
        ({"task": {"algorithm": {"advantage": "rloo"}}}, True),
        ({"trainer": {"micro_batch_tokens": 500}}, False),
        ({"rollout": {"max_tokens": 20}}, False),
        ({"buffer": {"max_staleness": 3}}, False),
    ],
)
def test_other_training_begins_at_a_checkpoint(
    tmp_path: Path, changed: dict[str, Any], is_of_training: bool
) -> None:
    """Weights of steps that are trained again would not be those that sampled."""
    config = make_config(tmp_path / "first")
    now = make_config(tmp_path / "now", **changed)
    run_dir = killed_run(tmp_path / "run", config)
    checkpoints = Checkpoints(run_dir, config.checkpoint)
    write_journal(run_dir, num_ready=6, num_trained=5)
    save_checkpoint(checkpoints, 3)
    if is_of_training:
        with pytest.raises(ConfigError, match="trained 5 steps and saved 3") as caught:
            found(run_dir, now, "auto", *changed)
        assert "press Ctrl-C" in caught.value.way_out
    else:
        assert found(run_dir, now, "auto", *changed).version == 3
    assert found(run_dir, config).version == 3
    save_checkpoint(checkpoints, 5)
    assert found(run_dir, now, "auto", *changed).version == 5


@pytest.mark.parametrize(
    ("section", "keys"),
    [
        ("task", {"args": {"length": 3}}),
        pytest.param(
            "rollout", {"engine": "vllm"}, marks=pytest.mark.extension("vllm")
        ),
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


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"trainer": {"lora": {"rank": 4}}}, "adapters of this form"),
        ({"trainer": {"optimizer": "muon"}}, "the state of this optimizer"),
        ({"model": {"scratch": SCRATCH | {"characters": "abc "}}}, "this architecture"),
        ({"seed": 8}, "the order of prompts"),
        ({"task": {"size": 100}}, "the order of prompts"),
        ({"task": {"shuffle": False}}, "the order of prompts"),
        ({"rollout": {"temperature": 0.7}}, "the trainer has one temperature"),
        ({"critic": {}, "algorithm": {"advantage": "gae"}}, "a checkpoint with a crit"),
        (
            {"teacher": {"path": "m"}, "algorithm": {"distill_weight": 1.0}},
            "lack these numbers of a teacher",
        ),
        ({"algorithm": {"router_replay": True}}, "lack their tokens' experts"),
    ],
)
def test_change_that_no_resume_can_make_is_refused_at_once(
    run_dir: Path, tmp_path: Path, changed: dict[str, Any], words: str
) -> None:
    """--allow-change would end a minute later in the trainer, or train wrongly."""
    plain = make_config(tmp_path / "now").model_dump(exclude_unset=True)
    merged = {
        name: {**plain.get(name, {}), **values} if isinstance(values, dict) else values
        for name, values in changed.items()
    }
    config = RunConfig.model_validate(plain | merged)
    with pytest.raises(ConfigError, match="cannot resume with other") as caught:
        find_resume(run_dir, config, "auto", [*changed])
    assert words in str(caught.value)
    assert "asyncrl export" in caught.value.way_out


def test_changed_rows_are_named_before_their_order(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "abc", "answer": "a"}\n')
    task = {"python": None, "files": [str(rows)], "reward": "math"}
    config = make_config(tmp_path / "first", task=task)
    run_dir = killed_run(tmp_path / "run", config)
    (run_dir / "run.id").write_text("r")
    with closing(sqlite3.connect(run_dir / "journal.sqlite")) as journal:
        journal.execute("INSERT INTO meta VALUES ('order', '{}')")
        journal.commit()
    DataPin(run_dir, {"": "xxh3:of other rows"}).write()
    with pytest.raises(ConfigError, match="the data of task have changed"):
        loop.run_job(config, run_dir, name="again")


def test_finished_run_that_is_started_again_ends_well(
    run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A scheduler repeats the command of a run that has ended."""
    config = make_config(tmp_path / "now", trainer={"num_steps": 3})
    (run_dir / "config.yaml").write_text(run_config_yaml(config))
    (run_dir / "run.id").write_text("r")
    write_journal(run_dir, num_trained=3)
    (run_dir / "summary.json").write_text('{"state": "done", "policy_version": 3}')
    (run_dir / "status.json").write_text('{"state": "done", "num_steps": 3}')
    lines = ({"step": step, "reward/mean": 0.5} for step in range(1, 4))
    (run_dir / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n")
    before = {path: path.read_bytes() for path in run_dir.iterdir() if path.is_file()}
    assert loop.run_job(config, run_dir, name="again") == 0
    said = capsys.readouterr().out
    assert "all 3 steps are trained already" in said
    assert "trainer.num_steps=6 --allow-change trainer.num_steps" in said
    assert "learning" in said
    assert {path: path.read_bytes() for path in before} == before
