from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import Field, NonNegativeInt, PositiveInt, ValidationInfo, field_validator, model_validator

from asyncrl.config.fields import FrozenConfig


class NodesConfig(FrozenConfig):
    """A number of nodes, and of CUDA devices on each node."""

    nodes: Literal["all"] | PositiveInt
    """Number of machines; all = every machine with the devices of `gpus`."""
    gpus: Literal["auto", "all"] | NonNegativeInt = "auto"
    """CUDA devices per node; 0 = the CPU (auto = all, or the CPU without CUDA devices)."""

    def __str__(self) -> str:
        gpus = "" if self.gpus == "auto" else f", gpus: {self.gpus}"
        return f"{{nodes: {self.nodes}{gpus}}}"


Devices = Literal["auto", "cpu", "all"] | NonNegativeInt | str | list[NonNegativeInt] | NodesConfig
"""auto, cpu, all, a CUDA device number, a list of numbers, a range like 0-3, or a number of nodes."""

DEVICE_WORDS = ("auto", "cpu", "all")


def device_numbers(devices: Any) -> list[int] | None:
    """Return the listed device numbers, if the text has this form."""
    if isinstance(devices, str) and (match := re.fullmatch(r"(\d+)-(\d+)", devices)):
        devices = [*range(int(match[1]), int(match[2]) + 1)]
    numbers = devices if isinstance(devices, list) else [devices]
    is_form = numbers and all(type(number) is int and number >= 0 for number in numbers)
    return numbers if is_form and len(set(numbers)) == len(numbers) else None


def is_cpu(devices: Devices) -> bool:
    return devices == "cpu" or (isinstance(devices, NodesConfig) and devices.gpus == 0)


def _is_nodes(value: Any) -> bool:
    if isinstance(value, NodesConfig):
        return True
    if not isinstance(value, Mapping) or "nodes" not in value or not {*value} <= {"nodes", "gpus"}:
        return False
    nodes, gpus = value["nodes"], value.get("gpus", "auto")
    is_number = (type(nodes) is int and nodes >= 1, type(gpus) is int and gpus >= 0)
    return (is_number[0] or nodes == "all") and (is_number[1] or gpus in ("auto", "all"))


class PlacementConfig(FrozenConfig):
    """Devices of each side. Equal CUDA devices, or rollout: trainer, mean colocation (docs/colocation.md)."""

    trainer: Devices = "auto"
    """Devices of the trainer: cpu, a CUDA device number, a list [0, 1], a range 0-3, all, or {nodes: 2,
    gpus: 8} (auto = one CUDA device per process of trainer.world_size, else cpu)."""
    rollout: Devices = "auto"
    """Devices of the engines, in the forms of placement.trainer, or `trainer` (colocated). auto = the
    devices that the trainer does not use; without any, colocated at buffer.max_staleness=0, else refused."""
    eval: Literal["auto", "cpu"] | Annotated[int, Field(ge=0, strict=True)] = "auto"
    """Device of an eval engine: cpu or a CUDA device number. auto = an unused CUDA device; with
    eval.engine=own else an engine's device."""
    teacher: Literal["auto", "cpu"] | Annotated[int, Field(ge=0, strict=True)] = "auto"
    """Device of the teacher: cpu or a CUDA device number (auto = an unused device, else an engine's)."""
    share: Literal["auto"] | Annotated[float, Field(gt=0, lt=1)] | None = "auto"
    """Fraction of a shared CUDA device's memory for the engines. When colocated with auto, both sides stay
    in memory if they fit; else, and with none, each is offloaded during the other's turn."""

    @field_validator("trainer", "rollout", mode="before")
    @classmethod
    def _is_a_form(cls, value: Any, info: ValidationInfo) -> Any:
        words = (*DEVICE_WORDS, "trainer") if info.field_name == "rollout" else DEVICE_WORDS
        if not (_is_nodes(value) or device_numbers(value) is not None or value in words):
            raise ValueError(
                f"give {', '.join(words)}, a device number like 0, a list like [0, 1] that names each once, "
                "or a range like 0-3, of this machine; or nodes and the CUDA devices of each, as a mapping: "
                "{nodes: 2, gpus: 8}, {nodes: all, gpus: all}, {nodes: 2, gpus: 0} for their CPUs"
            )
        return value


class CheckpointConfig(FrozenConfig):
    """Checkpoints of the run."""

    every: PositiveInt | None = 50
    """Batches between two checkpoints (none = none; a resumed run then trains the journaled batches again).
    """
    keep_last: int = Field(default=2, ge=1)
    """Number of newest checkpoints to keep."""
    keep_every: PositiveInt | None = None
    """Keep checkpoints at multiples of this number of batches forever (none = off)."""
    keep_best: bool | str = False
    """Also keep the checkpoint with the best eval/reward_mean: true for the first evaluation, or a name
    (needs `eval` with the same `every` or a multiple of it)."""

    @model_validator(mode="after")
    def _multiples_exist(self) -> Self:
        if self.keep_every is not None and (self.every is None or self.keep_every % self.every):
            raise ValueError(
                f"keep_every={self.keep_every} is not a multiple of every={self.every}; set it to one or none"
            )
        return self


class JournalConfig(FrozenConfig):
    """The journal, journal.sqlite."""

    keep: Literal["checkpoint", "all"] = "checkpoint"
    """Keep tokens of trained batches since the oldest checkpoint, or always."""


class SupervisionConfig(FrozenConfig):
    """Restarts of processes, and reports of hangs."""

    max_restarts: int = Field(default=3, ge=0)
    """Restarts of each engine, trainer or worker within an hour of work (0 = the run ends at once)."""
    backoff_s: float = Field(default=1.0, ge=0)
    """Delay of a process's first restart, in seconds; doubled each time, 30 at most."""
    start_timeout_s: float = Field(default=300.0, gt=0)
    """Timeout for a process's first answer, in seconds, after reading its model (vLLM: three times
    longer)."""
    watchdog_s: float = Field(default=900.0, gt=0)
    """Seconds without progress until the run reports who waits for whom, with stacks in the log."""
    on_stuck: Literal["warn", "restart", "fail"] = "warn"
    """Reaction to that: keep waiting, restart the engines, or end the run (which can be resumed)."""


TRACKERS = ("tensorboard", "wandb", "mlflow", "trackio")


class ObserveConfig(FrozenConfig):
    """Output of the run: files, trackers, console, status port."""

    console: Literal["auto", "live", "plain", "none"] = "auto"
    """live: a table that updates; plain: a line every few seconds; auto = live on a terminal, else plain. A
    full pipe loses lines."""
    trackers: list[str] = ["tensorboard"]
    """Trackers: tensorboard (RUN_DIR/tensorboard), wandb, mlflow, trackio (each with the extra of its
    name), or `module:Class` (docs/monitoring.md) ([] = none)."""
    tracker_args: dict[str, dict[str, Any]] = {}
    """Keyword arguments of each tracker by its name, such as {wandb: {project: letters}}
    (docs/monitoring.md)."""
    status_port: Annotated[int, Field(ge=0, le=65535)] | None = None
    """Port of /metrics, for Prometheus, and /status (none = off; 0 = any free one, in status.json).
    RUN_DIR/status.key has the bearer token."""
    status_host: str = "127.0.0.1"
    """Address of the status port (0.0.0.0 = all of this machine, without TLS)."""
    samples_per_step: int = Field(default=3, ge=0, le=100)
    """Rollouts per batch in samples.jsonl: the best, the worst, and random ones (0 = none). Long files lose
    middle parts."""
    readable_by: Literal["owner", "group", "all"] = "owner"
    """Readers of the run directory, which contains the config, the logs and every conversation."""
    heartbeat_s: float = Field(default=60.0, gt=0)
    """Timeout without a heartbeat, in seconds, until an engine, trainer or worker is restarted. Without the
    eval engine the run continues."""

    @model_validator(mode="after")
    def _trackers_are_known(self) -> Self:
        for name in self.trackers:
            if name not in TRACKERS and ":" not in name:
                known = f"{', '.join(TRACKERS)}, and your own as module:Class"
                raise ValueError(f"trackers has {name!r}; there are {known} ([] for none)")
        if twice := [name for name in dict.fromkeys(self.trackers) if self.trackers.count(name) > 1]:
            raise ValueError(f"trackers has {twice[0]} twice; name it once")
        if unused := [name for name in self.tracker_args if name not in self.trackers]:
            raise ValueError(
                f"observe.tracker_args has {unused[0]}, but observe.trackers does not; add or remove it"
            )
        return self

    @property
    def dir_mode(self) -> int:
        return {"owner": 0o700, "group": 0o750, "all": 0o755}[self.readable_by]
