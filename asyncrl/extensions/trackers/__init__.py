"""Weights & Biases, MLflow, Trackio, and traces for OpenTelemetry collectors."""

from asyncrl.base.extensions import ExportKind, Extension

EXTENSION = Extension(
    about="Weights & Biases, MLflow, Trackio, and traces for OpenTelemetry collectors.",
    page="docs/monitoring.md",
    extra="wandb, mlflow, trackio, otlp",
    fields={"observe": "asyncrl.extensions.trackers.settings:FIELDS"},
    trackers={
        "wandb": "asyncrl.extensions.trackers.tracker_clients:Wandb",
        "mlflow": "asyncrl.extensions.trackers.tracker_clients:Mlflow",
        "trackio": "asyncrl.extensions.trackers.tracker_clients:Trackio",
    },
    listeners={"traces": "asyncrl.extensions.trackers.traces:TraceSender"},
    exports={
        "traces": ExportKind(
            "asyncrl.extensions.trackers.trace_export:export_traces",
            "Rollouts as tokens and OpenTelemetry spans: a folder of two files.",
        )
    },
)
