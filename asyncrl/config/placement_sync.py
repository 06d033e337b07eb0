"""Sections `placement` and `weight_sync`; what each transport needs of engine, placement and settings.

A new transport is a line in TRANSPORTS, rules in refuse_transport, and its ends in
asyncrl/weights/export.py, loaded_weights.py (embedded) and asyncrl/engines/vllm_server.py.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self
from urllib.parse import urlsplit

from pydantic import Field, NonNegativeInt, PositiveInt, ValidationInfo, field_validator, model_validator

from asyncrl.base.errors import ConfigError
from asyncrl.config.fields import FrozenConfig
from asyncrl.messages.engine_api import Interrupt, TransportName

if TYPE_CHECKING:
    from asyncrl.config.run_config import RunConfig


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


class PlacementConfig(FrozenConfig):
    """Devices of each side. Equal CUDA devices, or rollout: trainer, mean colocation (docs/colocation.md)."""

    free_keys: ClassVar = "*"

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
    mps: Literal["auto", "never"] = "auto"
    """auto = start CUDA MPS for trainer and engines that work at once on a CUDA device, if it can; without it
    they take time slices (never)."""

    @field_validator("trainer", "rollout", mode="before")
    @classmethod
    def _is_a_form(cls, value: Any, info: ValidationInfo) -> Any:
        words = (*DEVICE_WORDS, "trainer") if info.field_name == "rollout" else DEVICE_WORDS
        is_nodes = isinstance(value, NodesConfig) or (isinstance(value, Mapping) and "nodes" in value)
        if not (is_nodes or device_numbers(value) is not None or value in words):
            raise ValueError(
                f"give {', '.join(words)}, a device number, a list like [0, 1] that names each once, a range "
                "like 0-3, or a mapping like {nodes: 2, gpus: 8}, {nodes: all, gpus: all}"
            )
        return value


LOOPBACK = ("127.0.0.1", "localhost", "::1")
TO_SHM = "set weight_sync.transport=shm"


@dataclass(frozen=True, slots=True)
class TransportCapabilities:
    """Facts about a transport. By default, all weights are one file in shared memory."""

    sends_adapters: bool = False
    is_transfer: bool = False
    is_collective: bool = False
    """The trainer holds the only newest export and sends the weights itself."""
    shares_device: bool = False
    """Engines open the trainer's device memory: with the whole version, or chunks when colocated."""
    is_file_shared: bool = False
    """Exports are files in weight_sync.disk_dir."""
    is_fetched: bool = False
    bound: str = ""
    """Why engines cannot be on other nodes, or ''."""

    def holds_exports(self, *, is_turns: bool) -> bool:
        """Return whether the trainer's device holds the newest export, and no older one."""
        return self.is_collective or (self.shares_device and not is_turns)


TRANSPORTS: dict[TransportName, TransportCapabilities] = {
    "shm": TransportCapabilities(bound="its file is in the shared memory of one machine"),
    "disk": TransportCapabilities(is_file_shared=True),
    "stream": TransportCapabilities(is_fetched=True),
    "lora": TransportCapabilities(sends_adapters=True, is_fetched=True),
    "nccl": TransportCapabilities(is_transfer=True, is_collective=True),
    "ipc": TransportCapabilities(
        is_transfer=True, shares_device=True, bound="its handles name memory of one machine's devices"
    ),
}


class WeightSyncConfig(FrozenConfig):
    """Pushes of new weights to the engines."""

    free_keys: ClassVar = ("timeout_s", "chunk_bytes", "disk_dir", "canary_limit")

    transport: Literal["auto"] | TransportName = "auto"
    """auto = disk if disk_dir is given; nccl if every side has CUDA devices of its own; ipc if they are
    colocated on one machine or work at once on one device; else shm, or stream on several nodes. shm: a
    safetensors file in shared memory. stream: the file, downloaded by each node. disk: the file in disk_dir.
    lora: only the adapters. nccl: one broadcast to all engines. ipc: memory of shared devices, in chunks when
    colocated."""
    disk_dir: str | None = None
    """Folder for transport=disk, under one path for trainer and engines."""
    interrupt: Literal["auto"] | Interrupt = "auto"
    """Running requests during a swap: abort and resume them from their tokens, keep them with a recomputed
    KV cache, keep them with the old KV cache, or wait until they finish. auto = abort, the fastest."""
    canary_limit: Literal["auto"] | Annotated[float, Field(gt=0)] | None = "auto"
    """Maximum difference in nats between vLLM's logprobs of a fixed text and the trainer's after each push
    (auto = 0.001 in float32, 0.25 in bfloat16; none = not compared)."""
    timeout_s: float = Field(default=600.0, gt=0)
    """Timeout for each phase of a push or a handover, in seconds. On expiry an engine is restarted; a late
    export or handover ends the run."""
    chunk_bytes: int = Field(default=2**28, ge=2**16)
    """When colocated, bytes per chunk of weights. A larger tensor is one chunk."""

    @property
    def settled(self) -> TransportName:
        assert self.transport != "auto", "resolve_auto() precedes every weight sync"
        return self.transport

    @property
    def facts(self) -> TransportCapabilities:
        """Return this transport's facts; for auto the common ones."""
        return TRANSPORTS[self.file_transport if self.transport == "auto" else self.transport]

    @property
    def file_transport(self) -> TransportName:
        return "shm" if self.disk_dir is None else "disk"

    @model_validator(mode="after")
    def _disk_has_a_place(self) -> Self:
        if self.facts.is_file_shared != (self.disk_dir is not None):
            raise ValueError(
                f"transport={self.transport} with disk_dir={self.disk_dir}: only disk writes "
                "there, to a folder that trainer and engines share"
            )
        return self


def fetches_files(config: RunConfig, *, has_eval_engine: bool) -> bool:
    facts = config.weight_sync.facts
    return facts.is_fetched or (facts.is_collective and has_eval_engine)


def choose_transport(
    config: RunConfig, ranks: Sequence[str], engines: Sequence[str], *, is_turns: bool, num_nodes: int = 1
) -> tuple[TransportName, str]:
    """Return the transport of `auto`, and the reason. Never lora: vLLM computes differently with unmerged
    adapters.
    """
    sync, rollout = config.weight_sync, config.rollout
    if sync.disk_dir is not None:
        return sync.file_transport, "weight_sync.disk_dir is given"
    by_file: TransportName = "shm" if num_nodes == 1 else "stream"
    if not rollout.facts.receives_transfers:
        return by_file, f"rollout.engine={rollout.engine} takes part in no transfer between devices"
    if rollout.external_urls is not None:
        return by_file, "the run does not start the engines itself"
    if "cpu" in (*ranks, *engines):
        return by_file, "a side is on the CPU"
    if is_turns:
        why = "trainer and engines take turns on CUDA devices"
        return ("ipc", why) if num_nodes == 1 else ("stream", f"{why} of a run on {num_nodes} nodes")
    if shared := sorted({*ranks} & {*engines}):
        if num_nodes == 1 and _share_one(ranks, engines):
            return "ipc", f"both sides are on {shared[0]} at once"
        return by_file, f"both sides are on {', '.join(shared)} at once, where NCCL connects no two processes"
    if shared := _used_twice(engines):
        return by_file, f"several engines are on {', '.join(shared)}, where NCCL connects no two processes"
    return "nccl", "trainer and engines are on separate CUDA devices"


def _share_one(ranks: Sequence[str], engines: Sequence[str]) -> bool:
    return len({*ranks, *engines}) == 1


def _used_twice(devices: Sequence[str]) -> list[str]:
    return sorted({device for device in devices if device != "cpu" and devices.count(device) > 1})


def refuse_transport(
    config: RunConfig, ranks: Sequence[str], engines: Sequence[str], *, is_turns: bool, num_nodes: int = 1
) -> None:
    """Raise ConfigError if this transport cannot serve these engines. `is_turns`: colocated."""
    sync = config.weight_sync
    facts = sync.facts
    name = f"weight_sync.transport={sync.file_transport if sync.transport == 'auto' else sync.transport}"
    places = f"{name} from {', '.join(ranks)} to {', '.join(engines)}, {'in turns' if is_turns else 'apart'}"
    is_apart = not _used_twice([*ranks, *engines]) and ("cpu" in ranks) == ("cpu" in engines)
    _refuse_engine(config, name)
    if num_nodes > 1 and facts.bound and sync.transport != "auto":
        what = f"{name}, and the run is on {num_nodes} nodes: {facts.bound}"
        way_out = "set weight_sync.transport=stream, or disk with weight_sync.disk_dir shared by all nodes."
        raise ConfigError(what, way_out=way_out)
    if is_turns and facts.sends_adapters:
        rule = "an engine that sleeps has freed the base weights that adapters are added to"
        raise ConfigError(places, rule=rule, way_out=f"{TO_SHM}.")
    if facts.is_collective and (is_turns or not is_apart):
        rule = "a broadcast is between processes with a CUDA device each (NCCL), or all on the CPU (gloo)"
        raise ConfigError(places, rule=rule, way_out=f"{TO_SHM}. In turns: weight_sync.transport=ipc.")
    if facts.shares_device and not (is_turns or _share_one(ranks, engines)):
        rule = "engines that work at the same time as the trainer open memory of its only device"
        raise ConfigError(places, rule=rule, way_out=f"{TO_SHM}, or placement.rollout=trainer.")


def _refuse_engine(config: RunConfig, name: str) -> None:
    facts = config.weight_sync.facts
    rollout = config.rollout
    lora = config.trainer.lora
    if facts.is_transfer and not rollout.facts.receives_transfers:
        what = f"{name} goes from device to device, and rollout.engine={rollout.engine} has no weights"
        raise ConfigError(what, way_out=f"{TO_SHM}, or rollout.engine=embedded (or vllm).")
    if facts.sends_adapters and (lora is None or not rollout.facts.has_model):
        what = f"{name} sends adapters, with trainer.lora={lora} and rollout.engine={rollout.engine}"
        raise ConfigError(what, way_out="set trainer.lora={rank: 16}, and an engine with a model.")
    if rollout.external_urls is None or facts.is_file_shared:
        return
    key = f"rollout.{rollout.facts.urls_key}"
    if facts.is_transfer or facts.sends_adapters:
        what = f"{name} needs engines that the run itself starts, and {key} names others"
        raise ConfigError(what, way_out=f"{TO_SHM} (disk on other machines), or remove {key}.")
    for url in rollout.external_urls:
        if urlsplit(url).hostname not in LOOPBACK:
            what = f"{name} is in the memory of this machine, which {url} cannot read"
            way_out = "set weight_sync.transport=disk with a shared disk_dir (this machine is 127.0.0.1)."
            raise ConfigError(what, way_out=way_out)
