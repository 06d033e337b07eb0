"""Section `placement`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    Field,
    NonNegativeInt,
    PositiveInt,
    ValidationInfo,
    field_validator,
)

from asyncrl.config.device_forms import device_numbers
from asyncrl.config.extended import extended
from asyncrl.config.fields import FrozenConfig


class NodesConfig(FrozenConfig):
    """A number of nodes, and of CUDA devices on each node."""

    nodes: Literal["all"] | PositiveInt
    """Number of machines; all = every machine with the devices of `gpus`."""
    gpus: Literal["auto", "all"] | NonNegativeInt = "auto"
    """CUDA devices per node; 0 = the CPU (auto = all, or the CPU without CUDA devices).
    """

    def __str__(self) -> str:
        gpus = "" if self.gpus == "auto" else f", gpus: {self.gpus}"
        return f"{{nodes: {self.nodes}{gpus}}}"


Devices = (
    Literal["auto", "cpu", "all"]
    | NonNegativeInt
    | str
    | list[NonNegativeInt]
    | NodesConfig
)
"""auto, cpu, all, a CUDA device number, a list of numbers, a range like 0-3, or a
number of nodes.
"""

DEVICE_WORDS = ("auto", "cpu", "all")


def is_cpu(devices: Devices) -> bool:
    return devices == "cpu" or (isinstance(devices, NodesConfig) and devices.gpus == 0)


@extended("placement")
class PlacementConfig(FrozenConfig):
    """Devices of each side. Equal CUDA devices, or rollout: trainer, mean colocation
    (docs/colocation.md).
    """

    free_keys: ClassVar = "*"

    trainer: Devices = "auto"
    """Devices of the trainer: cpu, a CUDA device number, a list [0, 1], a range 0-3,
    all, or {nodes: 2, gpus: 8} (auto = one CUDA device per process of
    trainer.world_size, else cpu).
    """
    rollout: Devices = "auto"
    """Devices of the engines, in the forms of placement.trainer, or `trainer`
    (colocated). auto = the devices that the trainer does not use; without any,
    colocated at buffer.max_staleness=0, else refused.
    """
    eval: Literal["auto", "cpu"] | Annotated[int, Field(ge=0, strict=True)] = "auto"
    """Device of an eval engine: cpu or a CUDA device number. auto = an unused CUDA
    device; with eval.engine=own else an engine's device.
    """
    share: Literal["auto"] | Annotated[float, Field(gt=0, lt=1)] | None = "auto"
    """Fraction of a shared CUDA device's memory for the engines. When colocated with
    auto, both sides stay in memory if they fit; else, and with none, each is offloaded
    during the other's time slice.
    """

    @field_validator("trainer", "rollout", mode="before")
    @classmethod
    def _is_a_form(cls, value: Any, info: ValidationInfo) -> Any:
        words = (
            (*DEVICE_WORDS, "trainer") if info.field_name == "rollout" else DEVICE_WORDS
        )
        # The union has str for ranges like 0-3, so pydantic by itself would take any
        # text, such as gpu0, and the mistake would show only when devices are assigned.
        is_nodes = isinstance(value, NodesConfig) or (
            isinstance(value, Mapping) and "nodes" in value
        )
        if not (is_nodes or device_numbers(value) is not None or value in words):
            raise ValueError(
                f"give {', '.join(words)}, a device number, a list like [0, 1] that names each once, a range "
                "like 0-3, or a mapping like {nodes: 2, gpus: 8}, {nodes: all, gpus: all}"
            )
        return value
