"""The command line as a person meets it: real processes, real exit codes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
NO_TORCH = """
import sys
sys.modules["torch"] = None
from asyncrl.cli import main
sys.argv[0] = "asyncrl"
main()
"""


def asyncrl(*arguments: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """Run the command line in a Python where importing torch fails."""
    return subprocess.run(
        [sys.executable, "-c", NO_TORCH, *arguments], cwd=cwd, capture_output=True, text=True, timeout=60
    )


def test_help_and_version_answer_without_torch() -> None:
    for arguments in (
        ["--help"],
        ["run", "--help"],
        ["check", "--help"],
        ["status", "--help"],
        ["inspect", "--help"],
        ["keys"],
    ):
        answer = asyncrl(*arguments)
        assert answer.returncode == 0, answer.stderr
        assert answer.stdout.strip()
    assert asyncrl("--version").stdout.startswith("asyncrl 0.")


def test_check_prints_the_plan_without_torch() -> None:
    answer = asyncrl("check", "configs/quickstart.yaml", "rollout.num_engines=2")
    assert answer.returncode == 0, answer.stderr
    for process in ("controller", "trainer-0", "engine-0", "engine-1"):
        assert process in answer.stdout
    assert "memory of cpu:" in answer.stdout


@pytest.mark.parametrize("command", ["run", "check"])
def test_a_misspelt_key_exits_with_2_and_names_the_right_one(command: str) -> None:
    answer = asyncrl(command, "configs/quickstart.yaml", "buffer.max_stalenes=4")
    assert answer.returncode == 2
    assert "did you mean buffer.max_staleness?" in answer.stderr
    assert "Traceback" not in answer.stderr
    assert not answer.stdout


def test_a_section_that_does_not_exist_is_named() -> None:
    answer = asyncrl("keys", "bufer")
    assert answer.returncode == 2
    assert "did you mean buffer?" in answer.stderr


def test_status_of_a_directory_that_is_no_run_says_so(tmp_path: Path) -> None:
    for command in ("status", "inspect"):
        answer = asyncrl(command, str(tmp_path))
        assert answer.returncode == 2
        assert "Way out:" in answer.stderr
