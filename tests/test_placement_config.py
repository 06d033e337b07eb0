"""How placement is written, and what is refused before any machine is looked at."""

from __future__ import annotations

from pathlib import Path

import pytest

from asyncrl.config import RunConfig, load_config, run_config_yaml
from asyncrl.config.placement import numbers_of
from asyncrl.errors import ConfigError

QUICKSTART = Path(__file__).parent.parent / "configs" / "quickstart.yaml"


def load(*overrides: str) -> RunConfig:
    return load_config(QUICKSTART, overrides)


@pytest.mark.parametrize("text", ["auto", "cpu", "cuda", "all", "2", "[0, 1]", "0-3"])
def test_every_form_is_read_and_written_back_as_it_was(text: str, tmp_path: Path) -> None:
    config = load(f"placement.trainer={text}", "placement.rollout=cpu")
    again = tmp_path / "config.yaml"
    again.write_text(run_config_yaml(config))
    assert load_config(again) == config
    assert str(config.placement.trainer) == text


def test_numbers_lists_and_ranges_name_devices_and_words_do_not() -> None:
    assert numbers_of(2) == (2,)
    assert numbers_of([3, 1]) == (3, 1)
    assert numbers_of("2-4") == (2, 3, 4)
    assert [numbers_of(word) for word in ("auto", "cpu", "cuda", "all", "trainer")] == [None] * 5


@pytest.mark.parametrize(
    "devices", ["node0.1", "0.1", "0:1", "[0.1, 0.2]", "host@0", '["node0.0"]', "0-3:0-7"]
)
def test_a_node_is_refused_for_now(devices: str) -> None:
    with pytest.raises(ConfigError, match="one machine so far"):
        load(f"placement.trainer={devices}")


@pytest.mark.parametrize(
    "devices", ["gpu", "true", "none", "-1", "3-1", "0,1", "[]", "[0, 0]", "[0, cpu]", "trainer"]
)
def test_anything_else_is_refused_with_what_can_be_written(devices: str) -> None:
    with pytest.raises(ConfigError, match="placement.trainer.*give auto, cpu, cuda, all, a device number"):
        load(f"placement.trainer={devices}")
    with pytest.raises(ConfigError, match="the other way round: placement.rollout=trainer"):
        load("placement.trainer=rollout")


@pytest.mark.parametrize("devices", ["all", "cuda", "0-1", "[0, 1]"])
def test_the_eval_engine_has_one_device(devices: str) -> None:
    with pytest.raises(ConfigError, match="one engine evaluates, on one device"):
        load(f"placement.eval={devices}")


@pytest.mark.parametrize(
    ("trainer", "rollout"),
    [
        ("auto", "trainer"),
        ("cpu", "trainer"),
        ("all", "trainer"),
        ("all", "all"),
        ("0", "[0]"),
        ("0-1", "[1, 0]"),
    ],
)
def test_turns_need_max_staleness_0_and_that_is_known_when_the_config_is_read(
    trainer: str, rollout: str
) -> None:
    devices = [f"placement.trainer={trainer}", f"placement.rollout={rollout}"]
    load(*devices, "buffer.max_staleness=0")
    with pytest.raises(
        ConfigError,
        match=r"take turns: .* buffer.max_staleness=1 could never be used; set buffer.max_staleness=0, or "
        r"give",
    ):
        load(*devices, "buffer.max_staleness=1")


def test_devices_of_which_only_some_are_shared_are_refused_with_the_reason() -> None:
    with pytest.raises(
        ConfigError,
        match=r"share \[1\] and not the others: .* would wait with it; give both sides the same devices",
    ):
        load("placement.trainer=0-1", "placement.rollout=1-2", "buffer.max_staleness=0")
    load("placement.trainer=0-1", "placement.rollout=2-3", "buffer.max_staleness=4")
