"""The settings of a run."""

from asyncrl.config.buffer_config import BufferConfig as BufferConfig
from asyncrl.config.checkpoint_journal_supervision_observe import CheckpointConfig as CheckpointConfig
from asyncrl.config.checkpoint_journal_supervision_observe import ObserveConfig as ObserveConfig
from asyncrl.config.checkpoint_journal_supervision_observe import SupervisionConfig as SupervisionConfig
from asyncrl.config.generator_gateway import GatewayConfig as GatewayConfig
from asyncrl.config.generator_gateway import GeneratorConfig as GeneratorConfig
from asyncrl.config.generator_gateway import OnOverflow as OnOverflow
from asyncrl.config.generator_gateway import Outcomes as Outcomes
from asyncrl.config.load import load_config as load_config
from asyncrl.config.load import run_config_yaml as run_config_yaml
from asyncrl.config.model_task_eval import EvalConfig as EvalConfig
from asyncrl.config.model_task_eval import ModelConfig as ModelConfig
from asyncrl.config.model_task_eval import ScratchConfig as ScratchConfig
from asyncrl.config.model_task_eval import TaskConfig as TaskConfig
from asyncrl.config.placement_config import PlacementConfig as PlacementConfig
from asyncrl.config.rollout_config import RolloutConfig as RolloutConfig
from asyncrl.config.run_config import RunConfig as RunConfig
from asyncrl.config.trainer_algorithm import AlgorithmConfig as AlgorithmConfig
from asyncrl.config.trainer_algorithm import LoraConfig as LoraConfig
from asyncrl.config.trainer_algorithm import TrainerConfig as TrainerConfig
