"""What each weight_sync.transport needs of engine, placement and settings, and its words in a plan.

A new transport is a line in TRANSPORTS, with its rules in refuse_transport. The trainer's end of each is a
class in asyncrl/weights/transport.py; the engine's end is in the embedded loaded_weights.py, and for
vLLM in asyncrl/engines/vllm_weights.py (load_of).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from asyncrl.errors import ConfigError
from asyncrl.messages.base import TransportName

if TYPE_CHECKING:
    from asyncrl.config.run_config import RunConfig

LOOPBACK = ("127.0.0.1", "localhost", "::1")
TO_SHM = "set weight_sync.transport=shm"


@dataclass(frozen=True, slots=True)
class TransportFacts:
    """By default all weights go as one file in shared memory, which engines read while they go on with the
    old ones.
    """

    sends_adapters: bool = False
    is_transfer: bool = False
    """Tensors go from device to device, by vLLM's own weight transfer."""
    is_one_kept: bool = False
    """The trainer holds its newest export alone, and sends it itself."""
    shares_device: bool = False
    """In turns, vLLM opens the chunks in the trainer's device memory."""
    is_file_shared: bool = False
    """Exports lie in weight_sync.disk_dir, in no memory of this machine."""


TRANSPORTS: dict[TransportName, TransportFacts] = {
    "shm": TransportFacts(),
    "disk": TransportFacts(is_file_shared=True),
    "lora": TransportFacts(sends_adapters=True),
    "nccl": TransportFacts(is_transfer=True, is_one_kept=True),
    "ipc": TransportFacts(is_transfer=True, shares_device=True),
}


def refuse_transport(
    config: RunConfig, ranks: Sequence[str], engines: Sequence[str], *, is_turns: bool
) -> None:
    """Raise ConfigError, with what to write instead, if weights cannot go this way to these engines. `ranks`
    and `engines` are devices; `is_turns`: both sides take turns on the same ones.
    """
    facts, name = config.weight_sync.facts, f"weight_sync.transport={config.weight_sync.transport}"
    _refuse_engine(config, name)
    devices, way_out = {*ranks, *engines}, f"{TO_SHM}, which works on any devices."
    if is_turns and facts.sends_adapters:
        rule = "an engine that sleeps has freed the base weights that adapters are added to"
        raise ConfigError(f"{name}, and trainer and engines take turns", rule=rule, way_out=way_out)
    if facts.is_one_kept:
        if config.weight_sync.rolling:
            what = f"{name} sends each version once, to all engines together, and weight_sync.rolling=true"
            raise ConfigError(what, way_out=f"set weight_sync.rolling=false, or {TO_SHM}.")
        if is_turns or ("cpu" in ranks) != ("cpu" in engines):
            what = f"{name} from {', '.join(ranks)} to {', '.join(engines)}"
            rule = "a broadcast is between processes with a CUDA device each (NCCL), or all on the CPU (gloo)"
            raise ConfigError(what, rule=rule, way_out=f"{way_out} In turns: weight_sync.transport=ipc.")
    if facts.shares_device and (not is_turns or len(devices) > 1 or "cpu" in devices):
        raise ConfigError(
            f"{name} on {', '.join(sorted(devices))}, {'in turns' if is_turns else 'apart'}",
            rule="a CUDA IPC handle names memory of one CUDA device, on which both sides take turns",
            way_out=f"{way_out} Or have both on one (placement.rollout=trainer, buffer.max_staleness=0).",
        )


def _refuse_engine(config: RunConfig, name: str) -> None:
    facts, rollout, lora = config.weight_sync.facts, config.rollout, config.trainer.lora
    if facts.is_transfer and not rollout.facts.receives_transfers:
        what = f"{name} is vLLM's own weight transfer, and rollout.engine={rollout.engine} has none"
        raise ConfigError(what, way_out=f"{TO_SHM}, or rollout.engine=vllm.")
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
    """How weights go beside generation, and why."""
    sync = config.weight_sync
    if sync.facts.is_one_kept:
        library = "NCCL" if is_on_cuda else "gloo"
        return f"all weights go by {library}, in one broadcast to all engines, from a copy of the trainer's"
    what = "the adapters alone" if sync.facts.sends_adapters else "all weights"
    if sync.facts.is_file_shared:
        return (
            f"{what} go as one file in {sync.disk_dir}, because engines on other machines can read it there"
        )
    return (
        f"{what} go as one file in shared memory, because engines read it while they go on with the old ones"
    )
