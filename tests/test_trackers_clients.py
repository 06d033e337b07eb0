"""The real clients of trackers, without a network, read back by their own readers.

Clients leave threads and hooks behind, so this file also runs as a script in a separate process:

    python test_trackers_clients.py tell NAME RUN_DIR FIRST_STEP [KEY=VALUE...]
    python test_trackers_clients.py read NAME RUN_DIR
"""

from __future__ import annotations

import asyncio
import json
import os
import struct
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from test_observe_page import make_sample

from asyncrl import cli
from asyncrl.config import ObserveConfig
from asyncrl.observe.trackers import Background, TrackedRun

pytestmark = pytest.mark.slow
NOWHERE = "http://no-such-host.invalid"
RUN_ID, NUM_STEPS = "0123456789abcdef", 4
CONFIG = {"seed": 1, "buffer": {"max_staleness": 2}, "task": {"args": {"%": [1]}}}
ODD = "task/100 % <b>"
"""A name that clients may refuse."""


def tell(name: str, run_dir: Path, first: int, *settings: str) -> None:
    """Report steps from `first` on, an evaluation and a sample."""
    args = {key: yaml.safe_load(value) for key, value in (setting.split("=", 1) for setting in settings)}
    observe = ObserveConfig.model_validate({"trackers": [name], "tracker_args": {name: args}})
    tracker = Background(observe, print)
    tracker.start(TrackedRun(run_dir, "a run", RUN_ID, CONFIG))
    for step in range(first, first + NUM_STEPS):
        tracker.tell("step", step, {"reward/mean": step / 2, ODD: 1.0, "policy_version": step + 1})
    tracker.tell("samples", first + 1, [make_sample(step=first + 1)])
    tracker.tell("evaluation", first + 2, {"eval/reward_mean": first + 0.25})
    tracker.tell("close", "done")
    asyncio.run(tracker.wait_closed(120.0, print))
    print("ended")
    cli._leave_trackers(0)


def read_wandb(run_dir: Path) -> dict[str, Any]:
    """Read .wandb files: LevelDB's log format, with blocks of 32 KiB, after 7 bytes."""
    from wandb.proto.wandb_internal_pb2 import Record

    found: dict[str, Any] = {"ids": []}
    lines: list[dict[str, Any]] = []
    for path in sorted(run_dir.glob("wandb/offline-run-*/*.wandb"), key=lambda path: path.stat().st_mtime):
        for data in _leveldb_records(path.read_bytes()):
            record = Record()
            record.ParseFromString(data)
            if record.WhichOneof("record_type") == "run":
                found["ids"].append([record.run.run_id])
                config = {item.key: json.loads(item.value_json) for item in record.run.config.update}
                found["config"] = {key: value for key, value in config.items() if key != "_wandb"}
            items = {item.key or "/".join(item.nested_key): item for item in record.history.item}
            lines.append({key: json.loads(item.value_json) for key, item in items.items()})
    tables = run_dir.glob("wandb/offline-run-*/files/media/table/*.json")
    found["completions"] = completions(json.loads(path.read_text()) for path in tables)
    return found | read_lines(lines, "policy_version")


def read_lines(lines: list[dict[str, Any]], version: str = "step") -> dict[str, Any]:
    """Return the logged steps and evaluations."""
    steps = [[line["step"], line["reward/mean"], line[ODD]] for line in lines if "reward/mean" in line]
    evaluated = [line for line in lines if "eval/reward_mean" in line]
    return {"steps": steps, "evaluations": [[line[version], line["eval/reward_mean"]] for line in evaluated]}


def completions(tables: Iterable[dict[str, Any]]) -> list[str]:
    rows = [dict(zip(table["columns"], row, strict=True)) for table in tables for row in table["data"]]
    return [row["completion"] for row in rows]


def _leveldb_records(data: bytes) -> Iterator[bytes]:
    block, at, whole = 32768, 7, b""
    while at + 7 <= len(data):
        if (left := block - at % block) < 7:
            at += left
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        whole += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # a whole record, or the last part of one
            yield whole
            whole = b""


def read_mlflow(run_dir: Path) -> dict[str, Any]:
    """Read the database with MLflow's client."""
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=f"sqlite:///{run_dir}/mlflow.db")
    experiment = client.get_experiment_by_name("lm")
    (run,) = client.search_runs([experiment.experiment_id])
    run_id, history = run.info.run_id, client.get_metric_history
    odd = {metric.step: metric.value for metric in history(run_id, "task/100 _ _b_")}
    paths = [item.path for item in client.list_artifacts(run_id, "samples")]
    tables = [Path(client.download_artifacts(run_id, path)).read_text() for path in paths]
    return {
        "ids": [[run.data.tags["asyncrl.run_id"]]],
        "config": yaml.safe_load(Path(client.download_artifacts(run_id, "config.yaml")).read_text()),
        "steps": [[metric.step, metric.value, odd[metric.step]] for metric in history(run_id, "reward/mean")],
        "evaluations": [[metric.step, metric.value] for metric in history(run_id, "eval/reward_mean")],
        "completions": completions(map(json.loads, tables)),
    }


def read_trackio(run_dir: Path) -> dict[str, Any]:
    """Read the database in TRACKIO_DIR."""
    from trackio.sqlite_storage import SQLiteStorage

    (name,) = SQLiteStorage.get_runs("lm")
    lines, config = SQLiteStorage.get_logs("lm", name), SQLiteStorage.get_run_config("lm", name)
    rows = [row for line in lines if "samples" in line for row in line["samples"]["_value"]]
    own = {key: value for key, value in config.items() if not key.startswith("_")}
    found = {"ids": [[name]], "config": own, "completions": [row["completion"] for row in rows]}
    return found | read_lines(lines)


SETTINGS = {
    "wandb": ("project=lm", "mode=offline"),
    "mlflow": ("experiment=lm", "uri=sqlite:///{run_dir}/mlflow.db"),
    "trackio": ("project=lm",),
}


def client(verb: str, name: str, run_dir: Path, *rest: str, **environ: str) -> str:
    """Run this file as a script; return its output."""
    own = {"TRACKIO_DIR": str(run_dir / "trackio"), "HOME": str(run_dir), "WANDB_SILENT": "true"}
    process = subprocess.run(
        [sys.executable, __file__, verb, name, run_dir, *rest],
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
    assert found["completions"] == ["b 7"] * 2


def test_an_unknown_host_makes_wandb_offline(tmp_path: Path) -> None:
    environ = {"WANDB_BASE_URL": NOWHERE, "WANDB_API_KEY": "0123456789" * 4}
    said = client("tell", "wandb", tmp_path, "0", "mode=online", **environ)
    assert said.endswith("ended\n")
    assert "wandb is offline" in said
    assert f"`wandb sync {tmp_path}/wandb/offline-run-*`" in said
    found = json.loads(client("read", "wandb", tmp_path).splitlines()[-1])
    assert [step for step, *_ in found["steps"]] == [*range(NUM_STEPS)]


if __name__ == "__main__":
    verb, name, folder, *rest = sys.argv[1:]
    if verb == "tell":
        tell(name, Path(folder), int(rest[0]), *rest[1:])
    else:
        read = {"wandb": read_wandb, "mlflow": read_mlflow, "trackio": read_trackio}[name]
        print(json.dumps(read(Path(folder))))
