"""Settings of a job without engines, as the planner, the trainer and the reports read
them.
"""

from __future__ import annotations

from typing import Any, ClassVar

from asyncrl.config.algorithm_config import AlgorithmConfig
from asyncrl.config.engine_facts import EngineCapabilities
from asyncrl.config.fields import Count
from asyncrl.config.rollout_config import RolloutConfig
from asyncrl.config.run_config import RunConfig
from asyncrl.config.task_config import Tasks
from asyncrl.config.weight_sync_config import WeightSyncConfig

MEAN_NLL = AlgorithmConfig(
    loss="reinforce", advantage="asyncrl.algorithms.advantages:unchanged"
)
"""-advantage * logprob, averaged over tokens: with the advantage 1 of every text, the
mean negative log-likelihood.
"""


class NoRollouts(RolloutConfig):
    """Section `rollout` of a job without engines."""

    engine: Any = "none"  # not a kind, so that no config can name it
    group_size: Count = 1
    max_prompt_tokens: Count = 1
    max_tokens: Count = 1
    """Tokens of the longest trained text."""

    @property
    def facts(self) -> EngineCapabilities:
        return EngineCapabilities(has_model=False)

    @property
    def max_engines(self) -> int:
        return 0


class EnginelessConfig(RunConfig):
    """A job that has a trainer, and neither tasks nor engines. A run directory of a kind
    that no installed extension has is read as one.
    """

    about: ClassVar = "training"
    tag: ClassVar = "training"

    task: Tasks = []
    rollout: RolloutConfig = NoRollouts()
    algorithm: AlgorithmConfig = MEAN_NLL
    weight_sync: WeightSyncConfig = WeightSyncConfig(transport="shm")
    """Nothing is exported."""
