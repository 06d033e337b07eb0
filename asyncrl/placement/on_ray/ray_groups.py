"""What a run reserves on a Ray cluster, and what it waits for there: bundles of placement groups. What waits
to be placed is what Ray's autoscaler starts nodes for.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from asyncrl.placement.nodes import Node

TRY_S = 1.0
REPORT_S = 10.0
"""For the first word of Ray's monitor, of a cluster that has just been started."""
AUTOSCALER_STATUS = "__autoscaling_status"
"""Where Ray's monitor tells of it: DEBUG_AUTOSCALING_STATUS of Ray's own code, which `ray status` reads."""
MEBIBYTE = 2.0**20
Found = Sequence[Mapping[str, Any]]
"""Nodes, as Ray lists them."""
PIN = 0.001
"""Of the resource that a node alone has, so that a bundle can be nowhere else."""


class Wanted:
    """Nodes that the run waits for: a placement group with a bundle on each of them, and one on each node
    that it shall not be (`but`), so that Ray looks for others. What waits to be placed is also what Ray's
    autoscaler starts nodes for, and it is gone with the run, however that ends.
    """

    def __init__(self, bundles: Sequence[Mapping[str, float]], but: Found) -> None:
        from ray.util import placement_group

        self.but = {node["NodeID"] for node in but}
        # the autoscaler deals out the bundles of most kinds and numbers first: those that fit one node alone
        elsewhere = [{pin_of(node["Resources"]): PIN, "memory": MEBIBYTE} for node in but]
        self.group = placement_group([*map(dict, bundles), *elsewhere], strategy="STRICT_SPREAD")

    def wait(self, ray: Any, wait_s: float, tell: Callable[[Found], object] = len) -> bool:
        """Whether they are there, within so many seconds, or until they cannot be any more: an autoscaler
        ends nodes that nothing runs on, and without one of `but` the group is never whole. `tell` is called
        with the nodes that there are meanwhile.
        """
        until_s = time.monotonic() + wait_s
        while not self.group.wait(TRY_S):
            tell(found := alive(ray))
            if time.monotonic() > until_s or not self.can_be(found):
                return False
        return True

    def can_be(self, found: Found) -> bool:
        """Whether all that it goes around are still there; otherwise it is to be asked for anew."""
        return self.but <= {node["NodeID"] for node in found}

    def node_id(self) -> str:
        """Of the first of them, once the group is there."""
        from ray.util import placement_group_table

        found: str = placement_group_table(self.group)["bundles_to_node_id"][0]
        return found

    def give_back(self) -> None:
        """They are not wanted any more."""
        give_back_all([self.group])


def has_autoscaler(ray: Any) -> bool:
    """Whether this cluster has one. Ray's monitor tells of which type each node is; where it starts none,
    each is a type of its own (node_ID), and a cluster without a monitor tells nothing. Waits for what it
    tells first.
    """
    for _ in range(int(REPORT_S / TRY_S)):
        if types := _node_types(ray):
            return any(not name.startswith("node_") for name in types)
        time.sleep(TRY_S)
    return False


def _node_types(ray: Any) -> set[str]:
    from ray.autoscaler.v2.sdk import get_cluster_status
    from ray.autoscaler.v2.utils import is_autoscaler_v2
    from ray.experimental.internal_kv import _internal_kv_get

    if is_autoscaler_v2():
        told = get_cluster_status(ray.get_runtime_context().gcs_address)
        is_told = bool(told.stats.autoscaler_version)
        return (
            {node.ray_node_type_name for node in (*told.active_nodes, *told.idle_nodes)} if is_told else set()
        )
    report = json.loads(_internal_kv_get(AUTOSCALER_STATUS) or "{}").get("autoscaler_report") or {}
    return set(report.get("active_nodes", ()))


def alive(ray: Any) -> list[dict[str, Any]]:
    return [node for node in ray.nodes() if node["Alive"]]


def pin_of(resources: Mapping[str, float]) -> str:
    return next(name for name in resources if name.startswith("node:") and "__" not in name)


def give_back_all(groups: Iterable[Any]) -> None:
    """What was reserved, or waited for."""
    from ray.util import remove_placement_group

    for group in groups:
        remove_placement_group(group)


def bundle_of(devices: Sequence[str]) -> dict[str, float]:
    """What Ray reserves for processes with these devices."""
    num_cuda = len({name for name in devices if name.startswith("cuda:")})
    return {"CPU": float(len(devices)), **({"GPU": float(num_cuda)} if num_cuda else {})}


def in_words(bundle: Mapping[str, float]) -> str:
    return " and ".join(f"{value:g} {name}" for name, value in bundle.items())


def free_words(nodes: Sequence[Node]) -> str:
    """What Ray has free on each node."""
    from ray._private.state import available_resources_per_node

    free = available_resources_per_node()
    return ", ".join(
        f"{in_words({name: free.get(node.id, {}).get(name, 0.0) for name in ('CPU', 'GPU')})} of {node.name}"
        for node in nodes
    )
