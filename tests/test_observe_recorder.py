from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from asyncrl.observe.run_dir import Recorder


def lines(run_dir: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def test_each_step_is_one_line_that_is_on_disk_at_once_without_what_is_no_number(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path)
    recorder.record_step({"step": 1, "reward/mean": np.float32(0.5), "tokens/trained": np.int64(12)})
    assert lines(tmp_path) == [{"step": 1, "reward/mean": 0.5, "tokens/trained": 12}]
    recorder.record_step({"step": 2, "policy/loss": math.nan, "policy/ess": math.inf})
    assert lines(tmp_path)[1] == {"step": 2, "not_finite": ["policy/loss", "policy/ess"]}


def test_a_half_line_of_a_killed_process_spoils_no_other_line(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2, "rew')
    recorder = Recorder(tmp_path)
    assert path.read_text().endswith('"rew'), "the start may be refused: nothing is changed yet"
    recorder.record_step({"step": 2})
    assert path.read_text().splitlines() == ['{"step": 1}', '{"step": 2, "rew', '{"step": 2}']


def test_closing_on_a_full_disk_does_not_replace_the_first_error(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    recorder = Recorder(tmp_path)
    with pytest.raises(OSError, match="No space left on device"):
        recorder.record_step({"step": 0})


def test_status_is_replaced_as_a_whole_and_says_which_process_wrote_it(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path)
    recorder.write_status({"state": "starting", "step": 0, "oldest": math.nan})
    recorder.write_status({"state": "running", "step": 3, "rooms": {"ready": [2, math.inf]}})
    status = json.loads((tmp_path / "status.json").read_text())
    assert (status["step"], status["rooms"], status["pid"]) == (3, {"ready": [2, None]}, os.getpid())
    assert "oldest" not in status
    assert sorted(path.name for path in tmp_path.iterdir()) == ["metrics.jsonl", "status.json"]


def test_what_a_run_writes_is_written_without_torch(tmp_path: Path) -> None:
    script = """
import sys
from pathlib import Path
from asyncrl.observe.run_dir import Recorder
from asyncrl.observe.run_numbers import Steps
from asyncrl.observe.tracker_clients import TensorBoard
from asyncrl.observe.trackers import Background, TrackedRun
from asyncrl.observe.verdict import write_reward_plot
steps = [{"step": n, "time_s": float(n), "reward/mean": n / 4, "policy/ess": float("nan")} for n in (1, 2, 3)]
trackers = Background({"tensorboard": TensorBoard}, print)
recorder = Recorder(sys.argv[1], trackers)
trackers.start(TrackedRun(Path(sys.argv[1]), "t", "1", {}))
for step in steps:
    recorder.record_step(step)
write_reward_plot(Path(sys.argv[1]), Steps(steps), title="t")
trackers.tell("close", "done")
trackers._thread.join()
assert "torch" not in sys.modules and "tensorflow" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=True)
    assert (tmp_path / "reward.png").read_bytes().startswith(b"\x89PNG")

    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert events.Tags()["scalars"] == ["time_s", "reward/mean"]
    scalars = [(event.step, event.value) for event in events.Scalars("reward/mean")]
    assert scalars == [(1, 0.25), (2, 0.5), (3, 0.75)]


@pytest.mark.parametrize(
    "left", ['{"step": 3, "rew', "12\n", '{"step": null}\n', "\0" * 4096, '{"step": 3}\n']
)
def test_steps_that_are_about_to_be_taken_again_are_removed_and_so_is_what_is_no_line_of_a_step(
    tmp_path: Path, left: str
) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2}\n' + left)
    recorder = Recorder(tmp_path)
    assert recorder.keep_steps(2) == {"step": 2}
    recorder.record_step({"step": 3, "reward/mean": 1.0})
    assert lines(tmp_path) == [{"step": 1}, {"step": 2}, {"step": 3, "reward/mean": 1.0}]
    assert recorder.keep_steps(0) == {}
    assert lines(tmp_path) == []


def test_steps_whose_lines_a_power_cut_took_are_marked_and_stay_marked(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2}\n{"step": 3, "re')
    for _ in range(2):
        recorder = Recorder(tmp_path)
        last = recorder.keep_steps(5)
        recorder.record_step({"step": 6})
    assert last == {"step": 2}
    assert [line.get("step", line.get("lost")) for line in lines(tmp_path)] == [1, 2, [3, 5], 6]
    assert "before a sync" in str(lines(tmp_path)[2]["why"])
