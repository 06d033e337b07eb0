"""The acceptance script for CUDA devices: the measurements run on the CPU with tiny sizes, by the code that a
device runs.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import colocation
import gpu_acceptance
import pytest
import torch
from gpu import jobs
from gpu.rows import BASE, MARK, ROWS, Bench, NotRunError, Row
from launch_cases import nodes

from asyncrl.config import RunConfig
from asyncrl.launch.devices import place

SCRIPT = Path(gpu_acceptance.__file__)


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    threads = torch.get_num_threads()
    yield Bench("cpu", True, "cpu", tmp_path, tmp_path / "models", tmp_path, 200.0)
    torch.set_num_threads(threads)


def function_of(row: Row) -> Any:
    module, _, function = row.function.partition(".")
    return getattr(importlib.import_module(f"gpu.{module}"), function)


def measured(bench: Bench, part: int, name: str, capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    """What this row tells; nothing of it is NOT ok."""
    (row,) = (row for row in ROWS if (row.part, row.name) == (part, name))
    assert row.missing() == []
    function_of(row)(bench, **row.arguments)
    lines = capsys.readouterr().out.splitlines()
    told = [json.loads(line.removeprefix(MARK)) for line in lines if line.startswith(MARK)]
    assert told
    assert [one for one in told if one["ok"] is False] == []
    return told


def test_each_row_names_a_function_and_each_part_has_rows() -> None:
    assert all(callable(function_of(row)) for row in ROWS)
    assert {row.part for row in ROWS} == {1, 2, 3, 4, 5}
    assert len({(row.part, row.name) for row in ROWS}) == len(ROWS)


@pytest.mark.parametrize("name", ["losses", "head", "weights", "lora", "distances-0.5B", "distances-7B"])
def test_what_a_device_computes_is_compared_with_a_cpu(
    bench: Bench, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert any(one["ok"] for one in measured(bench, 1, name, capsys))


def test_a_gradient_that_is_off_is_not_ok(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from gpu import correct

    right = correct.head_scores
    wrong = lambda hidden_MD, *rest: right(hidden_MD * 1.05, *rest)  # noqa: E731
    monkeypatch.setattr(
        correct,
        "head_scores",
        lambda one, *rest: (right if one.dtype == torch.float32 else wrong)(one, *rest),
    )
    with pytest.raises(AssertionError, match="largest difference of a logprob"):
        measured(bench, 1, "head", capsys)


@pytest.mark.parametrize("name", ["0.6B-16k", "4B-16k"])
def test_steps_are_timed_and_memory_needs_a_device(
    bench: Bench, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    told = {one["what"]: one["value"] for one in measured(bench, 2, name, capsys)}
    assert told["peak memory against the plan"] == "not run: no CUDA device"
    assert float(told["seconds of a step"]) > 0


@pytest.mark.slow
@pytest.mark.long
def test_a_step_is_compared_with_trls(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("trl")
    assert measured(bench, 2, "trl", capsys)[-1]["value"] == "the same step"


@pytest.mark.slow
@pytest.mark.usefixtures("forked_children")
def test_turns_are_measured_and_their_memory_is_drawn(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(colocation, "MIN_TURNS", 1)
    told = {one["what"]: one["value"] for one in measured(bench, 3, "turns-ipc", capsys)}
    assert float(told["to the engine, seconds"]) > 0
    assert (bench.out / told["memory over time"]).stat().st_size > 1000


@pytest.mark.slow
def test_a_shipped_config_runs_in_turns_and_its_reward_is_drawn(
    bench: Bench, capsys: pytest.CaptureFixture[str]
) -> None:
    told = {one["what"]: one["value"] for one in measured(bench, 3, "quickstart", capsys)}
    assert told["steps, seconds"].startswith("2 ")
    assert (bench.out / told["reward against seconds"]).stat().st_size > 1000


@pytest.mark.slow
@pytest.mark.usefixtures("forked_children")
@pytest.mark.parametrize("name", ["0.6B-shm", "0.6B-ipc"])
def test_pushes_are_timed(bench: Bench, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    told = {one["what"]: one["value"] for one in measured(bench, 4, name, capsys)}
    assert float(told["push, in all, seconds"]) > 0
    assert float(told["without a token, seconds"]) > 0


@pytest.mark.parametrize("case", jobs.CASES)
def test_the_runs_with_vllm_are_configs_that_two_devices_take(bench: Bench, case: str) -> None:
    bench.is_tiny = False
    for sections in jobs.CASES[case].values():
        config = RunConfig.model_validate(jobs.vllm_config(bench, sections))
        assert place(config, nodes(2)).is_on_cuda


def test_without_two_devices_what_needs_them_is_not_run(bench: Bench) -> None:
    if torch.cuda.device_count() < 2:
        with pytest.raises(NotRunError, match="two CUDA devices"):
            jobs.with_vllm(bench, "nccl")


# ---- the script


def test_what_breaks_is_told_and_the_other_rows_still_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run_row(part: gpu_acceptance.Part, row: Row, limit_s: float) -> None:
        if row.name == "losses":
            part.tell(row, {"machine": "a machine", "label": "some-device"})
            part.tell(row, {"what": "it", "value": "ended with 1", "ok": False})
        else:
            part.tell(row, {"what": "it", "value": "1.0", "against": "2.0", "ok": True})

    monkeypatch.setattr(gpu_acceptance.Part, "run_row", run_row)
    monkeypatch.setattr(Row, "missing", lambda row: ["peft"] if row.name == "lora" else [])
    monkeypatch.setattr(sys, "argv", ["gpu_acceptance.py", "--part", "1", "--out", str(tmp_path / "out")])
    with pytest.raises(SystemExit) as ended:
        gpu_acceptance.main()
    assert ended.value.code == 1
    text = (tmp_path / "out" / "some-device.txt").read_text()
    assert text == capsys.readouterr().out
    assert "a machine" in text
    assert "ended with 1  NOT ok" in text
    assert "missing peft" in text
    assert "1.0  (2.0)  ok" in text


@pytest.mark.parametrize("is_ok", [False, True])
def test_a_row_that_is_not_ok_says_what_it_printed(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    is_ok: bool,
) -> None:
    told = MARK + json.dumps({"what": "it", "value": "1", "ok": is_ok})
    begin, code = subprocess.Popen, f"print({told!r}); print('because')"
    monkeypatch.setattr(
        gpu_acceptance.subprocess,
        "Popen",
        lambda _, **options: begin([sys.executable, "-c", code], **options),
    )
    options = argparse.Namespace(part=1, out=tmp_path, tiny=True, budget_s=None)
    part = gpu_acceptance.Part(options, tmp_path)
    part.run_row(ROWS[0], 60.0)
    assert part.has_failed is not is_ok
    assert ("    because\n" in capsys.readouterr().out) is not is_ok


@pytest.mark.slow
def test_rows_are_processes_and_one_that_breaks_or_hangs_is_ended(tmp_path: Path) -> None:
    """Tests marked gpu run, and are skipped where there is no device; a row without time is ended."""
    command = [sys.executable, str(SCRIPT), "--part", "1", "--tiny", "--out", str(tmp_path)]
    done = subprocess.run([*command, "--row", "tests"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "tests marked gpu" in done.stdout
    if not torch.cuda.is_available():
        untold = subprocess.run([*command[:4], *command[5:], "--row", "head"], capture_output=True, text=True)
        assert untold.returncode == 0
        assert "not run: no CUDA device" in untold.stdout
    late = subprocess.run([*command, "--row", "head", "--budget-s", "0.1"], capture_output=True, text=True)
    assert late.returncode == 1
    assert "was ended after 0 s" in late.stdout


def test_packages_are_named_and_wheels_are_unpacked_for_one_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert Row(1, "it", "", needs=("carried_package",)).missing() == ["carried_package"]
    assert "pydantic" in BASE
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(os, "environ", {**os.environ})
    before = os.environ.get("PYTHONPATH")
    with zipfile.ZipFile(tmp_path / "carried_package-1-py3-none-any.whl", "w") as wheel:
        wheel.writestr("carried_package/__init__.py", "")
    with gpu_acceptance.packages(tmp_path, tmp_path / "folder"):
        assert Row(1, "it", "", needs=("carried_package",)).missing() == []
        assert os.environ["PYTHONPATH"].startswith(str(tmp_path / "folder" / "site"))
    assert os.environ.get("PYTHONPATH") == before, "what comes after it in this process is as it was"
