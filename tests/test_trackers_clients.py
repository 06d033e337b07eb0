"""The real clients of trackers, without a network, read back by their own readers.

Clients leave threads and hooks behind, so this file is also a script for a separate
process:

    python test_trackers_clients.py NAME RUN_DIR [KEY=VALUE...]
"""

from __future__ import annotations

import asyncio
import json
import os
import struct
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import yaml
from page_cases import make_sample

from asyncrl.config.observe_config import ObserveConfig
from asyncrl.observe.trackers import Background, TrackedRun

pytestmark = [pytest.mark.slow, pytest.mark.extension("trackers")]
RUN_ID, NUM_STEPS = "0123456789abcdef", 4
CONFIG = {"seed": 1, "buffer": {"max_staleness": 2}, "task": {"args": {"%": [1]}}}
ODD = "task/100 % <b>"
"""A name that clients may refuse."""


def tell(name: str, run_dir: Path, first: int, *settings: str) -> None:
    """Report steps from `first` on, an evaluation and a sample."""
    args = {
        key: yaml.safe_load(value)
        for key, value in (setting.split("=", 1) for setting in settings)
    }
    observe = ObserveConfig.model_validate(
        {"trackers": [name], "tracker_args": {name: args}}
    )
    tracker = Background(observe, print)
    tracker.start(TrackedRun(run_dir, "a run", RUN_ID, CONFIG, print))
    for step in range(first, first + NUM_STEPS):
        tracker.tell(
            "step",
            step,
            {"reward/mean": step / 2, ODD: 1.0, "policy_version": step + 1},
        )
    tracker.tell("samples", first + 1, [make_sample(step=first + 1)])
    tracker.tell("evaluation", first + 2, {"eval/reward_mean": first + 0.25})
    tracker.tell("close", "done")
    asyncio.run(tracker.wait_closed(120.0, print))


def completions(tables: Iterable[dict[str, Any]]) -> list[str]:
    rows = [
        dict(zip(table["columns"], row, strict=True))
        for table in tables
        for row in table["data"]
    ]
    return [row["completion"] for row in rows]


def read_wandb_records(path: Path) -> Iterable[Any]:
    """Read W&B's file: a header of 7 bytes, then LevelDB's log format (blocks of 32 KiB
    with whole records or parts of them), whose records are protocol buffers.
    """
    from wandb.proto.wandb_internal_pb2 import Record

    content, at, parts = path.read_bytes(), 7, b""
    while at + 7 <= len(content):
        left_in_block = 32768 - at % 32768
        if left_in_block < 7:  # too short for a header: padding
            at += left_in_block
            continue
        _, length, kind = struct.unpack_from("<IHB", content, at)
        parts += content[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or a last part
            yield Record.FromString(parts)
            parts = b""


def read_wandb(run_dir: Path) -> dict[str, Any]:
    """Read the records of two offline runs with one id."""
    paths = sorted(run_dir.glob("wandb/offline-run-*/*.wandb"))
    lines = [
        {
            item.key or ".".join(item.nested_key): item.value_json
            for item in record.history.item
        }
        for path in paths
        for record in read_wandb_records(path)
    ]

    def values(name: str) -> list[Any]:
        return [json.loads(line[name]) for line in lines if name in line]

    tables = run_dir.glob("wandb/offline-run-*/files/media/table/*.json")
    return {
        "ids": [path.parent.name.rpartition("-")[2] for path in paths],
        "rewards": values("reward/mean"),
        "evaluations": values("eval/reward_mean"),
        "completions": completions(json.loads(path.read_text()) for path in tables),
    }


def read_mlflow(run_dir: Path) -> dict[str, Any]:
    """Read the database with MLflow's client."""
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=f"sqlite:///{run_dir}/mlflow.db")
    experiment = client.get_experiment_by_name("lm")
    runs = client.search_runs([experiment.experiment_id])
    run_id, history = runs[0].info.run_id, client.get_metric_history
    paths = [item.path for item in client.list_artifacts(run_id, "samples")]
    tables = [
        Path(client.download_artifacts(run_id, path)).read_text() for path in paths
    ]
    return {
        "ids": [run.data.tags["asyncrl.run_id"] for run in runs],
        "rewards": [metric.value for metric in history(run_id, "reward/mean")],
        "evaluations": [metric.value for metric in history(run_id, "eval/reward_mean")],
        "completions": completions(map(json.loads, tables)),
    }


def read_trackio(run_dir: Path) -> dict[str, Any]:
    """Read the database in TRACKIO_DIR."""
    from trackio.sqlite_storage import SQLiteStorage

    names = SQLiteStorage.get_runs("lm")
    lines = SQLiteStorage.get_logs("lm", names[0])
    rows = [
        row for line in lines if "samples" in line for row in line["samples"]["_value"]
    ]
    return {
        "ids": names,
        "rewards": [line["reward/mean"] for line in lines if "reward/mean" in line],
        "evaluations": [
            line["eval/reward_mean"] for line in lines if "eval/reward_mean" in line
        ],
        "completions": [row["completion"] for row in rows],
    }


READERS = {"wandb": read_wandb, "mlflow": read_mlflow, "trackio": read_trackio}


@pytest.mark.parametrize(
    ("name", "settings", "ids"),
    [
        ("wandb", ["project=lm"], [RUN_ID] * 2),
        ("mlflow", ["experiment=lm", "uri=sqlite:///mlflow.db"], [RUN_ID]),
        ("trackio", ["project=lm"], ["a run-01234567"]),
    ],
)
def test_a_client_keeps_one_run_over_a_resume(
    name: str, settings: list[str], ids: list[str], tmp_path: Path
) -> None:
    own = {
        "PYTHONPATH": str(Path(__file__).parent / "kit"),
        "TRACKIO_DIR": str(tmp_path / "trackio"),
        "HOME": str(tmp_path),
        "WANDB_SILENT": "true",
    }
    process = subprocess.run(
        [sys.executable, __file__, name, tmp_path, *settings],
        env={
            name: value
            for name, value in os.environ.items()
            if not name.startswith("WANDB_")
        }
        | own,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert process.returncode == 0, process.stdout + process.stderr
    assert "turned off" not in process.stdout
    assert ("wandb is offline without a key" in process.stdout) == (name == "wandb")
    found = json.loads(process.stdout.splitlines()[-1])
    assert (found["ids"], found["completions"]) == (ids, ["b 7\n\nb 7"] * 2), (
        "one text per sampled part"
    )
    assert found["rewards"] == [0.0, 0.5, 1.0, 1.5, 2.0, 2.5]
    assert found["evaluations"] == [0.25, 2.25]


if __name__ == "__main__":
    name, folder, *settings = sys.argv[1:]
    for first in (0, 2):
        tell(name, Path(folder), first, *settings)
    print(json.dumps(READERS[name](Path(folder))))
