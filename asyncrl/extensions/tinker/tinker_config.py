"""Settings of `asyncrl serve tinker`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar, Literal

from pydantic import NonNegativeInt

from asyncrl.config.checkpoint_config import CheckpointConfig
from asyncrl.config.fields import Count, FrozenConfig, Port, Seed
from asyncrl.config.job_config import JobConfig
from asyncrl.config.model_config import ModelConfig
from asyncrl.config.observe_config import ObserveConfig
from asyncrl.config.placement_config import PlacementConfig
from asyncrl.config.rollout_config import RolloutConfig
from asyncrl.config.run_config import RunConfig
from asyncrl.config.supervision_config import SupervisionConfig
from asyncrl.config.task_config import Tasks
from asyncrl.config.trainer_config import LoraConfig, TrainerConfig

USED = (
    "compile deterministic gradient_checkpointing lora micro_batch_tokens roles threads "
    "timeout_s world_size"
).split()
"""Settings of `trainer` that the server reads or refuses by their own sentence."""


class ServerConfig(FrozenConfig):
    """The server for clients of the Tinker API (docs/tinker.md)."""

    free_keys: ClassVar = "*"

    host: str = "127.0.0.1"
    """Address to listen on. Any address but 127.0.0.1 admits other machines with keys."""
    port: Port | None = None
    """Port to listen on (none = any free one)."""
    names: list[str] = []
    """What clients may call the base model ([] = model.path, or `asyncrl/scratch`). The
    first is the name in answers.
    """
    max_staleness: NonNegativeInt | None = None
    """Most steps since a token was sampled, for requests without a bound
    (none = no bound).
    """
    on_overdue: Literal["mask", "refuse"] = "mask"
    """mask: older tokens have no loss. refuse: the request fails."""
    max_rank: Count = 128
    """Highest rank of an adapter."""
    max_sampled: Count = 64
    """Adapters that an engine holds at once; the longest idle one leaves."""
    max_adapters: Count = 32
    """Models that one key trains at once."""
    max_futures: Count = 4096
    """Open requests of one key for sampling, and of one model for training."""


class ServedRun(RunConfig):
    """The settings of a served model, as planner and engines read them."""

    about: ClassVar = "training"
    tag: ClassVar = "training"

    task: Tasks = []
    max_sampled: Count = 1
    """ServerConfig.max_sampled"""


class TinkerConfig(JobConfig):
    """Serve a model to clients of the Tinker API."""

    free_keys: ClassVar = ("launcher",)
    about: ClassVar = "a Tinker server"
    command: ClassVar = "serve tinker"
    tag: ClassVar = "tinker"
    job: ClassVar = ""
    check: ClassVar = "asyncrl.extensions.tinker.tinker_check:check_tinker"
    steps_keys: ClassVar = ()

    seed: Seed = 0
    """Seed of random weights of the model."""
    launcher: str = RunConfig.model_fields["launcher"].default
    """Launcher of the processes, as in a run."""
    model: ModelConfig
    """The base model."""
    tinker: ServerConfig
    """The server for clients."""
    rollout: RolloutConfig = RolloutConfig()
    """The engines. `max_prompt_tokens` + `max_tokens` is the context."""
    trainer: TrainerConfig = TrainerConfig()
    """The trainer's process: `threads`, `micro_batch_tokens`, `gradient_checkpointing`."""
    placement: PlacementConfig = PlacementConfig()
    """Devices of trainer and engines."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """Not read: clients save checkpoints."""
    supervision: SupervisionConfig = SupervisionConfig()
    """Restarts of the trainer and the engines."""
    observe: ObserveConfig = ObserveConfig()
    """Files and console."""

    def as_run(self) -> RunConfig:
        shared: dict[str, Any] = {
            name: value for name, value in self if name not in ("tinker", "checkpoint")
        }
        # Not a client's adapter: it names the layers that trainer and engines may adapt.
        lora = LoraConfig(rank=1, alpha=1, targets="all")
        shared["trainer"] = self.trainer.model_copy(update={"lora": lora})
        return ServedRun(**shared, max_sampled=self.tinker.max_sampled)

    @property
    def names(self) -> list[str]:
        return self.tinker.names or [self.model.path or "asyncrl/scratch"]

    def conflicts(self) -> Iterator[str]:
        if self.rollout.engine != "embedded":
            kind = self.rollout.engine
            yield f"rollout.engine={kind} has no logprobs of prompts; set rollout.engine=embedded"
        if self.trainer.world_size != 1:
            yield "a sharded trainer has one adapter; set trainer.world_size=1"
        unused = [key for key in TrainerConfig.model_fields if key not in USED]
        for key in self.trainer.given(*unused):
            yield f"trainer.{key} has no effect on a Tinker server; remove it"
        for key in ("lora", "roles"):
            if getattr(self.trainer, key) is not None:
                yield f"trainer.{key} is the clients' choice; remove it"
