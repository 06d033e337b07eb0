"""The call of FlashAttention 3: torch's code between our operators and the package."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.attention import _fa3

from asyncrl.trainer.attention.packed_attention import HOPPER, choose_flash

CONFIG = "CONFIG = {'build_flags': {'FLASHATTENTION_DISABLE_BACKWARD': True}}"
SCHEMAS = {
    "fwd": "flash_attn_3::fwd(Tensor q, Tensor k, Tensor v, Tensor(k_new!)? k_new=None, Tensor(v_new!)? "
    "v_new=None, Tensor? q_v=None, Tensor(out!)? out=None, Tensor? cu_seqlens_q=None, Tensor? "
    "cu_seqlens_k=None, Tensor? cu_seqlens_k_new=None, Tensor? seqused_q=None, Tensor? seqused_k=None, "
    "int? max_seqlen_q=None, int? max_seqlen_k=None, Tensor? page_table=None, Tensor? "
    "kv_batch_idx=None, Tensor? leftpad_k=None, Tensor? rotary_cos=None, Tensor? rotary_sin=None, "
    "Tensor? seqlens_rotary=None, Tensor? q_descale=None, Tensor? k_descale=None, Tensor? "
    "v_descale=None, float? softmax_scale=None, bool is_causal=False, int window_size_left=-1, int "
    "window_size_right=-1, int attention_chunk=0, float softcap=0., bool is_rotary_interleaved=False, "
    "Tensor? scheduler_metadata=None, int num_splits=0, bool? pack_gqa=None, int sm_margin=0) -> "
    "(Tensor(out!), Tensor, Tensor, Tensor)",
    "bwd": "flash_attn_3::bwd(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor softmax_lse, "
    "Tensor(dq!)? dq=None, Tensor(dk!)? dk=None, Tensor(dv!)? dv=None, Tensor? cu_seqlens_q=None, "
    "Tensor? cu_seqlens_k=None, Tensor? seqused_q=None, Tensor? seqused_k=None, int? max_seqlen_q=None,"
    " int? max_seqlen_k=None, float? softmax_scale=None, bool is_causal=False, int window_size_left=-1,"
    " int window_size_right=-1, float softcap=0., bool deterministic=False, int sm_margin=0) -> "
    "(Tensor(dq!), Tensor(dk!), Tensor(dv!), Tensor, Tensor, Tensor, Tensor, Tensor)",
}
"""Registered by FlashAttention 3 with its backward pass, as xformers 0.0.34 ships it."""


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


@pytest.mark.extras
def test_the_installed_package_has_the_known_schemas() -> None:
    try:
        import flash_attn_interface  # noqa: F401
    except (ImportError, OSError) as error:
        pytest.skip(f"FlashAttention 3 is missing, or its library needs CUDA: {error}")
    for name, known in SCHEMAS.items():
        found = getattr(torch.ops.flash_attn_3, name).default._schema
        assert str(found) == known


def test_torch_passes_each_argument_under_its_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def record(name: str) -> dict[str, Any]:
        """Return the next call's arguments by the names of the package's schema."""
        arguments = torch._C.parse_schema(SCHEMAS[name]).arguments
        seen: dict[str, Any] = {}

        def call(*values: Any) -> tuple[torch.Tensor, ...]:
            assert all(
                argument.has_default_value() for argument in arguments[len(values) :]
            )
            seen.update(
                zip([argument.name for argument in arguments], values, strict=False)
            )
            return (values[0],) * 4

        monkeypatch.setattr(_fa3, f"_FA3_CUDA_{name.upper()}", call)
        return seen

    query, key, value, out, grad = (torch.zeros(4, 2, 64) for _ in range(5))
    ends_q, ends_k, logsum = (
        torch.tensor([0, 4]),
        torch.tensor([0, 4]),
        torch.zeros(2, 4),
    )
    lengths = {
        "cu_seqlens_q": ends_q,
        "cu_seqlens_k": ends_k,
        "max_seqlen_q": 3,
        "max_seqlen_k": 4,
    }
    common = lengths | {
        "q": query,
        "k": key,
        "v": value,
        "softmax_scale": 0.5,
        "is_causal": True,
    }
    common |= {"window_size_left": -1, "window_size_right": -1, "softcap": 0.0}

    forward, backward = record("fwd"), record("bwd")
    _fa3._fa3_run_forward(
        query, key, value, ends_q, ends_k, 3, 4, 0.5, True, None, None, None
    )
    _fa3._fa3_run_backward(
        grad,
        query,
        key,
        value,
        out,
        logsum,
        ends_q,
        ends_k,
        3,
        4,
        0.5,
        True,
        -1,
        -1,
        deterministic=True,
    )
    of_forward = {
        "attention_chunk": 0,
        "is_rotary_interleaved": True,
        "num_splits": 0,
        "sm_margin": 0,
    }
    of_backward = {
        "dout": grad,
        "out": out,
        "softmax_lse": logsum,
        "deterministic": True,
        "sm_margin": 0,
    }
    for seen, expected in (
        (forward, common | of_forward),
        (backward, common | of_backward),
    ):
        for name, wanted in expected.items():
            assert seen[name] is wanted or seen[name] == wanted, name
