"""Select devices from the forms of `placement`, without torch.

numbers, lists, ranges, cpu: devices of the controller's machine. all: every CUDA device. {nodes: N, gpus:
G}: G CUDA devices on each of N nodes; gpus: 0 is the CPU. auto: one CUDA device per process; without CUDA
the CPU. trainer (rollout only): the trainer's devices. The side with the least open form selects first.
`{nodes, gpus}` and `auto` prefer free devices, then share the other side's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from asyncrl.base.errors import ConfigError
from asyncrl.config import RunConfig
from asyncrl.config.operation import Devices, NodesConfig, device_numbers
from asyncrl.launch.nodes import Node

NO_DEVICE = "none"
"""Device of simulated and external engines."""


class NodeDevice(NamedTuple):
    node: int
    name: str


Side = tuple[NodeDevice, ...]


def takes_no_device(config: RunConfig) -> bool:
    return not config.rollout.facts.has_model or config.rollout.urls is not None


def cuda_devices(nodes: Sequence[Node]) -> list[Side]:
    return [
        tuple(NodeDevice(number, f"cuda:{index}") for index in range(len(node.machine.cuda)))
        for number, node in enumerate(nodes)
    ]


def select(config: RunConfig, nodes: Sequence[Node]) -> tuple[Side, Side]:
    """Raises ConfigError."""
    rollout = config.rollout
    num_ranks = config.trainer.world_size if any(cuda_devices(nodes)) else 1
    trainer = _Form("placement.trainer", config.placement.trainer, num_ranks, 1)
    split = rollout.tensor_parallel
    engines = _Form("placement.rollout", config.placement.rollout, rollout.max_engines * split, split)
    if engines.form == "auto" and takes_no_device(config):
        engines = engines._replace(form="cpu")
    if trainer.openness <= engines.openness:
        ranks = trainer.select(nodes, ())
        return ranks, engines.select(nodes, ranks)
    sampling = engines.select(nodes, ())
    return trainer.select(nodes, sampling), sampling


class _Form(NamedTuple):
    """`num_wanted` devices, `split` per process."""

    key: str
    form: Devices
    num_wanted: int
    split: int

    @property
    def openness(self) -> int:
        """Return 0 if nothing is open, up to 3 for everything."""
        return 1 if isinstance(self.form, NodesConfig) else {"auto": 2, "trainer": 3}.get(str(self.form), 0)

    def select(self, nodes: Sequence[Node], taken: Side) -> Side:
        cuda = cuda_devices(nodes)
        if self.form == "trainer":
            return taken
        if self.form == "cpu":
            return (NodeDevice(0, "cpu"),)
        if isinstance(self.form, NodesConfig):
            return self._of_nodes(nodes, self.form, taken)
        if self.form == "auto" and any(cuda):
            return self._free(cuda, taken) or taken
        if self.form == "auto":
            num_free = len(nodes) - len({device.node for device in taken})
            num = min(self.num_wanted, max(1, num_free))
            return self._of_nodes(nodes, NodesConfig(nodes=num, gpus=0), taken)
        if self.form == "all":
            refuse_no_cuda(self.key, self.form, nodes)
            return tuple(device for devices in cuda for device in devices)
        return named_devices(self.key, self.form, nodes)

    def _free(self, cuda: Sequence[Side], taken: Side) -> Side:
        """Take whole processes per node, from the smallest sufficient node."""
        left = [[device for device in devices if device not in taken] for devices in cuda]
        whole = [devices[: len(devices) // self.split * self.split] for devices in left]
        whole = whole if any(whole) else left
        used = {device.node for device in taken}

        def order(node: int) -> tuple[bool, bool, int]:
            num = len(whole[node])
            is_small = num < self.num_wanted
            return is_small, node in used, -num if is_small else num

        found: list[NodeDevice] = []
        for node in sorted(range(len(whole)), key=order):
            found += whole[node][: self.num_wanted - len(found)]
        return tuple(sorted(found, key=lambda device: device.node))

    def _of_nodes(self, nodes: Sequence[Node], form: NodesConfig, taken: Side) -> Side:
        """Take free devices per node, else exactly the other side's. Raises ConfigError."""
        cuda = cuda_devices(nodes)
        gpus = form.gpus if form.gpus != "auto" or any(cuda) else 0
        if gpus != 0:
            refuse_no_cuda(self.key, form, nodes)
        every = cuda if gpus != 0 else [(NodeDevice(node, "cpu"),) for node in range(len(nodes))]
        sizes = [gpus if isinstance(gpus, int) and gpus else len(devices) for devices in every]
        num = sum(map(bool, every)) if form.nodes == "all" else form.nodes
        for others in (taken, ()):
            used = {device.node for device in others}
            left = [[one for one in devices if gpus == 0 or one not in others] for devices in every]
            fitting = [node for node, devices in enumerate(left) if devices and len(devices) >= sizes[node]]
            fitting.sort(key=lambda node: (node in used, len(left[node]) - sizes[node]))
            found = tuple(one for node in sorted(fitting[:num]) for one in left[node][: sizes[node]])
            if len(fitting) >= num and (others == taken or {*found} == {*taken}):
                return found
        free = [sum(gpus == 0 or one not in taken for one in devices) for devices in every]
        each = zip(nodes, free, every, strict=True)
        raise ConfigError(
            f"{self.key}={form}, and the devices that the other side leaves are: "
            + ", ".join(f"{node.name} {num_free} of {len(devices)}" for node, num_free, devices in each),
            rule="the two sides have different devices, or exactly the same",
            way_out=f"ask for less, set {self.key}=auto, or add nodes.",
        )


def named_devices(key: str, form: Devices, nodes: Sequence[Node]) -> Side:
    """Raises ConfigError."""
    refuse_no_cuda(key, form, nodes)
    numbers = device_numbers(form) or []
    num_cuda = len(nodes[0].machine.cuda)
    if not numbers or max(numbers) >= num_cuda:
        raise ConfigError(
            f"{key}={form} is not on {nodes[0].name}, which has {num_cuda} CUDA devices",
            rule="numbers count from 0 within CUDA_VISIBLE_DEVICES",
            way_out=f"name a device that exists, or set {key}=auto.",
        )
    return tuple(NodeDevice(0, f"cuda:{number}") for number in numbers)


def refuse_no_cuda(key: str, form: Devices, nodes: Sequence[Node]) -> None:
    if not any(cuda_devices(nodes)):
        raise ConfigError(
            f"{key}={form}, and torch finds no CUDA device",
            rule="it needs the NVIDIA driver, torch with CUDA, and CUDA_VISIBLE_DEVICES",
            way_out=f"set {key}=auto, or cpu.",
        )
