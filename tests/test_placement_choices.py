"""What a run settles before it starts: the type of its weights, vLLM's Python, where chunks lie."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from placement_cases import CONFIGS, TURNS, VLLM, cuda_devices, load, make_python
from typer.testing import CliRunner

from asyncrl.cli import app
from asyncrl.config import RolloutConfig
from asyncrl.errors import ConfigError
from asyncrl.placement import choices
from asyncrl.placement.choices import chunk_device, find_vllm_python, import_folder, settle_dtype
from asyncrl.placement.devices import place


@pytest.mark.parametrize(
    ("setting", "num_cuda", "has_bf16", "dtype", "words"),
    [
        ("model.dtype=auto", 0, False, "float32", "auto is float32: this CPU has no bfloat16 instructions"),
        ("model.dtype=auto", 0, True, "bfloat16", "auto is bfloat16: this CPU has instructions for it"),
        ("model.dtype=auto", 2, False, "bfloat16", "auto is bfloat16: trainer and engines are on CUDA"),
        ("placement.rollout=cpu", 1, False, "float32", "no bfloat16 instructions"),
        ("rollout.engine=simulated", 1, False, "bfloat16", "on CUDA"),
        ("model.dtype=bfloat16", 2, False, "bfloat16", ""),
        ("model.dtype=bfloat16", 0, False, "bfloat16", "model.dtype=float32 (or auto) is faster here"),
        ("model.dtype=float32", 0, False, "float32", ""),
    ],
)
def test_auto_is_what_every_device_computes_fast_in_and_what_is_written_stays(
    monkeypatch: pytest.MonkeyPatch, setting: str, num_cuda: int, has_bf16: bool, dtype: str, words: str
) -> None:
    monkeypatch.setattr(choices, "find_cuda_devices", lambda: cuda_devices(num_cuda))
    monkeypatch.setattr(choices, "cpu_has_bfloat16", lambda: has_bf16)
    config, told = settle_dtype(load("model.dtype=auto", setting))
    assert config.model.dtype == dtype
    assert words in told
    assert bool(words) == bool(told)


def test_a_run_that_goes_on_keeps_the_type_that_it_began_with() -> None:
    config, told = settle_dtype(load("model.dtype=auto"), begun="float32")
    assert (config.model.dtype, told) == ("float32", "model.dtype: auto is float32: as the run began")


def test_the_cpu_is_asked_for_its_instructions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choices, "CPUINFO", tmp_path / "cpuinfo")
    assert not choices.cpu_has_bfloat16(), "it is not known"
    (tmp_path / "cpuinfo").write_text("model name\t: bf16\nflags\t\t: fpu avx2\n")
    assert not choices.cpu_has_bfloat16()
    for line in ("flags\t\t: fpu avx512f avx512_bf16\n", "Features\t: fp asimd bf16\n"):
        (tmp_path / "cpuinfo").write_text(line)
        assert choices.cpu_has_bfloat16(), line


def test_check_says_what_auto_is_and_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choices, "cpu_has_bfloat16", lambda: False)
    on_cpu = ["placement.trainer=cpu", "placement.rollout=cpu", "model.dtype=auto"]
    answer = CliRunner().invoke(app, ["check", str(CONFIGS / "quickstart.yaml"), *on_cpu])
    assert answer.exit_code == 0, answer.output
    assert "model.dtype: auto is float32: " in answer.output
    assert "mode: apart (trainer on cpu, engines on cpu): " in answer.output


@pytest.mark.parametrize(
    ("num_cuda", "overrides", "device"),
    [
        (0, TURNS, "cpu"),
        (1, [*TURNS, "rollout.num_engines=2"], "cuda:0"),
        (1, [VLLM, "weight_sync.transport=ipc", *TURNS], "cuda:0"),
        (1, [VLLM, *TURNS], None),
        (2, [*TURNS, "placement.trainer=all", "trainer.world_size=2", "rollout.num_engines=2"], None),
        (0, [], None),
    ],
)
def test_chunks_lie_in_memory_that_both_sides_open_where_there_is_one(
    num_cuda: int, overrides: list[str], device: str | None
) -> None:
    config = load(*overrides)
    assert chunk_device(config, place(config, num_cuda)) == device


# ---- vLLM's Python


@pytest.fixture
def python(tmp_path: Path) -> Path:
    return make_python(tmp_path / "vllm" / "bin" / "python")


def test_a_python_that_is_named_must_be_there_and_have_vllm(python: Path) -> None:
    assert find_vllm_python(RolloutConfig(engine="vllm", vllm_python=str(python))) == python
    without = make_python(python.with_name("without"), exit_code=1)
    for wrong in (python.parent, without, python.with_name("nowhere")):
        with pytest.raises(ConfigError, match="is no program, or cannot import vllm") as caught:
            find_vllm_python(RolloutConfig(engine="vllm", vllm_python=str(wrong)))
        assert "make setup-vllm" in caught.value.way_out


def test_auto_takes_the_one_beside_the_checkout_or_the_folder_of_the_setup(
    python: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choices.importlib.util, "find_spec", lambda _: None)
    monkeypatch.setattr(choices, "CHECKOUT", tmp_path)
    monkeypatch.delenv("VENV_VLLM", raising=False)
    auto = RolloutConfig(engine="vllm")
    with pytest.raises(ConfigError, match="neither .* nor .*can import vllm"):
        find_vllm_python(auto)
    choices.has_vllm.cache_clear()
    (tmp_path / ".venv-vllm").symlink_to(python.parent.parent)
    assert find_vllm_python(auto) == tmp_path / ".venv-vllm" / "bin" / "python"
    monkeypatch.setenv("VENV_VLLM", str(python.parent.parent))
    assert find_vllm_python(auto) == python


def test_another_python_finds_our_two_packages_and_nothing_else_of_ours(tmp_path: Path) -> None:
    for _ in range(2):  # again, as in a run that goes on
        folder = import_folder(tmp_path / "imports")
    ask = "import asyncrl, asyncrl_servers; print(asyncrl.__file__)"
    bare = [getattr(sys, "_base_executable", sys.executable), "-S", "-c", ask]
    environ = os.environ | {"PYTHONPATH": str(folder)}
    told = subprocess.run(bare, cwd=tmp_path, env=environ, capture_output=True, text=True, check=True)
    assert Path(told.stdout.strip()).is_relative_to(folder)
