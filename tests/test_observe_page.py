from __future__ import annotations

import errno
import json
import math
import os
import re
import sqlite3
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from asyncrl.observe.page.curves import MAX_BUCKETS, curves_of
from asyncrl.observe.page.lanes import KINDS, MAX_SPANS, timeline_view
from asyncrl.observe.page.run_facts import cause_of, without_secrets
from asyncrl.observe.page.run_view import view_run
from asyncrl.observe.page.shape import Page, RunView, Timeline
from asyncrl.observe.page.trace import trace_of
from asyncrl.observe.recorder import Recorder
from conftest import NUM_STEPS
from job_runs import read_lines
from pydantic import TypeAdapter

import asyncrl
from asyncrl.base.errors import ConfigError
from asyncrl.base.files import RunLock
from asyncrl.base.spans import TimedSpan
from asyncrl.config import RunConfig, run_config_yaml
from asyncrl.journal import schema
from asyncrl.observe import timeline
from asyncrl.observe.page.render import make_page, render, write_report
from asyncrl.observe.run_dir import TIMELINE_FILE, append_lines
from asyncrl.observe.run_numbers import Steps
from asyncrl.observe.samples import read_samples
from asyncrl.observe.timeline import Row, TimelineWriter, read_timeline

HOSTILE = "</script><script>alert(1)</script><!-- \u2028 /*STYLE*/ /*DATA*/ ${x} `\\"
SECTIONS: dict[str, Any] = {
    "model": {"path": "m"},
    "task": {"python": "a:B"},
    "buffer": {"max_staleness": 2},
    "trainer": {"num_steps": 9},
}


def make_run(run_dir: Path, num_steps: int = 4, *, state: str = "done", **sections: Any) -> Path:
    """A run directory as the parts write it, of steps of a second."""
    run_dir.mkdir(exist_ok=True)
    config = RunConfig.model_validate({**SECTIONS, **sections})
    (run_dir / "config.yaml").write_text(run_config_yaml(config))
    recorder, spans = Recorder(run_dir), TimelineWriter(run_dir)
    spans.open()
    note_start(spans, 0.0, 0.5)
    for step in range(num_steps):
        numbers = {"reward/mean": 0.1 * step, "sample/staleness_mean": 1.0, "sample/staleness_max": 2}
        times = {"perf/step_s": 1.0, "perf/train_s": 0.6, "perf/wait_generation_s": 0.3}
        recorder.record_step({"step": step + 1, "time_s": step + 1.0, **numbers, **times})
        note_step(spans, step, 1.0 + step)
    if num_steps:
        append_lines(run_dir / "samples.jsonl", [make_sample(step=0), make_sample(step=0, text=HOSTILE)])
    recorder.write_status({"state": state, "why": "the disk is full" if state == "failed" else ""})
    spans.close()
    schema.create(run_dir / "journal.sqlite", "a run")
    return run_dir


def note_start(spans: TimelineWriter, start_s: float, end_s: float) -> None:
    spans.note(TimedSpan("restarts", "start", start_s, end_s, 0))


def note_step(spans: TimelineWriter, step: int, start_s: float) -> None:
    spans.note(TimedSpan("trainer", "wait for generation", start_s, start_s + 0.3, step))
    spans.note(TimedSpan("trainer", "train", start_s + 0.3, start_s + 0.9, step))
    spans.note(TimedSpan("weight sync", "export", start_s + 0.9, start_s + 1.0, step + 1))
    spans.note(TimedSpan("weight sync", "commit", start_s + 1.0, start_s + 1.1, step + 1, HOSTILE))
    spans._busy_at_s = start_s if step == 0 else spans._busy_at_s
    spans.slots({"engine-0": 8.0 * start_s, "engine-1": 4.0 * start_s}, start_s + 1.0)


def make_sample(*, step: int, text: str = "b 7") -> Any:
    parts = [{"branch": 0, "is_sampled": True, "text": text}]
    numbers = {"num_sampled": 1, "versions": [step, step], "staleness": 0, "logprob_gap": None}
    flags = {"is_truncated": False, "num_interruptions": 0, "error": None, "reward": 0.5, "metrics": {}}
    names = {"step": step, "kind": "best", "group_id": 0, "sample_index": 0, "prompt_id": "p"}
    return {
        **names,
        "messages": [{"role": "user", "content": text}],
        **numbers,
        **flags,
        "parts": parts,
    }


def embedded(html: str) -> Any:
    (found,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', html, re.DOTALL)
    return json.loads(found)


def lanes_of(view: Timeline) -> dict[str, list[tuple[str, float, float, str]]]:
    found = defaultdict(list)
    for lane, kind, start_s, end_s, text in view["spans"]:
        found[view["lanes"][lane]].append((view["kinds"][kind]["name"], start_s, end_s, text))
    return found


# ---- the time line


def test_a_second_life_of_a_run_goes_on_behind_the_first_and_the_time_between_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_run(tmp_path, 2)
    before = (tmp_path / TIMELINE_FILE).read_text()
    with (tmp_path / TIMELINE_FILE).open("a") as file:
        file.write('["trainer","tra')  # killed
    second = TimelineWriter(tmp_path)
    second.note(TimedSpan("trainer", "train again", 100.2, 100.9, 2))
    note_start(second, 100.0, 101.0)
    assert (tmp_path / TIMELINE_FILE).read_text().startswith(before), (
        "a resume that is refused changes nothing"
    )
    assert (tmp_path / TIMELINE_FILE).read_text().endswith('"tra')
    second.open()
    note_step(second, 2, 101.0)
    second.close()
    problems: list[str] = []
    rows = read_timeline(tmp_path / TIMELINE_FILE, problems)
    assert (tmp_path / TIMELINE_FILE).read_text().startswith(before)
    assert len(problems) == 1, "half a line"
    shown = lanes_of(timeline_view(rows, [], problems, 8))
    assert [text for kind, *_, text in shown["trainer"] if kind == "train"] == ["step 1", "step 2", "step 3"]
    assert [kind for kind, *_ in shown["start"]] == ["start"], "the first start is not a restart"
    assert [kind for kind, *_ in shown["restarts"]] == ["gone", "start"]
    (gone,) = [end_s - start_s for kind, start_s, end_s, _ in shown["restarts"] if kind == "gone"]
    assert gone == pytest.approx(100.0 - 3.1, abs=0.5), "from the last span of the first life"


def test_a_long_run_keeps_a_short_file_with_its_newest_and_its_longest_spans(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timeline, "MAX_BYTES", 40_000)
    spans, longest = TimelineWriter(tmp_path), 0
    spans.open()
    for step in range(3000):
        note_step(spans, step, float(step))
        if step == 7:
            spans.note(TimedSpan("checkpoints", "checkpoint", 0.0, 7.5, 7))
        longest = max(longest, (tmp_path / TIMELINE_FILE).stat().st_size)
    spans.close()
    assert longest <= 40_000 + 1000
    view = timeline_view(read_timeline(tmp_path / TIMELINE_FILE, []), [], [], 8)
    shown = lanes_of(view)
    steps = [text for kind, *_, text in shown["trainer"] if kind == "train"]
    assert view["is_thinned"]
    assert steps[-50:] == [f"step {step}" for step in range(2951, 3001)]
    assert [text for *_, text in shown["checkpoints"]] == ["version 7"]
    assert view["slots"]["engine-0"][5][1] == pytest.approx(8.0, abs=0.01), "means stay means"


def test_every_kind_of_span_that_the_product_notes_is_shown() -> None:
    source = "".join(path.read_text() for path in Path(asyncrl.__file__).parent.rglob("*.py"))
    calls = r"""\b(?:note_)?span\(\s*[\w.]*(?:"[^"]*")?,\s*f?"([^"{]+)"""
    kinds = set(re.findall(calls, source))
    assert {"train", "held for an evaluation", "pause", "wait for "} <= kinds
    assert [kind for kind in kinds if not any(known.startswith(kind) for known in KINDS)] == []
    problems: list[str] = []
    rows: list[Row] = [("weight sync", kind, 0.0, 1.0, 3, "") for kind in sorted(kinds & KINDS.keys())]
    shown = lanes_of(timeline_view(rows, [], problems, 8))["weight sync"]
    assert problems == []
    assert [text for kind, *_, text in shown if kind == "held for an evaluation"] == ["version 3"]


def test_the_page_shows_the_newest_spans_and_the_longest_of_the_others() -> None:
    rows: list[Row] = [("trainer", "train", float(step), 0.5, step, "") for step in range(3 * MAX_SPANS)]
    rows[5] = ("trainer", "train", 5.0, 0.9, 5, "")
    view = timeline_view(
        [("restarts", "start", 0.0, 0.1, 0, ""), *rows], [(9.0, "engine lost: engine-0")], [], 8
    )
    shown = lanes_of(view)
    assert len(view["spans"]) == MAX_SPANS
    assert view["is_thinned"]
    texts = [text for *_, text in shown["trainer"]]
    assert "step 6" in texts
    assert texts[-1] == f"step {3 * MAX_SPANS}"
    assert [text for *_, text in shown["start"]] == [""]
    assert [text for *_, text in shown["restarts"]] == ["engine lost: engine-0"]


def test_a_clock_that_is_set_moves_what_follows_and_no_duration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spans, now_s = TimelineWriter(tmp_path), time.time()
    spans.open()
    spans.note(TimedSpan("trainer", "train", 0.0, 1.0, 0))
    monkeypatch.setattr(time, "time", lambda: now_s + 5000.0)
    spans.note(TimedSpan("trainer", "train", 1.0, 2.0, 1, "a lone surrogate: \ud800"))
    spans.close()
    first, second = read_timeline(tmp_path / TIMELINE_FILE, [])
    assert (first[3], second[3], second[5]) == (1.0, 1.0, "a lone surrogate: ?")
    assert second[2] - first[2] == pytest.approx(5001.0, abs=2.0)


def test_a_disk_that_refuses_ends_the_time_line_and_not_the_run(tmp_path: Path) -> None:
    (tmp_path / TIMELINE_FILE).mkdir()
    spans = TimelineWriter(tmp_path)
    spans.open()
    note_step(spans, 0, 0.0)
    spans.close()


@pytest.mark.parametrize(
    "line",
    ["[1,2,3]", '["trainer","train","now",1.0,0,""]', '["","slots",1.0,1.0,-1,{"e":"x"}]', "\x00", "{}"],
)
def test_what_is_no_span_is_left_out_and_told(tmp_path: Path, line: str) -> None:
    (tmp_path / TIMELINE_FILE).write_text(f'{line}\n["trainer","train",1.0,1.0,0,""]\n')
    problems: list[str] = []
    assert len(read_timeline(tmp_path / TIMELINE_FILE, problems)) == 1
    assert len(problems) == 1


# ---- Perfetto

NUMBER, TEXT = {"type": "integer", "minimum": 0}, {"type": "string"}


def _event(phase: str, **fields: Any) -> dict[str, Any]:
    properties = {"ph": {"const": phase}, "name": TEXT, "pid": NUMBER, "tid": NUMBER, **fields}
    return {"properties": properties, "required": [*properties], "additionalProperties": False}


TIMES = {"ts": NUMBER, "cat": TEXT}
TRACE = {
    "type": "object",
    "properties": {
        "traceEvents": {
            "type": "array",
            "items": {
                "oneOf": [
                    _event("M", args={"type": "object", "minProperties": 1}),
                    _event("X", **TIMES, dur=NUMBER, args={"type": "object"}),
                    _event(
                        "C",
                        ts=NUMBER,
                        args={"type": "object", "additionalProperties": {"type": "number"}},
                    ),
                ]
            },
        },
        "displayTimeUnit": {"enum": ["ms", "ns"]},
        "otherData": {"type": "object"},
    },
    "required": ["traceEvents"],
    "additionalProperties": False,
}
"""Of the Trace Event Format, the phases that are written: metadata, complete and counter events."""


def assert_trace(trace: Any) -> dict[str, list[Any]]:
    """Its events by phase. Complete events of one track must not overlap."""
    jsonschema.validate(trace, TRACE)
    by_phase, free = defaultdict(list), defaultdict[int, int](int)
    for event in trace["traceEvents"]:
        by_phase[event["ph"]].append(event)
    for event in sorted(by_phase["X"], key=lambda event: event["ts"]):
        assert event["ts"] >= free[event["tid"]], event
        free[event["tid"]] = event["ts"] + event["dur"]
    named = [event["tid"] for event in by_phase["M"] if event["name"] == "thread_name"]
    assert {event["tid"] for event in by_phase["X"]} == {*named}
    return by_phase


def test_a_trace_is_of_the_format(tmp_path: Path) -> None:
    make_run(tmp_path)
    rows = read_timeline(tmp_path / TIMELINE_FILE, [])
    rows += [
        ("checkpoints", "checkpoint", rows[0][2], 2.0, 1, ""),
        ("checkpoints", "checkpoint", rows[0][2] + 1, 2.0, 2, ""),
    ]
    events = assert_trace(trace_of(rows, "made up"))
    busy = [event["args"] for event in events["C"] if event["name"] == "requests of engine-0"]
    assert {"busy": 8.0} in busy


# ---- curves


def test_curves_are_of_bounded_length_with_true_means_and_extremes() -> None:
    steps, num = Steps(), 10_000
    for step in range(num):
        late = {"eval/reward_mean": 1.0} if step >= 5000 else {}
        steps.add({"step": step, "time_s": 2.0 * step, "a": float(step % 7), **late})
    shown = curves_of(steps)
    points = len(shown["step"]["mean"])
    assert MAX_BUCKETS / 2 <= points <= MAX_BUCKETS
    assert {len(curve["mean"]) for curve in shown.values()} == {points}
    assert set(shown["a"]["low"]) == {0.0}
    assert shown["a"]["high"][0] == 6.0
    whole = [mean for mean in shown["a"]["mean"] if mean is not None]
    assert math.fsum(whole) / points == pytest.approx(3.0, rel=0.01)
    half = shown["eval/reward_mean"]["mean"]
    assert (half[0], half[-1]) == (None, 1.0)
    json.dumps(shown, allow_nan=False)


def test_short_runs_have_a_point_a_step_and_no_band() -> None:
    steps = Steps([{"step": step, "a": float(number)} for number, step in enumerate((0, 1, 2, 1, 2))])
    assert curves_of(steps) == {"step": {"mean": [0.0, 1.0, 2.0]}, "a": {"mean": [0.0, 3.0, 4.0]}}
    assert curves_of(Steps()) == {}


# ---- the page


def test_a_run_is_shown_with_its_verdict_first_and_all_that_explains_it(tmp_path: Path) -> None:
    make_run(tmp_path / "run")
    page = make_page([tmp_path / "run"])
    TypeAdapter(Page).validate_python(page)
    (view,) = page["runs"]
    assert view["problems"] == []
    told = view["verdict"]
    assert told["headline"].startswith("Too short to say whether it learns: reward 0.050 at the start")
    assert told["speed"][0].startswith("Too short to judge speed")
    assert (told["reward_first"], told["reward_last"], told["num_recent"]) == (
        pytest.approx(0.05),
        pytest.approx(0.25),
        2,
    )
    assert (told["ended"], told["health"], view["window"], view["timeline"]["num_slots"]) == ("", [], 2, 64)
    assert view["curves"]["reward/mean"]["mean"] == [0.0, 0.1, 0.2, 0.3]
    assert [tile["label"] for tile in view["tiles"]] == ["steps", "time", "staleness"]
    sums = [math.fsum(part[step] or 0.0 for part in view["step_times"].values()) for step in range(4)]
    assert sums == pytest.approx(4 * [1.0])
    assert math.fsum(share["fraction"] for share in view["shares"]) == pytest.approx(1.0)
    differing = [setting["key"] for setting in view["settings"] if setting["differs"]]
    assert differing == ["model.path", "task.python", "buffer.max_staleness", "trainer.num_steps"]
    assert {kind["name"] for kind in view["timeline"]["kinds"]} == {*KINDS}
    assert view["timeline"]["slots"].keys() == {"engine-0", "engine-1"}
    assert all(gauge["meaning"] for gauge in view["gauges"].values())


def test_text_of_a_model_ends_no_element_of_the_page_and_is_replaced_by_nothing(tmp_path: Path) -> None:
    make_run(tmp_path / "run")
    html = render(make_page([tmp_path / "run"]))
    template = render({**make_page([]), "runs": []})
    assert html.lower().count("<script") == template.lower().count("<script")
    assert html.lower().count("</script") == template.lower().count("</script")
    assert html.count("<!--") == template.count("<!--")
    assert "\u2028" not in html.removeprefix(template)
    (run,) = embedded(html)["runs"]
    texts = [part["text"] for sample in run["samples"] for part in sample["parts"]]
    assert HOSTILE in texts
    assert any(HOSTILE in span[4] for span in run["timeline"]["spans"])


def lines_cut(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: len(content) * 5 // 9])


def garbage(path: Path) -> None:
    path.write_bytes(b"\x00\xff{[" * 400)


def folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


FILES = ("metrics.jsonl", "status.json", "journal.sqlite", TIMELINE_FILE, "samples.jsonl", "summary.json")


@pytest.mark.parametrize("damage", [lines_cut, garbage, folder, Path.unlink])
@pytest.mark.parametrize("name", FILES)
def test_a_damaged_file_is_a_problem_that_is_told_and_the_rest_is_shown(
    tmp_path: Path, name: str, damage: Any
) -> None:
    make_run(tmp_path)
    (tmp_path / "summary.json").write_text("{}\n")
    damage(tmp_path / name)
    page = make_page([tmp_path])
    TypeAdapter(Page).validate_python(page)
    assert embedded(render(page))["runs"][0]["name"] == tmp_path.name
    is_told = any(name in problem for problem in page["runs"][0]["problems"])
    may_be_missing = name in ("summary.json", "samples.jsonl", "metrics.jsonl", "status.json")
    assert is_told or (damage is Path.unlink and may_be_missing) or name in ("summary.json", "samples.jsonl")


@pytest.mark.parametrize("number", ["NaN", "-Infinity", "1e999"])
def test_a_sample_with_no_number_is_told_and_left_out(tmp_path: Path, number: str) -> None:
    make_run(tmp_path / "run")
    line = json.dumps(make_sample(step=1)).replace('"metrics": {}', f'"metrics": {{"format": {number}}}')
    assert number in line
    with (tmp_path / "run" / "samples.jsonl").open("a") as file:
        file.write(f"{line}\n")
    (run,) = embedded(render(make_page([tmp_path / "run"])))["runs"]
    assert [sample["step"] for sample in run["samples"]] == [0, 0]
    problems = list[str]()
    assert [sample["step"] for sample in read_samples(tmp_path / "run", problems)] == [0, 0]
    for told in (run["problems"], problems):
        assert ["samples.jsonl" in problem for problem in told] == [True]


def test_a_page_that_does_not_fit_the_disk_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    make_run(tmp_path / "run")
    monkeypatch.setattr("asyncrl.base.files.sync", full)
    with pytest.raises(ConfigError, match="the page cannot be written to .*: No space left on device"):
        list(write_report([tmp_path / "run"], tmp_path / "page.html"))
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


@pytest.mark.parametrize("num_steps", [0, 1])
@pytest.mark.parametrize("state", ["starting", "running", "done", "failed", "interrupted", "???"])
def test_a_run_in_any_state_and_with_hardly_a_step_is_shown(
    tmp_path: Path, num_steps: int, state: str
) -> None:
    make_run(tmp_path, num_steps, state=state)
    lock = RunLock(tmp_path / "run.lock").acquire()
    page = make_page([tmp_path], is_live=True)
    lock.release()
    TypeAdapter(Page).validate_python(page)
    (view,) = page["runs"]
    assert render(page)
    if state == "failed":
        assert "the disk is full" in view["verdict"]["ended"]
    is_timed = "time left" in [tile["label"] for tile in view["tiles"]]
    assert is_timed == (state == "running" and num_steps == 1)


def test_no_secret_of_a_config_is_on_the_page(tmp_path: Path) -> None:
    secret = "sk-abcdefgh12345678"
    harness = {"command": ["agent"], "env": {"JUDGE": secret, "URL": secret}, "args": {}}
    task = {"python": "a:B", "args": {"api_key": secret, "nested": [{"password": secret}], "path": "p"}}
    make_run(tmp_path, generator=harness, task=task)
    html = render(make_page([tmp_path]))
    assert secret not in html
    settings = {setting["key"]: setting["value"] for setting in embedded(html)["runs"][0]["settings"]}
    assert "JUDGE" in settings["generator.env"]
    assert "'path': 'p'" in settings["task.args"]
    assert "(hidden)" in settings["task.args"]
    assert without_secrets({"max_tokens": 5, "tokenizer": "t"}) == {"max_tokens": 5, "tokenizer": "t"}


def test_failures_are_counted_by_cause_with_an_example(tmp_path: Path) -> None:
    make_run(tmp_path)
    with sqlite3.connect(tmp_path / "journal.sqlite") as journal:
        for group in range(6):
            state = "failed" if group == 0 else "ready"
            reason = f"g0 (prompt p0) has 0 usable rollouts of 4; r3 took {group} s" if group == 0 else ""
            row = (group, f"p{group}", state, reason, 2)
            journal.execute(
                "INSERT INTO groups (group_id, prompt_id, num_handed_back, start_version, state, reason,"
                " admitted_s, num_failed) VALUES (?, ?, 0, 0, ?, ?, 0, ?)",
                row,
            )
            why = f"g{group}/r1 is still in turn {group} after 600.0 s" if group < 4 else "no answer from 'x'"
            journal.execute("INSERT INTO failures VALUES (?, 1, 2, ?)", (group, why))
        detail = json.dumps({"name": "engine-0", "why": "killed by SIGKILL\nlog", "restart": 1})
        journal.execute("INSERT INTO events (s, what, detail) VALUES (5, 'engine lost', ?)", (detail,))
    journal.close()
    view = view_run(tmp_path)
    found = {failure["cause"]: failure["count"] for failure in view["failures"]}
    assert found == {
        "N is still in turn N after N s": 4,
        "no answer from '…'": 2,
        "rollouts whose message is deleted": 6,
        "group failed: took N s": 1,
    }
    assert view["failures"][0]["count"] == 6
    assert any("g0/r1 is still in turn 0" in failure["example"] for failure in view["failures"])
    assert view["warnings"] == ["engine lost: engine-0: killed by SIGKILL"]


def test_causes_differ_by_words_and_not_by_numbers_and_names() -> None:
    assert cause_of("g17/r3 is in turn 2 after 600.0 s") == cause_of("g8/r0 is in turn 1 after 1.5 s")
    assert cause_of("ValueError: no 'a'") != cause_of("TypeError: no 'a'")
    assert cause_of("") == "no reason recorded"


def test_of_many_samples_the_newest_and_some_of_all_the_run_are_shown(tmp_path: Path) -> None:
    make_run(tmp_path, 0)
    append_lines(tmp_path / "samples.jsonl", [make_sample(step=step) for step in range(5000)])
    steps = [sample["step"] for sample in view_run(tmp_path)["samples"]]
    assert steps == sorted(set(steps))
    assert len(steps) <= 120
    assert steps[-60:] == [*range(4940, 5000)]
    assert max(after - before for before, after in zip(steps, steps[1:], strict=False)) < 120


def test_runs_are_compared_by_what_differs_in_settings_and_results(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / name).mkdir()
    make_run(tmp_path / "a" / "run")
    make_run(tmp_path / "b" / "run", 2, buffer={"max_staleness": 4})
    page = make_page([tmp_path / "a" / "run", tmp_path / "b" / "run"])
    assert [run["name"] for run in page["runs"]] == [str(tmp_path / "a" / "run"), str(tmp_path / "b" / "run")]
    found = {difference["key"]: difference["values"] for difference in page["differences"]}
    assert found["buffer.max_staleness"] == ["2", "4"]
    assert found["steps"] == ["4", "2"]
    assert [value[:5] for value in found["reward at the end"]] == ["0.250", "0.100"]
    assert "trainer.num_steps" not in found


def test_a_report_writes_the_page_and_the_trace_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    make_run(tmp_path / "a")
    make_run(tmp_path / "b")
    before = {path: path.read_bytes() for path in (tmp_path / "a").iterdir()}
    told = [*write_report([tmp_path / "a"], None)]
    new = {path.name for path in {*(tmp_path / "a").iterdir()} - before.keys()}
    assert new - {"journal.sqlite-wal", "journal.sqlite-shm"} == {"report.html", "trace.json"}
    assert all(path.read_bytes() == content for path, content in before.items())
    assert told[0].startswith(str(tmp_path / "a" / "report.html"))
    assert_trace(json.loads((tmp_path / "a" / "trace.json").read_text()))
    [*write_report([Path("a"), Path("b")], None)]
    assert len(embedded((tmp_path / "report.html").read_text())["runs"]) == 2
    with pytest.raises(ConfigError, match="--out"):
        [*write_report([Path("a")], tmp_path / "no" / "such.html")]
    with pytest.raises(ConfigError, match="is no run directory"):
        [*write_report([tmp_path], None)]


# ---- a real run


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_time_line_of_a_real_run_agrees_with_its_journal_and_its_metrics(whole: Path) -> None:
    rows = read_timeline(whole / TIMELINE_FILE, problems := [])
    steps = read_lines(whole / "metrics.jsonl")
    assert problems == []
    ends_s = [0.0, *(step["time_s"] for step in steps)]
    for step, before_s, end_s in zip(steps, ends_s, ends_s[1:], strict=False):
        assert step["perf/step_s"] == pytest.approx(end_s - before_s, abs=1e-6)
    by_step = defaultdict[int, dict[str, float]](lambda: defaultdict(float))
    for row in rows:
        if row[0] == "trainer":
            by_step[row[4]][row[1]] += row[3]
    for step in steps:
        spans = by_step[step["step"] - 1]
        for cause in ("generation", "stragglers", "publishing"):
            assert spans[f"wait for {cause}"] == pytest.approx(step[f"perf/wait_{cause}_s"], abs=1e-4)
        assert spans["train"] >= step["perf/train_s"] - 1e-4, "the call takes what the trainer took, and more"
        in_step = math.fsum(seconds for kind, seconds in spans.items() if kind not in ("copy", "record"))
        assert in_step <= step["perf/step_s"] + 1e-3
    with sqlite3.connect(f"file:{whole / 'journal.sqlite'}?mode=ro", uri=True) as journal:
        served = dict(journal.execute("SELECT version, served_s FROM publishes"))
        made = {version for (version,) in journal.execute("SELECT version FROM checkpoints")}
    journal.close()
    commits = {row[4]: row for row in rows if row[1] == "commit"}
    assert served.keys() <= commits.keys()
    for version, served_s in served.items():
        assert commits[version][2] <= served_s + 1.0
    assert made == {row[4] for row in rows if row[1] == "checkpoint"}
    evaluated = [line["policy_version"] for line in read_lines(whole / "eval.jsonl")]
    assert evaluated == [row[4] for row in rows if row[1] == "evaluation"]
    view: RunView = view_run(whole)
    assert view["problems"] == []
    lanes = ["trainer", "weight sync", "engine-0", "engine-1", "checkpoints", "evaluations", "start"]
    assert view["timeline"]["lanes"] == lanes
    assert max(busy for _, busy in view["timeline"]["slots"]["engine-0"]) > 0
    assert_trace(json.loads((whole / "trace.json").read_text()))
    assert len(steps) == NUM_STEPS
    assert (whole / TIMELINE_FILE).stat().st_size < 1500 * NUM_STEPS
