"""The components of a run."""

from __future__ import annotations

from dataclasses import dataclass

from asyncrl.buffer.buffer import Buffer
from asyncrl.engines.pool import EnginePool
from asyncrl.job.agent_runtime import AgentRuntime
from asyncrl.job.checkpointer import Checkpointer
from asyncrl.job.colocate import WeightScheduler
from asyncrl.job.scale import EngineScale
from asyncrl.job.servers import Fleet
from asyncrl.job.slots_by_pressure import SlotsByPressure
from asyncrl.job.trainer_recovery import SupervisedTrainer
from asyncrl.journal.journal import Journal
from asyncrl.observe.metrics import SpecialTokens
from asyncrl.rollouts.evaluation import Evaluation
from asyncrl.rollouts.late_rewards import LateRewards
from asyncrl.rollouts.producers import Producers
from asyncrl.rollouts.tokenizer import HFChatTokenizer
from asyncrl.tasks.prompt_source import PromptSource
from asyncrl.tasks.scorer import Scorers
from asyncrl.tasks.sources import DataPin
from asyncrl.trainer.model.model_folder import ModelPin


@dataclass(frozen=True, kw_only=True, eq=False)
class Components:
    fleet: Fleet
    journal: Journal
    feed: PromptSource
    scorer: Scorers
    pins: tuple[ModelPin, DataPin]
    tokenizer: HFChatTokenizer
    special_tokens: SpecialTokens
    trainer: SupervisedTrainer
    engines: EnginePool
    scale: EngineScale
    pressure: SlotsByPressure | None
    buffer: Buffer
    producers: Producers
    scheduler: WeightScheduler
    checkpointer: Checkpointer
    evaluation: Evaluation | None
    agents: AgentRuntime | None
    late: LateRewards
