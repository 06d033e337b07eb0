"""Section `trainer`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal

from pydantic import (
    BeforeValidator,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
)

from asyncrl.config.fields import Count, Fraction, FrozenConfig, Name
from asyncrl.config.offload_config import OffloadConfig

CPU_MICRO_BATCH_TOKENS = 3072
# The head is computed in slices of the vocabulary: all logits of 16,384 tokens and
# 150,000 entries would take 10 GB. A slice has at most 8 MiB on a CPU and 256 MiB on
# CUDA, in float32.
MOST_LOGITS = {"cpu": 2**21, "cuda": 2**26}
MIN_SLICE = 256
"""Minimum logits computed at once, in vocabulary entries."""
PROFILE_FOLDER = "profile"
"""Of a run directory; with the files of trainer.profile_steps."""

Beta = Annotated[float, Field(ge=0, lt=1)]


def _spelled(value: object) -> object:
    return "off" if value in (False, "false") else value  # YAML reads off as false


AutoOff = Annotated[Literal["auto", "off"], BeforeValidator(_spelled)]


class LoraConfig(FrozenConfig):
    """Low-rank adapters (https://arxiv.org/abs/2106.09685), trained instead of the base
    weights.
    """

    rank: Count = 16
    """Rank of each adapter."""
    alpha: PositiveFloat = 32.0
    """Adapters are scaled by alpha / rank."""
    targets: list[str] | Literal["all-linear", "all"] = "all-linear"
    """Linear layers with adapters, e.g. [q_proj, v_proj, lm_head] (all-linear = all but the
    head, all = the head too).
    """

    @property
    def scale(self) -> float:
        return self.alpha / self.rank


class TrainerConfig(FrozenConfig):
    """The optimizer steps."""

    free_keys: ClassVar = (
        "world_size",
        "micro_batch_tokens",
        "stream",
        "gradient_checkpointing",
        "offload",
        "compile",
        "timeout_s",
        "logprob_gap_limit",
        "profile_steps",
    )

    num_groups: Count = 8
    """Groups per batch. Each batch makes one policy_version."""
    num_steps: Count = 100
    """Batches of the run."""
    mini_batches: Count = 1
    """Optimizer steps per batch, split by groups; must divide num_groups."""
    epochs: Count = 1
    """Passes over a batch."""
    world_size: Count = 1
    """Trainer processes; above one, the training state is sharded (FSDP2)."""
    optimizer: Literal["adamw", "muon"] = "adamw"
    """adamw, or muon for the matrices of hidden layers and AdamW for all other weights
    (docs/algorithms.md).
    """
    learning_rate: PositiveFloat = 1e-6
    """Peak learning rate."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Learning rate after warm-up: constant, or falling to 0 at num_steps."""
    warmup_steps: NonNegativeInt = 0
    """Steps of linear warm-up."""
    weight_decay: NonNegativeFloat = 0.0
    """Weight decay of matrices."""
    betas: tuple[Beta, Beta] = (0.9, 0.95)
    """AdamW betas."""
    max_grad_norm: PositiveFloat | None = 1.0
    """Clip the gradient to this norm (none = off)."""
    micro_batch_tokens: Count = 16384
    """Maximum tokens per forward-backward pass of a process; a longer sequence gets a
    separate pass.
    """
    stream: AutoOff = "auto"
    """With max_staleness 0, train groups as they end (auto), or the same parts of the
    batch once all have ended (off). Both give the same bits.
    """
    gradient_checkpointing: bool | Fraction = False
    """true = keep only layer inputs for the backward pass: less memory, about a third more time. A number =
    the part of a compiled layer's activations to keep, for example 0.5: the cheapest are recomputed."""
    offload: OffloadConfig = OffloadConfig()
    """Parts of policy, critic and reference that leave the device between uses."""
    compile: bool | Literal["auto"] = "auto"
    """Fuse layers around attention with torch.compile (auto = on CUDA, for models that
    take packed tokens, if a C compiler, Triton and Python's headers are installed).
    """
    deterministic: bool = False
    """Train a batch to the same bits every time, also after a restart, with
    deterministic kernels. A CPU has no others; on CUDA steps are slower (estimated: 10
    %), and FlashAttention 2 takes more memory (estimated: 68 kB per token of a
    micro-batch). An operator without such a kernel ends the run.
    """
    lora: LoraConfig | None = None
    """Train low-rank adapters instead of all weights (none = all weights)."""
    roles: Annotated[dict[Name, LoraConfig], Field(min_length=1)] | None = None
    """Train a policy per role of an agent, each an adapter with the keys of lora, in place of
    lora. A call names its role as `model`. For example {solver: {rank: 16}, critic: {rank: 8}}
    (none = one policy).
    """
    timeout_s: PositiveFloat = 3600.0
    """Timeout for a step, an export or a save, in seconds. On expiry the trainer is
    restarted.
    """
    router_aux_loss: Literal["auto"] | NonNegativeFloat = "auto"
    """Weight of the load-balancing loss of a mixture-of-experts model's routers (auto =
    the router_aux_loss_coef of its config, 0 = off).
    """
    logprob_gap_limit: PositiveFloat | None = None
    """End the run when trainer and engines differ by more than this mean on fresh tokens, in nats (none =
    warn at 0.05)."""
    threads: PositiveInt | Literal["auto"] = "auto"
    """CPU threads of the trainer (auto = the cores that the engines leave)."""

    profile_steps: tuple[PositiveInt, ...] = ()
    """Steps to profile, for example [3, 4]: profile/ in the run directory gets a trace of
    each trainer rank's step, and of each embedded engine's work during it.
    """

    def conflicts(self) -> Iterator[str]:
        if self.roles is not None:
            if self.lora is not None:
                yield ".roles and .lora are both set; remove .lora, and write its rank into each role"
            if self.world_size > 1 or self.offload.by_layer:
                yield ".roles needs whole weights: set .world_size=1 and .offload.by_layer=false"
        if self.optimizer == "muon":
            if self.adapters:
                yield ".optimizer=muon does not train adapters; remove it, or remove .lora and .roles"
            if self.offload.by_layer:
                yield ".optimizer=muon does not run in host memory; remove it, or remove .offload.by_layer"

    @property
    def adapters(self) -> dict[str, LoraConfig]:
        """Return the form of each adapter by role: {"": lora} with one policy, {} without
        adapters.
        """
        if self.lora is not None:
            return {"": self.lora}
        return self.roles or {}

    @property
    def rate_needs_end(self) -> bool:
        """Return whether learning rates depend on num_steps."""
        return self.schedule != "constant"

    @property
    def kept_activations(self) -> float:
        """Return the part of a layer's activations that is kept, 0 to 1, besides its
        inputs.
        """
        given = self.gradient_checkpointing
        return float(not given) if isinstance(given, bool) else given

    def is_sharded(self, device: str, dtype: str) -> bool:
        """Return whether the weights are float32 FSDP2 shards, which also save memory
        on one CUDA device.
        """
        casts_all = (
            device.startswith("cuda") and dtype == "bfloat16" and not self.adapters
        )
        return self.world_size > 1 or self.offload.by_layer or casts_all
