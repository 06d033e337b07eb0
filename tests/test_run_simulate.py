"""Turns against splits in virtual time, and the page that tells what came of it."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest
import yaml

from asyncrl.config import load_config
from asyncrl.errors import ConfigError
from asyncrl.placement.devices import place
from asyncrl.run.simulate import Case, apart, best_split, break_even, in_turns, simulation_text

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "colocation.md"
EVEN = Case(
    num_devices=4, num_groups=4, group_size=4, slots=4, ratio=1.0, sigma=0.0, handover_s=0.5, num_batches=20
)


def tail(**values: float) -> Case:
    return Case(
        **{
            "num_devices": 4,
            "num_groups": 4,
            "group_size": 4,
            "slots": 4,
            "ratio": 1.0,
            "sigma": 1.0,
            "handover_s": 0.0,
        }
        | values
    )  # type: ignore[arg-type]


def test_a_turn_is_generation_and_training_on_all_devices_and_its_handovers() -> None:
    turns = in_turns(EVEN)  # 16 rollouts of 1 s in 16 slots, then 4 device-seconds on 4 devices
    assert 1 / turns.batches_per_s == pytest.approx(1.0 + 1.0 + 0.5, rel=0.03)
    assert turns.age_max == 0


def test_a_split_at_0_lets_one_half_wait_for_the_other() -> None:
    split = apart(EVEN, 0, num_trainer=2)  # 16 rollouts in 8 slots, then 4 device-seconds on 2 devices
    assert 1 / split.batches_per_s == pytest.approx(2.0 + 2.0, rel=0.03)


def test_the_break_even_is_the_handover_that_makes_turns_as_slow_as_the_split() -> None:
    case = tail(ratio=2.0, sigma=0.3, num_devices=3)
    split = best_split(case, 0, in_turns(case))
    assert split.break_even_s > 0
    even = tail(ratio=2.0, sigma=0.3, num_devices=3, handover_s=split.break_even_s)
    assert best_split(even, 0, in_turns(even)).gain == pytest.approx(1.0, rel=0.01)


def test_with_a_tail_apart_at_1_wins_even_if_handovers_take_no_time_and_at_0_turns_win() -> None:
    _, (at_0, at_1, at_4) = break_even(tail(num_batches=60), (0, 1, 4))
    assert at_0.gain < 1 < at_1.gain < at_4.gain
    assert at_1.break_even_s < 0


def test_what_simulate_prints_comes_from_the_config() -> None:
    config = load_config(ROOT / "configs" / "quickstart.yaml", ["buffer.on_overdue=mask", "rollout.slots=8"])
    text = simulation_text(config, num_devices=2, ratio=1.0, sigma=0.5, handover_s=0.1, num_batches=10)
    assert "2 devices of 8 slots, 8 groups of 8 a batch (64 rollouts for 16 slots)" in text
    assert "on_overdue mask, 10 batches" in text
    assert re.search(r"^max_staleness 4, split 1\+1 +\d\.\d{3} +\d+\.\d{2}", text, flags=re.MULTILINE)
    with pytest.raises(ConfigError, match="two devices or more can be split"):
        simulation_text(config, num_devices=1, ratio=1.0, sigma=0.5, handover_s=0.1)


@pytest.mark.parametrize(
    "option",
    [
        *(
            {name: value}
            for name in ("ratio", "sigma", "handover_s", "publish_s")
            for value in (-1.0, math.inf, math.nan, 1e308)
        ),
        {"ratio": 0.0},
        {"ratio": 1e-320},
    ],
)
def test_numbers_that_no_machine_has_are_refused_and_named(option: dict[str, float]) -> None:
    config = load_config(ROOT / "configs" / "quickstart.yaml")
    numbers = {"ratio": 1.0, "sigma": 0.5, "handover_s": 0.1, "publish_s": 0.0} | option
    with pytest.raises(
        ConfigError, match="a ratio is within 1e-06..1e\\+06, sigma 0..10, a time 0..1e\\+06"
    ) as caught:
        simulation_text(config, num_devices=2, **numbers)
    (value,) = option.values()
    assert str(value) in str(caught.value)


# ---- docs/colocation.md


def test_the_page_quotes_the_benchmark_as_it_was_kept() -> None:
    kept = (ROOT / "benchmarks" / "results" / "break_even.txt").read_text(encoding="utf-8").splitlines()[1:]
    assert "\n".join(kept) in PAGE.read_text(encoding="utf-8")


def test_the_example_on_the_page_runs(capsys: pytest.CaptureFixture[str]) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL)
    exec(compile(example, str(PAGE), "exec"), {})
    assert "break-even handover" in capsys.readouterr().out


def test_the_settings_on_the_page_make_a_colocated_run(tmp_path: Path) -> None:
    (settings,) = re.findall(r"```yaml\n(.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL)
    values = yaml.safe_load(
        (ROOT / "configs" / "quickstart.yaml").read_text(encoding="utf-8")
    ) | yaml.safe_load(settings)
    config_path = tmp_path / "c.yaml"
    config_path.write_text(yaml.safe_dump(values))
    assert place(load_config(config_path), num_cuda=1).mode == "colocated"
