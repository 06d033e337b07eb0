"""The acceptance script for CUDA devices, with tiny sizes on the CPU."""

from __future__ import annotations

import importlib
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import gpu_acceptance
import pytest
import torch
from costly_cases import slow
from gpu import jobs
from gpu.colocated import config_text
from gpu.jobs import (
    CASES,
    GRACE_S,
    ON_ONE_DEVICE,
    REPO,
    job_config,
    on_one_device,
)
from gpu.rows import MARK, ROWS, Bench, Row
from needed_extensions import skip_without
from vllm_process import vllm_python

from asyncrl.config import RunConfig
from asyncrl.config.load import load_config
from asyncrl.launch.machine import described_nodes
from asyncrl.launch.plan import make_plan, resolve_auto

SCRIPT = Path(gpu_acceptance.__file__)


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    threads = torch.get_num_threads()
    yield Bench("cpu", True, "cpu", tmp_path, tmp_path / "models", tmp_path, 200.0)
    torch.set_num_threads(threads)


def function_of(row: Row) -> Any:
    module, _, function = row.function.partition(".")
    return getattr(importlib.import_module(f"gpu.{module}"), function)


def test_each_row_names_a_function_and_each_part_has_rows() -> None:
    assert all(callable(function_of(row)) for row in ROWS)
    assert {row.part for row in ROWS} == {1, 2, 3, 4, 5}
    assert len({(row.part, row.name) for row in ROWS}) == len(ROWS)


@pytest.mark.parametrize(
    "name",
    [
        "attention",
        "losses",
        "head",
        "weights",
        "lora",
        "0.6B-16k",
        slow("deterministic"),
    ],
)
def test_rows_run_on_a_cpu(
    bench: Bench, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (row,) = (row for row in ROWS if row.name == name)
    function_of(row)(bench, **row.arguments)
    lines = capsys.readouterr().out.splitlines()
    told = [
        json.loads(line.removeprefix(MARK)) for line in lines if line.startswith(MARK)
    ]
    assert told
    assert [one for one in told if one["ok"] is False] == []


@pytest.mark.parametrize("case", CASES)
def test_runs_of_a_case_are_placed_on_its_devices(bench: Bench, case: str) -> None:
    num_devices = 1 if case in ON_ONE_DEVICE else 2
    nodes = described_nodes(f"{num_devices}x80GB", 16, "128GB")
    assert nodes is not None
    for sections in CASES[case].values():
        values = job_config(
            replace(bench, device="cuda", is_tiny=False), None, sections
        )
        skip_without(str(values))
        config = RunConfig.model_validate(values)
        plan = make_plan(resolve_auto(config, nodes)[0], nodes)
        devices = {
            one.device for one in plan.processes if one.side in ("trainer", "engine")
        }
        assert devices == {f"cuda:{number}" for number in range(num_devices)}


@pytest.mark.parametrize("place", ["cpu", "cuda"])
def test_configs_of_colocated_rows_are_valid(
    bench: Bench, place: str, tmp_path: Path
) -> None:
    on_device = replace(bench, device=place)
    for name in ("quickstart", "agent"):
        load_config(REPO / "configs" / f"{name}.yaml", on_one_device(on_device))
    for way in ("ipc", "shm"):
        path = tmp_path / f"{way}.yaml"
        path.write_text(config_text(on_device, tmp_path, way))
        load_config(path)


def test_limits_of_the_calls_leave_time_for_each_row() -> None:
    script = (REPO / "scripts/gpu/calls.sh").read_text(encoding="utf-8")
    unpack_s = 20.0
    calls = script.partition("case $name in")[2].split(";;")[:-2]
    totals = []
    for call in calls:
        total_s = unpack_s
        for limit, part, name in re.findall(r"row (\d+) (\d) (\S+)", call):
            (row,) = (one for one in ROWS if (str(one.part), one.name) == (part, name))
            start_s = 115.0 if "vllm" in row.needs else 20.0
            num_runs = len(CASES.get(row.arguments.get("case", ""), ["one"]))
            needed_s = GRACE_S + num_runs * (start_s + 20.0)
            if row.function == "jobs.learns":
                needed_s += jobs.MIN_RUN_S
            assert float(limit) >= needed_s
            total_s += float(limit) + 5.0
        totals.append(total_s)
    assert len(totals) == 4
    assert max(totals) <= 600.0
    assert sum(totals) <= 1650.0  # of 1,800 s: the rest is the start and transfers


# ---- the script


def ended(
    part: str, row: str, out: Path, *options: str
) -> subprocess.CompletedProcess[str]:
    """Run a row with tiny sizes, to the end of the script."""
    words = ["--part", part, "--row", row, "--tiny", "--out", str(out), *options]
    command = [sys.executable, str(SCRIPT), *words]
    return subprocess.run(command, capture_output=True, text=True)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("part", "row"), [("4", "agent"), ("5", "one-device-kill")])
def test_row_of_a_real_run_ends_well_on_a_cpu(
    part: str, row: str, tmp_path: Path
) -> None:
    done = ended(part, row, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.timeout(600)
@pytest.mark.parametrize("row", ["vllm", "vllm-colocated", "vllm-async", "vllm-agent"])
def test_rows_with_vllm_end_well_on_a_cpu(
    row: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VENV_VLLM", str(vllm_python().parent.parent))
    done = ended("5", row, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "not run" not in done.stdout


@pytest.mark.slow
def test_row_that_hangs_is_ended(tmp_path: Path) -> None:
    late = ended("2", "head", tmp_path, "--budget-s", "0.1")
    assert late.returncode == 1
    assert "was ended after 0 s" in late.stdout
