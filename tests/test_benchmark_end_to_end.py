"""The benchmark of whole runs: levels, learning rates, and kept results."""

import math
import sys
from pathlib import Path

import end_to_end
import pytest
from end_to_end_runs import LEVELS, WINDOW, Curve, Measured, Work, best_rate

SCRIPT = """
import json, pathlib, sys
from time import sleep
counter, run_dir = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[-1])
counter.write_text(counter.read_text() + "x")
run_dir.mkdir()
lines = [{"step": n, "time_s": 0.1 * n, "reward/mean": 0.25, "sample/length_mean": 4.0} for n in (1, 2)]
(run_dir / "metrics.jsonl").write_text("".join(json.dumps(line) + "\\n" for line in lines))
"""


def curve(rewards: list[float], *, step_s: float = 2.0) -> Curve:
    times_s = [step_s * number for number in range(1, len(rewards) + 1)]
    return Curve(start_up_s=5.0, times_s=times_s, rewards=rewards, lengths=[4.0] * len(rewards))


def test_level_is_reached_by_the_mean_of_ten_steps():
    assert math.isinf(curve([0.9] * (WINDOW - 1)).reach_s(0.5))
    assert curve([0.9] * WINDOW).reach_s(0.5) == 2.0 * WINDOW
    assert curve([0.0] * WINDOW + [1.0] * WINDOW).reach_s(0.5) == 2.0 * (WINDOW + WINDOW // 2)
    never = curve([0.5, 0.4] * WINDOW)
    assert math.isinf(never.reach_s(0.5))
    assert never.final_reward == pytest.approx(0.45)


def test_best_rate_reaches_the_highest_level_soonest():
    slow, fast = curve([0.9] * 30, step_s=3.0), curve([0.0] * 5 + [0.9] * 25, step_s=0.5)
    stuck, worse = curve([0.7] * 30, step_s=0.1), curve([0.6] * 30, step_s=0.1)
    assert best_rate({"slow": slow, "fast": fast, "stuck": stuck}) == "fast"
    assert best_rate({"worse": worse, "stuck": stuck}) == "stuck"


def test_ratio_is_the_smallest_one_and_zero_without_success(
    capsys: pytest.CaptureFixture[str],
):
    def measured(*curves: Curve) -> Measured:
        return Measured("5e-4", dict(enumerate(curves)))

    ours, theirs = curve([0.9] * 30), curve([0.9] * 30, step_s=6.0)
    ratio = end_to_end.print_goals({"asyncrl": measured(ours), "trl": measured(theirs)})
    assert ratio == pytest.approx(3.0)
    stuck = curve([0.7] * 30)
    assert end_to_end.print_goals({"asyncrl": measured(stuck), "trl": measured(theirs)}) == 0.0
    assert end_to_end.print_goals({"asyncrl": measured(ours), "trl": measured(stuck)}) == pytest.approx(1.0)
    assert f"seconds to {LEVELS[-1]}, TRL over asyncrl" in capsys.readouterr().out


def test_kept_result_is_reused_only_for_the_same_command(tmp_path: Path):
    counter = tmp_path / "counter"
    counter.write_text("")
    command = [sys.executable, "-c", SCRIPT, str(counter)]
    first = Work(tmp_path / "work").measure("one", command)
    assert (first.times_s, first.rewards) == ([0.1, 0.2], [0.25, 0.25])
    assert Work(tmp_path / "work").measure("one", command) == first
    assert counter.read_text() == "x"
    Work(tmp_path / "work").measure("one", [*command, "more"])
    assert counter.read_text() == "xx"
    with pytest.raises(SystemExit, match="two ended with 3"):
        Work(tmp_path / "work").measure("two", [sys.executable, "-c", "raise SystemExit(3)"])
