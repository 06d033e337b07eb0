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
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from asyncrl.errors import ConfigError, RoomError, install_extra
from asyncrl.placement.nodes import NOTHING, Needs, Node, Order, misfit, with_addresses
from asyncrl.placement.on_ray.ray_groups import (
    PIN,
    TRY_S,
    Found,
    Wanted,
    alive,
    bundle_of,
    free_words,
    give_back_all,
    has_autoscaler,
    in_words,
    pin_of,
)
from asyncrl.placement.on_ray.ray_host import DESCRIBE_S, RUNTIME_ENV, Host, ask_each
from asyncrl.placement.on_ray.ray_node import LOST_S, RayNode, RayProcess
from asyncrl.waits import TimeLimit, waiting

logger = logging.getLogger("asyncrl.placement.on_ray.ray_launcher")

HOLD_S = 600.0
"""For what others hold to become free."""
REPLACE_S = 10.0
"""For the bundle of a node that takes the place of another, until it is looked for again."""
ANSWER_S = 5.0
"""For the head to take a connection."""
CLOSE_S = 10.0


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
        self.say: Callable[[str], None] = print
        self._resources = list[dict[str, float]]()
        self._versions = dict[str, str]()
        """Of what is the same on all nodes, and of what engines run under."""
        self._held = dict[int, RayNode]()
        """Those that rest, too."""
        self._places = dict[int, tuple[Any, int]]()
        """Of each node that is reserved: its placement group, and which of its bundles."""
        self._coming = dict[int, asyncio.Future[None]]()
        self._needs: Mapping[int, Needs] = {}
        self._asked = dict[int, Wanted]()
        """For the nodes that are gone; below 0, those that a start waits for."""
        self._unfit = set[str]()
        """Ids of nodes on which nothing of the run can be."""
        self._turn = threading.Lock()
        """Of the threads that look for nodes, to change who has which."""
        self._loop: asyncio.AbstractEventLoop | None = None

    def open(self) -> None:
        """Join the cluster, and ask each of its nodes what it is."""
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
        """From any thread."""
        logger.warning("%s", text)
        if self._loop is None:
            self.say(text)
        else:
            self._loop.call_soon_threadsafe(self.say, text)

    def bring(self, parts: Sequence[Sequence[str]], later: Sequence[Node], wait_s: float) -> bool:
        """Ask Ray's autoscaler, if there is one."""
        import ray

        if not (parts or later) or not has_autoscaler(ray):
            return False
        if parts:
            self._wait_for(ray, parts, wait_s)
            self._look(ray)
        self.nodes = (*(node for node in self.nodes if not node.is_to_come), *later)
        self._resources = [*self._resources[: len(self.nodes) - len(later)], *({} for _ in later)]
        return True

    def _wait_for(self, ray: Any, parts: Sequence[Sequence[str]], wait_s: float) -> None:
        """Until they are there, or one of the others is not any more: then others may be lacking."""
        bundles, before = [bundle_of(devices) for devices in parts], alive(ray)
        words = ", ".join(map(in_words, bundles))
        limit = f"{wait_s:.0f} s at most (supervision.node_wait_s)"
        self.say(f"waiting for {len(bundles)} nodes of Ray's autoscaler ({words}), {limit}")
        known, start = {node["NodeID"] for node in before}, min(self._asked, default=0) - 1

        def tell(found: Found) -> None:
            for node in found:
                if node["NodeID"] not in known:
                    known.add(node["NodeID"])
                    self.say(f"the node {node['NodeName']} ({node['NodeManagerAddress']}) has come")

        wanted = self._asked[start] = Wanted(bundles, before)
        if wanted.wait(ray, wait_s, tell):
            return
        self._asked.pop(start).give_back()
        if wanted.can_be(alive(ray)):
            raise RoomError(
                "launcher",
                f"of {len(bundles)} nodes more that the run needs ({words}) "
                f"{len(known) - len(before)} have come within {wait_s:.0f} s",
                rule="Ray's autoscaler was asked for them, and supervision.node_wait_s is the limit",
                way_out="see what `ray status` says of them and which types of node the autoscaler may "
                "start; place less, or raise the limit.",
            )
        self.say("a node that was there is gone: looking anew at what the run lacks")

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

    async def hold(
        self,
        parts: Mapping[int, Sequence[str]],
        needs: Mapping[int, Needs],
        elastic: Mapping[int, bool] = NOTHING,
    ) -> None:
        """One bundle for each node; of a group of its own for each that may be given back alone."""
        import ray

        self._needs, self._loop = needs, asyncio.get_running_loop()
        wanted = {number: bundle_of(devices) for number, devices in parts.items()}
        there = {number: bundle for number, bundle in wanted.items() if elastic.get(number, True)}
        for number, bundle in there.items():
            self._refuse_too_little(number, bundle)
        for start in [number for number in self._asked if number < 0]:  # what they reserve is reserved now
            await asyncio.to_thread(self._asked.pop(start).give_back)
        await self._reserve({number: there[number] for number in there if number not in elastic})
        for number in [one for one in there if one in elastic]:
            await self._reserve({number: there[number]})
        for number, bundle in wanted.items():
            numbers = sorted({int(name[5:]) for name in parts[number] if name.startswith("cuda:")})
            make = partial(self._make_actor, number, bundle, numbers)
            kill = partial(ray.kill, no_restart=True)
            self._held[number] = RayNode(self.nodes[number], make, kill, self._addressed)
        await asyncio.gather(*(self._held[number].open() for number in there))
        for number in [one for one in needs if one in there]:
            seen = await self._held[number].call("look", needs[number], timeout_s=DESCRIBE_S)
            if why := misfit(self.nodes[number].name, seen, self._versions):
                raise why

    async def come(self, node: int) -> None:
        """A bundle for it again, on any node that fits; until there is one, Ray is asked for it."""
        if node not in self._coming:  # Ray is asked in a thread, which no one can end
            self._coming[node] = asyncio.ensure_future(self._held[node].open())
        coming = self._coming[node]
        await asyncio.wait({coming})
        del self._coming[node]
        coming.result()

    async def rest(self, node: int) -> None:
        """Without an actor, and without a bundle."""
        if (coming := self._coming.pop(node, None)) is not None:
            await asyncio.wait({coming})
            if not coming.cancelled():
                coming.exception()
        await self._held[node].aclose()
        groups = [] if node not in self._places else [self._places.pop(node)[0]]
        if node in self._asked:
            groups.append(self._asked.pop(node).group)
        await asyncio.to_thread(give_back_all, groups)

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
        self._places |= {number: (group, index) for index, number in enumerate(wanted)}
        with waiting(f"{words}, until Ray has them free", on="Ray"):
            for _ in range(int(HOLD_S / TRY_S)):  # short, so that a command that ends leaves no thread in Ray
                if await asyncio.to_thread(group.wait, TRY_S):
                    return
        free = await asyncio.to_thread(free_words, self.nodes)
        self._places = {number: place for number, place in self._places.items() if number not in wanted}
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

        found = alive(ray)
        if number not in self._places or not self._is_there(ray, number, found):
            self._replace(ray, number, bundle, found)
        elif number in self._asked:  # it is back
            self._asked.pop(number).give_back()
        group, index = self._places[number]
        place = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index)
        options = {"num_cpus": bundle["CPU"], "num_gpus": bundle.get("GPU", 0), "max_restarts": 0}
        actor = ray.remote(Host).options(scheduling_strategy=place, runtime_env=RUNTIME_ENV, **options)
        return self.nodes[number], actor.remote(self.nodes[number].address, numbers)

    def _is_there(self, ray: Any, number: int, found: Sequence[Mapping[str, Any]]) -> bool:
        """Whether a node of this address is; one that has come back is looked at as at the start."""
        own = self.nodes[number]
        node = next((node for node in found if node["NodeManagerAddress"] == own.address), None)
        if node is None or node["NodeID"] in self._unfit:
            return False
        if node["NodeID"] != own.id:
            (told,) = ask_each(ray, [node], self._versions, self._needs.get(number, Needs()))
            if isinstance(told, ConfigError):
                self._pass_over(node, told)
                return False
            with self._turn:
                self.nodes = (*self.nodes[:number], told, *self.nodes[number + 1 :])
        return True

    def _replace(
        self, ray: Any, number: int, bundle: Mapping[str, float], found: Sequence[Mapping[str, Any]]
    ) -> None:
        """Another node of the cluster takes the place of one that is gone, or that was given back: one that
        the run has nothing on, has as much, runs the same code and sees the same files. Raises
        ConnectionError as long as there is none; Ray, and its autoscaler, are asked for it meanwhile.
        """
        gone, is_new = self.nodes[number], number not in self._places
        tell = logger.info if is_new else self._tell
        while True:
            used = {self.nodes[other].address for other in self._places}
            but = [one for one in found if one["NodeManagerAddress"] in used or one["NodeID"] in self._unfit]
            wanted = self._asked.get(number)
            if wanted is None or wanted.but != {one["NodeID"] for one in but}:
                if wanted is None:
                    asked = f"Ray is asked for a node with {in_words(bundle)}"
                    tell(asked if is_new else f"{gone.name} is gone; {asked}")
                else:
                    wanted.give_back()
                wanted = self._asked[number] = Wanted([bundle], but)
            if not wanted.wait(ray, REPLACE_S):
                found = alive(ray)
                if not wanted.can_be(found):
                    continue
                where = "" if is_new else f" at {gone.address} any more, and none to take its place"
                raise ConnectionError(f"Ray has no node{where or ' that is free for it'}")
            found = alive(ray)
            node = next((one for one in found if one["NodeID"] == wanted.node_id()), None)
            if node is None:
                raise ConnectionError(f"the node that was to take the place of {gone.name} is gone, too")
            (told,) = ask_each(ray, [node], self._versions, self._needs.get(number, Needs()))
            if isinstance(told, ConfigError):
                self._pass_over(node, told)
            elif self._takes(number, told, node["Resources"]):
                break  # else it has taken another's place meanwhile
        tell(f"{told.name} ({told.address}) takes the place of {gone.name}")

    def _takes(self, number: int, told: Node, resources: dict[str, float]) -> bool:
        """Give this node the place that was asked for, unless another place has it: Ray may have found the
        same one for both.
        """
        with self._turn:
            if told.address in {self.nodes[other].address for other in self._places}:
                return False
            left, _ = self._places.get(number, (None, 0))
            self._places[number] = (self._asked.pop(number).group, 0)
            self._resources[number] = resources
            self.nodes = (*self.nodes[:number], told, *self.nodes[number + 1 :])
        if left is not None and all(group is not left for group, _ in self._places.values()):
            give_back_all([left])
        return True

    def process(self, node: int, order: Order) -> RayProcess:
        """One that the actor of that node starts."""
        return RayProcess(self._held[node], order, is_here=node == 0)

    async def free_port(self, node: int) -> int:
        """Of that node's address."""
        port: int = await self._held[node].call("free_port")
        return port

    async def aclose(self) -> None:
        """End the actors, and give back what was reserved."""
        if self._coming:
            await asyncio.wait(self._coming.values(), timeout=LOST_S)
        await asyncio.gather(*(held.aclose() for held in self._held.values()))
        self._held.clear()
        groups, self._places = {group for group, _ in self._places.values()}, {}
        groups |= {wanted.group for wanted in self._asked.values()}
        self._asked.clear()
        self._loop = None
        with contextlib.suppress(TimeoutError):
            async with TimeLimit(LOST_S):
                await asyncio.to_thread(give_back_all, groups)

    def close(self) -> None:
        """Leave the cluster. A head that is gone is not waited for."""
        with contextlib.suppress(ImportError):
            import ray

            leaving = threading.Thread(target=ray.shutdown, name="leave Ray", daemon=True)
            leaving.start()
            leaving.join(CLOSE_S)
