"""Start processes on an existing Ray cluster: one placement group, with a bundle and an
actor (Host) per node. Ray ends the actors with the controller, its driver.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import socket
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import ray
from ray.exceptions import ActorDiedError, ActorUnavailableError, RayError, RayTaskError
from ray.util import placement_group, remove_placement_group
from ray.util.scheduling_strategies import (
    NodeAffinitySchedulingStrategy,
    PlacementGroupSchedulingStrategy,
)

from asyncrl.base.errors import ComponentError, ConfigError, NodeLost, WeightsLost
from asyncrl.base.signals import IGNORE_IN_SHELL
from asyncrl.base.waits import at_most, waiting
from asyncrl.launch import fork_server
from asyncrl.launch.fork_server import ONE_THREAD
from asyncrl.launch.machine import (
    CudaDevice,
    Machine,
    Node,
    child_environ,
    find_cuda_devices,
    find_misfit,
    own_versions,
    this_machine,
)
from asyncrl.launch.processes import (
    GROUP_TIMEOUT_S,
    KILL_TIMEOUT_S,
    ChildProcess,
    Launcher,
    Process,
    ProcessSpec,
    free_port_at,
)
from asyncrl.messages.engine_api import FileRequest
from asyncrl.weights.download import FetchedFiles

logger = logging.getLogger("asyncrl.launch.ray_launcher")

DESCRIBE_S = 120.0
HOLD_S = 600.0
ANSWER_S = 5.0
CLOSE_S = 10.0
PIN = 0.001
"""It pins a bundle to its node."""


class RayLauncher(Launcher):
    """`address`: HOST:PORT of the head; "": RAY_ADDRESS, or the local cluster."""

    def __init__(self, address: str) -> None:
        """Join the cluster. Blocks; raises ConfigError."""
        self.address = address
        self._resources = list[dict[str, float]]()
        self._held = dict[int, RayNode]()
        self._group: Any = None
        self._join()
        # The controller's node must be the first: other parts use number 0 for it.
        own = ray.get_runtime_context().get_node_id()
        found = sorted(
            _alive(),
            key=lambda node: (node["NodeID"] != own, node["NodeManagerAddress"]),
        )
        fit = list[Node]()
        answers = [_describe(node) for node in found]
        ray.wait(answers, num_returns=len(answers), timeout=DESCRIBE_S)
        for record, answer in zip(found, answers, strict=True):
            name = record["NodeName"]
            try:
                machine = ray.get(answer, timeout=0)
            except (RayError, ImportError, TimeoutError) as failure:
                error = ConfigError(
                    f"the node {name} cannot run asyncrl: {str(failure).strip()[-300:]}",
                    way_out="install asyncrl there, in the Python that runs Ray, or remove it from Ray.",
                )
                if record["NodeID"] == own:
                    raise error from failure
                print(f"the node {name} is not used: {error}")
            else:
                fit.append(Node(name, record["NodeManagerAddress"], machine))
                self._resources.append(record["Resources"])
        self.nodes = tuple(fit)

    def _join(self) -> None:
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
            # Ray logs node failures by the page; we report them
            ray._private.worker._worker_logs_enabled = False
        except (OSError, RuntimeError, ValueError) as error:
            where = f"at {address}" if address else "here, and RAY_ADDRESS names none"
            raise ConfigError(
                f"launcher=ray finds no Ray cluster {where}: {str(error).strip().splitlines()[0][:300]}",
                rule="a run starts no Ray; its controller runs on a node of the cluster",
                way_out="`ray start --head` here (on other nodes `ray start --address=HOST:PORT`), with the "
                "same Ray and Python everywhere; or set launcher=local.",
            ) from error

    async def hold(
        self, parts: Mapping[int, Sequence[str]], files: Mapping[str, str]
    ) -> None:
        bundles = list[dict[str, float]]()
        for number, devices in parts.items():
            # Engines may share a device: it counts once.
            num_cuda = len({name for name in devices if name.startswith("cuda:")})
            wanted = {"CPU": float(len(devices)), "GPU": float(num_cuda)}
            for name, value in wanted.items():
                if (has := self._resources[number].get(name, 0.0)) < value:
                    node = self.nodes[number].name
                    raise ConfigError(
                        f"the run takes {value:g} {name} of the node {node}, which has {has:g} for Ray",
                        rule="a process takes one CPU of Ray's, and each of its CUDA devices one GPU",
                        way_out=f"place less, or use `ray start ... --num-{name.lower()}s={value:g}`.",
                    )
            # Each node has 1.0 of this resource, which no other node has. So the bundle
            # cannot be placed elsewhere.
            pin = {f"node:{self.nodes[number].address}": PIN}
            bundles.append(
                {name: value for name, value in wanted.items() if value} | pin
            )
        await self._reserve(bundles)
        for index, (number, devices) in enumerate(parts.items()):
            make = partial(self._make_actor, index, self.nodes[number], devices)
            self._held[number] = RayNode(self.nodes[number], make, files)
        await asyncio.gather(*(node.open() for node in self._held.values()))

    async def _reserve(self, bundles: Sequence[Mapping[str, float]]) -> None:
        group = await asyncio.to_thread(placement_group, bundles, strategy="PACK")
        with waiting("the devices of the run, until Ray frees them", on="Ray"):
            for _ in range(int(HOLD_S)):  # short waits leave no thread in Ray
                if await asyncio.to_thread(group.wait, 1.0):
                    self._group = group
                    return
        await asyncio.to_thread(remove_placement_group, group)
        raise ComponentError(
            "launcher",
            f"Ray did not reserve {', '.join(map(str, bundles))} within {HOLD_S:g} s",
            way_out="end other programs (see `ray status`), or place less.",
        )

    def _make_actor(self, index: int, node: Node, devices: Sequence[str]) -> Any:
        """Start the actor of a node. Raises ConnectionError if Ray lacks the node."""
        if node.address not in {record["NodeManagerAddress"] for record in _alive()}:
            raise ConnectionError(f"Ray has no node at {node.address}")
        numbers = sorted(
            {int(name[5:]) for name in devices if name.startswith("cuda:")}
        )
        place = PlacementGroupSchedulingStrategy(
            self._group, placement_group_bundle_index=index
        )
        actor = ray.remote(Host).options(
            num_cpus=len(devices),
            num_gpus=len(numbers),
            # A restarted actor would have no processes: RayNode.open() makes a new one,
            # with its checks.
            max_restarts=0,
            scheduling_strategy=place,
            runtime_env=RUNTIME_ENV,
        )
        return actor.remote(node.address, numbers)

    def process(self, node: int, spec: ProcessSpec) -> RayProcess:
        return RayProcess(self._held[node], spec)

    async def free_port(self, node: int) -> int:
        return int(await self._held[node].call("free_port"))

    async def fetch(self, node: int, request: FileRequest, timeout_s: float) -> str:
        return await self._held[node].fetch(request, timeout_s)

    async def aclose(self) -> None:
        await asyncio.gather(*(held.aclose() for held in self._held.values()))
        self._held.clear()
        if self._group is not None:
            async with at_most(LOST_S):
                await asyncio.to_thread(remove_placement_group, self._group)
            self._group = None

    def close(self) -> None:
        # ray.shutdown() may wait long for a lost head, and the process must end.
        leaving = threading.Thread(target=ray.shutdown, name="leave Ray", daemon=True)
        leaving.start()
        leaving.join(CLOSE_S)


def _alive() -> list[dict[str, Any]]:
    return [node for node in ray.nodes() if node["Alive"]]


def _describe(record: Mapping[str, Any]) -> Any:
    on = NodeAffinitySchedulingStrategy(record["NodeID"], soft=False)
    task = ray.remote(describe).options(num_cpus=0, scheduling_strategy=on)
    return task.remote(int(record["Resources"].get("GPU", 0)))


POLL_S = 5.0
RETRY_S = 0.5
LOST_S = 15.0
ACTOR_S = 120.0
# Longer than fork_server.TIMEOUT_S, which a node's first start may need for its
# imports.
START_S = 180.0
# As long as ChildProcess.aclose() may take on the node, and the call to it.
END_S = 5.0 + GROUP_TIMEOUT_S + 2 * KILL_TIMEOUT_S + LOST_S
LOST_ERRORS = (TimeoutError, ConnectionError, RayError)
_keys = itertools.count()


class RayNode:
    """A node and its actor.

    Life: open() -> up -> lost (actor died, or silent for LOST_S) -> open() with a new
        actor -> aclose().
    """

    def __init__(
        self, node: Node, make: Callable[[], Any], files: Mapping[str, str]
    ) -> None:
        self.node = node
        self.actor: Any = None
        self._make = make
        self._files = files
        self._lost = "it was not opened"
        self._lock = asyncio.Lock()

    def gone(self, name: str, how: str = "") -> NodeLost:
        return NodeLost(
            name,
            f"the node {self.node.name} ({self.node.address}) {how or f'is gone: {self._lost}'}",
            way_out="see `ray status`; start Ray there again.",
        )

    async def open(self) -> None:
        """Start an actor unless one answers. Raises NodeLost or ConfigError."""
        # Several processes of a node restart at once: the first one opens it for all.
        async with self._lock:
            if not self._lost:
                return
            await self._end_actor()
            try:
                self.actor = await asyncio.to_thread(self._make)
                with waiting("its actor", on=self.node.name):
                    about = self.node.name, self._files, own_versions()
                    misfit = await _within(ACTOR_S, self.actor.ready, *about)
            except LOST_ERRORS as error:
                self._lost = f"Ray starts no actor there: {_reason(error)}"
                raise self.gone(self.node.name) from error
            if misfit is not None:
                raise misfit
            self._lost = ""

    def lose_nowait(self, actor: Any, error: Exception) -> None:
        # A late error of an old actor says nothing about the new one.
        if actor is self.actor and not self._lost:
            self._lost = _reason(error)
            logger.warning("the node %s is lost: %s", self.node.name, error)

    async def call(
        self, method: str, *arguments: object, timeout_s: float = LOST_S
    ) -> Any:
        """Call a method of the node's Host. Raises NodeLost without an answer, and
        ComponentError if the method raised.
        """
        if self._lost:
            raise self.gone(self.node.name)
        actor = self.actor
        try:
            return await _within(timeout_s, getattr(actor, method), *arguments)
        except RayTaskError as error:
            raise ComponentError(
                self.node.name, f"{method} failed: {_reason(error)}"
            ) from error
        except LOST_ERRORS as error:
            if isinstance(error, ActorDiedError):  # the next open() starts another
                self.lose_nowait(actor, error)
            raise self.gone(
                self.node.name, f"does not answer: {_reason(error)}"
            ) from error

    async def fetch(self, request: FileRequest, timeout_s: float) -> str:
        """Have the node download a file; return its path there. Raises NodeLost without
        an answer, WeightsLost if the trainer's node does not send the file, and
        ComponentError if this node cannot keep it.
        """
        try:
            return str(await self.call("fetch", request, timeout_s=timeout_s))
        except NodeLost:
            raise
        except ComponentError as error:
            # FetchedFiles.fetch raises it on the node, and Ray hands its class on.
            if isinstance(error.__cause__, ConnectionError):
                raise WeightsLost(error.component, error.fault) from error
            raise

    async def aclose(self) -> None:
        with contextlib.suppress(ComponentError):
            await self.call("leave")
        self._lost = self._lost or "it was closed"
        await self._end_actor()

    async def _end_actor(self) -> None:
        if self.actor is not None:
            with contextlib.suppress(*LOST_ERRORS):
                async with asyncio.timeout(LOST_S):
                    await asyncio.to_thread(ray.kill, self.actor, no_restart=True)
            self.actor = None


async def _within(timeout_s: float, method: Any, *arguments: object) -> Any:
    async with asyncio.timeout(timeout_s):
        return await asyncio.wrap_future(method.remote(*arguments).future())


class RayProcess(Process):
    def __init__(self, on: RayNode, spec: ProcessSpec) -> None:
        super().__init__(spec.name, spec.log_path)
        self.key = f"{spec.name}-{next(_keys)}"
        self._on = on
        self._actor: Any = None
        self._spec = spec
        self._gone: ComponentError | None = None
        self._starting: asyncio.Future[tuple[str, int]] | None = None

    def seen(self) -> str:
        return super().seen() if self._gone is None else self._gone.fault

    async def start(self) -> None:
        """Start the process on its node. Raises NodeLost, ConfigError or ComponentError."""
        with contextlib.suppress(OSError):
            self._log_start = self._spec.log_path.stat().st_size
        # As for children on this machine, where start_process reads the controller's
        # environment.
        threads = {
            name: os.environ.get(name, number) for name, number in ONE_THREAD.items()
        }
        try:
            await self._on.open()
            self._actor = self._on.actor
            spec = replace(self._spec, env={**threads, **self._spec.env})
            self._starting = asyncio.ensure_future(
                self._on.call("start", self.key, spec, timeout_s=START_S)
            )
            # A start that is cancelled still happens on the node: aclose() waits for
            # it, then ends its process.
            self.url, pid = await asyncio.shield(self._starting)
        except ComponentError as error:
            raise error.as_kind(type(error), self.name) from error
        self.place = f"process {pid} on {self._on.node.name}"

    def renewed(self) -> RayProcess:
        return RayProcess(self._on, self._spec)

    async def wait(self) -> None:
        """Poll its actor: connections may recover within LOST_S."""
        clock = asyncio.get_running_loop().time
        heard_s = clock()
        while self.returncode is None and self._gone is None:
            try:
                # A long poll: the actor answers after POLL_S while the process runs,
                # and at once when it ends.
                self.returncode = await _within(
                    POLL_S + LOST_S, self._actor.call, self.key, "wait", POLL_S
                )
                heard_s = clock()
            except LOST_ERRORS as error:
                if (
                    isinstance(error, ActorUnavailableError)
                    and clock() - heard_s < LOST_S
                ):
                    await asyncio.sleep(RETRY_S)
                    continue
                self._on.lose_nowait(self._actor, error)
                self._gone = self._on.gone(self.name, f"is gone: {_reason(error)}")

    def death(self) -> ComponentError:
        return self._gone or super().death()

    async def aclose(self) -> None:
        starting = self._starting
        self._starting = None
        if starting is None or self._gone is not None:
            return
        with contextlib.suppress(ComponentError):  # a lost node has ended it
            await starting
            self.returncode = await self._on.call(
                "call", self.key, "aclose", timeout_s=END_S
            )

    def kill_nowait(self) -> None:
        self._tell_nowait("kill_nowait")

    def dump_stacks_nowait(self) -> None:
        self._tell_nowait("dump_stacks_nowait")

    def _tell_nowait(self, method: str) -> None:
        if self.place and self.returncode is None and self._gone is None:
            with contextlib.suppress(*LOST_ERRORS):
                self._actor.call.remote(self.key, method)


def _reason(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    why = next(
        (line for line in lines if "because" in line or "detail" in line),
        (lines or ["no answer"])[-1],
    )
    return why[:400]


RUNTIME_ENV = {"env_vars": {"RAY_kill_child_processes_on_worker_exit": "0"}}
"""Ray's SIGKILL would leave weights in shared memory."""
REMOVE_AFTERWARDS = 'cat > /dev/null; rm -rf "$0"'


def describe(num_cuda: int) -> Machine:
    """Return this node with its first `num_cuda` devices; Ray tasks hide devices."""
    os.environ.pop("CUDA_VISIBLE_DEVICES", None)
    return replace(this_machine(), cuda=find_cuda_devices()[:num_cuda])


class Host:
    """Actor that holds a node's processes: when it ends, their standard inputs close."""

    def __init__(self, address: str, numbers: Sequence[int]) -> None:
        """`numbers`: placement numbers of the CUDA devices, in Ray's order."""
        self._address = address
        self._numbers = numbers
        self._files = FetchedFiles()
        # The actor may be killed before it can clean up: its files would stay in shared
        # memory. This shell is in another session, waits for the end of its standard
        # input, which the kernel closes at the actor's death, and removes them.
        script = IGNORE_IN_SHELL + REMOVE_AFTERWARDS
        remover = ["/bin/sh", "-c", script, str(self._files.folder)]
        self._remover = subprocess.Popen(
            remover, stdin=subprocess.PIPE, start_new_session=True
        )
        self._children = dict[str, ChildProcess]()
        self._cuda = dict[int, CudaDevice]()

    async def ready(
        self, name: str, files: Mapping[str, str], versions: Mapping[str, str]
    ) -> ConfigError | None:
        import ray

        # Ray chooses which devices of the node the bundle gets. Placement numbers only
        # count them.
        names = map(str, ray.get_gpu_ids())
        self._cuda = {
            number: CudaDevice(name)
            for number, name in zip(self._numbers, names, strict=True)
        }
        return await asyncio.to_thread(find_misfit, name, files, versions)

    async def start(self, key: str, spec: ProcessSpec) -> tuple[str, int | None]:
        """Return (URL, process id)."""
        # One per actor: torch is imported once for all processes of the node
        # (docs/decisions/0024).
        if fork_server.current is None and spec.python is None:
            fork_server.current = fork_server.ForkServer()
        child = ChildProcess(
            spec, child_environ(spec.devices, self._cuda), self._address
        )
        await child.start()
        self._children[key] = child
        return child.url, child.pid

    async def call(
        self, key: str, method: str, limit_s: float | None = None
    ) -> int | None:
        """Call a method of a process; return its exit code, or None while it runs."""
        child = self._children[key]
        async with at_most(limit_s):
            answer = getattr(child, method)()
            if answer is not None:
                await answer
        return child.returncode

    async def free_port(self) -> int:
        return free_port_at(self._address)

    async def fetch(self, request: FileRequest) -> str:
        return await self._files.fetch(request)

    async def leave(self) -> None:
        await asyncio.to_thread(self._files.close)
        if fork_server.current is not None:
            fork_server.current.close()
