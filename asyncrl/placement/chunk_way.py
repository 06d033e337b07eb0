"""Where the trainer puts chunks of weights for engines that it takes turns with, and why. Pure: is told a placement."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from asyncrl.config import RunConfig
from asyncrl.placement.devices import Placement

NO_NCCL = "NCCL cannot connect two processes on one device"


@dataclass(frozen=True, slots=True)
class ChunkWay:
    """`place` is TrainerSpec.chunks; `device`: whose memory a chunk takes; `how` and `why` in words."""

    place: Literal["memory", "file"]
    device: str
    how: str
    why: str


def chunk_way(config: RunConfig, placement: Placement) -> ChunkWay:
    """Memory that both sides have open, where engines can open it, else a file. Apart nobody asks for chunks."""
    is_ipc = config.rollout.engine == "vllm" and config.publisher.transport == "ipc"
    if placement.mode == "apart" or (config.rollout.engine != "embedded" and not is_ipc):
        why = f"a {config.rollout.engine} engine reads files" if config.rollout.engine != "embedded" else "engines read whole files"
        return ChunkWay("file", "cpu", "through shared memory", f"{NO_NCCL}, and {why}" if placement.is_on_cuda else why)
    if not placement.is_on_cuda:
        return ChunkWay("memory", "cpu", "through shared memory", "both sides have it mapped")
    devices = dict.fromkeys((*placement.trainer, *placement.rollout))
    if len(devices) > 1:
        why = f"rank 0 gathers them on {placement.trainer[0]}, and an engine sees its own of the {len(devices)} devices alone"
        return ChunkWay("file", "cpu", "through shared memory", why)
    return ChunkWay("memory", placement.trainer[0], "by CUDA IPC", f"both sides are on {placement.shared} ({NO_NCCL})")
