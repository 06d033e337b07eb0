from __future__ import annotations

from pathlib import Path

import pytest

from asyncrl.observe.recorder import running_mean, smoothing_window, write_reward_plot
from asyncrl.observe.run_numbers import Steps


def test_the_plot_is_a_png_in_the_run_directory(tmp_path: Path) -> None:
    steps = [{"step": n, "time_s": 0.4 * n, "reward/mean": n / 50} for n in range(1, 51)] + [{"step": 51}]
    path = write_reward_plot(tmp_path, Steps(steps), title="quickstart")
    assert path == tmp_path / "reward.png"
    assert path.read_bytes().startswith(b"\x89PNG")


def test_one_step_can_be_drawn_and_none_is_refused(tmp_path: Path) -> None:
    write_reward_plot(tmp_path, Steps([{"step": 1, "time_s": 1.0, "reward/mean": 0.5}]), title="one")
    with pytest.raises(ValueError, match="no step with reward/mean"):
        write_reward_plot(tmp_path, Steps([{"step": 1}]), title="none")


def test_the_running_mean_looks_back_and_starts_with_what_there_is() -> None:
    assert running_mean([1.0, 2.0, 3.0, 5.0], window=2) == [1.0, 1.5, 2.5, 4.0]
    assert [smoothing_window(num) for num in (1, 40, 300, 10_000)] == [1, 2, 15, 25]
