"""Trackers of a run: told in their order, once, and by a thread that neither holds up nor ends the run."""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from job_runs import write_config
from pydantic import ValidationError
from trackers_for_test import Elsewhere, Hanging, Noting, Raising

from asyncrl.config import ObserveConfig, load_config
from asyncrl.config.operation import TRACKERS
from asyncrl.errors import OF_TRAIN, ConfigError
from asyncrl.job.life import Life
from asyncrl.job.loop import run_job
from asyncrl.observe.trackers import background
from asyncrl.observe.trackers.background import MAX_WAITING, Background, wait_closed
from asyncrl.observe.trackers.tracker import SAMPLE_COLUMNS, TrackedRun, sample_rows
from asyncrl.observe.trackers.tracker_names import KINDS, check_trackers, make_trackers
from asyncrl.testing.virtual_time import run_virtual

ALL = {"later": "metrics.jsonl has all"}


@pytest.fixture(autouse=True)
def left(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Those that were left behind; not those of other tests."""
    monkeypatch.setattr(background, "LEFT", names := list[str]())
    return names


def started(run_dir: Path, make: Callable[[], Any], said: list[str], name: str = "mine") -> Background:
    tracker = Background(name, make, said.append, **ALL)
    tracker.start(TrackedRun(run_dir, "a run", "0123", {"seed": 1}))
    return tracker


def ended(tracker: Background) -> None:
    """Once its thread has told all; without a limit, so that no slow machine matters."""
    tracker.close("done")
    tracker.closed.result()
    tracker.say_news()


def calls(path: Path) -> list[list[Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_tracker_is_told_everything_in_order_and_once_over_all_resumes(tmp_path: Path) -> None:
    log, said, picture = tmp_path / "log", list[str](), tmp_path / "reward.png"
    for first in (0, 1):
        tracker = started(tmp_path, partial(Noting, log), said)
        for step in (first, first + 1):
            tracker.step(step, {"reward/mean": 1.0})
            tracker.samples(step, [])
            tracker.evaluation(step, {})
        tracker.weights(first, "digest")
        tracker.picture("reward", picture)
        ended(tracker)
    end = [["picture", "reward", "reward.png"], ["close", "done"]]
    both = [
        [kind, step, *more]
        for step in (0, 1, 2)
        for kind, *more in (("step", True), ("samples",), ("evaluation",))
    ]
    assert calls(log) == [
        *(["start", "a run", ""], *both[:6], ["weights", 0], *end),
        *(["start", "a run", "there"], *both[6:], ["weights", 1], *end),
    ]
    assert said == []


@pytest.mark.parametrize("damage", ["", '{"id": "the', "[]"])
def test_a_tracker_that_is_shown_elsewhere_or_has_no_whole_file_is_told_from_where_the_run_goes_on(
    damage: str, tmp_path: Path
) -> None:
    log, kept = tmp_path / "log", tmp_path / "trackers" / "mine.json"
    for kind in (Noting, Noting if damage else Elsewhere):
        tracker = started(tmp_path, partial(kind, log), [])
        tracker.step(3, {})
        ended(tracker)
        assert json.loads(kept.read_text()) == {"id": kind.shown_at, "step": 3}
        kept.write_text(damage or kept.read_text())
    assert [call[1] for call in calls(log) if call[0] == "step"] == [3, 3]


def test_one_that_raises_is_turned_off_by_name_and_the_others_go_on(tmp_path: Path, left: list[str]) -> None:
    said, logs = list[str](), (tmp_path / "raises", tmp_path / "goes on")
    trackers = [
        started(tmp_path, partial(Raising, logs[0]), said, "mine:Raising"),
        started(tmp_path, partial(Noting, logs[1]), said, "mine:Noting"),
        started(tmp_path, partial(Noting, tmp_path / "no" / "folder"), said, "mine:Unable"),
    ]
    for tracker in trackers:
        for step in range(4):
            tracker.step(step, {})
        ended(tracker)
    assert [call[1] for call in calls(logs[0]) if call[0] == "step"] == [0]
    assert calls(logs[1])[-1] == ["close", "done"]
    assert said[0] == (
        "tracker mine:Raising: turned off, the run goes on without it: step() raised SystemExit: no quota is "
        "left. metrics.jsonl has all"
    )
    assert "mine:Unable: turned off, the run goes on without it: start() raised FileNotFoundError" in said[1]
    assert sorted(left) == ["mine:Raising", "mine:Unable"]


def test_while_one_hangs_every_call_returns_and_the_oldest_that_wait_are_left_out_and_counted(
    tmp_path: Path, left: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Hanging, "let_go", let_go := threading.Event())
    monkeypatch.setattr("atexit.register", lambda wait: None)
    said, log = list[str](), tmp_path / "log"
    tracker = started(tmp_path, partial(Hanging, log), said, "slow")
    for step in range(MAX_WAITING + 100):
        tracker.step(step, {})
    tracker.close("done")
    assert MAX_WAITING >= len(tracker._waiting) >= MAX_WAITING - 1
    assert 100 <= tracker.num_dropped <= 101, "one may be in hand"
    assert [text for text in said if "is slow" in text] == said
    assert len(said) == 1
    told: list[str] = []
    run_virtual(wait_closed([tracker], 30.0, told.append, said.append))  # 30 virtual seconds
    assert told == ["waiting for slow, 30 s at most (Ctrl-C: no longer)"]
    assert "tracker slow: not done in time (observe.tracker_close_s=30), and left to itself" in said[1]
    assert f"tracker slow: {tracker.num_dropped} calls were left out" in said[2]
    assert left == ["slow"]
    (thread,) = (one for one in threading.enumerate() if one.name == "tracker slow")
    let_go.set()
    thread.join()
    assert calls(log)[-1] == ["close", "done"], "what came late is no error in the thread"


LEAVES = """
import asyncio, sys
from pathlib import Path
from trackers_for_test import Hanging
from asyncrl.cli import _exit
from asyncrl.observe.trackers.background import Background, wait_closed
from asyncrl.observe.trackers.tracker import TrackedRun
log = Path(sys.argv[1]) / "log"
tracker = Background("slow", lambda: Hanging(log), print)
tracker.start(TrackedRun(log.parent, "a run", "0123", {}))
tracker.step(0, {})
while not log.exists() or "hangs" not in log.read_text():
    pass
tracker.close("done")
asyncio.run(wait_closed([tracker], 0.0, print, print))
_exit(int(sys.argv[2]))
"""


@pytest.mark.parametrize("code", [0, 1])
def test_the_process_ends_with_its_code_although_the_client_of_a_late_tracker_waits_at_its_end(
    code: int, tmp_path: Path
) -> None:
    here = str(Path(__file__).parent)
    command = [sys.executable, "-c", LEAVES, str(tmp_path), str(code)]
    process = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": here})
    assert process.returncode == code, process.stderr
    assert "tracker slow: not done in time" in process.stdout


def test_a_tracker_that_was_never_started_is_not_waited_for() -> None:
    run_virtual(wait_closed([Background("mine", lambda: Noting("log"), print)], 30.0, print, print))


def test_a_signal_ends_the_wait_for_trackers_and_not_the_exit_code(tmp_path: Path) -> None:
    class Short(Life):
        async def live(self) -> int:
            return 0

    async def waits() -> None:
        main = asyncio.current_task()
        assert main is not None
        life._on_signal(2, main)
        await asyncio.Event().wait()

    voice: Any = SimpleNamespace(
        **dict.fromkeys(("say", "say_secret", "tell", "warn", "finish"), lambda *_: None)
    )
    voice.aclose = waits
    config: Any = SimpleNamespace(launcher="local")
    life = Short(config, tmp_path, voice)
    assert asyncio.run(life.run()) == 0


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
    "spans": [(0, 2, 3)],
    "staleness": None,
    "logprob_gap": None,
    "is_truncated": True,
    "num_interruptions": 0,
    "branches": [
        {
            "branch": 0,
            "parent": None,
            "num_shared": 0,
            "num_tokens": 3,
            "stretches": [
                {"is_sampled": False, "text": "Add."},
                {"is_sampled": True, "text": "call"},
                {"is_sampled": False, "text": "result"},
                {"is_sampled": True, "text": "5"},
            ],
        }
    ],
    "error": None,
}


def test_a_row_of_a_sample_has_its_prompt_and_what_was_sampled() -> None:
    (row,) = sample_rows([SAMPLE])
    found = dict(zip(SAMPLE_COLUMNS, row, strict=True))
    assert found["prompt"] == "system: Add.\nuser: <script>"
    assert (found["completion"], found["reward"], found["truncated"]) == ("call\n\n5", 0.5, True)


OWN = "trackers_for_test:Noting"


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"trackers": ["wandbb"]}, "trackers has 'wandbb'; there are tensorboard, wandb, mlflow, trackio"),
        ({"trackers": ["wandb", "wandb"]}, "trackers has wandb twice"),
        ({"tracker_args": {"own": {OWN: {}}}}, f"tracker_args.own has {OWN}, and observe.trackers has not"),
        ({"tracker_args": {"wandb": {"projekt": "x"}}}, "tracker_args.wandb.projekt"),
        ({"status_port": 70000}, "status_port"),
    ],
)
def test_what_is_not_known_of_trackers_is_refused_by_the_config(given: dict[str, Any], says: str) -> None:
    with pytest.raises(ValidationError, match="(?s)" + says):
        ObserveConfig.model_validate(given)


@pytest.mark.parametrize(
    ("name", "args", "says"),
    [
        (OWN, {}, "cannot be called as"),
        (OWN, {"path": "a", "paht": "b"}, "paht"),
        ("trackers_for_test:Lacking", {}, "has no start, evaluation, samples, weights, picture, close"),
        ("trackers_for_test:Nothing", {}, "did you mean Noting?"),
        ("no_such_module:Mine", {}, "there is no module no_such_module"),
    ],
)
def test_a_tracker_of_the_users_is_loaded_and_looked_at_before_a_run(
    name: str, args: dict[str, Any], says: str
) -> None:
    observe = ObserveConfig.model_validate({"trackers": [name], "tracker_args": {"own": {name: args}}})
    with pytest.raises(ConfigError, match=says.replace("?", r"\?")):
        check_trackers(observe)


def test_a_run_whose_tracker_cannot_be_had_starts_and_writes_nothing(tmp_path: Path) -> None:
    config = load_config(write_config(tmp_path, observe={"trackers": ["trackers_for_test:Lacking"]}))
    with pytest.raises(ConfigError, match="has no start"):
        run_job(config, tmp_path / "run", name="test")
    assert not (tmp_path / "run").exists()


def test_a_tracker_of_the_users_gets_its_arguments(tmp_path: Path) -> None:
    observe = ObserveConfig.model_validate(
        {"trackers": [OWN], "tracker_args": {"own": {OWN: {"path": str(tmp_path / "log")}}}}
    )
    check_trackers(observe)
    (tracker,) = make_trackers(observe, tmp_path, print)
    tracker.start(TrackedRun(tmp_path, "a run", "0123", {}))
    ended(tracker)
    assert calls(tmp_path / "log") == [["start", "a run", ""], ["close", "done"]]


def test_the_settings_and_the_tracker_of_the_page_are_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = (Path(__file__).parents[1] / "docs" / "monitoring.md").read_text()
    blocks = re.findall(r"```(yaml|python)\n(.*?)```", page, re.DOTALL)
    (tmp_path / "my_tracker.py").write_text("".join(text for kind, text in blocks if kind == "python"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    settings = [yaml.safe_load(text) for kind, text in blocks if kind == "yaml"]
    shown = [ObserveConfig.model_validate(one["observe"]) for one in settings if "observe" in one]
    assert [observe.trackers for observe in shown] == [
        ["tensorboard", "wandb"],
        ["tensorboard", "my_tracker:Printer"],
    ]
    with monkeypatch.context() as patch:  # wandb comes with an extra
        patch.setattr("asyncrl.observe.trackers.tracker_names.find_spec", lambda package: object())
        for observe in shown:
            check_trackers(observe)
    said: list[str] = []
    (own,) = make_trackers(
        shown[1].model_copy(update={"trackers": ["my_tracker:Printer"]}), tmp_path, said.append
    )
    own.start(TrackedRun(tmp_path, "a run", "0123", {"seed": 1}))
    own.step(0, {"reward/mean": 0.5})
    ended(own)
    assert said == []


@pytest.mark.parametrize("name", TRACKERS)
def test_a_client_that_is_not_installed_is_an_error_that_names_its_extra(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert [*KINDS] == [*TRACKERS]
    monkeypatch.setattr("asyncrl.observe.trackers.tracker_names.find_spec", lambda package: object())
    check_trackers(ObserveConfig(trackers=[name]))
    monkeypatch.setattr("asyncrl.observe.trackers.tracker_names.find_spec", lambda package: None)
    if name == "tensorboard":  # of the extra train: asyncrl.cli names it, and check goes on without
        with pytest.raises(ModuleNotFoundError) as absent:
            check_trackers(ObserveConfig(trackers=[name]))
        assert absent.value.name in OF_TRAIN
        return
    with pytest.raises(ConfigError, match=rf"pip install 'asyncrl\[{KINDS[name].extra}\]'") as refused:
        check_trackers(ObserveConfig(trackers=[name]))
    assert refused.value.exit_code == 2
