"""scripts/rounds.py: a command again and again, until it fails or the program is interrupted."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest
import rounds

FIRST_WAITS = """
if mkdir first 2>/dev/null; then
    trap 'echo cleared up; touch cleared; exit 1' INT
    touch waits
    while :; do sleep 0.05; done
fi
while [ ! -e waits ]; do sleep 0.05; done
echo 'the seed is 7'
"""
"""The first round waits to be interrupted, the others end once it does."""


def start(folder: Path, script: str, num_rounds: int, num_jobs: int) -> subprocess.Popen[str]:
    numbers = ["--rounds", str(num_rounds), "--jobs", str(num_jobs), "--logs", str(folder / "logs")]
    command = [sys.executable, rounds.__file__, *numbers, "sh", "-c", script]
    return subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, text=True)


def test_each_round_has_its_log_and_a_line_and_no_more_run_than_are_asked_for(tmp_path: Path) -> None:
    alone = "mkdir alone || exit 3; sleep 0.1; rmdir alone; echo 2 skipped"
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "round-9.log").write_text("of another time")
    said, _ = start(tmp_path, alone, 3, 1).communicate(timeout=60)
    *lines, last = said.splitlines()
    assert last == "3 rounds passed"
    for number, line in enumerate(lines, start=1):
        log = tmp_path / "logs" / f"round-{number}.log"
        assert log.read_text() == "2 skipped\n"
        assert line.startswith(f"round {number} of 3 passed in ")
        assert line.endswith(f" s, {log}: 2 skipped")
    assert len(lines) == len([*(tmp_path / "logs").iterdir()]) == 3


@pytest.mark.parametrize("how", ["a round fails", "it is interrupted", "it is ended"])
def test_rounds_beside_the_end_are_interrupted_once_and_waited_for(tmp_path: Path, how: str) -> None:
    fails = how == "a round fails"
    process = start(tmp_path, FIRST_WAITS + f"exit {3 * fails}", 9, 2)
    if not fails:
        assert process.stdout is not None
        first = process.stdout.readline()
        assert " of 9 passed in " in first
        process.send_signal(signal.SIGINT if how == "it is interrupted" else signal.SIGTERM)
    said, _ = process.communicate(timeout=60)
    assert (tmp_path / "cleared").exists()
    logs = {path.read_text() for path in (tmp_path / "logs").iterdir()}
    if fails:
        assert process.returncode == 1
        assert logs == {"cleared up\n", "the seed is 7\n"}
        line, tail, last = said.splitlines()
        assert " of 9 FAILED with 3 in " in line
        assert tail == "the seed is 7"
        *_, log = last.split(" failed, 0 passed: ")
        assert Path(log).read_text() == "the seed is 7\n"
    else:
        assert process.returncode == 130
        assert "cleared up\n" in logs
        assert "interrupted, " in said.splitlines()[-1]
