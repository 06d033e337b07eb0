"""Base of the settings of jobs: of runs, and of the kinds that extensions add."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from asyncrl.config.fields import FrozenConfig

if TYPE_CHECKING:
    from asyncrl.config.checkpoint_config import CheckpointConfig
    from asyncrl.config.model_config import ModelConfig
    from asyncrl.config.observe_config import ObserveConfig
    from asyncrl.config.run_config import RunConfig
    from asyncrl.config.supervision_config import SupervisionConfig
    from asyncrl.config.trainer_config import TrainerConfig


class JobConfig(FrozenConfig):
    """Settings of a job that trains. Each form has the fields below.

    `about` completes "the config is for ..."; `command` of asyncrl starts the job; models
    get the `tag`.
    Places (`module:name`): `job` is its TrainingJob ("": an extension's command starts
    it), `check` a function from settings and
    nodes to the lines of `asyncrl check`.
    `steps_keys`: keys that only give the number of steps.
    """

    about: ClassVar[str]
    command: ClassVar[str]
    tag: ClassVar[str]
    job: ClassVar[str]
    check: ClassVar[str]
    steps_keys: ClassVar[tuple[str, ...]] = ("trainer.num_steps",)

    if TYPE_CHECKING:  # Forms differ in their order and texts.
        seed: int
        launcher: str
        model: ModelConfig
        trainer: TrainerConfig
        checkpoint: CheckpointConfig
        supervision: SupervisionConfig
        observe: ObserveConfig

    def as_run(self) -> RunConfig:
        """Return the settings as the planner, the trainer and the reports read them."""
        raise NotImplementedError
