"""Bytes of weights, optimizer, caches and activations, by process."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import astuple, dataclass, replace
from typing import Literal

from asyncrl.config import AlgorithmConfig, ModelConfig, RunConfig
from asyncrl.config.engine_kinds import ENGINES
from asyncrl.config.offload_config import (
    CRITIC_PASS,
    CRITIC_STEP,
    POLICY_PASS,
    POLICY_STEP,
    REFERENCE_WEIGHTS,
    ModelPart,
    Rule,
    Trained,
)
from asyncrl.config.trainer_config import CPU_MICRO_BATCH_TOKENS
from asyncrl.engines.kinds import Role, num_caches
from asyncrl.launch.model_sizes import ModelShape, model_shape, read_architecture
from asyncrl.launch.placement import NO_DEVICE, Side

DETERMINISTIC_BYTES = 132 * 128 * 4
"""Per token, of FlashAttention 2's deterministic backward pass: a query head's float32
gradient, for each of an H100's multiprocessors, with heads of 128.
"""
GRAPH_ROWS, GRAPH_ROW_BYTES = 32, 40
"""Rows that a graph draws at once (DRAWN_ROWS of fused_decode.py), and bytes for each
row and token of the vocabulary: 28 of five arrays, and space between them.
"""
ORTHOGONAL_BYTES = 16
"""Per number of the matrix that Muon orthogonalises, for temporary ones in bfloat16
(measured on a CPU: 11 to 15).
"""
TOKEN_BYTES = 16
"""Id, version, engine and logprob of a token."""


@dataclass(frozen=True, slots=True)
class Memory:
    """`parameters`: with float32 masters; `optimizer`: with gradients; `copies`: second
    weights, or offloaded state.
    """

    parameters: int = 0
    optimizer: int = 0
    kv: int = 0
    micro_batch: int = 0
    copies: int = 0

    @property
    def total(self) -> int:
        return sum(astuple(self))

    def split(self, num: int) -> Memory:
        return Memory(*(-(-size // num) for size in astuple(self)))


def loaded_bytes(config: RunConfig, shape: ModelShape, *, item_bytes: int) -> int:
    """Return the bytes of the model's weights as the trainer loads them on a host."""
    is_half = (
        bool(config.trainer.adapters)
        or "bfloat16" in read_architecture(config.model).values()
    )
    return shape.num_parameters * (item_bytes if is_half else 4)


def batch_bytes(config: RunConfig, shape: ModelShape) -> int:
    """Return the largest size of a batch, whose teachers' ids and logprobs, and whose
    experts, do not compress.

    Example: 1,024 rollouts of 32,768 tokens have 0.5 GiB, and with the routing of a
    model of 48 layers that uses 8 experts in each, 25 GiB.
    """
    num_ids = max(one.num_distill_ids for one in config.all_algorithms)
    num_experts = shape.routed if config.algorithm.router_replay else 0
    token_bytes = TOKEN_BYTES + 8 * num_ids + 2 * num_experts
    num_rollouts = config.trainer.num_groups * config.rollout.group_size
    return token_bytes * num_rollouts * config.rollout.max_length


def disk_sizes(
    config: RunConfig, shape: ModelShape, checkpoint_bytes: int
) -> dict[str, int]:
    """Return the largest sizes of checkpoints and journal in the run directory."""
    checkpoint, trainer = config.checkpoint, config.trainer
    steps = trainer.num_steps
    # one is written before one is removed
    num_kept = checkpoint.keep_last + 1 + checkpoint.keep_best
    # Without keep_every the divisor is above `steps`: 0.
    num_kept += steps // (checkpoint.keep_every or steps + 1)
    if config.journal.keep == "checkpoint":
        steps = min(steps, (checkpoint.every or steps) * (checkpoint.keep_last + 1))
    return {
        f"{num_kept} checkpoints": num_kept * checkpoint_bytes,
        "journal": steps * batch_bytes(config, shape),
    }


def num_trained(config: RunConfig, shape: ModelShape) -> int:
    """Return the number of trained parameters, assuming adapters on seven matrices per
    layer, and on the head if targets are named.
    """
    if not config.trainer.adapters:
        return shape.num_parameters
    num = 0
    for lora in config.trainer.adapters.values():
        widths = shape.layers * 7 * (shape.hidden + shape.active)
        if lora.targets != "all-linear":
            widths += shape.hidden + shape.vocab
        num += lora.rank * widths
    return num


def critic_run(config: RunConfig) -> tuple[RunConfig, ModelShape] | None:
    """Return a run that trains the critic's model as its policy, and the shape of that
    model without its head; None without a critic.
    """
    critic = config.critic
    if critic is None:
        return None
    model = config.model
    if critic.path is not None:
        model = ModelConfig(path=critic.path, dtype=config.model.dtype)
    shape = model_shape(model)
    head = shape.embeddings - shape.vocab * shape.hidden  # 0 if tied
    update: dict[str, object] = {
        "critic": None,
        "model": model,
        "algorithm": AlgorithmConfig(),
        "trainer": config.trainer.model_copy(update={"lora": None, "roles": None}),
    }
    without_head = replace(
        shape,
        num_parameters=shape.num_parameters - head,
        embeddings=shape.embeddings - head,
    )
    return config.model_copy(update=update), without_head


def saved_bytes(config: RunConfig, shape: ModelShape) -> int:
    """Return the bytes of a checkpoint's weights and optimizer state."""
    runs = [(config, shape), critic_run(config)]
    return sum(4 * num_trained(*run) + moment_bytes(*run) for run in runs if run)


def moment_bytes(config: RunConfig, shape: ModelShape) -> int:
    """Return the bytes of the optimizer's state, in float32: AdamW has two numbers per
    weight, Muon one per weight of a hidden matrix.
    """
    trained = num_trained(config, shape)
    if config.trainer.optimizer == "muon":
        return 4 * (trained + shape.embeddings)
    return 8 * trained


def leaving_parts(config: RunConfig, *, moves: bool) -> list[ModelPart]:
    """Return the parts that are in host memory at times. `moves`: the engines take the
    device. A gradient is kept only within a step.
    """
    return [
        one
        for one, rule in config.offload_rules.items()
        if config.trainer.offload.by_layer
        or rule == "always"
        or (rule == "auto" and moves and one.part != "gradients")
    ]


@dataclass(frozen=True, slots=True)
class RankMemory:
    """Bytes of a trainer rank: of its models' parts, and of a micro-batch of each
    model. `step`: temporary tensors of an optimizer step.
    """

    parts: Mapping[ModelPart, int]
    micro_batches: Mapping[Trained, int]
    step: int = 0

    def peak(self, rules: Mapping[ModelPart, Rule]) -> Memory:
        """Return the largest sum of a step's phases: the parts in use, parts that never
        leave within a step, and a micro-batch.

        Example, in GiB: a policy of 4 for weights, 4 for gradients, 8 for the optimizer
        and 6 for a micro-batch needs 22. With the rule "always" for its optimizer a
        pass needs 4 + 4 + 6 = 14, and the optimizer step 4 + 4 + 8 = 16, the peak.
        """
        passes: dict[Trained, tuple[ModelPart, ...]] = {
            "policy": POLICY_PASS,
            "reference": (REFERENCE_WEIGHTS,),
            "critic": CRITIC_PASS,
        }
        sums = [
            self._phase(passes[model], micro_batch, rules)
            for model, micro_batch in self.micro_batches.items()
        ]
        sums += [
            self._phase(step, self.step, rules) for step in (POLICY_STEP, CRITIC_STEP)
        ]
        return max(sums, key=lambda memory: memory.total)

    def _phase(
        self,
        used: tuple[ModelPart, ...],
        micro_batch: int,
        rules: Mapping[ModelPart, Rule],
    ) -> Memory:
        here = {
            one: size
            for one, size in self.parts.items()
            if rules[one] != "always" or one in used
        }
        reference = here.pop(REFERENCE_WEIGHTS, 0)
        weights = sum(size for one, size in here.items() if one.part == "weights")
        return Memory(
            parameters=weights,
            optimizer=sum(here.values()) - weights,
            micro_batch=micro_batch,
            copies=reference,
        )

    def total_of(self, parts: Collection[ModelPart]) -> int:
        return sum(size for one, size in self.parts.items() if one in parts)


def rank_memory(
    config: RunConfig, shape: ModelShape, device: str, *, in_parts: bool = False
) -> RankMemory:
    item = item_bytes(config.model.dtype, device)
    dtype = "bfloat16" if item == 2 else "float32"
    is_sharded = config.trainer.is_sharded(device, dtype)
    memory = model_memory(
        config, shape, device, "policy", is_sharded=is_sharded, in_parts=in_parts
    )
    critic = critic_run(config)
    if critic is None:
        return memory
    # Sharded as the policy is, which may have adapters.
    second = model_memory(
        *critic, device, "critic", is_sharded=is_sharded, in_parts=in_parts
    )
    return replace(
        memory,
        parts={**memory.parts, **second.parts},
        micro_batches={**memory.micro_batches, **second.micro_batches},
        step=max(memory.step, second.step),
    )


def model_memory(
    config: RunConfig,
    shape: ModelShape,
    device: str,
    model: Literal["policy", "critic"],
    *,
    is_sharded: bool,
    in_parts: bool,
) -> RankMemory:
    """A sharded rank gathers embeddings and one layer. Excludes weights held for the
    engines.
    """
    trainer = config.trainer
    has_adapters = bool(trainer.adapters)
    item = item_bytes(config.model.dtype, device)
    num = shape.num_parameters
    trained = num_trained(config, shape)
    # Weights of 2 bytes are too coarse for small updates: the optimizer changes a
    # float32 copy.
    has_masters = item == 2 and not has_adapters and not is_sharded
    weights = item * num if has_masters or has_adapters else 0
    if not has_masters:
        weights += 4 * trained
    of_optimizer = moment_bytes(config, shape)
    if has_masters:
        of_optimizer += 4 * trained
    parts = {
        ModelPart(model, "weights"): weights,
        # Parts of a batch are added up as integers of 8 bytes.
        ModelPart(model, "gradients"): (4 + 8 * in_parts) * trained,
        ModelPart(model, "optimizer"): of_optimizer,
    }
    kind = device.partition(":")[0]
    tokens = trainer.micro_batch_tokens
    if kind == "cpu":
        tokens = min(tokens, CPU_MICRO_BATCH_TOKENS)
    # a longer sequence is its own micro-batch
    tokens = max(tokens, config.rollout.max_length)
    work = shape.activation_bytes(tokens, item, kind, kept=trainer.kept_activations)
    if trainer.deterministic and kind == "cuda":
        work += tokens * DETERMINISTIC_BYTES
    if is_sharded:
        layer = (num - shape.embeddings) // max(1, shape.layers)
        work += 2 * item * (shape.embeddings + layer)
    micro_batches: dict[Trained, int] = {model: work}
    if model == "policy" and config.has_reference:
        parts[REFERENCE_WEIGHTS] = item * num
        # Without a backward pass a layer's tensors are freed after it.
        forward = tokens * (4 * shape.hidden + 3 * shape.active) * item
        forward += 2 * 4 * shape.logits_at_once(tokens, kind)
        micro_batches["reference"] = min(work, forward)
    ranks = trainer.world_size
    split = {one: -(-size // ranks) for one, size in parts.items()}
    # Gate and up may be one matrix.
    step = ORTHOGONAL_BYTES * 2 * shape.hidden * shape.active
    if trainer.optimizer == "adamw":
        step = 0
    return RankMemory(split, micro_batches, step)


def server_memory(
    config: RunConfig, shape: ModelShape, role: Role, devices: Side, *, stages: bool
) -> Memory:
    """Return a server's memory per device. `shape`: of the run's model. `stages`: new
    weights arrive during generation.
    """
    device = devices[0].name
    if role.url or device == NO_DEVICE:
        return Memory()
    item = item_bytes(config.model.dtype, device)
    if role.model is not None:
        shape = model_shape(role.model.model)
    weights = shape.num_parameters * item
    width = (4 * shape.hidden + 3 * shape.active) * item
    if role.engine is None:
        weights = weights if role.model else 0
        return Memory(parameters=weights, micro_batch=role.batch_tokens * width)
    engine = ENGINES[role.engine]
    pushed = weights
    if role.serves_policy and config.trainer.adapters:
        pushed = pushed_bytes(config, shape, item)
        weights += pushed
    slots = num_caches(config, role) * role.slots + role.score_slots
    # With pages, sequences wait while the cache is full, so only one must fit. Without
    # pages each slot holds its full length from the start.
    sequences = 1 if engine.pages_kv and device != "cpu" else slots
    cached = sequences * engine.kv_length(role.max_length)
    tokens = min(engine.forward_tokens, slots * role.max_length)
    whole = Memory(
        parameters=weights,
        kv=cached * shape.layers * shape.cached * item,
        micro_batch=tokens * width + slots * shape.vocab * 4 * engine.logit_copies,
        copies=pushed if stages and engine.stages_weights else 0,
    )
    return whole.split(len(devices))


def pushed_bytes(config: RunConfig, shape: ModelShape, item_bytes: int) -> int:
    """Return the bytes of a push: all weights, or the adapters."""
    return item_bytes * num_trained(config, shape)


def graph_bytes(config: RunConfig, shape: ModelShape, device: str) -> int:
    """Return what the graphs of fused decode steps hold, also asleep: logits, and the
    arrays that draw GRAPH_ROWS of them.
    """
    if not config.rollout.fused_decode or not device.startswith("cuda"):
        return 0
    item = item_bytes(config.model.dtype, device)
    slots = config.rollout.num_slots
    return shape.vocab * (slots * item + GRAPH_ROWS * GRAPH_ROW_BYTES)


def item_bytes(dtype: str, device: str) -> int:
    return (
        2
        if dtype == "bfloat16" or (dtype == "auto" and device.startswith("cuda"))
        else 4
    )
