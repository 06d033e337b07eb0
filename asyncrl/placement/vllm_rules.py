"""What vLLM, and the ways of weights that only it knows, cannot do on these devices. Pure: is told the devices."""

from __future__ import annotations

from collections.abc import Sequence

from asyncrl.config import RunConfig
from asyncrl.errors import ConfigError


def refuse_for_vllm(config: RunConfig, ranks: Sequence[str], engines: Sequence[str], *, is_turns: bool) -> None:
    """Raise ConfigError for devices of trainer ranks and engines on which vLLM, or the transport, would fail later."""
    if config.rollout.engine != "vllm":
        return
    on_cpu = [side for side, devices in (("trainer", ranks), ("rollout", engines)) if "cpu" in devices]
    if is_turns and "rollout" in on_cpu:
        raise ConfigError(
            f"placement.rollout={config.placement.rollout} has a vLLM on the CPU take turns with the trainer",
            rule="turns need an engine that gives its memory away, and vLLM frees nothing on the CPU when it is told to sleep",
            way_out="set placement.rollout=cpu (side by side, at buffer.max_staleness=0 too), or rollout.engine=embedded.",
        )
    if config.rollout.tensor_parallel > 1 and "rollout" in on_cpu and config.rollout.urls is None:
        raise ConfigError(
            f"rollout.tensor_parallel={config.rollout.tensor_parallel}, and the engines are on the CPU",
            rule="an engine is split over CUDA devices; on the CPU it works with rollout.threads",
            way_out="set rollout.tensor_parallel=1, or name CUDA devices in placement.rollout.",
        )
    transport = config.publisher.transport
    if transport == "nccl" and len({"cpu" in devices for devices in (ranks, engines)}) > 1:
        raise ConfigError(
            f"publisher.transport=nccl, and of trainer and engines the {on_cpu[0]} alone is on the CPU",
            rule="a broadcast is between CUDA devices (NCCL), or between processes on the CPU (gloo)",
            way_out="set publisher.transport=shm, or place both sides on devices of one kind.",
        )
    if transport == "ipc" and on_cpu:
        raise ConfigError(
            f"publisher.transport={transport}, and placement.{on_cpu[0]}={getattr(config.placement, on_cpu[0])} is the CPU here",
            rule="a CUDA IPC handle is of memory on a CUDA device",
            way_out="set publisher.transport=shm, or place both sides on CUDA devices.",
        )
    if transport == "nccl" and is_turns:
        raise ConfigError(
            "publisher.transport=nccl, and trainer and engines take turns on the same device",
            rule="NCCL cannot connect two processes on one device",
            way_out="set publisher.transport=ipc, or shm.",
        )
    if transport == "ipc" and len({*ranks, *engines}) > 1 and is_turns:
        raise ConfigError(
            f"publisher.transport=ipc, and {len({*ranks, *engines})} devices take turns",
            rule="rank 0 has the chunks on its device, and an engine sees its own devices alone",
            way_out="set publisher.transport=shm, which works on any number of devices, or use one device.",
        )
    if transport == "ipc" and not is_turns:
        raise ConfigError(
            "publisher.transport=ipc, and trainer and engines are on different devices",
            rule="a CUDA IPC handle names memory of one device for processes on that device",
            way_out="set publisher.transport=nccl, or shm; or have both sides take turns (placement.rollout=trainer, "
            "buffer.max_staleness=0).",
        )
