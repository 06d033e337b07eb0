"""The whole config of a run."""

from __future__ import annotations

from pydantic import Field

from asyncrl.config.base import FrozenConfig
from asyncrl.config.loop import (
    AlgorithmConfig,
    BufferConfig,
    ObserveConfig,
    PlacementConfig,
    PublisherConfig,
    RolloutConfig,
    TrainerConfig,
)
from asyncrl.config.model import GeneratorConfig, ModelConfig, TaskConfig


class RunConfig(FrozenConfig):
    """Everything that `asyncrl run` is told. Written as config.yaml into the run directory: that file is the run."""

    seed: int = Field(default=0, ge=0, lt=2**31)
    """Seed of the weights made from scratch, the shuffle and every sampled token."""
    model: ModelConfig
    """What learns."""
    task: TaskConfig
    """Prompts and rewards."""
    generator: GeneratorConfig = GeneratorConfig()
    """How a rollout is run."""
    rollout: RolloutConfig = RolloutConfig()
    """How completions are sampled."""
    buffer: BufferConfig = BufferConfig()
    """How old the data may be."""
    trainer: TrainerConfig = TrainerConfig()
    """The optimizer steps."""
    algorithm: AlgorithmConfig = AlgorithmConfig()
    """Advantages and loss."""
    publisher: PublisherConfig = PublisherConfig()
    """How new weights reach the engines."""
    placement: PlacementConfig = PlacementConfig()
    """Which device each side uses."""
    observe: ObserveConfig = ObserveConfig()
    """What is shown and written."""
