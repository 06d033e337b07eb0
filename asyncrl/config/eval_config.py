"""Section `eval`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import (
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
)

from asyncrl.config.fields import (
    Count,
    Fraction,
    Name,
    OneOrSeveral,
    OnlyWith,
    PositiveFraction,
    SampledConfig,
)
from asyncrl.config.task_config import TaskConfig

EVAL_SEED = 2**30
"""Seed of evaluations, unlike the run's seed."""


PARTS_OF_EVALS = ("task", "failure", "part")
"""Of the metrics eval/PART/NAME; no evaluation has such a name."""
NOT_EVALUATED = ("name", "share", "sampling", "algorithm")


class EvalConfig(SampledConfig):
    """A held-out task, sampled at one version. A list of sections gives several
    evaluations.
    """

    name: Name | None = None
    """Name in metrics, and task.name of a harness (none = from its task's source)."""
    task: TaskConfig
    """Prompts, rewards, generator and limits, like the section `task`, in file order."""
    every: Count = 20
    """Evaluate after multiples of this number of steps, and the last version."""
    at_start: bool = True
    """Also evaluate the initial weights."""
    engine: Literal["auto", "own", "rollout"] = "auto"
    """own: a separate engine server. rollout: the rollout engines, which get no new
    weights until the evaluation ends. auto = own on placement.eval, a free CUDA device,
    or the CPU if the rollout engines use it or the machine has no CUDA device; else
    rollout.
    """
    num_prompts: Count = 64
    """Prompts per evaluation, from the task's first."""
    samples: Annotated[Count, OnlyWith("temperature")] = 1
    """Completions per prompt."""
    temperature: NonNegativeFloat = 0.0
    """Sampling temperature (0 = greedy)."""
    top_p: Annotated[PositiveFraction, OnlyWith("temperature")] = 1.0
    """Sample from the likeliest tokens, up to this total probability (1 = all)."""
    top_k: Annotated[NonNegativeInt, OnlyWith("temperature")] = 0
    """Sample from this number of likeliest tokens (0 = all)."""
    min_p: Annotated[Fraction, OnlyWith("temperature")] = 0.0
    """Sample from tokens with at least this share of the likeliest token's probability
    (0 = all).
    """
    slots: Count = 32
    """Samples that are decoded at once."""
    timeout_s: PositiveFloat = 1800.0
    """Timeout for one evaluation, in seconds. On expiry it is abandoned and reported.
    """

    @property
    def called(self) -> str:
        return self.name or self.task.called

    def conflicts(self) -> Iterator[str]:
        # Each evaluation samples the same prompts, the first ones in file order, or its
        # curve would mean nothing. Its name is eval.name.
        for key in self.task.given(*NOT_EVALUATED):
            yield f".task.{key} is not for evaluations; remove it"
        if self.called in PARTS_OF_EVALS:
            yield f"an evaluation cannot be called {self.called}; set .name to another name"


Evals = OneOrSeveral[EvalConfig]
