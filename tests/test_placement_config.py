"""How placement is written, and what is refused before any machine is looked at."""

from __future__ import annotations

from pathlib import Path

import pytest
from placement_cases import CONFIGS

from asyncrl.config import RunConfig, load_config, run_config_yaml
from asyncrl.config.placement import numbers_of
from asyncrl.errors import ConfigError


def load(*overrides: str) -> RunConfig:
    return load_config(CONFIGS / "quickstart.yaml", overrides)


@pytest.mark.parametrize(
    ("text", "numbers"),
    [("auto", None), ("cpu", None), ("all", None), ("2", (2,)), ("[3, 1]", (3, 1)), ("2-4", (2, 3, 4))],
)
def test_every_form_is_read_and_written_back_as_it_was(
    text: str, numbers: tuple[int, ...] | None, tmp_path: Path
) -> None:
    config = load(f"placement.trainer={text}", "placement.rollout=cpu")
    again = tmp_path / "config.yaml"
    again.write_text(run_config_yaml(config))
    assert load_config(again) == config
    assert str(config.placement.trainer) == text
    assert numbers_of(config.placement.trainer) == numbers


@pytest.mark.parametrize(
    "setting",
    [
        *(
            f"placement.trainer={devices}"
            for devices in ("gpu", "true", "none", "-1", "3-1", "0,1", "[]", "[0, 0]", "[0, cpu]", "rollout")
        ),
        *(f"placement.trainer={devices}" for devices in ("node0.1", "0:1", "[0.1, 0.2]", "host@0")),
        *(f"placement.eval={devices}" for devices in ("all", "cuda", "0-1", "[0, 1]")),
    ],
)
def test_anything_else_is_refused(setting: str) -> None:
    with pytest.raises(ConfigError, match=setting.partition("=")[0]):
        load(setting)


@pytest.mark.parametrize(
    ("trainer", "rollout"), [("auto", "trainer"), ("all", "all"), ("0", "[0]"), ("0-1", "[1, 0]")]
)
def test_turns_need_max_staleness_0_and_that_is_known_when_the_config_is_read(
    trainer: str, rollout: str
) -> None:
    devices = [f"placement.trainer={trainer}", f"placement.rollout={rollout}"]
    load(*devices, "buffer.max_staleness=0")
    with pytest.raises(ConfigError, match=r"buffer.max_staleness=1 .*; set buffer.max_staleness=0, or"):
        load(*devices, "buffer.max_staleness=1")
