"""What each process of a plan holds, and when; bytes of the trainer's, from the config and the model's shape.
Imports no torch.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass, replace
from typing import Literal, get_args

from asyncrl.config import RunConfig
from asyncrl.config.learning import CPU_MICRO_BATCH_TOKENS
from asyncrl.placement.devices import Mode
from asyncrl.placement.model_shape import ModelShape

Phase = Literal["start", "generation", "training", "publish"]
PHASES: tuple[Phase, ...] = get_args(Phase)
Side = Literal["controller", "trainer", "shards", "engine", "eval", "staging", "host", "checkpoint", "start"]
"""Owner of the memory. shards: state of the trainer that trainer.cpu_offload has in host memory; eval: what
works beside both sides at any time, the teacher too; staging: weights between trainer and engines, in memory
that both open; host: state that the trainer moved off a CUDA device; checkpoint: the copy that one is written
from, at any time after the start; start: what the trainer's processes load before their weights are where
they stay.
"""


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of the largest parts. `copies`: a second set of weights (staged by an engine, or the trainer's
    reference). `activations`: of a forward pass, with logits, and what it keeps for a backward pass.
    """

    weights: int = 0
    copies: int = 0
    gradients: int = 0
    optimizer: int = 0
    activations: int = 0
    kv: int = 0

    @property
    def total(self) -> int:
        """All of it."""
        return sum(astuple(self))

    def split(self, num: int) -> Memory:
        """The part of one of `num` processes."""
        return Memory(*(-(-size // num) for size in astuple(self)))


@dataclass(frozen=True, slots=True)
class ProcessPlan:
    """One process of the run, or memory that several share. `device`: with the name of its node, NAME/cuda:0,
    where the run has several.
    """

    name: str
    side: Side
    device: str
    threads: int
    memory: Memory
    note: str
    all_kv: int = 0
    """Where memory.kv is what one sequence takes: what all slots would take, each at full length."""
    node: int = 0

    @property
    def device_name(self) -> str:
        """Its device, as it is called on its node."""
        return self.device.rpartition("/")[2]

    def held_bytes(self, phase: Phase, mode: Mode) -> int:
        """What it holds in this phase, in that of the start when the trainer has loaded its weights. Apart,
        everything at any time after it; in turns, what the turn leaves it. (In turns in which both sides
        stay, `mode` is apart.)
        """
        memory = self.memory
        match self.side, phase:
            case "start", _:
                return memory.total if phase == "start" else 0
            case (("trainer" | "shards"), "start"):
                return memory.weights + memory.copies
            case ("staging" | "host" | "checkpoint", "start"):
                return 0
            case "engine", "start" if mode == "colocated":  # they are started before it, and sleep
                return 0
        if mode == "apart":
            return memory.total
        match self.side, phase:
            case ("trainer", "generation") | ("engine", "training") | ("host", "training"):
                return 0
            case "trainer", "publish":  # no gradients, and the optimizer is moved before the engines wake
                return memory.weights + memory.copies
            case "engine", "publish":  # the KV cache wakes last
                return memory.weights
            case "staging", "generation" | "training" if self.device_name == "cpu":
                return 0  # on a CUDA device it is made once, for good
            case "host", "publish":
                return memory.optimizer
        return memory.total


def pinned(memory: Memory) -> Memory:
    """What of weights and gradients torch pins, each tensor rounded up to a power of two: at most twice."""
    weights, copies, gradients = memory.weights, memory.copies, memory.gradients
    return replace(memory, weights=2 * weights, copies=2 * copies, gradients=2 * gradients)


def size_text(size: int) -> str:
    """Bytes for people."""
    return f"{size / 2**30:.2f} GiB" if size >= 2**30 else f"{size / 2**20:.1f} MiB"


def num_trained(config: RunConfig, shape: ModelShape) -> int:
    """Parameters that the optimizer changes."""
    lora = config.trainer.lora
    return shape.num_parameters if lora is None else shape.num_adapter_parameters(lora.rank)


def start_memory(config: RunConfig, shape: ModelShape, device: str, ranks: int) -> tuple[Memory, str] | None:
    """Host memory of the trainer's start on a node with so many ranks, beside the weights that stay, and what
    it is: the whole model in the process that trains it on a CUDA device; of each rank a tensor, or the whole
    model where transformers has to convert what is stored. None where there is nothing beside.
    """
    trainer, is_sharded = config.trainer, is_trainer_sharded(config, device)
    item = 4 if trainer.lora is None else item_bytes(config.model.dtype, device)
    if is_sharded and not shape.is_converted:
        memory, note = Memory(weights=ranks * shape.largest_tensor * item), "of each rank the largest tensor"
    elif is_sharded or device != "cpu":
        has_reference = is_sharded and config.algorithm.kl_coefficient > 0 and trainer.lora is None
        copies = ranks * shape.num_parameters * item if has_reference else 0
        memory = Memory(weights=ranks * shape.num_parameters * item, copies=copies)
        note = "of each trainer process the whole model"
    else:
        return None
    return memory, f"{note}, as it is loaded"


def compiles_layers(config: RunConfig, shape: ModelShape, device: str, *, has_compiler: bool = True) -> bool:
    """Whether layers are counted as compiled ones: what trainer.compile stands for, as far as the shape tells
    it. Those with experts are not, whether compiled or not: what they keep then was not measured.
    """
    asked, is_half = config.trainer.compile, item_bytes(config.model.dtype, device) == 2
    on_cuda = device != "cpu"
    can = has_compiler and not shape.routed and (is_half or not on_cuda)
    return can and asked is not False and (asked is True or on_cuda)


def trainer_memory(config: RunConfig, shape: ModelShape, device: str, *, has_compiler: bool = True) -> Memory:
    """Of one rank: weights that compute, AdamW's two moments (and float32 masters, where they are not the
    model's own), one micro-batch, with what is gathered of shards meanwhile, or what of those outside layers
    is reduced over the ranks at the end.
    """
    trainer, lora, item = config.trainer, config.trainer.lora, item_bytes(config.model.dtype, device)
    trained, is_sharded = num_trained(config, shape), is_trainer_sharded(config, device)
    has_masters = item == 2 and lora is None and not is_sharded
    has_reference = config.algorithm.kl_coefficient > 0 and lora is None
    base = shape.num_parameters * item if has_masters or lora is not None else 0
    merged = shape.num_linear * item if trainer.keeps_merged else 0
    whole = Memory(
        weights=base + (0 if has_masters else trained * 4),
        copies=shape.num_parameters * item if has_reference else merged,
        gradients=trained * 4,
        optimizer=trained * (12 if has_masters else 8),
    )
    most = CPU_MICRO_BATCH_TOKENS if device == "cpu" else trainer.micro_batch_tokens
    # A sequence that is longer than a micro-batch is one of its own.
    tokens = max(min(trainer.micro_batch_tokens, most), config.rollout.max_length)
    kind, is_checkpointed = device.partition(":")[0], trainer.gradient_checkpointing
    is_trained = lora is None
    frees_gradients = is_trained and not is_sharded
    is_compiled = compiles_layers(config, shape, device, has_compiler=has_compiler)
    work = shape.step_bytes(
        tokens,
        item,
        kind,
        is_checkpointed=is_checkpointed,
        is_trained=frees_gradients,
        is_compiled=is_compiled,
    )
    if is_sharded:
        work += shape.gathered_bytes(item, trainer.world_size, is_trained=is_trained)
        work = max(work, shape.reduced_bytes(item, trainer.world_size) if is_trained else 0)
    return replace(whole.split(trainer.world_size), activations=work)


def is_trainer_sharded(config: RunConfig, device: str) -> bool:
    """TrainerConfig.is_sharded, of the run."""
    is_half = item_bytes(config.model.dtype, device) == 2
    return config.trainer.is_sharded(device, "bfloat16" if is_half else "float32")


def item_bytes(dtype: str, device: str) -> int:
    """Bytes of a weight where it computes."""
    return 2 if dtype == "bfloat16" or (dtype == "auto" and device.startswith("cuda")) else 4
