"""What each weight_sync.transport needs of engine, placement and settings, and its words in a plan.

The implementation of each is a file of asyncrl/weights/: a new transport is a class here, a class there, and
a line in both tables.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from asyncrl.config.run_config import RunConfig

LOOPBACK = ("127.0.0.1", "localhost", "::1")
Refusal = tuple[str, str, str]
"""(what is wrong, the rule, the way out)."""


@dataclass(frozen=True, slots=True)
class DevicesInUse:
    """Devices of the trainer's ranks and of the engines; `is_turns`: they take turns on the same ones."""

    ranks: Sequence[str]
    engines: Sequence[str]
    is_turns: bool


class Way:
    """transport: shm, and what all have in common: all weights as one file that engines of this machine read
    while they go on with the old ones.
    """

    name: ClassVar[str] = "shm"
    sends_adapters = False
    is_one_kept = False
    """The trainer holds its newest export alone, and sends it itself."""
    shares_device = False
    """In turns, vLLM opens the chunks in the trainer's device memory."""
    is_file_shared = False
    """Exports lie in weight_sync.disk_dir, in no memory of this machine."""

    def conflict(self, config: RunConfig) -> str | None:
        """Why weights cannot go this way to these engines, and what to write instead; None if nothing speaks
        against it.
        """
        urls = config.rollout.urls
        if urls is not None and config.placement.rollout == "trainer":
            return (
                "placement.rollout=trainer has the engines sleep while the trainer works, which those of "
                "rollout.urls cannot; remove rollout.urls, or set placement.rollout=auto"
            )
        return None if urls is None else self._conflict_with_urls(urls)

    def _conflict_with_urls(self, urls: list[str]) -> str | None:
        elsewhere = [url for url in urls if urlsplit(url).hostname not in LOOPBACK]
        if not elsewhere:
            return None
        return (
            f"weight_sync.transport=shm is in the memory of this machine, which {elsewhere[0]} cannot read; "
            "set weight_sync.transport=disk and weight_sync.disk_dir to a folder that both machines share "
            "(on this very machine, write the server as http://127.0.0.1:PORT)"
        )

    def refuse(self, config: RunConfig, used: DevicesInUse) -> Refusal | None:
        """Why it cannot work between these devices."""
        return None

    def words(self, *, is_on_cuda: bool, disk_dir: str | None) -> str:
        """How weights go beside generation, and why."""
        what = "the adapters alone" if self.sends_adapters else "all weights"
        return (
            f"{what} go as one file in shared memory, because engines read it while they go on with the "
            f"old ones"
        )


class Disk(Way):
    """transport: disk. The same file in a folder that engines on other machines can read."""

    name = "disk"
    is_file_shared = True

    def _conflict_with_urls(self, urls: list[str]) -> str | None:
        return None

    def words(self, *, is_on_cuda: bool, disk_dir: str | None) -> str:
        """Where the file lies."""
        return (
            f"all weights go as one file in {disk_dir}, because engines on other machines can read it there"
        )


class Placed(Way):
    """What transports need whose engines the run itself starts and places."""

    def _conflict_with_urls(self, urls: list[str]) -> str | None:
        return (
            f"weight_sync.transport={self.name} needs engines that the run itself starts and places, and "
            "rollout.urls names others; set weight_sync.transport=shm (disk on other machines), or remove it"
        )


class Lora(Placed):
    """transport: lora. The adapters alone, as a file like that of shm."""

    name = "lora"
    sends_adapters = True

    def conflict(self, config: RunConfig) -> str | None:
        """There must be adapters, and an engine with weights under them."""
        if config.trainer.lora is None or config.rollout.engine == "simulated":
            return (
                "weight_sync.transport=lora publishes adapters for the weights of an engine, with "
                f"trainer.lora={config.trainer.lora} and rollout.engine={config.rollout.engine}; set "
                "trainer.lora={rank: 16}, and an engine with a model"
            )
        return super().conflict(config)

    def refuse(self, config: RunConfig, used: DevicesInUse) -> Refusal | None:
        """An engine that slept has no weights under the adapters."""
        if not used.is_turns:
            return None
        return (
            "weight_sync.transport=lora, and trainer and engines take turns on the same devices",
            "an engine that sleeps has freed its weights, so adapters have no base weights "
            "that they could be added to",
            "set weight_sync.transport=shm: the weights with the adapters merged into them, chunk by chunk",
        )


class BetweenDevices(Placed):
    """What both that go from device to device need: vLLM."""

    def conflict(self, config: RunConfig) -> str | None:
        """The engine must be vLLM's."""
        if config.rollout.engine != "vllm":
            return (
                f"weight_sync.transport={self.name} is vLLM's own weight transfer, and "
                f"rollout.engine={config.rollout.engine} has none; set weight_sync.transport=shm, or "
                "rollout.engine=vllm"
            )
        return super().conflict(config)


class Nccl(BetweenDevices):
    """transport: nccl. One broadcast to all engines; on the CPU it is gloo's."""

    name = "nccl"
    is_one_kept = True

    def conflict(self, config: RunConfig) -> str | None:
        """All engines receive at once."""
        if config.weight_sync.rolling:
            return (
                "weight_sync.transport=nccl sends each version once, to all engines together, and "
                "weight_sync.rolling=true swaps one after the other; set rolling=false, or transport=shm"
            )
        return super().conflict(config)

    def refuse(self, config: RunConfig, used: DevicesInUse) -> Refusal | None:
        """Devices of one kind, and no two processes on one of them."""
        if ("cpu" in used.ranks) != ("cpu" in used.engines):
            side = "trainer" if "cpu" in used.ranks else "rollout"
            return (
                f"weight_sync.transport=nccl, and of trainer and engines the {side} alone is on the CPU",
                "a broadcast is between CUDA devices (NCCL), or between processes on the CPU (gloo)",
                "set weight_sync.transport=shm, or place both sides on devices of one kind",
            )
        if used.is_turns:
            return (
                "weight_sync.transport=nccl, and trainer and engines take turns on the same device",
                "NCCL cannot connect two processes on one device",
                "set weight_sync.transport=ipc, or shm",
            )
        return None

    def words(self, *, is_on_cuda: bool, disk_dir: str | None) -> str:
        """By which library."""
        return (
            f"all weights go by {'NCCL' if is_on_cuda else 'gloo'}, in one broadcast from a copy that the "
            "trainer holds on its device, to all engines at once"
        )


class Ipc(BetweenDevices):
    """transport: ipc. In turns, chunks in memory of the one CUDA device that both sides use."""

    name = "ipc"
    shares_device = True

    def refuse(self, config: RunConfig, used: DevicesInUse) -> Refusal | None:
        """One CUDA device, in turns."""
        devices = {*used.ranks, *used.engines}
        if used.is_turns and len(devices) == 1 and "cpu" not in devices:
            return None
        how = "in turns" if used.is_turns else "apart"
        return (
            f"weight_sync.transport=ipc, and trainer and engines work {how} on {', '.join(sorted(devices))} "
            f"(placement.trainer={config.placement.trainer}, placement.rollout={config.placement.rollout})",
            "a CUDA IPC handle names memory of one CUDA device, for processes that take turns on it",
            "set weight_sync.transport=shm, which works on any devices, or have both sides take turns on one "
            "CUDA device (placement.rollout=trainer, buffer.max_staleness=0)",
        )


WAYS: dict[str, Way] = {way.name: way for way in (Way(), Disk(), Lora(), Nccl(), Ipc())}
