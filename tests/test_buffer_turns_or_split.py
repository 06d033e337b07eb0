"""Turns against splits in virtual time, and the page that tells what came of it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml
from break_even import DevicesCase, break_even

from asyncrl.config import load_config
from asyncrl.placement.devices import place

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "colocation.md").read_text(encoding="utf-8")


def case(ratio: float = 1.0, sigma: float = 0.0, handover_s: float = 0.0, **values: int) -> DevicesCase:
    sizes = {"num_devices": 4, "num_groups": 4, "group_size": 4, "slots": 4} | values
    return DevicesCase(ratio=ratio, sigma=sigma, handover_s=handover_s, on_overdue="wait", **sizes)


def test_turns_use_all_devices_and_pay_handovers_and_a_split_at_0_waits_for_the_other_half() -> None:
    even = case(handover_s=0.5, num_batches=20)
    turns = even.play()  # 16 rollouts of 1 s in 16 slots, then 4 device-seconds on 4 devices
    assert 1 / turns.batches_per_s == pytest.approx(1.0 + 1.0 + 0.5, rel=0.03)
    assert turns.age_max == 0
    split = even.play(0, num_trainer=2)  # 16 rollouts in 8 slots, then 4 device-seconds on 2 devices
    assert 1 / split.batches_per_s == pytest.approx(2.0 + 2.0, rel=0.03)


def test_the_break_even_is_the_handover_that_makes_turns_as_slow_as_the_split() -> None:
    free = case(2.0, 0.3, num_devices=3)
    _, (split,) = break_even(free, [0])
    assert split.break_even_s > 0
    even = case(2.0, 0.3, split.break_even_s, num_devices=3)
    _, (split,) = break_even(even, [0])
    assert split.gain == pytest.approx(1.0, rel=0.01)


def test_with_a_tail_apart_at_1_wins_even_if_handovers_take_no_time_and_at_0_turns_win() -> None:
    _, (at_0, at_1, at_4) = break_even(case(sigma=1.0, num_batches=60), (0, 1, 4))
    assert at_0.gain < 1 < at_1.gain < at_4.gain
    assert at_1.break_even_s < 0


def test_the_page_quotes_the_benchmark() -> None:
    kept = (ROOT / "benchmarks" / "results" / "break_even.txt").read_text(encoding="utf-8").splitlines()[1:]
    assert "\n".join(kept) in PAGE


def test_the_settings_on_the_page_make_a_colocated_run(tmp_path: Path) -> None:
    (settings,) = re.findall(r"```yaml\n(.*?)```", PAGE, flags=re.DOTALL)
    values = yaml.safe_load((ROOT / "configs" / "quickstart.yaml").read_text()) | yaml.safe_load(settings)
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(values))
    assert place(load_config(tmp_path / "c.yaml"), 1).mode == "colocated"
