"""Section `weight_sync`, and facts about each transport."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar, Literal, NamedTuple

from pydantic import PositiveFloat

from asyncrl.config.fields import FrozenConfig
from asyncrl.messages.engine_api import Interrupt, TransportName


class TransportCapabilities(NamedTuple):
    """Facts about a transport. By default, a push is one file in shared memory."""

    is_transfer: bool = False
    is_collective: bool = False
    """The trainer holds the only newest export and sends the weights itself."""
    shares_device: bool = False
    """Engines open the trainer's device memory: with the whole version, or chunks when
    colocated.
    """
    is_file_shared: bool = False
    """Exports are files in weight_sync.disk_dir."""
    is_fetched: bool = False
    bound: str = ""
    """Why engines cannot be on other nodes, or ''."""

    def holds_exports(self, *, is_colocated: bool) -> bool:
        """Return whether the trainer's device holds the newest export, and no older
        one.
        """
        return self.is_collective or (self.shares_device and not is_colocated)


TRANSPORTS: dict[TransportName, TransportCapabilities] = {
    "shm": TransportCapabilities(
        bound="its file is in the shared memory of one machine"
    ),
    "disk": TransportCapabilities(is_file_shared=True),
    "stream": TransportCapabilities(is_fetched=True),
    "nccl": TransportCapabilities(is_transfer=True, is_collective=True),
    "ipc": TransportCapabilities(
        is_transfer=True,
        shares_device=True,
        bound="its handles name memory of one machine's devices",
    ),
}


class WeightSyncConfig(FrozenConfig):
    """Pushes of new weights to the engines."""

    free_keys: ClassVar = ("transport", "timeout_s", "disk_dir", "canary_limit")

    transport: Literal["auto"] | TransportName = "auto"
    """auto = disk if disk_dir is given; nccl if every side has CUDA devices of its own;
    ipc if they are colocated on one machine or work at once on one device; else shm, or
    stream on several nodes. shm: a safetensors file in shared memory. stream: the file,
    downloaded by each node. disk: the file in disk_dir. nccl: one broadcast to all
    engines. ipc: memory of shared devices, in chunks when colocated. With trainer.lora
    each of them pushes only the adapters.
    """
    disk_dir: str | None = None
    """Folder for transport=disk, under one path for trainer and engines."""
    interrupt: Literal["auto"] | Interrupt = "auto"
    """Running requests during a swap: abort and resume them from their tokens, keep
    them with a recomputed KV cache, keep them with the old KV cache, or wait until they
    finish. auto = abort, the fastest.
    """
    canary_limit: Literal["auto"] | PositiveFloat | None = "auto"
    """Maximum difference in nats between vLLM's logprobs of a fixed text and the
    trainer's after each push (auto = three times the model's own rounding noise,
    at least 0.001; none = not compared).
    """
    timeout_s: PositiveFloat = 600.0
    """Timeout for each phase of a push or a handover, in seconds. On expiry an engine
    is restarted; a late export or handover ends the run.
    """

    @property
    def settled(self) -> TransportName:
        assert self.transport != "auto", "resolve_auto() precedes every weight sync"
        return self.transport

    @property
    def facts(self) -> TransportCapabilities:
        """Return this transport's facts; for auto the common ones."""
        return TRANSPORTS[
            self.file_transport if self.transport == "auto" else self.transport
        ]

    @property
    def file_transport(self) -> TransportName:
        return "shm" if self.disk_dir is None else "disk"

    def conflicts(self) -> Iterator[str]:
        # Both directions: disk without a folder has no place, and a folder with another
        # transport would be ignored.
        if self.facts.is_file_shared != (self.disk_dir is not None):
            yield (
                f".transport={self.transport} with .disk_dir={self.disk_dir}: only disk writes there, to a "
                "folder that trainer and engines share; set .transport=auto, which is disk with a .disk_dir"
            )
