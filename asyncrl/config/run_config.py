"""The whole config of a run."""

from __future__ import annotations

import re
from typing import Self

from pydantic import Field, field_validator, model_validator

from asyncrl.config.fields import FrozenConfig
from asyncrl.config.generation import BufferConfig, EvalConfig, RolloutConfig
from asyncrl.config.harnesses import GatewayConfig, GeneratorConfig
from asyncrl.config.learning import GROUP_ADVANTAGES, AlgorithmConfig, TeacherConfig, TrainerConfig
from asyncrl.config.model_task import ModelConfig, TaskConfig
from asyncrl.config.operation import (
    CheckpointConfig,
    JournalConfig,
    NodesConfig,
    ObserveConfig,
    PlacementConfig,
    SupervisionConfig,
    is_cpu,
)
from asyncrl.config.weight_sync import WeightSyncConfig
from asyncrl.messages.base import Interrupt


class RunConfig(FrozenConfig):
    """Everything that `asyncrl run` is told. Written as config.yaml into the run directory: that file is the
    run.
    """

    seed: int = Field(default=0, ge=0, lt=2**31)
    """Seed of the weights made from scratch, the shuffle and every sampled token."""
    launcher: str = "local"
    """Who starts the processes of the run. local: all on this machine. ray: on the nodes of the Ray cluster
    that RAY_ADDRESS names, or that this machine belongs to; ray:HOST:PORT: of the one whose head is there."""
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
    teacher: TeacherConfig | None = None
    """A model whose logprobs of the sampled tokens are learnt from (none = off)."""
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

    @property
    def interrupt(self) -> Interrupt:
        """What a swap of weights does to running requests."""
        asked = self.weight_sync.interrupt
        return "abort" if asked == "auto" else asked

    @property
    def keeps_turns(self) -> bool:
        """Whether its engines keep the turns of agents that have ended."""
        return self.rollout.facts.keeps_turns and self.generator.is_harness

    def is_deterministic(self, device: str) -> bool:
        """Whether an engine there is asked for tokens that do not depend on what runs beside them. Above
        max_staleness 0 auto asks no vLLM for it: which weights sample a token is a matter of time anyway.
        """
        if self.rollout.deterministic != "auto":
            return self.rollout.deterministic
        kind = "cuda" if device.startswith("cuda") else "cpu"
        return kind == self.rollout.facts.exact_on and (kind == "cpu" or self.buffer.max_staleness == 0)

    @field_validator("launcher")
    @classmethod
    def _launcher_is_known(cls, value: str) -> str:
        if not re.fullmatch(r"local|ray(:[^:\s]+:\d{1,5})?", value):
            raise ValueError("give local, ray, or ray:HOST:PORT of the head of a Ray cluster")
        return value

    @model_validator(mode="after")
    def _sections_agree(self) -> Self:
        trainer, rollout, checkpoint = self.trainer, self.rollout, self.checkpoint
        if trainer.num_groups % trainer.mini_batches:
            raise ValueError(
                f"trainer.mini_batches={trainer.mini_batches} does not divide "
                f"trainer.num_groups={trainer.num_groups}: each optimizer step takes as many whole groups"
            )
        sequences = trainer.num_groups * rollout.group_size // trainer.mini_batches
        if trainer.world_size > sequences:
            raise ValueError(
                f"trainer.world_size={trainer.world_size} is above the {sequences} sequences of an optimizer "
                "step (num_groups * rollout.group_size / mini_batches): some would have no work; lower it"
            )
        if not rollout.facts.has_model and trainer.logprob_gap_limit is not None:
            raise ValueError(
                f"trainer.logprob_gap_limit={trainer.logprob_gap_limit} compares logprobs of engines and "
                f"trainer, and the tokens of rollout.engine={rollout.engine} are no model's; remove it"
            )
        if rollout.urls is not None and self.model.path is None:
            raise ValueError(
                "model.scratch is made at the start of the run, so the servers of rollout.urls cannot have "
                "it; give model.path, or remove rollout.urls"
            )
        if trainer.cpu_offload and is_cpu(self.placement.trainer):
            written = self.placement.trainer
            raise ValueError(
                f"placement.trainer={written} has nothing for trainer.cpu_offload; set it to false"
            )
        if rollout.group_size == 1:
            advantage = self.algorithm.advantage if self.algorithm.advantage in GROUP_ADVANTAGES else None
            advantage = advantage if self.algorithm.reward_weight > 0 else None
            if advantage or self.buffer.filter == "equal_rewards":
                what = f"algorithm.advantage={advantage}" if advantage else "buffer.filter=equal_rewards"
                raise ValueError(
                    f"{what} compares the rollouts of a prompt, and rollout.group_size=1; set it to 2 or "
                    "more, or algorithm.advantage=reinforce_pp and buffer.filter=none"
                )
        every = None if self.eval is None else self.eval.every
        if checkpoint.keep_best and (not every or not checkpoint.every or every % checkpoint.every):
            raise ValueError(
                "checkpoint.keep_best needs evaluations of versions that have a checkpoint: "
                f"checkpoint.every={checkpoint.every} must divide eval.every={every}"
            )
        if self.algorithm.overlong_tokens > rollout.max_tokens:
            raise ValueError(
                f"algorithm.overlong_tokens={self.algorithm.overlong_tokens} is above "
                f"rollout.max_tokens={rollout.max_tokens}; lower it"
            )
        return self

    @model_validator(mode="after")
    def _nodes_have_a_launcher(self) -> Self:
        for key in ("trainer", "rollout"):
            written = getattr(self.placement, key)
            num = written.nodes if isinstance(written, NodesConfig) else 1
            if self.launcher == "local" and num not in (1, "all"):
                one = written.model_copy(update={"nodes": 1})
                raise ValueError(
                    f"placement.{key}={written} is of {num} nodes, and launcher=local starts all on this "
                    f"machine; set launcher=ray, or placement.{key}={one}"
                )
        return self

    @model_validator(mode="after")
    def _routing_is_told(self) -> Self:
        if not self.algorithm.router_replay:
            return self
        if not self.rollout.facts.returns_routing:
            raise ValueError(
                f"algorithm.router_replay=true: rollout.engine={self.rollout.engine} does not tell "
                "which experts read a token; set rollout.engine=embedded, or algorithm.router_replay=false"
            )
        if self.generator.is_harness:
            raise ValueError(
                "algorithm.router_replay=true: of the conversations of a harness no experts are recorded; "
                "remove the harness, or set algorithm.router_replay=false"
            )
        return self

    @model_validator(mode="after")
    def _a_teacher_is_learnt_from(self) -> Self:
        weight = self.algorithm.distill_weight
        if (self.teacher is not None) != (weight > 0):
            lacks = "no section `teacher`" if self.teacher is None else "a section `teacher`"
            raise ValueError(
                f"algorithm.distill_weight={weight} with {lacks}: set both, teacher.path and a weight above "
                "0, or none"
            )
        if weight > 0 and not self.rollout.facts.has_model:
            raise ValueError(
                f"teacher compares logprobs with those of the policy, and the tokens of "
                f"rollout.engine={self.rollout.engine} are no model's; remove it"
            )
        if weight > 0 and self.buffer.filter == "equal_rewards":
            raise ValueError(
                "buffer.filter=equal_rewards replaces groups from which no reward is learnt, and "
                "algorithm.distill_weight learns from each token of them; set buffer.filter=none"
            )
        return self

    @model_validator(mode="after")
    def _rewards_come_from_somewhere(self) -> Self:
        task, generator = self.task, self.generator
        if task.verifiers != (generator.verifiers is not None):
            raise ValueError(
                f"task.verifiers={str(task.verifiers).lower()} with generator.verifiers={generator.verifiers}"
                ": a verifiers environment runs its own tasks and no others; set both, or none"
            )
        has_harness = generator.is_harness and generator.outcomes != "none"
        if not task.has_score and not has_harness:
            raise ValueError(
                "task.reward is missing, and no harness returns a reward (generator.outcomes); give "
                "module:function, or `math` for answers checked by math-verify"
            )
        if self.eval is None:
            return self
        held_out = self.eval.task
        if held_out.replay is not None:
            raise ValueError("eval.task.replay is not for evaluations, which sample anew; remove it")
        if not held_out.has_score and not (has_harness and self.evaluates_agent):
            what = "task.verifiers cannot be evaluated" if held_out.verifiers else "task.reward is missing"
            raise ValueError(
                f"eval.{what}: an evaluation samples single completions or rollouts of the generator's "
                "agent, and nothing else scores them; give eval.task a reward of its own"
            )
        return self
