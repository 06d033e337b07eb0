"""The timeline, its trace, and the page of a run: report and live."""

from __future__ import annotations

import base64
import gzip
import itertools
import json
import random
import re
import sqlite3
from pathlib import Path
from typing import Any

import pytest
from page_cases import (
    HOSTILE,
    embedded,
    make_run,
    make_sample,
    note_step,
    page_of,
)

from asyncrl.base.errors import ConfigError
from asyncrl.base.files import run_lock
from asyncrl.base.waits import TimedSpan
from asyncrl.observe import timeline as timeline_module
from asyncrl.observe.report_page import (
    STATIC,
    render,
    view_run,
    without_secrets,
    write_report,
)
from asyncrl.observe.run_dir import TIMELINE_FILE, append_lines
from asyncrl.observe.run_numbers import Steps
from asyncrl.observe.timeline import (
    Row,
    TimelineWriter,
    read_timeline,
    timeline_view,
    trace_of,
)
from asyncrl.observe.verdict import write_reward_plot

# ---- the timeline


def test_a_long_timeline_keeps_its_newest_spans(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timeline_module, "MAX_BYTES", 999)
    writer = TimelineWriter(tmp_path)
    writer.open()
    for number in range(100):
        writer.note(TimedSpan("trainer", "train", number, number + 1, number))
        writer.flush()
    kept = [row.number for row in read_timeline(tmp_path, [])]
    assert kept == [*range(100 - len(kept), 100)]
    num_bytes = sum(path.stat().st_size for path in tmp_path.iterdir())
    assert 999 < num_bytes < 2 * 999 + 99


def test_a_resumed_timeline_continues(tmp_path: Path) -> None:
    make_run(tmp_path, 2)
    path = tmp_path / TIMELINE_FILE
    with path.open("a") as file:
        file.write('["trainer","tra')  # killed
    before = path.read_text()
    second = TimelineWriter(tmp_path)
    second.note(
        TimedSpan("trainer", "train again", 100.2, 100.9, 2, "a lone surrogate: \ud800")
    )
    second.flush()
    assert path.read_text() == before, "a refused resume changes nothing"
    second.open()
    note_step(second, 2, 101.0)
    second.flush()
    view = timeline_view(read_timeline(tmp_path, problems := list[str]()))
    assert (len(problems), view["lanes"]) == (1, ["trainer", "weight sync"]), (
        "half a line"
    )
    spans = [
        (view["kinds"][kind]["name"], text)
        for lane, kind, *_, text in view["spans"]
        if lane == 0
    ]
    assert [text for kind, text in spans if kind == "train"] == [
        "step 1",
        "step 2",
        "step 3",
    ]


def test_the_trace_has_the_format_of_perfetto() -> None:
    rows = [
        Row("checkpoints", "checkpoint", start_s, 2.0, 1, "") for start_s in (5.0, 6.0)
    ]
    process, *events = trace_of(rows)["traceEvents"]
    assert (process["ph"], process["pid"], process["args"]) == (
        "M",
        0,
        {"name": "checkpoints"},
    )
    found = [(event["ph"], event["id"], event["ts"]) for event in events]
    assert found == [("b", 0, 5e6), ("e", 0, 7e6), ("b", 1, 6e6), ("e", 1, 8e6)]
    named = {(event["name"], event["cat"], event["pid"]) for event in events}
    assert named == {("checkpoint", "checkpoints", 0)}


# ---- the page


def test_the_page_shows_the_verdict_and_its_reasons(tmp_path: Path) -> None:
    view = view_run(make_run(tmp_path / "run"))
    assert (view["problems"], view["why"], view["progress"]) == (
        [],
        "",
        "4 of 9 in 4.0 s, 1.00 s each",
    )
    verdict = view["verdict"]
    assert verdict["headline"].startswith(
        "Too short to judge learning: 5 steps are needed, 4"
    )
    assert (verdict["reward"]["last"], view["num_recent"], view["window"]) == (
        pytest.approx(0.25),
        2,
        2,
    )
    assert view["curves"]["reward/mean"] == [0.0, 0.1, 0.2, 0.3]
    differing = [setting["key"] for setting in view["settings"] if setting["differs"]]
    assert differing == [
        "model.path",
        "task.python",
        "buffer.max_staleness",
        "trainer.num_steps",
    ]
    assert view["gauges"]["perf/step_s"]["unit"] == "s"


def test_model_text_closes_no_element_of_the_page(tmp_path: Path) -> None:
    html = render(page_of(make_run(tmp_path / "run")))
    template = render(page_of())
    for tag in ("<script", "</script", "<!--"):
        assert html.lower().count(tag) == template.lower().count(tag)
    (run,) = embedded(html)["runs"]
    assert HOSTILE in [
        part["text"] for sample in run["samples"] for part in sample["parts"]
    ]
    assert any(HOSTILE in span[4] for span in run["timeline"]["spans"])


def garbage(path: Path) -> None:
    path.write_bytes(b"\x00\xff{[" * 400)


def folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        *(
            (name, garbage)
            for name in ("metrics.jsonl", "status.json", TIMELINE_FILE, "samples.jsonl")
        ),
        ("journal.sqlite", garbage),
        ("journal.sqlite", Path.unlink),
        ("samples.jsonl", folder),
    ],
)
def test_a_damaged_file_is_reported_and_the_rest_shown(
    tmp_path: Path, name: str, damage: Any
) -> None:
    make_run(tmp_path)
    damage(tmp_path / name)
    (run,) = embedded(render(page_of(tmp_path)))["runs"]
    assert run["name"] == tmp_path.name
    assert any(name in problem for problem in run["problems"])


@pytest.mark.parametrize(
    ("state", "num_steps"), [("starting", 0), ("running", 1), ("failed", 1)]
)
def test_a_run_in_any_state_is_shown(
    tmp_path: Path, state: str, num_steps: int
) -> None:
    make_run(tmp_path, num_steps, state=state)
    with run_lock(tmp_path / "run.lock"):
        page = page_of(tmp_path)
    assert render(page)
    (view,) = page["runs"]
    assert ("the disk is full" in view["why"]) == (state == "failed")
    assert (" left" in view["progress"]) == (state == "running")


def test_no_secret_appears_on_the_page(tmp_path: Path) -> None:
    secret = "correct-horse-battery"
    harness = {"command": ["agent"], "env": {"JUDGE": secret}}
    task = {"python": "a:B", "args": {"nested": [{"password": "short"}], "path": "p"}}
    make_run(tmp_path, generator=harness, task=task)
    known = "sk-abcdefgh12345678"
    texts = (
        f"the judge refused {secret}",
        f"Authorization: Bearer {known}",
        f"\n{known} is invalid",
    )
    append_lines(
        tmp_path / "samples.jsonl", [make_sample(step=3, text=text) for text in texts]
    )
    html = render(page_of(tmp_path))
    assert secret not in html
    assert known not in html
    settings = {
        setting["key"]: setting["value"]
        for setting in embedded(html)["runs"][0]["settings"]
    }
    assert (
        settings["task.args"] == "{'nested': [{'password': '(hidden)'}], 'path': 'p'}"
    )
    assert without_secrets(["max_tokens=5", {"a": ["key"]}], []) == [
        "max_tokens=5",
        {"a": ["key"]},
    ]


@pytest.mark.parametrize(("most_bytes", "least"), [(2**22, 1003), (9000, 200)])
def test_the_page_has_all_samples_up_to_a_limit(
    tmp_path: Path, most_bytes: int, least: int
) -> None:
    secret = "correct-horse-battery"
    make_run(tmp_path, generator={"command": ["agent"], "env": {"JUDGE": secret}})
    chance = random.Random(0)
    lines = [
        make_sample(step=step, text=f"{secret} {chance.random()}")
        for step in range(3, 1003)
    ]
    append_lines(tmp_path / "samples.jsonl", lines)
    view = view_run(tmp_path, most_bytes)
    packed = base64.b64decode(view["packed"])
    assert len(packed) <= most_bytes
    text = gzip.decompress(packed).decode()
    samples = [*view["samples"], *json.loads(text)]
    steps = sorted(sample["step"] for sample in samples)
    assert least <= len(steps) == len({*steps}) <= view["num_samples"] == 1003
    # Samples that are left out are spread over the run.
    assert max(b - a for a, b in itertools.pairwise(steps)) <= 1003 // least
    assert secret not in text


def test_resumes_lost_processes_and_changed_code_are_marked(tmp_path: Path) -> None:
    make_run(tmp_path)
    (tmp_path / "code.json").write_text(
        '[{"step": 4, "changed": ["a.py"]}, {"step": 5, "changed": []}]'
    )
    with sqlite3.connect(tmp_path / "journal.sqlite") as journal:
        batches = [(version, 0, 0, 2, version + 1) for version in range(4)]
        journal.executemany(
            "INSERT INTO batches VALUES (?, ?, ?, ?, 0, 0, ?, NULL, NULL)", batches
        )
        events = [(2.5, "engine lost", '{"why": "killed; the end of its log: $x"}')]
        events += [(3.5, "restored", '{"version": 1, "who": "trainer"}')]
        events += [(4.5, "restored", '{"version": 2, "who": "run"}')]
        journal.executemany(
            "INSERT INTO events (s, what, detail) VALUES (?, ?, ?)", events
        )
    journal.close()
    marks = [
        (2, "engine lost: killed"),
        (3, "code changed: a.py"),
        (3, "trainer restored, 2 steps trained again"),
        (4, "resumed, 2 steps trained again"),
    ]
    assert view_run(tmp_path)["marks"] == [list(mark) for mark in marks]
    write_reward_plot(
        tmp_path / "reward.png",
        Steps([{"step": 1, "reward/mean": 1}]),
        title="a",
        marks=marks,
    )


def test_profiles_are_listed_in_the_report(tmp_path: Path) -> None:
    make_run(tmp_path)
    assert view_run(tmp_path)["profiles"] == []
    folder = tmp_path / "profile"
    folder.mkdir()
    (folder / ".trainer-0-step-2.trace.json.gz").write_text("half of it")
    (folder / "trainer-0-step-2.trace.json.gz").write_text("")
    assert view_run(tmp_path)["profiles"] == ["trainer-0-step-2.trace.json.gz"]


def test_failures_are_counted_by_cause_with_an_example(tmp_path: Path) -> None:
    make_run(tmp_path)
    with sqlite3.connect(tmp_path / "journal.sqlite") as journal:
        for index in range(6):
            why = (
                f"g0/r{index} is still in turn 1 after 600.0 s"
                if index < 4
                else "no answer from 'x'"
            )
            journal.execute("INSERT INTO failures VALUES (0, ?, 2, ?)", (index, why))
    journal.close()
    first, second = view_run(tmp_path)["failures"]
    assert (first["cause"], first["count"]) == ("N is still in turn N after N s", 4)
    assert "g0/r0 is still in turn 1" in first["example"]
    assert second["cause"] == "no answer from '…'"


def test_a_report_writes_only_the_page_and_the_trace(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / name) for name in ("a", "b")]
    before = {path: path.read_bytes() for path in runs[0].iterdir()}
    [*write_report(runs[:1], None)]
    new = {path.name for path in {*runs[0].iterdir()} - before.keys()}
    assert new - {"journal.sqlite-wal", "journal.sqlite-shm"} == {
        "report.html",
        "trace.json",
    }
    assert all(path.read_bytes() == content for path, content in before.items())
    [*write_report(runs, tmp_path / "both.html")]
    assert len(embedded((tmp_path / "both.html").read_text())["runs"]) == 2
    with pytest.raises(ConfigError, match="--out"):
        [*write_report(runs, tmp_path / "no" / "such.html")]


def test_the_page_uses_no_network_and_no_raw_html() -> None:
    for path in [*STATIC.glob("*.js"), *STATIC.glob("*.css"), STATIC / "page.html"]:
        text = path.read_text()
        if path.suffix != ".html":
            assert not re.search(r"</script|</style|<!--", text, re.IGNORECASE), path
        urls = set(re.findall(r"https?://[^\s'\")]+", text))
        assert urls <= {
            "https://github.com/leeoniya/uPlot",
            "http://www.w3.org/2000/svg",
        }, path
        raw = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\("
        assert "uPlot" in path.name or not re.search(raw, text), path
