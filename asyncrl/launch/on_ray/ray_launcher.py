"""Start the processes of a run on the nodes of an existing Ray cluster.

On each node an actor (ray_host.py) holds them, in a bundle of one placement group pinned to the node: a CPU
per process, and the CUDA devices. The controller joins as a driver: when it ends in any way, Ray ends the
actors, and so the processes.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from asyncrl.base.errors import ConfigError, RoomError, install_extra
from asyncrl.base.waits import waiting
from asyncrl.launch.nodes import Needs, Node, Order, misfit, with_addresses
from asyncrl.launch.on_ray.ray_groups import PIN, TRY_S, alive, bundle_of, free_words, in_words, pin_of
from asyncrl.launch.on_ray.ray_host import DESCRIBE_S, RUNTIME_ENV, Host, ask_each
from asyncrl.launch.on_ray.ray_node import LOST_S, RayNode, RayProcess
from asyncrl.messages.engine_api import FileRequest

logger = logging.getLogger("asyncrl.launch.on_ray.ray_launcher")

HOLD_S = 600.0
"""Limit on waiting for resources that others hold."""
ANSWER_S = 5.0
"""Limit for the head to accept a connection."""
CLOSE_S = 10.0


def import_ray() -> Any:
    """Raises ConfigError if the package is missing."""
    try:
        import ray
    except ImportError as error:
        what = "launcher=ray, and there is no package `ray`"
        raise ConfigError(what, way_out=f"{install_extra('ray')}; or set launcher=local.") from error
    return ray


class RayLauncher:
    """Launcher on Ray. `address`: HOST:PORT of the head; "": RAY_ADDRESS, or the cluster on this machine."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.nodes: tuple[Node, ...] = ()
        self.say: Callable[[str], None] = print
        self._resources = list[dict[str, float]]()
        self._versions = dict[str, str]()
        """Versions of packages that all nodes share, and of engine packages."""
        self._held = dict[int, RayNode]()
        self._group: Any = None
        self._bundles = dict[int, int]()
        self._needs: Mapping[int, Needs] = {}
        self._unfit = set[str]()
        self._loop: asyncio.AbstractEventLoop | None = None

    def open(self) -> None:
        self._look(self._join(import_ray()))

    def _look(self, ray: Any) -> None:
        own = ray.get_runtime_context().get_node_id()
        found = [node for node in alive(ray) if node["NodeID"] not in self._unfit]
        found.sort(key=lambda node: (node["NodeID"] != own, node["NodeManagerAddress"]))
        fit = list[tuple[Node, dict[str, float]]]()
        for node, told in zip(found, ask_each(ray, found, self._versions, Needs()), strict=True):
            if isinstance(told, Node):
                fit.append((told, node["Resources"]))
            elif node["NodeID"] == own:
                raise told
            else:
                self._pass_over(node, told)
        self.nodes, self._resources = tuple(node for node, _ in fit), [has for _, has in fit]

    def _pass_over(self, node: Mapping[str, Any], why: ConfigError) -> None:
        self._unfit.add(node["NodeID"])
        self._tell(f"the node {node['NodeName']} is passed over, nothing of the run can be there: {why}")

    def _tell(self, text: str) -> None:
        """Warn, from any thread."""
        logger.warning("%s", text)
        if self._loop is None:
            self.say(text)
        else:
            self._loop.call_soon_threadsafe(self.say, text)

    def _join(self, ray: Any) -> Any:
        logging.getLogger("ray").setLevel(logging.ERROR)
        address = self.address or os.environ.get("RAY_ADDRESS", "")
        try:
            if address not in ("", "auto"):  # Ray would retry for minutes
                host, _, port = address.rpartition(":")
                socket.create_connection((host, int(port)), ANSWER_S).close()
            ray.init(
                address=self.address or "auto",
                namespace="asyncrl",
                log_to_driver=False,
                configure_logging=False,
            )
            # Ray prints node failures with pages of logs, even with logs off; we report them ourselves
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

    async def hold(self, parts: Mapping[int, Sequence[str]], needs: Mapping[int, Needs]) -> None:
        """Reserve one bundle per node, in one placement group, and start an actor in each."""
        import ray

        self._needs = needs
        self._loop = asyncio.get_running_loop()
        wanted = {number: bundle_of(devices) for number, devices in parts.items()}
        for number, bundle in wanted.items():
            self._refuse_too_little(number, bundle)
        await self._reserve(wanted)
        for number, bundle in wanted.items():
            numbers = sorted({int(name[5:]) for name in parts[number] if name.startswith("cuda:")})
            make = partial(self._make_actor, number, bundle, numbers)
            kill = partial(ray.kill, no_restart=True)
            self._held[number] = RayNode(self.nodes[number], make, kill, self._addressed)
        await asyncio.gather(*(node.open() for node in self._held.values()))
        for number in [one for one in needs if one in wanted]:
            seen = await self._held[number].call("look", needs[number], timeout_s=DESCRIBE_S)
            if why := misfit(self.nodes[number].name, seen, self._versions):
                raise why

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
            {name: value for name, value in bundle.items() if value} | {pin_of(self._resources[number]): PIN}
            for number, bundle in wanted.items()
        ]
        words = ", ".join(f"{in_words(bundle)} of {self.nodes[key].name}" for key, bundle in wanted.items())
        group = await asyncio.to_thread(placement_group, pinned, strategy="PACK")
        with waiting(f"{words}, until Ray has them free", on="Ray"):
            for _ in range(int(HOLD_S / TRY_S)):  # short waits leave no thread in Ray at the end
                if await asyncio.to_thread(group.wait, TRY_S):
                    self._group = group
                    self._bundles = {number: index for index, number in enumerate(wanted)}
                    return
        free = await asyncio.to_thread(free_words, self.nodes)
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

        self._look_again(ray, number)
        index = self._bundles[number]
        place = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=index)
        options = {"num_cpus": bundle["CPU"], "num_gpus": bundle.get("GPU", 0), "max_restarts": 0}
        actor = ray.remote(Host).options(scheduling_strategy=place, runtime_env=RUNTIME_ENV, **options)
        return self.nodes[number], actor.remote(self.nodes[number].address, numbers)

    def _look_again(self, ray: Any, number: int) -> None:
        """Check a node that has come back. Raises ConnectionError if no node has its address, or if it no
        longer fits.
        """
        own = self.nodes[number]
        node = next((node for node in alive(ray) if node["NodeManagerAddress"] == own.address), None)
        if node is None:
            raise ConnectionError(f"Ray has no node at {own.address}")
        if node["NodeID"] != own.id:
            (told,) = ask_each(ray, [node], self._versions, self._needs.get(number, Needs()))
            if isinstance(told, ConfigError):
                raise ConnectionError(str(told))
            self.nodes = (*self.nodes[:number], told, *self.nodes[number + 1 :])

    def process(self, node: int, order: Order) -> RayProcess:
        return RayProcess(self._held[node], order, is_here=node == 0)

    async def free_port(self, node: int) -> int:
        port: int = await self._held[node].call("free_port")
        return port

    async def fetch(self, node: int, request: FileRequest, timeout_s: float) -> str:
        path: str = await self._held[node].call("fetch", request, timeout_s=timeout_s)
        return path

    async def aclose(self) -> None:
        await asyncio.gather(*(held.aclose() for held in self._held.values()))
        self._held.clear()
        self._loop = None
        if self._group is not None:
            from ray.util import remove_placement_group

            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LOST_S):
                    await asyncio.to_thread(remove_placement_group, self._group)
            self._group = None

    def close(self) -> None:
        """Leave the cluster, without waiting for a lost head."""
        with contextlib.suppress(ImportError):
            import ray

            leaving = threading.Thread(target=ray.shutdown, name="leave Ray", daemon=True)
            leaving.start()
            leaving.join(CLOSE_S)
