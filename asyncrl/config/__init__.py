"""The settings of a run. What is allowed is checked here, without torch and without a look at devices."""

from asyncrl.config.generation import BufferConfig as BufferConfig
from asyncrl.config.generation import EvalConfig as EvalConfig
from asyncrl.config.generation import ObserveConfig as ObserveConfig
from asyncrl.config.generation import RolloutConfig as RolloutConfig
from asyncrl.config.generation import WeightSyncConfig as WeightSyncConfig
from asyncrl.config.load import load_config as load_config
from asyncrl.config.load import run_config_yaml as run_config_yaml
from asyncrl.config.model_task import GatewayConfig as GatewayConfig
from asyncrl.config.model_task import GeneratorConfig as GeneratorConfig
from asyncrl.config.model_task import ModelConfig as ModelConfig
from asyncrl.config.model_task import Outcomes as Outcomes
from asyncrl.config.model_task import ScratchConfig as ScratchConfig
from asyncrl.config.model_task import TaskConfig as TaskConfig
from asyncrl.config.run_config import RunConfig as RunConfig
from asyncrl.config.sections import AlgorithmConfig as AlgorithmConfig
from asyncrl.config.sections import CheckpointConfig as CheckpointConfig
from asyncrl.config.sections import LoraConfig as LoraConfig
from asyncrl.config.sections import PlacementConfig as PlacementConfig
from asyncrl.config.sections import SupervisionConfig as SupervisionConfig
from asyncrl.config.sections import TrainerConfig as TrainerConfig
