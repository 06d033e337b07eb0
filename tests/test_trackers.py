"""Trackers get all calls in order and once, from a thread that neither delays nor ends
the run.
"""

from __future__ import annotations

import asyncio
import json
import re
import signal
import threading
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import yaml
from job_runs import ended, read_lines, start, wait_until, write_config
from trackers_for_test import Hanging

from asyncrl.base.errors import ConfigError
from asyncrl.config.observe_config import ObserveConfig
from asyncrl.observe import trackers as trackers_module
from asyncrl.observe.trackers import MAX_WAITING, Background, TrackedRun, check_trackers


@pytest.fixture(autouse=True)
def left(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the names of late trackers, without other tests' names."""
    monkeypatch.setattr(trackers_module, "LEFT", names := list[str]())
    return names


def started(run_dir: Path, said: list[str], **logs: Path) -> Background:
    """Start trackers of trackers_for_test by class, each with its log."""
    args = {
        f"trackers_for_test:{name}": {"path": str(path)} for name, path in logs.items()
    }
    trackers = Background(
        ObserveConfig(trackers=[*args], tracker_args=args), said.append
    )
    trackers.start(TrackedRun(run_dir, "a run", "0123", {"seed": 1}))
    return trackers


def finish(trackers: Background) -> None:
    """End the run and its thread, without a limit."""
    trackers.tell("close", "done")
    trackers._thread.join()


def calls(path: Path) -> list[list[Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_tracker_gets_everything_in_order_and_once_over_resumes(
    tmp_path: Path,
) -> None:
    log, said = tmp_path / "log", list[str]()
    for first in (0, 1):
        trackers = started(tmp_path, said, Noting=log)
        for step in (first, first + 1):
            trackers.tell("samples", step, ["failed"])
            trackers.tell("step", step, {"reward/mean": 1.0})
            trackers.tell("samples", step, ["best"])
            trackers.tell("evaluation", step, {})
        trackers.tell("weights", first, "digest")
        finish(trackers)
    step_calls = [
        [["samples", n], ["step", n, True], ["samples", n], ["evaluation", n]]
        for n in (0, 1, 2)
    ]
    assert calls(log) == [
        ["start", "a run"],
        *step_calls[0],
        *step_calls[1],
        ["weights", 0],
        ["close", "done"],
        ["start", "a run"],
        *step_calls[2],
        ["weights", 1],
        ["close", "done"],
    ]
    assert said == []


def test_a_tracker_that_raises_is_turned_off_and_others_continue(
    tmp_path: Path, left: list[str]
) -> None:
    said, raises, continues = list[str](), tmp_path / "raises", tmp_path / "continues"
    trackers = started(tmp_path, said, Raising=raises, Noting=continues)
    for step in range(4):
        trackers.tell("step", step, {})
    finish(trackers)
    assert [call[1] for call in calls(raises) if call[0] == "step"] == [0]
    assert calls(continues)[-1] == ["close", "done"]
    assert left == ["trackers_for_test:Raising"]
    assert "Raising is turned off" in said[0]
    assert "SystemExit: no quota is left" in said[0]


def test_a_full_disk_turns_no_tracker_off(tmp_path: Path, left: list[str]) -> None:
    (tmp_path / trackers_module.SENT_FILE).mkdir()  # no number can be noted
    said, log = list[str](), tmp_path / "log"
    trackers = started(tmp_path, said, Noting=log)
    for step in range(2):
        trackers.tell("step", step, {})
    finish(trackers)
    assert [call[0] for call in calls(log)] == ["start", "step", "step", "close"]
    assert (said, left) == ([], [])


def test_a_tracker_that_hangs_holds_up_no_call(
    tmp_path: Path, left: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Hanging, "let_go", let_go := threading.Event())
    monkeypatch.setattr("atexit.register", lambda wait: None)
    said, log = list[str](), tmp_path / "log"
    trackers = started(tmp_path, said, Hanging=log)
    for step in range(MAX_WAITING + 100):
        trackers.tell("step", step, {})
    trackers.tell("close", "done")
    assert 100 <= trackers.num_dropped <= 101, "the thread may hold one"
    assert len(said) == 1
    told: list[str] = []
    asyncio.run(trackers.wait_closed(1.5, told.append))
    assert told == [
        "waiting up to 1.5 s for trackers_for_test:Hanging (Ctrl-C: stop waiting)"
    ]
    assert (len(said), left) == (2, ["trackers_for_test:Hanging"])
    let_go.set()
    trackers._thread.join()
    assert calls(log)[-1] == ["close", "done"]


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("trackers_for_test:Noting", "cannot be called as"),
        ("trackers_for_test:Nothing", "has no attribute 'Nothing'"),
    ],
)
def test_a_tracker_is_checked_before_a_run(name: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        check_trackers(ObserveConfig(trackers=[name]))


@pytest.mark.extension("trackers")
def test_the_examples_of_the_page_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = (Path(__file__).parents[1] / "docs" / "monitoring.md").read_text()
    blocks = re.findall(r"```(yaml|python)\n(.*?)```", page, re.DOTALL)
    (tmp_path / "my_tracker.py").write_text(
        "".join(text for kind, text in blocks if kind == "python")
    )
    monkeypatch.syspath_prepend(tmp_path)
    settings = [yaml.safe_load(text) for kind, text in blocks if kind == "yaml"]
    clients, own = (
        ObserveConfig.model_validate(one["observe"])
        for one in settings
        if "observe" in one
    )
    assert clients.trackers == ["tensorboard", "wandb"]
    check_trackers(own)
    said: list[str] = []
    trackers = Background(
        own.model_copy(update={"trackers": ["my_tracker:Printer"]}), said.append
    )
    trackers.start(TrackedRun(tmp_path, "a run", "0123", {"seed": 1}))
    trackers.tell("step", 0, {"reward/mean": 0.5})
    finish(trackers)
    assert said == []


@pytest.mark.extension("trackers")
def test_a_missing_client_is_an_error_naming_its_extra(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("asyncrl.observe.trackers.find_spec", lambda package: None)
    with pytest.raises(ConfigError, match=r"asyncrl\[wandb\]"):
        check_trackers(ObserveConfig(trackers=["wandb"]))
    # tensorboard belongs to the extra train, which asyncrl.cli names
    with pytest.raises(ModuleNotFoundError, match="has tensorboard"):
        check_trackers(ObserveConfig(trackers=["tensorboard"]))


@pytest.mark.slow
def test_a_run_tells_its_trackers_and_serves_its_status(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    own = {"trackers_for_test:Noting": {"path": str(tmp_path / "log")}}
    observe = {
        "console": "plain",
        "status_port": 0,
        "trackers": [*own],
        "tracker_args": own,
    }
    process = start(
        write_config(tmp_path, trainer={"num_steps": 100_000}, observe=observe), run_dir
    )
    wait_until(lambda: len(read_lines(run_dir / "metrics.jsonl")) >= 2, process)
    url = json.loads((run_dir / "status.json").read_text())["status_url"]
    headers = {"Authorization": f"Bearer {(run_dir / 'status.key').read_text()}"}
    with urllib.request.urlopen(
        urllib.request.Request(f"{url}/metrics", headers=headers)
    ) as answer:
        text = answer.read().decode()
    assert "\nasyncrl_engine_decode_seconds_total " in text
    process.send_signal(signal.SIGINT)
    run = ended(process)
    assert run.returncode == 130, run.stderr
    told = calls(tmp_path / "log")
    num_steps = len(read_lines(run_dir / "metrics.jsonl"))
    assert [call[1] for call in told if call[0] == "step"] == [*range(1, num_steps + 1)]
    assert told[-1] == ["close", "interrupted"]
