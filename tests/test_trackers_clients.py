"""The real clients of trackers, without a network: what they were told is read back by their own readers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tracker_clients import CONFIG, NUM_STEPS, RUN_ID

pytestmark = pytest.mark.slow
SCRIPT = Path(__file__).parent / "tracker_clients.py"
NOWHERE = "http://no-such-host.invalid"
SETTINGS = {
    "wandb": ("project=lm", "mode=offline"),
    "mlflow": ("experiment=lm", "uri=sqlite:///{run_dir}/mlflow.db"),
    "trackio": ("project=lm",),
}


def client(verb: str, name: str, run_dir: Path, *rest: str, **environ: str) -> str:
    """What a process says that tells the client, or reads."""
    own = {"TRACKIO_DIR": str(run_dir / "trackio"), "HOME": str(run_dir), "WANDB_SILENT": "true"}
    process = subprocess.run(
        [sys.executable, SCRIPT, verb, name, run_dir, *rest],
        env=os.environ | own | environ,
        cwd=run_dir,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert process.returncode == 0, process.stdout + process.stderr
    return process.stdout


@pytest.mark.parametrize("name", SETTINGS)
def test_a_client_keeps_one_run_over_a_resume(name: str, tmp_path: Path) -> None:
    settings = [setting.format(run_dir=tmp_path) for setting in SETTINGS[name]]
    for first in (0, 2):
        said = client("tell", name, tmp_path, str(first), *settings)
        assert "tracker" not in said
        assert said.endswith("ended\n")
    found: dict[str, Any] = json.loads(client("read", name, tmp_path).splitlines()[-1])
    assert found["ids"] == [["a run-01234567" if name == "trackio" else RUN_ID]] * len(found["ids"])
    assert len(found["ids"]) == (2 if name == "wandb" else 1), "wandb writes a file for each process"
    assert found["config"] == CONFIG
    assert found["steps"] == [[step, step / 2, 1.0] for step in range(2 + NUM_STEPS)]
    assert found["evaluations"] == [[2, 0.25], [4, 2.25]]
    assert found["completions"] == ["call\n\n5"] * 2


KEY = "0123456789" * 4


@pytest.mark.parametrize(
    ("name", "setting", "environ", "says"),
    [
        ("wandb", "mode=online", {"WANDB_BASE_URL": NOWHERE, "WANDB_API_KEY": KEY}, "wandb is offline"),
        ("mlflow", f"uri={NOWHERE}", {}, "not done within"),
        ("trackio", "project=lm", {"TRACKIO_SERVER_URL": f"{NOWHERE}/?write_token=abc"}, ""),
    ],
)
def test_an_unknown_host_neither_holds_nor_ends_the_run(
    name: str, setting: str, environ: dict[str, str], says: str, tmp_path: Path
) -> None:
    limit = "limit_s=5.0" if name == "mlflow" else "limit_s=120.0"  # it would try for minutes
    said = client("tell", name, tmp_path, "0", setting, limit, **environ)
    assert said.endswith("ended\n")
    assert says in said
    if name == "wandb":
        assert f"`wandb sync {tmp_path}/wandb/offline-run-*`" in said
        found = json.loads(client("read", name, tmp_path).splitlines()[-1])
        assert [step for step, *_ in found["steps"]] == [*range(NUM_STEPS)]
    if name == "trackio":
        assert list(tmp_path.glob("trackio/*.db")), "it keeps what it could not send, and sends it next time"
