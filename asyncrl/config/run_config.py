"""The whole config of a run."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Self, TypeVar

from pydantic import Field, field_validator, model_validator

from asyncrl.config.fields import FrozenConfig
from asyncrl.config.generation import BufferConfig, EvalConfig, Evals, RolloutConfig
from asyncrl.config.harnesses import GatewayConfig, GeneratorConfig
from asyncrl.config.learning import GROUP_ADVANTAGES, AlgorithmConfig, TeacherConfig, TrainerConfig
from asyncrl.config.model_task import ModelConfig, TaskConfig, Tasks
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
from asyncrl.messages.engine_api import Interrupt

T = TypeVar("T", TaskConfig, EvalConfig)
MOST_IN_TURN = 10_000
"""Longest cycle of several interleaved tasks."""


class RunConfig(FrozenConfig):
    """All settings of a run, written to config.yaml in the run directory."""

    seed: int = Field(default=0, ge=0, lt=2**31)
    """Seed of the weights made from scratch, the shuffle and every sampled token."""
    launcher: str = "local"
    """Launcher of the run's processes. local: this machine. ray: the Ray cluster of RAY_ADDRESS or of this
    machine. ray:HOST:PORT: the Ray cluster with this head."""
    model: ModelConfig
    """The trained model."""
    task: Tasks
    """Prompts and rewards: one task, or a list of several."""
    generator: GeneratorConfig = GeneratorConfig()
    """Program of a rollout."""
    gateway: GatewayConfig = GatewayConfig()
    """Endpoint for harnesses."""
    rollout: RolloutConfig = RolloutConfig()
    """Sampling of completions, and the engine servers."""
    buffer: BufferConfig = BufferConfig()
    """The staleness bound."""
    trainer: TrainerConfig = TrainerConfig()
    """The optimizer steps."""
    algorithm: AlgorithmConfig = AlgorithmConfig()
    """Advantages and loss."""
    teacher: TeacherConfig | None = None
    """A model whose logprobs of the sampled tokens are learnt from (none = off)."""
    eval: Evals | None = None
    """A held-out task, sampled now and then, or a list of several (none = off)."""
    weight_sync: WeightSyncConfig = WeightSyncConfig()
    """Pushes of new weights to the engines."""
    placement: PlacementConfig = PlacementConfig()
    """Which device each side uses."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """Checkpoints of the run."""
    journal: JournalConfig = JournalConfig()
    """The journal."""
    supervision: SupervisionConfig = SupervisionConfig()
    """Restarts of processes, and reports of hangs."""
    observe: ObserveConfig = ObserveConfig()
    """Files, trackers, console and status port."""

    @property
    def tasks(self) -> Mapping[str, TaskConfig]:
        """Return tasks by name, as in Prompt.task; a single task may be ''."""
        return _by_name("task", self.task if isinstance(self.task, list) else [self.task])

    @property
    def evals(self) -> Mapping[str, EvalConfig]:
        """Return evaluations by name; a single evaluation may be ''."""
        given = [] if self.eval is None else self.eval
        return _by_name("eval", given if isinstance(given, list) else [given])

    @property
    def eval_engine(self) -> str:
        """Return eval.engine, the same for all evaluations; rollout without evaluations."""
        return next((one.engine for one in self.evals.values()), "rollout")

    @property
    def eval_slots(self) -> int:
        """Return the samples decoded at once: evaluations run in sequence."""
        return max((one.slots for one in self.evals.values()), default=0)

    @property
    def shares(self) -> Mapping[str, int]:
        """Return the prompts of each task in one cycle of all tasks, in lowest terms."""
        parts = {name: Fraction(str(task.share or 1)) for name, task in self.tasks.items()}
        whole = math.lcm(*(part.denominator for part in parts.values()))
        counts = {name: int(part * whole) for name, part in parts.items()}
        return {name: count // math.gcd(*counts.values()) for name, count in counts.items()}

    @property
    def best_eval(self) -> str | None:
        """Return the evaluation that decides the best checkpoint, if any."""
        named = self.checkpoint.keep_best
        return named if isinstance(named, str) else next(iter(self.evals), None)

    @property
    def evaluates_agent(self) -> bool:
        """Return True if evaluations run the generator's harness. A verifiers environment has only its own
        tasks.
        """
        return self.eval is not None and self.generator.is_harness and self.generator.verifiers is None

    @property
    def interrupt(self) -> Interrupt:
        """Return the effect of a weight swap on running requests."""
        asked = self.weight_sync.interrupt
        return "abort" if asked == "auto" else asked

    @property
    def keeps_turns(self) -> bool:
        """Return whether engines keep the KV cache of ended agent turns."""
        return self.rollout.facts.keeps_turns and self.generator.is_harness

    def is_deterministic(self, device: str, *, has_experts: bool = False) -> bool:
        """Return True if tokens of an engine on `device` do not depend on concurrent work. Above
        max_staleness 0, auto is false for vLLM: the weights that sample a token depend on time anyway.
        With experts, auto is false on a CPU.
        """
        if self.rollout.deterministic != "auto":
            return self.rollout.deterministic
        kind = "cuda" if device.startswith("cuda") else "cpu"
        if kind == "cpu" and has_experts:
            return False
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
        best = self.best_eval
        if best is not None and best not in self.evals:
            raise ValueError(
                f"checkpoint.keep_best={best} is no evaluation of this run; give true, or one of several: "
                f"{', '.join(filter(None, self.evals)) or 'there are none'}"
            )
        every = None if best is None else self.evals[best].every
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
    def _evaluations_share_their_engine(self) -> Self:
        engines = list(dict.fromkeys(one.engine for one in self.evals.values()))
        if len(engines) > 1:
            raise ValueError(
                f"eval.engine is {' and '.join(engines)}, and all evaluations of a run have the same; "
                f"set it to {engines[0]} in each"
            )
        if engines == ["rollout"] and self.placement.eval != "auto":
            raise ValueError(
                f"placement.eval={self.placement.eval} is the device of an eval engine, and "
                "eval.engine=rollout starts none; set placement.eval=auto, or eval.engine=own"
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
                "which experts read a token; set rollout.engine=embedded or vllm, or turn it off"
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
    def _several_tasks_fit(self) -> Self:
        tasks = self.tasks
        given = [task.share for task in tasks.values() if task.share is not None]
        if len(given) not in (0, len(tasks)):
            raise ValueError(
                f"task.share is given for {len(given)} of {len(tasks)} tasks; give it for all, or for none"
            )
        if sum(self.shares.values()) > MOST_IN_TURN:
            shares = ", ".join(f"{share:g}" for share in given)
            raise ValueError(
                f"shares {shares} repeat after {sum(self.shares.values())} prompts, {MOST_IN_TURN} is the "
                "most; give fewer digits, like 7 and 3"
            )
        for name, task in tasks.items() if len(tasks) > 1 else ():
            if task.verifiers:
                raise ValueError(
                    f"task.{name}.verifiers needs a run with one task; remove it or the other tasks"
                )
        return self

    @model_validator(mode="after")
    def _rewards_come_from_somewhere(self) -> Self:
        generator, verifiers = self.generator, any(task.verifiers for task in self.tasks.values())
        if verifiers != (generator.verifiers is not None):
            raise ValueError(
                f"task.verifiers={str(verifiers).lower()} with generator.verifiers={generator.verifiers}"
                ": a verifiers environment runs its own tasks and no others; set both, or none"
            )
        has_harness = generator.is_harness and generator.outcomes != "none"
        for name, task in self.tasks.items():
            if not task.has_score and not has_harness:
                raise ValueError(
                    f"{key_of('task', name)}.reward is missing, and no harness returns a reward "
                    "(generator.outcomes); give module:function, or `math` for answers checked by math-verify"
                )
        for name, one in self.evals.items():
            if not one.task.has_score and not (has_harness and self.evaluates_agent):
                lacks = "cannot be evaluated" if one.task.verifiers else "is missing"
                what = f"task.{'verifiers' if one.task.verifiers else 'reward'} {lacks}"
                raise ValueError(
                    f"{key_of('eval', name)}.{what}: an evaluation samples single completions or rollouts of "
                    "the generator's agent, and nothing else scores them; give eval.task a reward of its own"
                )
        return self


def key_of(section: str, name: str) -> str:
    """Return the name in errors: `task`, or `task.sums` if there are several."""
    return f"{section}.{name}" if name else section


def _by_name(section: str, given: Sequence[T]) -> dict[str, T]:
    """Raises ValueError if two have one name."""
    found = {one.called if len(given) > 1 else "": one for one in given}
    if len(found) < len(given):
        names = [one.called for one in given]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"two of `{section}` are called {twice}; give each {section}.name of its own")
    return found
