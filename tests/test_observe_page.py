"""The timeline, its trace, and the page of a run: report and live."""

from __future__ import annotations

import json
import math
import re
import sqlite3
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from conftest import NUM_STEPS
from job_runs import read_lines

from asyncrl.base.errors import ConfigError
from asyncrl.base.files import run_lock
from asyncrl.base.waits import TimedSpan
from asyncrl.config import RunConfig, run_config_yaml
from asyncrl.journal import schema
from asyncrl.observe import timeline
from asyncrl.observe.page import (
    MAX_BUCKETS,
    STATIC,
    cause_of,
    curves_of,
    make_page,
    render,
    view_run,
    without_secrets,
    write_report,
)
from asyncrl.observe.run_dir import TIMELINE_FILE, Recorder, append_lines
from asyncrl.observe.run_numbers import Steps
from asyncrl.observe.timeline import Row, TimelineWriter, read_timeline, timeline_view, trace_of

HOSTILE = "</script><script>alert(1)</script><!-- \u2028 /*STYLE*/ /*DATA*/ ${x} `\\"
SECTIONS: dict[str, Any] = {
    "model": {"path": "m"},
    "task": {"python": "a:B"},
    "buffer": {"max_staleness": 2},
    "trainer": {"num_steps": 9},
}


def make_run(run_dir: Path, num_steps: int = 4, *, state: str = "done", **sections: Any) -> Path:
    """Write a run directory with steps of one second."""
    run_dir.mkdir(exist_ok=True)
    config = RunConfig.model_validate({**SECTIONS, **sections})
    (run_dir / "config.yaml").write_text(run_config_yaml(config))
    recorder = Recorder(run_dir)
    spans = TimelineWriter(run_dir)
    spans.open()
    note_start(spans, 0.0, 0.5)
    for step in range(num_steps):
        numbers = {"reward/mean": 0.1 * step, "sample/staleness_mean": 1.0, "sample/staleness_max": 2}
        times = {"perf/step_s": 1.0, "perf/train_s": 0.6, "perf/wait_generation_s": 0.3}
        others = {"policy/entropy": 2.0, "perf/host_memory_bytes": 2.0**30}
        recorder.record_step({"step": step + 1, "time_s": step + 1.0, **numbers, **times, **others})
        note_step(spans, step, 1.0 + step)
    if num_steps:
        texts = ("b 7", HOSTILE, "1 \u202e2 + 3 \x1b[2J\x00")
        lines = [make_sample(step=step, text=text) for step, text in enumerate(texts)]
        append_lines(run_dir / "samples.jsonl", lines)
    recorder.write_status({"state": state, "why": "the disk is full" if state == "failed" else ""})
    spans.close()
    schema.create(run_dir / "journal.sqlite", "a run")
    return run_dir


def note_start(spans: TimelineWriter, start_s: float, end_s: float) -> None:
    spans.note(TimedSpan("restarts", "start", start_s, end_s, 0))


def note_step(spans: TimelineWriter, step: int, start_s: float) -> None:
    spans.note(TimedSpan("trainer", "wait for generation", start_s, start_s + 0.3, step))
    spans.note(TimedSpan("trainer", "train", start_s + 0.3, start_s + 0.9, step))
    spans.note(TimedSpan("weight sync", "commit", start_s + 1.0, start_s + 1.1, step + 1, HOSTILE))
    spans._busy_at_s = start_s if step == 0 else spans._busy_at_s
    spans.slots({"engine-0": 8.0 * start_s, "engine-1": 4.0 * start_s}, start_s + 1.0)


def make_sample(*, step: int, text: str = "b 7") -> Any:
    numbers = {"num_sampled": 1, "versions": [step, step], "staleness": 0, "logprob_gap": None}
    flags = {"is_truncated": False, "num_interruptions": 0, "error": None, "reward": 0.5, "metrics": {}}
    names = {"step": step, "kind": "best", "group_id": 0, "sample_index": 0, "prompt_id": "p"}
    parts = [{"branch": 0, "is_sampled": True, "text": text}]
    messages = [{"role": "user", "content": text}]
    return {**names, **numbers, **flags, "parts": parts, "messages": messages}


def page_of(*run_dirs: Path) -> Any:
    return make_page(run_dirs)


def embedded(html: str) -> Any:
    (found,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', html, re.DOTALL)
    return json.loads(found)


def lanes_of(view: Any) -> dict[str, list[tuple[str, float, float, str]]]:
    found = defaultdict(list)
    for lane, kind, start_s, end_s, text in view["spans"]:
        found[view["lanes"][lane]].append((view["kinds"][kind]["name"], start_s, end_s, text))
    return found


# ---- the timeline


def test_a_resumed_timeline_continues_and_shows_the_gap(tmp_path: Path) -> None:
    make_run(tmp_path, 2)
    path = tmp_path / TIMELINE_FILE
    with path.open("a") as file:
        file.write('["trainer","tra')  # killed
    before = path.read_text()
    second = TimelineWriter(tmp_path)
    second.note(TimedSpan("trainer", "train again", 100.2, 100.9, 2, "a lone surrogate: \ud800"))
    note_start(second, 100.0, 101.0)
    assert path.read_text() == before, "a refused resume changes nothing"
    second.open()
    note_step(second, 2, 101.0)
    second.close()
    assert path.read_text().startswith(before)
    problems: list[str] = []
    shown = lanes_of(timeline_view(read_timeline(tmp_path, problems), [(9.0, "engine lost")], 8))
    assert len(problems) == 1, "half a line"
    assert [text for kind, *_, text in shown["trainer"] if kind == "train"] == ["step 1", "step 2", "step 3"]
    assert [kind for kind, *_ in shown["start"]] == ["start"], "the first start is not a restart"
    assert [kind for kind, *_ in shown["restarts"]] == ["event", "gone", "start"]
    (gone_s,) = [end_s - start_s for kind, start_s, end_s, _ in shown["restarts"] if kind == "gone"]
    assert gone_s == pytest.approx(100.0 - 3.1, abs=0.5), "from the last span of the first process"


def test_a_long_timeline_keeps_its_newest_spans(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timeline, "MAX_BYTES", 40_000)
    spans = TimelineWriter(tmp_path)
    spans.open()
    for step in range(1000):
        note_step(spans, step, float(step))
    spans.close()
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 2 * 40_000 + 1000
    shown = lanes_of(timeline_view(read_timeline(tmp_path, []), [], 8))
    steps = [text for kind, *_, text in shown["trainer"] if kind == "train"]
    assert steps == [f"step {step}" for step in range(1001 - len(steps), 1001)]
    assert len(steps) > 50


@pytest.mark.parametrize(
    "line", ["[1,2,3]", '["trainer","train","now",1.0,0,""]', '["","slots",1.0,1.0,-1,{"e":"x"}]', "\x00"]
)
def test_invalid_rows_are_skipped_and_reported(tmp_path: Path, line: str) -> None:
    (tmp_path / TIMELINE_FILE).write_text(f'{line}\n["trainer","train",1.0,1.0,0,""]\n')
    problems: list[str] = []
    assert len(read_timeline(tmp_path, problems)) == 1
    assert len(problems) == 1


def assert_trace(trace: Any) -> list[Any]:
    """Check the fields of Chrome's Trace Event Format, and that complete events of a track do not overlap."""
    events: list[Any] = trace["traceEvents"]
    of_phase = {"M": {"args"}, "X": {"ts", "dur", "cat", "args"}, "C": {"ts", "args"}}
    assert all(event.keys() == {"ph", "name", "pid", "tid"} | of_phase[event["ph"]] for event in events)
    free = defaultdict[int, int](int)
    spans = [event for event in events if event["ph"] == "X"]
    for event in sorted(spans, key=lambda event: event["ts"]):
        assert event["ts"] >= free[event["tid"]], event
        free[event["tid"]] = event["ts"] + event["dur"]
    assert {event["tid"] for event in spans} == {e["tid"] for e in events if e["name"] == "thread_name"}
    return events


def test_the_trace_has_the_format_of_perfetto(tmp_path: Path) -> None:
    make_run(tmp_path)
    rows = read_timeline(tmp_path, [])
    rows += [Row("checkpoints", "checkpoint", rows[0].start_s + late_s, 2.0, 1, "") for late_s in (0, 1)]
    events = assert_trace(trace_of(rows, "made up"))
    assert {"busy": 8.0} in [event["args"] for event in events if event["name"] == "requests of engine-0"]


# ---- the page


def test_curves_are_bounded_with_true_means_and_extremes() -> None:
    steps = Steps()
    for step in range(10_000):
        late = {"eval/reward_mean": 1.0} if step >= 5000 else {}
        steps.add({"step": step, "a": float(step % 7), **late})
    shown = curves_of(steps)
    points = len(shown["step"]["mean"])
    assert MAX_BUCKETS / 2 <= points <= MAX_BUCKETS
    assert {len(curve["mean"]) for curve in shown.values()} == {points}
    assert (set(shown["a"]["low"]), shown["a"]["high"][0]) == ({0.0}, 6.0)
    assert math.fsum(filter(None, shown["a"]["mean"])) / points == pytest.approx(3.0, rel=0.01)
    assert (shown["eval/reward_mean"]["mean"][0], shown["eval/reward_mean"]["mean"][-1]) == (None, 1.0)


def test_the_page_shows_the_verdict_and_its_reasons(tmp_path: Path) -> None:
    view = view_run(make_run(tmp_path / "run"))
    assert (view["problems"], view["ended"], view["why"]) == ([], "", "4 of 9 steps done")
    verdict = view["verdict"]
    assert verdict["headline"].startswith("Too short to say whether it learns: reward 0.050 at the start")
    assert (verdict["reward"]["last"], view["num_recent"], view["window"]) == (pytest.approx(0.25), 2, 2)
    assert view["curves"]["reward/mean"]["mean"] == [0.0, 0.1, 0.2, 0.3]
    assert [tile["label"] for tile in view["tiles"]] == ["steps", "time", "staleness"]
    assert math.fsum(verdict["shares"].values()) == pytest.approx(1.0)
    differing = [setting["key"] for setting in view["settings"] if setting["differs"]]
    assert differing == ["model.path", "task.python", "buffer.max_staleness", "trainer.num_steps"]
    assert view["timeline"]["slots"].keys() == {"engine-0", "engine-1"}
    assert view["gauges"]["perf/step_s"]["unit"] == "s"


def test_model_text_closes_no_element_of_the_page(tmp_path: Path) -> None:
    html = render(page_of(make_run(tmp_path / "run")))
    template = render(page_of())
    for tag in ("<script", "</script", "<!--"):
        assert html.lower().count(tag) == template.lower().count(tag)
    (run,) = embedded(html)["runs"]
    assert HOSTILE in [part["text"] for sample in run["samples"] for part in sample["parts"]]
    assert any(HOSTILE in span[4] for span in run["timeline"]["spans"])


def garbage(path: Path) -> None:
    path.write_bytes(b"\x00\xff{[" * 400)


def folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize("damage", [garbage, folder, Path.unlink])
@pytest.mark.parametrize(
    "name", ["metrics.jsonl", "status.json", "journal.sqlite", TIMELINE_FILE, "samples.jsonl"]
)
def test_a_damaged_file_is_reported_and_the_rest_shown(tmp_path: Path, name: str, damage: Any) -> None:
    make_run(tmp_path)
    damage(tmp_path / name)
    (run,) = embedded(render(page_of(tmp_path)))["runs"]
    assert run["name"] == tmp_path.name
    may_be_missing = name != "journal.sqlite"
    is_reported = any(name in problem for problem in run["problems"])
    assert is_reported or (damage is Path.unlink and may_be_missing)


@pytest.mark.parametrize(
    ("state", "num_steps"), [("starting", 0), ("running", 0), ("running", 1), ("failed", 1), ("???", 1)]
)
def test_a_run_in_any_state_is_shown(tmp_path: Path, state: str, num_steps: int) -> None:
    make_run(tmp_path, num_steps, state=state)
    with run_lock(tmp_path / "run.lock"):
        page = page_of(tmp_path)
    assert render(page)
    (view,) = page["runs"]
    assert ("the disk is full" in view["ended"]) == (state == "failed")
    is_timed = "time left" in [tile["label"] for tile in view["tiles"]]
    assert is_timed == (state == "running" and num_steps == 1)


def test_no_secret_appears_on_the_page(tmp_path: Path) -> None:
    secret = "correct-horse-battery"
    harness = {"command": ["agent"], "env": {"JUDGE": secret, "URL": "x"}, "args": {}}
    task = {"python": "a:B", "args": {"api_key": secret, "nested": [{"password": "short"}], "path": "p"}}
    make_run(tmp_path, generator=harness, task=task)
    known = "sk-abcdefgh12345678"
    texts = (f"the judge refused {secret}", f"Authorization: Bearer {known}", f"{known} is invalid")
    Recorder(tmp_path).write_status({"state": "running", "warnings": list(texts)})
    append_lines(tmp_path / "samples.jsonl", [make_sample(step=3, text=text) for text in texts])
    html = render(page_of(tmp_path))
    assert secret not in html
    assert known not in html
    settings = {setting["key"]: setting["value"] for setting in embedded(html)["runs"][0]["settings"]}
    assert "JUDGE" in settings["generator.env"]
    assert settings["task.args"].count("(hidden)") == 2
    assert "'path': 'p'" in settings["task.args"]
    assert without_secrets(["max_tokens=5", {"a": ["key"]}], []) == ["max_tokens=5", {"a": ["key"]}]


def test_failures_are_counted_by_cause_with_an_example(tmp_path: Path) -> None:
    make_run(tmp_path)
    with sqlite3.connect(tmp_path / "journal.sqlite") as journal:
        insert = (
            "INSERT INTO groups (group_id, prompt_id, num_requeued, start_version, state, reason, admitted_s)"
            " VALUES (0, 'p0', 0, 0, 'failed', 'g0 has 0 usable rollouts of 4', 0)"
        )
        journal.execute(insert)
        for index in range(6):
            why = f"g0/r{index} is still in turn 1 after 600.0 s" if index < 4 else "no answer from 'x'"
            journal.execute("INSERT INTO failures VALUES (0, ?, 2, ?)", (index, why))
        detail = json.dumps({"name": "engine-0", "why": "killed by SIGKILL\nlog", "restart": 1})
        journal.execute("INSERT INTO events (s, what, detail) VALUES (5, 'engine lost', ?)", (detail,))
    journal.close()
    view = view_run(tmp_path)
    found = {failure["cause"]: failure["count"] for failure in view["failures"]}
    group = "group failed: N has N usable rollouts of N"
    assert found == {"N is still in turn N after N s": 4, "no answer from '…'": 2, group: 1}
    assert "g0/r0 is still in turn 1" in view["failures"][0]["example"]
    assert view["warnings"] == ["engine lost: engine-0: killed by SIGKILL"]
    assert cause_of("") == "no reason recorded"


def test_a_report_writes_only_the_page_and_the_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("a", "b"):
        make_run(tmp_path / name)
    before = {path: path.read_bytes() for path in (tmp_path / "a").iterdir()}
    [*write_report([tmp_path / "a"], None)]
    new = {path.name for path in {*(tmp_path / "a").iterdir()} - before.keys()}
    assert new - {"journal.sqlite-wal", "journal.sqlite-shm"} == {"report.html", "trace.json"}
    assert all(path.read_bytes() == content for path, content in before.items())
    assert_trace(json.loads((tmp_path / "a" / "trace.json").read_text()))
    [*write_report([Path("a"), Path("b")], None)]
    assert len(embedded((tmp_path / "report.html").read_text())["runs"]) == 2
    with pytest.raises(ConfigError, match="--out"):
        [*write_report([Path("a")], tmp_path / "no" / "such.html")]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_timeline_of_a_real_run_agrees_with_its_files(whole: Path) -> None:
    problems: list[str] = []
    rows = read_timeline(whole, problems)
    steps = read_lines(whole / "metrics.jsonl")
    by_step = defaultdict[int, dict[str, float]](lambda: defaultdict(float))
    for row in rows:
        if row.lane == "trainer":
            by_step[row.number][row.kind] += row.seconds
    for step in steps:
        spans = by_step[step["step"] - 1]
        for cause in ("generation", "stragglers", "publishing"):
            assert spans[f"wait for {cause}"] == pytest.approx(step[f"perf/wait_{cause}_s"], abs=1e-4)
        assert spans["train"] >= step["perf/train_s"] - 1e-4
        in_step = math.fsum(seconds for kind, seconds in spans.items() if kind not in ("copy", "record"))
        assert in_step <= step["perf/step_s"] + 1e-3
    evaluated = [line["policy_version"] for line in read_lines(whole / "eval.jsonl")]
    assert evaluated == [row.number for row in rows if row.kind == "evaluation"]
    view = view_run(whole)
    assert problems == view["problems"] == []
    lanes = ["trainer", "weight sync", "engine-0", "engine-1", "checkpoints", "evaluations", "start"]
    assert view["timeline"]["lanes"] == lanes
    assert max(busy for _, busy in view["timeline"]["slots"]["engine-0"]) > 0
    assert_trace(json.loads((whole / "trace.json").read_text()))
    assert (whole / TIMELINE_FILE).stat().st_size < 1500 * NUM_STEPS


def test_the_page_uses_no_network_and_no_raw_html() -> None:
    for path in [*STATIC.glob("*.js"), *STATIC.glob("*.css"), STATIC / "page.html"]:
        text = path.read_text()
        if path.suffix != ".html":
            assert not re.search(r"</script|</style|<!--", text, re.IGNORECASE), path
        urls = set(re.findall(r"https?://[^\s'\")]+", text))
        assert urls <= {"https://github.com/leeoniya/uPlot", "http://www.w3.org/2000/svg"}, path
        raw = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\("
        assert "uPlot" in path.name or not re.search(raw, text), path
