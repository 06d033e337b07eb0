"""Trackers get all calls in order and once, from a thread that neither delays nor ends the run."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import threading
import urllib.request
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from job_runs import ended, read_lines, start, wait_until, write_config
from trackers_for_test import Hanging

from asyncrl.base.errors import ConfigError
from asyncrl.config import ObserveConfig
from asyncrl.job.lifecycle import Lifecycle, RunLog
from asyncrl.launch.launchers import LocalLauncher
from asyncrl.observe import trackers as trackers_module
from asyncrl.observe.trackers import MAX_WAITING, SENT_FILE, Background, TrackedRun, check_trackers


@pytest.fixture(autouse=True)
def left(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the names of late trackers, without other tests' names."""
    monkeypatch.setattr(trackers_module, "LEFT", names := list[str]())
    return names


def started(run_dir: Path, said: list[str], **logs: Path) -> Background:
    """Start trackers of trackers_for_test by class, each with its log."""
    args = {f"trackers_for_test:{name}": {"path": str(path)} for name, path in logs.items()}
    trackers = Background(ObserveConfig(trackers=[*args], tracker_args=args), said.append)
    trackers.start(TrackedRun(run_dir, "a run", "0123", {"seed": 1}))
    return trackers


def finish(trackers: Background) -> None:
    """End the run and its thread, without a limit."""
    trackers.tell("close", "done")
    trackers._thread.join()


def calls(path: Path) -> list[list[Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("is_damaged", [False, True])
def test_a_tracker_gets_everything_in_order_and_once_over_resumes(tmp_path: Path, is_damaged: bool) -> None:
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
        if is_damaged:
            (tmp_path / SENT_FILE).write_text('{"step')
    step_calls = [[["samples", n], ["step", n, True], ["samples", n], ["evaluation", n]] for n in (0, 1, 2)]
    second = step_calls[1] * is_damaged + step_calls[2]
    assert calls(log) == [
        *(["start", "a run"], *step_calls[0], *step_calls[1], ["weights", 0], ["close", "done"]),
        *(["start", "a run"], *second, ["weights", 1], ["close", "done"]),
    ]
    assert said == []


def test_a_tracker_that_raises_is_turned_off_and_others_continue(tmp_path: Path, left: list[str]) -> None:
    said, raises, continues = list[str](), tmp_path / "raises", tmp_path / "continues"
    trackers = started(tmp_path, said, Raising=raises, Noting=continues, Unable=tmp_path)
    for step in range(4):
        trackers.tell("step", step, {})
    finish(trackers)
    assert [call[1] for call in calls(raises) if call[0] == "step"] == [0]
    assert calls(continues)[-1] == ["close", "done"]
    assert sorted(left) == ["trackers_for_test:Raising", "trackers_for_test:Unable"]
    assert any("Raising is turned off" in text and "SystemExit: no quota is left" in text for text in said)


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
    assert told == ["waiting up to 1.5 s for trackers_for_test:Hanging (Ctrl-C: stop waiting)"]
    assert (len(said), left) == (3, ["trackers_for_test:Hanging"])
    let_go.set()
    trackers._thread.join()
    assert calls(log)[-1] == ["close", "done"]


def test_signal_ends_the_wait_for_trackers(tmp_path: Path) -> None:
    async def live() -> int:
        return 0

    async def waits() -> None:
        life.interrupt_nowait(2)
        await asyncio.Event().wait()

    config: Any = SimpleNamespace(launcher="local")
    life = Lifecycle(config, tmp_path, RunLog(lambda _: None), LocalLauncher(), on_exit=waits)
    assert asyncio.run(life.run(live)) == 0


OWN = "trackers_for_test:Noting"


@pytest.mark.parametrize(
    ("name", "args", "says"),
    [
        (OWN, {}, "cannot be called as"),
        (OWN, {"path": "a", "paht": "b"}, "paht"),
        ("pathlib:Path", {}, "is not a subclass of Tracker"),
        ("trackers_for_test:Nothing", {}, "has no attribute 'Nothing'"),
        ("wandb", {"projekt": "x"}, "projekt"),
        ("no_such_module:Mine", {}, "No module named 'no_such_module'"),
    ],
)
def test_a_users_tracker_is_checked_before_a_run(name: str, args: dict[str, Any], says: str) -> None:
    observe = ObserveConfig.model_validate({"trackers": [name], "tracker_args": {name: args}})
    with pytest.raises(ConfigError, match=says.replace("?", r"\?")):
        check_trackers(observe)


def test_the_examples_of_the_page_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (Path(__file__).parents[1] / "docs" / "monitoring.md").read_text()
    blocks = re.findall(r"```(yaml|python)\n(.*?)```", page, re.DOTALL)
    (tmp_path / "my_tracker.py").write_text("".join(text for kind, text in blocks if kind == "python"))
    monkeypatch.syspath_prepend(tmp_path)
    settings = [yaml.safe_load(text) for kind, text in blocks if kind == "yaml"]
    clients, own = (ObserveConfig.model_validate(one["observe"]) for one in settings if "observe" in one)
    assert clients.trackers == ["tensorboard", "wandb"]
    check_trackers(own)
    said: list[str] = []
    trackers = Background(own.model_copy(update={"trackers": ["my_tracker:Printer"]}), said.append)
    trackers.start(TrackedRun(tmp_path, "a run", "0123", {"seed": 1}))
    trackers.tell("step", 0, {"reward/mean": 0.5})
    finish(trackers)
    assert said == []


@pytest.mark.parametrize("name", ["tensorboard", "wandb"])
def test_a_missing_client_is_an_error_naming_its_extra(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asyncrl.observe.trackers.find_spec", lambda package: object())
    check_trackers(ObserveConfig(trackers=[name]))
    monkeypatch.setattr("asyncrl.observe.trackers.find_spec", lambda package: None)
    # tensorboard belongs to the extra train, which asyncrl.cli names
    error = ModuleNotFoundError if name == "tensorboard" else ConfigError
    with pytest.raises(error, match="has tensorboard" if name == "tensorboard" else rf"asyncrl\[{name}\]"):
        check_trackers(ObserveConfig(trackers=[name]))


@pytest.mark.slow
def test_a_run_survives_its_trackers_and_serves_its_status(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    own = {f"trackers_for_test:{name}": {"path": str(tmp_path / name)} for name in ("Noting", "Raising")}
    trackers = {"trackers": ["tensorboard", *own], "tracker_args": own}
    observe = {"console": "plain", "status_port": 0, **trackers}
    process = start(write_config(tmp_path, trainer={"num_steps": 100_000}, observe=observe), run_dir)
    wait_until(lambda: len(read_lines(run_dir / "metrics.jsonl")) >= 2, process)
    url = json.loads((run_dir / "status.json").read_text())["status_url"]
    headers = {"Authorization": f"Bearer {(run_dir / 'status.key').read_text()}"}
    with urllib.request.urlopen(urllib.request.Request(f"{url}/metrics", headers=headers)) as answer:
        text = answer.read().decode()
    for family in ("reward_mean", "buffer_running", "tokens_generated_total", "engine_decode_seconds_total"):
        assert f"\nasyncrl_{family} " in text
    process.send_signal(signal.SIGINT)
    run = ended(process)
    assert run.returncode == 130, run.stderr
    assert "tracker trackers_for_test:Raising is turned off, the run continues" in run.stdout
    told = read_lines(tmp_path / "Noting")
    num_steps = len(read_lines(run_dir / "metrics.jsonl"))
    assert [call[1] for call in told if call[0] == "step"] == [*range(1, num_steps + 1)]  # type: ignore[index]
    assert told[-1] == ["close", "interrupted"]
    status = json.loads((run_dir / "status.json").read_text())
    assert (status["state"], "status_url" in status) == ("interrupted", False)
