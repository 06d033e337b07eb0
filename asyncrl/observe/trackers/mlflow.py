"""MLflow, by its own client (extra mlflow)."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from asyncrl.config.operation import MlflowArgs
from asyncrl.observe.samples import ShownRollout
from asyncrl.observe.trackers.tracker import SAMPLE_COLUMNS, TrackedRun, sample_rows

NO_NAME = re.compile(r"[^A-Za-z0-9_\-. :/]")
"""What MLflow takes in no name of a metric."""
STATES = {"done": "FINISHED", "failed": "FAILED", "interrupted": "KILLED"}


class Mlflow:
    """Metrics over the step, evaluations over the policy_version; samples are artifacts, one table a step."""

    def __init__(self, args: MlflowArgs) -> None:
        self._args = args
        self._client: Any = None
        self._id = ""

    def start(self, run: TrackedRun) -> str:
        """Goes on in the run of the kept id, if that is still in the experiment."""
        from mlflow import MlflowClient
        from mlflow.entities import Param

        self._client = MlflowClient(tracking_uri=self._args.uri)
        experiment = self._experiment()
        if run.kept_id and self._is_there(run.kept_id, experiment):
            self._id = run.kept_id
            self._client.update_run(self._id, status="RUNNING")
        else:
            self._id = self._client.create_run(experiment, run_name=run.name).info.run_id
            self._client.set_tag(self._id, "asyncrl.run_id", run.run_id)
            settings = [Param(name, _text(value)) for name, value in _settings(run.config)]
            self._client.log_batch(self._id, params=settings)  # and never again: a param cannot change
        self._client.log_dict(self._id, dict(run.config), "config.yaml")
        return self._id

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """One batch of metrics."""
        from mlflow.entities import Metric

        now_ms = int(time.time() * 1000)
        batch = [Metric(_name(name), value, now_ms, step) for name, value in metrics.items()]
        self._client.log_batch(self._id, metrics=batch)

    def evaluation(self, version: int, metrics: Mapping[str, float]) -> None:
        """Over the version that was evaluated."""
        self.step(version, metrics)

    def samples(self, step: int, samples: Sequence[ShownRollout]) -> None:
        """In the form of MLflow's own tables."""
        table = {"columns": list(SAMPLE_COLUMNS), "data": sample_rows(samples)}
        self._client.log_dict(self._id, table, f"samples/step_{step:06d}.json")

    def weights(self, version: int, digest: str) -> None:
        """Not shown."""

    def picture(self, name: str, path: Path) -> None:
        """An artifact."""
        self._client.log_artifact(self._id, str(path))

    def close(self, state: str) -> None:
        """With MLflow's word for the end."""
        self._client.set_terminated(self._id, STATES[state])

    def _experiment(self) -> str:
        """Its id; made if there is none. Another run may make it at the same time."""
        from mlflow.exceptions import MlflowException

        name = self._args.experiment
        if (found := self._client.get_experiment_by_name(name)) is None:
            try:
                return str(self._client.create_experiment(name))
            except MlflowException:
                if (found := self._client.get_experiment_by_name(name)) is None:
                    raise
        return str(found.experiment_id)

    def _is_there(self, kept_id: str, experiment: str) -> bool:
        from mlflow.exceptions import MlflowException

        try:
            info = self._client.get_run(kept_id).info
        except MlflowException as error:
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise
            return False
        return bool(info.experiment_id == experiment and info.lifecycle_stage == "active")


def _settings(config: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Those of each section, `buffer.max_staleness`, and those outside any."""
    found = []
    for name, value in config.items():
        is_section = isinstance(value, Mapping)
        found += [(f"{name}.{key}", inner) for key, inner in value.items()] if is_section else [(name, value)]
    return found


def _text(value: Any) -> str:
    return (value if isinstance(value, str) else json.dumps(value))[:5000]


def _name(name: str) -> str:
    return NO_NAME.sub("_", name)
