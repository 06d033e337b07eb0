"""Clients of Weights & Biases, MLflow and Trackio, each imported when it starts."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from asyncrl.observe.samples import ShownRollout
from asyncrl.observe.trackers import ByStep, Metrics, TrackedRun, Tracker

RUN_TAG = "asyncrl.run_id"
COLUMNS = (
    "step",
    "kind",
    "group_id",
    "sample_index",
    "prompt",
    "completion",
    "reward",
    "staleness",
    "logprob_gap",
    "is_truncated",
    "num_interruptions",
    "error",
)


def sample_table(samples: Sequence[ShownRollout]) -> dict[str, list[object]]:
    """Return `columns`, and in `data` a row per sample."""
    rows = list[object]()
    for sample in samples:
        messages = [
            f"{message.get('role')}: {message.get('content')}"
            for message in sample["messages"]
        ]
        completion = [part["text"] for part in sample["parts"] if part["is_sampled"]]
        shown: dict[str, object] = {
            **sample,
            "prompt": "\n".join(messages),
            "completion": "\n\n".join(completion),
        }
        rows.append([shown[name] for name in COLUMNS])
    return {"columns": [*COLUMNS], "data": rows}


@dataclass
class Wandb(Tracker):
    """Weights & Biases: metrics by `step`, evaluations by `policy_version`."""

    package: ClassVar = "wandb"

    project: str = "asyncrl"
    tags: Sequence[str] = ()
    _run: Any = field(init=False)

    def start(self, run: TrackedRun) -> None:
        """Open the run; offline without a key."""
        import wandb

        mode: Any = wandb.setup().settings.mode
        if mode == "online" and not wandb.login(prompt=False, verify=False):
            upload = f"upload later: `wandb sync {run.run_dir}/wandb/offline-run-*`"
            run.warn(
                f"wandb is offline without a key (`wandb login`, or WANDB_API_KEY); {upload}"
            )
            mode = "offline"
        self._run = wandb.init(
            project=self.project,
            tags=[*self.tags],
            id=run.run_id,
            name=run.name,
            config=dict(run.config),
            dir=str(run.run_dir),
            mode=mode,
            # An offline run cannot be continued. Each start writes another folder, with
            # the same id.
            resume="allow" if mode == "online" else None,
            allow_val_change=True,
            settings=wandb.Settings(quiet=True, console="off", reinit="create_new"),
        )
        # Not wandb's own step, which may only grow: an evaluation of an older version
        # comes after newer steps.
        self._run.define_metric("*", step_metric="step")
        self._run.define_metric("eval/*", step_metric="policy_version")

    def step(self, step: int, metrics: Metrics) -> None:
        self._run.log({"step": step, **metrics})

    def evaluation(self, version: int, metrics: Metrics) -> None:
        self._run.log({"policy_version": version, **metrics})

    def samples(self, step: int, samples: Sequence[ShownRollout]) -> None:
        from wandb import Table

        table = Table(**sample_table(samples), allow_mixed_types=True)
        self._run.log({"step": step, "samples": table})

    def close(self, state: str) -> None:
        self._run.finish(exit_code=0 if state == "done" else 1)


@dataclass
class Mlflow(ByStep):
    """MLflow: metrics by step, evaluations by policy_version, and samples as a table
    artifact per step.
    """

    package: ClassVar = "mlflow"

    uri: str | None = None
    """Tracking server or database; None: MLFLOW_TRACKING_URI, else ./mlflow.db."""
    experiment: str = "asyncrl"

    def start(self, run: TrackedRun) -> None:
        """Continue the run with this run_id, or create it."""
        import mlflow

        if self.uri is not None:
            mlflow.set_tracking_uri(self.uri)
        mlflow.set_experiment(self.experiment)
        # MLflow makes the ids of runs itself, so ours is a tag.
        found = mlflow.search_runs(
            filter_string=f"tags.`{RUN_TAG}` = '{run.run_id}'", output_format="list"
        )
        run_id = found[0].info.run_id if found else None
        mlflow.start_run(run_id, run_name=run.name, tags={RUN_TAG: run.run_id})
        if not found:  # a param cannot change
            mlflow.log_params(dict(run.config))
        mlflow.log_dict(dict(run.config), "config.yaml")

    def step(self, step: int, metrics: Metrics) -> None:
        import mlflow

        # MLflow refuses a metric whose name has other characters.
        accepted = {
            re.sub(r"[^A-Za-z0-9_\-. :/]", "_", name): value
            for name, value in metrics.items()
        }
        mlflow.log_metrics(accepted, step=step)

    def samples(self, step: int, samples: Sequence[ShownRollout]) -> None:
        import mlflow

        mlflow.log_dict(sample_table(samples), f"samples/step_{step:06d}.json")

    def close(self, state: str) -> None:
        import mlflow

        mlflow.end_run(
            {"done": "FINISHED", "failed": "FAILED", "interrupted": "KILLED"}[state]
        )


@dataclass
class Trackio(ByStep):
    """Trackio: metrics by step, evaluations by policy_version."""

    package: ClassVar = "trackio"

    project: str = "asyncrl"
    space_id: str | None = None
    """A Hugging Face Space such as user/name; None: this machine, or TRACKIO_SPACE_ID.
    """
    _run: Any = field(init=False)

    def start(self, run: TrackedRun) -> None:
        import trackio

        # Trackio continues a run by its name, and names of folders repeat.
        self._run = trackio.init(
            self.project,
            f"{run.name}-{run.run_id[:8]}",
            space_id=self.space_id,
            config=dict(run.config),
            resume="allow",
            embed=False,
        )

    def step(self, step: int, metrics: Metrics) -> None:
        self._run.log(dict(metrics), step=step)

    def samples(self, step: int, samples: Sequence[ShownRollout]) -> None:
        from trackio import Table

        self._run.log({"samples": Table(**sample_table(samples))}, step=step)

    def close(self, state: str) -> None:
        self._run.finish()
