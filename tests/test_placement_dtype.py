"""model.dtype: auto is one type for trainer and engines, by what the machine computes in, and stays what a
run began with.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from asyncrl.cli import app
from asyncrl.config import RunConfig, load_config
from asyncrl.errors import ConfigError
from asyncrl.placement import choices as dtype
from asyncrl.placement.choices import cpu_has_bfloat16, settle_dtype
from asyncrl.placement.devices import CudaDevice
from asyncrl.run.resume import begun_dtype, find_resume

CONFIG: dict[str, Any] = {
    "model": {
        "scratch": {
            "characters": "abcdef0123456789 ",
            "architecture": {"model_type": "qwen3", "hidden_size": 8},
        }
    },
    "task": {"python": "asyncrl.tasks.letters:Letters"},
}


def make_config(folder: Path, *overrides: str) -> RunConfig:
    path = folder / "dtype.yaml"
    path.write_text(yaml.safe_dump(CONFIG))
    return load_config(path, overrides)


def cuda(number: int) -> list[CudaDevice]:
    return [CudaDevice(str(index), None) for index in range(number)]


@pytest.mark.parametrize(
    ("overrides", "num_cuda", "has_bfloat16", "chosen", "why"),
    [
        ([], 0, False, "float32", "this CPU has no bfloat16 instructions (avx512_bf16, amx_bf16)"),
        ([], 0, True, "bfloat16", "this CPU has instructions for it"),
        ([], 2, False, "bfloat16", "trainer and engines are on CUDA"),
        (["placement.rollout=cpu"], 1, False, "float32", "no bfloat16 instructions"),
        (["placement.rollout=cpu"], 1, True, "bfloat16", "this CPU has instructions"),
        (["rollout.engine=simulated"], 1, False, "bfloat16", "on CUDA"),
        (["rollout.engine=simulated"], 0, False, "float32", "no bfloat16 instructions"),
    ],
)
def test_auto_is_what_every_device_of_trainer_and_engines_computes_fast_in(
    tmp_path: Path, overrides: list[str], num_cuda: int, has_bfloat16: bool, chosen: str, why: str
) -> None:
    config, words = settle_dtype(
        make_config(tmp_path, *overrides), cuda=cuda(num_cuda), has_bfloat16=has_bfloat16
    )
    assert config.model.dtype == chosen
    assert words.startswith(f"model.dtype: auto is {chosen}: ")
    assert why in words


def test_what_is_written_stays_and_is_told_where_it_is_slow(tmp_path: Path) -> None:
    config = make_config(tmp_path, "model.dtype=bfloat16")
    assert settle_dtype(config, cuda=[], has_bfloat16=True) == (config, "")
    assert settle_dtype(config, cuda=cuda(2), has_bfloat16=False) == (config, "")
    same, words = settle_dtype(config, cuda=[], has_bfloat16=False)
    assert same == config
    assert "no instructions for it" in words
    assert "8.6 times" in words
    assert "model.dtype=float32" in words
    config = make_config(tmp_path, "model.dtype=float32")
    assert settle_dtype(config, cuda=[], has_bfloat16=True) == (config, "")


@pytest.mark.parametrize(
    ("text", "has"),
    [
        ("processor\t: 0\nflags\t\t: fpu avx2\n", False),
        ("flags\t\t: fpu avx512f avx512_bf16\n", True),
        ("flags\t\t: amx_bf16\n", True),
        ("Features\t: fp asimd bf16\n", True),
        ("model name\t: bf16\n", False),
    ],
)
def test_the_cpu_is_asked_for_its_instructions(tmp_path: Path, text: str, has: bool) -> None:
    (tmp_path / "cpuinfo").write_text(text)
    assert cpu_has_bfloat16(tmp_path / "cpuinfo") is has
    assert not cpu_has_bfloat16(tmp_path / "nowhere")


def test_a_run_that_goes_on_keeps_its_type_on_another_machine_and_refuses_another_one(tmp_path: Path) -> None:
    folder, given = tmp_path / "run", make_config(tmp_path)
    (folder / "checkpoints" / "step_00000001").mkdir(parents=True)
    (folder / "run.id").write_text("x\n")
    began, _ = settle_dtype(given, begun=begun_dtype(folder), cuda=[], has_bfloat16=False)
    (folder / "config.yaml").write_text(
        yaml.safe_dump({**CONFIG, "model": {**CONFIG["model"], "dtype": began.model.dtype}})
    )
    config, words = settle_dtype(given, begun=begun_dtype(folder), cuda=cuda(2), has_bfloat16=True)
    assert config == began
    assert words == "model.dtype: auto is float32: as the run began"
    with pytest.raises(ConfigError, match="model.dtype: 'float32' -> 'bfloat16'"):
        find_resume(folder, make_config(tmp_path, "model.dtype=bfloat16"), "auto")


def test_check_says_what_auto_is_and_what_bfloat16_costs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dtype, "cpu_has_bfloat16", lambda: False)
    make_config(tmp_path)
    for overrides, words in (
        ([], "model.dtype: auto is float32: "),
        (["model.dtype=bfloat16"], "model.dtype: bfloat16, and this CPU has no"),
    ):
        answer = CliRunner().invoke(
            app,
            [
                "check",
                str(tmp_path / "dtype.yaml"),
                "placement.trainer=cpu",
                "placement.rollout=cpu",
                *overrides,
            ],
        )
        assert answer.exit_code == 0, answer.output
        assert words in answer.output
