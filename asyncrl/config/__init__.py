"""The settings of a run. Knows what is allowed; knows no room, no torch, no device."""

from asyncrl.config.load import load_config, run_config_yaml
from asyncrl.config.loop import (
    AlgorithmConfig,
    BufferConfig,
    ObserveConfig,
    PlacementConfig,
    PublisherConfig,
    RolloutConfig,
    TrainerConfig,
)
from asyncrl.config.model import GeneratorConfig, ModelConfig, ScratchConfig, TaskConfig
from asyncrl.config.run import RunConfig

__all__ = [
    "AlgorithmConfig",
    "BufferConfig",
    "GeneratorConfig",
    "ModelConfig",
    "ObserveConfig",
    "PlacementConfig",
    "PublisherConfig",
    "RolloutConfig",
    "RunConfig",
    "ScratchConfig",
    "TaskConfig",
    "TrainerConfig",
    "load_config",
    "run_config_yaml",
]
