"""Reservations of a run on a Ray cluster."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from asyncrl.launch.nodes import Node

TRY_S = 1.0
PIN = 0.001
"""Amount of a node's unique resource, which pins a bundle there."""


def alive(ray: Any) -> list[dict[str, Any]]:
    return [node for node in ray.nodes() if node["Alive"]]


def pin_of(resources: Mapping[str, float]) -> str:
    return next(name for name in resources if name.startswith("node:") and "__" not in name)


def bundle_of(devices: Sequence[str]) -> dict[str, float]:
    num_cuda = len({name for name in devices if name.startswith("cuda:")})
    return {"CPU": float(len(devices)), **({"GPU": float(num_cuda)} if num_cuda else {})}


def in_words(bundle: Mapping[str, float]) -> str:
    return " and ".join(f"{value:g} {name}" for name, value in bundle.items())


def free_words(nodes: Sequence[Node]) -> str:
    from ray._private.state import available_resources_per_node

    free = available_resources_per_node()
    return ", ".join(
        f"{in_words({name: free.get(node.id, {}).get(name, 0.0) for name in ('CPU', 'GPU')})} of {node.name}"
        for node in nodes
    )
