"""All settings of a run, and rules that join sections."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from fractions import Fraction
from typing import Annotated, ClassVar, TypeVar

from pydantic import AfterValidator, Field, ValidationError, model_validator

from asyncrl.base.extensions import all_of, rows
from asyncrl.config.algorithm_config import GROUP_ADVANTAGES, AlgorithmConfig
from asyncrl.config.buffer_config import BufferConfig
from asyncrl.config.checkpoint_config import CheckpointConfig
from asyncrl.config.critic_config import CriticConfig
from asyncrl.config.engine_kinds import engines_with
from asyncrl.config.eval_config import NOT_EVALUATED, EvalConfig, Evals
from asyncrl.config.extended import extended
from asyncrl.config.fields import Seed, located
from asyncrl.config.gateway_config import GatewayConfig
from asyncrl.config.generator_config import GeneratorConfig, kind_of
from asyncrl.config.job_config import JobConfig
from asyncrl.config.journal_config import JournalConfig
from asyncrl.config.model_config import ModelConfig
from asyncrl.config.observe_config import ObserveConfig
from asyncrl.config.offload_config import (
    ModelPart,
    Rule,
    offload_rules,
)
from asyncrl.config.placement_config import NodesConfig, PlacementConfig, is_cpu
from asyncrl.config.rollout_config import RolloutConfig
from asyncrl.config.supervision_config import SupervisionConfig
from asyncrl.config.task_config import TaskConfig, Tasks
from asyncrl.config.trainer_config import TrainerConfig
from asyncrl.config.weight_sync_config import WeightSyncConfig
from asyncrl.messages.engine_api import Interrupt
from asyncrl.messages.sampling import CUTS
from asyncrl.messages.tokens import TEACHER

T = TypeVar("T", TaskConfig, EvalConfig)
LOCAL = "local"
"""The launcher of this machine."""
MAX_CYCLE = 10_000
"""Maximum cycle of several interleaved tasks."""


def _known_launcher(launcher: str) -> str:
    known = [LOCAL, *rows("launchers")]
    if launcher != LOCAL and launcher.partition(":")[0] not in known[1:]:
        raise ValueError(
            f"no installed extension has this launcher; known are {', '.join(known)}"
        )
    return launcher


@extended("")
class RunConfig(JobConfig):
    """Train. Start with trainer.num_groups, buffer.max_staleness and placement;
    `asyncrl keys` describes all settings.

    Exit codes: 0 done, 1 a part failed, 2 invalid configuration, 130 or 143
    interrupted. Repeat with the same --run-dir to resume.

    For example:
      asyncrl run configs/quickstart.yaml --run-dir runs/mine
      asyncrl run configs/quickstart.yaml buffer.max_staleness=0 trainer.num_steps=100
    """

    free_keys: ClassVar = ("launcher",)
    about: ClassVar = "reinforcement learning"
    command: ClassVar = "run"
    tag: ClassVar = "reinforcement-learning"
    job: ClassVar = "asyncrl.job.loop:Job"
    check: ClassVar = "asyncrl.job.check.config_check:check_run"

    seed: Seed = 0
    """Seed of random weights, the shuffle and every sampled token."""
    launcher: Annotated[str, AfterValidator(_known_launcher)] = Field(
        default=LOCAL, pattern=r"^\w+(:[^:\s]+:\d{1,5})?$"
    )
    """Launcher of the run's processes. local: this machine. NAME or NAME:HOST:PORT: the
    launcher of an extension, such as ray for the Ray cluster of RAY_ADDRESS or of this
    machine, and ray:HOST:PORT for the cluster with this head (docs/clusters.md).
    """
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
    critic: CriticConfig | None = None
    """A value model for algorithm.advantage=gae (none = off; `{}` = a copy of the
    policy).
    """
    eval: Evals | None = None
    """A held-out task, or a list of several (none = off)."""
    weight_sync: WeightSyncConfig = WeightSyncConfig()
    """Pushes of new weights to the engines."""
    placement: PlacementConfig = PlacementConfig()
    """Devices of each side."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """Checkpoints of the run."""
    journal: JournalConfig = JournalConfig()
    """The journal."""
    supervision: SupervisionConfig = SupervisionConfig()
    """Restarts of processes, and reports of hangs."""
    observe: ObserveConfig = ObserveConfig()
    """Files, trackers, console and status port."""

    @model_validator(mode="before")
    @classmethod
    def _evaluate_held_out_rows(cls, values: object) -> object:
        """Give an evaluation without a task the rows that each task holds out.

        Example: task={files: [a.jsonl], split: {eval: 0.1}} and eval={every: 5} give
        eval={every: 5, task: {files: [a.jsonl], split: {eval: 0.1}}}.
        """
        given = values.get("eval") if isinstance(values, dict) else None
        if (
            not isinstance(values, dict)
            or not isinstance(given, dict)
            or "task" in given
        ):
            return values
        task = values.get("task")
        evals = []
        for one in task if isinstance(task, list) else [task]:
            if isinstance(one, dict) and isinstance(one.get("split"), dict):
                held_out = {key: one[key] for key in one if key not in NOT_EVALUATED}
                evals.append({"name": one.get("name"), **given, "task": held_out})
        if not evals:
            return values
        return values | {"eval": evals if len(evals) > 1 else evals[0]}

    def as_run(self) -> RunConfig:
        return self

    @property
    def tasks(self) -> Mapping[str, TaskConfig]:
        """Return tasks by name; a single task may be ''."""
        return _by_name("task", self.task)

    @property
    def generators(self) -> Mapping[str, GeneratorConfig]:
        """Return the generator of each task, by name."""
        return {
            name: task.generator or self.generator for name, task in self.tasks.items()
        }

    @property
    def algorithms(self) -> Mapping[str, AlgorithmConfig]:
        """Return the algorithm of each task, by name; empty if all have the run's.
        Raises ValueError if a task's does not fit.
        """
        found = dict[str, AlgorithmConfig]()
        for name, task in self.tasks.items():
            own = task.algorithm.model_dump(exclude={"weight"}, exclude_none=True)
            values = self.algorithm.model_dump() | own
            try:
                found[name] = AlgorithmConfig.model_validate(values)
            except ValidationError as error:
                fault = error.errors()[0]["msg"]
                key = f"{key_of('task', name)}.algorithm"
                # A setting that tasks do not have is the run's.
                fault = fault.replace(" .rewards", " algorithm.rewards")
                raise ValueError(located(fault, key)) from error
        weights = [task.algorithm.weight for task in self.tasks.values()]
        is_same = all(each == self.algorithm for each in found.values())
        return {} if is_same and set(weights) == {1.0} else found

    @property
    def all_algorithms(self) -> list[AlgorithmConfig]:
        """Return the run's algorithm, and those of tasks."""
        return [self.algorithm, *self.algorithms.values()]

    @property
    def harnesses(self) -> list[GeneratorConfig]:
        """Return the distinct generators with a harness. Work names them by place."""
        found = list[GeneratorConfig]()
        of_tasks = (*self.generators.values(), *self.eval_generators.values())
        for one in (self.generator, *of_tasks):
            if one.is_harness and one not in found:
                found.append(one)
        return found

    @property
    def trains_agent(self) -> bool:
        return any(one.is_harness for one in self.generators.values())

    @property
    def task_timeouts_s(self) -> dict[str, float]:
        """Return the limits of tasks that have their own, in seconds."""
        return {
            name: task.limits.timeout_s
            for name, task in self.tasks.items()
            if task.limits.timeout_s is not None
        }

    @property
    def evals(self) -> Mapping[str, EvalConfig]:
        """Return evaluations by name; a single evaluation may be ''."""
        return {} if self.eval is None else _by_name("eval", self.eval)

    @property
    def eval_generators(self) -> Mapping[str, GeneratorConfig]:
        """Return the generator of each evaluation, by name."""
        found = dict[str, GeneratorConfig]()
        kind = kind_of(self.generator)
        for name, one in self.evals.items():
            is_played = kind is None or kind.task_source in ("", one.task.source)
            of_run = self.generator if is_played else GeneratorConfig()
            found[name] = one.task.generator or of_run
        return found

    @property
    def players(self) -> dict[str, tuple[TaskConfig, GeneratorConfig]]:
        """Return each task with its generator, by the key of the task."""
        tasks = {
            key_of("task", name): (task, self.generators[name])
            for name, task in self.tasks.items()
        }
        held_out = {
            f"{key_of('eval', name)}.task": (one.task, self.eval_generators[name])
            for name, one in self.evals.items()
        }
        return tasks | held_out

    @property
    def eval_engine(self) -> str:
        return next((one.engine for one in self.evals.values()), "rollout")

    @property
    def eval_slots(self) -> int:
        return max((one.slots for one in self.evals.values()), default=0)

    @property
    def all_tasks(self) -> list[TaskConfig]:
        """Return the tasks of training and of evaluations."""
        return [task for task, _ in self.players.values()]

    @property
    def shares(self) -> Mapping[str, int]:
        """Return the prompts of each task in one cycle.

        Example: the shares 0.5, 0.25 and 0.3 are 10, 5 and 6 of 21 prompts.
        """
        # Through text, so that a share of 0.1 is one tenth and not the nearest binary
        # fraction, whose cycle would have 2^55 prompts.
        parts = {
            name: Fraction(str(task.share or 1)) for name, task in self.tasks.items()
        }
        whole = math.lcm(*(part.denominator for part in parts.values()))
        counts = {name: int(part * whole) for name, part in parts.items()}
        return {
            name: count // math.gcd(*counts.values()) for name, count in counts.items()
        }

    @property
    def best_eval(self) -> str | None:
        """Return the name of the evaluation that decides which checkpoint is best."""
        return next(iter(self.evals), None)

    @property
    def evaluates_agent(self) -> bool:
        return any(one.is_harness for one in self.eval_generators.values())

    @property
    def has_reference(self) -> bool:
        """Return whether the trainer holds the initial weights as a second model."""
        return self.algorithm.kl_coefficient > 0 and not self.trainer.adapters

    @property
    def offload_rules(self) -> dict[ModelPart, Rule]:
        """Return the rule of each part of the models on the trainer's ranks."""
        has_critic = self.critic is not None
        return offload_rules(self.trainer.offload, has_critic=has_critic)

    @property
    def interrupt(self) -> Interrupt:
        asked = self.weight_sync.interrupt
        return "abort" if asked == "auto" else asked

    @property
    def keeps_turns(self) -> bool:
        return self.rollout.facts.keeps_turns and bool(self.harnesses)

    def is_deterministic(self, device: str, *, is_exact: bool = True) -> bool:
        """Return True if an engine's tokens do not depend on concurrent work.
        `is_exact`: the model has no layers whose rounding depends on it.
        """
        if self.rollout.deterministic != "auto":
            return self.rollout.deterministic
        kind = "cuda" if device.startswith("cuda") else "cpu"
        if kind == "cpu" and not is_exact:
            return False
        # On CUDA exact kernels have a price. With stale data, timing decides which
        # version samples a token, and the run would not repeat itself anyway.
        return kind == self.rollout.facts.exact_on and (
            kind == "cpu" or self.buffer.max_staleness == 0
        )

    @property
    def uses_supports(self) -> bool:
        """Whether trained calls may have a support. Some engines must be told at their start."""
        # Calls may set their own cuts with honour.
        may_cut = self.gateway.on_sampling_override == "honour"
        has_cuts = self.rollout.sampling.is_cut or may_cut
        return has_cuts and self.rollout.facts.reports_supports

    def conflicts(self) -> Iterator[str]:
        for part in (
            self._batch_conflicts,
            self._engine_conflicts,
            self._checkpoint_conflicts,
            self._eval_conflicts,
            self._algorithm_conflicts,
            self._filter_conflicts,
            self._limit_conflicts,
            self._critic_conflicts,
            self._distill_conflicts,
            self._task_conflicts,
            self._posted_conflicts,
            self._generator_conflicts,
            self._role_conflicts,
        ):
            yield from part()

    def _batch_conflicts(self) -> Iterator[str]:
        num_groups = self.trainer.num_groups
        num_steps = self.trainer.mini_batches
        world_size = self.trainer.world_size
        group_size = self.rollout.group_size
        # A batch is split by groups, so that each optimizer step compares whole groups.
        if num_groups % num_steps:
            yield (
                f"trainer.mini_batches={num_steps} must divide trainer.num_groups={num_groups}; set "
                "trainer.mini_batches=1, or another divisor"
            )
        # A process without a sequence would have nothing to compute in lockstep with
        # the others.
        if world_size > (sequences := num_groups * group_size // num_steps):
            yield (
                f"trainer.world_size={world_size} is above the {sequences} sequences of an optimizer step; "
                "lower it, or raise trainer.num_groups"
            )
        # The penalty would begin below 0 tokens, and every answer would be punished for
        # its length.
        if (overlong := self.algorithm.overlong_tokens) > self.rollout.max_tokens:
            yield (
                f"algorithm.overlong_tokens={overlong} > rollout.max_tokens={self.rollout.max_tokens}; "
                "lower algorithm.overlong_tokens, or raise rollout.max_tokens"
            )

    def _engine_conflicts(self) -> Iterator[str]:
        engine = self.rollout.engine
        # Others started these servers, before this run could make a model for them.
        if self.rollout.external_urls is not None and self.model.path is None:
            key = self.rollout.facts.urls_key
            yield (
                "model.scratch is made at the start of the run, so that no server has it; remove "
                f"rollout.{key}, or give model.path instead of model.scratch"
            )
        concurrency = self.generator.concurrency
        if self.rollout.slots == "auto" and concurrency != "auto":
            yield (
                f"generator.concurrency={concurrency} fixes the number of rollouts, which rollout.slots=auto "
                "adjusts; set generator.concurrency=auto, or rollout.slots to a number"
            )
        if self.trainer.offload.by_layer and is_cpu(self.placement.trainer):
            where = self.placement.trainer
            yield f"trainer.offload.by_layer needs a CUDA device, not placement.trainer={where}; remove it"
        for key, written in (
            ("trainer", self.placement.trainer),
            ("rollout", self.placement.rollout),
        ):
            num = written.nodes if isinstance(written, NodesConfig) else 1
            if self.launcher == LOCAL and num not in (1, "all"):
                yield (
                    f"placement.{key}={written} has {num} nodes; set launcher=ray, or placement.{key}.nodes=1"
                )
        # Without the engine's experts, the trainer would silently route by itself.
        if self.algorithm.router_replay and not self.rollout.facts.returns_routing:
            yield (
                f"algorithm.router_replay needs an engine with experts, not {engine}; set "
                f"rollout.engine={engines_with('returns_routing')}, or algorithm.router_replay=false"
            )

    def _checkpoint_conflicts(self) -> Iterator[str]:
        if not self.checkpoint.keep_best:
            return
        if self.best_eval is None:
            yield (
                "checkpoint.keep_best compares evaluations; set checkpoint.keep_best=false, or add a "
                "section eval"
            )
            return
        # Only saved versions can be kept, so each evaluation must fall on a checkpoint.
        every = self.evals[self.best_eval].every
        saved = self.checkpoint.every
        if saved is None or every % saved:
            yield (
                f"checkpoint.keep_best: checkpoint.every={saved} must divide eval.every={every}; set "
                "checkpoint.every to a divisor, or checkpoint.keep_best=false"
            )

    def _eval_conflicts(self) -> Iterator[str]:
        # All evaluations use one engine, one after another.
        engines = list(dict.fromkeys(one.engine for one in self.evals.values()))
        if len(engines) > 1:
            yield f"eval.engine is {' and '.join(engines)}; set it to {engines[0]} in each evaluation"
        if engines == ["rollout"] and self.placement.eval != "auto":
            yield "placement.eval is for an eval engine; set placement.eval=auto, or eval.engine=own"
        evaluated = [one.task for one in self.evals.values()]
        held_out, measured = (
            {task.held_out_rows for task in tasks if task.held_out_fraction}
            for tasks in (self.tasks.values(), evaluated)
        )
        if held_out != measured:
            why, way_out = "is absent", "add a section eval"
            if self.evals:
                why, way_out = "names other rows", "remove eval.task"
            yield (
                f"task.split={{eval: ...}} holds out rows for `eval`, which {why}; {way_out}, or "
                "remove task.split"
            )
        for name, one in self.evals.items():
            if one.sampling.is_cut and not self.rollout.facts.reports_supports:
                cut = one.given(*sorted(CUTS))[0]
                key = key_of("eval", name)
                yield f"{key}.{cut} has no effect with rollout.engine={self.rollout.engine}; remove it"

    def _algorithm_conflicts(self) -> Iterator[str]:
        for name, task in self.tasks.items():
            key = f"{key_of('task', name)}.algorithm"
            own = task.algorithm
            given = own.given("advantage", "turn_discount", "weight")
            if given and (self.algorithm.needs_critic or own.advantage == "gae"):
                yield f"{key}.{given[0]} does not go with gae: one critic values all tasks; remove it"
                return
        try:
            algorithms = self.algorithms
        except ValueError as error:
            yield str(error)
            return
        for name, generator in self.generators.items():
            algorithm = algorithms.get(name, self.algorithm)
            own = self.tasks[name].algorithm
            key = key_of("task", name)
            is_compared = algorithm.advantage in GROUP_ADVANTAGES
            has_reward = self.algorithm.reward_weight > 0
            if is_compared and has_reward and self.rollout.group_size == 1:
                advantage = "algorithm.advantage"
                if own.advantage is not None:
                    advantage = f"{key}.{advantage}"
                yield (
                    f"{advantage}={algorithm.advantage} compares the rollouts of a prompt; set "
                    f"rollout.group_size=2 or more, or {advantage}=reinforce_pp"
                )
            if algorithm.turn_discount is not None and not generator.is_harness:
                owner = "" if own.turn_discount is None else f"{key}."
                yield f"{owner}algorithm.turn_discount is for agents, and {key} has no `generator`; remove it"

    def _filter_conflicts(self) -> Iterator[str]:
        why = ""
        if self.rollout.group_size == 1:
            why = "has one rollout of a prompt, and nothing to compare"
        # Equal rewards of turns may have unequal sums, and unequal ones equal sums.
        elif any(one.turn_discount is not None for one in self.all_algorithms):
            why = "compares no sums over turns"
        # The teacher judges every token.
        elif self.algorithm.distill_weight > 0:
            why = "drops groups to learn from"
        part = self.buffer.filter_part
        shown = self.buffer.filter if part is None else f"{{part: {part}}}"
        if why and shown != "none":
            yield f"buffer.filter={shown} {why}; set buffer.filter=none"

    def _limit_conflicts(self) -> Iterator[str]:
        for owner, (task, generator) in self.players.items():
            key = f"{owner}.limits"
            limits = task.limits
            num_tokens = limits.max_tokens or self.rollout.max_tokens
            if num_tokens > self.rollout.max_tokens:
                yield (
                    f"{key}.max_tokens={num_tokens} is above rollout.max_tokens={self.rollout.max_tokens}; "
                    f"lower it, or raise rollout.max_tokens"
                )
            # The penalty begins below one length, and would begin too late for the task.
            is_penalized = self.algorithm.overlong_tokens > 0 and not owner.startswith(
                "eval"
            )
            if limits.max_tokens is not None and is_penalized:
                yield f"{key}.max_tokens does not go with algorithm.overlong_tokens; remove one of them"
            of_calls = limits.given("max_calls", "max_rollout_tokens")
            if of_calls and not generator.is_harness:
                yield f"{key}.{of_calls[0]} is for agents, and the task has no `generator`; remove it"

    def _critic_conflicts(self) -> Iterator[str]:
        advantage = self.algorithm.advantage
        if self.algorithm.needs_critic != (self.critic is not None):
            yield (
                f"algorithm.advantage={advantage} and critic do not agree; "
                "set both algorithm.advantage=gae and critic={}, or remove both"
            )
        if self.critic is None:
            return
        warmup = self.critic.warmup_steps
        if warmup >= (num_steps := self.trainer.num_steps):
            yield (
                f"critic.warmup_steps={warmup} leaves the policy no step of trainer.num_steps={num_steps}; "
                "lower it"
            )

    def _distill_conflicts(self) -> Iterator[str]:
        weight = self.algorithm.distill_weight
        is_taught = TEACHER in all_of("columns", self)
        # A teacher with weight 0 would hold a device for nothing, and a weight needs
        # its logprobs.
        if is_taught != (weight > 0):
            yield "set both teacher.path and algorithm.distill_weight above 0, or neither"
        # The teacher scores over the whole vocabulary, so its logprobs do not compare
        # with logprobs of a support.
        if weight > 0 and self.rollout.sampling.is_cut:
            yield (
                f"algorithm.distill_weight={weight} compares with a teacher over the whole vocabulary; set "
                "rollout.top_p=1, rollout.top_k=0 and rollout.min_p=0"
            )

    def _task_conflicts(self) -> Iterator[str]:
        tasks = self.tasks
        # The missing shares have no obvious value: 1, or the rest up to 1?
        num_given = sum(task.share is not None for task in tasks.values())
        if num_given not in (0, len(tasks)):
            yield f"task.share is given for {num_given} of {len(tasks)} tasks; give it for all, or for none"
            return
        # The order of tasks is written down for one cycle, and a short run would see
        # only its beginning.
        if (cycle := sum(self.shares.values())) > MAX_CYCLE:
            yield (
                f"task.share of all tasks repeat after {cycle} prompts, {MAX_CYCLE} at most; give fewer "
                "digits"
            )

    def _posted_conflicts(self) -> Iterator[str]:
        is_later = any(each.outcomes == "later" for each in self.harnesses)
        if is_later and self.harnesses != [self.generator]:
            yield (
                "generator.outcomes=later is for one program; write it as `generator` of the run, and remove "
                "task.generator"
            )
        for name, task in self.tasks.items():
            if self.generators[name].outcomes == "later" and task.reward is not None:
                key = f"{key_of('task', name)}.reward"
                yield f"generator.outcomes=later takes only posted rewards; remove {key}"

    def _generator_conflicts(self) -> Iterator[str]:
        generator = self.generator
        # A remote worker has one harness, and runs every item that it gets.
        if generator.remote and len(self.harnesses) > 1:
            yield "generator.remote runs one harness; remove task.generator, or let the run start its workers"
        is_used = any(task.generator is None for task in self.all_tasks)
        if generator.is_harness and not is_used:
            yield "generator has no use, because every task has its own; remove it"
        for key, (task, player) in self.players.items():
            # Nobody posts rewards later for evaluations.
            is_unpaid = player.outcomes == "later" and key.startswith("eval")
            if not task.has_score and (is_unpaid or not player.brings_reward):
                yield f"{key}.reward is missing; set {key}.reward=math, or to module:function"

    def _role_conflicts(self) -> Iterator[str]:
        if self.trainer.roles is None:
            return
        for key, (_, player) in self.players.items():
            if not player.is_harness:
                yield f"trainer.roles is for agents, and {key} has no `generator`; remove trainer.roles"
        if self.rollout.engine != "embedded":
            yield (
                f"rollout.engine={self.rollout.engine} serves one policy, not trainer.roles; set "
                "rollout.engine=embedded, or remove trainer.roles"
            )
        if self.critic is not None:
            yield "critic values the tokens of one policy, not of trainer.roles; set algorithm.advantage=grpo"


def key_of(section: str, name: str) -> str:
    """Return `task`, or `task.sums` if there are several."""
    return f"{section}.{name}" if name else section


def _by_name(section: str, written: T | list[T]) -> dict[str, T]:
    given = written if isinstance(written, list) else [written]
    # A single task keeps the empty name, so that prompt ids and metrics of simple runs
    # have no prefix.
    found = {one.called if len(given) > 1 else "": one for one in given}
    if len(found) < len(given):
        names = [one.called for one in given]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(
            f"two of `{section}` are called {twice}; give each a different {section}.name"
        )
    return found
