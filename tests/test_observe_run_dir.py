"""Files of a run directory: the recorder, `asyncrl status` and `inspect`, of live, ended and damaged runs."""

from __future__ import annotations

import asyncio
import json
import math
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import journal_cases
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from job_runs import read_lines
from journal_cases import admit, make_batch, make_trajectory, tell_a_run
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from asyncrl.base.errors import ConfigError
from asyncrl.base.files import lines_from_end, run_lock
from asyncrl.config import ObserveConfig, RunConfig, run_config_yaml
from asyncrl.journal.journal import Journal
from asyncrl.messages.records import Batch, GroupId
from asyncrl.observe.metrics import gauge_of
from asyncrl.observe.run_dir import Recorder, judge_state
from asyncrl.observe.show import render_inspect, render_status
from asyncrl.observe.trackers import Background, TrackedRun
from asyncrl.trainer.step_metrics import append_line, note_restored, trained_line
from asyncrl.trainer.trainer_client import pack_groups

NUM_GROUPS = 2


def make_run(run_dir: Path, *, num_steps: int = 3, state: str = "running", max_staleness: int = 2) -> None:
    trainer = {"num_steps": 9, "num_groups": NUM_GROUPS}
    buffer = {"max_staleness": max_staleness}
    sections = {"model": {"path": "m"}, "task": {"python": "a:B"}, "buffer": buffer, "trainer": trainer}
    (run_dir / "config.yaml").write_text(run_config_yaml(RunConfig.model_validate(sections)))
    recorder = Recorder(run_dir)
    for version in range(num_steps):
        append_line(run_dir / "trained.jsonl", record_line(version))
        ages = {"sample/staleness_mean": 1.0, "sample/staleness_max": 2.0}
        times = {"time_s": version + 1.0, "perf/step_s": 1.0, "perf/train_s": 0.9}
        recorder.record_step({"step": version + 1, "reward/mean": 0.25 * version, **ages, **times})
    waits = {"train loop waits in TrainerClient.train for optimizer step 4": 12.25}
    recorder.write_status({"state": state, "waits": waits, "oldest_rollouts": [["g7/r1", 12.0]]})


def record_line(version: int, ages: tuple[int, int] = (0, 2)) -> dict[str, Any]:
    """Two groups of one trajectory, 3 prompt and 4 sampled tokens each; the first sampled token of group i is
    ages[i] old.
    """
    entries = []
    for index, age in enumerate(ages):
        oldest = max(0, version - age)
        group = version * NUM_GROUPS + index
        spans = [[3, 7, version]] if oldest == version else [[3, 4, oldest], [4, 7, version]]
        entry = {"group_id": group, "prompt_id": f"e0-{group}", "sample_index": 0, "branch": 0}
        numbers = {"reward": float(index), "num_tokens": 7, "num_loss_tokens": 4}
        entries.append({**entry, **numbers, "spans": spans})
    return {"version": version, "min_version": max(0, version - 2), "trajectories": entries}


def status_of(run_dir: Path) -> Any:
    return json.loads(render_status(run_dir, as_json=True))


def inspected(run_dir: Path, **options: Any) -> Any:
    return json.loads(render_inspect(run_dir, as_json=True, **options))


def words(text: str) -> str:
    return " ".join(text.replace("│", " ").split())


# ---- status


def test_status_shows_progress_waits_and_remaining_time(tmp_path: Path) -> None:
    make_run(tmp_path)
    with run_lock(tmp_path / "run.lock"):
        status = status_of(tmp_path)
        text = words(render_status(tmp_path))
        verbose = words(render_status(tmp_path, is_verbose=True))
    assert (status["state"], status["steps_done"], status["num_steps"]) == ("running", 3, 9)
    assert (status["last_metrics"]["reward/mean"], status["verdict"]["bottleneck"]) == (0.5, "unknown")
    pace = "3 of 9 in 3.0 s, 1.00 s each, 6.0 s left"
    for said in (f"process {os.getpid()} on host", pace, "Too short to"):
        assert said in text
    waits = "train loop waits in TrainerClient.train for optimizer step 4, since 12 s"
    for said in (waits, "g7/r1, 12.0"):
        assert (said in text, said in verbose) == (False, True)


@pytest.mark.parametrize(
    ("elsewhere", "age_s", "state"),
    [
        ({"host": "node7"}, 3.0, "running"),
        ({"host": "node7"}, 300.0, "unknown"),
        ({"state": "done"}, 3.0, "done"),
        ({"state": []}, 3.0, "unknown"),
    ],
)
def test_a_run_is_called_crashed_only_with_proof(
    tmp_path: Path, elsewhere: dict[str, Any], age_s: float, state: str
) -> None:
    here = {"state": "running", "pid": 17, "host": socket.gethostname(), "updated_s": time.time() - age_s}
    (tmp_path / "run.lock").touch()
    assert judge_state(here | elsewhere, tmp_path)[0] == state
    assert judge_state(here, tmp_path)[0] == "crashed", "nobody holds its lock, and this is its machine"
    with run_lock(tmp_path / "run.lock"):
        over_a_shared_file_system = judge_state(here | elsewhere, tmp_path)[0]
    assert over_a_shared_file_system == (state if "state" in elsewhere else "running")


def test_another_directory_is_refused_with_the_way_out(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for name in (".", "missing", "file"):
        with pytest.raises(ConfigError, match="is not a run directory.*\n.*asyncrl run"):
            render_status(tmp_path / name)


def test_a_run_before_its_first_step_can_be_read(tmp_path: Path) -> None:
    make_run(tmp_path, num_steps=0, state="starting")
    assert status_of(tmp_path)["verdict"] is None
    plain = inspected(tmp_path)
    assert (plain["num_steps"], plain["bound_kept"]) == (0, None)
    with pytest.raises(ConfigError, match="no record of step 1; it has 0 steps"):
        render_inspect(tmp_path, step=1)
    (tmp_path / "status.json").unlink()
    assert "unknown: there is no readable status.json" in words(render_status(tmp_path))


# ---- the trainer's record


def test_inspect_recomputes_the_staleness_from_the_spans(tmp_path: Path) -> None:
    make_run(tmp_path)
    plain = inspected(tmp_path)
    assert (plain["bound_kept"], plain["staleness_max"], plain["num_loss_tokens"]) == (True, 2, 3 * 2 * 4)
    last = plain["steps"][-1]
    assert (last["version"], last["group_ids"], last["tokens_by_version"]) == (2, [4, 5], {"0": 1, "2": 7})
    assert (last["staleness_mean"], last["staleness_max"], last["reward_mean"]) == (1.0, 2, 0.5)
    assert "bound kept True" in words(render_inspect(tmp_path))


def test_every_broken_promise_of_a_record_is_found(tmp_path: Path) -> None:
    make_run(tmp_path, num_steps=3, max_staleness=1)
    again = record_line(0, (0, 0))
    again["version"] = 3
    again["trajectories"] = [again["trajectories"][0] | {"num_loss_tokens": 9}]
    future = record_line(4, (0, 0))
    future["trajectories"][1]["spans"] = [[3, 7, 5]]
    twice = record_line(6, (0, 0))
    twice["trajectories"] += 2 * [{**twice["trajectories"][1], "branch": 1}]
    for line in (again, future, twice):
        append_line(tmp_path / "trained.jsonl", line)
    plain = inspected(tmp_path)
    assert plain["bound_kept"] is False
    assert plain["violations"] == [
        "step 3, group 5, sample 0: tokens 3..3 are of version 0, 2 behind; 1 are allowed",
        "step 4, group 0, sample 0: tokens 3..6 are of version 0, 3 behind; 1 are allowed",
        "step 4, group 0, sample 0: 9 tokens in the loss, but spans of 4",
        "step 4, group 0: already trained on in step 1",
        "step 5, group 9, sample 0: tokens 3..6 are of version 5, which did not exist yet",
        "the record lacks steps 6..6",
        "step 7, group 13, sample 0, branch 1: appears twice in step 7",
    ]


def test_one_step_or_group_is_shown_with_its_trajectories(tmp_path: Path) -> None:
    make_run(tmp_path)
    forked = record_line(3)
    forked["trajectories"].insert(1, {**forked["trajectories"][0], "branch": 1})
    append_line(tmp_path / "trained.jsonl", forked)
    plain = inspected(tmp_path, step=4)
    (step,) = plain["steps"]
    assert (step["num_trajectories"], step["num_loss_tokens"], step["reward_mean"]) == (3, 12, 0.5)
    assert [entry["branch"] for entry in plain["trajectories"]] == [0, 1, 0]
    assert inspected(tmp_path, step=2)["metrics"]["reward/mean"] == 0.25
    found = inspected(tmp_path, group=5)
    assert [step["step"] for step in found["steps"]] == [3]
    assert found["trajectories"] == [record_line(2)["trajectories"][1] | {"staleness": 2}]
    for unknown in ({"step": 7}, {"group": 99}):
        with pytest.raises(ConfigError, match="has no record of (step 7|group 99); it has 4 steps"):
            render_inspect(tmp_path, **unknown)


def test_steps_lost_in_a_power_cut_are_reported(tmp_path: Path) -> None:
    make_run(tmp_path)
    path = tmp_path / "trained.jsonl"
    with path.open("a") as file:
        file.write('{"version": 3, "min_')
    for version in (5, 6):
        note_restored(path, version)
        append_line(path, record_line(version))
    plain = inspected(tmp_path)
    why = "lost before a sync: the machine stopped, or the file was cut"
    assert (plain["bound_kept"], plain["violations"], plain["restored_from"]) == (True, [], [5, 6])
    assert plain["lost"] == [f"the record lacks steps 4..5 ({why})"]
    assert plain["lost"][0] in plain["problems"]
    note_restored(path, 3)
    for version in (3, 4, 5):
        append_line(path, record_line(version))
    plain = inspected(tmp_path)
    assert (plain["lost"], plain["violations"], plain["num_steps"]) == ([], [], 6), "trained again after all"
    path.unlink()
    append_line(path, record_line(2))
    assert inspected(tmp_path)["violations"] == ["the record lacks steps 1..2"], "without a reason"


LINES = st.lists(st.sampled_from([b"", b"a", b"\0" * 70_000, b"b" * 140_000, b"c" * 65_535]), max_size=6)


@given(LINES, st.booleans())
def test_lines_from_the_end_are_the_lines_of_the_file(lines: list[bytes], is_torn: bool) -> None:
    content = b"".join(line + b"\n" for line in lines) + (b"torn" if is_torn else b"")
    with tempfile.NamedTemporaryFile() as file:
        file.write(content)
        file.flush()
        found = list(lines_from_end(Path(file.name)))
    assert b"".join(line for _, line in reversed(found)) == content
    assert all(content[start : start + len(line)] == line and b"\n" not in line[:-1] for start, line in found)


@pytest.mark.parametrize(
    ("name", "text", "problem"),
    [
        ("metrics.jsonl", '{"step": 4, "rew', "metrics.jsonl: skipped an incomplete last line"),
        ("metrics.jsonl", '{"step": "q"}\n', "metrics.jsonl: skipped a line without a number step"),
        ("metrics.jsonl", f'{{"step": 3, "time_s": {"9" * 400}}}\n', ""),
        ("metrics.jsonl", "[" * 100_000 + "\n", "metrics.jsonl: skipped the line"),
        ("eval.jsonl", "{}\n", "eval.jsonl: skipped the line"),
        ("trained.jsonl", "garbage\n", "trained.jsonl: skipped the line b'garbage"),
        ("trained.jsonl", '{"version": 1e999, "min_version": 0, "trajectories": []}\n', "trained.jsonl"),
        ("trained.jsonl", '{"version": 3, "min_version": 0, "trajectories": [1]}\n', "trained.jsonl"),
        ("status.json", '{"state": "running", "updated_s": "soon"}', "status.json is invalid"),
        ("status.json", "[" * 100_000, "status.json is invalid"),
        ("status.json", f'{{"state": "running", "pid": {10**30}, "host": 7}}', ""),
        ("status.json", '{"state": "done", "waits": [1]}', "status.json is invalid"),
    ],
)
def test_invalid_data_is_skipped_and_reported(tmp_path: Path, name: str, text: str, problem: str) -> None:
    make_run(tmp_path)
    with (tmp_path / name).open("w" if name == "status.json" else "a") as file:
        file.write(text)
    problems = [*status_of(tmp_path)["problems"], *inspected(tmp_path)["problems"]]
    assert any(problem in line for line in problems) or not problem
    assert str(tmp_path) in "".join(render_status(tmp_path, is_verbose=True).replace("│", "").split())
    assert "steps 3" in words(render_inspect(tmp_path))


# ---- the journal


def record(run_dir: Path, batch: Batch) -> None:
    header, arrays = pack_groups(batch)
    append_line(run_dir / "trained.jsonl", trained_line(header, arrays, arrays.loss_mask, 0.5))


async def live(run_dir: Path) -> Journal:
    """Write a run with step 1 in the record; group 7 was filtered, 8 has a rollout with branches."""
    config = {"model": {"path": "nowhere/at-all"}, "task": {"python": "a:B"}, "rollout": {"group_size": 2}}
    (run_dir / "config.yaml").write_text(run_config_yaml(RunConfig.model_validate(config)))
    append_line(run_dir / "metrics.jsonl", {"step": 1, "tokens/sampled": 40, "tokens/trained": 33})
    record(run_dir, make_batch(0, 0, 1))
    journal = journal_cases.open_journal(run_dir / "journal.sqlite")
    await tell_a_run(journal)
    admit(journal, 7)
    for index in range(2):
        journal.rollout_finished_nowait(GroupId(7), (make_trajectory(7, index),))
    journal.group_ended_nowait(GroupId(7), "filtered", "buffer.filter")
    admit(journal, 8)
    journal.rollout_finished_nowait(GroupId(8), journal_cases.make_rollout(8, 0, has_credits=True))
    journal.event_nowait("stuck", {"seconds": 12.5, "waits": [{"who": "train loop"}]})
    await journal.flush()
    return journal


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("live")
    with asyncio.Runner() as runner:
        journal = runner.run(live(folder))
        yield folder
        runner.run(journal.aclose())


def test_inspect_accounts_for_groups_and_wasted_tokens(run_dir: Path) -> None:
    plain = inspected(run_dir)
    journal = plain["journal"]
    assert journal["groups"] == {"failed": 1, "filtered": 1, "requeued": 1, "running": 2, "taken": 4}
    wasted = {"retried": 15, "failed": 0, "filtered": 20, "requeued": 10, "masked": 7}
    assert (journal["wasted_tokens"], journal["sampled_tokens"]) == (wasted, 80 + 20 + 20 + 10 + 15)
    assert (journal["num_trained"], journal["num_batches"], journal["failed_rollouts"]) == (1, 2, 1)
    assert [event["what"] for event in journal["events"]] == ["restored", "engine_restarted", "stuck"]
    assert (plain["bound_kept"], plain["problems"], plain["num_steps"]) == (True, [], 1)


def test_the_story_of_a_group_joins_journal_and_record(run_dir: Path) -> None:
    plain = inspected(run_dir, group=1)
    story = plain["story"]
    expected = make_trajectory(1, 0)
    assert (story["state"], story["start_version"], story["batch"]) == ("taken", 0, 0)
    assert story["admitted_at"] <= story["ended_at"] <= story["trained_at"]
    assert story["messages"] == [{"role": "user", "content": "Question 1"}]
    first = story["rollouts"][0]
    assert (first["state"], first["num_sampled"], first["reward"]) == ("finished", 10, expected.reward)
    (piece,) = first["branches"][0]["pieces"]
    assert (piece["start"], piece["end"], piece["version"]) == (2, 12, 0)
    assert piece["token_ids"] == expected.token_ids[2:].tolist()
    assert [entry["num_loss_tokens"] for entry in plain["trajectories"]] == [10, 10]


def test_a_rollout_shows_all_branches_and_rewards_of_parts(run_dir: Path) -> None:
    (first,) = inspected(run_dir, group=8)["story"]["rollouts"]
    assert (first["reward"], first["num_sampled"]) == (0.25, 20)
    sampled = [branch["pieces"][0]["token_ids"] for branch in first["branches"]]
    assert sampled == [branch.token_ids[2:].tolist() for branch in journal_cases.make_rollout(8, 0)]
    assert first["branches"][1]["credits"][0] == {"start": 2, "end": 7, "reward": 1.2, "unit": 2}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, ["engine_restarted", "name engine-0", "bound kept True"]),
        ({"group": 4}, ["state failed", "reason too few usable rollouts", "timed out"]),
        ({"group": 5}, ["state requeued", "reason dropped", "same prompt 6"]),
        ({"group": 8}, ["[v0, 2..11]", "start 7, end 12, reward 1.700, unit 3"]),
        ({"step": 1}, ["0 40", "retried"]),
    ],
)
def test_inspect_shows_people_the_same(run_dir: Path, options: dict[str, Any], said: list[str]) -> None:
    text = words(render_inspect(run_dir, **options))
    assert [part for part in said if part not in text] == []


def test_inspect_survives_deleted_tokens_and_a_damaged_journal(tmp_path: Path) -> None:
    async def compacted() -> None:
        journal = await live(tmp_path)
        await journal.compact(1)
        await journal.aclose()

    asyncio.run(compacted())
    story = inspected(tmp_path, group=0)["story"]
    assert (story["has_tokens"], story["rollouts"], story["num_sampled"]) == (False, [], 20)
    (tmp_path / "journal.sqlite").write_bytes(b"no journal at all" * 100)
    (tmp_path / "journal.sqlite-wal").unlink(missing_ok=True)
    plain = inspected(tmp_path)
    assert ("journal" in plain, plain["bound_kept"]) == (False, True)
    assert "journal.sqlite" in plain["problems"][0]


def test_a_step_trained_again_on_other_data_is_found(run_dir: Path, tmp_path: Path) -> None:
    shutil.copytree(run_dir, tmp_path, dirs_exist_ok=True)
    batch = make_batch(1, 2, 3)
    group, *groups = batch.groups
    first, *others = group.trajectories
    changes: list[Any] = [{"token_ids": first.token_ids + np.int32(1)}, {"reward": -1.0}, {"reward": -2.0}]
    changed = [replace(group, trajectories=(replace(first, **change), *others)) for change in changes]
    answers = []
    for again in (batch, batch, *(replace(batch, groups=(each, *groups)) for each in changed)):
        record(tmp_path, again)
        answers.append(inspected(tmp_path))
        append_line(tmp_path / "trained.jsonl", {"restored": 1})
    _, same, *differ = answers
    assert [step["step"] for step in same["steps"]] == [1, 2]
    assert (same["violations"], same["restored_from"]) == ([], [1])
    fault = "step 2 was trained again on other data than before a restore"
    assert [each["violations"] for each in differ] == [[fault], [fault] * 2, [fault] * 3]


def test_reading_a_run_imports_no_torch(run_dir: Path) -> None:
    script = "import sys; from asyncrl.observe.show import render_inspect; render_inspect(sys.argv[1]);"
    script += "from asyncrl.observe.page import view_run; view_run(sys.argv[1]);"
    script += "import asyncrl.job.run_export; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", script, str(run_dir)], check=True)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_inspect_reads_a_real_run(whole: Path) -> None:
    run_dir = whole
    line = read_lines(run_dir / "trained.jsonl")[-1]
    entry = line["trajectories"][0]
    plain = inspected(run_dir, group=entry["group_id"])
    story = plain["story"]
    found = (plain["problems"], story["batch"], story["prompt_id"])
    assert found == ([], line["version"], entry["prompt_id"])
    (rollout,) = [each for each in story["rollouts"] if each["sample_index"] == entry["sample_index"]]
    pieces = rollout["branches"][0]["pieces"]
    assert rollout["reward"] == entry["reward"]
    assert [[piece["start"], piece["end"], piece["version"]] for piece in pieces] == entry["spans"]
    assert all("text" in piece for piece in pieces)
    written = {name for line in read_lines(run_dir / "metrics.jsonl") for name in line}
    assert {"perf/step_s", "policy/loss", "engine/decode_s"} <= written
    assert [name for name in written if gauge_of(name) is None] == []


# ---- writing


def lines(run_dir: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def test_each_step_is_one_line_of_finite_numbers(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path)
    recorder.record_step({"step": 1, "reward/mean": np.float32(0.5), "tokens/trained": np.int64(12)})
    assert lines(tmp_path) == [{"step": 1, "reward/mean": 0.5, "tokens/trained": 12}]
    recorder.record_step({"step": 2, "policy/loss": math.nan, "policy/ess": math.inf})
    assert lines(tmp_path)[1] == {"step": 2, "not_finite": ["policy/loss", "policy/ess"]}


def test_the_status_is_replaced_and_names_its_process(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path)
    recorder.write_status({"state": "starting", "step": 0, "oldest": math.nan})
    recorder.write_status({"state": "running", "step": 3, "rooms": {"ready": [2, math.inf]}})
    status = json.loads((tmp_path / "status.json").read_text())
    assert (status["step"], status["rooms"], status["pid"]) == (3, {"ready": [2, None]}, os.getpid())
    assert "oldest" not in status
    assert sorted(path.name for path in tmp_path.iterdir()) == ["metrics.jsonl", "status.json"]


def test_tensorboard_gets_finite_numbers(tmp_path: Path) -> None:
    steps = [{"step": n, "time_s": float(n), "reward/mean": n / 4, "policy/ess": math.nan} for n in (1, 2, 3)]
    trackers = Background(ObserveConfig(), print)
    recorder = Recorder(tmp_path, trackers)
    trackers.start(TrackedRun(tmp_path, "t", "1", {}))
    for step in steps:
        recorder.record_step(step)
    trackers.tell("close", "done")
    asyncio.run(trackers.wait_closed(60.0, print))
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert events.Tags()["scalars"] == ["time_s", "reward/mean"]
    scalars = [(event.step, event.value) for event in events.Scalars("reward/mean")]
    assert scalars == [(1, 0.25), (2, 0.5), (3, 0.75)]


@pytest.mark.parametrize(
    "left", ['{"step": 3, "rew', "12\n", '{"step": null}\n', "\0" * 4096, '{"step": 3}\n']
)
def test_steps_to_repeat_and_invalid_lines_are_removed(tmp_path: Path, left: str) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2}\n' + left)
    recorder = Recorder(tmp_path)
    assert recorder.keep_steps(2) == {"step": 2}
    recorder.record_step({"step": 3, "reward/mean": 1.0})
    assert lines(tmp_path) == [{"step": 1}, {"step": 2}, {"step": 3, "reward/mean": 1.0}]
    assert recorder.keep_steps(0) == {}
    assert lines(tmp_path) == []


def test_steps_lost_in_a_power_cut_stay_marked(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2}\n{"step": 3, "re')
    for _ in range(2):
        recorder = Recorder(tmp_path)
        last = recorder.keep_steps(5)
        recorder.record_step({"step": 6})
    assert last == {"step": 2}
    assert [line.get("step", line.get("lost")) for line in lines(tmp_path)] == [1, 2, [3, 5], 6]
    assert "before a sync" in str(lines(tmp_path)[2]["why"])
