"""Starts the processes of a run on the nodes of a Ray cluster that is there already.

On each node an actor holds them (ray_host.py), in a bundle of one placement group that is pinned to the node:
a CPU for each process, and the CUDA devices. The controller joins the cluster as a driver: when it ends, in
whatever way, Ray ends the actors, and so the processes.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import threading
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from asyncrl.errors import ConfigError, RoomError, install_extra
from asyncrl.placement.nodes import Node, Order, with_addresses
from asyncrl.placement.on_ray.ray_host import Host, describe
from asyncrl.placement.on_ray.ray_node import LOST_S, RayNode, RayProcess
from asyncrl.waits import TimeLimit, waiting

logger = logging.getLogger("asyncrl.placement.on_ray.ray_launcher")

DESCRIBE_S = 120.0
"""For the first answer of each node: Ray starts a Python there."""
HOLD_S = 600.0
"""For what others hold to become free, or for nodes that an autoscaler starts."""
TRY_S = 1.0
REPLACE_S = 10.0
"""For the bundle of a node that takes the place of another."""
ANSWER_S = 5.0
"""For the head to take a connection."""
CLOSE_S = 10.0
PIN = 0.001
"""Of the resource that a node alone has, so that a bundle can be nowhere else."""


def import_ray() -> Any:
    """Raises ConfigError if the package is not there."""
    try:
        import ray
    except ImportError as error:
        what = "launcher=ray, and there is no package `ray`"
        raise ConfigError(what, way_out=f"{install_extra('ray')}; or set launcher=local.") from error
    return ray


class RayLauncher:
    """The Launcher of nodes.py on Ray. `address`: HOST:PORT of the head; "": what RAY_ADDRESS names, or the
    cluster that runs on this machine.
    """

    def __init__(self, address: str) -> None:
        self.address = address
        self.nodes: tuple[Node, ...] = ()
        self._resources = list[dict[str, float]]()
        self._versions = dict[str, str]()
        """Of what is the same on all nodes."""
        self._held = dict[int, RayNode]()
        self._places = dict[int, tuple[Any, int]]()
        """Of each node: its placement group, and which of its bundles."""
        self._has_asked = False
        """The autoscaler, for a node."""

    def open(self) -> None:
        """Join the cluster, and ask each of its nodes what it is."""
        ray = self._join(import_ray())
        own = ray.get_runtime_context().get_node_id()
        found = [node for node in ray.nodes() if node["Alive"]]
        found.sort(key=lambda node: (node["NodeID"] != own, node["NodeManagerAddress"]))
        self._resources = [node["Resources"] for node in found]
        self.nodes = tuple(_ask_each(ray, found, self._versions))

    def _join(self, ray: Any) -> Any:
        logging.getLogger("ray").setLevel(logging.ERROR)
        address = self.address or os.environ.get("RAY_ADDRESS", "")
        try:
            if address not in ("", "auto"):  # Ray would try for minutes
                host, _, port = address.rpartition(":")
                socket.create_connection((host, int(port)), ANSWER_S).close()
            ray.init(
                address=self.address or "auto",
                namespace="asyncrl",
                log_to_driver=False,
                configure_logging=False,
            )
            # Ray prints what befalls a node, with pages of its log, though no logs are asked for; we tell it
            ray._private.worker._worker_logs_enabled = False
        except (OSError, RuntimeError, ValueError) as error:
            where = f"at {address}" if address else "here, and RAY_ADDRESS names none"
            raise ConfigError(
                f"launcher=ray finds no Ray cluster {where}: {str(error).strip().splitlines()[0][:300]}",
                rule="a run starts no Ray; its controller runs on a node of the cluster",
                way_out="`ray start --head` here (on other nodes `ray start --address=HOST:PORT`), with the "
                "same Ray and Python everywhere; or set launcher=local.",
            ) from error
        return ray

    async def hold(self, parts: Mapping[int, Sequence[str]]) -> None:
        """One bundle for each node."""
        import ray

        wanted = {number: _bundle(devices) for number, devices in parts.items()}
        for number, bundle in wanted.items():
            self._refuse_too_little(number, bundle)
        await self._reserve(wanted)
        for number, bundle in wanted.items():
            numbers = sorted({int(name[5:]) for name in parts[number] if name.startswith("cuda:")})
            make = partial(self._make_actor, number, bundle, numbers)
            kill = partial(ray.kill, no_restart=True)
            self._held[number] = RayNode(self.nodes[number], make, kill, self._addressed)
        await asyncio.gather(*(held.open() for held in self._held.values()))

    def _refuse_too_little(self, number: int, bundle: Mapping[str, float]) -> None:
        for name, value in bundle.items():
            if (has := self._resources[number].get(name, 0.0)) < value:
                node, option = self.nodes[number], f"--num-{name.lower()}s={value:g}"
                raise ConfigError(
                    f"the run takes {value:g} {name} of the node {node.name}, which has {has:g} for Ray",
                    rule="a process takes one CPU of Ray's, and each of its CUDA devices one GPU",
                    way_out=f"place less there, or start Ray on it with `ray start ... {option}`.",
                )

    async def _reserve(self, wanted: Mapping[int, Mapping[str, float]]) -> None:
        from ray.util import placement_group, remove_placement_group

        pinned = [
            {name: value for name, value in bundle.items() if value} | {_pin(self._resources[number]): PIN}
            for number, bundle in wanted.items()
        ]
        words = ", ".join(f"{_in_words(bundle)} of {self.nodes[key].name}" for key, bundle in wanted.items())
        group = await asyncio.to_thread(placement_group, pinned, strategy="PACK")
        self._places = {number: (group, index) for index, number in enumerate(wanted)}
        with waiting(f"{words}, until Ray has them free", on="Ray"):
            for _ in range(int(HOLD_S / TRY_S)):  # short, so that a command that ends leaves no thread in Ray
                if await asyncio.to_thread(group.wait, TRY_S):
                    return
        free = await asyncio.to_thread(_free_words, self.nodes)
        self._places = {}
        await asyncio.to_thread(remove_placement_group, group)
        raise RoomError(
            "launcher",
            f"Ray did not give {words} within {HOLD_S:g} s; free are {free}",
            rule="what a run takes is reserved for it until it ends",
            way_out="end what else runs there (`ray status` says how much is taken), or place less.",
        )

    def _addressed(self, spec: str) -> str:
        return with_addresses(spec, self.nodes)

    def _make_actor(
        self, number: int, bundle: Mapping[str, float], numbers: Sequence[int]
    ) -> tuple[Node, Any]:
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        found = [node for node in ray.nodes() if node["Alive"]]
        if not any(node["NodeManagerAddress"] == self.nodes[number].address for node in found):
            self._replace(ray, number, bundle, found)
        group, index = self._places[number]
        place = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index)
        options = {"num_cpus": bundle["CPU"], "num_gpus": bundle.get("GPU", 0), "max_restarts": 0}
        actor = ray.remote(Host).options(scheduling_strategy=place, **options)
        return self.nodes[number], actor.remote(self.nodes[number].address, numbers)

    def _replace(
        self, ray: Any, number: int, bundle: Mapping[str, float], found: Sequence[Mapping[str, Any]]
    ) -> None:
        """Another node of the cluster takes the place of one that is gone: one that the run has nothing on,
        has as much, and runs the same code. Raises ConnectionError if there is none; then the autoscaler is
        asked for one, where there is an autoscaler.
        """
        from ray.autoscaler.sdk import request_resources
        from ray.util import placement_group, remove_placement_group

        gone, used = self.nodes[number], {held.node.address for held in self._held.values()}
        for node in found:
            has, is_used = node["Resources"], node["NodeManagerAddress"] in used
            if is_used or any(has.get(name, 0.0) < value for name, value in bundle.items()):
                continue
            try:
                (other,) = _ask_each(ray, [node], self._versions)
            except ConfigError as error:
                logger.warning("%s does not take the place of %s: %s", node["NodeName"], gone.name, error)
                continue
            group = placement_group([{**bundle, _pin(has): PIN}], strategy="PACK")
            if not group.wait(REPLACE_S):
                remove_placement_group(group)
                continue
            self._places[number], self._resources[number] = (group, 0), has
            self.nodes = (*self.nodes[:number], other, *self.nodes[number + 1 :])
            logger.warning("%s (%s) takes the place of %s", other.name, other.address, gone.name)
            return
        if not self._has_asked:
            self._has_asked = True
            request_resources(bundles=[dict(bundle)])
        raise ConnectionError(f"Ray has no node at {gone.address} any more, and none to take its place")

    def process(self, node: int, order: Order) -> RayProcess:
        """One that the actor of that node starts."""
        return RayProcess(self._held[node], order, is_here=node == 0)

    async def free_port(self, node: int) -> int:
        """Of that node's address."""
        port: int = await self._held[node].call("free_port")
        return port

    async def sees(self, node: int, path: Path, token: str) -> bool:
        """Asked there."""
        answer: bool = await self._held[node].call("sees", str(path), token)
        return answer

    async def aclose(self) -> None:
        """End the actors, and give back what was reserved."""
        await asyncio.gather(*(held.aclose() for held in self._held.values()))
        self._held.clear()
        groups, self._places = {group for group, _ in self._places.values()}, {}
        with contextlib.suppress(TimeoutError):
            async with TimeLimit(LOST_S):
                await asyncio.to_thread(_give_back, groups, has_asked=self._has_asked)

    def close(self) -> None:
        """Leave the cluster. A head that is gone is not waited for."""
        with contextlib.suppress(ImportError):
            import ray

            leaving = threading.Thread(target=ray.shutdown, name="leave Ray", daemon=True)
            leaving.start()
            leaving.join(CLOSE_S)


def _ask_each(ray: Any, found: Sequence[Mapping[str, Any]], own: dict[str, str]) -> list[Node]:
    """The nodes that Ray has found. Raises ConfigError for one that does not answer, or has other versions
    than `own`; those of the first, where that is empty, are put into it.
    """
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    asked = []
    for node in found:
        on = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        task = ray.remote(describe).options(num_cpus=0, scheduling_strategy=on)
        asked.append(task.remote(int(node["Resources"].get("GPU", 0))))
    ray.wait(asked, num_returns=len(asked), timeout=DESCRIBE_S)
    nodes = list[Node]()
    for node, ref in zip(found, asked, strict=True):
        name = node["NodeName"]
        try:
            machine, versions = ray.get(ref, timeout=0)
        except (ray.exceptions.RayError, ImportError) as error:
            why = str(error).strip().splitlines()[-1][:300] or f"no answer within {DESCRIBE_S:g} s"
            way_out = "install asyncrl there, in the Python that Ray runs under, or take the node out of Ray."
            raise ConfigError(f"the node {name} cannot run asyncrl: {why}", way_out=way_out) from error
        own |= versions if not own else {}
        refuse_other_versions(name, versions, own)
        nodes.append(Node(name, node["NodeManagerAddress"], machine, node["NodeID"]))
    return nodes


def _pin(resources: Mapping[str, float]) -> str:
    return next(name for name in resources if name.startswith("node:") and "__" not in name)


def _give_back(groups: Iterable[Any], *, has_asked: bool) -> None:
    """What was reserved, and what the autoscaler was asked for."""
    from ray.autoscaler.sdk import request_resources
    from ray.util import remove_placement_group

    for group in groups:
        remove_placement_group(group)
    if has_asked:
        request_resources(bundles=[])


def refuse_other_versions(name: str, versions: Mapping[str, str], own: Mapping[str, str]) -> None:
    """Raise ConfigError unless the node of this name has those of the controller's."""
    if versions != own:
        theirs, ours = (", ".join(f"{key} {value}" for key, value in one.items()) for one in (versions, own))
        what = f"the node {name} has {theirs}, the controller's has {ours}"
        way_out = "install the same versions on all nodes, in the Python that Ray runs under."
        raise ConfigError(what, rule="all nodes run the same code", way_out=way_out)


def _bundle(devices: Sequence[str]) -> dict[str, float]:
    """What Ray reserves for processes with these devices."""
    num_cuda = len({name for name in devices if name.startswith("cuda:")})
    return {"CPU": float(len(devices)), **({"GPU": float(num_cuda)} if num_cuda else {})}


def _in_words(bundle: Mapping[str, float]) -> str:
    return " and ".join(f"{value:g} {name}" for name, value in bundle.items())


def _free_words(nodes: Sequence[Node]) -> str:
    """What Ray has free on each node."""
    from ray._private.state import available_resources_per_node

    free = available_resources_per_node()
    return ", ".join(
        f"{_in_words({name: free.get(node.id, {}).get(name, 0.0) for name in ('CPU', 'GPU')})} of {node.name}"
        for node in nodes
    )
