"""The whole config of a run."""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from asyncrl.config.generation import BufferConfig, EvalConfig, ObserveConfig, RolloutConfig, WeightSyncConfig
from asyncrl.config.learning import AlgorithmConfig, TrainerConfig
from asyncrl.config.model_task import GatewayConfig, GeneratorConfig, ModelConfig, TaskConfig
from asyncrl.config.placement import PlacementConfig
from asyncrl.config.sections import CheckpointConfig, FrozenConfig, JournalConfig, SupervisionConfig

GROUP_ADVANTAGES = ("grpo", "dr_grpo", "rloo", "leave_one_out", "reinforce_pp_baseline")
"""Advantages against the other rollouts of the prompt."""


class RunConfig(FrozenConfig):
    """Everything that `asyncrl run` is told. Written as config.yaml into the run directory: that file is the
    run.
    """

    seed: int = Field(default=0, ge=0, lt=2**31)
    """Seed of the weights made from scratch, the shuffle and every sampled token."""
    model: ModelConfig
    """What learns."""
    task: TaskConfig
    """Prompts and rewards."""
    generator: GeneratorConfig = GeneratorConfig()
    """How a rollout is run."""
    gateway: GatewayConfig = GatewayConfig()
    """Where harnesses call the model."""
    rollout: RolloutConfig = RolloutConfig()
    """How completions are sampled."""
    buffer: BufferConfig = BufferConfig()
    """How old the data may be."""
    trainer: TrainerConfig = TrainerConfig()
    """The optimizer steps."""
    algorithm: AlgorithmConfig = AlgorithmConfig()
    """Advantages and loss."""
    eval: EvalConfig | None = None
    """A held-out task, sampled now and then (none = off)."""
    weight_sync: WeightSyncConfig = WeightSyncConfig()
    """How new weights reach the engines."""
    placement: PlacementConfig = PlacementConfig()
    """Which device each side uses."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """What is kept so that a killed run can go on."""
    journal: JournalConfig = JournalConfig()
    """What the journal remembers."""
    supervision: SupervisionConfig = SupervisionConfig()
    """What happens when a process dies or nothing moves."""
    observe: ObserveConfig = ObserveConfig()
    """What is shown and written."""

    @property
    def evaluates_agent(self) -> bool:
        """Samples of an evaluation are rollouts of the generator's harness. A verifiers environment has no
        tasks but its own.
        """
        return self.eval is not None and self.generator.is_harness and self.generator.verifiers is None

    @model_validator(mode="after")
    def _sections_agree(self) -> Self:
        trainer, sequences = self.trainer, self.trainer.num_groups * self.rollout.group_size
        if trainer.num_groups % trainer.mini_batches:
            raise ValueError(
                f"trainer.mini_batches={trainer.mini_batches} does not divide "
                f"trainer.num_groups={trainer.num_groups}; "
                "each optimizer step takes the same number of whole groups"
            )
        if trainer.world_size > sequences // trainer.mini_batches:
            raise ValueError(
                f"trainer.world_size={trainer.world_size} is above the {sequences // trainer.mini_batches} "
                f"sequences of an optimizer step "
                "(num_groups / mini_batches * rollout.group_size), so some processes would never have work; "
                "lower trainer.world_size"
            )
        if self.rollout.engine == "simulated" and trainer.logprob_gap_limit is not None:
            raise ValueError(
                f"trainer.logprob_gap_limit={trainer.logprob_gap_limit} compares the logprobs of engines and "
                f"trainer, and the tokens of "
                "rollout.engine=simulated are no model's; remove trainer.logprob_gap_limit"
            )
        if self.rollout.urls is not None and self.model.path is None:
            raise ValueError(
                "model.scratch is made at the start of the run, so the servers of rollout.urls cannot have "
                "it; give model.path, or remove "
                "rollout.urls"
            )
        if conflict := self.weight_sync.way.conflict(self):
            raise ValueError(conflict)
        if self.rollout.group_size == 1 and self.algorithm.advantage in GROUP_ADVANTAGES:
            raise ValueError(
                f"algorithm.advantage={self.algorithm.advantage} with rollout.group_size=1 is always 0, so "
                f"nothing would be learnt; "
                "set algorithm.advantage=reinforce_pp, or rollout.group_size to 2 or more"
            )
        if conflict := self.placement.conflict_with(self.buffer.max_staleness):
            raise ValueError(conflict)
        if trainer.cpu_offload and self.placement.trainer == "cpu":
            raise ValueError(
                "trainer.cpu_offload moves weights from a CUDA device to the host, and placement.trainer is "
                "cpu; set it to false"
            )
        if self.buffer.filter == "equal_rewards" and self.rollout.group_size == 1:
            raise ValueError(
                "buffer.filter=equal_rewards with rollout.group_size=1 filters every group, because one "
                "reward is equal to itself; "
                "set buffer.filter=none, or rollout.group_size to 2 or more"
            )
        if self.checkpoint.keep_best and (
            self.eval is None or self.checkpoint.every is None or self.eval.every % self.checkpoint.every
        ):
            raise ValueError(
                f"checkpoint.keep_best needs evaluations of versions that have a checkpoint: "
                f"checkpoint.every={self.checkpoint.every} must "
                f"divide eval.every={None if self.eval is None else self.eval.every}"
            )
        if self.algorithm.overlong_tokens > self.rollout.max_tokens:
            raise ValueError(
                f"algorithm.overlong_tokens={self.algorithm.overlong_tokens} is above "
                f"rollout.max_tokens={self.rollout.max_tokens}; "
                "lower it"
            )
        return self

    @model_validator(mode="after")
    def _rewards_come_from_somewhere(self) -> Self:
        task, generator = self.task, self.generator
        if task.verifiers and generator.verifiers is None:
            raise ValueError(
                "task.verifiers=true takes the tasks of the environment that generator.verifiers names, and "
                "it names none"
            )
        if generator.verifiers is not None and not task.verifiers:
            raise ValueError(
                f"generator.verifiers={generator.verifiers} runs the tasks of its own environment and no "
                f"others; "
                "set task.verifiers=true instead of the other source of prompts"
            )
        if generator.outcomes == "none":
            scored = {
                "task": task.has_score,
                "eval.task": not self.evaluates_agent or self.eval is None or self.eval.task.has_score,
            }
            if missing := [name for name, has_score in scored.items() if not has_score]:
                raise ValueError(
                    f"generator.outcomes=none leaves the reward to the task, and {missing[0]} has none; give "
                    f"{missing[0]}.reward, or set "
                    "generator.outcomes=returned"
                )
        if not (generator.is_harness or task.has_score):
            raise ValueError(
                "task.reward is missing: give module:function, or `math` for answers checked by math-verify"
            )
        if self.eval is not None and self.eval.task.replay is not None:
            raise ValueError(
                "eval.task.replay is not for evaluations, which sample anew each time; remove it"
            )
        if self.eval is not None and not (self.evaluates_agent or self.eval.task.has_score):
            what = (
                "task.verifiers cannot be evaluated" if self.eval.task.verifiers else "task.reward is missing"
            )
            raise ValueError(
                f"eval.{what}: an evaluation samples one completion for a prompt, without any harness, and "
                f"scores its text; "
                "give eval.task a reward of its own"
            )
        return self
