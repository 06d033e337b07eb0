"""Memory of a plan that no process holds alone, or only for a time, on each node: the model as it is loaded,
a checkpoint, weights on their way, and what turns move off a CUDA device.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import astuple, replace

from asyncrl.config import RunConfig
from asyncrl.config.weight_sync import fetches_files
from asyncrl.placement.choice import NodeDevice
from asyncrl.placement.devices import NO_DEVICE, Placement, chunk_devices
from asyncrl.placement.model_shape import ModelShape
from asyncrl.placement.process_memory import Memory, ProcessPlan, Side, item_bytes, num_trained, start_memory

FETCHED_FILES = 2
"""Versions of weights that a node keeps: the one that engines read, and the next one."""


def shared_memory(
    config: RunConfig, shape: ModelShape, placement: Placement, plans: Sequence[ProcessPlan]
) -> Iterator[ProcessPlan]:
    """All of it. `plans`: of the processes."""
    yield from _of_trainer(config, shape, placement, plans)
    sync, lora, first = config.weight_sync, config.trainer.lora, placement.ranks[0]
    size = shape.num_parameters * item_bytes(config.model.dtype, first.name)
    is_turns, evaluates = placement.mode == "colocated", placement.evaluation is not None
    beside = {placement.beside_node} if evaluates else set[int]()
    receivers = {device.node for device in placement.engine_devices if device.name != NO_DEVICE}
    is_fetched = fetches_files(config, has_eval_engine=evaluates) and placement.num_nodes > 1
    on_way, note = Memory(weights=size), "weights on their way, in shared memory"
    if is_turns:
        on_way, note = Memory(weights=min(sync.chunk_bytes, size)), "a chunk of weights"
    elif sync.facts.sends_adapters and lora is not None:
        on_way = Memory(weights=shape.num_adapter_parameters(lora.rank) * 4)
    memories = chunk_devices(config, placement) if is_turns else ()
    for device in memories:
        yield _on(placement, device, "staging", "staging", on_way, note)
    if sync.facts.is_one_kept:
        yield _on(placement, first, "held", "staging", on_way, "the copy that the trainer sends from")
        receivers = set()
    is_file = is_turns or not (sync.facts.is_file_shared or (sync.facts.is_one_kept and not evaluates))
    nodes = receivers if is_turns else receivers | beside | {first.node}
    for node in sorted({first.node} if is_fetched else nodes) if is_file and not memories else ():
        yield _on(placement, NodeDevice(node, "cpu"), "staging", "staging", on_way, note)
    for node in sorted(nodes - {first.node}) if is_fetched and not memories else ():
        kept = Memory(weights=FETCHED_FILES * on_way.weights)
        note = "two versions of the weights, in shared memory"
        yield _on(placement, NodeDevice(node, "cpu"), f"fetched-{node}", "staging", kept, note)
    for node in sorted(beside | {first.node}) if evaluates and is_turns else ():
        note = "a version that is evaluated, in shared memory"
        yield _on(placement, NodeDevice(node, "cpu"), "evaluated", "eval", Memory(weights=size), note)


def _on(
    placement: Placement, device: NodeDevice, name: str, side: Side, memory: Memory, note: str
) -> ProcessPlan:
    return ProcessPlan(name, side, placement.hosts.label(device), 0, memory, note, node=device.node)


def _of_trainer(
    config: RunConfig, shape: ModelShape, placement: Placement, plans: Sequence[ProcessPlan]
) -> Iterator[ProcessPlan]:
    """Of the ranks of each node: what they load, the copy that a checkpoint is written from, and what they
    move off their devices in turns.
    """
    moves = placement.is_on_cuda and placement.moves and not config.trainer.cpu_offload
    for node, num_ranks in Counter(device.node for device in placement.ranks).items():
        host = NodeDevice(node, "cpu")
        if (loaded := start_memory(config, shape, placement.trainer[0], num_ranks)) is not None:
            yield _on(placement, host, "start", "start", *loaded)
        # What turns move to the host is written from there where the host has no memory for a copy.
        if config.checkpoint.every is not None and not moves:
            part = -(-num_trained(config, shape) * num_ranks // config.trainer.world_size)
            note = "the trainer's state, while a checkpoint is written and for the next"
            copied = Memory(weights=4 * part, optimizer=8 * part)
            yield _on(placement, host, "checkpoint", "checkpoint", copied, note)
        if moves:
            held = [plan.memory for plan in plans if plan.side == "trainer" and plan.node == node]
            sums = (sum(each) for each in zip(*map(astuple, held), strict=True))
            moved = replace(Memory(*sums), gradients=0, activations=0)
            note = "the trainer's state while the engines have the device"
            yield _on(placement, host, "offloaded", "host", moved, note)
