"""The record of staleness asks for runs that can start."""

from __future__ import annotations

from pathlib import Path

import pytest
from staleness_record import SAME, Arm, arms

from asyncrl.config.load import load_config

ROOT = Path(__file__).parents[1]
PARTS = ("age", "losses", "auto", "smollm2", "agent")
ARMS = [arm for part in PARTS for arm in arms(part)]


@pytest.mark.parametrize("arm", ARMS, ids=lambda arm: f"{arm.part} {arm.settings}")
def test_every_arm_is_a_valid_config(arm: Arm) -> None:
    settings = [f"{key}={value}" for key, value in arm.settings.items()]
    config = load_config(ROOT / arm.config, [*SAME, *settings])
    assert config.buffer.max_staleness == int(arm.settings["buffer.max_staleness"])
