"""Which ways of the weights exclude which engines and places, as far as it can be known without looking at the machine."""

from __future__ import annotations

from urllib.parse import urlsplit

from asyncrl.config.loop import PublisherConfig, RolloutConfig
from asyncrl.config.placement import PlacementConfig

LOOPBACK = ("127.0.0.1", "localhost", "::1")
BETWEEN_DEVICES = ("nccl", "ipc")
"""Transports from device to device. On the CPU nccl is gloo's broadcast, and ipc is not to be had."""


def transport_conflict(rollout: RolloutConfig, publisher: PublisherConfig, placement: PlacementConfig, *, has_adapters: bool) -> str | None:
    """Why weights cannot go this way to these engines, and what to write instead; None if nothing speaks against it."""
    transport = publisher.transport
    if transport == "lora" and not has_adapters:
        return "publisher.transport=lora publishes adapters, and trainer.lora is none; set trainer.lora={rank: 16}"
    if transport == "lora" and rollout.engine == "simulated":
        return "publisher.transport=lora needs an engine with weights, and rollout.engine=simulated has none"
    if transport in BETWEEN_DEVICES and (conflict := _between_devices_conflict(rollout, publisher, placement, has_adapters=has_adapters)):
        return conflict
    return None if rollout.urls is None else _foreign_conflict(rollout.urls, placement, transport)


def _between_devices_conflict(
    rollout: RolloutConfig, publisher: PublisherConfig, placement: PlacementConfig, *, has_adapters: bool
) -> str | None:
    transport = publisher.transport
    if rollout.engine != "vllm":
        return (
            f"publisher.transport={transport} is vLLM's own weight transfer, and rollout.engine={rollout.engine} has none; "
            "set publisher.transport=shm, or rollout.engine=vllm"
        )
    for side in ("trainer", "rollout"):
        if transport == "ipc" and getattr(placement, side) == "cpu":
            return (
                f"publisher.transport={transport} goes from CUDA device to CUDA device, and placement.{side} is cpu; "
                f"set publisher.transport=shm, or give placement.{side} a CUDA device"
            )
    if transport == "nccl" and publisher.rolling:
        return (
            "publisher.transport=nccl sends each version once, to all engines together, and publisher.rolling has them swap one after the "
            "other; set publisher.rolling=false, or publisher.transport=shm"
        )
    return None


def _foreign_conflict(urls: list[str], placement: PlacementConfig, transport: str) -> str | None:
    """Of servers that somebody else started."""
    if placement.rollout == "trainer":
        return (
            "placement.rollout=trainer has the engines sleep while the trainer works, and the servers of rollout.urls are somebody else's; "
            "remove rollout.urls, or set placement.rollout=auto"
        )
    if transport == "lora":
        return (
            "publisher.transport=lora needs servers that were started with room for the adapters, and how the servers of rollout.urls were "
            "started is not for the run to say; set publisher.transport=shm (adapters are merged), or remove rollout.urls"
        )
    if transport in BETWEEN_DEVICES:
        return (
            f"publisher.transport={transport} connects devices that the run has placed, and where the servers of rollout.urls are is not "
            "known; set publisher.transport=shm on one machine, or disk"
        )
    elsewhere = [url for url in urls if urlsplit(url).hostname not in LOOPBACK]
    if transport == "shm" and elsewhere:
        return (
            f"publisher.transport=shm hands weights over in the memory of this machine, which {elsewhere[0]} cannot read; "
            "set publisher.transport=disk and publisher.disk_dir to a folder that both machines share (on this very machine, write the "
            "server as http://127.0.0.1:PORT)"
        )
    return None
