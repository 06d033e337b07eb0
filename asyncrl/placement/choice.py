"""Which devices of which nodes each side of a run gets, from what `placement` says. Imports no torch.

How it is read. The controller's own machine is the first node, and the only one of a run on one machine:

    numbers, lists, ranges,   of the controller's own machine, where all must exist and have work
    cpu
    all                       every CUDA device of every node
    {nodes: N, gpus: G}       G CUDA devices of each of N nodes: of nodes on which the other side is not where
                              there are enough, else of devices that it leaves; else the other side's, if
                              those are what is written. gpus: 0 is a node's CPU
    cuda, auto                as many as there are ranks (trainer) or engines (rollout), from those that the
                              other side leaves, of one node where that has enough, else of whole nodes; none
                              left: the other side's. auto without CUDA: the CPU of the first node, engines
                              those of the others
    trainer                   (rollout) the trainer's

The same devices on both sides: in turns. What is written first, what leaves a choice last.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from asyncrl.config import RunConfig
from asyncrl.config.operation import Devices, NodesConfig, device_numbers
from asyncrl.errors import ConfigError
from asyncrl.placement.nodes import Node


class NodeDevice(NamedTuple):
    """A device: the number of its node among those of the run, and its name there (cpu, cuda:1, ...)."""

    node: int
    name: str


Side = tuple[NodeDevice, ...]
"""What is for one side of the run: CUDA devices, or CPUs."""


@dataclass(frozen=True, slots=True)
class Hosts:
    """Names of the nodes, and how many CUDA devices each has."""

    names: tuple[str, ...]
    num_cuda: tuple[int, ...]

    @staticmethod
    def of(nodes: int | Sequence[Node]) -> Hosts:
        """A number: this machine alone, with so many CUDA devices."""
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
        """For people: with the node where there are several."""
        return device.name if len(self.names) == 1 else f"{self.names[device.node]}/{device.name}"

    def labels(self, devices: Iterable[NodeDevice]) -> list[str]:
        """For people, each once; CUDA devices of a node that follow each other are a range where there are
        several nodes.
        """
        found = list[tuple[NodeDevice, NodeDevice]]()
        for device in dict.fromkeys(devices):
            number = device.name.removeprefix("cuda:")
            before = f"cuda:{int(number) - 1}" if number.isdigit() and len(self.names) > 1 else ""
            if found and found[-1][1] == (device.node, before):
                found[-1] = (found[-1][0], device)
            else:
                found.append((device, device))
        spans = [(self.label(first), last.name.removeprefix("cuda:")) for first, last in found]
        return [f"{first}-{last}" if not first.endswith(last) else first for first, last in spans]

    def counts(self, devices: Iterable[NodeDevice]) -> str:
        """How many of them each node has, in words."""
        nodes = [device.node for device in devices]
        return ", ".join(
            f"{name} {nodes.count(node)} of {num}"
            for node, (name, num) in enumerate(zip(self.names, self.num_cuda, strict=True))
        )


def takes_no_device(config: RunConfig) -> bool:
    """A latency model, and servers that the run did not start."""
    return not config.rollout.facts.has_model or config.rollout.urls is not None


def choose(config: RunConfig, hosts: Hosts) -> tuple[Side, Side]:
    """Devices of trainer and engines, of each node one after the other. Raises ConfigError."""
    written, rollout, split = config.placement, config.rollout, config.rollout.tensor_parallel
    forms: dict[str, Devices] = {"trainer": written.trainer, "rollout": written.rollout}
    if forms["rollout"] in ("auto", "cuda") and any(hosts.num_cuda) and takes_no_device(config):
        forms["rollout"] = "cpu"
    wants = {
        "trainer": (config.trainer.world_size, 1),
        "rollout": (rollout.max_engines * split, split),
    }
    found: dict[str, Side] = {}
    for name, form in sorted(forms.items(), key=lambda item: _openness(item[1])):
        taken = tuple(device for side in found.values() for device in side)
        if form != "trainer":
            found[name] = _pick(f"placement.{name}", form, hosts, taken, *wants[name])
    return found["trainer"], found.get("rollout", found["trainer"])


def named(key: str, devices: Devices, hosts: Hosts) -> Side:
    """Devices of the controller's machine that are written by their numbers."""
    _refuse_no_cuda(key, devices, hosts)
    numbers = device_numbers(devices) or []
    if numbers and max(numbers) >= hosts.num_cuda[0]:
        way_out = f"name devices of 0..{hosts.num_cuda[0] - 1}."
        if len(hosts.names) > 1:
            is_side = key in ("placement.trainer", "placement.rollout")
            more = f"{{nodes: 1, gpus: {len(numbers)}}}" if is_side else "auto"
            way_out = f"set {key}={more}, for any node: numbers are of {hosts.names[0]} alone."
        raise ConfigError(
            f"{key}={devices} names cuda:{max(numbers)}",
            rule=f"this machine shows {hosts.num_cuda[0]} CUDA devices, counted from 0 among "
            "CUDA_VISIBLE_DEVICES",
            way_out=way_out,
        )
    return tuple(NodeDevice(0, f"cuda:{number}") for number in numbers)


def _openness(form: Devices) -> int:
    """How much is left to choose: 0 nothing, 1 which nodes, 2 how many devices too."""
    return 1 if isinstance(form, NodesConfig) else 2 if form in ("auto", "cuda") else 0


def _pick(key: str, form: Devices, hosts: Hosts, taken: Side, want: int, split: int) -> Side:
    """`taken`: the other side's, if that was first. `want`: devices that there are processes for, of which
    each has `split`.
    """
    if isinstance(form, NodesConfig):
        return _of_nodes(key, form, hosts, taken)
    if form == "cpu":
        return (NodeDevice(0, "cpu"),)
    if form == "auto" and not any(hosts.num_cuda):
        used = {device.node for device in taken}
        free = [node for node in range(len(hosts.names)) if node not in used] or [0]
        return _cpus(free[: want if key == "placement.rollout" else 1])
    _refuse_no_cuda(key, form, hosts)
    if form == "all":
        return tuple(device for devices in hosts.cuda for device in devices)
    if form in ("auto", "cuda"):
        return _as_many(hosts, taken, want, split) or taken
    return named(key, form, hosts)


def _cpus(nodes: Sequence[int]) -> Side:
    return tuple(NodeDevice(node, "cpu") for node in sorted(nodes))


def _refuse_no_cuda(key: str, form: Devices, hosts: Hosts) -> None:
    if not any(hosts.num_cuda):
        instead = "cpu (or auto: CUDA where there is a device, else cpu)"
        if isinstance(form, NodesConfig):
            instead = f"{form.model_copy(update={'gpus': 0})} for the CPUs of so many nodes"
        raise ConfigError(
            f"{key}={form}, and there is no CUDA device that torch could use",
            rule="it needs the NVIDIA driver, a torch built with CUDA, and CUDA_VISIBLE_DEVICES to show it",
            way_out=f"set {key}={instead}.",
        )


def _as_many(hosts: Hosts, taken: Side, want: int, split: int) -> Side:
    """So many that are not taken, whole processes on each node: of the smallest node that has them, first of
    those on which the other side is not; else of the largest nodes.
    """
    left = [[device for device in devices if device not in taken] for devices in hosts.cuda]
    whole = [devices[: len(devices) // split * split] for devices in left]
    whole = whole if any(whole) else left
    used, nodes = {device.node for device in taken}, range(len(left))
    if fitting := [node for node in nodes if len(whole[node]) >= want]:
        best = min(fitting, key=lambda node: (node in used, len(whole[node]), node))
        return tuple(whole[best][:want])
    found: list[NodeDevice] = []
    for node in sorted(nodes, key=lambda node: (node in used, -len(whole[node]), node)):
        found += whole[node][: want - len(found)]
    return tuple(sorted(found, key=lambda device: device.node))


def _of_nodes(key: str, form: NodesConfig, hosts: Hosts, taken: Side) -> Side:
    """Raises ConfigError if so many nodes do not have so many devices, or the other side leaves too few."""
    gpus: Literal["all"] | int = form.gpus if form.gpus != "auto" else "all" if any(hosts.num_cuda) else 0
    if gpus != 0:
        _refuse_no_cuda(key, form, hosts)
    everything = hosts.cuda if gpus != 0 else [_cpus([node]) for node in range(len(hosts.names))]
    sizes = [len(devices) if gpus in ("all", 0) else int(gpus) for devices in everything]
    has_some = [node for node, devices in enumerate(everything) if devices]
    enough = [node for node in has_some if len(everything[node]) >= sizes[node]]
    num = len(has_some) if form.nodes == "all" else form.nodes
    if len(enough) < num:
        _refuse_too_few(key, form, hosts, len(enough))
    for others in (taken, ()):
        used = {device.node for device in others}
        is_cpu = gpus == 0  # which has no owner
        left = [[one for one in devices if is_cpu or one not in others] for devices in everything]
        fits = [node for node in enough if len(left[node]) >= sizes[node]]
        if len(fits) >= num:
            fits.sort(key=lambda node: (node in used, len(left[node]) - sizes[node], node))
            found = tuple(device for node in sorted(fits[:num]) for device in left[node][: sizes[node]])
            if others == taken or {*found} == {*taken}:
                return found
    other = "the engines leave" if key == "placement.trainer" else "the trainer leaves"
    free = [device for devices in hosts.cuda for device in devices if device not in taken]
    raise ConfigError(
        f"{key}={form}, and {other} of the CUDA devices: {hosts.counts(free)}",
        rule="both sides have devices of their own, or exactly the same ones, in turns",
        way_out=f"set {key}=auto for what is left, or write fewer nodes or devices for one of them.",
    )


def _refuse_too_few(key: str, form: NodesConfig, hosts: Hosts, num: int) -> None:
    each = "a CUDA device" if form.gpus in ("auto", "all") else f"{form.gpus} CUDA devices each"
    has = "" if form.gpus == 0 else f" with {each}"
    counts = ", ".join(f"{name} has {num}" for name, num in zip(hosts.names, hosts.num_cuda, strict=True))
    nodes = f"; {counts}" if form.gpus != 0 else ""
    fewer = form.model_copy(update={"nodes": num})
    raise ConfigError(
        f"{key}={form}, and {num} of {len(hosts.names)} nodes are there{has}{nodes}",
        way_out=f"set {key}={fewer}, or add nodes." if num else f"set {key}=auto, or add nodes.",
    )
