"""Trackers get all calls in order and once, from a thread that neither delays nor ends the run."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import threading
import urllib.request
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from job_runs import ended, read_lines, start, wait_until, write_config
from pydantic import ValidationError
from trackers_for_test import Elsewhere, Hanging, Noting, Raising

from asyncrl.base.errors import ConfigError
from asyncrl.config import ObserveConfig
from asyncrl.config.run_config import TRACKERS
from asyncrl.job.lifecycle import Lifecycle, RunLog
from asyncrl.launch.launchers import LocalLauncher
from asyncrl.observe import trackers as trackers_module
from asyncrl.observe.trackers import (
    MAX_WAITING,
    Background,
    TrackedRun,
    check_trackers,
    make_trackers,
    sample_table,
)


@pytest.fixture(autouse=True)
def left(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the names of late trackers, without other tests' names."""
    monkeypatch.setattr(trackers_module, "LEFT", names := list[str]())
    return names


def started(run_dir: Path, said: list[str], **makers: Callable[[], Any]) -> Background:
    trackers = Background(makers, said.append)
    trackers.start(TrackedRun(run_dir, "a run", "0123", {"seed": 1}))
    return trackers


def finish(trackers: Background) -> None:
    """End the run and its thread, without a limit."""
    trackers.tell("close", "done")
    assert trackers._thread is not None
    trackers._thread.join()
    trackers._show_warnings()


def calls(path: Path) -> list[list[Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_tracker_gets_everything_in_order_and_once_over_resumes(tmp_path: Path) -> None:
    log, said = tmp_path / "log", list[str]()
    for first in (0, 1):
        trackers = started(tmp_path, said, mine=partial(Noting, log))
        for step in (first, first + 1):
            trackers.tell("step", step, {"reward/mean": 1.0})
            trackers.tell("samples", step, [])
            trackers.tell("evaluation", step, {})
        trackers.tell("weights", first, "digest")
        finish(trackers)
    end = [["close", "done"]]
    both = [
        [kind, step, *more]
        for step in (0, 1, 2)
        for kind, *more in (("step", True), ("samples",), ("evaluation",))
    ]
    assert calls(log) == [
        *(["start", "a run"], *both[:6], ["weights", 0], *end),
        *(["start", "a run"], *both[6:], ["weights", 1], *end),
    ]
    assert said == []


@pytest.mark.parametrize("damage", ["", '{"id": "the', "[]"])
def test_a_tracker_in_another_place_gets_all_steps(damage: str, tmp_path: Path) -> None:
    log, kept = tmp_path / "log", tmp_path / "trackers" / "mine.json"
    for kind in (Noting, Noting if damage else Elsewhere):
        trackers = started(tmp_path, [], mine=partial(kind, log))
        trackers.tell("step", 3, {})
        finish(trackers)
        assert json.loads(kept.read_text()) == {"id": kind.shown_at, "step": 3}
        kept.write_text(damage or kept.read_text())
    assert [call[1] for call in calls(log) if call[0] == "step"] == [3, 3]


def test_a_tracker_that_raises_is_turned_off_and_others_continue(tmp_path: Path, left: list[str]) -> None:
    said, logs = list[str](), (tmp_path / "raises", tmp_path / "continues")
    makers = {
        "Raising": partial(Raising, logs[0]),
        "Noting": partial(Noting, logs[1]),
        "Unable": partial(Noting, tmp_path / "no" / "folder"),
    }
    trackers = started(tmp_path, said, **makers)
    for step in range(4):
        trackers.tell("step", step, {})
    finish(trackers)
    assert [call[1] for call in calls(logs[0]) if call[0] == "step"] == [0]
    assert calls(logs[1])[-1] == ["close", "done"]
    assert sorted(left) == ["Raising", "Unable"]
    assert any("Raising is turned off" in text and "SystemExit: no quota is left" in text for text in said)


def test_a_tracker_that_hangs_holds_up_no_call(
    tmp_path: Path, left: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Hanging, "let_go", let_go := threading.Event())
    monkeypatch.setattr("atexit.register", lambda wait: None)
    said, log = list[str](), tmp_path / "log"
    trackers = started(tmp_path, said, slow=partial(Hanging, log))
    for step in range(MAX_WAITING + 100):
        trackers.tell("step", step, {})
    trackers.tell("close", "done")
    assert 100 <= trackers.num_dropped <= 101, "the thread may hold one"
    assert len(said) == 1
    told: list[str] = []
    asyncio.run(trackers.wait_closed(1.5, told.append))
    assert told == ["waiting up to 1.5 s for slow (Ctrl-C: stop waiting)"]
    assert len(said) == 3
    assert left == ["slow"]
    let_go.set()
    assert trackers._thread is not None
    trackers._thread.join()
    assert calls(log)[-1] == ["close", "done"]


def test_signal_ends_the_wait_for_trackers(tmp_path: Path) -> None:
    async def live() -> int:
        return 0

    async def waits() -> None:
        main = asyncio.current_task()
        assert main is not None
        life._on_signal(2, main)
        await asyncio.Event().wait()

    config: Any = SimpleNamespace(launcher="local")
    life = Lifecycle(config, tmp_path, RunLog(lambda _: None), LocalLauncher(), on_exit=waits)
    assert asyncio.run(life.run(live)) == 0


SAMPLE: Any = {
    "step": 3,
    "kind": "worst",
    "group_id": 7,
    "sample_index": 1,
    "prompt_id": "p",
    "messages": [{"role": "system", "content": "Add."}, {"role": "user", "content": "<script>"}],
    "reward": 0.5,
    "metrics": {},
    "num_sampled": 2,
    "versions": [3, 3],
    "staleness": None,
    "logprob_gap": None,
    "is_truncated": True,
    "num_interruptions": 0,
    "parts": [
        {"branch": 0, "is_sampled": False, "text": "Add."},
        {"branch": 0, "is_sampled": True, "text": "call"},
        {"branch": 0, "is_sampled": False, "text": "result"},
        {"branch": 0, "is_sampled": True, "text": "5"},
    ],
    "error": None,
}


def test_a_sample_row_has_prompt_and_completion() -> None:
    table = sample_table([SAMPLE])
    found = dict(zip(table["columns"], *table["data"], strict=True))
    assert found["prompt"] == "system: Add.\nuser: <script>"
    assert (found["completion"], found["reward"], found["is_truncated"]) == ("call\n\n5", 0.5, True)


OWN = "trackers_for_test:Noting"


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"trackers": ["wandbb"]}, "trackers has 'wandbb'; there are tensorboard, wandb, mlflow, trackio"),
        ({"tracker_args": {OWN: {}}}, f"tracker_args has {OWN}, but observe.trackers does not"),
    ],
)
def test_the_config_refuses_unknown_trackers(given: dict[str, Any], says: str) -> None:
    with pytest.raises(ValidationError, match="(?s)" + says):
        ObserveConfig.model_validate(given)


@pytest.mark.parametrize(
    ("name", "args", "says"),
    [
        (OWN, {}, "cannot be called as"),
        (OWN, {"path": "a", "paht": "b"}, "paht"),
        ("pathlib:Path", {}, "is not a subclass of Tracker"),
        ("trackers_for_test:Nothing", {}, "did you mean Noting?"),
        ("wandb", {"projekt": "x"}, "projekt"),
        ("no_such_module:Mine", {}, "there is no module no_such_module"),
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
    trackers = make_trackers(own.model_copy(update={"trackers": ["my_tracker:Printer"]}), said.append)
    trackers.start(TrackedRun(tmp_path, "a run", "0123", {"seed": 1}))
    trackers.tell("step", 0, {"reward/mean": 0.5})
    finish(trackers)
    assert said == []


@pytest.mark.parametrize("name", TRACKERS)
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
