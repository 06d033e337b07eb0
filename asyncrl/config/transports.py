"""Choose the transport of new weights, and refuse a transport that does not fit
engine, placement and settings.

A new transport is a line in TRANSPORTS (weight_sync_config.py), rules in
refuse_transport, and its ends in asyncrl/weights/export.py, loaded_weights.py
(embedded) and the clients of other engines.
"""

from __future__ import annotations

from collections.abc import Sequence
from urllib.parse import urlsplit

from asyncrl.base.errors import ConfigError
from asyncrl.config.engine_kinds import engines_with
from asyncrl.config.run_config import RunConfig
from asyncrl.messages.engine_api import TransportName

LOOPBACK = ("127.0.0.1", "localhost", "::1")
TO_SHM = "set weight_sync.transport=shm"


def fetches_files(config: RunConfig, *, has_eval_engine: bool) -> bool:
    facts = config.weight_sync.facts
    return facts.is_fetched or (facts.is_collective and has_eval_engine)


def choose_transport(
    config: RunConfig,
    ranks: Sequence[str],
    engines: Sequence[str],
    *,
    is_colocated: bool,
    num_nodes: int = 1,
) -> tuple[TransportName, str]:
    """Return the transport of `auto`, and the reason."""
    sync, rollout = config.weight_sync, config.rollout
    if sync.disk_dir is not None:
        return sync.file_transport, "weight_sync.disk_dir is given"
    by_file: TransportName = "shm" if num_nodes == 1 else "stream"
    if not rollout.facts.receives_transfers:
        return (
            by_file,
            f"rollout.engine={rollout.engine} takes part in no transfer between devices",
        )
    if rollout.external_urls is not None:
        return by_file, "the run does not start the engines itself"
    if "cpu" in (*ranks, *engines):
        return by_file, "a side is on the CPU"
    if is_colocated and num_nodes > 1:
        return (
            "stream",
            f"trainer and engines time-share CUDA devices of a run on {num_nodes} nodes",
        )
    if is_colocated:
        return "ipc", "trainer and engines time-share CUDA devices"
    if shared := sorted({*ranks} & {*engines}):
        if num_nodes == 1 and _share_one(ranks, engines):
            return "ipc", f"both sides are on {shared[0]} at once"
        return (
            by_file,
            f"both sides are on {', '.join(shared)} at once, where NCCL connects no two processes",
        )
    if shared := _used_twice(engines):
        return (
            by_file,
            f"several engines are on {', '.join(shared)}, where NCCL connects no two processes",
        )
    return "nccl", "trainer and engines are on separate CUDA devices"


def _share_one(ranks: Sequence[str], engines: Sequence[str]) -> bool:
    return len({*ranks, *engines}) == 1


def _used_twice(devices: Sequence[str]) -> list[str]:
    return sorted(
        {device for device in devices if device != "cpu" and devices.count(device) > 1}
    )


def refuse_transport(
    config: RunConfig,
    ranks: Sequence[str],
    engines: Sequence[str],
    *,
    is_colocated: bool,
    num_nodes: int = 1,
) -> None:
    """Raise ConfigError if this transport cannot serve these engines. `is_colocated`:
    colocated.
    """
    sync = config.weight_sync
    facts = sync.facts
    name = f"weight_sync.transport={sync.file_transport if sync.transport == 'auto' else sync.transport}"
    how = "colocated" if is_colocated else "on separate devices"
    places = f"{name} from {', '.join(ranks)} to {', '.join(engines)}, {how}"
    # NCCL refuses two processes on one device. A mixed pair of CPU and CUDA has no
    # common backend at all.
    is_apart = not _used_twice([*ranks, *engines]) and ("cpu" in ranks) == (
        "cpu" in engines
    )
    _refuse_engine(config, name)
    if num_nodes > 1 and facts.bound and sync.transport != "auto":
        raise ConfigError(
            f"{name}, and the run is on {num_nodes} nodes: {facts.bound}",
            way_out="set weight_sync.transport=stream, or disk with weight_sync.disk_dir shared by all "
            "nodes.",
        )
    if facts.is_collective and (is_colocated or not is_apart):
        raise ConfigError(
            places,
            rule="a broadcast is between processes with a CUDA device each (NCCL), or all on the CPU (gloo)",
            way_out=f"{TO_SHM}. When colocated, set weight_sync.transport=ipc.",
        )
    if facts.shares_device and not (is_colocated or _share_one(ranks, engines)):
        raise ConfigError(
            places,
            rule="engines that work at the same time as the trainer open memory of its only device",
            way_out=f"{TO_SHM}, or placement.rollout=trainer.",
        )


def _refuse_engine(config: RunConfig, name: str) -> None:
    facts = config.weight_sync.facts
    rollout = config.rollout
    if facts.is_transfer and not rollout.facts.receives_transfers:
        raise ConfigError(
            f"{name} goes from device to device, and rollout.engine={rollout.engine} has no weights",
            way_out=f"{TO_SHM}, or rollout.engine={engines_with('receives_transfers')}.",
        )
    if rollout.external_urls is None or facts.is_file_shared:
        return
    key = f"rollout.{rollout.facts.urls_key}"
    if facts.is_transfer:
        raise ConfigError(
            f"{name} needs engines that the run itself starts, and {key} names others",
            way_out=f"{TO_SHM} (disk on other machines), or remove {key}.",
        )
    for url in rollout.external_urls:
        if urlsplit(url).hostname not in LOOPBACK:
            raise ConfigError(
                f"{name} is in the memory of this machine, which {url} cannot read",
                way_out="set weight_sync.transport=disk and weight_sync.disk_dir=FOLDER, a folder that both "
                "machines see (this machine is 127.0.0.1).",
            )
