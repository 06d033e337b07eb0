"""Section `task`."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import PurePath
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, TypeAlias, Union

from pydantic import (
    Discriminator,
    Field,
    PositiveFloat,
    PositiveInt,
    Strict,
    Tag,
)

from asyncrl.base.extensions import load_place, rows
from asyncrl.config.extended import extended
from asyncrl.config.fields import (
    Count,
    Fraction,
    FrozenConfig,
    Name,
    OneOrSeveral,
    ScoredReward,
)
from asyncrl.config.generator_config import GeneratorConfig
from asyncrl.messages.records import Number, SessionRules

ADDED_SOURCES: Mapping[str, str] = rows("task_sources")
"""Sources of extensions."""
SCORING = ("python", "reasoning_gym")
"""Sources whose tasks have a score function."""
SOURCES = ("python", "files", "dataset", "reasoning_gym", *ADDED_SOURCES)
_FORMS: Mapping[str, type[ScoredReward]] = {
    name: load_place(kind.form) for name, kind in rows("rewards").items()
} or {"none": ScoredReward}


def _form_of(reward: object) -> str:
    if isinstance(reward, ScoredReward):
        return f"[{reward.kind}]"
    if isinstance(reward, list):
        return "[list]"
    if not isinstance(reward, dict):
        return "[text]"
    # A section with an unknown key gets the errors of the first form.
    known = [name for name in _FORMS if name in reward] or [*_FORMS][:1]
    return f"[{known[-1]}]"


if TYPE_CHECKING:
    RewardSource: TypeAlias = str | list[str] | ScoredReward
else:
    _tagged = (Annotated[form, Tag(f"[{name}]")] for name, form in _FORMS.items())
    RewardSource = Annotated[
        Union[
            Annotated[str, Tag("[text]")],
            Annotated[list[str], Field(min_length=1), Tag("[list]")],
            *_tagged,
        ],
        Discriminator(_form_of),
    ]


class TaskLimits(FrozenConfig):
    """Limits of a task's rollouts (none = the run's). All tasks have the run's sampling
    parameters, because the trainer computes logprobs with one set.
    """

    timeout_s: PositiveFloat | None = None
    """Instead of rollout.timeout_s."""
    max_tokens: PositiveInt | None = None
    """Instead of rollout.max_tokens, and not above it."""
    max_calls: PositiveInt | None = None
    """Instead of gateway.max_calls."""
    max_rollout_tokens: PositiveInt | None = None
    """Instead of gateway.max_rollout_tokens."""

    @property
    def rules_of_session(self) -> SessionRules:
        return SessionRules(self.max_tokens, self.max_calls, self.max_rollout_tokens)


class TaskAlgorithm(FrozenConfig):
    """Advantages of a task's rollouts (none = as in `algorithm`). All tasks have the
    run's loss, because an optimizer step has one.
    """

    advantage: str | None = None
    """Instead of algorithm.advantage; over this task's samples in the batch."""
    turn_discount: Fraction | None = None
    """Instead of algorithm.turn_discount."""
    weight: float = Field(default=1.0, gt=0, le=1e6)
    """Factor of this task's advantages in the loss."""


class HeldOutPart(FrozenConfig):
    """Rows that are held out of training, for evaluations."""

    eval: float = Field(gt=0, lt=1)
    """Expected fraction of the rows. A row's side follows from a hash of its prompt."""


@extended("task")
class TaskConfig(FrozenConfig):
    """Prompts and rewards, by `python`, `files`, `dataset`, `reasoning_gym` or
    `verifiers`. A list of sections gives several tasks.
    """

    free_keys: ClassVar = (
        "reward_pool",
        "reward_workers",
        "reward_timeout_s",
    )

    name: Name | None = None
    """Task name in prompt ids, metrics and overrides (none = from its source)."""
    share: PositiveFloat | None = None
    """Share of the prompts, relative to the other tasks (none = equal shares)."""
    python: str | None = None
    """`module:Class` of a custom task, built with `args` and the run's seed."""
    files: list[str] | None = None
    """JSONL or parquet files, one prompt per row."""
    dataset: str | None = None
    """Hugging Face dataset: hub id or folder."""
    split: str | HeldOutPart = "train"
    """Split of `dataset`. {eval: 0.1} holds out this part of the rows of `files` or of
    the split `train`; an evaluation without a task samples its prompts.
    """
    reasoning_gym: str | None = None
    """Name of a reasoning-gym task, with settings `args` and number of prompts `size`.
    """
    generator: GeneratorConfig | None = None
    """Program of this task's rollouts, on the run's workers (none = `generator` of the
    run; `{}` = one completion).
    """
    limits: TaskLimits = TaskLimits()
    """Limits of this task's rollouts."""
    algorithm: TaskAlgorithm = TaskAlgorithm()
    """Advantages of this task's rollouts."""
    size: int = Field(default=1000, ge=1, le=10**7)
    """Number of prompts of a generated task (python, reasoning_gym, endless verifiers
    environments).
    """
    args: dict[str, object] = {}
    """Settings of the task itself, passed unchanged; of a verifiers environment, fields
    of its taskset, over generator.args.taskset.
    """
    prompt_column: str = "prompt"
    """Column with the prompt: a text, or a list of chat messages."""
    answer_column: str | None = "answer"
    """Column with the reference answer for the reward function (none = no such column).
    """
    reward: RewardSource | None = None
    """`module:function` with (prompt, completion, answer) -> float, or with (prompt,
    completions, answer) -> list for whole groups; `math` for math-verify; a `judge`; or
    a reward `model`. A list of functions, or a function that returns a mapping, gives
    parts, which are summed. Not for python, reasoning_gym and verifiers, which score
    themselves.
    """
    # Strict: to a mapping with texts as keys, true would be the number 1.
    reward_weights: dict[str, Annotated[Number, Strict()]] = {}
    """Weights of the reward's parts by name, for example {exact: 1, form: 0.2} (absent =
    the part's own, else 1).
    """
    system_prompt: str | None = None
    """System message before every prompt (none = no system message)."""
    shuffle: bool = True
    """Shuffle by seed, differently each epoch (false = file order)."""
    sampling: Literal["uniform", "by_difficulty"] = "uniform"
    """uniform: each prompt once per epoch. by_difficulty: after the first epoch, mostly
    skip prompts with only right or only wrong answers.
    """
    reward_pool: Literal["auto", "inline", "thread", "process"] = "auto"
    """Execution of the reward function: inline on the event loop, in threads, or in
    processes, which can be killed (auto = process for `math`, else thread).
    """
    reward_workers: Count = 4
    """Rewards computed at once in `thread` and `process`."""
    special_tokens: Literal["visible", "stripped"] = "visible"
    """Special tokens in sampled answers. visible: as text, such as <unk>, except the
    end-of-turn token. stripped: removed; hidden tokens can collect reward.
    """
    reward_timeout_s: PositiveFloat = 30.0
    """Timeout for a reward, in seconds. On expiry the rollout fails."""

    @property
    def source(self) -> str:
        """Return the name of the setting that gives the prompts. '': none, in a config
        of a run whose extension is not installed.
        """
        return next(iter(self.given(*SOURCES)), "")

    @property
    def held_out_fraction(self) -> float:
        return 0.0 if isinstance(self.split, str) else self.split.eval

    @property
    def held_out_rows(self) -> str:
        """Return the settings that choose the held-out rows."""
        keys = {"files", "dataset", "args", "prompt_column", "split"}
        return self.model_dump_json(include=keys)

    @property
    def split_of_dataset(self) -> str:
        return self.split if isinstance(self.split, str) else "train"

    @property
    def has_score(self) -> bool:
        return self.reward is not None or self.source in SCORING

    @property
    def scored_by(self) -> ScoredReward | None:
        """Return the section of an extension's reward; None: a function, or no reward."""
        return self.reward if isinstance(self.reward, ScoredReward) else None

    @property
    def uses_math(self) -> bool:
        return "math" in self.functions

    @property
    def functions(self) -> list[str]:
        """Return the names of reward functions."""
        if isinstance(self.reward, str):
            return [self.reward]
        return self.reward if isinstance(self.reward, list) else []

    @property
    def reward_name(self) -> str:
        """Name of the reward in errors."""
        if self.scored_by is not None:
            return f"{self.scored_by.title} {self.scored_by.called}"
        return f"the reward function {', '.join(self.functions) or self.python}"

    @property
    def called(self) -> str:
        if self.name is not None:
            return self.name
        path = PurePath(self.dataset or (self.files or [self.source])[0])
        source = (self.python or "").rpartition(":")[2] or self.reasoning_gym
        source = source or (path.stem if self.dataset is None else path.name)
        # The name becomes part of prompt ids and metrics, where / separates parts.
        name = re.sub(r"[^A-Za-z0-9_-]+", "-", source).strip("-")[:60]
        return name if name[:1].isalpha() else f"task-{name}"

    def conflicts(self) -> Iterator[str]:
        generator = self.generator or GeneratorConfig()
        for key in generator.given("remote", "workers", "worker_python", "concurrency"):
            yield (
                f".generator.{key} cannot differ between tasks, which share the run's workers; remove it, "
                "and set it in `generator` of the run"
            )
        sources = self.given(*SOURCES)
        if len(sources) != 1:
            given = ", ".join(sources) or "none"
            yield f"give exactly one of .{', .'.join(SOURCES)} (given: {given})"
        if self.held_out_fraction and not (self.files or self.dataset):
            yield f".split={{eval: {self.held_out_fraction}}} is for rows of .files or .dataset; remove it"
        if self.given("split") and not (self.held_out_fraction or self.dataset):
            yield f".split={self.split} is for .dataset; remove it, or name other files"
        if self.answer_column == self.prompt_column:
            yield (
                f".answer_column={self.answer_column} is the prompt column, too; set .answer_column=none, "
                "or name another"
            )
        if self.reward_pool != "auto" and self.scored_by is not None:
            kind = self.scored_by.kind
            yield f".reward_pool is for functions, not for a {kind}; remove it"
        if self.source not in ("files", "dataset") and self.reward is not None:
            yield f".reward is set, but a {sources[0]} task scores itself; remove it"
        names = [part_name(function) for function in self.functions]
        if len(set(names)) < len(names):
            yield f".reward names two parts {', '.join(names)}; give functions of different names"


def part_name(function: str) -> str:
    """Return the name of the part that a function of a list gives: its own."""
    return function.rpartition(":")[2]


Tasks = OneOrSeveral[TaskConfig]
