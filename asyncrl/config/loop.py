"""Sections `rollout`, `buffer`, `trainer`, `algorithm`, `publisher`, `placement`, `observe`: how the loop runs."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, NonNegativeInt, PositiveInt, model_validator

from asyncrl.config.base import Device, FrozenConfig

Port = Annotated[int, Field(ge=1, le=65535)]
Beta = Annotated[float, Field(ge=0, lt=1)]


class RolloutConfig(FrozenConfig):
    """How completions are sampled, and by how many engine servers."""

    group_size: int = Field(default=8, ge=1)
    """Rollouts of one prompt, scored against each other."""
    num_engines: int = Field(default=1, ge=1)
    """Engine servers."""
    engine: Literal["embedded", "simulated"] = "embedded"
    """embedded: torch, any Hugging Face causal model. simulated: a latency model without a model, for load tests."""
    slots: int = Field(default=64, ge=1)
    """Sequences that one engine decodes at once."""
    max_tokens: int = Field(default=256, ge=1)
    """Most tokens sampled in one rollout."""
    max_prompt_tokens: int = Field(default=256, ge=1)
    """Longest prompt; with max_tokens it sizes the KV cache. A longer prompt is a failed rollout, never cut."""
    temperature: float = Field(default=1.0, gt=0)
    """Sampling temperature; logprobs on both sides are those of the tempered distribution."""
    timeout_s: float | None = Field(default=600.0, gt=0)
    """Fail a rollout after this many seconds (none = off)."""
    retries: int = Field(default=2, ge=0)
    """Times a failed rollout is tried again before it counts as failed."""
    max_failed_groups: int = Field(default=16, ge=1)
    """End the run when this many groups in a row had no usable rollout."""
    deterministic: bool = True
    """A request's tokens depend on its prompt, seed and weights alone, not on what runs beside it."""
    threads: PositiveInt | Literal["auto"] = "auto"
    """CPU threads of each engine server (auto = a quarter of the cores, at least 1)."""
    ports: list[Port] | None = None
    """Ports of the engine servers on 127.0.0.1, one each (none = any free ones)."""

    @model_validator(mode="after")
    def _a_port_each(self) -> Self:
        if self.ports is not None and len(self.ports) != self.num_engines:
            raise ValueError(
                f"rollout.ports names {len(self.ports)} ports for rollout.num_engines={self.num_engines}; give one port an engine, or none"
            )
        return self


class BufferConfig(FrozenConfig):
    """How old the data may be."""

    max_staleness: int = Field(default=1, ge=0)
    """Hard bound, in policy versions, on the age of every token with a loss weight. 0 = on-policy."""
    look_ahead: Literal["auto"] | NonNegativeInt = "auto"
    """Batches beyond the current one that may be started, at most max_staleness (auto = the smallest that keeps
    the trainer busy)."""
    on_overdue: Literal["wait", "mask", "drop"] = "wait"
    """When a straggler's deadline is in danger: wait for it, train on and mask its old tokens, or drop and regenerate it."""

    @model_validator(mode="after")
    def _look_ahead_fits(self) -> Self:
        if self.look_ahead != "auto" and self.look_ahead > self.max_staleness:
            raise ValueError(
                f"buffer.look_ahead={self.look_ahead} is above buffer.max_staleness={self.max_staleness}, so a group could start "
                f"that is too old when its turn comes; set buffer.look_ahead to auto or 0..{self.max_staleness}, "
                f"or raise buffer.max_staleness to {self.look_ahead}"
            )
        return self


class TrainerConfig(FrozenConfig):
    """The optimizer steps."""

    num_groups: int = Field(default=8, ge=1)
    """Groups in a mini-batch: one optimizer step each."""
    num_steps: int = Field(default=100, ge=1)
    """Optimizer steps of the run."""
    world_size: Literal[1] = 1
    """Trainer processes (one, for the time being)."""
    learning_rate: float = Field(default=1e-6, gt=0)
    """Peak learning rate of AdamW."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """What the learning rate does after the warm-up: stay, or fall to 0 at num_steps."""
    warmup_steps: int = Field(default=0, ge=0)
    """Steps of linear warm-up."""
    weight_decay: float = Field(default=0.0, ge=0)
    """AdamW weight decay."""
    betas: tuple[Beta, Beta] = (0.9, 0.95)
    """AdamW betas."""
    max_grad_norm: float | None = Field(default=1.0, gt=0)
    """Clip the gradient to this norm (none = off)."""
    micro_batch_tokens: int = Field(default=16384, ge=1)
    """Most tokens, padding included, in one forward-backward. Changes memory, never the result."""
    timeout_s: float = Field(default=3600.0, gt=0)
    """Seconds until an optimizer step, an export or a save that does not end is taken for hung and ends the run."""
    logprob_gap_limit: float | None = Field(default=None, gt=0)
    """End the run when engine and trainer disagree by more than this mean, in nats, on fresh tokens (none = warn at 0.05)."""
    threads: PositiveInt | Literal["auto"] = "auto"
    """CPU threads of the trainer (auto = the cores that the engines leave, at least 1)."""
    port: Port | None = None
    """Port of the trainer on 127.0.0.1 (none = any free one)."""


class AlgorithmConfig(FrozenConfig):
    """Advantages and loss."""

    advantage: str = "grpo"
    """Built-in name (grpo) or `module:function`."""
    loss: str = "ppo_clip"
    """Built-in name (ppo_clip, decoupled_ppo, tis) or `module:function`."""
    clip_low: float = Field(default=0.2, gt=0, lt=1)
    """Lower clip range of the probability ratio: 1 - clip_low."""
    clip_high: float = Field(default=0.2, gt=0)
    """Upper clip range of the probability ratio: 1 + clip_high."""
    importance_cap: float = Field(default=2.0, gt=0)
    """Largest importance weight towards the behaviour policy (decoupled_ppo and tis)."""


class PublisherConfig(FrozenConfig):
    """How new weights reach the engines."""

    transport: Literal["shm"] = "shm"
    """shm: a safetensors file in shared memory."""
    interrupt: Literal["abort", "keep", "keep_kv", "wait"] = "abort"
    """What a swap does to running requests: abort and resume them from their tokens, keep them with a recomputed KV
    cache, keep them over the old KV cache, or wait until they are done."""
    timeout_s: float = Field(default=600.0, gt=0)
    """Seconds until a push that does not finish ends the run."""


class PlacementConfig(FrozenConfig):
    """Which device each side uses."""

    trainer: Device = "auto"
    """Device of the trainer."""
    rollout: Device = "auto"
    """Device of the engines."""


class ObserveConfig(FrozenConfig):
    """What is shown and written."""

    console: Literal["auto", "live", "plain", "none"] = "auto"
    """live: a table that updates; plain: one line a step; auto = live on a terminal, else plain."""
    tensorboard: bool = True
    """Write TensorBoard events to RUN_DIR/tensorboard."""
    heartbeat_s: float = Field(default=60.0, gt=0)
    """End the run when an engine or trainer process does not answer for this many seconds."""
