"""Real runs of `asyncrl sft`: the end, kills and resumes, and what reads them."""

from __future__ import annotations

import hashlib
import json
import random
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from installed_extension import python
from job_runs import (
    Ended,
    children_of,
    ended,
    popen,
    read_lines,
    wait_for_steps,
)
from sft_cases import GIVEN

from asyncrl.observe.report_page import view_run

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.extension("sft"),
]
SFT = [sys.executable, "-m", "asyncrl.cli", "sft"]
NUM_STEPS = 120
EVERY = 25


def write_rows(path: Path, num: int, seed: int) -> Path:
    draw = random.Random(seed)
    rows = []
    for _ in range(num):
        letter, count = draw.choice("abcdefgh"), draw.randint(1, 9)
        rows.append({"prompt": f"{letter} {count}", "completion": letter * count})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sft")
    data = {
        "files": [str(write_rows(folder / "rows.jsonl", 46, 0))],
        "eval_files": [str(write_rows(folder / "held_out.jsonl", 10, 1))],
        "eval_every": 30,
        "epochs": 10,  # 12 steps each: the last of an epoch has 2 rows
    }
    path = folder / "sft.yaml"
    checkpoint = {"every": EVERY}
    path.write_text(yaml.safe_dump({**GIVEN, "data": data, "checkpoint": checkpoint}))
    return path


def sft(config: Path, run_dir: Path, *more: str) -> Ended:
    return ended(popen(config, *more, command=SFT, run_dir=run_dir), 400)


@pytest.fixture(scope="module")
def whole(config: Path) -> Path:
    """A run without interruption."""
    run_dir = config.parent / "whole"
    done = sft(config, run_dir)
    assert done.returncode == 0, done.stderr
    return run_dir


def weights(run_dir: Path) -> str:
    content = (run_dir / "final" / "model.safetensors").read_bytes()
    return hashlib.sha256(content).hexdigest()


def learned(run_dir: Path) -> list[dict[str, Any]]:
    """The metrics of all steps, without times, memory and counts of this process."""
    dropped = ("perf/", "time_s", "checkpoint/", "trainer/restarts")
    return [
        {name: value for name, value in line.items() if not name.startswith(dropped)}
        for line in read_lines(run_dir / "metrics.jsonl")
    ]


def test_run_learns_and_measures(whole: Path) -> None:
    lines = read_lines(whole / "metrics.jsonl")
    assert [line["step"] for line in lines] == [*range(1, NUM_STEPS + 1)]
    losses = [line["policy/loss"] for line in lines]
    assert sum(losses[-12:]) < 0.5 * sum(losses[:12])
    measured = read_lines(whole / "eval.jsonl")
    assert [line["policy_version"] for line in measured] == [30, 60, 90, 120]
    assert measured[-1]["eval/loss"] < measured[0]["eval/loss"]
    assert lines[29]["eval/loss"] == measured[0]["eval/loss"]
    assert "policy/ess" not in lines[0]
    summary = json.loads((whole / "summary.json").read_text())
    assert (summary["state"], summary["policy_version"]) == ("done", NUM_STEPS)
    assert summary["headline"].startswith("The loss went from")


def test_no_engine_is_started(whole: Path) -> None:
    assert {path.name for path in (whole / "logs").iterdir()} == {
        "controller.log",
        "trainer-0.log",
    }
    assert not (whole / "journal.sqlite").exists()
    view = view_run(whole)
    assert (view["problems"], view["failures"]) == ([], [])


def test_killed_run_ends_with_the_same_weights(
    config: Path, whole: Path, tmp_path: Path
) -> None:
    run_dir = tmp_path / "killed"
    process = popen(config, command=SFT, run_dir=run_dir)
    wait_for_steps(run_dir, 40, process)
    process.kill()
    ended(process)
    assert len(read_lines(run_dir / "metrics.jsonl")) < NUM_STEPS
    resumed = sft(config, run_dir, "--resume", "must")
    assert resumed.returncode == 0, resumed.stderr
    assert "resuming from policy_version" in resumed.stdout
    assert weights(run_dir) == weights(whole)
    assert learned(run_dir) == learned(whole)
    found = [line["policy_version"] for line in read_lines(run_dir / "eval.jsonl")]
    assert found == [30, 60, 90, 120]


def test_killed_trainer_is_brought_back(
    config: Path, whole: Path, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    process = popen(config, command=SFT, run_dir=run_dir)
    wait_for_steps(run_dir, 30, process)
    for trainer in children_of(process, "rank_process"):
        trainer.kill()
    done = ended(process, 400)
    assert done.returncode == 0, done.stderr
    assert weights(run_dir) == weights(whole)
    assert read_lines(run_dir / "metrics.jsonl")[-1]["trainer/restarts"] == 1


def test_stopped_run_makes_a_checkpoint(
    config: Path, whole: Path, tmp_path: Path
) -> None:
    run_dir = tmp_path / "stopped"
    process = popen(config, command=SFT, run_dir=run_dir)
    wait_for_steps(run_dir, 10, process)
    process.send_signal(signal.SIGTERM)
    stopped = ended(process)
    assert stopped.returncode == 143, stopped.stderr
    assert f"asyncrl sft {run_dir / 'config.yaml'}" in stopped.stdout
    num = len(read_lines(run_dir / "metrics.jsonl"))
    assert num < NUM_STEPS
    assert (run_dir / f"checkpoints/step_{num}").is_dir()
    other = write_rows(tmp_path / "other.jsonl", 46, 3)
    refused = sft(config, run_dir, f"data.files=[{other}]")
    assert refused.returncode == 2
    assert "the data of data.rows have changed" in refused.stderr
    resumed = sft(config, run_dir)
    assert resumed.returncode == 0, resumed.stderr
    assert weights(run_dir) == weights(whole)


def test_trained_run_ends_well_again(config: Path, whole: Path) -> None:
    again = sft(config, whole)
    assert again.returncode == 0, again.stderr
    assert "all 120 steps are trained already" in again.stdout
    assert "raise data.epochs" in again.stdout
    status = json.loads((whole / "status.json").read_text())
    assert status["state"] == "done", "it stays so"


def test_bad_row_ends_the_run_before_its_trainer(config: Path, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"messages": [{"role": "user", "content": "a 1"}]}\n')
    refused = sft(config, tmp_path / "run", f"data.files=[{rows}]")
    assert refused.returncode == 2
    assert f"{rows} line 1 has no assistant message" in refused.stderr
    assert not (tmp_path / "run/logs/trainer-0.log").exists()


@pytest.mark.parametrize("switch", ["", "core"], ids=["with", "without the extension"])
def test_commands_show_the_run(switch: str, whole: Path, tmp_path: Path) -> None:
    def said(*arguments: str | Path) -> str:
        done = python("-m", "asyncrl", *arguments, ASYNCRL_EXTENSIONS=switch)
        assert done.returncode == (2 if "check" in arguments else 0), done.stderr
        return done.stdout + done.stderr

    status = said("status", whole)
    assert "120 of 120" in status
    assert "loss" in status
    assert "No step has a reward" not in status
    assert "120/120" in said("runs", whole.parent)
    said("report", whole)
    assert "eval/loss" in (whole / "report.html").read_text()
    said("inspect", whole)
    problems = json.loads(said("status", whole, "--json"))["problems"]
    exported = said("export", whole, tmp_path / "out")
    assert (tmp_path / "out/model.safetensors").is_file()
    if switch:
        (problem,) = problems
        assert "sft 0" in problem.partition("to read all of it, install ")[2]
        assert problem in exported
        refused = said("check", whole / "config.yaml")
        assert "it is of the extension sft, which ASYNCRL_EXTENSIONS" in refused
    else:
        assert problems == []
        card = (tmp_path / "out/README.md").read_text()
        assert "120 steps of supervised fine-tuning" in card
