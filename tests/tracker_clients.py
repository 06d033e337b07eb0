"""Runs as a process of its own: tells the real client of a tracker of a few steps, or reads what it wrote.

    python tracker_clients.py tell NAME RUN_DIR FIRST_STEP [KEY=VALUE...]
    python tracker_clients.py read NAME RUN_DIR

A client leaves threads and hooks of its own behind, which are no business of the process of the tests.
"""

from __future__ import annotations

import asyncio
import json
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from test_trackers import SAMPLE

from asyncrl import cli
from asyncrl.config import ObserveConfig
from asyncrl.observe.trackers import TrackedRun, make_trackers

RUN_ID, NUM_STEPS = "0123456789abcdef", 4
CONFIG = {"seed": 1, "buffer": {"max_staleness": 2}, "task": {"args": {"%": [1]}}}
ODD = "task/100 % <b>"
"""A metric of a task, with a name that a client may not take as it is."""


def tell(name: str, run_dir: Path, first: int, *settings: str) -> None:
    """Steps from `first` on, an evaluation and a sample."""
    args = {key: yaml.safe_load(value) for key, value in (setting.split("=", 1) for setting in settings)}
    limit_s = args.pop("limit_s", 120.0)
    observe = ObserveConfig.model_validate({"trackers": [name], "tracker_args": {name: args}})
    tracker = make_trackers(observe, print)
    tracker.start(TrackedRun(run_dir, "a run", RUN_ID, CONFIG))
    for step in range(first, first + NUM_STEPS):
        tracker.tell("step", step, {"reward/mean": step / 2, ODD: 1.0, "policy_version": step + 1})
    tracker.tell("samples", first + 1, [SAMPLE])
    tracker.tell("evaluation", first + 2, {"eval/reward_mean": first + 0.25})
    tracker.tell("close", "done")
    asyncio.run(tracker.wait_closed(limit_s, print))
    print("ended")
    cli._leave_trackers(0)


def read_wandb(run_dir: Path) -> dict[str, Any]:
    """The records of the .wandb files: LevelDB's log format, with blocks of 32 KiB, after 7 bytes."""
    from wandb.proto.wandb_internal_pb2 import Record

    found: dict[str, Any] = {"steps": [], "evaluations": [], "samples": [], "ids": []}
    for path in sorted(run_dir.glob("wandb/offline-run-*/*.wandb"), key=lambda path: path.stat().st_mtime):
        for data in _leveldb_records(path.read_bytes()):
            record = Record()
            record.ParseFromString(data)
            if record.WhichOneof("record_type") == "run":
                run = record.run
                found["ids"].append([run.run_id, run.project, run.display_name])
                config = {item.key: json.loads(item.value_json) for item in run.config.update}
                found["config"] = {key: value for key, value in config.items() if key != "_wandb"}
            items = {item.key or "/".join(item.nested_key): item for item in record.history.item}
            line = {key: json.loads(item.value_json) for key, item in items.items()}
            if "reward/mean" in line:
                found["steps"].append([line["step"], line["reward/mean"], line[ODD]])
            if "eval/reward_mean" in line:
                found["evaluations"].append([line["policy_version"], line["eval/reward_mean"]])
    for path in sorted(
        run_dir.glob("wandb/offline-run-*/files/media/table/*.json"), key=lambda path: path.stat().st_mtime
    ):
        found["samples"].append(json.loads(path.read_text()))
    return found


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
    """By its own client, from the database."""
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=f"sqlite:///{run_dir}/mlflow.db")
    experiment = client.get_experiment_by_name("lm")
    runs = client.search_runs([experiment.experiment_id])
    run_id, history = runs[0].info.run_id, client.get_metric_history
    odd = {metric.step: metric.value for metric in history(run_id, "task/100 _ _b_")}
    tables = [
        Path(client.download_artifacts(run_id, item.path))
        for item in client.list_artifacts(run_id, "samples")
    ]
    return {
        "ids": [[run.data.tags["asyncrl.run_id"], "lm", run.info.run_name] for run in runs],
        "status": runs[0].info.status,
        "params": runs[0].data.params,
        "config": yaml.safe_load(Path(client.download_artifacts(run_id, "config.yaml")).read_text()),
        "steps": [[metric.step, metric.value, odd[metric.step]] for metric in history(run_id, "reward/mean")],
        "evaluations": [[metric.step, metric.value] for metric in history(run_id, "eval/reward_mean")],
        "samples": [json.loads(path.read_text()) for path in sorted(tables)],
    }


def read_trackio(run_dir: Path) -> dict[str, Any]:
    """From its database, in TRACKIO_DIR."""
    from trackio.sqlite_storage import SQLiteStorage

    (name,) = SQLiteStorage.get_runs("lm")
    lines, config = SQLiteStorage.get_logs("lm", name), SQLiteStorage.get_run_config("lm", name)
    tables = [line["samples"]["_value"] for line in lines if "samples" in line]
    return {
        "ids": [[name, "lm"]],
        "config": {key: value for key, value in config.items() if not key.startswith("_")},
        "steps": [[line["step"], line["reward/mean"], line[ODD]] for line in lines if "reward/mean" in line],
        "evaluations": [
            [line["step"], line["eval/reward_mean"]] for line in lines if "eval/reward_mean" in line
        ],
        "samples": [{"columns": [*rows[0]], "data": [list(row.values()) for row in rows]} for rows in tables],
    }


if __name__ == "__main__":
    verb, name, folder, *rest = sys.argv[1:]
    if verb == "tell":
        tell(name, Path(folder), int(rest[0]), *rest[1:])
    else:
        read = {"wandb": read_wandb, "mlflow": read_mlflow, "trackio": read_trackio}[name]
        print(json.dumps(read(Path(folder))))
