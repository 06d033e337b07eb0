"""Clients of TensorBoard, Weights & Biases, MLflow and Trackio, each imported when it starts."""

from __future__ import annotations

import json
import re
import ssl
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

from asyncrl.config.run_config import TRACKERS
from asyncrl.observe.samples import ShownRollout, sample_text
from asyncrl.observe.trackers import TrackedRun, Tracker

MAX_CHARS = 2000
REACH_S = 10.0
"""Seconds for wandb's server to answer; otherwise the run is kept in RUN_DIR/wandb."""
NO_NAME = re.compile(r"[^A-Za-z0-9_\-. :/]")
"""Characters that MLflow refuses in metric names."""
STATES = {"done": "FINISHED", "failed": "FAILED", "interrupted": "KILLED"}
RUN_TAG = "asyncrl.run_id"


COLUMNS = (
    *("step", "kind", "group_id", "sample_index", "prompt", "completion"),
    *("reward", "staleness", "logprob_gap", "truncated", "interruptions", "error"),
)


def sample_table(samples: Sequence[ShownRollout]) -> dict[str, list[Any]]:
    """Return `columns`, and in `data` a row per sample."""
    rows = []
    for sample in samples:
        messages = [f"{message.get('role')}: {message.get('content')}" for message in sample["messages"]]
        completion = "\n\n".join(part["text"] for part in sample["parts"] if part["is_sampled"])
        row: list[Any] = [sample["step"], sample["kind"], sample["group_id"], sample["sample_index"]]
        row += ["\n".join(messages), completion]
        row += [sample["reward"], sample["staleness"], sample["logprob_gap"]]
        rows.append([*row, sample["is_truncated"], sample["num_interruptions"], sample["error"]])
    return {"columns": [*COLUMNS], "data": rows}


class _ByStep(Tracker):
    """Evaluations have the policy_version as their step."""

    def evaluation(self, version: int, metrics: Mapping[str, float]) -> None:
        self.step(version, metrics)


class TensorBoard(_ByStep):
    """TensorBoard: scalars by step, evaluations by policy_version, samples as text."""

    def __init__(self) -> None:
        self._writer: Any = None

    def start(self, run: TrackedRun) -> None:
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._writer = EventFileWriter(str(run.run_dir / "tensorboard"), flush_secs=5)

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary

        self._add([Summary.Value(tag=name, simple_value=value) for name, value in metrics.items()], step)

    def samples(self, step: int, samples: Sequence[ShownRollout]) -> None:
        """Add text by kind; indented, so that Markdown shows it verbatim."""
        from tensorboard.plugins.text.summary_v2 import text_pb

        if step % 10 ** max(0, len(str(step)) - 2):
            return
        texts = dict[str, list[str]]()
        for sample in samples:
            lines = sample_text(sample, most=MAX_CHARS).split("\n")
            texts.setdefault(sample["kind"], []).append("".join(f"    {line}\n" for line in lines))
        for kind, found in texts.items():
            self._add(text_pb(f"samples/{kind}", "\n---\n\n".join(found)).value, step)

    def close(self, state: str) -> None:
        self._writer.close()

    def _add(self, values: Sequence[Any], step: float) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        self._writer.add_event(Event(wall_time=time.time(), step=int(step), summary=Summary(value=values)))


class Wandb(Tracker):
    """Weights & Biases: metrics by `step`, evaluations by `policy_version`."""

    def __init__(
        self,
        *,
        project: str = "asyncrl",
        entity: str | None = None,
        group: str | None = None,
        tags: Sequence[str] = (),
        mode: Literal["online", "offline"] | None = None,
    ) -> None:
        """`mode`: None is WANDB_MODE, else online."""
        self._project = project
        self._entity = entity
        self._group = group
        self._tags = list(tags)
        self._mode = mode
        self._run: Any = None

    def start(self, run: TrackedRun) -> str:
        """Open the run; offline without a key or a server."""
        import wandb

        settings = wandb.setup().settings
        mode: Any = self._mode or settings.mode
        if mode == "online" and (why := _why_offline(str(settings.base_url))):
            run.warn(f"wandb is offline: {why}; upload later: `wandb sync {run.run_dir}/wandb/offline-run-*`")
            mode = "offline"
        self._run = wandb.init(
            project=self._project,
            entity=self._entity,
            group=self._group,
            tags=self._tags,
            id=run.run_id,
            name=run.name,
            config=dict(run.config),
            dir=str(run.run_dir),
            mode=mode,
            resume="allow" if mode == "online" else None,
            allow_val_change=True,
            settings=wandb.Settings(quiet=True, console="off", reinit="create_new"),
        )
        self._run.define_metric("*", step_metric="step")
        self._run.define_metric("eval/*", step_metric="policy_version")
        return f"{self._entity or ''}/{self._project}/{run.run_id}"

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log({"step": step, **metrics})

    def evaluation(self, version: int, metrics: Mapping[str, float]) -> None:
        self._run.log({"policy_version": version, **metrics})

    def samples(self, step: int, samples: Sequence[ShownRollout]) -> None:
        from wandb import Table

        table = Table(**sample_table(samples), allow_mixed_types=True)
        self._run.log({"step": step, "samples": table})

    def close(self, state: str) -> None:
        self._run.finish(exit_code=0 if state == "done" else 1)


def _why_offline(base_url: str) -> str:
    """Return why wandb would wait for a key or for an answer."""
    import wandb

    try:
        urllib.request.urlopen(base_url, timeout=REACH_S).close()
    except urllib.error.HTTPError:
        pass
    except OSError as error:
        is_certificate = isinstance(getattr(error, "reason", None), ssl.SSLError)
        if not is_certificate:
            return f"{base_url} cannot be reached ({error})"
    is_known = wandb.login(prompt=False, verify=False)
    return "" if is_known else f"no key for {base_url} (`wandb login`, or WANDB_API_KEY)"


class Mlflow(_ByStep):
    """MLflow: metrics by step, evaluations by policy_version, and samples as a table artifact per step."""

    def __init__(self, *, uri: str | None = None, experiment: str = "asyncrl") -> None:
        """`uri`: tracking server or database; None is MLFLOW_TRACKING_URI, else ./mlflow.db."""
        self._uri = uri
        self._experiment = experiment
        self._client: Any = None
        self._id = ""

    def start(self, run: TrackedRun) -> str:
        """Continue the run with this run_id, or create it."""
        from mlflow import MlflowClient
        from mlflow.entities import Param

        self._client = MlflowClient(tracking_uri=self._uri)
        known = self._client.get_experiment_by_name(self._experiment)
        experiment = known.experiment_id if known else self._client.create_experiment(self._experiment)
        if found := self._client.search_runs([experiment], f"tags.`{RUN_TAG}` = '{run.run_id}'"):
            self._id = found[0].info.run_id
            self._client.update_run(self._id, status="RUNNING")
        else:
            self._id = self._client.create_run(experiment, run_name=run.name).info.run_id
            self._client.set_tag(self._id, RUN_TAG, run.run_id)
            params = [Param(name, value[:5000]) for name, value in _settings(run.config)]
            self._client.log_batch(self._id, params=params)  # only once: a param cannot change
        self._client.log_dict(self._id, dict(run.config), "config.yaml")
        return self._id

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        from mlflow.entities import Metric

        now_ms = int(time.time() * 1000)
        batch = [Metric(NO_NAME.sub("_", name), value, now_ms, step) for name, value in metrics.items()]
        self._client.log_batch(self._id, metrics=batch)

    def samples(self, step: int, samples: Sequence[ShownRollout]) -> None:
        self._client.log_dict(self._id, sample_table(samples), f"samples/step_{step:06d}.json")

    def close(self, state: str) -> None:
        self._client.set_terminated(self._id, STATES[state])


class Trackio(_ByStep):
    """Trackio: metrics by step, evaluations by policy_version."""

    def __init__(self, *, project: str = "asyncrl", space_id: str | None = None) -> None:
        """`space_id`: a Hugging Face Space such as user/name; None is this machine, or TRACKIO_SPACE_ID."""
        self._project = project
        self._space_id = space_id
        self._run: Any = None

    def start(self, run: TrackedRun) -> str:
        import trackio

        name = f"{run.name}-{run.run_id[:8]}"
        config = dict(run.config)
        self._run = trackio.init(
            self._project, name, space_id=self._space_id, config=config, resume="allow", embed=False
        )
        return f"{self._space_id or ''}/{self._project}/{name}"

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def samples(self, step: int, samples: Sequence[ShownRollout]) -> None:
        from trackio import Table

        self._run.log({"samples": Table(**sample_table(samples))}, step=step)

    def close(self, state: str) -> None:
        self._run.finish()


def _settings(config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """List settings by keys such as `buffer.max_staleness`."""
    for name, value in config.items():
        of_section = value if isinstance(value, Mapping) else {"": value}
        for key, inner in of_section.items():
            yield f"{name}.{key}".rstrip("."), inner if isinstance(inner, str) else json.dumps(inner)


CLIENTS: Mapping[str, Callable[..., Tracker]] = dict(
    zip(TRACKERS, (TensorBoard, Wandb, Mlflow, Trackio), strict=True)
)
