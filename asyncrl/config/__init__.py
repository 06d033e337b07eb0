"""The settings of a run."""

from asyncrl.config.generation import BufferConfig as BufferConfig
from asyncrl.config.generation import EvalConfig as EvalConfig
from asyncrl.config.generation import RolloutConfig as RolloutConfig
from asyncrl.config.harnesses import GatewayConfig as GatewayConfig
from asyncrl.config.harnesses import GeneratorConfig as GeneratorConfig
from asyncrl.config.harnesses import OnOverflow as OnOverflow
from asyncrl.config.harnesses import Outcomes as Outcomes
from asyncrl.config.learning import AlgorithmConfig as AlgorithmConfig
from asyncrl.config.learning import LoraConfig as LoraConfig
from asyncrl.config.learning import TeacherConfig as TeacherConfig
from asyncrl.config.learning import TrainerConfig as TrainerConfig
from asyncrl.config.load import load_config as load_config
from asyncrl.config.load import run_config_yaml as run_config_yaml
from asyncrl.config.model_task import ModelConfig as ModelConfig
from asyncrl.config.model_task import ScratchConfig as ScratchConfig
from asyncrl.config.model_task import TaskConfig as TaskConfig
from asyncrl.config.operation import CheckpointConfig as CheckpointConfig
from asyncrl.config.operation import ObserveConfig as ObserveConfig
from asyncrl.config.operation import PlacementConfig as PlacementConfig
from asyncrl.config.operation import SupervisionConfig as SupervisionConfig
from asyncrl.config.run_config import RunConfig as RunConfig
from asyncrl.config.weight_sync import WeightSyncConfig as WeightSyncConfig
