"""Select the devices of trainer and engines from what `placement` says. Imports no torch.

The side whose form leaves least open selects first. Forms, with the controller's machine as the first node:

    numbers, lists, ranges, cpu   devices of the controller's machine
    all                           every CUDA device of every node
    {nodes: N, gpus: G}           G CUDA devices on each of N nodes; gpus: 0 is the CPU of a node
    auto                          one CUDA device per process, or the CPU if there is no CUDA device
    trainer                       (rollout) the trainer's devices

`{nodes, gpus}` and `auto` take devices that the other side leaves, on nodes that it leaves if possible. If it
leaves too few, they take the other side's devices.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from asyncrl.base.errors import ConfigError
from asyncrl.config import RunConfig
from asyncrl.config.operation import Devices, NodesConfig, device_numbers
from asyncrl.launch.nodes import Node

NO_DEVICE = "none"
"""Device of a simulated engine, and of one that the run did not start."""


class NodeDevice(NamedTuple):
    """The number of a node in the run, and the name of a device there (cpu, cuda:1, ...)."""

    node: int
    name: str


Side = tuple[NodeDevice, ...]
"""Devices of one side of the run."""


@dataclass(frozen=True, slots=True)
class Hosts:
    """Names of the nodes, and the number of CUDA devices on each."""

    names: tuple[str, ...]
    num_cuda: tuple[int, ...]

    @staticmethod
    def of(nodes: int | Sequence[Node]) -> Hosts:
        """Return the hosts of these nodes; a number: of this machine with that many CUDA devices."""
        if isinstance(nodes, int):
            return Hosts(("this machine",), (nodes,))
        return Hosts(tuple(node.name for node in nodes), tuple(len(node.machine.cuda) for node in nodes))

    @property
    def cuda(self) -> list[Side]:
        """CUDA devices of each node."""
        return [
            tuple(NodeDevice(node, f"cuda:{number}") for number in range(num))
            for node, num in enumerate(self.num_cuda)
        ]

    def label(self, device: NodeDevice) -> str:
        """Return the name of a device, with its node if there are several."""
        is_plain = len(self.names) == 1 or device.name == NO_DEVICE
        return device.name if is_plain else f"{self.names[device.node]}/{device.name}"


def takes_no_device(config: RunConfig) -> bool:
    """Return whether engines use no device of the run: simulated engines, and the servers of rollout.urls."""
    return not config.rollout.facts.has_model or config.rollout.urls is not None


def choose(config: RunConfig, hosts: Hosts) -> tuple[Side, Side]:
    """Select the devices of trainer and engines, node by node. Raises ConfigError."""
    rollout, has_cuda = config.rollout, any(hosts.num_cuda)
    forms: dict[str, Devices] = {"trainer": config.placement.trainer, "rollout": config.placement.rollout}
    if forms["rollout"] == "auto" and takes_no_device(config):
        forms["rollout"] = "cpu"
    split = {"trainer": 1, "rollout": rollout.tensor_parallel}
    num = {"trainer": config.trainer.world_size if has_cuda else 1, "rollout": rollout.max_engines}
    found: dict[str, Side] = {}
    taken: Side = ()
    for name, form in sorted(forms.items(), key=lambda item: _openness(item[1])):
        key = f"placement.{name}"
        found[name] = _select(key, form, hosts, taken, num[name] * split[name], split[name])
        taken += found[name]
    return found["trainer"], found["rollout"]


def _openness(form: Devices) -> int:
    """Return how much a form leaves open: nothing, the nodes, the number of devices, everything."""
    return 1 if isinstance(form, NodesConfig) else {"auto": 2, "trainer": 3}.get(str(form), 0)


def _select(key: str, form: Devices, hosts: Hosts, taken: Side, want: int, split: int) -> Side:
    """Select the devices of one side. `taken`: the other side's, if it selected first; `want`: the number of
    devices that processes use, `split` by each process.
    """
    if form == "trainer":
        return taken
    if form == "cpu":
        return (NodeDevice(0, "cpu"),)
    if form == "auto" and not any(hosts.num_cuda):
        used = {device.node for device in taken}
        free = [node for node in range(len(hosts.names)) if node not in used] or [0]
        return tuple(NodeDevice(node, "cpu") for node in free[:want])
    if isinstance(form, NodesConfig):
        return _of_nodes(key, form, hosts, taken)
    if form == "auto":
        return _spare(hosts, taken, want, split) or taken
    refuse_no_cuda(key, form, hosts)
    return (
        tuple(one for devices in hosts.cuda for one in devices) if form == "all" else named(key, form, hosts)
    )


def named(key: str, form: Devices, hosts: Hosts) -> Side:
    """Return the devices of the controller's machine with these numbers. Raises ConfigError."""
    refuse_no_cuda(key, form, hosts)
    numbers = device_numbers(form) or []
    if not numbers or max(numbers) >= hosts.num_cuda[0]:
        raise ConfigError(
            f"{key}={form} is not on {hosts.names[0]}, which has {hosts.num_cuda[0]} CUDA devices",
            rule="numbers count from 0 among CUDA_VISIBLE_DEVICES of the controller's machine",
            way_out=f"name a device that exists, or set {key}=auto.",
        )
    return tuple(NodeDevice(0, f"cuda:{number}") for number in numbers)


def refuse_no_cuda(key: str, form: Devices, hosts: Hosts) -> None:
    """Raise ConfigError if no node has a CUDA device."""
    if not any(hosts.num_cuda):
        raise ConfigError(
            f"{key}={form}, and torch finds no CUDA device",
            rule="it needs the NVIDIA driver, a torch built with CUDA, and CUDA_VISIBLE_DEVICES to show it",
            way_out=f"set {key}=auto, or cpu.",
        )


def _spare(hosts: Hosts, taken: Side, want: int, split: int) -> Side:
    """Take `want` free devices, whole processes on each node: from the smallest node that has enough, else
    from the largest nodes, and first from nodes without the other side.
    """
    left = [[device for device in devices if device not in taken] for devices in hosts.cuda]
    whole = [devices[: len(devices) // split * split] for devices in left]
    whole = whole if any(whole) else left
    used = {device.node for device in taken}

    def order(node: int) -> tuple[bool, bool, int, int]:
        num = len(whole[node])
        return num < want, node in used, num if num >= want else -num, node

    found: list[NodeDevice] = []
    for node in sorted(range(len(whole)), key=order):
        found += whole[node][: want - len(found)]
    return tuple(sorted(found, key=lambda device: device.node))


def _of_nodes(key: str, form: NodesConfig, hosts: Hosts, taken: Side) -> Side:
    """Take devices per node: what the other side leaves, else exactly its devices. Raises ConfigError."""
    gpus = form.gpus if form.gpus != "auto" else "all" if any(hosts.num_cuda) else 0
    if gpus != 0:
        refuse_no_cuda(key, form, hosts)
    every = hosts.cuda if gpus != 0 else [(NodeDevice(node, "cpu"),) for node in range(len(hosts.names))]
    sizes = [len(devices) if gpus in ("all", 0) else int(gpus) for devices in every]
    num = sum(map(bool, every)) if form.nodes == "all" else form.nodes
    for others in (taken, ()):
        used = {device.node for device in others}
        left = [[one for one in devices if gpus == 0 or one not in others] for devices in every]
        fitting = [node for node, devices in enumerate(left) if devices and len(devices) >= sizes[node]]
        fitting.sort(key=lambda node: (node in used, len(left[node]) - sizes[node], node))
        found = tuple(one for node in sorted(fitting[:num]) for one in left[node][: sizes[node]])
        if len(fitting) >= num and (others == taken or {*found} == {*taken}):
            return found
    free = [sum(gpus == 0 or one not in taken for one in devices) for devices in every]
    has = [f"{name} {num} of {len(all_)}" for name, num, all_ in zip(hosts.names, free, every, strict=True)]
    raise ConfigError(
        f"{key}={form}, and the devices that the other side leaves are: {', '.join(has)}",
        rule="the two sides have different devices, or exactly the same",
        way_out=f"write fewer nodes or devices, set {key}=auto for the free devices, or add nodes.",
    )
