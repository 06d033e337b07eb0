"""A run directory's mode and secrets."""

from __future__ import annotations

import ctypes
import logging
import stat
import sys
from pathlib import Path
from typing import Any

import pytest

from asyncrl.base.errors import ConfigError
from asyncrl.config import ObserveConfig, load_config
from asyncrl.job.lifecycle import RunLog, locked_run_dir, logging_to
from asyncrl.job.loop import run_job
from asyncrl.job.serve import serve_gateway


@pytest.mark.parametrize(
    ("before", "holds", "wanted", "then"),
    [
        (None, "", 0o750, 0o750),
        (0o2777, "", 0o750, 0o2750),
        (0o755, "run.lock", 0o700, 0o700),
        (0o755, "thesis.txt", 0o700, 0o755),
    ],
)
def test_run_directory_gets_the_mode_of_its_config(
    before: int | None, holds: str, wanted: int, then: int, tmp_path: Path
) -> None:
    folder = tmp_path / "runs" / "new"
    if before is not None:
        folder.mkdir(parents=True)
        folder.chmod(before)
        (folder / holds).touch()
    with locked_run_dir(folder, wanted):
        pass
    assert (stat.S_IMODE(folder.stat().st_mode), (folder / "logs").is_dir()) == (then, True)
    modes = {"owner": 0o700, "group": 0o750, "all": 0o755}
    assert {who: ObserveConfig.model_validate({"readable_by": who}).dir_mode for who in modes} == modes
    assert ObserveConfig().dir_mode == 0o700


def test_a_secret_is_printed_and_never_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run" / "logs").mkdir(parents=True)
    monkeypatch.setattr(logging.getLogger("asyncrl"), "propagate", True)  # logging_to turns it off
    with logging_to(tmp_path / "run"):
        RunLog().info("ready")
        RunLog().print_secret("export OPENAI_API_KEY=abc")
    assert capsys.readouterr().out == "ready\nexport OPENAI_API_KEY=abc\n"
    log = (tmp_path / "run" / "logs" / "controller.log").read_text()
    assert "ready" in log
    assert "abc" not in log


@pytest.mark.skipif(sys.platform != "linux", reason="/proc")
@pytest.mark.parametrize("begin", [run_job, serve_gateway])
def test_controller_of_agents_hides_its_memory(
    begin: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    libc, get_dumpable, set_dumpable = ctypes.CDLL(None), 3, 4
    monkeypatch.delenv("JUDGE_API_KEY", raising=False)
    shell_agent = Path(__file__).parents[1] / "examples" / "shell_agent" / "shell_agent.yaml"
    config = load_config(shell_agent, ["generator.pass_env=[JUDGE_API_KEY]"])
    try:
        libc.prctl(set_dumpable, 1, 0, 0, 0)
        with pytest.raises(ConfigError, match="JUDGE_API_KEY"):
            begin(config, tmp_path / "run", name="run")
        assert not (tmp_path / "run").exists(), "refused before anything is made"
        assert libc.prctl(get_dumpable, 0, 0, 0, 0) == 0
    finally:
        libc.prctl(set_dumpable, 1, 0, 0, 0)
