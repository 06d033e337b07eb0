"""Section `weight_sync`; what each transport needs of engine, placement and settings.

A new transport is a line in TRANSPORTS, rules in refuse_transport, and its ends in
asyncrl/weights/transport.py, loaded_weights.py (embedded) and asyncrl/engines/vllm_weights.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal, Self
from urllib.parse import urlsplit

from pydantic import Field, model_validator

from asyncrl.base.errors import ConfigError
from asyncrl.config.fields import FrozenConfig
from asyncrl.messages.engine_api import Interrupt, TransportName

if TYPE_CHECKING:
    from asyncrl.config.run_config import RunConfig

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
    """When colocated, engines open the chunks in the trainer's device memory."""
    is_file_shared: bool = False
    """Exports are files in weight_sync.disk_dir."""
    is_fetched: bool = False
    bound: str = ""
    """Why engines cannot be on other nodes, or ''."""


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

    transport: Literal["auto"] | TransportName = "auto"
    """auto = on CUDA devices nccl (separate devices) or ipc (colocated); elsewhere disk if disk_dir is
    given, else shm; on several nodes disk or stream. shm: a safetensors file in shared memory. stream: the
    file, downloaded by each node. disk: the file in disk_dir. lora: only the adapters. nccl: one broadcast
    to all engines. ipc: chunks in memory of shared devices."""
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
                f"transport={self.transport} with disk_dir={self.disk_dir}: disk writes each version there, "
                "and no other does; give a folder that trainer and engines share, or none"
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
    if num_nodes > 1:
        return "stream", f"the run is on {num_nodes} nodes, which share no memory"
    if not rollout.facts.receives_transfers:
        return "shm", f"rollout.engine={rollout.engine} takes part in no transfer between devices"
    if rollout.urls is not None:
        return "shm", "the run does not start the servers of rollout.urls"
    if "cpu" in (*ranks, *engines):
        return "shm", "a side is on the CPU"
    if is_turns:
        return "ipc", "trainer and engines take turns on CUDA devices"
    if shared := sorted({*ranks} & {*engines}):
        return "shm", f"both sides are on {', '.join(shared)} at once, where NCCL connects no two processes"
    if shared := _used_twice(engines):
        return "shm", f"several engines are on {', '.join(shared)}, where NCCL connects no two processes"
    return "nccl", "trainer and engines are on separate CUDA devices"


def _used_twice(devices: Sequence[str]) -> list[str]:
    return sorted({device for device in devices if device != "cpu" and devices.count(device) > 1})


def refuse_transport(
    config: RunConfig, ranks: Sequence[str], engines: Sequence[str], *, is_turns: bool, num_nodes: int = 1
) -> None:
    """Raise ConfigError if this transport cannot serve these engines. `is_turns`: colocated."""
    facts, sync = config.weight_sync.facts, config.weight_sync
    name = f"weight_sync.transport={sync.file_transport if sync.transport == 'auto' else sync.transport}"
    _refuse_engine(config, name)
    if num_nodes > 1 and facts.bound and sync.transport != "auto":
        raise ConfigError(
            f"{name}, and the run is on {num_nodes} nodes: {facts.bound}",
            way_out="set weight_sync.transport=stream, or disk with weight_sync.disk_dir on a file system of "
            "all nodes.",
        )
    devices, way_out = {*ranks, *engines}, f"{TO_SHM}, which works on any devices."
    if is_turns and facts.sends_adapters:
        rule = "an engine that sleeps has freed the base weights that adapters are added to"
        raise ConfigError(f"{name}, and trainer and engines take turns", rule=rule, way_out=way_out)
    is_apart = not _used_twice([*ranks, *engines]) and ("cpu" in ranks) == ("cpu" in engines)
    if facts.is_collective and (is_turns or not is_apart):
        what = f"{name} from {', '.join(ranks)} to {', '.join(engines)}"
        rule = "a broadcast is between processes with a CUDA device each (NCCL), or all on the CPU (gloo)"
        raise ConfigError(what, rule=rule, way_out=f"{way_out} In turns: weight_sync.transport=ipc.")
    if facts.shares_device and (not is_turns or "cpu" in devices):
        raise ConfigError(
            f"{name} on {', '.join(sorted(devices))}, {'in turns' if is_turns else 'apart'}",
            rule="a CUDA IPC handle names memory of a CUDA device, on which both sides take turns",
            way_out=f"{way_out} Or take turns (placement.rollout=trainer, buffer.max_staleness=0).",
        )


def _refuse_engine(config: RunConfig, name: str) -> None:
    facts, rollout, lora = config.weight_sync.facts, config.rollout, config.trainer.lora
    if facts.is_transfer and not rollout.facts.receives_transfers:
        what = f"{name} goes from device to device, and rollout.engine={rollout.engine} has no weights"
        raise ConfigError(what, way_out=f"{TO_SHM}, or rollout.engine=embedded (or vllm).")
    if facts.sends_adapters and (lora is None or not rollout.facts.has_model):
        given = f"trainer.lora={lora}, rollout.engine={rollout.engine}"
        what = f"{name} sends adapters for the weights of an engine, with {given}"
        raise ConfigError(what, way_out="set trainer.lora={rank: 16}, and an engine with a model.")
    if rollout.urls is None or facts.is_file_shared:
        return
    if facts.is_transfer or facts.sends_adapters:
        what = f"{name} needs engines that the run itself starts, and rollout.urls names others"
        raise ConfigError(what, way_out=f"{TO_SHM} (disk on other machines), or remove rollout.urls.")
    elsewhere = [url for url in rollout.urls if urlsplit(url).hostname not in LOOPBACK]
    if elsewhere:
        raise ConfigError(
            f"{name} is in the memory of this machine, which {elsewhere[0]} cannot read",
            way_out="set weight_sync.transport=disk and weight_sync.disk_dir to a folder that both machines "
            "share (on this very machine, write the server as http://127.0.0.1:PORT).",
        )


def transport_words(config: RunConfig, *, is_on_cuda: bool) -> str:
    sync = config.weight_sync
    if sync.facts.is_collective:
        library = "NCCL" if is_on_cuda else "gloo"
        return f"all weights go by {library}, in one broadcast to all engines, from a copy of the trainer's"
    what = "the adapters alone" if sync.facts.sends_adapters else "all weights"
    if sync.facts.is_file_shared:
        return (
            f"{what} go as one file in {sync.disk_dir}, because engines on other machines can read it there"
        )
    if sync.facts.is_fetched and not sync.facts.sends_adapters:
        return f"{what} go as one file, which each node fetches once into its shared memory"
    return (
        f"{what} go as one file in shared memory, because engines read it while they go on with the old ones"
    )
