"""The settings of a run. Knows what is allowed; knows no room, no torch, no device."""

from asyncrl.config.generation import (
    BufferConfig,
    EvalConfig,
    ObserveConfig,
    RolloutConfig,
    SimulatedConfig,
    WeightSyncConfig,
)
from asyncrl.config.learning import AlgorithmConfig, LoraConfig, TrainerConfig
from asyncrl.config.load import load_config, run_config_yaml
from asyncrl.config.model_task import (
    GatewayConfig,
    GeneratorConfig,
    ModelConfig,
    Outcomes,
    ScratchConfig,
    TaskConfig,
)
from asyncrl.config.placement import PlacementConfig
from asyncrl.config.run_config import RunConfig
from asyncrl.config.sections import CheckpointConfig, JournalConfig, SupervisionConfig

__all__ = [
    "AlgorithmConfig",
    "BufferConfig",
    "CheckpointConfig",
    "EvalConfig",
    "GatewayConfig",
    "GeneratorConfig",
    "JournalConfig",
    "LoraConfig",
    "ModelConfig",
    "ObserveConfig",
    "Outcomes",
    "PlacementConfig",
    "WeightSyncConfig",
    "RolloutConfig",
    "RunConfig",
    "ScratchConfig",
    "SimulatedConfig",
    "SupervisionConfig",
    "TaskConfig",
    "TrainerConfig",
    "load_config",
    "run_config_yaml",
]
