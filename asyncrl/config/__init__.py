"""The settings of a run."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from asyncrl.config.algorithm_config import AlgorithmConfig as AlgorithmConfig
    from asyncrl.config.buffer_config import BufferConfig as BufferConfig
    from asyncrl.config.eval_config import EvalConfig as EvalConfig
    from asyncrl.config.gateway_config import GatewayConfig as GatewayConfig
    from asyncrl.config.generator_config import GeneratorConfig as GeneratorConfig
    from asyncrl.config.generator_config import OnTimeout as OnTimeout
    from asyncrl.config.job_config import JobConfig as JobConfig
    from asyncrl.config.load import load_any as load_any
    from asyncrl.config.load import load_config as load_config
    from asyncrl.config.load import run_config_yaml as run_config_yaml
    from asyncrl.config.model_config import ModelConfig as ModelConfig
    from asyncrl.config.rollout_config import RolloutConfig as RolloutConfig
    from asyncrl.config.run_config import RunConfig as RunConfig
    from asyncrl.config.task_config import TaskConfig as TaskConfig
    from asyncrl.config.trainer_config import TrainerConfig as TrainerConfig

_FOUND_IN = {
    "AlgorithmConfig": "algorithm_config",
    "BufferConfig": "buffer_config",
    "EvalConfig": "eval_config",
    "GatewayConfig": "gateway_config",
    "GeneratorConfig": "generator_config",
    "OnTimeout": "generator_config",
    "JobConfig": "job_config",
    "load_any": "load",
    "load_config": "load",
    "run_config_yaml": "load",
    "ModelConfig": "model_config",
    "RolloutConfig": "rollout_config",
    "RunConfig": "run_config",
    "TaskConfig": "task_config",
    "TrainerConfig": "trainer_config",
}
"""Imported on access: the settings of an extension import asyncrl.config.fields, and
must not import the sections that they extend.
"""


def __getattr__(name: str) -> Any:
    if name not in _FOUND_IN:
        raise AttributeError(f"module 'asyncrl.config' has no attribute {name!r}")
    return getattr(importlib.import_module(f"asyncrl.config.{_FOUND_IN[name]}"), name)
