from __future__ import annotations

import json
import os
import socket
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.base.errors import ConfigError
from asyncrl.base.files import RunLock, lines_from_end
from asyncrl.config import RunConfig, run_config_yaml
from asyncrl.observe.inspect import render_inspect
from asyncrl.observe.recorder import Recorder
from asyncrl.observe.run_dir import boot_id
from asyncrl.observe.status import judge_state, render_status
from asyncrl.observe.watchdog import Wait
from asyncrl.trainer.step_report import append_line, note_restored

NUM_GROUPS = 2


def make_run(run_dir: Path, *, num_steps: int = 3, state: str = "running", max_staleness: int = 2) -> None:
    """A run directory as the parts write it: the real recorder, and the trainer's own record of each step."""
    trainer, buffer = {"num_steps": 9, "num_groups": NUM_GROUPS}, {"max_staleness": max_staleness}
    sections = {"model": {"path": "m"}, "task": {"python": "a:B"}, "buffer": buffer, "trainer": trainer}
    (run_dir / "config.yaml").write_text(run_config_yaml(RunConfig.model_validate(sections)))
    recorder = Recorder(run_dir)
    for version in range(num_steps):
        append_line(run_dir / "trained.jsonl", record_line(version))
        ages = {"sample/staleness_mean": 1.0, "sample/staleness_max": 2.0}
        times = {"time_s": version + 1.0, "perf/step_s": 1.0, "perf/train_s": 0.9}
        recorder.record_step({"step": version + 1, "reward/mean": 0.25 * version, **ages, **times})
    oldest = [["g7/r1", 12.0], ["g8/r0", 3.5]]
    wait = Wait("train loop", "TrainerClient.train", "optimizer step 4", "trainer-0", 12.25)
    recorder.write_status({"state": state, "waits": [asdict(wait)], "oldest_rollouts": oldest})


def record_line(version: int, ages: tuple[int, int] = (0, 2)) -> dict[str, Any]:
    """Two groups of one trajectory, 3 prompt and 4 sampled tokens each; the first sampled token of group i is
    ages[i] old.
    """
    entries = []
    for index, age in enumerate(ages):
        oldest, group = max(0, version - age), version * NUM_GROUPS + index
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


def test_status_of_a_live_run_says_what_it_does_who_waits_and_how_far_it_is(tmp_path: Path) -> None:
    make_run(tmp_path)
    lock = RunLock(tmp_path / "run.lock").acquire()
    status, text = status_of(tmp_path), words(render_status(tmp_path))
    verbose = words(render_status(tmp_path, is_verbose=True))
    lock.release()
    assert (status["state"], status["steps_done"], status["num_steps"]) == ("running", 3, 9)
    assert status["last_metrics"]["reward/mean"] == 0.5
    assert status["verdict"]["bottleneck"] == "unknown"
    waits = "train loop waits in TrainerClient.train for optimizer step 4, 12 s, to be woken by"
    for said in (
        f"process {os.getpid()} on host",
        "3 of 9 in 3.0 s, 1.00 s each, 6.0 s left",
        "Too short to",
    ):
        assert said in text
    for said in (waits, "g7/r1, 12.0 s", "training 90% ███"):
        assert (said in text, said in verbose) == (False, True)


def test_status_fits_a_screen_even_of_a_run_that_is_unwell(tmp_path: Path) -> None:
    make_run(tmp_path, num_steps=0)
    recorder = Recorder(tmp_path)
    for step in range(1, 41):
        ill = {"reward/equal_fraction": 0.9, "sample/truncated_fraction": 0.98, "trainer/skipped_steps": 1}
        means = {
            "policy/entropy": 2.0,
            "policy/grad_norm": 0.1,
            "sample/length_mean": 9.0,
            "perf/step_s": 1.0,
        }
        recorder.record_step(
            {"step": step, "time_s": step, "reward/mean": 0.1, "reward/std": 0.1, **ill, **means}
        )
    recorder.write_status({"state": "running", "warnings": ["a reward call takes long " * 3] * 5})
    lock = RunLock(tmp_path / "run.lock").acquire()
    text = render_status(tmp_path)
    lock.release()
    assert len(text.splitlines()) <= 24
    assert "Learned nothing" in text
    assert "And 1 more, see --verbose." in words(text)
    assert "(and 4 more, see --verbose)" in words(text)


@pytest.mark.parametrize(
    ("elsewhere", "age_s", "state"),
    [
        ({"host": "node7", "boot_id": "other"}, 3.0, "running"),
        ({"host": "node7", "boot_id": "other"}, 300.0, "unknown"),
        ({"boot_id": "before"}, 300.0, "crashed"),
        ({"boot_id": "before"}, 3.0, "running"),
        ({"state": "done"}, 3.0, "done"),
        ({"state": []}, 3.0, "unknown"),
    ],
)
def test_a_run_that_cannot_be_seen_from_here_is_not_called_crashed(
    tmp_path: Path, elsewhere: dict[str, Any], age_s: float, state: str
) -> None:
    here = {"state": "running", "pid": 17, "host": socket.gethostname(), "boot_id": boot_id()}
    here |= {"updated_s": time.time() - age_s}
    (tmp_path / "run.lock").touch()
    assert judge_state(here | elsewhere, tmp_path)[0] == state
    assert judge_state(here, tmp_path)[0] == "crashed", "nobody holds its lock, and this is its machine"
    lock = RunLock(tmp_path / "run.lock").acquire()
    over_a_shared_file_system = judge_state(here | elsewhere, tmp_path)[0]
    lock.release()
    assert over_a_shared_file_system == (state if "state" in elsewhere else "running")


def test_a_directory_that_is_no_run_is_told_with_the_way_out(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for name in (".", "missing", "file"):
        with pytest.raises(ConfigError, match="is no run directory.*\n.*asyncrl run"):
            render_status(tmp_path / name)


def test_a_run_before_its_first_step_can_be_read(tmp_path: Path) -> None:
    make_run(tmp_path, num_steps=0, state="starting")
    assert status_of(tmp_path)["verdict"] is None
    plain = inspected(tmp_path)
    assert (plain["num_steps"], plain["bound_kept"]) == (0, None)
    assert "nothing was trained yet" in render_inspect(tmp_path)
    with pytest.raises(ConfigError, match="no record of step 1; it has no steps"):
        render_inspect(tmp_path, step=1)


# ---- the trainer's record


def test_inspect_recomputes_staleness_from_the_spans_and_finds_the_bound_kept(tmp_path: Path) -> None:
    make_run(tmp_path)
    plain = inspected(tmp_path)
    assert (plain["bound_kept"], plain["staleness_max"], plain["num_loss_tokens"]) == (True, 2, 3 * 2 * 4)
    last = plain["steps"][-1]
    assert (last["version"], last["group_ids"], last["tokens_by_version"]) == (2, [4, 5], {"0": 1, "2": 7})
    assert (last["staleness_mean"], last["staleness_max"], last["reward_mean"]) == (1.0, 2, 0.5)
    said = words(render_inspect(tmp_path))
    assert "bound kept: 24 tokens of 6 trajectories in 3 steps, the oldest 2 versions" in said


def test_every_way_in_which_a_record_breaks_a_promise_is_found(tmp_path: Path) -> None:
    make_run(tmp_path, num_steps=3, max_staleness=1)
    path = tmp_path / "trained.jsonl"
    again, future, twice = record_line(0, (0, 0)), record_line(4, (0, 0)), record_line(6, (0, 0))
    again["version"] = 3
    again["trajectories"] = [again["trajectories"][0] | {"num_loss_tokens": 9}]
    future["trajectories"][1]["spans"] = [[3, 7, 5]]
    branch = {**twice["trajectories"][1], "branch": 1}
    twice["trajectories"] += [branch, branch]
    for line in (again, future, twice):
        append_line(path, line)
    plain = inspected(tmp_path)
    assert (plain["bound_kept"], "BOUND OR RECORD BROKEN" in render_inspect(tmp_path)) == (False, True)
    assert plain["violations"] == [
        "step 3, group 5, sample 0: tokens 3..3 are of version 0, 2 behind; 1 are allowed",
        "step 4, group 0, sample 0: tokens 3..6 are of version 0, 3 behind; 1 are allowed",
        "step 4, group 0, sample 0: 9 tokens in the loss, but spans of 4",
        "step 4, group 0: was trained on in step 1 already",
        "step 5, group 9, sample 0: tokens 3..6 are of version 5, which did not exist yet",
        "step 6 is missing in the record",
        "step 7, group 13, sample 0, branch 1: was trained on in step 7 already",
    ]


def test_one_step_or_group_is_shown_with_its_trajectories_and_a_rollout_counts_once(tmp_path: Path) -> None:
    make_run(tmp_path)
    forked = record_line(3)
    forked["trajectories"].insert(1, {**forked["trajectories"][0], "branch": 1})
    append_line(tmp_path / "trained.jsonl", forked)
    (step,) = inspected(tmp_path, step=4)["steps"]
    assert (step["num_trajectories"], step["num_loss_tokens"], step["reward_mean"]) == (3, 12, 0.5)
    assert [entry["branch"] for entry in step["trajectories"]] == [0, 1, 0]
    assert inspected(tmp_path, step=2)["steps"][0]["metrics"]["reward/mean"] == 0.25
    (found,) = inspected(tmp_path, group=5)["steps"]
    assert found["step"] == 3
    assert found["trajectories"] == [record_line(2)["trajectories"][1] | {"staleness": 2}]
    assert "3..3@v0 4..6@v2" in render_inspect(tmp_path, group=5)
    for unknown in ({"step": 7}, {"group": 99}):
        with pytest.raises(ConfigError, match="has no record of (step 7|group 99); it has steps 1 to 4"):
            render_inspect(tmp_path, **unknown)


def test_steps_that_a_power_cut_took_are_told_as_missing_and_the_bound_stands(tmp_path: Path) -> None:
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
    assert plain["lost"] == plain["problems"] == [f"steps 4..5 are missing in the record ({why})"]
    assert "bound kept in all that is recorded" in render_inspect(tmp_path)
    note_restored(path, 3)
    for version in (3, 4, 5):
        append_line(path, record_line(version))
    plain = inspected(tmp_path)
    assert (plain["lost"], plain["violations"], plain["num_steps"]) == ([], [], 6), "trained again after all"
    path.unlink()
    append_line(path, record_line(2))
    assert inspected(tmp_path)["violations"] == ["steps 1..2 are missing in the record"], "without a reason"


@given(
    st.lists(st.sampled_from([b"", b"a", b"\0" * 70_000, b"b" * 140_000, b"c" * 65_535]), max_size=6),
    st.booleans(),
)
def test_lines_come_from_the_end_as_they_lie_in_the_file(lines: list[bytes], is_torn: bool) -> None:
    content = b"".join(line + b"\n" for line in lines) + (b"torn" if is_torn else b"")
    with tempfile.NamedTemporaryFile() as file:
        file.write(content)
        file.flush()
        found = list(lines_from_end(Path(file.name)))
    assert b"".join(line for _, line in reversed(found)) == content
    assert all(content[start : start + len(line)] == line and b"\n" not in line[:-1] for start, line in found)


# ---- files that hold anything

_WAIT = '{"state": "done", "waits": [{"who": 1, "where": 2, "what": 3, "waker": 4, "seconds": "x"}]}'


@pytest.mark.parametrize(
    ("name", "text", "problem"),
    [
        ("metrics.jsonl", '{"step": 4, "rew', "metrics.jsonl ends in half a line"),
        ("metrics.jsonl", '{"step": "q"}\n', "metrics.jsonl without a number step"),
        ("metrics.jsonl", '{"step": 3, "time_s": 1e999}\n', ""),
        ("metrics.jsonl", f'{{"step": 3, "time_s": {"9" * 400}}}\n', ""),
        ("metrics.jsonl", "[" * 100_000 + "\n", "metrics.jsonl is no JSON dict"),
        ("eval.jsonl", "{}\n", "eval.jsonl without a number policy_version"),
        ("trained.jsonl", "garbage\n", "trained.jsonl is no JSON dict, skipped: b'garbage"),
        ("trained.jsonl", '{"version": 1e999, "min_version": 0, "trajectories": []}\n', "trained.jsonl"),
        ("trained.jsonl", '{"version": 3, "min_version": 0, "trajectories": [1]}\n', "is no record"),
        ("trained.jsonl", '{"restored": null}\n', "is no record"),
        ("status.json", '{"state": "running", "updated_s": "soon"}', "no number updated_s"),
        ("status.json", "[" * 100_000, "status.json is no JSON object"),
        ("status.json", '{"state": [], "waits": [{"who": 1}], "pid": -7, "host": null}', ""),
        ("status.json", f'{{"state": "running", "pid": {10**30}, "host": 7, "boot_id": []}}', ""),
        ("status.json", _WAIT, ""),
    ],
)
def test_what_is_of_a_wrong_type_is_left_out_and_told_and_nothing_else_is_lost(
    tmp_path: Path, name: str, text: str, problem: str
) -> None:
    make_run(tmp_path)
    with (tmp_path / name).open("w" if name == "status.json" else "a") as file:
        file.write(text)
    problems = [*status_of(tmp_path)["problems"], *inspected(tmp_path)["problems"]]
    assert any(problem in line for line in problems) or not problem
    assert str(tmp_path) in "".join(render_status(tmp_path).replace("│", "").split())
    assert "3 steps" in words(render_inspect(tmp_path))


def test_a_run_without_a_status_says_that_it_has_none(tmp_path: Path) -> None:
    make_run(tmp_path)
    (tmp_path / "status.json").unlink()
    said = words(render_status(tmp_path))
    assert "unknown: no status.json can be read" in said
    assert "None" not in said


@pytest.mark.parametrize("name", ["metrics.jsonl", "trained.jsonl", "eval.jsonl", "status.json"])
def test_a_file_that_cannot_be_read_is_told_and_the_others_are_shown(tmp_path: Path, name: str) -> None:
    make_run(tmp_path)
    (tmp_path / name).unlink(missing_ok=True)
    (tmp_path / name).mkdir()  # rights do not bind the superuser, whom tests may run as
    told = f"{name} cannot be read: Is a directory"
    assert told in inspected(tmp_path)["problems"]
    assert (told in status_of(tmp_path)["problems"]) == (name != "trained.jsonl"), "status does not read it"
