"""Bytes of the trainer's processes, from the config and the model's shape. Imports no torch."""

from __future__ import annotations

from dataclasses import astuple, dataclass, replace

from asyncrl.config import RunConfig
from asyncrl.config.learning import CPU_MICRO_BATCH_TOKENS
from asyncrl.placement.model_shape import ModelShape


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


def trainer_memory(config: RunConfig, shape: ModelShape, device: str) -> Memory:
    """Of one rank: weights that compute, AdamW's two moments (and float32 masters, where they are not the
    model's own), one micro-batch, with what is gathered of shards meanwhile.
    """
    trainer, lora, item = config.trainer, config.trainer.lora, item_bytes(config.model.dtype, device)
    trained, is_sharded = num_trained(config, shape), is_trainer_sharded(config, device)
    has_masters = item == 2 and lora is None and not is_sharded
    has_reference = config.algorithm.kl_coefficient > 0 and lora is None
    base = shape.num_parameters * item if has_masters or lora is not None else 0
    merged = shape.num_linear * item if lora is not None and lora.merge == "step" else 0
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
    work = shape.step_bytes(tokens, item, kind, is_checkpointed=is_checkpointed, is_trained=frees_gradients)
    if is_sharded:
        work += shape.gathered_bytes(item, trainer.world_size, is_trained=is_trained)
    return replace(whole.split(trainer.world_size), activations=work)


def is_trainer_sharded(config: RunConfig, device: str) -> bool:
    """TrainerConfig.is_sharded, of the run."""
    is_half = item_bytes(config.model.dtype, device) == 2
    return config.trainer.is_sharded(device, "bfloat16" if is_half else "float32")


def item_bytes(dtype: str, device: str) -> int:
    """Bytes of a weight where it computes."""
    return 2 if dtype == "bfloat16" or (dtype == "auto" and device.startswith("cuda")) else 4
