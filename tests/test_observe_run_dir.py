"""Files of a run directory: the recorder, `asyncrl status` and `inspect`, of live,
ended and damaged runs.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import journal_cases
import numpy as np
import page_cases
import pytest
from hypothesis import given
from hypothesis import strategies as st
from journal_cases import admit, make_batch, make_trajectory, tell_a_run

from asyncrl.base.errors import ConfigError
from asyncrl.base.files import lines_from_end, run_lock
from asyncrl.config import RunConfig, run_config_yaml
from asyncrl.journal.journal import Journal
from asyncrl.messages.records import GroupId
from asyncrl.observe.run_dir import Recorder, append_lines, cut_steps, judge_state
from asyncrl.observe.show import render_inspect, render_status
from asyncrl.trainer.loss.step_metrics import RecordWriter, trained_line
from asyncrl.trainer.trainer_client import pack_groups

NUM_GROUPS = 2


def append_record(path: Path, line: Mapping[str, Any]) -> None:
    append_lines(path, [line])


def make_run(
    run_dir: Path, *, num_steps: int = 3, state: str = "running", max_staleness: int = 2
) -> None:
    page_cases.make_run(
        run_dir, num_steps, state=state, buffer={"max_staleness": max_staleness}
    )
    for version in range(num_steps):
        append_record(run_dir / "trained.jsonl", record_line(version))
    waits = {"train loop waits in TrainerClient.step for optimizer step 4": 12.25}
    Recorder(run_dir).write_status(
        {"state": state, "waits": waits, "oldest_rollouts": [["g7/r1", 12.0]]}
    )


def record_line(
    version: int, ages: tuple[int, int] = (0, 2), bound: int = 2
) -> dict[str, Any]:
    """Two groups of one trajectory, 3 prompt and 4 sampled tokens each; the first
    sampled token of group i is ages[i] old.
    """
    entries = []
    for index, age in enumerate(ages):
        oldest = max(0, version - age)
        group = version * NUM_GROUPS + index
        spans = (
            [[3, 7, version]]
            if oldest == version
            else [[3, 4, oldest], [4, 7, version]]
        )
        entry = {
            "group_id": group,
            "prompt_id": f"e0-{group}",
            "sample_index": 0,
            "branch": 0,
        }
        numbers = {"reward": float(index), "num_tokens": 7, "num_loss_tokens": 4}
        entries.append({**entry, **numbers, "spans": spans})
    return {
        "version": version,
        "min_version": max(0, version - bound),
        "trajectories": entries,
    }


def inspected(run_dir: Path, **options: Any) -> Any:
    return json.loads(render_inspect(run_dir, as_json=True, **options))


def words(text: str) -> str:
    return " ".join(text.replace("│", " ").split())


# ---- status


def test_status_shows_progress_waits_and_remaining_time(tmp_path: Path) -> None:
    make_run(tmp_path)
    with run_lock(tmp_path / "run.lock"):
        text = words(render_status(tmp_path))
        verbose = words(render_status(tmp_path, is_verbose=True))
    pace = "3 of 9 in 3.0 s, 1.00 s each, 6.0 s left"
    ends = "first step 0.000, last step 0.200"
    for said in (f"process {os.getpid()} on host", pace, "Too short to", ends):
        assert said in text
    for said in ("TrainerClient.step for optimizer step 4, since 12 s", "g7/r1, 12.0"):
        assert (said in text, said in verbose) == (False, True)


@pytest.mark.parametrize(
    ("elsewhere", "age_s", "state"),
    [
        ({"host": "node7"}, 3.0, "running"),
        ({"host": "node7"}, 300.0, "unknown"),
        ({"state": "done"}, 3.0, "done"),
        ({}, 3.0, "crashed"),  # nobody holds its lock, and this is its machine
    ],
)
def test_a_run_is_called_crashed_only_with_proof(
    tmp_path: Path, elsewhere: dict[str, Any], age_s: float, state: str
) -> None:
    here = {
        "state": "running",
        "pid": 17,
        "host": socket.gethostname(),
        "updated_s": time.time() - age_s,
    }
    (tmp_path / "run.lock").touch()
    assert judge_state(here | elsewhere, tmp_path)[0] == state
    with run_lock(tmp_path / "run.lock"):  # over a shared file system, too
        assert judge_state(here | elsewhere, tmp_path)[0] == elsewhere.get(
            "state", "running"
        )


def test_a_run_before_its_first_step_can_be_read(tmp_path: Path) -> None:
    make_run(tmp_path, num_steps=0, state="starting")
    plain = inspected(tmp_path)
    assert (plain["num_steps"], plain["bound_kept"], plain["verdict"]) == (
        0,
        None,
        None,
    )
    (tmp_path / "status.json").unlink()
    assert "unknown: there is no readable status.json" in words(render_status(tmp_path))


# ---- the trainer's record


def test_inspect_recomputes_the_staleness_from_the_spans(tmp_path: Path) -> None:
    make_run(tmp_path)
    plain = inspected(tmp_path)
    assert (plain["bound_kept"], plain["staleness_max"], plain["num_loss_tokens"]) == (
        True,
        2,
        3 * 2 * 4,
    )
    last = plain["steps"][-1]
    assert (last["version"], last["group_ids"], last["tokens_by_version"]) == (
        2,
        [4, 5],
        {"0": 1, "2": 7},
    )
    assert (last["staleness_mean"], last["staleness_max"], last["reward_mean"]) == (
        1.0,
        2,
        0.5,
    )


def test_every_broken_promise_of_a_record_is_found(tmp_path: Path) -> None:
    make_run(tmp_path, num_steps=2)
    # a resume with another bound
    append_record(tmp_path / "trained.jsonl", record_line(2, bound=1))
    again = record_line(0, (0, 0)) | {"version": 3, "min_version": 2}
    future = record_line(4, (0, 0))
    future["trajectories"][1]["spans"] = [[3, 7, 5]]
    for line in (again, future, record_line(6, (0, 0))):
        append_record(tmp_path / "trained.jsonl", line)
    plain = inspected(tmp_path)
    assert plain["bound_kept"] is False
    assert plain["violations"] == [
        "step 3, group 5, sample 0: tokens 3..3 are of version 0; the bound of this batch was version 1",
        "step 4, group 0, sample 0: tokens 3..6 are of version 0; the bound of this batch was version 2",
        "step 4, group 1, sample 0: tokens 3..6 are of version 0; the bound of this batch was version 2",
        "step 4, group 0: already trained on in step 1",
        "step 4, group 1: already trained on in step 1",
        "step 5, group 9, sample 0: tokens 3..6 are of version 5, which did not exist yet",
        "the record lacks steps 6..6",
    ]


def test_steps_trained_again_after_a_restore_count_once(tmp_path: Path) -> None:
    make_run(tmp_path)
    path = tmp_path / "trained.jsonl"
    with path.open("a") as file:
        file.write('{"version": 3, "min_')
    record = RecordWriter(path)
    record.note_restored(1)
    record.note(record_line(1))
    record.write()
    plain = inspected(tmp_path)
    assert (plain["violations"], plain["restored_from"], plain["num_steps"]) == (
        [],
        [1],
        2,
    )


def test_one_step_or_group_is_shown_with_its_trajectories(tmp_path: Path) -> None:
    make_run(tmp_path)
    forked = record_line(3)
    forked["trajectories"].insert(1, {**forked["trajectories"][0], "branch": 1})
    append_record(tmp_path / "trained.jsonl", forked)
    plain = inspected(tmp_path, step=4)
    (step,) = plain["steps"]
    assert (step["num_trajectories"], step["num_loss_tokens"], step["reward_mean"]) == (
        3,
        12,
        0.5,
    )
    assert [entry["branch"] for entry in plain["trajectories"]] == [0, 1, 0]
    assert inspected(tmp_path, step=2)["metrics"]["reward/mean"] == 0.1
    found = inspected(tmp_path, group=5)
    assert [step["step"] for step in found["steps"]] == [3]
    assert found["trajectories"] == [
        record_line(2)["trajectories"][1] | {"step": 3, "staleness": 2}
    ]
    with pytest.raises(ConfigError, match="has no record of group 99; it has 4 steps"):
        render_inspect(tmp_path, group=99)


LINES = st.lists(
    st.sampled_from([b"", b"a", b"\0" * 70_000, b"b" * 140_000, b"c" * 65_535]),
    max_size=6,
)


@given(LINES, st.booleans())
def test_lines_from_the_end_are_the_lines_of_the_file(
    lines: list[bytes], is_torn: bool
) -> None:
    content = b"".join(line + b"\n" for line in lines) + (b"torn" if is_torn else b"")
    with tempfile.NamedTemporaryFile() as file:
        file.write(content)
        file.flush()
        found = list(lines_from_end(Path(file.name)))
    assert b"".join(line for _, line in reversed(found)) == content
    assert all(
        content[start : start + len(line)] == line and b"\n" not in line[:-1]
        for start, line in found
    )


@pytest.mark.parametrize(
    ("name", "text", "problem"),
    [
        (
            "metrics.jsonl",
            '{"step": 4, "rew',
            "metrics.jsonl: skipped an incomplete last line",
        ),
        (
            "metrics.jsonl",
            '{"step": "q"}\n',
            "metrics.jsonl: skipped a line without a number step",
        ),
        ("metrics.jsonl", f'{{"step": 3, "time_s": {"9" * 400}}}\n', ""),
        (
            "trained.jsonl",
            '{"version": 3, "min_version": 0, "trajectories": [1]}\n',
            "trained.jsonl",
        ),
        ("status.json", "[" * 100_000, "status.json is invalid"),
    ],
)
def test_invalid_data_is_skipped_and_reported(
    tmp_path: Path, name: str, text: str, problem: str
) -> None:
    make_run(tmp_path)
    with (tmp_path / name).open("w" if name == "status.json" else "a") as file:
        file.write(text)
    problems = inspected(tmp_path)["problems"]
    assert any(problem in line for line in problems) or not problem
    assert "3 of 9" in words(render_status(tmp_path, is_verbose=True))
    assert "steps 3" in words(render_inspect(tmp_path))


# ---- the journal


async def live(run_dir: Path) -> Journal:
    """Write a run with step 1 in the record; group 8 has a rollout with branches."""
    config = {
        "model": {"path": "nowhere/at-all"},
        "task": {"python": "a:B"},
        "rollout": {"group_size": 2},
    }
    (run_dir / "config.yaml").write_text(
        run_config_yaml(RunConfig.model_validate(config))
    )
    append_record(
        run_dir / "metrics.jsonl",
        {"step": 1, "tokens/sampled": 40, "tokens/trained": 33},
    )
    header, arrays = pack_groups(make_batch(0, 0, 1))
    append_record(
        run_dir / "trained.jsonl", trained_line(header, arrays, arrays.is_sampled, 0.5)
    )
    journal = journal_cases.open_journal(run_dir / "journal.sqlite")
    await tell_a_run(journal)
    admit(journal, 8)
    journal.add_rollout_nowait(GroupId(8), journal_cases.make_rollout(8, 0))
    await journal.flush()
    return journal


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("live")
    with asyncio.Runner() as runner:
        journal = runner.run(live(folder))
        yield folder
        runner.run(journal.aclose())


def test_the_story_of_a_group_joins_journal_and_record(run_dir: Path) -> None:
    plain = inspected(run_dir, group=1)
    story = plain["story"]
    expected = make_trajectory(1, 0)
    assert (story["state"], story["start_version"], story["batch"]) == ("taken", 0, 0)
    assert story["admitted_at"] <= story["ended_at"] <= story["trained_at"]
    assert story["messages"] == [{"role": "user", "content": "Question 1"}]
    first = story["rollouts"][0]
    assert (first["versions"], first["num_sampled"], first["reward"]) == (
        [0, 0],
        10,
        expected.reward,
    )
    assert [part["text"] for part in first["parts"] if part["is_sampled"]] == [
        " ".join(map(str, expected.token_ids[2:].tolist()))
    ]
    assert [entry["num_loss_tokens"] for entry in plain["trajectories"]] == [10, 10]
    (branched,) = inspected(run_dir, group=8)["story"]["rollouts"]
    assert (branched["reward"], branched["num_sampled"]) == (0.25, 20)
    assert [part["branch"] for part in branched["parts"] if part["is_sampled"]] == [
        0,
        1,
    ]
    text = words(render_inspect(run_dir)) + words(render_inspect(run_dir, group=8))
    for said in (
        "engine_restarted",
        "masked 7",
        "finished sample of step 1: reward 0.250",
        "branch 1",
    ):
        assert said in text


def test_reading_a_run_imports_no_torch(run_dir: Path) -> None:
    script = "import sys; from asyncrl.observe.show import render_inspect; render_inspect(sys.argv[1]);"
    script += "from asyncrl.observe.report_page import view_run; view_run(sys.argv[1]);"
    script += "import asyncrl.job.run_export; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", script, str(run_dir)], check=True)


# ---- writing


def lines(run_dir: Path) -> list[dict[str, object]]:
    return [
        json.loads(line)
        for line in (run_dir / "metrics.jsonl").read_text().splitlines()
    ]


def test_trackers_get_finite_numbers_and_the_file_has_null(tmp_path: Path) -> None:
    calls = list[Any]()
    trackers: Any = SimpleNamespace(tell=lambda *call: calls.append(call))
    recorder = Recorder(tmp_path, trackers)
    recorder.record_step(
        {"step": 1, "reward/mean": np.float32(0.5), "tokens/trained": np.int64(12)}
    )
    recorder.record_step({"step": 2, "policy/loss": math.nan, "eval/reward_mean": 1.0})
    expected = [
        {"step": 1, "reward/mean": 0.5, "tokens/trained": 12},
        {"step": 2, "policy/loss": None, "eval/reward_mean": 1.0},
    ]
    assert lines(tmp_path) == expected
    assert calls == [
        ("step", 1, {"reward/mean": 0.5, "tokens/trained": 12.0}),
        ("step", 2, {}),
    ]


@pytest.mark.parametrize(
    "left", ['{"step": 3, "rew', '12\n{"step": null}\n', "\0" * 4096, '{"step": 3}\n']
)
def test_steps_to_repeat_and_invalid_lines_are_removed(
    tmp_path: Path, left: str
) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2}\n' + left)
    recorder = Recorder(tmp_path)
    assert cut_steps(recorder.run_dir / "metrics.jsonl", 2) == {"step": 2}
    recorder.record_step({"step": 3, "reward/mean": 1.0})
    assert lines(tmp_path) == [
        {"step": 1},
        {"step": 2},
        {"step": 3, "reward/mean": 1.0},
    ]
    assert cut_steps(recorder.run_dir / "metrics.jsonl", 0) == {}
    assert lines(tmp_path) == []
