"""Harbor itself, from .venv-harbor, runs task folders as a command harness."""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
from pathlib import Path

import pytest
from harness_gateway import need_bubblewrap, processes_of

from asyncrl.agents import Outcome, Session, Task
from asyncrl.agents.command import CommandHarness
from asyncrl.base.errors import RolloutFailure
from asyncrl.config import GeneratorConfig

ROOT = Path(__file__).parents[1]
PYTHON = Path(os.environ.get("VENV_HARBOR", ROOT / ".venv-harbor"), "bin/python")
SESSION = Session("http://127.0.0.1:9/v1", "secret-key", "policy")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not PYTHON.exists(), reason="needs scripts/setup_harbor.sh"),
]


def run(folder: Path, agent: str = "oracle") -> Outcome:
    need_bubblewrap()
    program = [str(PYTHON), str(ROOT / "examples/harbor/trial.py"), agent]
    harness = CommandHarness(GeneratorConfig(command=program))
    try:
        return asyncio.run(harness.run(Task("p", (), {"folder": str(folder)}), SESSION))
    finally:
        assert processes_of(harness.token) == []


def changed(tmp_path: Path, file: str, text: str) -> Path:
    folder = tmp_path / "task"
    shutil.copytree(ROOT / "examples/harbor/tasks/word-count", folder)
    (folder / file).write_text(text)
    return folder


def test_oracle_solves_a_task_and_nop_does_not() -> None:
    folder = ROOT / "examples/harbor/tasks/sort-lines"
    assert run(folder).reward == 1.0
    assert run(folder, "nop").reward == 0.0


def test_errors_are_failures_with_names(tmp_path: Path) -> None:
    for number, (file, text, said) in enumerate(
        (
            ("tests/test.sh", "exit 3\n", "RewardFileNotFoundError"),
            ("environment/Dockerfile", "FROM x\nRUN apt update\n", "cannot honour"),
        )
    ):
        with pytest.raises(RolloutFailure, match=said):
            run(changed(tmp_path / str(number), file, text))


def test_sandbox_has_no_key_and_no_network(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        look = (
            "cat /proc/[0-9]*/environ | grep -qa secret-key && exit 1\n"
            f"(exec 3<>/dev/tcp/127.0.0.1/{port}) 2>/dev/null && exit 1\n"
            "echo 1 > /logs/verifier/reward.txt\n"
        )
        assert run(changed(tmp_path, "tests/test.sh", look), "nop").reward == 1.0
