"""The acceptance script for CUDA devices: every row of parts 1 to 4 runs on the CPU with tiny sizes, by the
code that a device runs.
"""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import gpu_acceptance
import pytest
from gpu import jobs
from gpu.rows import ROWS, Bench, Row

from asyncrl.config import RunConfig
from asyncrl.placement.devices import place

SCRIPT = Path(gpu_acceptance.__file__)
QUICK = {"losses", "head", "distances-0.5B", "tests"}


def call(*arguments: str, out: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), *arguments, "--out", str(out)]
    return subprocess.run(command, capture_output=True, text=True, timeout=280)


def test_each_row_names_a_function_and_each_part_has_rows() -> None:
    for row in ROWS:
        module, _, function = row.function.partition(".")
        assert callable(getattr(importlib.import_module(f"gpu.{module}"), function)), row
    assert {row.part for row in ROWS} == {1, 2, 3, 4, 5}
    assert len({(row.part, row.name) for row in ROWS}) == len(ROWS)


def bench(folder: Path) -> Bench:
    return Bench("cpu", True, "cpu", folder, folder / "models", folder, 200.0)


@pytest.mark.parametrize("case", jobs.CASES)
def test_the_runs_with_vllm_are_configs_that_two_devices_take(tmp_path: Path, case: str) -> None:
    for sections in jobs.CASES[case].values():
        config = RunConfig.model_validate(jobs.vllm_config(bench(tmp_path), sections))
        assert place(config, 2).is_on_cuda


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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("part", "rows"),
    [
        (1, "tests losses head weights lora distances-0.5B"),
        (2, "0.6B-16k 4B-16k"),
        (3, "turns-shm"),
        (3, "quickstart"),
        (4, "0.6B-shm 0.6B-ipc"),
        (5, "nccl"),
    ],
)
def test_a_part_runs_on_the_cpu_with_tiny_sizes(tmp_path: Path, part: int, rows: str) -> None:
    done = call("--part", str(part), "--tiny", "--row", *rows.split(), out=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    (table,) = tmp_path.glob("*.txt")
    told = table.read_text()
    for row in rows.split():
        assert f"{part} {row} " in told
    assert "NOT ok" not in told
    plots = {path.name.partition("-")[2] for path in tmp_path.glob("*.png")}
    assert plots == {"turns-shm": {"turns-shm.png"}, "quickstart": {"quickstart.png"}}.get(rows, set())
