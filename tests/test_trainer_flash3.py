"""FlashAttention 3 is used only with its backward pass."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

import pytest

from asyncrl.trainer.attention.packed_attention import HOPPER, choose_flash

CONFIG = "CONFIG = {'build_flags': {'FLASHATTENTION_DISABLE_BACKWARD': True}}"


def test_a_flash_attention_without_backward_is_left_unused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "flash_attn_interface.py").write_text(
        "raise RuntimeError('it was imported')"
    )
    (tmp_path / "flash_attn_config.py").write_text(CONFIG)
    monkeypatch.syspath_prepend(tmp_path)
    with caplog.at_level(logging.WARNING, "asyncrl.trainer"):
        assert choose_flash(HOPPER) == 2
    del sys.modules["flash_attn_config"]
    (record,) = caplog.records
    assert "disables the backward pass" in record.getMessage()
