"""Files that start a run on a cluster, with the sizes of its config."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path

from asyncrl.base.errors import ConfigError
from asyncrl.config import load_config
from asyncrl.config.device_forms import device_numbers
from asyncrl.config.placement_config import NodesConfig, PlacementConfig

FILES = {
    "slurm": "slurm.sbatch",
    "kuberay": "kuberay.yaml",
    "skypilot": "skypilot.yaml",
}
"""Templates in asyncrl/templates/content, with @names@. Without GPUs, lines that
contain @gpus@ are left out.
"""
CORES_PER_GPU = 12
GIB_PER_GPU = 125
"""Sizes of common GPU machines; `asyncrl check` computes the needs of a run."""


def cluster_file(kind: str, config: Path, overrides: Sequence[str]) -> str:
    """Return the file of a kind of cluster that runs this config. Raises ConfigError."""
    if kind not in FILES:
        raise ConfigError(
            f"there is no launch file {kind}",
            way_out=f"name one of {', '.join(FILES)}.",
        )
    placement = load_config(config, [*overrides, "launcher=ray"]).placement
    num_nodes, num_gpus = cluster_size(placement)
    memory_gib = GIB_PER_GPU * max(1, num_gpus)
    values = {
        "nodes": num_nodes,
        "workers": num_nodes - 1,
        "gpus": num_gpus,
        "cores": CORES_PER_GPU * max(1, num_gpus),
        "memory": memory_gib,
        "shm": memory_gib // 4,
        "run": shlex.join([str(config), *overrides]),
    }
    content = files("asyncrl.templates") / "content" / FILES[kind]
    lines = content.read_text(encoding="utf-8").splitlines(keepends=True)
    kept = [line for line in lines if num_gpus or "@gpus@" not in line]
    return re.sub(r"@(\w+)@", lambda name: str(values[name[1]]), "".join(kept))


def cluster_size(placement: PlacementConfig) -> tuple[int, int]:
    """Return the number of nodes, and of CUDA devices on each. Raises ConfigError.

    Sides of {nodes, gpus} share no node. Device numbers are of the first node.
    """
    num_nodes = 0
    gpus = [0]
    for key, value in placement:
        sizes = (
            (value.nodes, value.gpus) if isinstance(value, NodesConfig) else (value,)
        )
        if key in ("trainer", "rollout") and not {"auto", "all"}.isdisjoint(sizes):
            raise ConfigError(
                f"placement.{key}={value}",
                rule="a launch file asks for a number of nodes and devices",
                way_out="give numbers, such as placement.trainer=0 placement.rollout=1, or "
                "placement.trainer='{nodes: 1, gpus: 8}' placement.rollout=trainer.",
            )
        if isinstance(value, NodesConfig):
            num_nodes += int(value.nodes)
            gpus.append(int(value.gpus))
        elif key != "share":
            gpus += [number + 1 for number in device_numbers(value) or ()]
    return max(num_nodes, 1), max(gpus)
